"""Fine-tunes a ranker: builds its examples, negatives, objective and validation from the settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.artifact import Artifact, corpora_of, corpora_read_for
from pipeline.config import require
from pipeline.evaluation.questions import validation_questions
from pipeline.models.ranker import Ranker, new_ranker
from pipeline.models.settings import RankerConfig
from pipeline.models.sources import Source, Tower
from pipeline.models.transformer import Encoder, freeze, set_dropout, shorten
from pipeline.training.caching import backward, cached_backward
from pipeline.training.data import (
    TEACHER_COLUMNS,
    Batches,
    DualCollator,
    PairCollator,
    Rows,
    example_columns,
    has_values,
    teacher_dimensions,
)
from pipeline.training.loop import Task
from pipeline.training.negatives import Miner
from pipeline.training.objectives import (
    DualModule,
    Objective,
    PairModule,
)
from pipeline.training.optimization import optimization
from pipeline.training.settings import FinetuneConfig, LoopConfig
from pipeline.training.validation import Validation


@dataclass(kw_only=True)
class FinetuneTask(Task):
    """One rank's part of fine-tuning a ranker."""

    ranker: Ranker

    @property
    def validated(self) -> tuple[int, dict[str, int]]:
        """How many examples of valid/ a validation ranks, and how many it leaves out, by reason."""
        if not isinstance(self.validation, Validation):
            return 0, {}
        return len(self.validation.questions), dict(self.validation.questions.left_out)


@dataclass(frozen=True)
class Finetuning:
    """Everything that a worker needs to build its task."""

    corpus: Artifact
    encoder: Source
    ranker: RankerConfig
    finetune: FinetuneConfig
    loop: LoopConfig

    def held_out(self) -> list[str]:
        """The files of train that are not read. Raises BadInput if the fold has no files."""
        paths, folds = self.corpus.paths("train/", ".parquet"), self.finetune.folds
        require(folds == 1 or folds <= len(paths), "finetune.folds", folds,
                f"1 to {len(paths)}, the files of {self.corpus.uri}/train")  # fmt: skip
        return paths[self.finetune.held_out :: folds] if folds > 1 else []

    def unseen(self) -> list[str]:
        """The held-out files that the model which this one starts from has not read, either. What a model
        of others has read is unknown: it counts as unread."""
        held_out = self.held_out()
        start = self.encoder.ranker if isinstance(self.encoder, Tower) else self.encoder
        if isinstance(start, Artifact) and corpora_read_for(start) & corpora_of(self.corpus):
            return [path for path in held_out if path in start.manifest.get("held_out", ())]
        return held_out

    def build(self, rank: int, world: int) -> FinetuneTask:
        """Raises BadInput for settings that do not fit the encoder or the corpus."""
        batch_examples = self.finetune.batch_examples
        require(batch_examples >= world, "finetune.batch_examples", batch_examples,
                f"at least the {world} workers")  # fmt: skip
        self._check_teacher()
        ranker = new_ranker(self.ranker, self.encoder.local(), self.loop.seed)
        ranker.precision = self.loop.precision  # of validation and mining, as of training
        network = ranker.network
        encoders = [part for part in network.modules() if isinstance(part, Encoder)]
        self._check_encoders(encoders)
        for part in encoders:
            if self.finetune.keep_layers:
                shorten(part, self.finetune.keep_layers)
            freeze(part, self.finetune.train_layers)
        if self.finetune.dropout is not None:
            set_dropout(network, self.finetune.dropout)
        miner = self._miner(ranker, rank, world)
        module, collator = self._objective(ranker, miner)
        batches = Batches(self._rows(collator.columns, rank, world), collator, batch_examples)
        steps = self._steps(batches.steps_per_epoch, miner)
        chunk = self.finetune.chunk_examples

        return FinetuneTask(
            ranker=ranker,
            module=module,
            batches=batches,
            steps=steps,
            optimize=lambda: optimization(
                self.loop, module, steps, network.new_weights, network.token_tables
            ),
            save=ranker.save,
            backward=cached_backward(module, chunk) if 0 < chunk < batches.examples else backward,
            validation=self._validation(ranker, rank, world),
            miner=miner,
            before_step=network.before_step,
            work=lambda batch: {"samples": float(len(batch))},
        )

    def _rows(self, columns: Sequence[str], rank: int, world: int) -> Rows:
        return Rows.of(self.corpus, "train", columns, rank, world, self.loop.seed, self.held_out())

    def _miner(self, ranker: Ranker, rank: int, world: int) -> Miner | None:
        config = self.finetune
        require(ranker.config.has_vectors or config.negatives_from in ("batch", "given"),
                "finetune.negatives_from", config.negatives_from,
                f"'batch' or 'given' with ranker.architecture {ranker.config.architecture!r}, which takes "
                "given ones; jobs.score_candidates --teaching.hardest-of gives some")  # fmt: skip
        if config.negatives_from != "mined":
            return None
        rows = self._rows(example_columns(config.same_group_negatives), 0, 1)
        steps = round(config.mine.every_epochs * len(rows) / config.batch_examples)
        return Miner(
            ranker, rows, config.mine, max(1, steps), rank, world, config.same_group_negatives
        )

    def _objective(self, ranker: Ranker, miner: Miner | None) -> tuple[Objective, Any]:
        """The objective, and the collator of its batches."""
        config = self.finetune
        distill = config.distill
        teacher = TEACHER_COLUMNS[distill.over] if distill.loss != "none" else ()
        if not ranker.config.has_vectors:
            require(not config.label_smoothing, "finetune.label_smoothing", config.label_smoothing,
                    f"0 with ranker.architecture {ranker.config.architecture!r}")  # fmt: skip
            require(not config.share_negatives, "finetune.share_negatives", True,
                    f"false with ranker.architecture {ranker.config.architecture!r}, which would score "
                    "every pair")  # fmt: skip
        from_corpus = config.negatives_from in ("given", "both")
        require(not from_corpus or has_values(self.corpus, "candidates"), "finetune.negatives_from",
                config.negatives_from,
                f"'batch', as {self.corpus.uri} gives no candidates in train/")  # fmt: skip
        if not ranker.config.has_vectors:
            return PairModule(ranker.cross, distill), PairCollator(
                ranker, config.negatives, teacher, same_group_negatives=config.same_group_negatives
            )
        if distill.loss == "cosine":
            teacher_width, ranker_width = teacher_dimensions(self.corpus), ranker.dual.dimensions
            require(teacher_width == ranker_width, "finetune.distill.loss", distill.loss,
                    f"kl, margin_mse, as the teacher's vectors have {teacher_width} numbers and the "
                    f"ranker's {ranker_width}")  # fmt: skip
        negatives = 0 if config.negatives_from == "batch" else config.negatives
        module = DualModule(
            ranker.dual,
            config.negatives_from,
            distill,
            config.share_negatives,
            config.label_smoothing,
        )
        mined = miner.negatives_of if miner else None
        return module, DualCollator(ranker, negatives, teacher, mined, config.same_group_negatives)

    def _check_encoders(self, encoders: Sequence[Encoder]) -> None:
        """Raises BadInput for settings of a pre-trained encoder if the ranker has no such encoder."""
        config, kind = self.finetune, self.ranker.architecture
        for name, value, default in (
            ("keep_layers", config.keep_layers, 0),
            ("train_layers", config.train_layers, "all"),
            ("dropout", config.dropout, None),
        ):
            require(bool(encoders) or value == default, f"finetune.{name}", value,
                    f"{default!r} with ranker.architecture {kind!r}")  # fmt: skip

    def _check_teacher(self) -> None:
        """Raises BadInput for a distillation loss that would get no scores of a teacher."""
        config, distill = self.finetune, self.finetune.distill
        if distill.loss == "none":
            return
        if distill.loss == "cosine":
            require(self.ranker.has_vectors, "finetune.distill.loss", distill.loss,
                    f"kl, margin_mse with ranker.architecture {self.ranker.architecture!r}")  # fmt: skip
            count = self.ranker.vectors_per_context
            require(count == 1, "finetune.distill.loss", distill.loss,
                    f"kl, margin_mse, as a context has {count} vectors")  # fmt: skip
            require(distill.over == "batch", "finetune.distill.over", distill.over,
                    "batch with finetune.distill.loss 'cosine'")  # fmt: skip
        if self.ranker.has_vectors:
            unused_by = {"candidates": ("batch", "mined"), "batch": ("given",)}[distill.over]
            require(config.negatives_from not in unused_by, "finetune.distill.loss", distill.loss,
                    f"'none', with finetune.negatives_from {config.negatives_from!r} and "
                    f"finetune.distill.over {distill.over!r}")  # fmt: skip
        else:
            require(distill.over == "candidates", "finetune.distill.over", distill.over,
                    f"candidates with ranker.architecture {self.ranker.architecture!r}")  # fmt: skip
        require(has_values(self.corpus, TEACHER_COLUMNS[distill.over][0]), "finetune.distill.loss",
                distill.loss, f"'none', as {self.corpus.uri} has nothing of jobs.score_candidates "
                f"--teaching.over {distill.over}")  # fmt: skip

    def _validation(self, ranker: Ranker, rank: int, world: int) -> Validation | None:
        config = self.finetune
        if not self.corpus.rows("valid/"):
            return None
        questions = validation_questions(
            self.corpus, "valid", config.valid_candidates, config.valid_examples, self.loop.seed
        )
        return Validation(ranker, questions, rank, world) if len(questions) else None

    def _steps(self, per_epoch: int, miner: Miner | None) -> int:
        """Steps of the whole run. Raises BadInput for a run that ends before it mines."""
        steps = round(self.finetune.epochs * per_epoch)
        if self.finetune.epochs:  # half an epoch of one batch would round to none
            steps = max(steps, 1)
        steps = min(steps, self.finetune.max_steps or steps)
        if miner is not None:
            every_epochs = self.finetune.mine.every_epochs
            require(miner.every_steps < steps, "finetune.mine.every_epochs", every_epochs,
                    f"less: it is {miner.every_steps} steps, and the run has {steps}")  # fmt: skip
        return steps

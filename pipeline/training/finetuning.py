"""Fine-tunes a ranker: builds its examples, negatives, objective and validation from the settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pipeline.artifact import Artifact, corpora_of, corpora_read_for
from pipeline.config import require
from pipeline.evaluation.questions import Questions, validation_questions
from pipeline.evaluation.ranking import RankerScorer, rank
from pipeline.models import interop
from pipeline.models.encoder import (
    Encoder,
    add_adapters,
    freeze,
    merge_adapters,
    set_dropout,
    shorten,
)
from pipeline.models.ranker import Ranker, new_ranker
from pipeline.models.settings import RankerConfig
from pipeline.models.sources import Source, Tower
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
from pipeline.training.guide import Guide
from pipeline.training.loop import Measured, Task, optimization, reduce_over_ranks
from pipeline.training.negatives import Miner
from pipeline.training.objectives import (
    DualModule,
    Objective,
    PairModule,
    backward,
    cached_backward,
    guided,
)
from pipeline.training.settings import FinetuneConfig, LoopConfig

# Settings that change an encoder, and their values that change nothing. ConveRT has no such encoder.
_ENCODER_SETTINGS = {"keep_layers": 0, "train_layers": "all", "lora_rank": 0, "dropout": None}


class Validation:
    """How often the ranker in training puts the right candidate first (R@1), and its loss.

    The questions and the scores are those of evaluation; the loss scales the scores as the loss of training
    does. The questions are the same at every validation, and the ranks share them.
    """

    def __init__(self, ranker: Ranker, questions: Questions, rank: int, world: int) -> None:
        self.questions = questions
        self._ranker = ranker
        self._rank_questions = questions.part(np.arange(rank, len(questions), world))

    def __call__(self) -> Measured:
        """R@1 and the loss; a collective call. Leaves the ranker in evaluation mode.

        r1: share of the contexts whose right candidate scores above all others; a tie is none. loss: mean
        cross-entropy of the right candidate, in nats.
        """
        self._ranker.eval()
        sums = [0.0, 0.0, float(len(self._rank_questions))]
        if len(self._rank_questions):
            scorer = RankerScorer(self._ranker, as_in_loss=True)
            ranking = rank(scorer.prepare(self._rank_questions), self._rank_questions)
            sums[:2] = [float((ranking.ranks_N == 1).sum()), float(ranking.losses_N.sum())]
        total = torch.tensor(sums, dtype=torch.float64, device=self._ranker.device)
        hits, loss_sum, count = reduce_over_ranks(total).tolist()
        r1, loss = hits / count, loss_sum / count
        return Measured({"r1": r1, "loss": loss}, (r1, -loss))


@dataclass(kw_only=True)
class FinetuneTask(Task):
    """One rank's part of fine-tuning a ranker."""

    ranker: Ranker
    parameters: int
    """Numbers in the ranker that is saved."""

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
    guide: Source | None = None
    """A model that gives texts vectors, and names false negatives."""

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
        config, loop = self.finetune, self.loop
        self._check(world)
        ranker = new_ranker(self.ranker, self.encoder.local(), loop.seed)
        ranker.precision = loop.precision  # of validation and mining, as of training
        network = ranker.network
        encoders = self._fitted_encoders(network)
        parameters = sum(value.numel() for value in ranker.parameters())
        new_weights, adapted = list(network.new_weights), encoders if config.lora_rank else []
        for part in adapted:
            new_weights += add_adapters(part, config.lora_rank, config.lora_alpha)
        if config.dropout is not None:
            set_dropout(network, config.dropout)

        rows = Rows.of(self.corpus, "train", (), rank, world, loop.seed, self.held_out())
        miner = self._miner(ranker, rows) if config.negatives_from == "mined" else None
        guide = None
        if self.guide is not None:
            guide = Guide(interop.load(self.guide.local(), 0, 0), config.guide, loop.precision)
        module, collator = self._objective(ranker, miner, guide)
        rows = replace(rows, columns=tuple(collator.columns))
        batches = Batches(rows, collator, config.batch_examples)
        steps = config.steps_over(rows.total, batches.steps_per_epoch)
        if miner is not None:
            require(miner.every_steps < steps, "finetune.mine.every_epochs", config.mine.every_epochs,
                    f"less: it is {miner.every_steps} steps, and the run has {steps}")  # fmt: skip
        chunk = config.chunk_examples
        run = cached_backward(module, chunk) if 0 < chunk < batches.examples else backward

        def save(folder: Path) -> None:
            for part in adapted:
                merge_adapters(part)
            ranker.save(folder)

        return FinetuneTask(
            ranker=ranker,
            parameters=parameters,
            module=module,
            batches=batches,
            steps=steps,
            optimize=lambda: optimization(loop, module, steps, new_weights, network.token_tables),
            save=save,
            backward=guided(run, guide) if guide else run,
            validation=self._validation(ranker, rank, world),
            miner=miner,
            before_step=network.before_step,
            work=lambda batch: {"samples": float(len(batch))},
        )

    def _fitted_encoders(self, network: nn.Module) -> list[Encoder]:
        """The encoders of a network, with the layers that the settings keep, and train."""
        config = self.finetune
        encoders = [part for part in network.modules() if isinstance(part, Encoder)]
        for name, default in _ENCODER_SETTINGS.items():
            value = getattr(config, name)
            require(bool(encoders) or value == default, f"finetune.{name}", value,
                    f"{default!r} with ranker.architecture {self.ranker.architecture!r}")  # fmt: skip
        for part in encoders:
            if config.keep_layers:
                shorten(part, config.keep_layers)
            freeze(part, config.train_layers)
        return encoders

    def _miner(self, ranker: Ranker, rows: Rows) -> Miner:
        config, same_group = self.finetune, self.finetune.same_group_negatives
        every_steps = max(1, round(config.mine.every_epochs * rows.total / config.batch_examples))
        all_rows = replace(rows, columns=example_columns(same_group), rank=0, world=1)
        return Miner(ranker, all_rows, config.mine, every_steps, rows.rank, rows.world, same_group)

    def _objective(
        self, ranker: Ranker, miner: Miner | None, guide: Guide | None
    ) -> tuple[Objective[Any], DualCollator]:
        """The loss, and what makes its batches of rows."""
        config, distill = self.finetune, self.finetune.distill
        teacher = TEACHER_COLUMNS[distill.over] if distill.loss != "none" else ()
        same_group = config.same_group_negatives
        if not self.ranker.has_vectors:
            pairs = PairCollator(ranker, config.negatives, teacher, None, same_group, guide)
            return PairModule(ranker.cross, config, guide), pairs
        if distill.loss == "cosine":
            teacher_width, ranker_width = teacher_dimensions(self.corpus), ranker.dual.dimensions
            require(teacher_width == ranker_width, "finetune.distill.loss", distill.loss,
                    f"kl, margin_mse, as the teacher's vectors have {teacher_width} numbers and the "
                    f"ranker's {ranker_width}")  # fmt: skip
        negatives = 0 if config.negatives_from == "batch" else config.negatives
        mined = miner.negatives_of if miner else None
        collator = DualCollator(ranker, negatives, teacher, mined, same_group, guide)
        return DualModule(ranker.dual, config, guide), collator

    def _validation(self, ranker: Ranker, rank: int, world: int) -> Validation | None:
        """None: the corpus has no valid split, or none of its examples can be asked."""
        if not self.corpus.rows("valid/"):
            return None
        config = self.finetune
        questions = validation_questions(
            self.corpus, "valid", config.valid_candidates, config.valid_examples, self.loop.seed
        )
        return Validation(ranker, questions, rank, world) if len(questions) else None

    def _check(self, world: int) -> None:
        """Raises BadInput for settings that do not fit each other, the architecture or the corpus."""
        config, distill, ranker = self.finetune, self.finetune.distill, self.ranker
        architecture = f"ranker.architecture {ranker.architecture!r}"
        require(config.batch_examples >= world, "finetune.batch_examples", config.batch_examples,
                f"at least the {world} workers")  # fmt: skip
        if distill.loss == "cosine":
            require(ranker.has_vectors, "finetune.distill.loss", distill.loss,
                    f"kl, margin_mse with {architecture}")  # fmt: skip
            count = ranker.vectors_per_context
            require(count == 1, "finetune.distill.loss", distill.loss,
                    f"kl, margin_mse, as a context has {count} vectors")  # fmt: skip
            require(distill.over == "batch", "finetune.distill.over", distill.over,
                    "batch with finetune.distill.loss 'cosine'")  # fmt: skip
        if distill.loss != "none":
            unused_by = {"candidates": ("batch", "mined"), "batch": ("given",)}[distill.over]
            require(not ranker.has_vectors or config.negatives_from not in unused_by,
                    "finetune.distill.loss", distill.loss, "'none', with finetune.negatives_from "
                    f"{config.negatives_from!r} and finetune.distill.over {distill.over!r}")  # fmt: skip
            require(ranker.has_vectors or distill.over == "candidates", "finetune.distill.over",
                    distill.over, f"candidates with {architecture}")  # fmt: skip
            require(has_values(self.corpus, TEACHER_COLUMNS[distill.over][0]), "finetune.distill.loss",
                    distill.loss, f"'none', as {self.corpus.uri} has nothing of jobs.score_candidates "
                    f"--teaching.over {distill.over}")  # fmt: skip
        if not ranker.has_vectors:
            require(config.negatives_from in ("batch", "given"), "finetune.negatives_from",
                    config.negatives_from, f"'batch' or 'given' with {architecture}, which takes "
                    "given ones; jobs.score_candidates --teaching.hardest-of gives some")  # fmt: skip
            require(not config.label_smoothing, "finetune.label_smoothing", config.label_smoothing,
                    f"0 with {architecture}")  # fmt: skip
            require(not config.share_negatives, "finetune.share_negatives", True,
                    f"false with {architecture}, which would score every pair")  # fmt: skip
        from_corpus = config.negatives_from in ("given", "both")
        require(not from_corpus or has_values(self.corpus, "candidates"), "finetune.negatives_from",
                config.negatives_from,
                f"'batch', as {self.corpus.uri} gives no candidates in train/")  # fmt: skip

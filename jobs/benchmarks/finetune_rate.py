"""Our bi-encoder beside sentence-transformers', fine-tuned from the same encoder on the same pairs.

Both see each pair of the train split once (size small: 30 steps), in batches of 64 and the same
precision, with AdamW (fused), the recipe's rate, warm-up, lengths and dropout. Ours is
jobs.finetune with its recipe, but one encoder for both sides and 20 · cosine, as theirs has. Theirs is
`old_fit`, the library's own loop without other packages, with MultipleNegativesRankingLoss, batches
without duplicates, bf16 as the library's trainer does it, and contexts and responses apart (the default
pads the short to the long, which is slower here); once with its usual 20 · cosine and once with dot
products. jobs.evaluate's questions are put to all.
"""

from __future__ import annotations

import functools
import math
import random
import shutil
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from jobs import convert_model, evaluate, finetune
from jobs.benchmark import Config
from jobs.benchmarks.measure import BenchmarkRow, run_job
from jobs.benchmarks.paper import trials
from pipeline import storage
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import BadInput, parse, require
from pipeline.engine.resources import best_device
from pipeline.evaluation.ranking import load_scorer
from pipeline.evaluation.results import ScorerResult, compare_all
from pipeline.models.encoder import set_dropout
from pipeline.models.sources import open_encoder
from pipeline.training.loop import warmup_of

Precision = Literal["bf16", "fp32"]
_STEPS = {"small": 30, "full": 0}
_EXAMPLES = {"small": 500, "full": 100_000}


def measure(config: Config, work: Path) -> list[BenchmarkRow]:
    """Samples a second as a ratio for each precision, and R@1 of ours to the better of theirs.

    `only` has precisions. `overrides` has options of jobs.finetune; theirs follows where it has the like.
    """
    size, only = config.size, config.only or get_args(Precision)
    for name in only:
        require(name in get_args(Precision), "only", name, ", ".join(get_args(Precision)))
    if find_spec("sentence_transformers") is None:
        raise BadInput(
            "finetune: needs the package sentence-transformers; pip install -e '.[bench]'"
        )
    work = work / "finetune"
    shutil.rmtree(work, ignore_errors=True)
    options = ["--finetune.max-steps", str(_STEPS[size]), *config.overrides]
    about = (
        f"{_STEPS[size]} steps, the first ones included." if _STEPS[size] else "A whole training."
    )
    encoder = open_encoder(config.encoder[0])[0].local()
    corpus = open_artifact(config.corpus[0], "corpus")
    rows, results = [], list[ScorerResult]()
    for precision in get_args(Precision):
        if precision not in only:
            continue
        pair = _Pair(encoder, corpus, work, options, precision)
        ours, theirs = pair.train_ours(), pair.train_theirs("cosine")
        rows.append(
            BenchmarkRow(
                f"finetune.vs_sentence_transformers{'' if precision == 'bf16' else '_fp32'}",
                ours, "samples/s", peer=theirs, ratio=ours / theirs,
                detail={"precision": precision, "note": about},
            )
        )  # fmt: skip
        if not results:  # for one precision only
            pair.train_theirs("dot")
            results = [pair.result(name, _EXAMPLES[size]) for name in ("ours", "cosine", "dot")]
    rows.append(_quality(about, *results))
    return rows


def _quality(about: str, ours: ScorerResult, *theirs: ScorerResult) -> BenchmarkRow:
    """R@1 beside the better of theirs, and whether the two differ."""
    r1 = {result.name: next(iter(result.metrics.values())) for result in (ours, *theirs)}
    best = max(theirs, key=lambda result: r1[result.name])
    [difference] = compare_all((ours, best), seed=0)
    return BenchmarkRow(
        "finetune.quality_vs_sentence_transformers", r1[ours.name], "R@1", peer=r1[best.name],
        ratio=r1[ours.name] / r1[best.name],
        detail={
            "note": f"{len(ours.ranking.ranks_N):,} questions. {about}",
            "theirs": {result.name: r1[result.name] for result in theirs},
            "difference": difference.difference,
            "interval of the difference": difference.interval,
            "p": difference.p,
        },
    )  # fmt: skip


class _Pair:
    """The same training by both libraries."""

    def __init__(
        self,
        encoder: Path,
        corpus: Artifact,
        work: Path,
        options: Sequence[str],
        precision: Precision,
    ) -> None:
        self._encoder, self._corpus, self._work = encoder, corpus, work / precision
        self._task = trials.task_of(corpus)
        self._options = list(map(str, (
            *trials.recipe(self._task, "bi", "small"), "--corpus", corpus.uri, "--encoder",
            encoder, "--output", self._work / "ours", "--loop.validate-every-epochs", 0,
            "--loop.precision", precision, "--ranker.share-towers", "true",
            "--ranker.vector-length", math.sqrt(20), *options,
        )))  # fmt: skip
        self._config = parse(finetune.Config, self._options, "jobs.finetune")

    def train_ours(self) -> float:
        """Samples a second, from the first step to the last."""
        run = run_job("finetune", *self._options)
        rate = float(run.summary["metrics"]["mean_steps_per_s"])
        return rate * self._config.finetune.batch_examples

    def train_theirs(self, similarity: Literal["cosine", "dot"]) -> float:
        """Samples a second of sentence-transformers; its model is converted to a ranker of ours."""
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.util import cos_sim, dot_score

        random.seed(0)
        torch.manual_seed(0)
        model = SentenceTransformer(str(self._encoder))
        if similarity == "dot":  # without a layer that makes vectors equally long
            model = SentenceTransformer(modules=[model[0], model[1]])
        model.max_seq_length = self._config.ranker.max_context_tokens
        model.tokenizer.truncation_side = "left"
        if self._config.finetune.dropout is not None:
            set_dropout(model, self._config.finetune.dropout)
        kind = (20.0, cos_sim) if similarity == "cosine" else (1.0, dot_score)
        seconds, samples = _fit(model, *kind, self._pairs(), self._config)
        folder = self._work / f"sentence-transformers-{similarity}"
        model.save(str(folder))
        convert_model.run(convert_model.Config(
            model=str(folder), output=str(self._work / similarity),
            max_context_tokens=self._config.ranker.max_context_tokens,
            max_candidate_tokens=self._config.ranker.max_candidate_tokens,
        ))  # fmt: skip
        return samples / seconds

    def result(self, name: str, examples: int) -> ScorerResult:
        """The evaluation of one of the models on the valid split."""
        uri = str(self._work / name)
        config = evaluate.Config(
            model=(uri,), corpus=self._corpus.uri, protocol=trials.protocol(self._task),
            max_examples=examples, latency_queries=0,
        )  # fmt: skip
        scorer = functools.partial(load_scorer, open_artifact(uri, "ranker"), name)
        return evaluate.measurement(config, self._corpus).of(name, scorer)

    def _pairs(self) -> list[list[str]]:
        """Contexts as ours has them, newest turn last, and responses."""
        pairs = []
        for uri in self._corpus.files("train/", ".parquet"):
            with storage.open_input(uri) as stream:
                table = pq.read_table(stream, columns=["context", "response"])
            pairs += [["\n".join(row["context"]), row["response"]] for row in table.to_pylist()]
        return pairs


def _fit(
    model: Any, scale: float, similarity: Any, pairs: list[list[str]], config: finetune.Config
) -> tuple[float, int]:
    """Trains a model of sentence-transformers; returns (seconds, pairs)."""
    from sentence_transformers.base.losses.merged_forward import column_merging_disabled
    from sentence_transformers.sentence_transformer.datasets import NoDuplicatesDataLoader
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.readers import InputExample

    batch = config.finetune.batch_examples
    loader = NoDuplicatesDataLoader([InputExample(texts=pair) for pair in pairs], batch)
    steps = config.finetune.max_steps or round(config.finetune.epochs * len(loader))
    loss = MultipleNegativesRankingLoss(model, scale, similarity)
    bf16 = config.loop.precision == "bf16"
    began = time.perf_counter()
    with column_merging_disabled():
        model.old_fit(
            [(loader, _Autocast(loss, best_device(), bf16))],
            steps_per_epoch=steps,
            warmup_steps=warmup_of(config.loop, steps),
            optimizer_params={"lr": config.loop.learning_rate, "fused": True},
            weight_decay=config.loop.weight_decay,
            max_grad_norm=config.loop.max_gradient_norm,
            show_progress_bar=False,
        )
    return time.perf_counter() - began, steps * batch


class _Autocast(nn.Module):
    """bf16 without the scaling of gradients, which fp16 needs and `old_fit` always does."""

    def __init__(self, loss: nn.Module, device: torch.device, enabled: bool) -> None:
        super().__init__()
        self.loss, self._device, self._enabled = loss, device, enabled

    def forward(self, features: Any, labels: Tensor) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._enabled):
            loss: Tensor = self.loss(features, labels)
        return loss

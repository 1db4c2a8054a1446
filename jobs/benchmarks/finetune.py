"""Our bi-encoder beside sentence-transformers', fine-tuned from the same encoder on the same pairs.

Both see each pair of the train split once (size small: 30 steps), in batches of 64 and the same
precision, with AdamW (fused), the recipe's rate, warm-up, lengths and dropout. Ours is
jobs.finetune with its recipe, but one encoder for both sides and 20 · cosine, as theirs has. Theirs is
`old_fit`, the library's own loop without other packages, with MultipleNegativesRankingLoss, batches
without duplicates, bf16 as the library's trainer does it, and contexts and responses apart (the default
pads the short to the long, which is slower here). jobs.evaluate's questions are put to both.
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

from jobs import evaluate
from jobs import finetune as finetune_job
from jobs.benchmark import Config
from jobs.benchmarks import paper
from jobs.benchmarks.measure import BenchmarkRow, run_job
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
    """Examples a second as a ratio for each precision, and R@1 of the first precision.

    `only` has precisions. `overrides` has options of jobs.finetune; theirs follows where it has the like.
    """
    size, only = config.size, config.only or get_args(Precision)
    for name in only:
        require(name in get_args(Precision), "only", name, ", ".join(get_args(Precision)))
    if find_spec("sentence_transformers") is None:
        raise BadInput("finetune: needs sentence-transformers; pip install -e '.[bench]'")
    work = work / "finetune"
    shutil.rmtree(work, ignore_errors=True)
    steps = _STEPS[size]
    about = f"{steps} steps, the first ones included." if steps else "A whole training."
    encoder = open_encoder(config.encoder[0])[0].local()
    corpus = open_artifact(config.corpus[0], "corpus")
    rows, precisions = list[BenchmarkRow](), [name for name in get_args(Precision) if name in only]
    for precision in precisions:
        settings, ours = train_ours("bi", corpus, encoder, work / precision / "ours", (
            "--loop.precision", precision, "--ranker.share-towers", "true",
            "--ranker.vector-length", math.sqrt(20), "--finetune.max-steps", steps,
            *config.overrides,
        ))  # fmt: skip
        theirs = _train_theirs(encoder, _pairs(corpus), settings, work / precision / "theirs")
        name = f"finetune.vs_sentence_transformers{'' if precision == 'bf16' else '_fp32'}"
        rows.append(BenchmarkRow.beside(name, ours, theirs, "examples/s", about))
    return [*rows, _quality(corpus, work / precisions[0], _EXAMPLES[size])]


def train_ours(
    architecture: str, corpus: Artifact, encoder: Path, output: Path, options: Sequence[object]
) -> tuple[finetune_job.Config, float]:
    """jobs.finetune with the small recipe of an architecture and further options, without validations: its
    settings, and its examples a second."""
    words = list(map(str, (
        *paper.recipe(paper.task_of(corpus), architecture, "small"), "--corpus", corpus.uri, "--encoder",
        encoder, "--output", output, "--loop.validate-every-epochs", 0, *options,
    )))  # fmt: skip
    settings = parse(finetune_job.Config, words, "jobs.finetune")
    steps_per_s = run_job("finetune", *words).summary["metrics"]["mean_steps_per_s"]
    return settings, float(steps_per_s) * settings.finetune.batch_examples


def _quality(corpus: Artifact, folder: Path, max_examples: int) -> BenchmarkRow:
    """R@1 of both on the valid split, and whether they differ."""

    def result(name: str) -> ScorerResult:
        uri = str(folder / name)
        protocol = paper.protocol(paper.task_of(corpus))
        config = evaluate.Config(model=(uri,), corpus=corpus.uri, protocol=protocol,
                                 max_examples=max_examples, latency_queries=0)  # fmt: skip
        scorer = functools.partial(load_scorer, open_artifact(uri, "ranker"), name)
        return evaluate.measurement(config, corpus).of(name, scorer)

    both = (result("ours"), result("theirs"))
    ours, theirs = (next(iter(one.metrics.values())) for one in both)
    [pair] = compare_all(both, seed=0)
    low, high = pair.interval
    note = (
        f"{len(both[0].ranking.ranks_N):,} questions; difference {pair.difference:.3f} "
        f"({low:.3f} to {high:.3f}), p = {pair.p:.2g}."
    )
    name = "finetune.quality_vs_sentence_transformers"
    return BenchmarkRow.beside(name, ours, theirs, next(iter(both[0].metrics)), note)


def _pairs(corpus: Artifact) -> list[list[str]]:
    """Contexts as ours has them, newest turn last, and responses."""
    pairs = []
    for uri in corpus.files("train/", ".parquet"):
        with storage.open_input(uri) as stream:
            table = pq.read_table(stream, columns=["context", "response"])
        pairs += [["\n".join(row["context"]), row["response"]] for row in table.to_pylist()]
    return pairs


def _train_theirs(
    encoder: Path, pairs: list[list[str]], config: finetune_job.Config, output: Path
) -> float:
    """Examples a second of sentence-transformers; its model is converted to the ranker `output`."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.losses.merged_forward import column_merging_disabled
    from sentence_transformers.sentence_transformer.datasets import NoDuplicatesDataLoader
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.readers import InputExample

    random.seed(0)
    torch.manual_seed(0)
    model = SentenceTransformer(str(encoder))
    model.max_seq_length = config.ranker.max_context_tokens
    model.tokenizer.truncation_side = "left"
    if config.finetune.dropout is not None:
        set_dropout(model, config.finetune.dropout)
    batch = config.finetune.batch_examples
    loader = NoDuplicatesDataLoader([InputExample(texts=pair) for pair in pairs], batch)
    steps = config.finetune.max_steps or round(
        config.finetune.epochs_over(len(pairs)) * len(loader)
    )
    bf16 = config.loop.precision == "bf16"
    loss = _Autocast(MultipleNegativesRankingLoss(model), best_device(), bf16)
    began = time.perf_counter()
    with column_merging_disabled():
        model.old_fit(
            [(loader, loss)],
            steps_per_epoch=steps,
            warmup_steps=warmup_of(config.loop, steps),
            optimizer_params={"lr": config.loop.learning_rate, "fused": True},
            weight_decay=config.loop.weight_decay,
            max_grad_norm=config.loop.max_gradient_norm,
            show_progress_bar=False,
        )
    seconds = time.perf_counter() - began
    model.save(f"{output}-files")
    run_job("convert_model", "--model", f"{output}-files", "--output", output,
            "--max-context-tokens", config.ranker.max_context_tokens,
            "--max-candidate-tokens", config.ranker.max_candidate_tokens)  # fmt: skip
    return steps * batch / seconds


class _Autocast(nn.Module):
    """bf16 without the scaling of gradients, which fp16 needs and `old_fit` always does."""

    def __init__(self, loss: nn.Module, device: torch.device, enabled: bool) -> None:
        super().__init__()
        self.loss, self._device, self._enabled = loss, device, enabled

    def forward(self, features: Any, labels: Tensor) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._enabled):
            loss: Tensor = self.loss(features, labels)
        return loss

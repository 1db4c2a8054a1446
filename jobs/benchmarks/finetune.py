"""Our bi-encoder beside sentence-transformers', fine-tuned from the same encoder on the same pairs.

Both see each pair of the train split once (size small: 30 steps), in batches of 64 and in bf16, with AdamW
(fused), the recipe's rate, warm-up, lengths and dropout. Ours is jobs.finetune with its recipe, but one
encoder for both sides and 20 · cosine, as theirs has. Theirs is `old_fit`, the library's own loop without
other packages, with MultipleNegativesRankingLoss, batches without duplicates, bf16 as the library's trainer
does it, and contexts and responses apart (the default pads the short to the long, which is slower here).
jobs.evaluate's questions are put to both.
"""

from __future__ import annotations

import math
import random
import shutil
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from jobs import finetune as finetune_job
from jobs.benchmark import Config
from jobs.benchmarks import inputs, paper
from jobs.benchmarks.measure import BenchmarkRow, run_job
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import BadInput, parse
from pipeline.engine.resources import best_device
from pipeline.models.encoder import set_dropout
from pipeline.models.sources import open_encoder
from pipeline.training.loop import warmup_of

_STEPS = {"small": 30, "full": 0}
_EXAMPLES = {"small": 500, "full": 100_000}


def measure(config: Config, work: Path) -> Iterator[BenchmarkRow]:
    """Examples a second, and R@1. `overrides` has options of jobs.finetune; theirs follows where it has the
    like."""
    if find_spec("sentence_transformers") is None:
        raise BadInput("finetune: needs sentence-transformers; pip install -e '.[bench]'")
    work = work / "finetune"
    shutil.rmtree(work, ignore_errors=True)
    steps = _STEPS[config.size]
    about = f"{steps} steps, the first ones included." if steps else "A whole training."
    encoder = open_encoder(config.encoder)[0].local()
    corpus = open_artifact(config.corpus[0], "corpus")
    options = list(map(str, (
        *paper.recipe(paper.task_of(corpus), "bi", "small"), "--corpus", corpus.uri, "--encoder", encoder,
        "--output", work / "ours", "--loop.validate-every-epochs", 0, "--loop.precision", "bf16",
        "--ranker.share-towers", "true", "--ranker.vector-length", math.sqrt(20),
        "--finetune.max-steps", steps, *config.overrides,
    )))  # fmt: skip
    settings = parse(finetune_job.Config, options, "jobs.finetune")
    steps_per_s = run_job("finetune", *options).summary["metrics"]["mean_steps_per_s"]
    ours = steps_per_s * settings.finetune.batch_examples
    theirs = _train_theirs(encoder, _pairs(corpus), settings, work / "theirs")
    name = "finetune.vs_sentence_transformers"
    yield BenchmarkRow.beside(name, ours, theirs, "examples/s", about)
    yield _quality(corpus, work, _EXAMPLES[config.size])


def _quality(corpus: Artifact, folder: Path, max_examples: int) -> BenchmarkRow:
    """R@1 of both on the valid split, and whether they differ, by jobs.evaluate."""
    said = run_job("evaluate", "--model", folder / "ours", folder / "theirs", "--corpus", corpus.uri,
                   "--protocol", paper.protocol(paper.task_of(corpus)), "--max-examples", max_examples,
                   "--baselines", "false", "--latency-queries", 0).summary  # fmt: skip
    (metric, ours), *_ = said["table"]["ours"].items()
    [pair] = said["comparisons"]
    low, high = pair["interval"]
    difference = f"{pair['difference']:.3f} ({low:.3f} to {high:.3f}), p = {pair['p']:.2g}"
    note = f"{said['examples']:,} questions; difference {difference}."
    name = "finetune.quality_vs_sentence_transformers"
    return BenchmarkRow.beside(name, ours, said["table"]["theirs"][metric], metric, note)


def _pairs(corpus: Artifact) -> list[list[str]]:
    """Contexts as ours has them, newest turn last, and responses."""
    rows = inputs.examples(corpus.files("train/", ".parquet"))
    return [["\n".join(row["context"]), row["response"]] for row in rows]


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
    epochs = config.finetune.epochs_over(len(pairs))
    steps = config.finetune.max_steps or round(epochs * len(loader))
    bf16 = config.loop.precision == "bf16"
    loss = MultipleNegativesRankingLoss(model)
    # bf16 needs no scaling of gradients, which `old_fit` always does for its own reduced precision, fp16.
    in_bf16 = torch.autocast(best_device().type, torch.bfloat16, enabled=bf16)
    loss.forward = in_bf16(loss.forward)
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

"""jobs.pretrain beside a bare PyTorch loop and beside the Trainer of `transformers`, on CPUs.

All sides train the same shape on the same tokens in the same precision, one thread a process. They run in
turn, some rounds; a rate is the median over the intervals of all rounds, the first half of each run left out.
The bare loop gets the very micro-batches of the job, from memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Literal

import torch

from jobs import cluster, prepare_corpus, tokenize_corpus, train_tokenizer
from jobs import pretrain as pretrain_job
from jobs.benchmark import Config
from jobs.benchmarks.measure import BenchmarkRow, run_job
from jobs.benchmarks.pretraining_peers import Arm, Rates, bare_loops, hf_trainer
from jobs.sample_data import sample
from pipeline import tracking
from pipeline.artifact import open_artifact
from pipeline.config import digest, parse
from pipeline.models.precision import resolve_precision
from pipeline.training.pretraining import Pretraining
from pipeline.training.settings import TOKENS, TokenizerConfig
from pipeline.training.tokenized_corpus import TokenizedCorpus

Size = Literal["small", "full"]

_SAMPLE = {"small": sample.Size(), "full": sample.Size(reddit_threads=40_000)}
_VOCABULARY = {"small": 2_000, "full": 30_000}
_SHAPE = {"small": (4, 256, 4), "full": (6, 384, 12)}  # full: all-MiniLM's
_STEPS, _STEPS_BESIDE_TRAINER = 40, 16  # the Trainer takes twice the time and more
_ROUNDS = {"small": 1, "full": 3}
_INTERVAL = 4  # steps of a rate, some 6 s
# The first half of each run is left out: until a process has touched all the memory that its longest
# batches need (2 GB, 15 to 20 steps), its pages are mapped and zeroed.
_LEFT_OUT = 0.5
# BERT's has 65,536: two workers exchange gradients eight times as often here.
_STEP_TOKENS = 8_192
_MICRO_BATCHES = 4  # of a step: two workers have two each, and four one


def measure(config: Config, work: Path) -> list[BenchmarkRow]:
    size, work = config.size, work / "pretrain"
    uri = tokens(size, config.corpus[0] if config.corpus else "", work)
    layers, width, heads = _SHAPE[size]
    options = list(map(str, (
        "--corpus", uri, "--shape.layers", layers, "--shape.width", width,
        "--shape.heads", heads,
        "--pretrain.batch-tokens", _STEP_TOKENS,
        "--pretrain.micro-batch-tokens", _STEP_TOKENS // _MICRO_BATCHES,
        "--loop.validate-every-steps", 0, "--loop.validate-every-epochs", 0,
        "--loop.log-every-steps", _INTERVAL, "--keep-training-state", "false",
        "--resources.cpus-per-worker", 1, *config.overrides,
    )))  # fmt: skip
    joint, two_workers = (
        _Side([*options, "--resources.workers", str(workers)], _STEPS, work) for workers in (1, 2)
    )
    mlm = _Side([*options, "--pretrain.objective", "mlm"], _STEPS_BESIDE_TRAINER, work)
    bare, theirs, bare_pair = Rates(), Rates(), Rates()
    has_trainer = find_spec("accelerate") is not None
    for _ in range(_ROUNDS[size]):
        joint.run()
        bare += steady_rates(bare_loops(joint.arm, 1))
        if has_trainer:
            mlm.run()
            theirs += steady_rates(hf_trainer(mlm.arm, mlm.tokens_per_step()))
        two_workers.run()
        bare_pair += steady_rates(bare_loops(two_workers.arm, 2))

    def about(steps: int) -> dict[str, object]:
        shape = f"{layers} layers of {width}, {joint.arm.precision}"
        rounds = f"{_ROUNDS[size]} rounds of {steps} steps, the second half of each"
        return {"note": f"{shape}; {rounds}."}

    detail = about(joint.config.pretrain.steps)
    rows = [
        _row("pretrain.vs_bare_loop", joint.rates, bare, detail),
        _row("pretrain.scaling_two_workers", two_workers.rates, bare_pair, detail),
        BenchmarkRow("pretrain.data_wait_share", fmean(joint.waits), "share of the time",
            detail={**detail, "largest of an interval": round(max(joint.waits), 4)}),
    ]  # fmt: skip
    if has_trainer:
        rows.append(
            _row("pretrain.vs_hf_trainer", mlm.rates, theirs, about(mlm.config.pretrain.steps))
        )
    else:
        print("pretrain.vs_hf_trainer is left out: the Trainer of transformers needs the package "
              "accelerate; pip install -e '.[bench]'", flush=True)  # fmt: skip
    return rows


def steady_rates(rates: Rates) -> Rates:
    """The rates of the end of a run."""
    return rates[int(len(rates) * _LEFT_OUT) :]


def _row(name: str, ours: Rates, peer: Rates, detail: Mapping[str, object]) -> BenchmarkRow:
    our_rate, peer_rate = median(ours), median(peer)
    spread = {"spread of ours": _spread(ours), "spread of the peer": _spread(peer)}
    return BenchmarkRow(name, our_rate, "tokens/s", peer=peer_rate, ratio=our_rate / peer_rate,
               detail={**detail, **spread})  # fmt: skip


def _spread(rates: Rates) -> str:
    """On a shared machine intervals differ by what others do."""
    return f"{min(rates):,.0f} to {max(rates):,.0f}"


@dataclass
class _Side:
    """jobs.pretrain with some options, and its measured rates."""

    options: list[str]
    steps: int
    work: Path
    rates: Rates = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.output = str(self.work / "encoder")
        self.options = [*self.options, "--output", self.output, "--pretrain.steps", str(self.steps)]
        self.config = parse(pretrain_job.Config, self.options, "jobs.pretrain")
        corpora = tuple(map(TokenizedCorpus.open, self.config.corpus))
        weights = tuple(float(corpus.train_tokens) for corpus in corpora)
        config = self.config
        recipe = Pretraining(corpora, weights, config.shape, config.pretrain, config.loop)
        precision = resolve_precision(config.loop.precision, torch.device("cpu"))
        self.arm = Arm(recipe, precision, config.loop.log_every_steps)

    def run(self) -> None:
        """Runs the job once, and adds its rates."""
        shutil.rmtree(self.output, ignore_errors=True)
        run_job("pretrain", *self.options)
        manifest = open_artifact(self.output, "encoder").manifest
        tracked = tracking.Run(manifest["run_id"], tracking.server())
        histories = tracked.histories(("tokens_per_s", "data_wait_share", "steps_per_s"))
        rates, waits, steps_per_s = (
            steady_rates([value for _, value in points]) for points in histories.values()
        )
        self.rates += rates
        self.waits += waits
        self._steps_per_s = steps_per_s

    def tokens_per_step(self) -> float:
        """Tokens per step without padding, in the last run."""
        rates = self.rates[-len(self._steps_per_s) :]
        return fmean(a / b for a, b in zip(rates, self._steps_per_s, strict=True))


def tokens(size: Size, corpus: str, work: Path) -> str:
    """The URI of a tokenized corpus: `corpus`, or made of it, or of the sample corpora (""). Reuses the
    output of an earlier call."""
    if corpus and open_artifact(corpus, TOKENS, "corpus").kind == TOKENS:
        return corpus
    with cluster.session(for_tasks=True):
        source = corpus or _sample_corpus(size, work)
        folder = work / f"tokens-{digest([source, size])}"
        tokenizer_config = TokenizerConfig(vocabulary=_VOCABULARY[size])
        tokenizer = str(folder / "tokenizer")
        train_tokenizer.run(
            train_tokenizer.Config(corpus=(source,), output=tokenizer, tokenizer=tokenizer_config)
        )
        output = str(folder / "tokens")
        tokenize_corpus.run(
            tokenize_corpus.Config(corpus=source, tokenizer=tokenizer, output=output)
        )
    return output


def _sample_corpus(size: Size, work: Path) -> str:
    """The URI of the Reddit corpus of the sample data."""
    raw, output = work / f"sample-{size}", str(work / f"corpora-{size}" / "reddit")
    if not raw.is_dir():
        partial = work / f"sample-{size}.part"  # a run that was killed leaves no half of the files
        shutil.rmtree(partial, ignore_errors=True)
        sample.generate(partial, size=_SAMPLE[size])
        partial.rename(raw)
    dump = (str(raw / "reddit_dump"),)
    prepare_corpus.run(prepare_corpus.Config(format="reddit", input=dump, output=output))
    return output

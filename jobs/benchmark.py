"""Speed, memory and endurance: ours beside others' code, measured side by side in one run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from jobs import program
from jobs.benchmarks import measure
from jobs.benchmarks.measure import BenchmarkRow
from pipeline import storage
from pipeline.artifact import open_artifact
from pipeline.config import require
from pipeline.models.sources import open_encoder
from pipeline.training.settings import TOKENS


@dataclass(frozen=True, kw_only=True)
class Config:
    """Measures a part of polyrank beside other projects' code.

    The part is the first argument: `polyrank benchmark corpora --size full`. On a shared machine only the
    ratios of what ran in turn in one run mean anything. For finetune and paper, options of jobs.finetune
    (--ranker.*, --finetune.*, --loop.*, --resources.*) hold for all trainings. For pretrain, options of
    jobs.pretrain (--pretrain.*, --loop.*) do.
    """

    POSITIONAL = "part"
    ALIASES = MappingProxyType({"name": "part"})
    PASSED_ON = ("overrides", ("ranker", "finetune", "pretrain", "loop", "resources"))
    part: Literal[
        "cluster", "convert", "corpora", "embed", "finetune", "gpu", "intents", "paper", "pretrain",
        "search", "serve", "tables",
    ]  # fmt: skip
    """The part to measure. It is the first argument; `--part` may stand before it."""
    size: Literal["small", "full"] = "small"
    """`small` takes minutes. `full` has the size that BENCHMARKS.md compares with the targets. For paper:
    which recipes of jobs/configs/finetune are trained."""
    data: str = ".data"
    """For embed: a folder with Wikipedia's articles in the format of WikiExtractor. For intents and tables: a
    folder with intent/banking77; for tables, with intent/clinc150, too."""
    encoder: str = ""
    """For finetune and paper: an encoder, as for jobs.finetune. For gpu and serve: an encoder of
    sentence-transformers. gpu embeds with it; serve asks other services that serve it."""
    corpus: tuple[str, ...] = ()
    """For convert, finetune and gpu: a corpus. For paper: one corpus for each task. For search and serve:
    contexts of the first corpus are the questions, and the turns of all corpora are the candidates. For
    pretrain: a corpus instead of the sample corpora; it may be tokenized."""
    peers: str = ""
    """For embed: the Python of an environment with sentence-transformers[openvino,onnx], whose engines are
    measured beside polyrank; empty: they are not."""
    device: Literal["cuda", "cpu"] = "cuda"
    """For gpu: `cpu` runs the same code on tiny shapes, to see that it runs."""
    model: str = ""
    """For search and serve: a trained poly-encoder (of jobs.finetune). For cluster: the ranker that embeds;
    without one no pool is made. For convert: a ConveRT model that was trained on the corpus; without one
    nothing is ranked."""
    only: tuple[str, ...] = ()
    """For paper: names of the table's rows; for embed: rate, night, engines, plan; for gpu: search, pretrain,
    embed; for serve: overhead, throughput, clients, load, fairness, rerank, embed; none: all."""
    url: str = ""
    """For serve: measure the service that is already there, such as https://ranker.example, instead of one
    that is started for it: clients and load, with three times as many requests as it answers. Its token is
    read from the variable POLYRANK_TOKEN."""
    pool: str = ""
    """For serve, with a URL: the name of the pool that is searched."""
    seeds: int = 1
    """For paper: trainings of each row, from seeds 0, 1, …; more can be added later."""
    split: Literal["valid", "test"] = "valid"
    """For paper: the split whose examples are ranked."""
    max_examples: int = 100_000
    """For paper: rank at most this many examples."""
    overrides: tuple[str, ...] = ()
    """For finetune and paper: options of jobs.finetune. For pretrain: options of jobs.pretrain. They may
    be written like the job's own options."""
    json: str = field(default="", metadata=program.OUTPUT_FILE)
    """File for the rows of the report."""
    work: str = field(default=".benchmark", metadata=program.OUTPUT)
    """Folder for inputs and results. The next run uses what it holds. For paper: any URI."""

    def __post_init__(self) -> None:
        for name in ("seeds", "max_examples"):
            require(getattr(self, name) >= 1, name, getattr(self, name), ">= 1")
        for name in ("corpus",) if self.url else _NEEDED.get(self.part, ()):
            value = getattr(self, name)
            require(bool(value), name, value, f"its URI, for {self.part}")
        takes_several = self.part in ("paper", "search", "serve") or len(self.corpus) <= 1
        require(takes_several, "corpus", self.corpus, "one, but for paper, search and serve")
        steps = _STEPS.get(self.part, {})
        for name in self.only if self.part != "paper" else ():  # which knows its rows' names
            allowed = ", ".join(steps) or f"none, but for paper, {', '.join(_STEPS)}"
            require(name in steps, "only", name, allowed)
            for option in steps[name]:
                value = getattr(self, option)
                require(bool(value), option, value, f"one, for {self.part} --only {name}")
        require(self.part in _TRAINING or not self.overrides, "part", self.part,
                f"{', '.join(_TRAINING)}, with {' '.join(self.overrides)}")  # fmt: skip
        require(self.part == "serve" or not self.url, "url", self.url, "none, but for serve")
        is_url = self.url.startswith(("http://", "https://"))
        require(is_url or not self.url, "url", self.url, "http://… or https://…")
        require(bool(self.pool) == bool(self.url), "pool", self.pool,
                "the name of a pool, with url and only there")  # fmt: skip
        is_of_url = not self.url or {*self.only} <= {*_WITH_URL}
        require(is_of_url, "only", self.only, f"{', '.join(_WITH_URL)}, with a URL")

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps to measure, in their order: those of `only`, or all that have their inputs."""
        inputs_of = {name: () for name in _WITH_URL} if self.url else _STEPS[self.part]
        return tuple(
            name
            for name, inputs in inputs_of.items()
            if (name in self.only or not self.only)
            and all(getattr(self, option) for option in inputs)
        )


_STEPS: dict[str, dict[str, tuple[str, ...]]] = {
    "embed": {"rate": (), "night": (), "engines": ("peers",), "plan": ()},
    "gpu": {"search": (), "pretrain": (), "embed": ("encoder", "corpus")},
    "serve": {"overhead": (), "throughput": (), "clients": (), "load": (), "fairness": (),
              "rerank": ("encoder",), "embed": ("encoder",)},
}  # fmt: skip
"""What `only` chooses from, and the options that a step needs."""
_WITH_URL = ("clients", "load")
_NEEDED = {
    "convert": ("corpus",),
    "finetune": ("encoder", "corpus"),
    "paper": ("encoder", "corpus"),
    "search": ("model", "corpus"),
    "serve": ("model", "corpus"),
}
_TRAINING = ("finetune", "paper", "pretrain")


def run(config: Config) -> program.Summary:
    # A wrong input is refused before a part imports its libraries, which takes seconds.
    if config.encoder:
        open_encoder(config.encoder)
    for uri in config.corpus:
        open_artifact(uri, "corpus", TOKENS)
    if config.model:
        open_artifact(config.model, "ranker")
    if storage.is_local(config.work):
        Path(config.work).mkdir(parents=True, exist_ok=True)
    source = measure.source(config.size)
    part = import_module(f"jobs.benchmarks.{config.part}")
    measured: Iterator[BenchmarkRow] = part.measure(config, Path(config.work).absolute())
    rows = measure.report(measured, config.json, source)
    figures = {row.row: row.ours if row.ratio is None else row.ratio for row in rows}
    return {"rows": figures, "machine": measure.environment()}


if __name__ == "__main__":
    program.main(Config, run, "benchmark")

"""Speed, memory and endurance: ours beside others' code, measured side by side in one run."""

from __future__ import annotations

from dataclasses import dataclass
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
        "search", "serve",
    ]  # fmt: skip
    """The part to measure. It is the first argument; `--part` may stand before it."""
    size: Literal["small", "full"] = "small"
    """`small` takes minutes. `full` has the size that BENCHMARKS.md compares with the targets. For paper:
    which recipes of jobs/configs/finetune are trained."""
    data: str = ".data"
    """For embed: a folder with Wikipedia's articles in the format of WikiExtractor. For intents: a folder
    with intent/banking77."""
    table: Literal[4, "distill", "encoders"] = 4
    """For paper: 4 models. distill: what poly-64 learns from a cross-encoder, on a corpus of
    jobs.score_candidates. encoders: rankers from several encoders, beside those from the first."""
    encoder: tuple[str, ...] = ()
    """For finetune and paper: an encoder, as for jobs.finetune; --table encoders takes several.
    For serve: one of sentence-transformers, whose own services are measured beside polyrank's."""
    corpus: tuple[str, ...] = ()
    """For convert and finetune: a corpus. For paper: one corpus for each task. For search and serve:
    contexts of the first corpus are the questions, and the turns of all corpora are the candidates. For
    pretrain: a corpus instead of the sample corpora; it may be tokenized."""
    device: Literal["cuda", "cpu"] = "cuda"
    """For gpu: `cpu` runs the same code on tiny shapes, to see that it runs."""
    model: str = ""
    """For search and serve: a trained poly-encoder (of jobs.finetune). For convert: a ConveRT model
    that was trained on the corpus; without one nothing is ranked."""
    only: tuple[str, ...] = ()
    """For paper: names of the table's rows; for embed: rate, night, plan; for finetune: bf16, fp32; for
    serve: overhead, throughput, clients, load, fairness, rerank, embed; none: all."""
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
    json: str = ""
    """File for the rows of the report."""
    work: str = ".benchmark"
    """Folder for inputs and results. The next run uses what it holds. For paper: any URI."""

    def __post_init__(self) -> None:
        for name in ("seeds", "max_examples"):
            require(getattr(self, name) >= 1, name, getattr(self, name), ">= 1")
        if self.part in ("finetune", "paper"):
            for name in ("encoder", "corpus"):
                value = getattr(self, name)
                require(bool(value), name, value, f"its URI, for {self.part}")
            is_one = self.part == "paper" or len(self.corpus) == 1
            require(is_one, "corpus", self.corpus, "one, but for paper")
        allows_several = self.part == "paper" and self.table == "encoders"
        require(
            allows_several or len(self.encoder) <= 1,
            "encoder",
            self.encoder,
            "one, but for --table encoders",
        )
        require(self.part == "serve" or not self.url, "url", self.url, "none, but for serve")
        is_url = self.url.startswith(("http://", "https://"))
        require(is_url or not self.url, "url", self.url, "http://… or https://…")
        require(bool(self.pool) == bool(self.url), "pool", self.pool,
                "the name of a pool, with url and only there")  # fmt: skip
        if self.part in ("search", "serve"):
            for name in ("corpus",) if self.url else ("model", "corpus"):
                value = getattr(self, name)
                require(bool(value), name, value, f"its URI, for {self.part}")
        if self.url:
            require(
                set(self.only) <= {"clients", "load"},
                "only",
                self.only,
                "clients, load, with a URL",
            )
        if self.part == "convert":
            require(len(self.corpus) == 1, "corpus", self.corpus, "its URI, for convert")
        takes_only = self.part in ("embed", "finetune", "paper", "serve")
        require(
            takes_only or not self.only,
            "only",
            self.only,
            "none, but for embed, finetune, paper, serve",
        )
        if self.part == "pretrain":
            require(len(self.corpus) <= 1, "corpus", self.corpus, "one at most")
        require(self.part in ("finetune", "paper", "pretrain") or not self.overrides, "part", self.part,
                f"finetune, paper, pretrain, with {' '.join(self.overrides)}")  # fmt: skip


def run(config: Config) -> program.Summary:
    """A part imports its libraries only where it is measured."""
    if storage.is_local(config.work):
        Path(config.work).mkdir(parents=True, exist_ok=True)
    source = measure.source(config.size)
    rows = _measure(config, Path(config.work).absolute(), source)
    measure.report(rows, config.json, source)
    figures = {row.row: row.ours if row.ratio is None else row.ratio for row in rows}
    return {"rows": figures, "machine": measure.environment()}


def _measure(config: Config, work: Path, source: dict[str, str]) -> list[BenchmarkRow]:
    size, only = config.size, config.only
    if config.part == "paper":
        from jobs.benchmarks.paper import sweep, trials

        setting = trials.Setting(
            config.encoder, size, config.split, config.max_examples, config.overrides,
            storage.absolute(config.work),
        )  # fmt: skip
        return sweep.measure(config.table, config.corpus, only, config.seeds, setting)
    encoder_uri = config.encoder[0] if config.encoder else ""
    model = open_artifact(config.model, "ranker") if config.model else None
    if config.part == "finetune":
        from jobs.benchmarks import finetune_rate

        encoder = open_encoder(encoder_uri)[0].local()
        return finetune_rate.measure(size, encoder, config.corpus[0], only, config.overrides, work)
    if config.part == "pretrain":
        from jobs.benchmarks import pretrain

        return pretrain.measure(size, config.corpus, config.overrides, work)
    if config.part == "embed":
        from jobs.benchmarks import embed

        return embed.measure(size, Path(config.data), work, only)
    if config.part == "gpu":
        from jobs.benchmarks import gpu

        return gpu.measure(
            config.device, lambda rows: measure.write_rows(rows, config.json, source)
        )
    if config.part == "intents":
        from jobs.benchmarks import intents

        return intents.measure(size, Path(config.data), work)
    if config.part == "cluster":
        from jobs.benchmarks import object_store

        return object_store.measure(size, work)
    if config.part == "corpora":
        from jobs.benchmarks import corpora

        return corpora.measure(size, work)
    opened = [open_artifact(uri, "corpus") for uri in config.corpus]
    if config.part == "convert":
        from jobs.benchmarks import convert

        return convert.measure(size, opened[0], model, work)
    if config.part == "serve" and config.url:
        from jobs.benchmarks.serving import any_service

        url = config.url.rstrip("/")
        return any_service.measure(size, url, config.pool, opened, only, work)
    assert model is not None
    if config.part == "search":
        from jobs.benchmarks import search

        return search.measure(size, model, opened, work)
    from jobs.benchmarks.serving import parts

    return parts.measure(size, model, opened, encoder_uri, only, work)


if __name__ == "__main__":
    program.main(Config, run, "benchmark")

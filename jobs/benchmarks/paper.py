"""Tables of the Poly-encoder paper that are measured here, as sweeps of jobs.finetune and jobs.evaluate.

4         bi, poly and cross on four tasks      R@1, test; from BERT's weights, Wikipedia from Reddit's
distill   poly-64 from a cross-encoder          not the paper's; a corpus of jobs.score_candidates
encoders  bi and cross from several ones        as table 4 compares BERT's, Wikipedia's and Reddit's weights

Trials run one after the other. A trial trains a model on a corpus from a seed, and asks it what jobs.evaluate
asks. It writes a ranker and its evaluation to a folder that is named after all options that decide its
result. The same command finds them again there, and so does another table that has the same trial. If a trial
fails, its row says why, and the others go on.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
from ray.exceptions import OutOfMemoryError

from jobs import evaluate, finetune
from jobs.benchmark import Config
from jobs.benchmarks.measure import BenchmarkRow
from pipeline import storage
from pipeline.arrays import Floats, Ints
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import BadInput, Stopped, flatten, parse, require, to_dict
from pipeline.engine.draft import request_of
from pipeline.evaluation import protocols, significance
from pipeline.evaluation.ranking import load_scorer
from pipeline.models.sources import open_encoder
from pipeline.storage.failures import cause_of

_CONFIGS = Path(__file__).parents[1] / "configs" / "finetune"
# By the source of a corpus' examples: (the task whose recipes count, the protocol).
_TASKS: dict[str, tuple[str, protocols.Name]] = {
    "convai2": ("convai2", "convai2"),
    "dstc7": ("dstc7", "dstc7"),
    "ubuntu": ("ubuntu", "ubuntu"),
    "wikipedia": ("wikipedia", "wikipedia"),
    "starspace": ("wikipedia", "wikipedia"),
}
_UNKNOWN_TASK: tuple[str, protocols.Name] = ("convai2", "polyai")


# -------------------------------------------------------------------------------------------------
# Tables


Number = Literal[4, "distill", "encoders"]


@dataclass(frozen=True)
class Trial:
    """One row: a recipe, and the changes to it."""

    name: str
    architecture: Literal["bi", "poly", "cross"]
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Options of jobs.finetune."""
    published: Mapping[str, float] = field(default_factory=dict)
    """The paper's R@1 in percent, by task."""
    tasks_without: tuple[str, ...] = ()
    """Tasks without this trial."""

    def published_for(self, task: str) -> float | None:
        """R@1."""
        percent = self.published.get(paper_task(task))
        return percent and round(percent / 100, 4)


@dataclass(frozen=True)
class Table:
    """Rows, and which of them are compared."""

    trials: tuple[Trial, ...]
    pairs: tuple[tuple[str, str], ...] = ()
    """Names of trials: does the first find more right ones than the second?"""


def _poly(m: int, published: Mapping[str, float]) -> Trial:
    return Trial(f"poly-{m}", "poly", {"ranker.m": m}, published)


def _distillation(name: str, loss: str) -> Trial:
    changes = {"finetune.negatives_from": "both", "finetune.distill.loss": loss}
    return Trial(name, "poly", {"ranker.m": 64, **changes})


def of_encoders(uris: Sequence[str]) -> Table:
    """A bi- and a cross-encoder from each encoder, named after its folder, to compare with the first."""
    names = {storage.name_of(uri): uri for uri in uris}
    first, *other_names = names
    trials, pairs = list[Trial](), list[tuple[str, str]]()
    kinds: tuple[Literal["bi"], Literal["cross"]] = ("bi", "cross")
    for kind in kinds:
        trials += (Trial(f"{kind}-{n}", kind, {"encoder": uri}) for n, uri in names.items())
        pairs += ((f"{kind}-{other}", f"{kind}-{first}") for other in other_names)
    return Table(tuple(trials), tuple(pairs))


TABLES: dict[Number, Table] = {
    4: Table(
        (Trial("bi", "bi", {}, dict(convai2=81.7, dstc7=66.8, ubuntu=80.6, wikipedia=71.0)),
         _poly(16, dict(convai2=83.2, dstc7=67.8, ubuntu=81.2, wikipedia=71.5)),
         _poly(64, dict(convai2=83.7, dstc7=67.0, ubuntu=81.3, wikipedia=71.3)),
         _poly(360, dict(convai2=83.7, dstc7=68.9, ubuntu=80.9, wikipedia=71.8)),
         # 10,001 pairs for each question: the paper has none there either.
         Trial("cross", "cross", {}, dict(convai2=84.8, dstc7=67.4, ubuntu=82.8), ("wikipedia",))),
        pairs=(("poly-64", "bi"), ("cross", "poly-64")),
    ),
    "distill": Table(
        # Without a teacher: from the batch's responses, and from the corpus' candidates too.
        (_poly(64, {}), _distillation("poly-64-both", "none"), _distillation("poly-64-kl", "kl"),
         _distillation("poly-64-margin_mse", "margin_mse")),
        pairs=tuple(itertools.product(("poly-64-kl", "poly-64-margin_mse"), ("poly-64", "poly-64-both"))),
    ),
}  # fmt: skip


# -------------------------------------------------------------------------------------------------
# Rows


def measure(config: Config, work: Path) -> Iterator[BenchmarkRow]:
    """Runs the missing trials, and returns the table's rows.

    Raises BadInput for unknown trials and options, and Stopped if no trial succeeds.
    """
    number = config.table
    table = of_encoders(config.encoder) if number == "encoders" else TABLES[number]
    names = [trial.name for trial in table.trials]
    for name in config.only:
        require(name in names, "only", name, ", ".join(names))
    jobs = [
        plan(trial, corpus, task, seed, config)
        for task, corpus in _corpus_of_task(config.corpus).items()
        for trial in table.trials
        if trial.name in (config.only or names) and paper_task(task) not in trial.tasks_without
        for seed in range(config.seeds)
    ]
    require(bool(jobs), "only", config.only, "a trial that there is for these corpora")
    _check_rows(table, jobs)
    missing = [job for job in jobs if not storage.exists(job.evaluation)]
    for ask in {job.ask.corpus: job.ask for job in missing}.values():
        evaluate.measurement(ask, open_artifact(ask.corpus, "corpus"))  # refused before hours go by
    hits_of_row, failure = dict[tuple[str, str], Floats](), ""
    for (task, trial), seeds in itertools.groupby(jobs, lambda job: (job.task, job.trial)):
        row, hits_N = _row(f"paper.{number}", list(seeds), f"{config.size} recipes")
        if hits_N is None:
            failure = f"{row.row}: {row.detail['failed'][0]}"
        else:
            hits_of_row[task, trial.name] = hits_N
        yield row
    if not hits_of_row:
        raise Stopped(f"no trial ended well; {failure}")
    yield from _comparisons(f"paper.{number}", table, hits_of_row)


def _row(table: str, jobs: Sequence[Job], about: str) -> tuple[BenchmarkRow, Floats | None]:
    """The row of a trial over its seeds, and [N] the share of them that put the right answer of each question
    first; None: all have failed."""
    outcomes, failed = list[tuple[Ints, str]](), list[str]()
    for job in jobs:
        try:
            outcomes.append(outcome_of(job))
        except Exception as error:  # whatever it is, the other trials go on
            failed.append(_reason(error))
            print(f"{job.label}: {failed[-1]}", file=sys.stderr, flush=True)
    task, trial = jobs[0].task, jobs[0].trial
    row, peer = f"{table}.{task}.{trial.name}", trial.published_for(task)
    detail: dict[str, Any] = {"failed": failed} if failed else {}
    if not outcomes:
        return BenchmarkRow(row, None, "R@1", peer, detail=detail), None
    hits_SN = np.array([ranks_N == 1 for ranks_N, _ in outcomes], np.float64)
    hits_N, by_seed = hits_SN.mean(axis=0), hits_SN.mean(axis=1)
    low, high = significance.mean_interval(hits_N)
    several = f"± {by_seed.std(ddof=1):.3f} over {len(by_seed)} seeds; " if len(by_seed) > 1 else ""
    interval = f"95 % over {len(hits_N):,} questions: {low:.3f} to {high:.3f}"
    detail |= {"seeds": by_seed.tolist(), "note": f"{several}{interval}; {about}."}
    (_, metric), *_ = outcomes
    return BenchmarkRow(row, float(hits_SN.mean()), metric, peer, detail=detail), hits_N


def _comparisons(
    name: str, table: Table, hits_of_row: Mapping[tuple[str, str], Floats]
) -> Iterator[BenchmarkRow]:
    tasks = dict.fromkeys(task for task, _ in hits_of_row)
    for task, (first, second) in itertools.product(tasks, table.pairs):
        if {(task, first), (task, second)} <= hits_of_row.keys():
            hits, other_hits = hits_of_row[task, first], hits_of_row[task, second]
            pair = significance.compare_means(first, second, hits, other_hits)
            row, (low, high) = f"{name}.{task}.{first}_less_{second}", pair.interval
            note = f"95 %: {low:.3f} to {high:.3f}, p = {pair.p:.2g}."
            yield BenchmarkRow.alone(row, pair.difference, "R@1", note)


def _corpus_of_task(uris: Sequence[str]) -> dict[str, Artifact]:
    corpus_of_task: dict[str, Artifact] = {}
    for uri in uris:
        corpus = open_artifact(uri, "corpus")
        task = task_of(corpus)
        if task in corpus_of_task:
            other = corpus_of_task[task].uri
            raise BadInput(f"--corpus {uri}: {task}, as {other}; allowed: one of each")
        corpus_of_task[task] = corpus
    return corpus_of_task


def _check_rows(table: Table, jobs: Sequence[Job]) -> None:
    """Raises BadInput for an option that would make two rows, or two seeds, the same."""
    names = {name for trial in table.trials for name in trial.changes}
    varied = [n for n in names if len({trial.changes.get(n) for trial in table.trials}) > 1]
    for job in jobs:
        values = flatten(to_dict(job.train))
        row_changes = {name: value for name, value in job.trial.changes.items() if name in varied}
        for name, value in {"ranker.architecture": job.trial.architecture, **row_changes}.items():
            require(values[name] == value, name, values[name],
                    f"{value!r} in row {job.trial.name}, whose difference it is")  # fmt: skip
        require(values["loop.seed"] == job.seed, "loop.seed", values["loop.seed"],
                "none: --seeds says how many")  # fmt: skip


# -------------------------------------------------------------------------------------------------
# Trials


@dataclass(frozen=True)
class Job:
    """A trial with everything that decides its result."""

    trial: Trial
    task: str
    seed: int
    train: finetune.Config
    ask: evaluate.Config
    evaluation: str
    """URI of the file with the ranks and the metrics."""

    @property
    def label(self) -> str:
        return f"{self.task} {self.trial.name} seed {self.seed}"


def task_of(corpus: Artifact) -> str:
    """The source of the corpus' first example."""
    for uri in corpus.files(suffix=".parquet"):
        with storage.open_input(uri) as stream:
            table = pq.ParquetFile(stream)
            if "source" in table.schema_arrow.names and table.metadata.num_rows:
                return str(next(table.iter_batches(1, columns=["source"]))["source"][0])
    raise BadInput(f"{corpus.uri}: the corpus has no examples")


def recipe(task: str, architecture: str, size: Literal["small", "full"]) -> tuple[str, ...]:
    """`--config` with two files of jobs/configs/finetune: the architecture's, and the task's for it."""
    ending = "-small.yaml" if size == "small" else ".yaml"
    name = _TASKS.get(task, _UNKNOWN_TASK)[0]
    files = [_CONFIGS / "tasks" / f"{name}{kind}{ending}" for kind in (f"-{architecture}", "")]
    task_file = next(file for file in files if file.exists())
    return "--config", str(_CONFIGS / f"{architecture}{ending}"), str(task_file)


def paper_task(task: str) -> str:
    """The paper's name of a task: StarSpace's articles are its Wikipedia search."""
    return _TASKS.get(task, (task,))[0]


def protocol(task: str) -> protocols.Name:
    """The task's evaluation protocol."""
    return _TASKS.get(task, _UNKNOWN_TASK)[1]


def plan(trial: Trial, corpus: Artifact, task: str, seed: int, config: Config) -> Job:
    """Raises BadInput for overrides that jobs.finetune does not know."""
    changes = {"corpus": corpus.uri, "encoder": config.encoder[0], "output": "not yet known",
               **trial.changes, "loop.seed": seed}  # fmt: skip
    options = [f"--{name}={value}" for name, value in changes.items()]
    arguments = [*recipe(task, trial.architecture, config.size), *options, *config.overrides]
    # A trial reads only some of the options for all trials.
    train = parse(finetune.Config, arguments, "jobs.finetune", allow_unread=True)
    _, encoder = _open_encoder(train.encoder)
    request = request_of("ranker", train, {"corpus": corpus, "encoder": encoder})
    name = f"{task}-{trial.architecture}-{request}"
    folder = storage.join(storage.absolute(config.work), "trials", name)
    train = replace(train, output=storage.join(folder, "ranker"))
    evaluation = evaluate.Config(
        model=(train.output,), corpus=corpus.uri, split=config.split, protocol=protocol(task),
        max_examples=config.max_examples, latency_queries=0,
    )  # fmt: skip
    inputs: dict[str, Artifact | dict[str, Any]] = {
        "model": {"fingerprint": request},
        "corpus": corpus,
    }
    file = f"evaluation-{request_of('evaluation', evaluation, inputs)}.json"
    return Job(trial, task, seed, train, evaluation, storage.join(folder, file))


_open_encoder = functools.cache(open_encoder)


def outcome_of(job: Job) -> tuple[Ints, str]:
    """([N] ranks of the right answers, name of the task's R@1), of an earlier run or of a new training. Every
    trial of a task is asked the same questions."""
    if not storage.exists(job.evaluation):
        train_and_evaluate(job)
        print(f"{job.label}: done", file=sys.stderr, flush=True)
    evaluation = json.loads(storage.read_bytes(job.evaluation))
    return np.array(evaluation["ranks"]), next(iter(evaluation["metrics"]))


def train_and_evaluate(job: Job) -> None:
    finetune.run(job.train)
    model = open_artifact(job.train.output, "ranker")
    measure = evaluate.measurement(job.ask, open_artifact(job.ask.corpus, "corpus"))
    result = measure.of(job.label, functools.partial(load_scorer, model, job.label))
    evaluation = {"ranks": result.ranking.ranks_N.tolist(), "metrics": result.metrics}
    storage.write_bytes(job.evaluation, json.dumps(evaluation).encode())


def _reason(error: Exception) -> str:
    """The refusal in one line, or the last line of the error."""
    if refusal := cause_of(error, BadInput, Stopped):
        return str(refusal)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Ray says first that memory ran out, and then for a page what could be done about it.
    index = 0 if isinstance(error, OutOfMemoryError) else -1
    return (lines or [type(error).__name__])[index][:300]

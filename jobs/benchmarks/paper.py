"""Table 4 of the Poly-encoder paper, as a sweep of jobs.finetune and jobs.evaluate.

Trials run one after the other. A trial trains a model on a corpus from a seed, and asks it what jobs.evaluate
asks. It writes a ranker and its evaluation to a folder that is named after all options that decide its
result, where the same command finds them again. If a trial fails, its row says why, and the others go on.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from pipeline.evaluation.ranking import scorer
from pipeline.models.sources import open_encoder
from pipeline.storage.failures import cause_of

_CONFIGS = Path(__file__).parents[1] / "configs" / "finetune"
_TASKS: tuple[protocols.Name, ...] = ("convai2", "dstc7", "ubuntu", "wikipedia")
"""The paper's, which have recipes and protocols."""


@dataclass(frozen=True)
class Trial:
    """One row: a recipe."""

    name: str
    architecture: Literal["bi", "poly", "cross"]
    published: Mapping[str, float]
    """The paper's R@1, by task."""
    m: int = 0
    """Of poly."""

    def ranks(self, task: str) -> bool:
        """Articles would be 10,001 pairs for each question: the paper has no cross-encoder there either."""
        return "wikipedia" in self.published or paper_task(task) != "wikipedia"


TRIALS = (
    Trial("bi", "bi", dict(convai2=0.817, dstc7=0.668, ubuntu=0.806, wikipedia=0.710)),
    Trial("poly-16", "poly", dict(convai2=0.832, dstc7=0.678, ubuntu=0.812, wikipedia=0.715), 16),
    Trial("poly-64", "poly", dict(convai2=0.837, dstc7=0.670, ubuntu=0.813, wikipedia=0.713), 64),
    Trial("poly-360", "poly", dict(convai2=0.837, dstc7=0.689, ubuntu=0.809, wikipedia=0.718), 360),
    Trial("cross", "cross", dict(convai2=0.848, dstc7=0.674, ubuntu=0.828)),
)
_COMPARED = (("poly-64", "bi"), ("cross", "poly-64"))
"""Names of trials: does the first find more right ones than the second?"""


def measure(config: Config, work: Path) -> Iterator[BenchmarkRow]:
    """Runs the missing trials, and returns the table's rows.

    Raises BadInput for unknown trials and options, and Stopped if no trial succeeds.
    """
    names = [trial.name for trial in TRIALS]
    for name in config.only:
        require(name in names, "only", name, ", ".join(names))
    corpora = [open_artifact(uri, "corpus") for uri in config.corpus]
    corpus_of_task = {task_of(corpus): corpus for corpus in corpora}
    require(len(corpus_of_task) == len(corpora), "corpus", config.corpus, "one of each task")
    jobs = [
        plan(trial, corpus, task, seed, config)
        for task, corpus in corpus_of_task.items()
        for trial in TRIALS
        if trial.name in (config.only or names) and trial.ranks(task)
        for seed in range(config.seeds)
    ]
    require(bool(jobs), "only", config.only, "a trial that there is for these corpora")
    missing = [job for job in jobs if not storage.exists(job.evaluation)]
    for ask in {job.ask.corpus: job.ask for job in missing}.values():
        evaluate.measurement(ask, open_artifact(ask.corpus, "corpus"))  # refused before hours go by
    hits_of_row, failure = dict[tuple[str, str], Floats](), ""
    for (task, trial), seeds in itertools.groupby(jobs, lambda job: (job.task, job.trial)):
        row, hits_N = _row(list(seeds), f"{config.size} recipes")
        if hits_N is None:
            failure = f"{row.row}: {row.detail['failed'][0]}"
        else:
            hits_of_row[task, trial.name] = hits_N
        yield row
    if not hits_of_row:
        raise Stopped(f"no trial ended well; {failure}")
    yield from _comparisons(hits_of_row)


def _row(jobs: Sequence[Job], about: str) -> tuple[BenchmarkRow, Floats | None]:
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
    row, peer = f"paper.4.{task}.{trial.name}", trial.published.get(paper_task(task))
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


def _comparisons(hits_of_row: Mapping[tuple[str, str], Floats]) -> Iterator[BenchmarkRow]:
    tasks = dict.fromkeys(task for task, _ in hits_of_row)
    for task, (first, second) in itertools.product(tasks, _COMPARED):
        if {(task, first), (task, second)} <= hits_of_row.keys():
            hits, other_hits = hits_of_row[task, first], hits_of_row[task, second]
            pair = significance.compare_means(first, second, hits, other_hits)
            row, (low, high) = f"paper.4.{task}.{first}_less_{second}", pair.interval
            note = f"95 %: {low:.3f} to {high:.3f}, p = {pair.p:.2g}."
            yield BenchmarkRow.alone(row, pair.difference, "R@1", note)


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
    name = paper_task(task) if paper_task(task) in _TASKS else "convai2"
    files = [_CONFIGS / "tasks" / f"{name}{kind}{ending}" for kind in (f"-{architecture}", "")]
    task_file = next(file for file in files if file.exists())
    return "--config", str(_CONFIGS / f"{architecture}{ending}"), str(task_file)


def paper_task(task: str) -> str:
    """The paper's name of a task: StarSpace's articles are its Wikipedia search."""
    return "wikipedia" if task == "starspace" else task


def protocol(task: str) -> protocols.Name:
    """The task's evaluation protocol."""
    return next((name for name in _TASKS if name == paper_task(task)), "polyai")


def plan(trial: Trial, corpus: Artifact, task: str, seed: int, config: Config) -> Job:
    """Raises BadInput for overrides that are unknown, or would make two rows, or two seeds, the same."""
    of_poly = {"ranker.m": trial.m} if trial.m else {}
    changes = {"corpus": corpus.uri, "encoder": config.encoder, "output": "not yet known",
               **of_poly, "loop.seed": seed}  # fmt: skip
    options = [f"--{name}={value}" for name, value in changes.items()]
    arguments = [*recipe(task, trial.architecture, config.size), *options, *config.overrides]
    # A trial reads only some of the options for all trials.
    train = parse(finetune.Config, arguments, "jobs.finetune", allow_unread=True)
    values = flatten(to_dict(train))
    for name, value in {"ranker.architecture": trial.architecture, **of_poly}.items():
        allowed = f"{value!r} in row {trial.name}, whose difference it is"
        require(values[name] == value, name, values[name], allowed)
    drawn = values["loop.seed"]
    require(drawn == seed, "loop.seed", drawn, "none: --seeds says how many")
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
    result = measure.of(job.label, functools.partial(scorer, model, job.label))
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

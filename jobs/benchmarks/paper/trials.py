"""A model on a corpus from a seed: trained by jobs.finetune, and asked what jobs.evaluate asks.

Trials run one after the other. A trial writes a ranker and its evaluation to a folder that is named after
all options that decide its result. The same command finds them again there, and so does another table that
has the same trial. If a trial fails, its row says why, and the others go on.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
from ray.exceptions import OutOfMemoryError

from jobs import evaluate, finetune
from jobs.benchmark import Config
from jobs.benchmarks.paper.tables import Trial
from pipeline import storage
from pipeline.arrays import Ints
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import BadInput, Stopped, parse
from pipeline.engine.draft import request_of
from pipeline.evaluation import protocols
from pipeline.evaluation.ranking import load_scorer
from pipeline.models.sources import Source, open_encoder
from pipeline.storage.failures import cause_of

_CONFIGS = Path(__file__).parents[2] / "configs" / "finetune"
# By the source of a corpus' examples: (the task whose recipes count, the protocol).
_TASKS: dict[str, tuple[str, protocols.Name]] = {
    "convai2": ("convai2", "convai2"),
    "dstc7": ("dstc7", "dstc7"),
    "ubuntu": ("ubuntu", "ubuntu"),
    "wikipedia": ("wikipedia", "wikipedia"),
    "starspace": ("wikipedia", "wikipedia"),
}
_UNKNOWN_TASK: tuple[str, protocols.Name] = ("convai2", "polyai")


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


@dataclass(frozen=True)
class Outcome:
    """The answers of a trained model."""

    ranks_N: Ints
    """The right answers' ranks; every trial of a task is asked the same questions."""
    metric: str
    """Name of the task's R@1."""


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
    architecture_file = _CONFIGS / "tasks" / f"{name}-{architecture}{ending}"
    task_file = _CONFIGS / "tasks" / f"{name}{ending}"
    file = architecture_file if architecture_file.exists() else task_file
    return "--config", str(_CONFIGS / f"{architecture}{ending}"), str(file)


def paper_task(task: str) -> str:
    """The paper's name of a task: StarSpace's articles are its Wikipedia search."""
    return _TASKS[task][0] if task in _TASKS else task


def protocol(task: str) -> protocols.Name:
    """The task's evaluation protocol."""
    return _TASKS.get(task, _UNKNOWN_TASK)[1]


def plan(trial: Trial, corpus: Artifact, task: str, seed: int, config: Config) -> Job:
    """Raises BadInput for overrides that jobs.finetune does not know."""
    files = recipe(task, trial.architecture, config.size)
    changes = {"encoder": config.encoder[0], **trial.changes}
    arguments = [*files, "--corpus", corpus.uri, f"--encoder={changes.pop('encoder')}",
             "--output", "not yet known"]  # fmt: skip
    arguments += [f"--{name}={value}" for name, value in changes.items()]
    arguments += [f"--loop.seed={seed}", *config.overrides]
    # A trial reads only some of the options for all trials.
    train = parse(finetune.Config, arguments, "jobs.finetune", allow_unread=True)
    _, encoder = _open_encoder(train.encoder)
    request = request_of("ranker", train, {"corpus": corpus, "encoder": encoder})
    folder = storage.join(
        storage.absolute(config.work), "trials", f"{task}-{trial.architecture}-{request}"
    )
    train = replace(train, output=storage.join(folder, "ranker"))
    evaluation = evaluate.Config(
        model=(train.output,), corpus=corpus.uri, split=config.split,
        protocol=protocol(task),
        max_examples=config.max_examples, latency_queries=0,
    )  # fmt: skip
    evaluation_request = request_of(
        "evaluation", evaluation, {"model": {"fingerprint": request}, "corpus": corpus}
    )
    file = storage.join(folder, f"evaluation-{evaluation_request}.json")
    return Job(trial, task, seed, train, evaluation, file)


@functools.cache
def _open_encoder(uri: str) -> tuple[Source, dict[str, Any]]:
    return open_encoder(uri)


def outcome(job: Job) -> Outcome | None:
    """The outcome of an earlier run; None: there is none."""
    if not storage.exists(job.evaluation):
        return None
    evaluation = json.loads(storage.read_bytes(job.evaluation))
    return Outcome(np.array(evaluation["ranks"]), next(iter(evaluation["metrics"])))


def run(jobs: Sequence[Job]) -> dict[str, Outcome | str]:
    """The outcome of each job by its label; for a failed job the reason."""
    outcomes: dict[str, Outcome | str | None] = {job.label: outcome(job) for job in jobs}
    missing = [job for job in jobs if outcomes[job.label] is None]
    for ask in {job.ask.corpus: job.ask for job in missing}.values():
        evaluate.measurement(ask, open_artifact(ask.corpus, "corpus"))  # refused before hours go by
    for job in missing:
        try:
            train_and_evaluate(job)
            outcomes[job.label], state = outcome(job), "done"
        except Exception as error:  # whatever it is, the other trials go on
            outcomes[job.label] = state = _reason(error)
        print(f"{job.label}: {state}", file=sys.stderr, flush=True)
    return {label: result or "nothing came out" for label, result in outcomes.items()}


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

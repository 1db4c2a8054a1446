"""A table from its trials to rows beside the paper's numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jobs.benchmark import Config
from jobs.benchmarks.measure import BenchmarkRow
from jobs.benchmarks.paper import trials
from jobs.benchmarks.paper.tables import TABLES, Table, Trial, of_encoders
from jobs.benchmarks.paper.trials import Job, Outcome
from pipeline.arrays import Floats
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import BadInput, Stopped, flatten, require, to_dict
from pipeline.evaluation import significance


def measure(config: Config, work: Path) -> list[BenchmarkRow]:
    """Runs the missing trials, and returns the table's rows.

    Raises BadInput for unknown trials and options, and Stopped if no trial succeeds.
    """
    number, only = config.table, config.only
    table = of_encoders(config.encoder) if number == "encoders" else TABLES[number]
    jobs = [
        trials.plan(trial, corpus, task, seed, config)
        for task, corpus in _corpus_of_task(config.corpus).items()
        for trial in _selected_trials(table, only)
        if trials.paper_task(task) not in trial.tasks_without
        for seed in range(config.seeds)
    ]
    require(bool(jobs), "only", only, "a trial that there is for these corpora")
    _check_rows(table, jobs)
    outcomes = trials.run(jobs)
    if not any(isinstance(outcome, Outcome) for outcome in outcomes.values()):
        raise Stopped(f"no trial ended well; {jobs[0].label}: {outcomes[jobs[0].label]}")
    return rows(f"paper.{number}", f"{config.size} recipes", table, jobs, outcomes)


def rows(
    name: str,
    about: str,
    table: Table,
    jobs: Sequence[Job],
    outcome_of_label: Mapping[str, Outcome | str],
) -> list[BenchmarkRow]:
    """One for each task and trial over its seeds, and one for each of the table's comparisons."""
    jobs_of_row: dict[tuple[str, str], list[Job]] = {}
    for job in jobs:
        jobs_of_row.setdefault((job.task, job.trial.name), []).append(job)
    result_rows = []
    hits_of_row: dict[tuple[str, str], Floats] = {}
    for (task, trial_name), row_jobs in jobs_of_row.items():
        results = [outcome_of_label[job.label] for job in row_jobs]
        outcomes = [result for result in results if isinstance(result, Outcome)]
        failures = [result for result in results if isinstance(result, str)]
        row, peer = f"{name}.{task}.{trial_name}", row_jobs[0].trial.published_for(task)
        detail: dict[str, Any] = {"failed": failures} if failures else {}
        if not outcomes:
            result_rows.append(BenchmarkRow(row, None, "R@1", peer, detail=detail))
            continue
        hits_SN = np.array([outcome.ranks_N == 1 for outcome in outcomes], np.float64)
        hits_of_row[task, trial_name] = hits_N = hits_SN.mean(axis=0)
        low, high = significance.mean_interval(hits_N)
        by_seed = hits_SN.mean(axis=1)
        plus_minus = (
            f"± {by_seed.std(ddof=1):.3f} over {len(by_seed)} seeds; " if len(by_seed) > 1 else ""
        )
        note = f"{plus_minus}95 % over {len(hits_N):,} questions: {low:.3f} to {high:.3f}; {about}."
        detail |= {"seeds": by_seed.tolist(), "note": note}
        result_rows.append(
            BenchmarkRow(row, float(hits_SN.mean()), outcomes[0].metric, peer, detail=detail)
        )
    return [*result_rows, *_comparisons(name, table, hits_of_row)]


def _comparisons(
    name: str, table: Table, hits_of_row: Mapping[tuple[str, str], Floats]
) -> Iterator[BenchmarkRow]:
    for task in dict.fromkeys(task for task, _ in hits_of_row):
        for first, second in table.pairs:
            hits, other_hits = (hits_of_row.get((task, trial)) for trial in (first, second))
            if hits is None or other_hits is None:
                continue
            pair = significance.compare_means(first, second, hits, other_hits)
            low, high = pair.interval
            detail = {"note": f"95 %: {low:.3f} to {high:.3f}, p = {pair.p:.2g}."}
            row = f"{name}.{task}.{first}_less_{second}"
            yield BenchmarkRow(row, pair.difference, "R@1", detail=detail)


def _corpus_of_task(uris: Sequence[str]) -> dict[str, Artifact]:
    corpus_of_task: dict[str, Artifact] = {}
    for uri in uris:
        corpus = open_artifact(uri, "corpus")
        task = trials.task_of(corpus)
        if task in corpus_of_task:
            raise BadInput(
                f"--corpus {uri}: {task}, as {corpus_of_task[task].uri}; allowed: one of each"
            )
        corpus_of_task[task] = corpus
    return corpus_of_task


def _selected_trials(table: Table, only: Sequence[str]) -> list[Trial]:
    names = [trial.name for trial in table.trials]
    for name in only:
        require(name in names, "only", name, ", ".join(names))
    return [trial for trial in table.trials if not only or trial.name in only]


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

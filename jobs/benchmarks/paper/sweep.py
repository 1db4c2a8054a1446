"""A table from its trials to its files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from jobs.benchmarks.measure import BenchmarkRow
from jobs.benchmarks.paper import report, trials
from jobs.benchmarks.paper.tables import TABLES, Number, Table, Trial, of_encoders
from jobs.benchmarks.paper.trials import Job, Outcome, Setting
from pipeline import storage, tracking
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import BadInput, Stopped, flatten, require, to_dict


def measure(
    number: Number, corpora: Sequence[str], only: Sequence[str], seeds: int, setting: Setting
) -> list[BenchmarkRow]:
    """Runs the missing trials, writes `table-<number>` as .md, .json and .png, and returns its rows.

    Raises BadInput for unknown trials and options, and Stopped if no trial succeeds.
    """
    table = of_encoders(setting.encoders) if number == "encoders" else TABLES[number]
    corpus_of_task = _by_task(corpora)
    jobs = [
        trials.plan(trial, corpus, task, seed, setting)
        for task, corpus in corpus_of_task.items()
        for trial in _selected_trials(table, only)
        if trials.paper_task(task) not in trial.tasks_without
        for seed in range(seeds)
    ]
    require(bool(jobs), "only", tuple(only), "a trial that there is for these corpora")
    _check_rows(table, jobs)
    outcomes = trials.run(jobs)
    table_lines = report.lines(table, jobs, outcomes)
    if not any(line.outcomes for line in table_lines):
        raise Stopped(f"no trial ended well; {jobs[0].label}: {outcomes[jobs[0].label]}")
    comparisons = report.comparisons(table, table_lines)
    rows = report.rows(number, table_lines, comparisons)
    text = report.markdown(number, table, table_lines, comparisons, _note(jobs, setting, outcomes))
    print(text)
    files = {
        f"table-{number}.md": text.encode(),
        f"table-{number}.json": json.dumps([asdict(row) for row in rows], indent=1).encode(),
        f"table-{number}.png": report.plot(table, table_lines),
    }
    for name, data in files.items():
        storage.write_bytes(storage.join(setting.work, name), data)
    inputs = {task: corpus.reference() for task, corpus in corpus_of_task.items()}
    settings = {**asdict(setting), "table": number, "only": tuple(only), "seeds": seeds}
    with tracking.start_sweep(f"paper table {number}", inputs, settings) as tracked:
        tracked.log({row.row: row.ours for row in rows if row.ours is not None}, wait=True)
        tracked.attach(files)
    return rows


def _by_task(uris: Sequence[str]) -> dict[str, Artifact]:
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
    rows = [name for name in names if len({trial.changes.get(name) for trial in table.trials}) > 1]
    for job in jobs:
        values = flatten(to_dict(job.train))
        row_changes = {name: value for name, value in job.trial.changes.items() if name in rows}
        for name, value in {"ranker.architecture": job.trial.architecture, **row_changes}.items():
            require(values[name] == value, name, values[name],
                    f"{value!r} in row {job.trial.name}, whose difference it is")  # fmt: skip
        require(values["loop.seed"] == job.seed, "loop.seed", values["loop.seed"],
                "none: --seeds says how many")  # fmt: skip


def _note(jobs: Sequence[Job], setting: Setting, outcomes: Mapping[str, Outcome | str]) -> str:
    """The conditions of the figures."""
    successes = [outcome for outcome in outcomes.values() if isinstance(outcome, Outcome)]
    trained_in = " and ".join(sorted({outcome.trained_in or "unknown" for outcome in successes}))
    ranked_in = " and ".join(sorted({outcome.ranked_in or "unknown" for outcome in successes}))
    seeds = len({job.seed for job in jobs})
    changes = f"; {' '.join(setting.overrides)}" if setting.overrides else ""
    encoders = ", ".join("/".join(uri.rstrip("/").split("/")[-2:]) for uri in setting.encoders)
    return (f"From {encoders}, {setting.size} recipes{changes}; "
            f"{seeds} seed{'s' if seeds > 1 else ''} (± over them), ranked: {setting.split}. Precision of "
            f"training: {trained_in}, of ranking: {ranked_in}. 95 %: "
            "Bayesian bootstrap over examples. The paper's are its own data, and its test sets in table 4. "
            "Minutes are those of the training steps alone.")  # fmt: skip

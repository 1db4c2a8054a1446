"""From a table of questions and answers to a service with a playground: `polyrank faq faq.csv`."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jobs import cluster, program, workflow
from pipeline import storage
from pipeline.artifact import MANIFEST, open_artifact
from pipeline.config import BadInput
from pipeline.corpora import raw
from pipeline.corpora.file_tasks import ParseReport
from pipeline.corpora.formats import pairs, tables
from pipeline.evaluation.none_candidate import LeastScore
from pipeline.pools import versions
from pipeline.storage import fingerprints

_JOBS = Path(__file__).parent
_PAYS_FROM = 2.0
"""Questions for an answer: pipeline/OWN_DATA.md has the measurements."""
_SERVING = ("pool", "serve")
"""The steps after the evaluations."""
_FEWEST_ROWS = 100
"""Fewer give training nothing to learn from, and its evaluation a handful of questions."""
_TAG = re.compile(r"</?(?:p|br|div|span|a|b|i|strong|em|ul|ol|li|h\d|table|td|img)\b[^<>]*>", re.I)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Makes a service with a playground of a table of questions and answers.

    It runs the steps of jobs/workflows/faq.yaml until Ctrl-C, and each prints the command that does it
    alone. The same command again resumes.
    """

    POSITIONAL = "table"
    table: str
    """CSV, TSV, JSON lines or Parquet, with a question and its answer in each row."""
    question: str = ""
    """The questions' column; empty: the only one with a usual name, such as question or query."""
    answer: str = ""
    """The answers' column; empty: the only one with a usual name, such as answer or response."""
    encoder: str = "sentence-transformers/all-MiniLM-L6-v2"
    """A published sentence encoder: a hub id, or a directory of sentence-transformers."""
    train: bool | None = None
    """Fine-tune the encoder. null: if the table has 100 rows or more, and 2 or more for each answer on
    average."""
    work: str = field(default="my", metadata=program.OUTPUT)
    """Folder of all that is made, but for mlflow.db, the log of runs, which lies beside it."""
    port: int = 8000
    """Port of the service."""
    encoding: str = "utf-8"
    """The table's encoding, such as cp1252."""
    delimiter: str = ""
    """Delimiter between the table's fields, such as ";"; empty: a comma, in TSV a tab."""
    dry_run: bool = False
    """Check all commands and print them."""


def run(config: Config) -> program.Summary:
    files = storage.expand([config.table], "table")
    with _options_of_this_job():
        table = _table_format(config, files)
        trains, reason = _decide(config, files, table)
    print(f"questions are the column {table.context_column!r}, answers {table.response_column!r}; "
          "--question and --answer name others", flush=True)  # fmt: skip
    print(reason, flush=True)
    variables: dict[str, object] = {
        "table": config.table,
        "question": table.context_column,
        "answer": table.response_column,
        "encoder": config.encoder,
        "recipe": _JOBS / "configs" / "finetune" / "pairs.yaml",
        "work": config.work,
        "port": config.port,
        "model": "ranker" if trains else "untrained",
    }
    settings = [f"{name}={shlex.quote(str(value))}" for name, value in variables.items()]
    # A trained model has seen the questions of train/; to the others all are new.
    settings += ["asked=" + ("--known-contexts true" if trains else "--split train")]
    settings += [f"{group}_format={_format_options(config, group)}" for group in ("pairs", "embed")]
    training = () if trains else ("ranker", "evaluate")
    commands = workflow.Config(
        file=str(_JOBS / "workflows" / "faq.yaml"),
        set=tuple(setting.replace("$", "$$") for setting in settings),
        skip=training,
        dry_run=config.dry_run,
    )
    _require_same_table(config, files, table, commands)
    cluster.require_free("127.0.0.1", config.port)
    if config.dry_run:
        return workflow.run(commands)
    measured = workflow.run(replace(commands, skip=(*training, *_SERVING)))["steps"]
    model, comparison = _best_model([step for step in measured if step["job"] == "evaluate"])
    print(f"\n{comparison}", flush=True)
    served = (*commands.set, f"model={model}")
    return workflow.run(replace(commands, set=served, start_at=_SERVING[0]))


def _best_model(evaluations: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """(the model to serve, a line that compares the models by the questions that they were asked)

    `evaluations`: what jobs.evaluate says of the untrained model, and of the trained one if there is one.
    """
    asked = evaluations[0]["examples"]
    names = ("untrained", "ranker")
    right, among_three = (
        {name: _recall(said["table"], k) for name, said in zip(names, evaluations, strict=False)}
        for k in (1, 3)
    )
    # The trained one was the better one on all tables with two or more questions for an answer, so it is
    # served unless it is clearly worse here: by more than chance makes of so few questions.
    lead = (right["untrained"] - right.get("ranker", 0.0)) * asked
    best = "untrained" if "ranker" not in right or lead > math.sqrt(asked) / 2 else "ranker"
    called = {"untrained": "untrained", "ranker": "trained"}
    counts = ", ".join(
        f"{called[name]} {share * asked:.0f} ({among_three[name] * asked:.0f} among the first three)"
        for name, share in right.items()
    )
    hint = ""
    if len(right) > 1:
        scores = dict(zip(names, evaluations, strict=True))[best]["least_scores"]
        hint = "".join(f" {str(LeastScore(**score)).capitalize()}." for score in scores.values())
    else:  # the questions of train/ are asked, which the pool will know; its scores are others, too
        counts += " by the texts of answers alone; the pool will know their questions, too"
    other = "; --train false serves the other" if best == "ranker" else ""
    return best, (
        f"right first, of {asked} questions of the table, among all answers: {counts}. Users who choose "
        f"other words get fewer. Serves the {called[best]} one{other}.{hint}"
    )


def _recall(table: dict[str, dict[str, float]], k: int) -> float:
    """R@k of the model, which is the last row; 1 for a k with which it is left out, as it is always 1."""
    *_, metrics = table.values()
    return next((value for name, value in metrics.items() if name.startswith(f"R@{k}/")), 1.0)


def _table_format(config: Config, files: list[str]) -> pairs.Options:
    """The columns, and how they are written. Raises BadInput for a table without rows or these columns."""
    options = pairs.Options(
        context_column=config.question or pairs.Options.context_column,
        response_column=config.answer or pairs.Options.response_column,
        encoding=config.encoding,
        delimiter=config.delimiter,
    )
    _require_rows(config.table, files, options)
    options, _ = pairs.with_guessed_columns(files, options, raw.Reading())
    _require_named(config, files, options)
    pairs.require_columns(files, options, raw.Reading())
    return options


@contextmanager
def _options_of_this_job() -> Iterator[None]:
    """Errors name the options of this job in place of those of prepare_corpus."""
    try:
        yield
    except BadInput as error:
        text = str(error)
        for name, option in (("context_column", "--question"), ("response_column", "--answer")):
            text = text.replace(f"pairs.{name}", option)
        raise BadInput(text.replace("--pairs.", "--").replace("pairs.", "--")) from None


def _require_named(config: Config, files: list[str], options: pairs.Options) -> None:
    """Raises BadInput where columns that nobody named cannot be found by their names."""
    reading, report = raw.Reading(), ParseReport()
    rows = (tables.read(file, {}, reading, report, lambda name: True, options) for file in files)
    head = list(itertools.islice(itertools.chain.from_iterable(rows), 2))
    columns = list(head[0][1])
    hint = tables.nested_hint(head) or tables.delimiter_hint(columns, options)
    if len(columns) == 1 and not (config.question and config.answer):
        raise BadInput(
            f"{config.table}: has one column, {columns[0]!r}; allowed: two or more{hint}"
        )
    usual = pairs.usual_columns(columns)
    named = {"question": usual["context_column"], "answer": usual["response_column"]}
    guessed = {what: names for what, names in named.items() if not getattr(config, what)}
    faults = [
        f"more than one column has a usual name for {what}s; choose by --{what}: {', '.join(names)}"
        for what, names in guessed.items()
        if len(names) > 1
    ]
    if lacking := [what for what, names in guessed.items() if not names]:
        whats, flags = "s or ".join(lacking), " and ".join(f"--{what}" for what in lacking)
        reason = f"no column has a usual name for {whats}s; choose by {flags}: {', '.join(columns)}"
        faults.append(reason + (hint or _header_hint(columns)))
    if faults:
        raise BadInput(f"{config.table}: {'; '.join(faults)}")


def _header_hint(columns: Sequence[str]) -> str:
    """For a table whose columns are called like texts, what may be missing; "" for others."""
    texts = [name for name in columns if name.endswith(("?", ".", "!")) or len(name.split()) > 4]
    if not texts:
        return ""
    return f" ({texts[0]!r} looks like a text: the first line has to name the columns, as question,answer)"


def _require_rows(table: str, files: list[str], options: pairs.Options) -> None:
    report = ParseReport()
    rows = (tables.read(file, {}, raw.Reading(), report, form=options) for file in files)
    if not any(True for _ in itertools.chain.from_iterable(rows)):
        broken = program.counts_in_words(report.malformed.counts)
        raise BadInput(f"{table}: has no rows{f' that can be read ({broken})' if broken else ''}")


def _format_options(config: Config, group: str) -> str:
    """The options of a job that reads the table, as one variable of the workflow."""
    plain = tables.TableFormat()
    return " ".join(
        f"--{group}.{name} {shlex.quote(getattr(config, name))}"
        for name in ("encoding", "delimiter")
        if getattr(config, name) != getattr(plain, name)
    )


def _decide(config: Config, files: list[str], table: pairs.Options) -> tuple[bool, str]:
    """(whether to train, a line that says why)"""
    answers_of_questions, rows, empty = defaultdict[str, set[str]](set), 0, 0
    report = ParseReport()
    for file in files:
        for _, row in tables.read(file, table.columns, raw.Reading(), report, form=table):
            question, answer = map(row.get, (table.context_column, table.response_column))
            if str(question or "").strip() and str(answer or "").strip():
                answers_of_questions[str(question)].add(str(answer))
                rows += 1
            else:
                empty += 1
    _say_unread_rows(config.table, report)
    answers = set[str]().union(*answers_of_questions.values())
    if len(answers) < 2:
        raise BadInput(f"{config.table}: has {len(answers)} different answers; allowed: 2 or more")
    several = [question for question, found in answers_of_questions.items() if len(found) > 1]
    if empty:
        print(f"{empty:,} rows lack a question or an answer and are left out", flush=True)
    if several:
        shown = f"such as {several[0]!r}"
        print(f"{len(several):,} questions have several answers, {shown}; all are kept", flush=True)
    if tags := [tag[0] for answer in answers if (tag := _TAG.search(answer))]:
        found = f"{len(tags):,} answers contain HTML, such as {min(tags)}"
        print(f"{found}; it is embedded and shown as it is", flush=True)
    share = rows / max(len(answers), 1)
    pays = rows >= _FEWEST_ROWS and share >= _PAYS_FROM
    for_each = f"{int(10 * share) / 10} questions for each"
    counts = f"{rows:,} rows have {len(answers):,} answers, {for_each}"
    if config.train is not None:
        return config.train, f"{counts}; --train {str(config.train).lower()} decides"
    rule = f"training pays from {_PAYS_FROM:.0f} on, with {_FEWEST_ROWS} rows or more"
    if pays:
        return True, f"{counts}: trains ({rule}; --train false serves the encoder as it is)"
    return False, f"{counts}: serves the encoder as it is ({rule}; --train true trains)"


def _say_unread_rows(table: str, report: ParseReport) -> None:
    """Raises BadInput where more rows cannot be read than prepare_corpus takes."""
    unread = report.malformed.counts.total()
    if not unread:
        return
    numbers = ", ".join(f"{sample['line']:,}" for sample in report.malformed.samples[:3])
    lines = f"lines {numbers}" + (" and others" if unread > 3 else "")
    reasons = program.counts_in_words(report.malformed.counts)
    found = f"{reasons} ({lines}; quote a text that holds the delimiter)"
    if unread > report.records * raw.Reading().max_malformed_share:
        raise BadInput(f"{table}: {unread:,} of {report.records:,} rows cannot be read: {found}")
    print(f"{unread:,} rows cannot be read and are left out: {found}", flush=True)


def _require_same_table(
    config: Config, files: list[str], table: pairs.Options, commands: workflow.Config
) -> None:
    """Raises BadInput where the work folder is of another table, or of this one before it was changed."""
    corpus = storage.join(config.work, "corpus")
    if not storage.exists(storage.join(corpus, MANIFEST)):
        return
    made_from = open_artifact(corpus, "corpus").manifest["inputs"]["input"]["fingerprint"]
    input_names = pairs.input_names(files, table)
    if fingerprints.raw_fingerprint(files, input_name=input_names) == made_from:
        return
    settings = (*commands.set, f"model={_served_model(config.work)}")
    steps = workflow.read_steps(commands.file, settings)
    (pool,) = (step for step in steps if step.name == "pool")
    raise BadInput(
        f"{config.table}: not as it was when {corpus} was made. To embed its new answers without training: "
        f"{shlex.join(pool.command)} (a running service follows). To begin anew: --work {config.work}-2"
    )


def _served_model(work: str) -> str:
    """The model that embedded the pool, which a new table or evaluation does not change."""
    pools = storage.join(work, "pools")
    if version := versions.current_name(pools, "answers"):
        pool = open_artifact(storage.join(pools, "answers", version), "pool")
        return storage.name_of(pool.manifest["inputs"]["model"]["uri"])
    return "ranker" if storage.exists(storage.join(work, "ranker", MANIFEST)) else "untrained"


if __name__ == "__main__":
    program.main(Config, run, "faq")

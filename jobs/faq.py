"""From a table of questions and answers to a service with a playground: `polyrank faq faq.csv`."""

from __future__ import annotations

import itertools
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from jobs import cluster, program, workflow
from pipeline import storage
from pipeline.artifact import MANIFEST, open_artifact
from pipeline.config import BadInput
from pipeline.corpora import raw
from pipeline.corpora.file_tasks import ParseReport
from pipeline.corpora.formats import pairs, tables
from pipeline.storage import fingerprints

_JOBS = Path(__file__).parent
_PAYS_FROM = 2.0
"""Questions for an answer: pipeline/OWN_DATA.md has the measurements."""
_FEWEST_ROWS = 100
"""Fewer give training nothing to learn from, and its evaluation a handful of questions."""


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
    """Folder of all that is made."""
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
    table = _table_format(config, files)
    print(f"questions are the column {table.context_column!r}, answers {table.response_column!r}; "
          "--question and --answer name others", flush=True)  # fmt: skip
    trains, reason = _decide(config, files, table)
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
        # A trained model has seen the questions of train/; to the others all are new.
        "split": "valid" if trains else "train",
    }
    settings = [f"{name}={shlex.quote(str(value))}" for name, value in variables.items()]
    settings += [f"{group}_format={_format_options(config, group)}" for group in ("pairs", "embed")]
    commands = workflow.Config(
        file=str(_JOBS / "workflows" / "faq.yaml"),
        set=tuple(setting.replace("$", "$$") for setting in settings),
        skip=() if trains else ("ranker", "evaluate"),
        dry_run=config.dry_run,
    )
    _require_same_table(config, files, table, commands)
    cluster.require_free("127.0.0.1", config.port)
    return workflow.run(commands)


def _table_format(config: Config, files: list[str]) -> pairs.Options:
    """The columns, and how they are written. Raises BadInput for a table without rows or these columns."""
    try:
        options = pairs.Options(
            context_column=config.question or pairs.Options.context_column,
            response_column=config.answer or pairs.Options.response_column,
            encoding=config.encoding,
            delimiter=config.delimiter,
        )
        _require_rows(config.table, files, options)
        options, _ = pairs.with_guessed_columns(files, options, raw.Reading())
        pairs.require_columns(files, options, raw.Reading())
    except BadInput as error:
        names = {"context_column": "--question", "response_column": "--answer"}
        text = str(error)
        for field, option in names.items():
            text = text.replace(f"pairs.{field}", option)
        raise BadInput(text.replace("--pairs.", "--").replace("pairs.", "--")) from None
    return options


def _require_rows(table: str, files: list[str], options: pairs.Options) -> None:
    report = ParseReport()
    rows = (tables.read(file, {}, raw.Reading(), report, form=options) for file in files)
    if not any(True for _ in itertools.chain.from_iterable(rows)):
        broken = ", ".join(f"{count} {reason}" for reason, count in report.malformed.counts.items())
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
    answers, rows = set[str](), 0
    for file in files:
        for _, row in tables.read(file, table.columns, raw.Reading(), ParseReport(), form=table):
            answers.add(str(row[table.response_column]))
            rows += 1
    share = rows / max(len(answers), 1)
    pays = rows >= _FEWEST_ROWS and share >= _PAYS_FROM
    counts = (
        f"{rows:,} rows have {len(answers):,} answers, {int(10 * share) / 10} questions for each"
    )
    if config.train is not None:
        return config.train, f"{counts}; --train {str(config.train).lower()} decides"
    rule = f"training pays from {_PAYS_FROM:.0f} on, with {_FEWEST_ROWS} rows or more"
    if pays:
        return True, f"{counts}: trains ({rule}; --train false serves the encoder as it is)"
    return False, f"{counts}: serves the encoder as it is ({rule}; --train true trains)"


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
    trained = storage.exists(storage.join(config.work, "ranker", MANIFEST))
    model = f"model={'ranker' if trained else 'untrained'}"  # the new table may decide otherwise
    steps = workflow.read_steps(commands.file, (*commands.set, model))
    (pool,) = (step for step in steps if step.name == "pool")
    raise BadInput(
        f"{config.table}: not as it was when {corpus} was made. To embed its new answers without training: "
        f"{shlex.join(pool.command)} (a running service follows). To begin anew: --work {config.work}-2"
    )


if __name__ == "__main__":
    program.main(Config, run, "faq")

"""From a table of questions and answers to a service with a playground: `polyrank faq faq.csv`."""

from __future__ import annotations

import http.client
import itertools
import json
import math
import os
import re
import shlex
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, NoReturn

from jobs import cluster, program, workflow
from pipeline import storage
from pipeline.artifact import MANIFEST, open_artifact
from pipeline.config import BadInput, require
from pipeline.corpora import raw
from pipeline.corpora.file_tasks import ParseReport
from pipeline.corpora.formats import pairs, tables
from pipeline.corpora.schema import named_split
from pipeline.engine import executors
from pipeline.evaluation.least_score import LeastScore
from pipeline.pools import versions
from pipeline.storage import fingerprints

_JOBS = Path(__file__).parent
_PAYS_FROM = 2.0
"""Questions for an answer: pipeline/OWN_DATA.md has the measurements."""
_UNTRAINED = "untrained "
"""What the row of the encoder begins with in jobs.evaluate's table of a ranker that was trained from it."""
_UNSEEN = "valid"
"""The split whose questions are kept out of training. Without training those of train/ are asked: they are
more, and all are new to the encoder."""
_LARGE_BYTES = 5_000_000
"""From here on, some 20,000 rows, embedding by a process for each core saves more than Ray's starts cost."""
_FEWEST_ROWS = 100
"""Fewer give training nothing to learn from, and its evaluation a handful of questions."""
_TAG = re.compile(r"</?(?:p|br|div|span|a|b|i|strong|em|ul|ol|li|h\d|table|td|img)\b[^<>]*>", re.I)


class _Table(pairs.Options):
    """How the table is written. Messages name its settings by the options of this job."""

    def option(self, name: str) -> str:
        return {"context_column": "question", "response_column": "answer"}.get(name, name)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Makes a service with a playground of a table of questions and answers.

    It runs the steps of jobs/workflows/faq.yaml until Ctrl-C, and prints for each the command that does it
    alone. The same command again resumes. When the table has changed, the same command embeds it, and
    trains nothing.
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
    """Folder of all that is made, but for mlflow.db, the log of runs, in the current folder."""
    port: int = 8000
    """Port of the service."""
    encoding: str = "utf-8"
    """The table's encoding, such as cp1252."""
    delimiter: str = ""
    """Delimiter between the table's fields, such as ";"; empty: a comma, in TSV a tab."""
    redact: bool = False
    """Replace e-mail addresses and phone numbers by tags, in questions and in answers."""
    dry_run: bool = False
    """Check all commands and print them."""

    def __post_init__(self) -> None:
        require(1 <= self.port <= 65535, "port", self.port, "1 to 65535")


def run(config: Config) -> program.Summary:
    files = storage.expand([config.table], "table")
    table = _table_format(config, files)
    trains, reason = _decide(config, files, table)
    print(f"questions: column {table.context_column!r}; answers: column {table.response_column!r} "
          "(--question and --answer choose others)", flush=True)  # fmt: skip
    variables: dict[str, object] = {
        "table": config.table,
        "question": table.context_column,
        "answer": table.response_column,
        "encoder": config.encoder,
        "recipe": _JOBS / "configs" / "finetune" / "pairs.yaml",
        "work": config.work,
        "port": config.port,
    }
    settings = [f"{name}={shlex.quote(str(value))}" for name, value in variables.items()]
    settings += ["asked=" + ("--known-contexts true" if trains else "--split train")]
    options = {group: _job_options(config, group) for group in ("pairs", "embed")}
    if table.split_by == "groups":
        options["pairs"] += " --pairs.split-by groups"
    settings += [f"{group}_options={words}" for group, words in options.items()]
    steps = workflow.Config(
        file=str(_JOBS / "workflows" / "faq.yaml"),
        set=tuple(setting.replace("$", "$$") for setting in settings),
        dry_run=config.dry_run,
    )
    # Each step as a process would import torch anew, and most would start a Ray.
    is_small = sum(map(storage.size_of, files)) < _LARGE_BYTES and "RAY_ADDRESS" not in os.environ
    with executors.in_this_process() if is_small and not config.dry_run else nullcontext():
        has_changed = _has_changed(config, files, table)
        if has_changed or _is_served(config):
            return _embed_table(config, steps, has_changed)
        print(reason, flush=True)
        cluster.require_visible_packages()
        cluster.require_free("127.0.0.1", config.port)
        model, split = ("ranker", _UNSEEN) if trains else ("untrained", "train")
        if config.dry_run:
            return workflow.run(_steps_of(steps, model))
        if not storage.exists(storage.join(config.work, model, MANIFEST)):
            from pipeline.models.sources import open_encoder  # imports torch, for 4 s

            open_encoder(config.encoder)
        evaluation = _evaluate(config.work, steps, model, split)
        best, comparison = _best_model(evaluation)
        if best != model:
            evaluation = _evaluate(config.work, steps, best, split)
        print(f"\n{comparison}{_least_score_hint(evaluation)}", flush=True)
        return _embed_and_serve(_steps_of(steps, best))


def _steps_of(steps: workflow.Config, model: str) -> workflow.Config:
    """The steps that make this model and serve it."""
    settings = [f"model={model}"]
    if model == "untrained":
        settings.append("make=convert_model --model ${encoder}")
    return replace(steps, set=(*steps.set, *settings))


def _embed_and_serve(steps: workflow.Config) -> NoReturn:
    workflow.run(replace(steps, start_at="pool", skip=("serve",)))
    program.say_runs()
    # In this process the encoder and torch would keep 1 GB as long as the service runs.
    workflow.become(steps, "serve")


def _evaluate(work: str, steps: workflow.Config, model: str, split: str) -> dict[str, Any]:
    """Makes a model and evaluates it, unless that is done. Returns what jobs.evaluate writes."""
    steps, uri = _steps_of(steps, model), storage.join(work, model)
    try:
        workflow.run(replace(steps, skip=("evaluate", "pool", "serve")))
    except BadInput as error:
        # The recipe sets this option of finetune for tables of any size.
        rows = "more rows, or --train false"
        raise BadInput(re.sub(r"finetune\.batch_examples of .*", rows, str(error))) from None
    file = f"{uri}-evaluation.json"
    done = json.loads(storage.read_bytes(file)) if storage.exists(file) else {"models": {}}
    is_of_model = [*done["models"].values()] == [open_artifact(uri, "ranker").fingerprint]
    if not is_of_model or done["split"] != split:
        workflow.run(replace(steps, start_at="evaluate", skip=("pool", "serve")))
        done = json.loads(storage.read_bytes(file))
    evaluation: dict[str, Any] = done
    return evaluation


def _best_model(evaluation: dict[str, Any]) -> tuple[str, str]:
    """(the model to serve, lines that compare the models by the questions that they were asked)

    `evaluation`: of a trained model it has a row for the encoder without training, too.
    """
    asked, trains = evaluation["examples"], evaluation["split"] == _UNSEEN
    *baselines, (_, own_row) = evaluation["table"].items()
    rows = {"trained" if trains else "untrained": own_row}
    if encoder_rows := [row for name, row in baselines if name.startswith(_UNTRAINED)]:
        rows = {"untrained": encoder_rows[0], **rows}
    right, among_three = (
        {name: round(_recall(row, k) * asked) for name, row in rows.items()} for k in (1, 3)
    )
    # The trained one was the better one on all tables with two or more questions for an answer, so it is
    # served unless it is clearly worse here: by more than chance makes of so few questions.
    lead = right.get("untrained", 0) - right.get("trained", 0)
    best = "untrained" if not trains or lead > math.sqrt(asked) / 2 else "trained"
    which = (
        "that no model has seen" if trains else "of the table, by the texts of the answers alone"
    )
    lines = [f"the right answer first, among all answers, for {asked} questions {which}:"]
    lines += [f"   {n:<9} {right[n]:4}, among the first three {among_three[n]}" for n in rows]
    other = " (--train false: the other one)" if best == "trained" else ""
    said = "users who choose other words than the table get fewer right answers"
    if not trains:  # the questions of train/ are asked
        said = "the pool will know the questions, too"
    lines.append(f"serves the {best} one{other}; {said}")
    return "ranker" if best == "trained" else best, "\n".join(lines)


def _least_score_hint(evaluation: dict[str, Any]) -> str:
    """A line that says which scores are too low to show; "" where the pool will know the questions that were
    asked: its scores are others."""
    scores = evaluation["least_scores"].values() if evaluation["split"] == _UNSEEN else ()
    return "".join(f"\n{LeastScore(**score)}" for score in scores)


def _recall(row: dict[str, float], k: int) -> float:
    """R@k; 1 for a k with which it is left out, as it is always 1."""
    return next((value for name, value in row.items() if name.startswith(f"R@{k}/")), 1.0)


def _table_format(config: Config, files: list[str]) -> pairs.Options:
    """The columns, and how they are written. Raises BadInput for a table without rows or these columns."""
    options: pairs.Options = _Table(
        context_column=config.question or pairs.Options.context_column,
        response_column=config.answer or pairs.Options.response_column,
        encoding=config.encoding,
        delimiter=config.delimiter,
        # Of a table that is called train.csv or test.csv, all rows would be in one split.
        split_by="groups" if all(named_split(storage.name_of(file)) for file in files) else "names",
    )
    _require_columns(config, files, options)
    options, _ = pairs.with_guessed_columns(files, options, raw.Reading())
    pairs.require_columns(files, options, raw.Reading())
    return options


def _require_columns(config: Config, files: list[str], options: pairs.Options) -> None:
    """Raises BadInput for a table without rows, and where columns that nobody named cannot be found by their
    names."""
    reading, report = raw.Reading(), ParseReport()
    rows = (tables.read(file, {}, reading, report, lambda name: True, options) for file in files)
    head = list(itertools.islice(itertools.chain.from_iterable(rows), 2))
    if not head:
        broken = program.counts_in_words(report.malformed.counts)
        refusal = f"has no rows{f' that can be read ({broken})' if broken else ''}"
        raise BadInput("; ".join([f"{config.table}: {refusal}", *report.notes]))
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
        reason = f"no column has a usual name for {whats}s; choose by {flags}: {tables.names_text(columns)}"
        faults.append(reason + (hint or _header_hint(columns)))
    if faults:
        raise BadInput(f"{config.table}: {'; '.join(faults)}")


def _header_hint(columns: Sequence[str]) -> str:
    """For a table whose columns are called like texts, what may be missing; "" for others."""
    texts = [name for name in columns if name.endswith(("?", ".", "!")) or len(name.split()) > 4]
    if not texts:
        return ""
    return f" ({texts[0]!r} looks like a text: the first line has to name the columns, as question,answer)"


def _job_options(config: Config, group: str) -> str:
    """More options of a job that reads the table, as one variable of the workflow."""
    plain = tables.TableFormat()
    words = [
        f"--{group}.{name} {shlex.quote(getattr(config, name))}"
        for name in ("encoding", "delimiter")
        if getattr(config, name) != getattr(plain, name)
    ]
    return " ".join([*words, "--redact true"] if config.redact else words)


def _decide(config: Config, files: list[str], table: pairs.Options) -> tuple[bool, str]:
    """(whether to train, a line that says why)"""
    answers_of_questions, rows, empty = defaultdict[str, set[str]](set), 0, 0
    report = ParseReport()
    for file in files:
        for _, row in tables.read(file, table.columns, raw.Reading(), report, form=table):
            values = map(row.get, (table.context_column, table.response_column))
            # NaN is an empty cell of a column of numbers, and 0 is none.
            question, answer = ("" if v in (None, []) or v != v else str(v) for v in values)
            if question.strip() and answer.strip():
                answers_of_questions[question].add(answer)
                rows += 1
            else:
                empty += 1
    _say_unread_rows(config.table, report)
    answers = set[str]().union(*answers_of_questions.values())
    if len(answers) < 2:
        raise BadInput(f"{config.table}: different answers: {len(answers)}; allowed: 2 or more")
    several = [question for question, found in answers_of_questions.items() if len(found) > 1]
    if empty:
        print(f"rows without a question or an answer, left out: {empty:,}", flush=True)
    if several:
        shown = f"such as {several[0]!r}"
        print(
            f"questions with several answers, {shown}: {len(several):,}; all are kept", flush=True
        )
    if tags := [tag[0] for answer in answers if (tag := _TAG.search(answer))]:
        found = f"answers with HTML, such as {min(tags)}: {len(tags):,}"
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
    count = f"rows that cannot be read: {unread:,} of {report.records:,}"
    if unread > report.records * raw.Reading().max_malformed_share:
        raise BadInput(f"{table}: {count}: {found}")
    print(f"{count}, left out: {found}", flush=True)


def _has_changed(config: Config, files: list[str], table: pairs.Options) -> bool:
    """Whether the table has changed since the corpus was made. Raises BadInput for another table."""
    corpus = storage.join(config.work, "corpus")
    if not storage.exists(storage.join(corpus, MANIFEST)):
        return False
    made_from = open_artifact(corpus, "corpus").manifest["inputs"]["input"]
    input_names = pairs.input_names(files, table)
    if fingerprints.raw_fingerprint(files, input_name=input_names) == made_from["fingerprint"]:
        return False
    if made_from["uri"] != config.table:
        raise BadInput(f"--work {config.work}: holds what was made of {made_from['uri']}; allowed: a folder "
                       f"of its own for {config.table}, such as --work {config.work}-2")  # fmt: skip
    return True


def _embed_table(config: Config, steps: workflow.Config, has_changed: bool) -> program.Summary:
    """Embeds a table without training, and serves it unless a service runs, which follows. Where the table is
    again the one of the corpus, a running service may have another one."""
    model, anew = _served_model(config.work), f"to train anew: --work {config.work}-2"
    state = "has changed since" if has_changed else "is as it was when"
    found = f"{config.table} {state} {storage.join(config.work, 'corpus')} was made"
    if not storage.exists(storage.join(config.work, model, MANIFEST)):
        raise BadInput(f"{found}, and there is no model yet; {anew}")
    if config.train is not None:
        raise BadInput(f"--train {str(config.train).lower()}: {found}; {anew}")
    print(f"{found}: {config.work}/{model} embeds it, without training; {anew}", flush=True)
    steps = replace(_steps_of(steps, model), start_at="pool")
    is_served = _is_served(config)
    if not is_served:
        cluster.require_free("127.0.0.1", config.port)
    if config.dry_run:
        return workflow.run(steps)
    if not is_served:
        return _embed_and_serve(steps)
    done = workflow.run(replace(steps, skip=("serve",)))
    print(f"the service at port {config.port} follows within seconds", flush=True)
    return done


def _is_served(config: Config) -> bool:
    """Whether a service of this folder's model is at the port. One that asks for a token is taken for it."""
    uri = storage.join(config.work, _served_model(config.work))
    if not storage.exists(storage.join(uri, MANIFEST)):
        return False
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{config.port}/info", timeout=5) as answer:
            served = json.load(answer)["model"]["fingerprint"]
    except urllib.error.HTTPError as error:
        return error.code == HTTPStatus.UNAUTHORIZED
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return False  # nobody listens, or another program
    return bool(served == open_artifact(uri, "ranker").fingerprint)


def _served_model(work: str) -> str:
    """The model that embedded the pool, which a new table or evaluation does not change."""
    pools = storage.join(work, "pools")
    if version := versions.current_name(pools, "answers"):
        pool = open_artifact(storage.join(pools, "answers", version), "pool")
        return storage.name_of(pool.manifest["inputs"]["model"]["uri"])
    return "ranker" if storage.exists(storage.join(work, "ranker", MANIFEST)) else "untrained"


if __name__ == "__main__":
    program.main(Config, run, "faq")

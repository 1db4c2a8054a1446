"""jobs.faq: from a table to a service by one command, which says what it has chosen."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModel

from jobs import convert_model, faq
from pipeline.artifact import open_artifact
from pipeline.config import parse
from tests.helpers import free_port, wait_until

ROOT = Path(__file__).parents[2]
CARDS = [f"your card number {at} is in the post" for at in range(30)]
QUESTIONS = ["where is card {} ?", "has card {} been sent ?", "when comes {} ?", "i wait for {}"]
TABLE = "".join(f"{q.format(at)},{card}\n" for at, card in enumerate(CARDS) for q in QUESTIONS)


@pytest.fixture(scope="module")
def encoder(tracking_uri, tiny_ranker, tmp_path_factory) -> Path:
    """A directory of sentence-transformers, with as many positions as published encoders have."""
    output = tmp_path_factory.mktemp("encoders") / "tiny"
    model, to = tiny_ranker("bi").uri, "sentence-transformers"
    convert_model.run(convert_model.Config(model=model, to=to, output=str(output)))
    folder = output / "context"
    shape = AutoConfig.from_pretrained(folder)
    shape.max_position_embeddings = 512
    AutoModel.from_config(shape).save_pretrained(folder)
    return folder


@pytest.fixture
def command(encoder, tmp_path) -> Callable[..., subprocess.Popen[str]]:
    """`command("--train", "false")`: `polyrank faq faq.csv --encoder …` in the folder of the table."""

    def start(*options: object) -> subprocess.Popen[str]:
        # A shell that runs the tests in the background lets its children ignore Ctrl-C.
        hears_it = ("env", "--default-signal=INT")
        polyrank = Path(sys.executable).with_name("polyrank")
        words = [*hears_it, polyrank, "faq", "faq.csv", "--encoder", encoder]
        return subprocess.Popen(
            [*map(str, (*words, *options))], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    return start


@contextmanager
def interrupted(process: subprocess.Popen[str]) -> Iterator[list[str]]:
    """The lines until the service answers; then Ctrl-C, as a terminal sends it."""
    lines = list[str]()
    try:
        for line in process.stdout or ():
            lines.append(line)
            if line.startswith("Ctrl-C ends it"):
                break
        else:
            pytest.fail("".join(lines))
        yield lines
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.communicate()


def verbs_in(lines: list[str]) -> list[str]:
    """The jobs of the steps."""
    return [line.split(": polyrank ")[1].split()[0] for line in lines if line.startswith("== ")]


def rank(port: int, context: str) -> list[dict]:
    body = json.dumps({"context": context, "pool": "answers", "top_k": 30}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/rank", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["results"]


@pytest.mark.long  # a dozen processes, each with a Ray
@pytest.mark.timeout(900)
def test_a_table_becomes_a_service_which_the_same_command_resumes(command, tmp_path):
    (tmp_path / "faq.csv").write_text("Question,Answer\n" + TABLE)
    port = free_port()
    with interrupted(process := command("--port", port)) as lines:
        said = "".join(lines)
        assert {result["text"] for result in rank(port, "where is card 7 ?")} == {*CARDS}
        # Torch and the encoder, 1 GB, are not kept beside the service.
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    assert "\nthe right answer first, among all answers, for " in said
    assert process.returncode == 0
    assert lines[0].startswith(
        "questions: column 'Question'; answers: column 'Answer' (--question and"
    )
    assert lines[1].startswith("120 rows have 30 answers, 4.0 questions for each: trains (")
    steps = ["prepare_corpus", "finetune", "evaluate", "embed_pool", "serve"]
    assert verbs_in(lines) == steps
    assert "--model my/ranker --candidates faq.csv --embed.text-column Answer" in said
    assert f"the playground:  http://127.0.0.1:{port}/\n" in said
    made = open_artifact(str(tmp_path / "my" / "ranker"), "ranker").fingerprint

    with interrupted(service := command("--port", port)) as lines:
        assert "".join(lines).count('"already_done": true') == 3
        steps.remove("evaluate")  # its result is read
        assert verbs_in(lines) == steps
        assert open_artifact(str(tmp_path / "my" / "ranker"), "ranker").fingerprint == made

        (tmp_path / "faq.csv").write_text("Question,Answer\nhow ?,so\n" + TABLE)
        output, _ = (process := command("--port", port)).communicate()
        assert process.returncode == 0
        assert "faq.csv has changed since my/corpus was made: my/ranker embeds it, wi" in output
        assert f"the service at port {port} follows within seconds" in output
        wait_until(lambda: "so" in {result["text"] for result in rank(port, "how ?")}, service)

        (tmp_path / "faq.csv").write_text("Question,Answer\n" + TABLE)  # as at first
        output, _ = (process := command("--port", port)).communicate()
        assert process.returncode == 0
        assert "faq.csv is as it was when my/corpus was made: my/ranker embeds it, wi" in output
        wait_until(lambda: "so" not in {result["text"] for result in rank(port, "how ?")}, service)


def test_a_changed_table_needs_a_model_and_the_folder_is_of_one_table(tmp_path, run_job_here):
    first, second = tmp_path / "faq.csv", tmp_path / "other.csv"
    for table in (first, second):
        table.write_text("question,answer\nhow ?,so\nwhen ?,now\n")
    work = tmp_path / "my"
    shares = ("--pairs.shares", "1", "0", "0")
    corpus = ("--format", "pairs", "--input", first, *shares, "--output", work / "corpus")
    assert run_job_here("prepare_corpus", *corpus).code == 0
    refused = run_job_here("faq", second, "--work", work).refusal
    assert f"--work {work}: holds what was made of {first}; allowed: a folder of its" in refused
    first.write_text("question,answer\nhow ?,so\nwhere ?,here\n")
    refused = (said := run_job_here("faq", first, "--work", work)).refusal
    assert f"{first} has changed since {work}/corpus was made, and there is no model yet" in refused
    assert "rows have" not in said.stdout  # whether training pays
    assert refused.endswith(f"to train anew: --work {work}-2")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_encoder_is_served_as_it_is_where_each_question_has_its_own_answer(command, tmp_path):
    rows = "".join(f"where is {at} ?;it is at place {at}\n" for at in range(20))
    (tmp_path / "faq.csv").write_text("frage;antwort\n" + rows)
    port = free_port()
    options = ("--question", "frage", "--answer", "antwort", "--delimiter", ";", "--port", port)
    with interrupted(command(*options)) as lines:
        assert len(rank(port, "where is 7 ?")) == 20
    assert lines[1].startswith("20 rows have 20 answers, 1.0 questions for each: serves the enc")
    assert verbs_in(lines) == ["prepare_corpus", "convert_model", "evaluate", "embed_pool", "serve"]
    # Nothing is trained, so the many questions of train/ are new.
    assert any("examples of train/ are asked" in line for line in lines)


def decide(table: Path, *options: str) -> tuple[bool, str]:
    """(whether the job would train, why)"""
    config = parse(faq.Config, [str(table), *options], "polyrank faq")
    return faq._decide(config, [config.table], faq._table_format(config, [config.table]))


@pytest.fixture
def refusal(run_job_here, tmp_path, monkeypatch) -> Callable[..., str]:
    """`refusal("question,answer\\n…", "--dry-run")`: why a table with this text is refused; None: none is
    there."""
    monkeypatch.chdir(tmp_path)

    def run(text: str | None, *options: object, name: str = "faq.csv") -> str:
        if text is not None:
            (tmp_path / name).write_text(text, errors="surrogateescape")
        return run_job_here("faq", name, *options).refusal

    return run


@pytest.mark.parametrize(("rows", "answers", "options", "line"), [
    (120, 60, (), "120 rows have 60 answers, 2.0 questions for each: trains (training pays from 2 on"),
    (120, 61, (), "120 rows have 61 answers, 1.9 questions for each: serves the encoder as it is ("),
    (99, 3, (), "99 rows have 3 answers, 33.0 questions for each: serves the encoder as it is ("),
    (99, 3, ("--train", "true"), "99 rows have 3 answers, 33.0 questions for each; --train true"),
    (120, 60, ("--train", "false"), "120 rows have 60 answers, 2.0 questions for each; --train f"),
])  # fmt: skip
def test_the_table_decides_whether_to_train(tmp_path, rows, answers, options, line):
    lines = "".join(f'{{"query": "q{at}", "reply": "r{at % answers}"}}\n' for at in range(rows))
    (tmp_path / "faq.jsonl").write_text(lines)
    trains, reason = decide(tmp_path / "faq.jsonl", *options)
    assert reason.startswith(line)
    assert trains == ("trains" in line or "--train true" in line)


_OBJECTS = [("how ?", "so"), ("how ?", "so"), ("how ?", "thus"), ("when ?", " ")]


@pytest.mark.parametrize(("name", "text"), [
    ("faq.csv", "question,answer\nhow ?,so\nhow ?,so\nhow ?,thus\nwhen ?, \n,now\n"),
    ("faq.jsonl", "\n".join(json.dumps(row) for row in (
        *(dict(zip(("question", "answer"), pair, strict=True)) for pair in _OBJECTS), {"answer": "now"}))),
])  # fmt: skip
def test_rows_without_a_side_and_questions_with_several_answers_are_said(
    tmp_path, capsys, name, text
):
    (tmp_path / name).write_text(text)
    _, reason = decide(tmp_path / name)
    assert reason.startswith("3 rows have 2 answers, 1.5 questions for each")
    said = capsys.readouterr().out
    assert "rows without a question or an answer, left out: 2" in said
    assert "questions with several answers, such as 'how ?': 1; all are kept" in said


def test_rows_that_cannot_be_read_and_html_are_said_before_the_work(tmp_path, refusal, capfd):
    table = tmp_path / "faq.csv"
    rows = [f"how {n} ?,<p>so {n}</p>\n" for n in range(300)]
    table.write_text("".join(["question,answer\n", *rows, "when ?,now, or later\n"]))
    decide(table)
    said = capfd.readouterr().out
    found = "left out: 1 more or fewer fields than columns (lines 302; "
    assert f"rows that cannot be read: 1 of 301, {found}" in said
    assert "answers with HTML, such as <p>: 300; it is embedded and shown as it is" in said
    text = "".join(["question,answer\n", *rows[:90], "when ?,now, or later\n" * 5])
    found = "5 more or fewer fields than columns (lines 92, 93,"
    assert f"faq.csv: rows that cannot be read: 5 of 95: {found}" in refusal(text, "--dry-run")


@pytest.mark.parametrize(("shares", "best", "counts"), [
    ((0.5, 0.75), "ranker", {"untrained": (12, 14), "trained": (18, 20)}),
    ((0.75, 0.5), "untrained", {"untrained": (18, 20), "trained": (12, 14)}),
    ((0.5, 0.5), "ranker", {"untrained": (12, 14), "trained": (12, 14)}),
    ((0.58, 0.5), "ranker", {"untrained": (14, 16), "trained": (12, 14)}),
    ((0.5,), "ranker", {"trained": (12, 14)}),  # an encoder that jobs.evaluate cannot ask
])  # fmt: skip
def test_the_model_that_answers_more_questions_is_served(shares, best, counts):
    names = ("untrained tiny", "bi")[-len(shares) :]
    rows = {name: {"R@1/9": r, "R@3/9": r + 0.1} for name, r in zip(names, shares, strict=True)}
    table = {"bm25": {"R@1/9": 0.9}, **rows}
    model, text = faq._best_model({"examples": 24, "split": "valid", "table": table})
    assert model == best
    lines = text.splitlines()
    assert lines[0].endswith("for 24 questions that no model has seen:")
    found = [
        re.fullmatch(r"   (\w+) +(\d+), among the first three (\d+)", line) for line in lines[1:-1]
    ]
    assert {said[1]: (int(said[2]), int(said[3])) for said in found if said} == counts


def test_without_training_the_answers_texts_are_asked():
    table = {"bm25": {"R@1/9": 0.9}, "bi": {"R@1/9": 0.5, "R@3/9": 0.6}}
    model, line = faq._best_model({"examples": 24, "split": "train", "table": table})
    assert model == "untrained"
    assert (
        "for 24 questions of the table, by the texts of the answers alone:\n   untrained   12, "
        in line
    )


def test_scores_that_are_too_low_are_said_of_a_pool_that_knows_no_asked_question():
    least = {"score": 7.5, "right": 0.05, "wrong": 0.5, "absent": 0.6}
    said = faq._least_score_hint({"split": "valid", "least_scores": {"bi": least}})
    assert said.startswith("\nto show no answer below a score of 7.5 hides 5% of the right")
    assert faq._least_score_hint({"split": "train", "least_scores": {"bi": least}}) == ""


def test_errors_name_the_options_of_this_job(refusal):
    refused = refusal("id;question;answer\n1;how ?;so\n", "--dry-run")
    assert "has one column, 'id;question;answer'; allowed: two or more (the fields seem" in refused
    assert "which --delimiter ';' reads" in refused
    rows = "".join(f"how {n} ?,so {n}\n" for n in range(3000))
    refused = refusal(f"question,answer\n{rows}wie ?,f\udcfcr\n", "--dry-run")
    assert "--encoding cp1252" in refused and "pairs." not in refused


def test_a_table_too_small_to_train_on_is_refused_in_words_of_this_job(refusal, encoder, tmp_path):
    work = ("--encoder", encoder, "--work", tmp_path / "my", "--port", free_port())
    rows = "".join(f"how {n} ?,so {n}\n" for n in range(24))
    for text, said in (
        ("", "pairs.csv: has no rows"),  # "pairs." is no option here
        (rows, "64 on each of 1 workers; allowed: more rows, or --train false"),
    ):
        refused = refusal(f"question,answer\n{text}", "--train", "true", *work, name="pairs.csv")
        assert refused.endswith(said)


def test_answers_may_be_numbers(tmp_path, capsys):
    table = tmp_path / "faq.jsonl"
    rows = [{"question": f"how much is {n} ?", "answer": n % 5} for n in range(20)]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, reason = decide(table)
    assert reason.startswith("20 rows have 5 answers")
    assert capsys.readouterr().out == ""


GERMAN = "frage,antwort\nwie ?,so\n"


@pytest.mark.parametrize(("text", "options", "said"), [
    ("question,answer\nhow ?,so\nwhen ?,so\n", (), "faq.csv: different answers: 1; allowed: 2 or more"),
    (GERMAN, (), "no column has a usual name for questions or answers; choose by --question and --answer: "
     "frage"),
    (GERMAN, ("--question", "frage"),
     "no column has a usual name for answers; choose by --answer: frage"),
    ("question,query,answer\nhow ?,how ?,so\n", (),
     "more than one column has a usual name for questions; choose by --question: question"),
    ("frage;antwort\nwie ?;so\n", (), "separated by ';', which --delimiter ';' r"),
    ("where is my card ?,It is in the post.\nwhen ?,Soon.\n", (),
     "('where is my card ?' looks like a text: the first line has to name the col"),
    (None, (), "--table faq.csv: no such file"),
    ("PK\x03\x04\x14\x00\x06\x00\b\x00\x00\x00!\x00\udcff", (), "faq.csv: an Excel workbook, or another ZIP"),
    ("", (), "faq.csv: has no rows"),
    ("question,answer\n", (), "faq.csv: has no rows"),
    ('question,answer\n"how,so\n', (), "faq.csv: has no rows that can be read (1 "),
    ("question;answer\nhow, so ?;so, so\n", (), "separated by ';', which --delimiter ';' reads"),
])  # fmt: skip
def test_a_table_without_rows_or_with_other_columns_is_refused(refusal, text, options, said):
    assert said in refusal(text, *options)


def test_a_column_that_is_not_there_is_refused_with_those_that_are(refusal, tmp_path):
    allowed = f"the columns of {tmp_path}/faq.csv: frage, antwort"
    refused = refusal(GERMAN, "--question", "q", "--answer", "antwort")
    assert f"faq: question: 'q' is not allowed; allowed: {allowed}" in refused


def test_nested_rows_are_named(refusal):
    rows = '{"id": 1, "qa": {"q": "how ?", "a": "so", "votes": 3}}\n' * 3
    refused = refusal(rows, name="faq.jsonl")
    told = "choose by --question and --answer: id, qa ('qa' holds objects with the texts q, a, "
    assert told in refused
    assert refused.endswith("jq -c '. + .qa' adds them to it)")
    refused = refusal('{"qa": {"q": "how ?", "a": "so"}}\n' * 3, name="faq.jsonl")
    assert "has one column, 'qa'; allowed: two or more ('qa' holds objects with" in refused


def test_a_port_that_is_taken_is_refused_before_the_work(run_job_here, tmp_path):
    (tmp_path / "faq.csv").write_text("question,answer\nhow ?,so\nwhen ?,now\n")
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        options = ("--port", port, "--work", tmp_path / "my")
        said = run_job_here("faq", tmp_path / "faq.csv", *options).refusal
    assert f"--port {port}: in use" in said and not (tmp_path / "my").exists()
    said = run_job_here("faq", tmp_path / "faq.csv", "--port", 70_000).refusal
    assert "port: 70000 is not allowed; allowed: 1 to 65535" in said


def test_an_encoder_that_is_not_there_is_refused_before_the_work(run_job_here, tmp_path):
    (tmp_path / "faq.csv").write_text("question,answer\nhow ?,so\nwhen ?,now\n")
    options = ("--encoder", tmp_path / "none", "--work", tmp_path / "my", "--port", free_port())
    said = run_job_here("faq", tmp_path / "faq.csv", *options).refusal
    assert f"--encoder {tmp_path}/none: there is no such folder" in said
    assert not (tmp_path / "my").exists()


def test_a_changed_table_beside_another_program_at_the_port_is_refused(
    run_job_here, tmp_path, tiny_ranker
):
    """It said that the service follows, and ended."""
    table, work = tmp_path / "faq.csv", tmp_path / "my"
    table.write_text("question,answer\nhow ?,so\nwhen ?,now\n")
    shares = ("--pairs.shares", "1", "0", "0")
    corpus = ("--format", "pairs", "--input", table, *shares, "--output", work / "corpus")
    assert run_job_here("prepare_corpus", *corpus).code == 0
    shutil.copytree(tiny_ranker("bi").uri, work / "ranker")
    table.write_text("question,answer\nhow ?,so\nwhere ?,here\n")
    other = ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    with other:
        port = other.server_port
        said = run_job_here("faq", table, "--work", work, "--port", port).refusal
        other.shutdown()
    assert f"--port {port}: in use" in said and not (work / "pools").exists()


def test_a_table_that_is_called_as_a_split_is_divided_all_the_same(run_job_here, tmp_path):
    """Of test.csv all rows were in test/, so there was none to train or to ask."""
    table = tmp_path / "test.csv"
    table.write_text("question,answer\nhow ?,so\nwhen ?,now\n")
    done = run_job_here("faq", table, "--dry-run")
    assert "--pairs.shares 0.85 0.15 0 --pairs.split-by groups --output" in done.stdout


def test_names_with_spaces_and_dollars_reach_the_steps(run_job_here, tmp_path):
    table = tmp_path / "my $faq.csv"
    table.write_text("the question,$answer\nhow ?,so\nwhen ?,now\n")
    columns = ("--question", "the question", "--answer", "$answer")
    done = run_job_here("faq", table, *columns, "--dry-run")
    assert done.code == 0, done.stderr
    assert f"--input '{table}' --pairs.context-column 'the question'" in done.stdout
    assert "--embed.text-column '$answer'" in done.stdout
    numbers = re.findall(r"^== (\d/\d) ", done.stdout, re.MULTILINE)
    assert numbers == ["1/5", "2/5", "3/5", "4/5", "5/5"]

"""The first phase of Reddit dumps, where files and processes fail. On a real Ray."""

from __future__ import annotations

import inspect
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from pipeline.config import Stopped
from pipeline.corpora import raw
from pipeline.corpora.privacy import Privacy
from pipeline.corpora.reddit import Options, partition
from pipeline.corpora.reddit.partition import DumpRecord, read_dumps
from pipeline.engine import report
from pipeline.engine.attempts import failed_outcome
from pipeline.engine.draft import Draft
from pipeline.engine.resources import largest_memory, total_memory

PLAIN = Privacy(redact=False, authors="plain", salt="")
BLOCK_BYTES = 1 << 18
PADDING = "." * 20_000  # four blocks in a file
LABEL = "reddit: dump files to threads"


@pytest.fixture
def dumps(tmp_path) -> list[str]:
    """Two files of 40 comments each."""
    for name in ("a", "b"):
        write_comments(tmp_path / name)
    return [str(tmp_path / name) for name in ("a", "b")]


def write_comments(file: Path) -> None:
    name = file.name
    lines = [
        {"id": f"{name}{number}", "link_id": f"t3_{name}", "parent_id": f"t3_{name}", "score": 1,
         "body": f"comment {number} of {name}", "author": name, "subreddit": "pics",
         "permalink": PADDING}
        for number in range(40)
    ]  # fmt: skip
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_submissions(file: str) -> None:
    """Of each block of submissions, which are four, the reader looks at `Options.submissions`."""
    Path(file).write_text(
        "".join(
            json.dumps({"id": f"s{number}", "title": f"title {number}", "selftext": "", "author": "a",
                        "subreddit": "pics", "score": 1, "permalink": PADDING}) + "\n"
            for number in range(40)
        )
    )  # fmt: skip


def read(
    out: Draft, files: list[str], options: Options | None = None, privacy: Privacy = PLAIN
) -> tuple[list[DumpRecord], report.Stage]:
    with report.collect_stages() as stages:
        dumps = read_dumps(out, files, 2, BLOCK_BYTES, options or Options(), raw.Reading(), privacy)
    return dumps, stages[0]


def comments(dumps: list[DumpRecord]) -> int:
    return sum(block.counts["records"] for dump in dumps for block in dump.blocks.values())


@pytest.fixture
def killing_parser(tmp_path) -> Privacy:
    """Kills the process that parses comment 20 of `a`, as often as the file `deaths` says."""

    # Inside of a function: Ray's workers cannot import the module of a test.
    @dataclass(frozen=True)
    class Killing(Privacy):
        deaths: str

        def redacted_and_counted(self, texts: pa.Array) -> tuple[pa.Array, int]:
            file = Path(self.deaths)
            if "comment 20 of a" in texts.to_pylist() and (left := int(file.read_text())):
                file.write_text(str(left - 1))
                os.kill(os.getpid(), signal.SIGKILL)
            return texts, 0

    return Killing(redact=False, authors="plain", salt="", deaths=str(tmp_path / "deaths"))


@pytest.fixture
def killing_reader(tmp_path) -> Options:
    """Kills the process that reads a dump after its second block, as often as the file `deaths` says."""

    @dataclass(frozen=True)
    class Killing(Options):
        deaths: str = ""

        def __getattribute__(self, name: str) -> object:
            frame = inspect.currentframe().f_back
            if frame.f_code.co_name == "_read_file" and frame.f_locals["blocks"] == 2:
                file = Path(self.deaths)
                if left := int(file.read_text()):
                    file.write_text(str(left - 1))
                    os.kill(os.getpid(), signal.SIGKILL)
            return super().__getattribute__(name)

    return Killing(submissions="first-turn", deaths=str(tmp_path / "deaths"))


@pytest.mark.long  # 36 s on two slow cores; test_run.py has processes that die
@pytest.mark.usefixtures("local_ray")
def test_a_parser_that_dies_is_started_again_three_times_and_its_block_is_named(
    out, dumps, killing_parser, tmp_path, capsys
):
    (tmp_path / "deaths").write_text("5")
    with pytest.raises(Stopped) as stopped:
        read(out, dumps, privacy=killing_parser)
    message = str(stopped.value)
    assert message.startswith(f"{LABEL}: 1 of ")
    assert " tasks failed: block-00000-00000" in message
    assert f"({dumps[0]}, line " in message
    assert "): its process died 4 times" in message
    assert (tmp_path / "deaths").read_text() == "1"
    # All else is done, and the same command does the rest, though a parser dies once more.
    assert list(out.finished_tasks()) == ["file-00001"]
    capsys.readouterr()
    records, stage = read(out, dumps, privacy=killing_parser)
    assert comments(records) == 80
    (task,) = stage.crashed_hosts_by_task
    assert task.startswith("block-00000-")
    assert f"{LABEL}: {task} was started again: its process died on " in capsys.readouterr().err


@pytest.mark.long  # half a minute; CI has the parser that dies
@pytest.mark.usefixtures("local_ray")
def test_a_reader_that_dies_is_started_again_three_times_and_its_file_is_named(
    out, dumps, killing_reader, tmp_path
):
    write_submissions(dumps[0])
    (tmp_path / "deaths").write_text("5")
    with pytest.raises(Stopped) as stopped:
        read(out, dumps, killing_reader)
    assert f"file-00000 ({dumps[0]}): its process died 4 times" in str(stopped.value)
    assert (tmp_path / "deaths").read_text() == "1"
    assert "file-00001" in out.finished_tasks()
    records, stage = read(out, dumps, killing_reader)
    assert comments(records) == 80
    assert list(stage.crashed_hosts_by_task) == ["file-00000"]


@pytest.mark.usefixtures("local_ray")
def test_files_are_read_side_by_side_within_their_memory_whatever_becomes_of_one(
    out, dumps, tmp_path
):
    """Blocks of `b` are parsed while `a` is read; a third file, which is not there, is named."""

    @dataclass(frozen=True)
    class Waiting(Options):
        """The reader of `a` waits, after its second block, for the first block of `b`. Readers and parsers
        note the memory that Ray has set aside for them."""

        folder: str = ""

        def __getattribute__(self, name: str) -> object:
            import ray

            frame = inspect.currentframe().f_back
            stage, folder = frame.f_code.co_name, super().__getattribute__("folder")
            if stage in ("_read_file", "normalise"):
                resources = ray.get_runtime_context().get_assigned_resources()
                Path(folder, stage).write_text(str(resources.get("memory", 0)))
            if stage == "_read_file" and frame.f_locals["file"] == "file-00000":
                end = time.monotonic() + 60
                while frame.f_locals["blocks"] == 2 and not Path(folder, "parsed").exists():
                    if time.monotonic() > end:
                        raise ArithmeticError("no block of the other file was parsed")
                    time.sleep(0.01)
            return super().__getattribute__(name)

    @dataclass(frozen=True)
    class Noting(Privacy):
        parsed: str

        def redacted_and_counted(self, texts: pa.Array) -> tuple[pa.Array, int]:
            if "comment 0 of b" in texts.to_pylist():
                Path(self.parsed).touch()
            return texts, 0

    write_submissions(dumps[0])
    missing = str(tmp_path / "missing")
    with pytest.raises(Stopped) as stopped:
        read_dumps(
            out, [*dumps, missing], 2, BLOCK_BYTES,
            Waiting(submissions="first-turn", folder=str(tmp_path)), raw.Reading(files_at_once=2),
            Noting(redact=False, authors="plain", salt="", parsed=str(tmp_path / "parsed")),
        )  # fmt: skip
    assert f"1 of 11 tasks failed: file-00002 ({missing}, line 1): FileNotFound" in str(
        stopped.value
    )
    assert list(out.finished_tasks()) == ["file-00000", "file-00001"]
    reader, parser = (float((tmp_path / name).read_text()) for name in ("_read_file", "normalise"))
    half = largest_memory() // 2  # of one node; two files are read at a time
    reader_bytes = (2 << 30) + (100 << 20) + 2 * BLOCK_BYTES
    assert reader == pytest.approx(min(half, total_memory() // 4, reader_bytes), abs=1)
    assert parser == pytest.approx(min(half, (100 << 20) + 5 * BLOCK_BYTES), abs=1)


def test_a_dump_that_cannot_be_read_stops_no_other_and_is_named(
    out, dumps, actors_in_process, monkeypatch
):
    """The same command parses only the dumps that are not done."""
    Path(dumps[0]).unlink()
    with pytest.raises(Stopped) as stopped:
        read(out, dumps)
    assert f"file-00000 ({dumps[0]}, line 1): FileNotFoundError: " in str(stopped.value)
    assert list(out.finished_tasks()) == ["file-00001"]
    write_comments(Path(dumps[0]))
    parsed, parse_block = [], partition._parse_block

    def noted(parsing, row):
        parsed.append(row["task"])
        return parse_block(parsing, row)

    monkeypatch.setattr(partition, "_parse_block", noted)
    again, stage = read(out, dumps)
    assert parsed == list(again[0].blocks)
    assert list(stage.costs) == [name for dump in again for name in dump.blocks]
    assert comments(again) == 80
    assert read(out, dumps) == (again, stage) and len(parsed) == len(again[0].blocks)


def test_after_too_many_failures_the_tasks_end_and_those_that_died_are_told(
    out, dumps, monkeypatch, capsys
):
    crashed_hosts_by_task: dict[str, list[str]] = {}

    def rows(*_: object) -> Iterator[dict[str, str]]:
        try:
            for number in range(1000):
                task = f"block-00000-{number:06d}"
                outcome = failed_outcome(task, OSError("no route to host"))
                row = {"task": task, "file": "file-00000", "input": dumps[0], "record": None}
                yield {**row, "outcome": json.dumps(outcome)}
        finally:
            crashed_hosts_by_task["block-00000-000003"] = ["a host"]

    monkeypatch.setattr(partition, "_parse_blocks", rows)
    counter = SimpleNamespace(end=lambda: crashed_hosts_by_task)
    monkeypatch.setattr(partition.AttemptCounter, "begin", lambda: counter)
    with pytest.raises(Stopped, match="20 of 20 tasks failed"):
        read_dumps(out, dumps, 2, BLOCK_BYTES, Options(), raw.Reading(), PLAIN)
    assert "block-00000-000003 was started again: its process died on a host" in (
        capsys.readouterr().err
    )

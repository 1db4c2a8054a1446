"""Phase 1: reads dump files, and writes their comments to storage by bucket of threads."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline import progress
from pipeline.arrays import Ints
from pipeline.config import Stopped
from pipeline.corpora import buckets, raw
from pipeline.corpora.file_tasks import redacted_count
from pipeline.corpora.privacy import Privacy
from pipeline.corpora.reddit.comments import normalise
from pipeline.corpora.reddit.lines import kind_of, parse_comments, parse_submissions
from pipeline.corpora.reddit.options import Options
from pipeline.engine import executors, report, resources, waiting
from pipeline.engine.attempts import DIED, MAX_STARTS, AttemptCounter, failed_outcome, run_task
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskCost, TaskRecord, from_json, to_json
from pipeline.engine.run import describe, failures, run_on_cluster
from pipeline.storage.failures import DELAYS_S

_WAITING_BYTES = 256 << 20  # of decompressed lines, per core
# Readers need no core of their own. But with 0 they would run on the head, which has no core either, and
# a whole core less what they take would be lost to the parsers.
_READER_CPUS, _PARSER_CPUS = 0.01, 0.98
_WINDOW_BYTES = 2 << 30  # what decompression looks back on
_WORKER_BYTES = 100 << 20  # a process that does nothing yet
_BLOCKS_IN_PARSER = 5  # measured: 4.5 times its block of lines

_LABEL = "reddit: dump files to threads"

Records = dict[str, TaskRecord]
"""By task: "file-00003" for a dump file, "block-00003-000017" for a block of its lines."""


@dataclass(frozen=True, kw_only=True)
class DumpRecord(TaskRecord):
    """A dump file that was read to its end."""

    blocks: int
    lines: int
    cut_off: str
    """The reason why its compressed stream ends early; "": it does not."""


@dataclass(frozen=True)
class _Parsing:
    """The settings of all tasks."""

    draft: Draft
    bucket_count: int
    block_bytes: int
    options: Options
    reading: raw.Reading
    privacy: Privacy


def read_dumps(
    draft: Draft,
    files: list[str],
    bucket_count: int,
    block_bytes: int,
    options: Options,
    reading: raw.Reading,
    privacy: Privacy,
) -> Records:
    """Returns the records of all files and of all their blocks."""
    parsing = _Parsing(draft, bucket_count, block_bytes, options, reading, privacy)
    finished = draft.finished_tasks()
    parsed_tasks = {task for task in finished if task.startswith("block")}
    pending_files = {i: uri for i, uri in enumerate(files) if _file_task(i) not in finished}
    with progress.bar(_LABEL, None, unit="comment") as bar:
        earlier_records = finished.records(parsed_tasks, TaskRecord).values()
        bar.update(sum(record.counts["records"] for record in earlier_records))
        parser = _DumpParser(parsing, parsed_tasks, bar)
        if pending_files:
            parser.parse(pending_files)
            finished = draft.finished_tasks()
    names = sorted(task for task in finished if task.startswith("block"))
    blocks = finished.records(names, TaskRecord)
    cost_by_task = {task: record.cost for task, record in blocks.items()}
    crashed_hosts_by_task = parser.crashed_hosts_by_task
    report.end_stage(report.Stage(_LABEL, cost_by_task, parser.failed, crashed_hosts_by_task))
    if parser.failed:
        raise Stopped(describe(parser.failed, parser.inputs, _LABEL))
    dump_records = finished.records([_file_task(i) for i in range(len(files))], DumpRecord)
    for dump in dump_records.values():
        if dump.cut_off:  # which its record notes
            raw.accept_truncated(raw.Truncated(dump.cut_off), reading, [], dump.lines)
    return {**blocks, **dump_records}


class _DumpParser:
    """Parses dump files. Marks a file when all its blocks are parsed, because only then is its mark true."""

    def __init__(self, parsing: _Parsing, parsed_tasks: set[str], bar: progress.Bar) -> None:
        self._parsing, self._parsed_tasks, self._bar = parsing, parsed_tasks, bar
        self._block_counts = Counter(map(_file_of, parsed_tasks))
        self._file_records: dict[str, DumpRecord] = {}
        self.inputs: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.crashed_hosts_by_task: dict[str, list[str]] = {}

    def parse(self, files: Mapping[int, str]) -> None:
        counter = None if executors.current() else AttemptCounter.begin()
        rows = _parse_blocks(self._parsing, files, self._parsed_tasks, counter)
        self.failed = failures(self._block_outcomes(rows), _LABEL, self._count_block)
        self.crashed_hosts_by_task = counter.end() if counter else {}
        for index, uri in files.items():  # a reader that has begun too often yields no row
            file = _file_task(index)
            starts = len(self.crashed_hosts_by_task.get(file, ()))
            if file not in self._file_records and starts >= MAX_STARTS:
                self.failed[file], self.inputs[file] = DIED, uri

    def _block_outcomes(
        self, rows: Generator[dict[str, Any]]
    ) -> Generator[dict[str, Any], None, None]:
        with closing(rows):  # no task goes on after the last outcome that is waited for
            for row in rows:
                self.inputs[row["task"]] = row["input"]
                if row["file_record"]:
                    self._file_records[row["task"]] = from_json(DumpRecord, row["file_record"])
                    self._mark_if_done(row["task"])
                else:
                    yield json.loads(row["outcome"])

    def _count_block(self, task: str, cost: TaskCost) -> None:
        self._bar.update(cost.rows)
        self._block_counts[_file_of(task)] += 1
        self._mark_if_done(_file_of(task))

    def _mark_if_done(self, file: str) -> None:
        record = self._file_records.get(file)
        if record and self._block_counts[file] == record.blocks:
            self._parsing.draft.mark(file, record)


def _file_task(index: int) -> str:
    return f"file-{index:05d}"


def _file_of(task: str) -> str:
    """ "block-00003-000017" and "file-00003" → "file-00003" """
    return "file-" + task.split("-")[1]


def _parse_blocks(
    parsing: _Parsing,
    files: Mapping[int, str],
    parsed_tasks: set[str],
    counter: AttemptCounter | None,
) -> Generator[dict[str, Any], None, None]:
    """A row with its outcome per block, parsed and filed; one per file, with its record, at its end, or with
    its outcome where it could not be read. `counter`: None: in this process."""
    read = functools.partial(_read_file, parsing, parsed_tasks)
    parse = functools.partial(_parse_and_mark, parsing)
    block_bytes, reading = parsing.block_bytes, parsing.reading
    if counter is None:
        for index, uri in files.items():
            file = pa.table({"index": [index], "uri": [uri]})
            for block in read(None, file):
                yield from parse(None, block).to_pylist()
        return

    def add_work(dataset: Any, counter: AttemptCounter) -> Any:
        import ray.data

        waiting.await_room(1)
        cores = resources.fitting(1)
        readers = min(reading.files_at_once or max(1, cores // 4), len(files))
        if not waiting.may_grow():  # else the bound would be that of the first node
            # What is decompressed waits in Ray's object store, and decompression is the faster half.
            waiting_bytes = cores * max(_WAITING_BYTES, 2 * block_bytes)
            execution = dataset.context.execution_options
            execution.resource_limits = execution.resource_limits.copy(
                object_store_memory=waiting_bytes
            )
        # Each row of a reader, a block of lines, is a block of Ray Data and so a task; by default it would
        # join them to 128 MiB.
        dataset.context.target_max_block_size = block_bytes // 2
        # Readers wait for parsers: together they leave them half of small machines.
        bound = resources.largest_memory() // 2
        bound_of_reader = min(bound, resources.total_memory() // 2 // readers)
        reader_bytes = _WORKER_BYTES + _WINDOW_BYTES + 2 * block_bytes
        parser_bytes = _WORKER_BYTES + _BLOCKS_IN_PARSER * block_bytes
        return (
            # One file feeds some five parsers.
            dataset.map_batches(
                functools.partial(read, counter),
                batch_size=1,
                batch_format="pyarrow",
                compute=ray.data.TaskPoolStrategy(size=readers),
                num_cpus=_READER_CPUS,
                memory=min(reader_bytes, bound_of_reader),
            ).map_batches(
                functools.partial(parse, counter),
                batch_size=1,
                batch_format="pyarrow",
                num_cpus=_PARSER_CPUS,
                memory=min(parser_bytes, bound),
            )
        )

    rows = [{"index": index, "uri": uri} for index, uri in files.items()]
    yield from run_on_cluster(rows, add_work, counter)


_READ_ROWS = pa.schema(
    [
        ("task", pa.string()),
        ("uri", pa.string()),
        ("kind", pa.string()),
        ("first_line", pa.int64()),
        ("lines", pa.large_binary()),
        ("file_record", pa.string()),
        ("outcome", pa.string()),
    ]
)


def _read_file(
    parsing: _Parsing, parsed_tasks: set[str], counter: AttemptCounter | None, batch: pa.Table
) -> Iterator[pa.Table]:
    """Streams one dump file: a row per block that is not parsed yet, then one with its record, or with its
    outcome where it cannot be read.

    None where its process has died too often: Ray keeps the rows that an earlier start has yielded, and
    takes no other ones in their places.
    """
    index, uri = batch["index"][0].as_py(), batch["uri"][0].as_py()
    file = _file_task(index)
    if counter and counter.add(file) > MAX_STARTS:
        return
    blocks, line, cut_off, kind, notes = 0, 1, "", None, list[str]()

    def row(**values: Any) -> pa.Table:
        place = {"uri": uri, "kind": kind, "first_line": line}
        return pa.Table.from_pylist([{**place, **values}], schema=_READ_ROWS)

    try:
        for block in raw.line_blocks(uri, parsing.block_bytes):
            kind = kind or kind_of(block)
            if kind is None:
                notes.append(f"{uri}: set aside, its first lines are no JSON objects")
                break
            if kind == "submissions" and parsing.options.submissions == "off":
                notes.append(f"{uri}: submissions, not used (reddit.submissions is off)")
                break
            task = f"block-{index:05d}-{blocks:06d}"
            if task not in parsed_tasks:
                yield row(task=task, lines=block)
            blocks += 1
            line += block.count(b"\n")
        else:
            if blocks == 0:
                notes.append(f"{uri}: set aside, it is empty")
    except raw.Truncated as error:
        cut_off = str(error)
        notes.append(raw.truncation_note(error, line - 1))
    except Exception as error:
        yield row(task=file, outcome=json.dumps(failed_outcome(file, error)))
        return
    counts = {"files": 1, "files.set_aside": int(blocks == 0)}
    record = DumpRecord(counts=counts, blocks=blocks, lines=line - 1, cut_off=cut_off, notes=notes)
    yield row(task=file, file_record=to_json(record))


def _parse_and_mark(parsing: _Parsing, counter: AttemptCounter | None, batch: pa.Table) -> pa.Table:
    """Parses the block of a row of `_read_file`: a row with its outcome. Other rows pass."""
    row = batch.to_pylist()[0]

    def work(draft: Draft, task: str, row: dict[str, Any]) -> TaskRecord:
        return _parse_block(parsing, row)

    if row["lines"] is not None:
        block = {"task": row["task"], "argument": row}
        row["outcome"] = json.dumps(run_task(parsing.draft, work, DELAYS_S, counter, block))
    return pa.table(
        {
            "task": [row["task"]],
            "input": [f"{row['uri']}, line {row['first_line']}"],
            "file_record": pa.array([row["file_record"]], pa.string()),
            "outcome": pa.array([row["outcome"]], pa.string()),
        }
    )


def _parse_block(parsing: _Parsing, row: dict[str, Any]) -> TaskRecord:
    """Parses one block of lines into its file of comments, filed by bucket."""
    draft, bucket_count, privacy = parsing.draft, parsing.bucket_count, parsing.privacy
    malformed = raw.Rejects()
    parse = parse_submissions if row["kind"] == "submissions" else parse_comments
    comments = parse(row["lines"], row["uri"], row["first_line"], malformed)
    lines = comments.num_rows + malformed.counts.total()
    comments, other_subreddits, redacted = normalise(comments, parsing.options, privacy)
    hashes = thread_hashes(comments["thread"].combine_chunks())
    buckets.write(draft, row["task"], comments, (hashes >> 12) % bucket_count, bucket_count)
    malformed.save(draft, row["task"], privacy)
    dropped = dict(malformed.counts)
    if other_subreddits:
        dropped["subreddit not asked for"] = other_subreddits
    counts = {"records": lines, **redacted_count(redacted)}
    return TaskRecord(counts=counts, malformed=dict(malformed.counts), dropped=dropped)


def thread_hashes(threads: pa.Array) -> Ints:
    """62 bits of each thread's MD5: the lowest 12 decide its split, the others its bucket."""
    encoded = threads.dictionary_encode()
    hashes = [
        int.from_bytes(hashlib.md5(thread.encode(), usedforsecurity=False).digest()[-8:])
        & (2**62 - 1)
        for thread in encoded.dictionary.to_pylist()
    ]
    indices = encoded.indices.to_numpy(zero_copy_only=False)
    hash_of_row: Ints = np.array(hashes, np.int64)[indices]
    return hash_of_row

"""Phase 1: reads dump files, and writes their comments to storage by bucket of threads."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
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
from pipeline.engine.attempts import DIED, MAX_STARTS, AttemptCounter, attempt, failed_outcome
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord, from_json, to_json
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


@dataclass(frozen=True, kw_only=True)
class DumpRecord(TaskRecord):
    """A dump file that was read to its end."""

    block_count: int
    blocks: dict[str, TaskRecord] = field(default_factory=dict)
    """The record of each block of its lines, by the name of its file of comments, in order."""


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
) -> list[DumpRecord]:
    """Returns the record of each file. A file is marked once all its blocks are parsed."""
    parsing = _Parsing(draft, bucket_count, block_bytes, options, reading, privacy)
    tasks = {f"file-{index:05d}": uri for index, uri in enumerate(files)}
    finished = draft.finished_tasks()
    dumps = finished.records((file for file in tasks if file in finished), DumpRecord)
    missing = {file: uri for file, uri in tasks.items() if file not in dumps}
    blocks = {name: block for dump in dumps.values() for name, block in dump.blocks.items()}
    inputs, failed = dict[str, str](), dict[str, str]()
    crashed_hosts_by_task = dict[str, list[str]]()

    def outcomes(rows: Generator[dict[str, Any]]) -> Generator[dict[str, Any], None, None]:
        """The outcomes of blocks. Marks each file whose end and whose last block have come."""
        blocks_of_file, ends = defaultdict[str, list[str]](list), dict[str, DumpRecord]()
        with closing(rows):  # no task goes on after the last outcome that is waited for
            for row in rows:
                task, file = row["task"], row["file"]
                inputs[task] = row["input"]
                if row["outcome"]:
                    yield json.loads(row["outcome"])
                if row["record"] and task == file:
                    ends[file] = from_json(DumpRecord, row["record"])
                elif row["record"]:
                    blocks[task] = from_json(TaskRecord, row["record"])
                    blocks_of_file[file].append(task)
                names = blocks_of_file[file]
                if file in ends and len(names) == ends[file].block_count:
                    in_order = {name: blocks[name] for name in sorted(names)}
                    dumps[file] = replace(ends[file], blocks=in_order)
                    draft.mark(file, dumps[file])

    with progress.bar(_LABEL, None, unit="comment") as bar:
        bar.update(sum(block.counts["records"] for block in blocks.values()))
        if missing:
            counter = None if executors.current() else AttemptCounter.begin()
            rows = _parse_blocks(parsing, missing, counter)
            failed = failures(outcomes(rows), _LABEL, lambda _, cost: bar.update(cost.rows))
            crashed_hosts_by_task = counter.end() if counter else {}
    for file, uri in missing.items():  # a reader that has begun too often yields no row
        if file not in inputs and len(crashed_hosts_by_task.get(file, ())) >= MAX_STARTS:
            failed[file], inputs[file] = DIED, uri
    cost_by_block = {name: block.cost for name, block in sorted(blocks.items())}
    report.end_stage(report.Stage(_LABEL, cost_by_block, failed, crashed_hosts_by_task))
    if failed:
        raise Stopped(describe(failed, inputs, _LABEL))
    return [dumps[file] for file in tasks]


def _parse_blocks(
    parsing: _Parsing, files: Mapping[str, str], counter: AttemptCounter | None
) -> Generator[dict[str, Any], None, None]:
    """A row with its outcome and record per block, parsed and filed; one per file, with its record, at its
    end, or with its outcome where it could not be read. `counter`: None: in this process."""
    read = functools.partial(_read_file, parsing, counter)
    parse = functools.partial(_parse_row, parsing, counter)
    files_to_read = [{"file": file, "uri": uri} for file, uri in files.items()]
    if counter is None:
        for file in files_to_read:
            for block in read(pa.Table.from_pylist([file])):
                yield from parse(block).to_pylist()
        return

    def add_work(dataset: Any, _: AttemptCounter) -> Any:
        import ray.data

        waiting.await_room(1)
        cores = resources.fitting(1)
        readers = min(parsing.reading.files_at_once or max(1, cores // 4), len(files))
        if not waiting.may_grow():  # else the bound would be that of the first node
            # What is decompressed waits in Ray's object store, and decompression is the faster half.
            waiting_bytes = cores * max(_WAITING_BYTES, 2 * parsing.block_bytes)
            execution = dataset.context.execution_options
            execution.resource_limits = execution.resource_limits.copy(
                object_store_memory=waiting_bytes
            )
        # Each row of a reader, a block of lines, is a block of Ray Data and so a task; by default it would
        # join them to 128 MiB.
        dataset.context.target_max_block_size = parsing.block_bytes // 2
        # Readers wait for parsers: together they leave them half of small machines.
        bound = resources.largest_memory() // 2
        bound_of_reader = min(bound, resources.total_memory() // 2 // readers)
        reader_bytes = _WORKER_BYTES + _WINDOW_BYTES + 2 * parsing.block_bytes
        parser_bytes = _WORKER_BYTES + _BLOCKS_IN_PARSER * parsing.block_bytes
        return (
            # One file feeds some five parsers.
            dataset.map_batches(
                read,
                batch_size=1,
                batch_format="pyarrow",
                compute=ray.data.TaskPoolStrategy(size=readers),
                num_cpus=_READER_CPUS,
                memory=min(reader_bytes, bound_of_reader),
            ).map_batches(
                parse,
                batch_size=1,
                batch_format="pyarrow",
                num_cpus=_PARSER_CPUS,
                memory=min(parser_bytes, bound),
            )
        )

    yield from run_on_cluster(files_to_read, add_work, counter)


_READ_ROWS = pa.schema(
    [
        ("task", pa.string()),
        ("file", pa.string()),
        ("uri", pa.string()),
        ("kind", pa.string()),
        ("first_line", pa.int64()),
        ("lines", pa.large_binary()),
        ("record", pa.string()),
        ("outcome", pa.string()),
    ]
)
_PARSED_ROWS = pa.schema(
    [(name, pa.string()) for name in ("task", "file", "input", "record", "outcome")]
)


def _read_file(
    parsing: _Parsing, counter: AttemptCounter | None, batch: pa.Table
) -> Iterator[pa.Table]:
    """Streams one dump file: a row per block, then one with its record, or with its outcome where it cannot
    be read.

    None where its process has died too often: Ray keeps the rows that an earlier start has yielded, and
    takes no other ones in their places.
    """
    file, uri = batch["file"][0].as_py(), batch["uri"][0].as_py()
    if counter and counter.add(file) > MAX_STARTS:
        return
    blocks, line, kind, notes = 0, 1, None, list[str]()

    def row(task: str, **values: Any) -> pa.Table:
        place = {"task": task, "file": file, "uri": uri, "kind": kind, "first_line": line}
        return pa.Table.from_pylist([{**place, **values}], schema=_READ_ROWS)

    try:
        try:
            for block in raw.line_blocks(uri, parsing.block_bytes):
                kind = kind or kind_of(block)
                if kind is None:
                    notes.append(f"{uri}: set aside, its first lines are no JSON objects")
                    break
                if kind == "submissions" and parsing.options.submissions == "off":
                    notes.append(f"{uri}: submissions, not used (reddit.submissions is off)")
                    break
                yield row(f"block-{file.removeprefix('file-')}-{blocks:06d}", lines=block)
                blocks += 1
                line += block.count(b"\n")
            else:
                if blocks == 0:
                    notes.append(f"{uri}: set aside, it is empty")
        except raw.Truncated as error:
            raw.accept_truncated(error, parsing.reading, notes, line - 1)
    except Exception as error:
        yield row(file, outcome=json.dumps(failed_outcome(file, error)))
        return
    counts = {"files": 1, "files.set_aside": int(blocks == 0)}
    yield row(file, record=to_json(DumpRecord(counts=counts, block_count=blocks, notes=notes)))


def _parse_row(parsing: _Parsing, counter: AttemptCounter | None, batch: pa.Table) -> pa.Table:
    """Parses the block of a row of `_read_file`: a row with its outcome and record. Other rows pass."""
    (row,) = batch.to_pylist()
    row["input"] = f"{row['uri']}, line {row['first_line']}"
    if row["lines"] is not None:
        number = counter.add(row["task"]) if counter else 1
        record, outcome = attempt(
            row["task"],
            number,
            lambda: report.measured(lambda: _parse_block(parsing, row)),
            DELAYS_S,
        )
        row |= {"record": record and to_json(record), "outcome": json.dumps(outcome)}
    return pa.Table.from_pylist([row], schema=_PARSED_ROWS)


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

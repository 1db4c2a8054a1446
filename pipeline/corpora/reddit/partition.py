"""Phase 1: dump files to comments on storage, filed by bucket of threads."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.arrays import Ints
from pipeline.corpora import buckets, raw
from pipeline.corpora.file_tasks import redacted_count
from pipeline.corpora.privacy import Privacy
from pipeline.corpora.reddit.comments import normalise
from pipeline.corpora.reddit.lines import kind_of, parse_comments, parse_submissions
from pipeline.corpora.reddit.options import Options
from pipeline.drafts import Draft
from pipeline.files.retries import with_retries
from pipeline.tasks import costs, executors, progress, resources
from pipeline.tasks.records import TaskRecord, from_json, to_json

_WAITING_BYTES = 256 << 20  # of decompressed lines, per core
# Readers need no core of their own. But with 0 they would run on the head, which has no core either, and
# a whole core less what they take would be lost to the parsers.
_READER_CPUS, _PARSER_CPUS = 0.01, 0.98

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
    marks = draft.marks()
    pending_files = [(i, uri) for i, uri in enumerate(files) if f"file-{i:05d}" not in marks]
    stack = ExitStack()
    bar = stack.enter_context(progress.bar(_LABEL, None, unit="comment"))
    parsed_tasks = {task for task in marks if task.startswith("block")}
    earlier_records = marks.records(parsed_tasks, TaskRecord).values()
    bar.update(sum(record.counts["records"] for record in earlier_records))
    if pending_files:
        block_counts = Counter(_file_of(task) for task in parsed_tasks)
        file_records: dict[str, DumpRecord] = {}
        rows = _parse_blocks(
            draft, pending_files, parsed_tasks, bucket_count, block_bytes, options, reading, privacy
        )
        for row in rows:
            file = _file_of(row["task"])
            if row["file_record"]:
                file_records[file] = from_json(DumpRecord, row["file_record"])
            else:
                block_counts[file] += 1
                cost = from_json(TaskRecord, row["record"]).cost
                costs.count_done(_LABEL, cost)
                bar.update(cost.rows)
            # A file is done when all its blocks are; only then is its own mark true.
            if file in file_records and block_counts[file] == file_records[file].blocks:
                draft.mark(file, file_records[file])
        marks = draft.marks()
    stack.close()
    dumps = [f"file-{index:05d}" for index in range(len(files))]
    dump_records = marks.records(dumps, DumpRecord)
    for dump in dump_records.values():
        if dump.cut_off and reading.truncated == "stop":
            raise raw.truncated_input(raw.Truncated(dump.cut_off), dump.lines)
    names = sorted(task for task in marks if task.startswith("block"))
    blocks = marks.records(names, TaskRecord)
    cost_by_task = {task: record.cost for task, record in blocks.items()}
    costs.report(costs.Stage(_LABEL, cost_by_task))
    return {**blocks, **dump_records}


def _file_of(task: str) -> str:
    """ "block-00003-000017" and "file-00003" → "file-00003" """
    return "file-" + task.split("-")[1]


def _parse_blocks(
    draft: Draft,
    files: list[tuple[int, str]],
    parsed_tasks: set[str],
    bucket_count: int,
    block_bytes: int,
    options: Options,
    reading: raw.Reading,
    privacy: Privacy,
) -> Iterator[dict[str, Any]]:
    """A row per block, parsed and filed, and one per file, at its end."""
    if executors.current():
        for index, uri in files:
            file = pa.table({"index": [index], "uri": [uri]})
            for block in _read_file(parsed_tasks, block_bytes, options, file):
                parsed = _parse_and_retry(draft, bucket_count, options, privacy, block)
                yield from parsed.to_pylist()
        return

    import ray.data

    resources.await_node(1)
    cores = resources.fitting(1)
    context = ray.data.DataContext.get_current().copy()
    if not resources.may_grow():  # else the bound would be that of the first node
        # What is decompressed waits in Ray's object store, and decompression is the faster half.
        waiting_bytes = cores * max(_WAITING_BYTES, 2 * block_bytes)
        limits = context.execution_options.resource_limits
        context.execution_options.resource_limits = limits.copy(object_store_memory=waiting_bytes)
    with ray.data.DataContext.current(context):
        dataset = (
            ray.data.from_items(
                [{"index": index, "uri": uri} for index, uri in files],
                override_num_blocks=len(files),
            )
            # One file feeds some five parsers, and keeps its window of up to 2 GiB in memory.
            .map_batches(
                functools.partial(_read_file, parsed_tasks, block_bytes, options),
                batch_size=1,
                batch_format="pyarrow",
                compute=ray.data.TaskPoolStrategy(size=reading.files_at_once or max(1, cores // 4)),
                num_cpus=_READER_CPUS,
            )
            # One block of lines, one task: without this barrier Ray Data joins blocks to 128 MiB.
            .repartition(target_num_rows_per_block=1)
            .map_batches(
                functools.partial(_parse_and_retry, draft, bucket_count, options, privacy),
                batch_size=1,
                batch_format="pyarrow",
                num_cpus=_PARSER_CPUS,
            )
        )
    yield from dataset.iter_rows()


_READ = pa.schema(
    [
        ("task", pa.string()),
        ("uri", pa.string()),
        ("kind", pa.string()),
        ("first_line", pa.int64()),
        ("lines", pa.large_binary()),
        ("file_record", pa.string()),
    ]
)


def _read_file(
    parsed_tasks: set[str], block_bytes: int, options: Options, batch: pa.Table
) -> Iterator[pa.Table]:
    """Streams one dump file: a row per block that is not parsed yet, then one with its record."""
    index, uri = batch["index"][0].as_py(), batch["uri"][0].as_py()
    blocks, line, cut_off, kind, notes = 0, 1, "", None, list[str]()
    try:
        for block in raw.line_blocks(uri, block_bytes):
            kind = kind or kind_of(block)
            if kind is None:
                notes.append(f"{uri}: set aside, its first lines are no JSON objects")
                break
            if kind == "submissions" and options.submissions == "off":
                notes.append(f"{uri}: submissions, not used (reddit.submissions is off)")
                break
            task = f"block-{index:05d}-{blocks:06d}"
            if task not in parsed_tasks:
                yield pa.table([[task], [uri], [kind], [line], [block], [None]], schema=_READ)
            blocks += 1
            line += block.count(b"\n")
        else:
            if blocks == 0:
                notes.append(f"{uri}: set aside, it is empty")
    except raw.Truncated as error:
        cut_off = str(error)
        notes.append(raw.truncation_note(error, line - 1))
    counts = {"files": 1, "files.set_aside": int(blocks == 0)}
    record = DumpRecord(counts=counts, blocks=blocks, lines=line - 1, cut_off=cut_off, notes=notes)
    yield pa.table(
        [[f"file-{index:05d}"], [uri], [kind], [line], [None], [to_json(record)]], schema=_READ
    )


def _parse_and_retry(
    draft: Draft, bucket_count: int, options: Options, privacy: Privacy, batch: pa.Table
) -> pa.Table:
    """Parses the block of a row of `_read_file` and marks it: a row with its record, or with its file's."""
    row = batch.to_pylist()[0]
    record = ""
    if row["lines"] is not None:

        def parse_and_mark() -> TaskRecord:
            block_record = costs.measured(
                lambda: _parse_block(draft, bucket_count, options, privacy, row)
            )
            draft.mark(row["task"], block_record)
            return block_record

        record = to_json(with_retries(parse_and_mark))
    return pa.table(
        {
            "task": [row["task"]],
            "record": [record],
            "file_record": pa.array([row["file_record"]], pa.string()),
        }
    )


def _parse_block(
    draft: Draft, bucket_count: int, options: Options, privacy: Privacy, row: dict[str, Any]
) -> TaskRecord:
    """Parses one block of lines into its file of comments, filed by bucket."""
    malformed = raw.Rejects()
    parse = parse_submissions if row["kind"] == "submissions" else parse_comments
    comments = parse(row["lines"], row["uri"], row["first_line"], malformed)
    lines = comments.num_rows + malformed.counts.total()
    comments, other_subreddits, redacted = normalise(comments, options, privacy)
    hashes = thread_hashes(comments["thread"].combine_chunks())
    buckets.write(draft, row["task"], comments, (hashes >> 12) % bucket_count, bucket_count)
    malformed.save(draft, row["task"], privacy)
    dropped = {
        **malformed.counts,
        **({"subreddit not asked for": other_subreddits} if other_subreddits else {}),
    }
    return TaskRecord(
        counts={"records": lines, **redacted_count(redacted)},
        malformed=dict(malformed.counts),
        dropped=dropped,
    )


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

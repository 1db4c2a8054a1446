"""Reddit comment dumps to (context, response) examples, by the rules of PolyAI's pipeline.

Two phases over storage, so that memory is bounded by one bucket of threads, whatever the input's
size. (1) Each dump file streams through in blocks of lines; a block is parsed and sorted by bucket,
a hash of the thread, into one file whose b-th record batch is bucket b. (2) One task per bucket reads
that batch from all files, joins comments to their parents and writes examples. Blocks, files and
buckets are marked when done.

The rules (github.com/PolyAI-LDN/conversational-datasets, reddit/create_data.py, 50f626a): a
comment whose parent is in its thread is a response, the parent its context, up to 9 earlier
comments follow; neither of the two may be deleted, over 127 characters or under 9; threads are
split by the MD5 of their id. `sample.py` and the golden files check them.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray.data
from tqdm import tqdm

from pipeline import shards, storage
from pipeline.artifact import Draft
from pipeline.config import BadInput, require
from pipeline.corpora import raw
from pipeline.corpora.filters import Privacy
from pipeline.corpora.reddit_lines import parse_lines
from pipeline.corpora.schema import schema_with

BLOCK_BYTES = 16 << 20  # 16 MiB of JSON is some 30,000 comments and 0.3 s of work
BUCKET_BYTES = 32 << 20  # of compressed input per bucket: some 0.3 GB once decompressed

_DELETED = pa.array(["[deleted]", "[removed]"])
_SCHEMA = schema_with(
    ("subreddit", pa.string()), ("context_author", pa.string()), ("response_author", pa.string())
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which comments make an example. The defaults are PolyAI's."""

    max_characters: int = 127
    """Comments with more are cut at a word's end, and make no example."""
    min_characters: int = 9
    """Comments with fewer make no example."""
    max_context_turns: int = 10
    """Earlier comments in a context, the immediate one included."""
    train_share: float = 0.9
    """Share of the threads in `train`; the rest is `test`."""
    rows_per_shard: int = 250_000
    """Examples in one Parquet file at most."""

    def __post_init__(self) -> None:
        require(self.max_characters >= 1, "reddit.max_characters", self.max_characters, ">= 1")
        require(0 <= self.min_characters <= self.max_characters, "reddit.min_characters",
                self.min_characters, "0 to reddit.max_characters")  # fmt: skip
        require(self.max_context_turns >= 1, "reddit.max_context_turns", self.max_context_turns,
                ">= 1")  # fmt: skip
        require(0 < self.train_share <= 1, "reddit.train_share", self.train_share, "above 0, to 1")
        require(self.rows_per_shard >= 1, "reddit.rows_per_shard", self.rows_per_shard, ">= 1")


def prepare(
    draft: Draft, files: list[str], rules: Options, reading: raw.Reading, privacy: Privacy
) -> list[dict[str, Any]]:
    """Fills the draft and returns the records of its tasks (`files`, `counts`, `dropped`)."""
    files = sorted(files, key=storage.name_of)
    buckets = max(1, -(-sum(map(storage.size_of, files)) // BUCKET_BYTES))
    blocks = _partition(draft, files, buckets, rules, reading, privacy)
    raw.check_share(draft, blocks.values(), reading)
    parts = [draft.path("_threads", f"{name}.arrow") for name in blocks]
    build = functools.partial(_build_bucket, parts=parts, rules=rules)
    tasks = {f"bucket-{bucket:05d}": bucket for bucket in range(buckets)}
    built = shards.run_tasks(draft, tasks, build, "reddit: threads to examples")
    return [*blocks.values(), *built]


# ---------------------------------------------------------------------------------------------------
# Phase 1: dump files to comments, sorted by bucket


def _partition(
    draft: Draft,
    files: list[str],
    buckets: int,
    rules: Options,
    reading: raw.Reading,
    privacy: Privacy,
) -> dict[str, dict[str, Any]]:
    """Returns the records of all blocks of all files, by block."""
    done = draft.records()
    todo = [(i, uri) for i, uri in enumerate(files) if f"file-{i:04d}" not in done]
    progress = tqdm(desc="reddit: dump files to threads", unit=" comments", unit_scale=True)
    progress.update(sum(done[name]["counts"]["records"] for name in done if name[:5] == "block"))
    if todo:
        known = {name for name in done if name.startswith("block")}
        items = [{"index": index, "uri": uri} for index, uri in todo]
        dataset = (
            ray.data.from_items(items, override_num_blocks=len(items))
            .map_batches(
                functools.partial(_read_file, draft, known, reading),
                batch_size=1,
                batch_format="pyarrow",
            )
            # One block of lines, one task: without this barrier Ray Data fuses the two maps, and
            # a file is parsed by the one core that decompresses it.
            .repartition(target_num_rows_per_block=1)
            .map_batches(
                functools.partial(_parse_block, draft, buckets, rules, privacy),
                batch_size=1,
                batch_format="pyarrow",
            )
        )
        read: dict[str, dict[str, Any]] = {}
        for row in dataset.iter_rows():
            if row["file_record"]:
                read[row["task"]] = json.loads(row["file_record"])
            progress.update(row["lines"])
        # A file is done when all its blocks are; only now is its own mark true.
        for task, record in read.items():
            draft.mark(task, record)
        done = draft.records()
    progress.close()
    for index, uri in enumerate(files):
        record = done[f"file-{index:04d}"]
        if record["cut_off"] and reading.truncated == "stop":
            raise raw.cut_off_input(raw.CutOff(record["cut_off"]), record["lines"])
        if record["blocks"] == 0:
            raise BadInput(f"{uri}: the file is empty")
    return {name: done[name] for name in sorted(done) if name.startswith("block")}


_READ = pa.schema(
    [
        ("task", pa.string()),
        ("uri", pa.string()),
        ("first_line", pa.int64()),
        ("lines", pa.large_binary()),
        ("file_record", pa.string()),
    ]
)


def _read_file(
    draft: Draft, done: set[str], reading: raw.Reading, batch: pa.Table
) -> Iterator[pa.Table]:
    """Streams one dump file: a row per block that is not parsed yet, then one with its record."""
    index, uri = batch["index"][0].as_py(), batch["uri"][0].as_py()
    blocks, line, cut_off = 0, 1, None
    try:
        for block in raw.line_blocks(uri, BLOCK_BYTES):
            task = f"block-{index:04d}-{blocks:06d}"
            if task not in done:
                yield pa.table([[task], [uri], [line], [block], [None]], schema=_READ)
            blocks += 1
            line += block.count(b"\n")
    except raw.CutOff as error:
        cut_off = str(error)
    record = {"blocks": blocks, "lines": line - 1, "cut_off": cut_off}
    yield pa.table(
        [[f"file-{index:04d}"], [uri], [line], [None], [json.dumps(record)]], schema=_READ
    )


def _parse_block(
    draft: Draft, buckets: int, rules: Options, privacy: Privacy, batch: pa.Table
) -> pa.Table:
    """Parses one block of lines into its file of comments, sorted by bucket."""
    row = batch.to_pylist()[0]
    lines = 0
    if row["lines"] is not None:
        rejects = raw.Rejects()
        comments = parse_lines(row["lines"], row["uri"], row["first_line"], rejects)
        lines = comments.num_rows + rejects.counts.total()
        comments = normalise(comments, rules, privacy)
        data = _sorted_by_bucket(comments, buckets)
        storage.write_bytes(draft.path("_threads", f"{row['task']}.arrow"), data)
        rejects.save(draft, row["task"], privacy)
        record = {"counts": {"records": lines}, "malformed": dict(rejects.counts)}
        draft.mark(row["task"], {**record, "dropped": dict(rejects.counts)})
    return pa.table(
        {
            "task": [row["task"]],
            "lines": pa.array([lines], pa.int64()),
            "file_record": pa.array([row["file_record"]], pa.string()),
        }
    )


def normalise(comments: pa.Table, rules: Options, privacy: Privacy) -> pa.Table:
    """Raw fields to: thread, id, parent, body (cut), what rules it out, author, subreddit.

    The rules look at the text as it was written; redaction comes after them.
    """
    body = comments["body"].combine_chunks()
    length = pc.utf8_length(body)
    state = np.full(len(body), "", dtype=object)
    state[_mask(pc.less(length, rules.min_characters))] = "too short"
    state[_mask(pc.greater(length, rules.max_characters))] = "too long"
    state[_mask(pc.is_in(body, _DELETED))] = "deleted"
    body = privacy.redacted(body)
    long = np.flatnonzero(_mask(pc.greater(length, rules.max_characters)))
    if len(long):
        cut = [trim(text, rules.max_characters) for text in body.take(pa.array(long)).to_pylist()]
        mask = pc.greater(length, rules.max_characters)
        body = pc.replace_with_mask(body, mask, pa.array(cut, pa.string()))
    author = privacy.hashed(comments["author"].combine_chunks())
    prefix = r"^t[0-9]_"
    return pa.table(
        {
            "thread": pc.replace_substring_regex(comments["link_id"], prefix, "").combine_chunks(),
            "id": comments["id"].combine_chunks(),
            "parent": pc.replace_substring_regex(comments["parent_id"], prefix, "").combine_chunks(),
            "body": body,
            "ruled_out": pa.array(state, pa.string()),
            "author": author,
            "subreddit": comments["subreddit"].combine_chunks(),
        }
    )


def trim(text: str, max_characters: int) -> str:
    """Cuts a text to at most `max_characters`, at the edge of a word."""
    if len(text) <= max_characters:
        return text
    end = max_characters + 1
    while end > 1 and text[end - 1].isalnum() == text[end - 2].isalnum():
        end -= 1
    return text[: end - 1]


def _thread_hashes(threads: pa.Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    """62 bits of each thread's MD5: the lowest 12 decide the split (see `split_of`)."""
    encoded = threads.dictionary_encode()
    hashes = [
        int(hashlib.md5(thread.encode(), usedforsecurity=False).hexdigest(), 16) & (2**62 - 1)
        for thread in encoded.dictionary.to_pylist()
    ]
    found: np.ndarray[Any, np.dtype[np.int64]] = np.array(hashes, np.int64)[
        encoded.indices.to_numpy(zero_copy_only=False)
    ]
    return found


def _sorted_by_bucket(comments: pa.Table, buckets: int) -> pa.Buffer:
    """An Arrow file whose b-th record batch holds the comments of bucket b."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    bucket = (_thread_hashes(comments["thread"].combine_chunks()) >> 12) % buckets
    order = np.argsort(bucket, kind="stable")
    ends = np.searchsorted(bucket[order], np.arange(buckets), side="right")
    comments = comments.take(pa.array(order)).combine_chunks()
    with pa.ipc.new_file(sink, comments.schema, options=options) as writer:
        start = 0
        for end in ends:
            rows = comments.slice(start, end - start)
            writer.write_batch(
                pa.RecordBatch.from_arrays(
                    [_one_array(column) for column in rows.columns], schema=comments.schema
                )
            )
            start = end
    return sink.getvalue()


# ---------------------------------------------------------------------------------------------------
# Phase 2: a bucket of whole threads to examples


def _build_bucket(
    draft: Draft, task: str, bucket: int, parts: list[str], rules: Options
) -> dict[str, Any]:
    batches = []
    for part in parts:
        with storage.open_input(part) as stream:
            batches.append(pa.ipc.open_file(stream).get_batch(bucket))
    comments = pa.Table.from_batches(batches).combine_chunks()
    examples, dropped = build_examples(comments, rules)
    order = np.random.default_rng(bucket).permutation(examples.num_rows)
    examples = examples.take(pa.array(order))
    files = []
    for split in ("train", "test"):
        rows = examples.filter(pc.equal(examples["split"], split))
        for number, start in enumerate(range(0, rows.num_rows, rules.rows_per_shard)):
            name = f"{split}/part-{bucket:05d}-{number:03d}.parquet"
            files.append(draft.write_table(name, rows.slice(start, rules.rows_per_shard)))
    counts = {"examples": examples.num_rows}
    for split, number in Counter(examples["split"].to_pylist()).items():
        counts[f"examples.{split}"] = number
    return {"files": files, "counts": counts, "dropped": dropped}


def build_examples(comments: pa.Table, rules: Options) -> tuple[pa.Table, dict[str, int]]:
    """Whole threads (`normalise`'s columns) to examples, and the other comments by reason.

    Every comment is either the response of one example or counted once: examples plus drops make
    the number of comments.
    """
    dropped: Counter[str] = Counter()
    key = pc.binary_join_element_wise(comments["thread"], comments["id"], "/").combine_chunks()
    first = np.sort(
        np.unique(key.dictionary_encode().indices.to_numpy(zero_copy_only=False), return_index=True)[
            1
        ]
    )
    dropped["duplicate id"] = comments.num_rows - len(first)
    comments = comments.take(pa.array(first)).combine_chunks()
    key = key.take(pa.array(first))
    parent_key = pc.binary_join_element_wise(comments["thread"], comments["parent"], "/")
    parent = pc.fill_null(pc.index_in(parent_key, value_set=key), -1).to_numpy().astype(np.int64)

    reason = np.full(len(parent), "", dtype=object)
    reason[parent < 0] = "answers no comment that is there"
    reason[~_descends_from_root(parent)] = "thread runs in a circle"
    ruled_out = np.array(comments["ruled_out"].to_pylist(), dtype=object)
    for state in ("deleted", "too long", "too short"):
        reason[(reason == "") & (ruled_out == state)] = f"response {state}"
        context_state = np.where(parent >= 0, ruled_out[parent], "") if len(parent) else parent
        reason[(reason == "") & (context_state == state)] = f"context {state}"
    dropped.update(reason[reason != ""].tolist())

    response = np.flatnonzero(reason == "")
    ancestors = np.full((len(response), rules.max_context_turns), -1, np.int64)
    at = response
    for depth in range(rules.max_context_turns):
        at = np.where(at >= 0, parent[at], -1)
        ancestors[:, -1 - depth] = at  # the nearest one last
    offsets = np.concatenate([[0], np.cumsum((ancestors >= 0).sum(axis=1))]).astype(np.int32)
    turns = _column(comments, "body", ancestors[ancestors >= 0])
    thread = _column(comments, "thread", response)
    hashes = _thread_hashes(thread) if len(response) else np.zeros(0, np.int64)
    table = pa.table(
        {
            "example_id": key.take(pa.array(response)),
            "group_id": thread,
            "context": pa.ListArray.from_arrays(pa.array(offsets), turns),
            "response": _column(comments, "body", response),
            "candidates": pa.nulls(len(response), pa.list_(pa.string())),
            "label": pa.nulls(len(response), pa.int32()),
            "source": pa.array(["reddit"] * len(response), pa.string()),
            "split": pa.array(split_of(hashes, rules.train_share), pa.string()),
            "subreddit": _column(comments, "subreddit", response),
            "context_author": _column(comments, "author", parent[response]),
            "response_author": _column(comments, "author", response),
        },
        schema=_SCHEMA,
    )
    return table, {name: number for name, number in dropped.items() if number}


def split_of(hashes: np.ndarray[Any, Any], train_share: float) -> list[str]:
    """PolyAI's split: train if (1 + MD5 mod 4096) / 4096 < the share."""
    train = (1 + (hashes & 4095)) / 4096 < train_share
    return [str(name) for name in np.where(train, "train", "test")]


def _descends_from_root(parent: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Whether following parents ends at a comment without one (-1) rather than in a circle.

    Pointer doubling: a chain 10,000 deep takes 14 rounds.
    """
    own = np.arange(len(parent))
    jump = np.where(parent < 0, own, parent)
    for _ in range(max(1, len(parent)).bit_length()):
        jump = jump[jump]
    return np.asarray(parent[jump] < 0)


def _column(table: pa.Table, name: str, rows: np.ndarray[Any, Any]) -> pa.Array:
    return _one_array(table[name]).take(pa.array(rows))


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    chunks = column.combine_chunks()
    return chunks.chunk(0) if isinstance(chunks, pa.ChunkedArray) else chunks


def _mask(values: pa.Array) -> np.ndarray[Any, Any]:
    return np.asarray(values.to_numpy(zero_copy_only=False), bool)


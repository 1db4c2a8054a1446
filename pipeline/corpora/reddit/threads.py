"""Phase 2: a bucket of whole threads to shards of examples."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.arrays import Bools, Ints
from pipeline.corpora import buckets, raw
from pipeline.corpora.reddit import languages
from pipeline.corpora.reddit.comments import COLUMNS, RULED_OUT, SCORED_TOO_LOW
from pipeline.corpora.reddit.options import Options
from pipeline.corpora.reddit.partition import thread_hashes
from pipeline.corpora.schema import schema_with
from pipeline.drafts import Draft
from pipeline.records import TaskRecord

_SCHEMA = schema_with(
    ("subreddit", pa.string()), ("context_author", pa.string()), ("response_author", pa.string())
)
_REASONS = (
    "",
    "duplicate id",
    "submission (a first turn)",
    "answers no comment that is there",
    "thread runs in a circle",
    *(f"{side} {state}" for state in RULED_OUT[1:] for side in ("response", "context")),
    "response in another language",
)
_CODE = {reason: code for code, reason in enumerate(_REASONS)}
_SAMPLED_BUCKETS = 50  # threads fall into buckets by chance, so the first ones stand for all


def build_bucket(
    draft: Draft, task: str, bucket: int, parts: list[str], options: Options
) -> TaskRecord:
    """Writes a bucket's shards; rows in random order."""
    comments = buckets.read(draft, parts, bucket, COLUMNS)
    if not comments.num_rows:
        return TaskRecord()
    examples, rejects = build_examples(comments, options, task)
    if bucket < _SAMPLED_BUCKETS:
        rejects.save(draft, task)
    order = np.random.default_rng(bucket).permutation(examples.num_rows)
    examples = examples.take(pa.array(order))
    files, counts = [], {"examples": examples.num_rows}
    for split in ("train", "test"):
        rows = examples.filter(pc.equal(examples["split"], split))
        counts[f"examples.{split}"] = rows.num_rows
        for number, start in enumerate(range(0, rows.num_rows, options.rows_per_shard)):
            name = f"{split}/part-{bucket:05d}-{number:03d}.parquet"
            files.append(draft.write_table(name, rows.slice(start, options.rows_per_shard)))
    return TaskRecord(files=files, counts=counts, dropped=dict(rejects.counts))


def build_examples(
    comments: pa.Table, options: Options, task: str = ""
) -> tuple[pa.Table, raw.Rejects]:
    """Whole threads (`comments.COLUMNS`) to examples, and the other comments by reason.

    Every comment is the response of one example or counted once: examples and drops add up.
    """
    thread, body = _one_array(comments["thread"]), _one_array(comments["body"])
    key = _one_array(pc.binary_join_element_wise(comments["thread"], comments["id"], "/"))
    parent_key = pc.binary_join_element_wise(comments["thread"], comments["parent"], "/")
    # Where an id comes twice, its first place counts.
    encoded = key.dictionary_encode()
    number = encoded.indices.to_numpy()
    first_place = np.zeros(len(encoded.dictionary), np.int64)
    first_place[number[::-1]] = np.arange(len(number))[::-1]
    found = pc.fill_null(pc.index_in(parent_key, value_set=encoded.dictionary), -1).to_numpy()
    parent = np.where(found >= 0, first_place[found], -1)

    code = _reasons(comments, parent, options)
    code[first_place[number] != np.arange(len(number))] = _CODE["duplicate id"]
    response = np.flatnonzero(code == 0)
    if options.languages and len(response):
        spoken = languages.is_in(body.take(pa.array(response)), options.languages)
        code[response[~spoken]] = _CODE["response in another language"]
        response = response[spoken]

    rejects = _rejected(comments, code, task)
    threads = thread.take(pa.array(response))
    hashes = thread_hashes(threads) if len(response) else np.zeros(0, np.int64)
    table = pa.table(
        {
            "example_id": key.take(pa.array(response)),
            "group_id": threads,
            "context": _contexts(comments, parent, response, options),
            "response": body.take(pa.array(response)),
            "candidates": pa.nulls(len(response), pa.list_(pa.string())),
            "label": pa.nulls(len(response), pa.int32()),
            "source": pa.array(["reddit"] * len(response), pa.string()),
            "split": pa.array(split_of(hashes, options.train_share), pa.string()),
            "subreddit": comments["subreddit"].take(pa.array(response)),
            "context_author": comments["author"].take(pa.array(parent[response])),
            "response_author": comments["author"].take(pa.array(response)),
        },
        schema=_SCHEMA,
    )
    return table, rejects


def split_of(hashes: Ints, train_share: float) -> list[str]:
    """PolyAI's split: train if (1 + MD5 mod 4096) / 4096 < the share."""
    train = (1 + (hashes & 4095)) / 4096 < train_share
    return [str(name) for name in np.where(train, "train", "test")]


def _reasons(comments: pa.Table, parent: Ints, options: Options) -> Ints:
    """Each comment's place in `_REASONS`; 0: it is a response."""
    own = comments["ruled_out"].to_numpy().astype(np.int64)
    above = np.where(parent >= 0, own[parent], 0)
    above[above == SCORED_TOO_LOW] = 0
    none = len(RULED_OUT)
    own, above = np.where(own, own, none), np.where(above, above, none)
    side = np.where(own <= above, 0, 1)
    state = np.minimum(own, above)
    code = np.where(state < none, _CODE["response deleted"] + 2 * (state - 1) + side, 0)
    code[parent < 0] = _CODE["answers no comment that is there"]
    code[~_descends_from_root(parent)] = _CODE["thread runs in a circle"]
    if options.submissions != "off":
        code[pc.equal(comments["parent"], "").to_numpy()] = _CODE["submission (a first turn)"]
    return code


def _contexts(comments: pa.Table, parent: Ints, response: Ints, options: Options) -> pa.ListArray:
    """The turns above each response, oldest first."""
    ancestors = np.full((len(response), options.max_context_turns), -1, np.int64)
    at = response
    deleted = comments["ruled_out"].to_numpy() == RULED_OUT.index("deleted")
    for depth in range(options.max_context_turns):
        at = np.where(at >= 0, parent[at], -1)
        if options.layout == "dialogue":
            at = np.where((at >= 0) & deleted[at], -1, at)
        ancestors[:, -1 - depth] = at  # the nearest one last
    present = ancestors >= 0
    offsets = np.concatenate([[0], np.cumsum(present.sum(axis=1))]).astype(np.int32)
    turns = _one_array(comments["body"]).take(pa.array(ancestors[present]))
    contexts = pa.ListArray.from_arrays(pa.array(offsets), turns)
    if options.layout == "dialogue":
        ones = pa.array(np.arange(len(response) + 1, dtype=np.int32))
        contexts = pa.ListArray.from_arrays(ones, pc.binary_join(contexts, "\n"))
    return contexts


def _rejected(comments: pa.Table, code: Ints, task: str) -> raw.Rejects:
    """Counts by reason, and the first rows of each to look at."""
    rejects = raw.Rejects()
    for reason, number in zip(
        _REASONS[1:], np.bincount(code, minlength=len(_REASONS))[1:], strict=True
    ):
        if number:
            rows = np.flatnonzero(code == _CODE[reason])[: raw.MAX_SAMPLES]
            shown = comments.take(pa.array(rows)).to_pylist()
            for row in shown:
                rejects.add(reason, f"{row['thread']}/{row['id']}", 0, row["body"])
            rejects.counts[reason] = int(number)
    return rejects


def _descends_from_root(parent: Ints) -> Bools:
    """Whether following parents ends at a comment without one (-1) rather than in a circle.

    Pointer doubling: a chain 10,000 deep takes 14 rounds.
    """
    own = np.arange(len(parent))
    jump = np.where(parent < 0, own, parent)
    for _ in range(max(1, len(parent)).bit_length()):
        further = jump[jump]
        if np.array_equal(further, jump):
            break
        jump = further
    return np.asarray(parent[jump] < 0)


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)  # without the copy
    return pa.concat_arrays(column.chunks) if column.chunks else pa.array([], column.type)

"""Phase 2: turns a bucket of whole threads into shards of examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.arrays import Bools, Ints
from pipeline.corpora import buckets, raw
from pipeline.corpora.reddit import languages
from pipeline.corpora.reddit.comments import (
    BY_EXCLUDED_AUTHOR,
    COLUMNS,
    DELETED,
    RULED_OUT,
    SCORED_TOO_LOW,
)
from pipeline.corpora.reddit.options import Options
from pipeline.corpora.reddit.partition import thread_hashes
from pipeline.corpora.schema import schema_with
from pipeline.engine.draft import ROWS_PER_GROUP, Draft
from pipeline.engine.records import TaskRecord

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
    order = np.random.default_rng(bucket).permutation(len(examples.responses))
    files, counts = [], {"examples": len(order)}
    for split in ("train", "test"):
        places = order[examples.splits[order] == split]
        counts[f"examples.{split}"] = len(places)
        for number, start in enumerate(range(0, len(places), options.rows_per_shard)):
            name = f"{split}/part-{bucket:05d}-{number:03d}.parquet"
            rows = examples.rows(places[start : start + options.rows_per_shard])
            files.append(draft.write_table(name, rows, ROWS_PER_GROUP))
    return TaskRecord(files=files, counts=counts, dropped=dict(rejects.counts))


@dataclass(frozen=True)
class Examples:
    """The examples in a bucket of comments, before their texts are copied: a comment's text is in up to
    `max_context_turns` contexts, and all of them may be over the 2 GiB that a column of text can hold."""

    comments: pa.Table
    keys: pa.Array
    """Thread and id of each comment."""
    bodies: pa.Array
    parents: Ints
    """[comments] The place of each comment's parent; -1: it is not there."""
    is_end: Bools
    """[comments] Whether contexts begin below the comment: an excluded author's, and in the layout
    `dialogue` a deleted one."""
    responses: Ints
    """[examples] The place of each response."""
    splits: np.ndarray[Any, np.dtype[np.str_]]
    """[examples]"""
    options: Options

    def rows(self, examples: Ints) -> pa.Table:
        """The rows of some examples, in chunks of one row group of a shard."""
        starts = range(0, max(1, len(examples)), ROWS_PER_GROUP)
        return pa.concat_tables(
            [self._chunk(examples[start : start + ROWS_PER_GROUP]) for start in starts]
        )

    def _chunk(self, examples: Ints) -> pa.Table:
        response = self.responses[examples]
        place = pa.array(response)
        return pa.table(
            {
                "example_id": self.keys.take(place),
                "group_id": self.comments["thread"].take(place),
                "context": _contexts(self, response),
                "response": self.bodies.take(place),
                "candidates": pa.nulls(len(response), pa.list_(pa.string())),
                "label": pa.nulls(len(response), pa.int32()),
                "source": pa.array(["reddit"] * len(response), pa.string()),
                "split": pa.array(self.splits[examples], pa.string()),
                "subreddit": self.comments["subreddit"].take(place),
                "context_author": self.comments["author"].take(pa.array(self.parents[response])),
                "response_author": self.comments["author"].take(place),
            }
        ).cast(_SCHEMA)


def build_examples(
    comments: pa.Table, options: Options, task: str = ""
) -> tuple[Examples, raw.Rejects]:
    """Whole threads (`comments.COLUMNS`) to examples, and the other comments by reason.

    Every comment is the response of one example or counted once: examples and drops add up.
    """
    thread = _single_chunk(comments["thread"])
    body = _single_chunk(comments["body"].cast(pa.large_string()))
    # Arrow joins the chunks of a column that it takes rows of.
    comments = comments.set_column(comments.schema.get_field_index("body"), "body", body)
    key = _single_chunk(pc.binary_join_element_wise(comments["thread"], comments["id"], "/"))
    parent_key = pc.binary_join_element_wise(comments["thread"], comments["parent"], "/")
    # Where an id comes twice, its first place counts.
    encoded_keys = key.dictionary_encode()
    number = encoded_keys.indices.to_numpy()
    first_place = np.zeros(len(encoded_keys.dictionary), np.int64)
    first_place[number[::-1]] = np.arange(len(number))[::-1]
    parent_number = pc.index_in(parent_key, value_set=encoded_keys.dictionary)
    parent_number = pc.fill_null(parent_number, -1).to_numpy()
    parent = np.where(parent_number >= 0, first_place[parent_number], -1)

    code = _reasons(comments, parent, options)
    code[first_place[number] != np.arange(len(number))] = _CODE["duplicate id"]
    response = np.flatnonzero(code == 0)
    if options.languages and len(response):
        is_in_language = languages.is_in(body.take(pa.array(response)), options.languages)
        code[response[~is_in_language]] = _CODE["response in another language"]
        response = response[is_in_language]

    rejects = _rejects(comments, code, task)
    hashes = thread_hashes(thread.take(pa.array(response)))
    splits = np.array(split_of(hashes, options.train_share), np.str_)
    ends = [BY_EXCLUDED_AUTHOR, *([DELETED] if options.layout == "dialogue" else [])]
    is_end = np.isin(comments["ruled_out"].to_numpy(), ends)
    return Examples(comments, key, body, parent, is_end, response, splits, options), rejects


def split_of(hashes: Ints, train_share: float) -> list[str]:
    """PolyAI's split: train if (1 + MD5 mod 4096) / 4096 < the share."""
    train = (1 + (hashes & 4095)) / 4096 < train_share
    return [str(name) for name in np.where(train, "train", "test")]


def _reasons(comments: pa.Table, parent: Ints, options: Options) -> Ints:
    """Each comment's place in `_REASONS`; 0: it is a response."""
    own_state = comments["ruled_out"].to_numpy().astype(np.int64)
    parent_state = np.where(parent >= 0, own_state[parent], 0)
    parent_state[parent_state == SCORED_TOO_LOW] = 0
    no_state = len(RULED_OUT)
    own_state[own_state == 0] = parent_state[parent_state == 0] = no_state
    side = np.where(own_state <= parent_state, 0, 1)
    state = np.minimum(own_state, parent_state)
    code = np.where(state < no_state, _CODE["response deleted"] + 2 * (state - 1) + side, 0)
    code[parent < 0] = _CODE["answers no comment that is there"]
    code[~_descends_from_root(parent)] = _CODE["thread runs in a circle"]
    if options.submissions != "off":
        code[pc.equal(comments["parent"], "").to_numpy()] = _CODE["submission (a first turn)"]
    return code


def _contexts(examples: Examples, response: Ints) -> pa.ListArray:
    """The turns above each response, oldest first."""
    parent, is_end, options = examples.parents, examples.is_end, examples.options
    ancestors = np.full((len(response), options.max_context_turns), -1, np.int64)
    ancestor = response
    for depth in range(options.max_context_turns):
        ancestor = np.where(ancestor >= 0, parent[ancestor], -1)
        ancestor = np.where((ancestor >= 0) & is_end[ancestor], -1, ancestor)
        ancestors[:, -1 - depth] = ancestor  # the nearest one last
    present = ancestors >= 0
    offsets = np.concatenate([[0], np.cumsum(present.sum(axis=1))]).astype(np.int32)
    turns = examples.bodies.take(pa.array(ancestors[present])).cast(pa.string())
    contexts = pa.ListArray.from_arrays(pa.array(offsets), turns)
    if options.layout == "dialogue":
        single_offsets = pa.array(np.arange(len(response) + 1, dtype=np.int32))
        contexts = pa.ListArray.from_arrays(single_offsets, pc.binary_join(contexts, "\n"))
    return contexts


def _rejects(comments: pa.Table, code: Ints, task: str) -> raw.Rejects:
    """Counts by reason, and the first rows of each to look at, without what excluded authors wrote."""
    rejects = raw.Rejects()
    numbers = np.bincount(code, minlength=len(_REASONS))
    for reason, number in zip(_REASONS[1:], numbers[1:], strict=True):
        if number:
            rows = np.flatnonzero(code == _CODE[reason])[: raw.MAX_SAMPLES]
            samples = comments.take(pa.array(rows)).to_pylist()
            for row in samples:
                text = "" if row["ruled_out"] == BY_EXCLUDED_AUTHOR else row["body"]
                rejects.add(reason, f"{row['thread']}/{row['id']}", 0, text)
            rejects.counts[reason] = int(number)
    return rejects


def _descends_from_root(parent: Ints) -> Bools:
    """Whether following parents ends at a comment without one (-1) rather than in a circle.

    Pointer doubling: a chain 10,000 deep takes 14 rounds.
    """
    rows = np.arange(len(parent))
    jump = np.where(parent < 0, rows, parent)
    for _ in range(max(1, len(parent)).bit_length()):
        next_jump = jump[jump]
        if np.array_equal(next_jump, jump):
            break
        jump = next_jump
    return np.asarray(parent[jump] < 0)


def _single_chunk(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)  # without the copy
    return pa.concat_arrays(column.chunks) if column.chunks else pa.array([], column.type)

"""Drops near duplicates, in the stages of datatrove's MinHash deduplication; each is a task per file.

    sign   shard    a key for every band of every example         → filed by key
    pair   bucket   examples with the same key make pairs         → filed by pair, and by shard
    fetch  shard    the shingles and ids of examples in pairs     → filed by pair
    check  bucket   pairs that reach the threshold                → clusters within the bucket
    join   all      clusters that share an example are one; its first example stays

A task holds a piece of one shard, or one bucket. Only `join` holds, at some 100 bytes each, all examples
that have a near duplicate.
"""

from __future__ import annotations

import functools

import numpy as np
import pyarrow as pa

from pipeline.arrays import Ints, mix
from pipeline.corpora import buckets
from pipeline.corpora.dedup import hashing, minhash
from pipeline.corpora.dedup.examples import (
    CLUSTERS,
    COMPARED,
    DedupPlan,
    bucket_tasks,
    file_duplicates,
    keep_mask,
    node_of,
    read_drops,
    read_pieces,
    shard_and_row,
    sides,
)
from pipeline.corpora.dedup.hashing import Tokens
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord
from pipeline.engine.run import run_tasks

KEY_BYTES = 24  # of one band of one example

_KEYS = pa.schema([("key", pa.uint64()), ("tie", pa.uint64()), ("node", pa.int64())])
_PAIRS = pa.schema([("first", pa.int64()), ("second", pa.int64())])
_REQUESTS = pa.schema([("row", pa.int64()), ("bucket", pa.int64())])
_SIDES = ("response", "context")  # the context is not always compared
_SETS = pa.schema(
    [
        ("node", pa.int64()),
        ("rank", pa.int8()),
        ("id", pa.string()),
        # Shingles, sorted; null where they are not compared.
        *((side, pa.large_list(pa.uint64())) for side in _SIDES),
    ]
)


def drop(draft: Draft, plan: DedupPlan) -> list[TaskRecord]:
    """Files the drops of the task "near-join"; returns the records of all tasks."""
    stages = (
        (plan.tasks("near-sign"), _sign, "near duplicates: signatures"),
        (bucket_tasks("near-pair", plan.near_buckets), _pair, "near duplicates: pairs"),
        (plan.tasks("near-fetch"), _fetch, "near duplicates: shingles"),
        (bucket_tasks("near-check", plan.near_buckets), _check, "near duplicates: check"),
        ({"near-join": 0}, _join, "near duplicates: clusters"),
    )
    records = list[TaskRecord]()
    for tasks, work, label in stages:
        run = functools.partial(work, plan=plan)
        records += run_tasks(draft, tasks, run, label, TaskRecord)
    return records


def shingles(rows: pa.Table, plan: DedupPlan) -> list[Tokens]:
    """The shingles of each side of the rows; a side with fewer tokens than a shingle is one."""
    options = plan.options
    tokenise = hashing.words if options.unit == "word" else hashing.characters
    return [hashing.ngrams(side, options.shingle) for side in sides(rows, options.text, tokenise)]


def tag_sides(parts: list[Tokens]) -> Tokens:
    """All shingles of an example as one set, in which those of two sides are never the same.

    Where each side's similarity is t or more, so is that of these sets: LSH finds such pairs as it finds
    any others of similarity t.
    """
    tags = hashing.random_hashes(len(parts), stream=5)
    tagged_parts = (Tokens(p.hashes ^ tag, p.offsets) for p, tag in zip(parts, tags, strict=True))
    return functools.reduce(hashing.concatenate, tagged_parts)


def _sign(draft: Draft, task: str, number: int, plan: DedupPlan) -> TaskRecord:
    bands, hashes = plan.options.bands, plan.options.bands * plan.options.rows_per_band
    shard = plan.shards[number]
    tables = [_KEYS.empty_table()]
    row_mask = keep_mask(read_drops(draft, plan, number, "contaminated", "exact"), shard.rows)
    for numbers, rows in read_pieces(shard.uri, COMPARED, row_mask):
        signed_sets = tag_sides(shingles(rows, plan))
        has_shingles = signed_sets.counts > 0  # an example without a word is like no other
        signed_sets = Tokens(signed_sets.hashes, np.unique(signed_sets.offsets))
        keys = minhash.band_keys(minhash.signatures(signed_sets, hashes), bands)
        ties = hashing.text_hashes(rows["example_id"].chunk(0))[has_shingles]
        nodes = node_of(number, numbers[has_shingles])
        columns = [keys.ravel(), np.repeat(ties, bands), np.repeat(nodes, bands)]
        tables.append(pa.table(columns, schema=_KEYS))
    entries = pa.concat_tables(tables).combine_chunks()
    bucket = hashing.bucket_of_hash(entries["key"].to_numpy(), plan.near_buckets)
    buckets.write(draft, task, entries, bucket, plan.near_buckets)
    return TaskRecord()


def _pair(draft: Draft, task: str, bucket: int, plan: DedupPlan) -> TaskRecord:
    entries = buckets.read(draft, plan.tasks("near-sign"), bucket, _KEYS)
    nodes = entries["node"].to_numpy()
    candidates = minhash.candidate_pairs(entries["key"].to_numpy(), entries["tie"].to_numpy())
    first, second = _unique_pairs(nodes[candidates[0]], nodes[candidates[1]])
    # A pair is checked in one place, whichever bands find it.
    place = hashing.bucket_of_hash(mix(first.astype(np.uint64)), plan.near_buckets)
    pairs = pa.table([first, second], schema=_PAIRS)
    buckets.write(draft, f"{task}-pairs", pairs, place, plan.near_buckets)
    node, place = _unique_pairs(np.concatenate([first, second]), np.tile(place, 2))
    shard, row = shard_and_row(node)
    rows = pa.table([row, place], schema=_REQUESTS)
    buckets.write(draft, f"{task}-wanted", rows, shard, len(plan.shards))
    return TaskRecord()


def _fetch(draft: Draft, task: str, number: int, plan: DedupPlan) -> TaskRecord:
    names = [f"{pair}-wanted" for pair in bucket_tasks("near-pair", plan.near_buckets)]
    requests = buckets.read(draft, names, number, _REQUESTS)
    row, place = _unique_pairs(requests["row"].to_numpy(), requests["bucket"].to_numpy())
    shard = plan.shards[number]
    mask = np.zeros(shard.rows, bool)
    mask[row] = True
    compared = plan.options.check
    tables = [_SETS.empty_table()]
    for numbers, rows in read_pieces(shard.uri, COMPARED if compared else COMPARED[:1], mask):
        columns = {
            "node": node_of(number, numbers),
            "rank": np.full(len(numbers), shard.rank),
            "id": rows["example_id"],
            **dict.fromkeys(_SIDES, pa.nulls(len(numbers))),
        }
        if compared:
            for side, part in zip(_SIDES, reversed(shingles(rows, plan)), strict=False):
                columns[side] = _lists(hashing.distinct_tokens(part))
        tables.append(pa.table(columns).cast(_SETS))
    order = np.searchsorted(np.flatnonzero(mask), row)
    rows = pa.concat_tables(tables).take(pa.array(order))
    buckets.write(draft, task, rows, place, plan.near_buckets)
    return TaskRecord()


def _check(draft: Draft, task: str, bucket: int, plan: DedupPlan) -> TaskRecord:
    names = [f"{pair}-pairs" for pair in bucket_tasks("near-pair", plan.near_buckets)]
    candidates = buckets.read(draft, names, bucket, _PAIRS)
    pairs = _unique_pairs(candidates["first"].to_numpy(), candidates["second"].to_numpy())
    sets = buckets.read(draft, plan.tasks("near-fetch"), bucket, _SETS)
    nodes = sets["node"].to_numpy()  # in order, as the files are and the rows of each
    first, second = (np.searchsorted(nodes, side) for side in pairs)
    is_similar = np.ones(len(first), bool)
    for side in _SIDES:
        similarity = minhash.similarities(_tokens(sets[side].chunk(0)), first, second)
        is_similar &= similarity >= plan.options.threshold
    members, labels = minhash.components(first[is_similar], second[is_similar])
    clusters = nodes[members[np.unique(labels, return_index=True)[1]]]
    rows = sets.select(["node", "rank", "id"]).take(pa.array(members))
    rows = rows.add_column(0, "cluster", pa.array(clusters[labels], pa.uint64()))
    buckets.write(draft, task, rows)
    counts = {"near_pairs.found": len(is_similar), "near_pairs.alike": int(is_similar.sum())}
    return TaskRecord(counts=counts)


def _join(draft: Draft, task: str, _task: int, plan: DedupPlan) -> TaskRecord:
    rows = buckets.read(draft, bucket_tasks("near-check", plan.near_buckets), 0, CLUSTERS)
    places = np.unique(rows["node"].to_numpy(), return_index=True)[1]
    edges = rows["cluster"].to_numpy().astype(np.int64), rows["node"].to_numpy()
    _, labels = minhash.components(*edges)
    rows = rows.take(pa.array(places)).set_column(0, "cluster", pa.array(labels, pa.uint64()))
    file_duplicates(draft, task, plan, rows, "near duplicate")
    return TaskRecord()


def _unique_pairs(first: Ints, second: Ints) -> tuple[Ints, Ints]:
    """Pairs without repetition, sorted."""
    places = hashing.first_of_each(first, second)
    return first[places], second[places]


def _lists(sets: Tokens) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(sets.offsets), pa.array(sets.hashes))


def _tokens(lists: pa.Array) -> Tokens:
    return Tokens(lists.values.to_numpy(), lists.offsets.to_numpy())

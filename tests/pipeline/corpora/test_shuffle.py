"""The files of blocks merged before the join: the same rows, fewer requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline import storage
from pipeline.corpora import buckets
from pipeline.corpora.reddit import shuffle
from pipeline.corpora.reddit.shuffle import merge_blocks
from pipeline.engine.draft import Draft

SCHEMA = pa.schema([("number", pa.int64())])
BLOCKS, BUCKETS, ROWS = 50, 21, 100
NAMES = [f"block-00000-{number:06d}" for number in range(BLOCKS)]


@pytest.fixture
def out(out, monkeypatch) -> Draft:
    """A draft with blocks, whose tasks run here."""
    rng = np.random.default_rng(0)
    for number, name in enumerate(NAMES):
        rows = pa.table([np.arange(ROWS) + number * ROWS], schema=SCHEMA)
        buckets.write(out, name, rows, rng.integers(BUCKETS, size=ROWS), BUCKETS)

    def run(draft, tasks, work, label, kind, memory):
        for name in [name for name in tasks if name not in draft.finished_tasks()]:
            draft.mark(name, work(draft, name, tasks[name]))

    monkeypatch.setattr(shuffle, "run_tasks", run)
    monkeypatch.setattr(shuffle, "_MERGED_FROM", 1000)
    return out


def all_buckets(draft: Draft, names: list[str]) -> list[pa.Table]:
    return [buckets.read(draft, names, bucket, SCHEMA) for bucket in range(BUCKETS)]


@pytest.fixture
def requests(monkeypatch) -> list[str]:
    """The file of each range that is read, by one request to an object store."""
    found: list[str] = []
    read = storage.read_range

    def note_and_read(uri: str, start: int, length: int) -> bytes:
        found.append(uri)
        return read(uri, start, length)

    monkeypatch.setattr(storage, "read_range", note_and_read)
    return found


@pytest.mark.slow
def test_merged_blocks_hold_the_same_rows_and_are_read_in_a_fraction_of_the_requests(out, requests):
    before = all_buckets(out, NAMES)
    requests_before = len(requests)
    requests.clear()
    merged = merge_blocks(out, NAMES, BUCKETS)
    assert all_buckets(out, merged) == before
    assert len(merged) == 7  # of 8 blocks each, the last of 2
    # An empty bucket is one request, others are two.
    assert len(requests) <= 2 * (BLOCKS + len(merged) * BUCKETS) < requests_before / 5
    assert sorted(storage.names_in(out.path("_buckets"))) == merged


def test_few_blocks_are_read_as_they_are(out, monkeypatch):
    monkeypatch.setattr(shuffle, "_MERGED_FROM", BLOCKS * BUCKETS)
    assert merge_blocks(out, NAMES, BUCKETS) == NAMES


@pytest.mark.slow
def test_a_merge_that_was_killed_goes_on(out, monkeypatch):
    before = all_buckets(out, NAMES)
    remove, calls = buckets.remove, []

    def power_cut(draft, names):
        calls.append(names)
        if len(calls) == 3:
            raise KeyboardInterrupt
        remove(draft, names)

    with monkeypatch.context() as patch:
        patch.setattr(buckets, "remove", power_cut)
        with pytest.raises(KeyboardInterrupt):
            merge_blocks(out, NAMES, BUCKETS)
    merged = merge_blocks(out, NAMES, BUCKETS)
    assert all_buckets(out, merged) == before
    assert merge_blocks(out, NAMES, BUCKETS) == merged  # nothing is left to do


def test_a_task_that_is_tried_again_after_its_mark_does_not_need_the_blocks(out):
    shuffle._merge(out, "merged-00000", NAMES[:3], BUCKETS)
    shuffle._merge(out, "merged-00000", NAMES[:3], BUCKETS)
    assert Path(out.path("_buckets", "merged-00000")).exists()

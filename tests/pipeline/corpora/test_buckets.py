"""Rows filed by bucket come back whole, in order, from the bucket that they were filed in."""

from __future__ import annotations

import tempfile

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import storage
from pipeline.corpora import buckets
from pipeline.engine.draft import Draft

SCHEMA = pa.schema([("number", pa.int64()), ("text", pa.string())])


def table(numbers: list[int]) -> pa.Table:
    return pa.table([numbers, [f"text {n}" for n in numbers]], schema=SCHEMA)


def test_a_bucket_of_many_files_holds_its_rows_in_the_order_of_files_and_rows(out):
    names = [f"part-{number}" for number in range(40)]  # more than there are readers
    for number, name in enumerate(names):
        first, last = range(10 * number, 10 * number + 4), range(10 * number + 4, 10 * number + 10)
        rows = pa.concat_tables([table([*first]), table([*last])])  # in two chunks
        buckets.write(out, name, rows, np.arange(10) % 3, 3)
    for bucket in range(3):
        wanted = [n for n in range(400) if n % 10 % 3 == bucket]
        found = buckets.read(out, names, bucket, SCHEMA)
        assert found == table(wanted)
        assert found["number"].num_chunks == 1


@pytest.mark.slow
@settings(max_examples=10)
@given(
    st.lists(st.lists(st.integers(0, 4), max_size=9), min_size=1, max_size=7), st.integers(1, 2000)
)
def test_merged_files_read_as_the_files_do(files, merge_bytes):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "MERGE_BYTES", merge_bytes)
        out = Draft(folder, folder, "corpus", {}, {}, "")
        names = [f"part-{number}" for number in range(len(files))]
        for number, (name, places) in enumerate(zip(names, files, strict=True)):
            rows = table([100 * number + at for at in range(len(places))])
            buckets.write(out, name, rows, np.array(places, np.int64), 5)
        wanted = [buckets.read(out, names, bucket, SCHEMA) for bucket in range(5)]
        buckets.merge(out, names, "merged", 5)
        buckets.remove(out, [*names, "never there"])
        assert storage.names_in(out.path("_buckets")) == ["merged"]
        assert [buckets.read(out, ["merged"], bucket, SCHEMA) for bucket in range(5)] == wanted
        buckets.merge(out, ["merged", "merged"], "twice", 5)  # merged files may be merged
        for bucket in range(5):
            twice = pa.concat_tables([wanted[bucket]] * 2)
            assert buckets.read(out, ["twice"], bucket, SCHEMA) == twice


def test_what_is_empty_has_the_schema(out):
    buckets.write(out, "part", table([]), np.zeros(0, np.int64), 2)
    buckets.write(out, "other", table([5]), np.array([1]), 2)
    assert buckets.read(out, ["part", "other"], 0, SCHEMA) == SCHEMA.empty_table()
    assert buckets.read(out, ["part", "other"], 1, SCHEMA) == table([5])
    assert buckets.read(out, [], 0, SCHEMA) == SCHEMA.empty_table()
    buckets.write(out, "all", table([2, 1]))  # without buckets
    assert buckets.read(out, ["all"], 0, SCHEMA) == table([2, 1])

"""Records are the same after a job was killed and has read them from the marks of its tasks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pipeline.artifact import FileEntry
from pipeline.engine.records import TaskRecord, from_json, sum_counts, to_json


@dataclass(frozen=True)
class Check:
    norms: tuple[float, float]
    cosine: float | None


@dataclass(frozen=True, kw_only=True)
class ShardRecord(TaskRecord):
    check: Check | None
    slices: dict[str, list[tuple[str, int]]]
    texts: tuple[str, ...] = ()


FILE = FileEntry(path="train/a.parquet", rows=3, bytes=10, sha256="f00d")


@pytest.mark.parametrize("check", [None, Check((0.5, 2.0), None), Check((0.5, 2.0), 0.9)])
@pytest.mark.parametrize("texts", [(), ("a", "b")])
def test_a_record_comes_back_with_its_types(check, texts):
    record = ShardRecord(
        files=[FILE],
        counts={"rows": 3},
        notes=["said"],
        check=check,
        slices={"part-0": [("file", 1), ("other", 2)], "part-1": []},
        texts=texts,
    )
    again = from_json(ShardRecord, to_json(record).encode())
    assert repr(again) == repr(record)
    assert again == record


@pytest.mark.parametrize(
    "text", ['{"check": null}', '{"embedded": 1}', '{"check": null, "slices": {"a": [["b"]]}}']
)
def test_json_of_another_record_is_an_error(text):
    with pytest.raises((TypeError, ValueError)):
        from_json(ShardRecord, text)


def test_counts_of_tasks_add_up_by_name():
    assert sum_counts([{"a": 1, "b": 2}, {"b": 3}, {}]) == {"a": 1, "b": 5}
    assert sum_counts([]) == {}

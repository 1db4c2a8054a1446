"""Versions of a pool on disk: what readers see, and what they refuse."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline import storage
from pipeline.artifact import Artifact, draft
from pipeline.config import BadInput
from pipeline.retrieval.embed import EmbedConfig
from pipeline.retrieval.pool import Pool, current_uri, describe, make_current
from pipeline.retrieval.search import search

MODEL = Artifact("models/mine", {"kind": "ranker", "fingerprint": "aaaa"})
OTHER = Artifact("models/other", {"kind": "ranker", "fingerprint": "bbbb"})
WIDTH = 4
MAPS = Path("/proc/self/maps")


def publish(pools: Path, version: str, sizes=(3, 1, 2), first=0) -> Pool:
    """A version with shards of `sizes`: row n has the id "id{n}" and vectors of n."""
    out = draft(str(pools / "p" / version), "pool", EmbedConfig(), {"model": MODEL})
    entries = []
    for shard, size in enumerate(sizes):
        numbers = range(first, first + size)
        first += size
        table = pa.table({"id": [f"id{n}" for n in numbers], "text": [f"text {n}" for n in numbers],
                          "content_hash": ["-"] * size})  # fmt: skip
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        entries.append(out.write_file(f"rows/part-{shard:05d}.arrow", sink.getvalue(), size))
        stream = pa.BufferOutputStream()
        matrix = np.repeat(np.array(numbers, np.float32)[:, None], WIDTH, axis=1)
        np.lib.format.write_array(stream, matrix, allow_pickle=False)
        entries.append(out.write_file(f"vectors/part-{shard:05d}.npy", stream.getvalue(), size))
    return Pool.open(out.publish(entries, {"candidates": first}, dimensions=WIDTH).uri)


@pytest.fixture
def pools(tmp_path) -> Path:
    """Pool "p" with the versions v1 (6 rows) and v2 (2 rows, ids from 100); v1 is current."""
    publish(tmp_path, "v1")
    publish(tmp_path, "v2", sizes=(2,), first=100)
    make_current(str(tmp_path), "p", "v1")
    return tmp_path


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_pool_opens_as_current_says_and_a_version_by_its_name(pools, slash):
    current = Pool.open(f"{pools}/p{slash}")
    assert (current.name, current.version, len(current)) == ("p", "v1", 6)
    other = Pool.open(f"{pools}/p/v2{slash}")
    assert (other.name, other.version, len(other)) == ("p", "v2", 2)
    assert other.row(1).id == "id101"


def test_a_relative_path_opens_the_same_pool(pools, monkeypatch):
    monkeypatch.chdir(pools)
    assert Pool.open("p").artifact.uri == str(pools / "p" / "v1")


def test_describe_says_what_is_open(pools):
    told = describe(Pool.open(f"{pools}/p"))
    assert told.pop("created_at").startswith("20")
    assert told == {"name": "p", "version": "v1", "candidates": 6, "dimensions": WIDTH}


def test_row_finds_every_place_across_shards(pools):
    pool = Pool.open(f"{pools}/p")
    assert pool.ends == (3, 4, 6)
    assert [pool.row(place) for place in range(6)] == [(f"id{n}", f"text {n}") for n in range(6)]
    with pytest.raises(IndexError):
        pool.row(6)


def test_vectors_at_gathers_places_across_shards(pools):
    pool = Pool.open(f"{pools}/p")
    for places in ([0, 2, 3, 5], [4], [3], [], [0, 1, 2, 3, 4, 5]):
        found = pool.vectors_at(np.array(places, np.int64))
        assert found.shape == (len(places), WIDTH)
        assert found[:, 0].tolist() == places


def test_the_vectors_are_memory_mapped_and_cannot_be_changed(pools):
    for shard, matrix in enumerate(Pool.open(f"{pools}/p").vectors):
        assert isinstance(matrix, np.memmap)
        assert Path(matrix.filename).name == f"part-{shard:05d}.npy"
        with pytest.raises(ValueError, match="read-only"):
            matrix[0, 0] = 1


@pytest.mark.skipif(not MAPS.exists(), reason="Linux only")
def test_vectors_and_rows_stay_in_their_files(pools):
    before = pa.total_allocated_bytes()
    pool = Pool.open(f"{pools}/p")
    assert pa.total_allocated_bytes() == before
    mapped = {line.split()[-1] for line in MAPS.read_text().splitlines()}
    assert set(pool.artifact.files()) <= mapped


# CURRENT


def test_a_new_current_is_seen_by_who_opens_the_pool_next_and_not_by_who_has_it_open(pools):
    reader = Pool.open(f"{pools}/p")
    make_current(str(pools), "p", "v2")
    assert Pool.open(f"{pools}/p").version == "v2"
    assert reader.version == "v1"
    assert search(reader, np.ones((1, WIDTH)), 2).ids == ["id5", "id4"]
    assert search(Pool.open(f"{pools}/p"), np.ones((1, WIDTH)), 2).ids == ["id101", "id100"]


def test_an_open_version_can_be_read_after_its_files_are_gone(pools):
    reader = Pool.open(f"{pools}/p")
    make_current(str(pools), "p", "v2")
    storage.delete(f"{pools}/p/v1")
    assert search(reader, np.ones((1, WIDTH)), 1).ids == ["id5"]
    assert reader.row(0) == ("id0", "text 0")


def test_readers_find_a_whole_version_at_any_moment_of_a_change(pools):
    stop = threading.Event()

    def change():
        while not stop.is_set():
            for version in ("v2", "v1"):
                make_current(str(pools), "p", version)

    writer = threading.Thread(target=change)
    writer.start()
    try:
        seen = {(pool.version, len(pool)) for pool in (Pool.open(f"{pools}/p") for _ in range(150))}
    finally:
        stop.set()
        writer.join()
    assert seen <= {("v1", 6), ("v2", 2)}
    assert sorted(path.name for path in (pools / "p").iterdir()) == ["CURRENT", "v1", "v2"]


def test_a_write_that_fails_leaves_the_old_current(pools, monkeypatch):
    def fails(self, target):
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="no space left"):
        make_current(str(pools), "p", "v2")
    assert Path(current_uri(str(pools), "p")).read_text() == "v1\n"


# Refusals


def test_a_pool_that_is_not_there_is_refused(pools):
    with pytest.raises(BadInput, match="/q: not a pool"):
        Pool.open(f"{pools}/q")
    with pytest.raises(BadInput, match="/p/v3: not a pool"):
        Pool.open(f"{pools}/p/v3")


def test_a_pool_without_a_current_version_is_refused(pools):
    (pools / "p" / "CURRENT").unlink()
    with pytest.raises(BadInput, match="/p: not a pool"):
        Pool.open(f"{pools}/p")


@pytest.mark.parametrize("named", ["v3", ""])
def test_a_current_that_names_no_version_is_refused(pools, named):
    make_current(str(pools), "p", named)
    with pytest.raises(BadInput, match="not a pool"):
        Pool.open(f"{pools}/p")


def test_an_unfinished_version_is_refused(pools):
    draft(str(pools / "p" / "v3"), "pool", EmbedConfig(), {"model": MODEL})
    with pytest.raises(BadInput, match="/p/v3: unfinished"):
        Pool.open(f"{pools}/p/v3")


def test_an_artifact_of_another_kind_is_refused(pools, tiny_ranker):
    with pytest.raises(BadInput, match="kind is 'ranker'; needed here: pool"):
        Pool.open(tiny_ranker("poly").uri)


@pytest.mark.parametrize("name", ["vectors/part-00001.npy", "rows/part-00002.arrow"])
@pytest.mark.parametrize("damage", ["longer", "shorter", "missing"])
def test_a_file_that_is_not_what_the_manifest_names_is_refused_naming_it(pools, name, damage):
    file = pools / "p" / "v1" / name
    data = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(data + b"." if damage == "longer" else data[:-1])
    with pytest.raises(BadInput, match=rf"{name}: not the {len(data)} bytes that the manifest"):
        Pool.open(f"{pools}/p")


def test_shards_of_another_width_than_the_manifest_says_are_refused(pools):
    manifest = pools / "p" / "v1" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"dimensions": 4', '"dimensions": 5'))
    with pytest.raises(BadInput, match=r"\(3, 4\) vectors for 3 rows of 5 dimensions"):
        Pool.open(f"{pools}/p")


def test_another_model_than_the_pools_is_refused_in_one_line_that_names_both(pools):
    pool = Pool.open(f"{pools}/p")
    pool.require_model(MODEL)
    with pytest.raises(BadInput) as refused:
        pool.require_model(OTHER)
    (line,) = str(refused.value).splitlines()
    assert pool.artifact.uri in line
    assert "the model aaaa, not by models/other (bbbb)" in line

"""Versions of a pool on disk: what readers see, and what they refuse."""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import shutil
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline import checksums, storage
from pipeline.artifact import Artifact
from pipeline.config import BadInput
from pipeline.pools.pool import Pool, describe, make_current
from pipeline.pools.shard import ROWS, load_matrix, open_shard
from pipeline.search import search

MODEL = Artifact("models/mine", {"kind": "ranker", "fingerprint": "aaaa"})
OTHER = Artifact("models/other", {"kind": "ranker", "fingerprint": "bbbb"})
WIDTH = 4
MAPS = Path("/proc/self/maps")


@pytest.fixture(scope="session")
def publish(publish_pool):
    """`publish(folder, "v1", sizes)`: a version with shards of `sizes`.

    Row n has the id "id{n}", and vectors of n.
    """

    def run(pools: Path, version: str, sizes=(3, 1, 2), first=0, dtype="float32") -> str:
        numbers = np.arange(first, first + sum(sizes))
        columns = [
            [f"id{n}" for n in numbers],
            [f"text {n}" for n in numbers],
            ["-"] * len(numbers),
        ]
        matrix = np.repeat(numbers[:, None], WIDTH, axis=1).astype(np.float32)
        table, cuts = pa.table(columns, schema=ROWS), np.cumsum(sizes)[:-1]
        return publish_pool(pools / "p" / version, table, matrix, cuts, dtype, model=MODEL).uri

    return run


@pytest.fixture(scope="session")
def published(tmp_path_factory, publish) -> Path:
    folder = tmp_path_factory.mktemp("pools")
    publish(folder, "v1")
    publish(folder, "v2", sizes=(2,), first=100)
    make_current(str(folder), "p", "v1")
    return folder


@pytest.fixture
def pools(published, tmp_path) -> Path:
    """Pool "p" with the versions v1 (6 rows) and v2 (2 rows, ids from 100); v1 is current."""
    shutil.copytree(published, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_a_pool_opens_as_current_says_and_a_version_by_its_name(pools, monkeypatch):
    current = Pool.open(f"{pools}/p")
    assert (current.name, current.version, len(current)) == ("p", "v1", 6)
    other = Pool.open(f"{pools}/p/v2/")
    assert (other.name, other.version, len(other)) == ("p", "v2", 2)
    assert other.row(1).id == "id101"
    monkeypatch.chdir(pools)
    assert Pool.open("p/").artifact.uri == str(pools / "p" / "v1")


def test_describe_says_what_is_open(pools):
    told = describe(Pool.open(f"{pools}/p"))
    assert told.pop("created_at").startswith("20")
    assert told == {"name": "p", "version": "v1", "candidates": 6, "dimensions": WIDTH,
                    "precision": "unknown"}  # fmt: skip


def test_row_finds_every_place_across_shards(pools):
    pool = Pool.open(f"{pools}/p")
    assert pool.ends == (3, 4, 6)
    assert [pool.row(place) for place in range(6)] == [(f"id{n}", f"text {n}") for n in range(6)]
    with pytest.raises(IndexError):
        pool.row(6)


def test_rows_at_reads_places_in_any_order(pools):
    pool = Pool.open(f"{pools}/p")
    places = np.random.default_rng(0).permutation(len(pool))
    assert pool.rows_at(places) == [pool.row(place)._asdict() for place in places.tolist()]
    assert pool.rows_at(places[:2], ["content_hash"]) == [{"content_hash": "-"}] * 2
    assert pool.rows_at(places[:0]) == []


def test_vectors_at_gathers_places_across_shards(pools):
    pool = Pool.open(f"{pools}/p")
    for places in ([0, 2, 3, 5], [4], [3], [], [0, 1, 2, 3, 4, 5]):
        found = pool.vectors_at(np.array(places, np.int64))
        assert found.shape == (len(places), WIDTH)
        assert found[:, 0].tolist() == places


@pytest.mark.skipif(not MAPS.exists(), reason="Linux only")
def test_everything_stays_in_its_files(pools):
    before = pa.total_allocated_bytes()
    pool = Pool.open(f"{pools}/p", check="never")
    assert pa.total_allocated_bytes() == before
    mapped = {line.split()[-1] for line in MAPS.read_text().splitlines()}
    assert set(pool.artifact.files()) <= mapped


def test_what_is_written_to_a_vector_in_memory_does_not_reach_the_file(pools):
    pool = Pool.open(f"{pools}/p")
    pool.shards[0].vectors.matrix[:] = 7
    assert Pool.open(f"{pools}/p").vectors_at(np.array([0])).tolist() == [[0.0] * WIDTH]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_every_type_of_numbers_opens_as_it_was_written(publish, tmp_path, dtype):
    pool = Pool.open(publish(tmp_path, "v", sizes=(5, 3), dtype=dtype))
    assert pool.dtype == dtype
    # 0 to 7 are the same in all of them but int8, whose scales have 16 bits.
    np.testing.assert_allclose(pool.vectors_at(np.arange(8))[:, 0], np.arange(8), rtol=4e-5)
    assert pool.longest == pytest.approx(7 * WIDTH**0.5, rel=1e-4)
    assert search(pool, np.ones((1, WIDTH)), 2, method="pruned").ids == ["id7", "id6"]


def test_a_pool_without_rows_opens_and_answers_nothing(publish, tmp_path):
    pool = Pool.open(publish(tmp_path, "v", sizes=()))
    assert len(pool) == 0
    assert pool.vectors_at(np.arange(0)).shape == (0, WIDTH)
    for method in ("auto", "exact", "pruned"):
        answer = search(pool, np.ones((2, WIDTH)), 3, method=method)
        assert (answer.ids, answer.scores.shape, answer.certified) == ([], (0,), True)


def test_the_manifest_tells_of_every_shard(pools):
    manifest = Pool.open(f"{pools}/p").artifact.manifest
    assert [s["rows"] for s in manifest["statistics"]] == [3, 1, 2]
    least, mean, most = manifest["statistics"][0]["lengths"]  # of the rows 0, 1, 2
    assert (least, mean, most) == pytest.approx((0, 2, 4))
    # Vectors on one line: a direction holds all of them.
    assert manifest["statistics"][1]["missed_by_sketch"] < 1e-3


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
        seen = {(pool.version, len(pool)) for pool in (Pool.open(f"{pools}/p") for _ in range(50))}
    finally:
        stop.set()
        writer.join()
    assert seen <= {("v1", 6), ("v2", 2)}
    assert sorted(path.name for path in (pools / "p").iterdir()) == ["CURRENT", "v1", "v2"]


# Refusals


def test_a_pool_that_is_not_there_is_refused(pools):
    with pytest.raises(BadInput, match="/q: not a pool"):
        Pool.open(f"{pools}/q")
    with pytest.raises(BadInput, match="/p/v3: not a pool"):
        Pool.open(f"{pools}/p/v3")


def test_a_pool_without_a_current_version_is_refused(pools):
    for named in ("v3", ""):
        make_current(str(pools), "p", named)
        with pytest.raises(BadInput, match="not a pool"):
            Pool.open(f"{pools}/p")
    (pools / "p" / "CURRENT").unlink()
    with pytest.raises(BadInput, match="/p: not a pool"):
        Pool.open(f"{pools}/p")


FILES = ["vectors/part-00001.npy", "rows/part-00002.arrow", "norms/part-00000.npy",
         "sketch/part-00001.npy", "sketch_norms/part-00002.npy", "rotation.npy"]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_what_the_manifest_names_is_refused_naming_it(pools, name):
    file = pools / "p" / "v1" / name
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(BadInput, match=rf"{name}: has .*; manifest.json says {len(data):,}"):
        Pool.open(f"{pools}/p")
    file.write_bytes(data)
    flip(file)
    with pytest.raises(BadInput, match=rf"v1/{name}: damaged"):
        Pool.open(f"{pools}/p")


def test_a_damaged_file_of_a_pool_whose_manifest_has_no_crc_32_is_refused(pools):
    """As earlier versions wrote it."""
    manifest = pools / "p" / "v1" / "manifest.json"
    values = json.loads(manifest.read_text())
    for entry in values["files"]:
        del entry["crc32"]
    manifest.write_text(json.dumps(values))
    file = pools / "p" / "v1" / FILES[0]
    flip(file)
    with pytest.raises(BadInput, match=rf"v1/{FILES[0]}: damaged"):
        Pool.open(f"{pools}/p")
    flip(file)
    assert len(Pool.open(f"{pools}/p")) == 6


def test_shards_of_another_width_than_the_manifest_says_are_refused(pools):
    manifest = pools / "p" / "v1" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"dimensions": 4', '"dimensions": 5'))
    with pytest.raises(BadInput, match=r"rotation.npy: float64 \(4, .* float64 \(5, "):
        Pool.open(f"{pools}/p")


def flip(file: Path) -> None:
    """Changes one bit of the last byte, and nothing else that a directory shows."""
    stat, data = file.stat(), bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_the_note_that_checksums_passed_lies_in_the_cache_folder(pools, tmp_path, monkeypatch):
    monkeypatch.setenv("POLYRANK_CACHE", str(tmp_path / "cache"))
    Pool.open(f"{pools}/p")
    assert len(list((tmp_path / "cache" / "checked").iterdir())) == 1
    monkeypatch.setenv("POLYRANK_CACHE", "/dev/null/none")  # as on a node that is read-only
    assert len(Pool.open(f"{pools}/p")) == 6


def test_checksums_are_looked_at_once_on_a_node_or_always(pools, monkeypatch):
    looked: list[str] = []
    is_whole = checksums._is_whole
    monkeypatch.setattr(
        checksums, "_is_whole", lambda *of: looked.append(of[2]["path"]) or is_whole(*of)
    )
    count = len(Pool.open(f"{pools}/p").artifact.manifest["files"])
    assert len(looked) == count
    Pool.open(f"{pools}/p")
    assert len(looked) == count
    Pool.open(f"{pools}/p", check="never")
    assert len(looked) == count
    Pool.open(f"{pools}/p", check="always")
    assert len(looked) == 2 * count
    file = pools / "p" / "v1" / "vectors" / "part-00000.npy"
    file.write_bytes(file.read_bytes())  # another time
    Pool.open(f"{pools}/p")
    assert len(looked) == 3 * count
    flip(file)
    with pytest.raises(BadInput, match=r"part-00000.npy: damaged"):
        Pool.open(f"{pools}/p", check="always")


def test_an_open_pool_holds_no_descriptors_and_five_maps_a_shard(publish, tmp_path):
    """100 million rows are 6,104 shards; a shell allows 1,024 descriptors, Linux 65,530 maps."""
    uri = publish(tmp_path, "v", sizes=(2,) * 20)
    descriptors = list(Path("/dev/fd").iterdir())
    pool = Pool.open(uri)
    assert len(list(Path("/dev/fd").iterdir())) <= len(descriptors)
    if MAPS.exists():
        lines = [line for line in MAPS.read_text().splitlines() if f"{uri}/" in line]
        assert 0 < len(lines) <= 5 * 20 + 1
        matrix = pool.shards[7].vectors.matrix
        del pool
        gc.collect()
        (line,) = [line for line in MAPS.read_text().splitlines() if f"{uri}/" in line]
        assert line.endswith("vectors/part-00007.npy")
        assert matrix.tolist() == [[14.0] * WIDTH, [15.0] * WIDTH]


@pytest.mark.parametrize("name", ["vectors/part-00001.npy", "rows/part-00001.arrow"])
def test_too_many_open_files_are_no_damage(pools, name):
    folder = pools / "p" / "v1"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    manifest = json.loads((folder / "manifest.json").read_text())
    descriptors: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
        with pytest.raises(OSError) as full:
            while True:
                descriptors.append(os.open(os.devnull, os.O_RDONLY))
        assert full.value.errno == errno.EMFILE
        with pytest.raises(OSError, match=r"Too many open files") as failed:
            if name.startswith("rows"):
                open_shard(folder, "part-00001", manifest, WIDTH)
            else:
                load_matrix(folder / name, np.float32, (1, WIDTH))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert failed.value.errno == errno.EMFILE


def test_a_pool_of_an_older_format_is_to_be_embedded_again(pools):
    manifest = pools / "p" / "v1" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"dtype"', '"was"'))
    with pytest.raises(BadInput, match=r"v1: dtype is None; allowed: .*; embed the pool again"):
        Pool.open(f"{pools}/p")


def test_a_rotation_that_is_none_is_refused_even_where_checksums_are_not_looked_at(pools):
    file = pools / "p" / "v1" / "rotation.npy"
    np.save(file, np.load(file) * 1.001)
    with pytest.raises(BadInput, match=r"rotation.npy: damaged \(no rotation\)"):
        Pool.open(f"{pools}/p", check="never")


def test_another_model_than_the_pools_is_refused_in_one_line_that_names_both(pools):
    pool = Pool.open(f"{pools}/p")
    pool.require_model(MODEL)
    with pytest.raises(BadInput) as refused:
        pool.require_model(OTHER)
    (line,) = str(refused.value).splitlines()
    assert pool.artifact.uri in line
    assert "the model aaaa, not by models/other (bbbb)" in line

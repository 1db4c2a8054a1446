"""Approximate search: what an index finds, and what is said of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline import storage
from pipeline.config import BadInput
from pipeline.pools import build
from pipeline.pools.pool import Pool
from pipeline.pools.shard import PoolPart
from pipeline.search import approximate, search, top_rows
from pipeline.search.exact import FORMS
from pipeline.storage import node_cache

pytest.importorskip("faiss")


@pytest.fixture(scope="module")
def publish(tmp_path_factory, publish_pool):
    """`publish(rows [N, D], size)`: a pool on disk, in shards of `size` rows, three to an index."""

    def run(rows_ND, size: int, neighbours: bool = True) -> Pool:
        rows_ND = np.asarray(rows_ND, np.float32)
        folder = tmp_path_factory.mktemp("approximate") / "p" / f"v{len(rows_ND)}"
        ids, cuts = [f"id{n}" for n in range(len(rows_ND))], range(size, len(rows_ND), size)
        return Pool.open(publish_pool(folder, ids, rows_ND, cuts, neighbours=neighbours).uri)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_PART_SHARDS", 3)
        yield run


@pytest.fixture(scope="module")
def texts():
    """(rows, vectors): as vectors of texts are, in groups, with most energy in some directions."""
    rng = np.random.default_rng(0)
    scale = 1 / np.sqrt(1 + np.arange(48))
    groups = rng.normal(size=(100, 48)) * scale
    rows = groups[rng.integers(100, size=8000)] + 0.5 * rng.normal(size=(8000, 48)) * scale
    vectors = groups[:20, None] + 0.1 * rng.normal(size=(20, 16, 48)) * scale
    return rows, vectors.astype(np.float32)


@pytest.fixture(scope="module")
def pool(publish, texts) -> Pool:
    """All texts, in eight shards."""
    return publish(texts[0], 1000)


@pytest.fixture(scope="module")
def small_pool(publish, texts) -> Pool:
    """The first 50 texts, in five shards."""
    return publish(texts[0][:50], 10)


def test_most_of_the_best_are_found_and_nothing_is_promised(pool, texts, monkeypatch):
    monkeypatch.setattr(approximate, "_NEIGHBOURS", 400)
    _, vectors = texts
    exact = top_rows(pool, vectors, 10, method="exact")
    found = top_rows(pool, vectors, 10, method="approximate")
    shared = [len({*a} & {*b}) for a, b in zip(exact.places, found.places, strict=True)]
    assert np.mean(shared) >= 9.8
    assert not found.certified.any()
    # What is found has its exact score.
    for places, scores, all_places, all_scores in zip(*found[:2], *exact[:2], strict=True):
        known = dict(zip(all_places, all_scores, strict=True))
        same = [p in known for p in places]
        assert [known[p] for p in places[same]] == scores[same].tolist()


@pytest.mark.parametrize("form", ["scores", "vectors", "sketch"])
def test_it_goes_on_until_it_is_certified(pool, texts, monkeypatch, form):
    monkeypatch.setattr(approximate, "_NEIGHBOURS", 40)  # finds little
    monkeypatch.setitem(FORMS, "approximate", (form,))
    _, vectors = texts
    found = top_rows(pool, vectors, 10, method="approximate", certify=True)
    exact = top_rows(pool, vectors, 10, method="exact")
    assert found.certified.all()
    np.testing.assert_array_equal(found.places, exact.places)
    np.testing.assert_array_equal(found.scores, exact.scores)


def test_too_few_rows_that_are_allowed_are_no_answer(pool, texts, monkeypatch):
    """The index knows nothing of filters; where it leaves less than was asked for, all rows are looked at."""
    monkeypatch.setattr(approximate, "_NEIGHBOURS", 40)
    _, vectors = texts
    among = np.arange(8000) % 50 == 7
    found = top_rows(pool, vectors, 10, method="approximate", among=among)
    exact = top_rows(pool, vectors, 10, method="exact", among=among)
    assert found.places.shape == (20, 10)
    assert found.certified.any()
    for at in np.flatnonzero(found.certified):
        assert found.places[at].tolist() == exact.places[at].tolist()


def test_the_threads_of_who_searches_stay_as_they_are(pool, texts):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        top_rows(pool, texts[1], 10, method="approximate")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_places_are_those_of_the_pool_across_indices(publish):
    rows = np.eye(12)[np.arange(60) % 12] * (1 + np.arange(60) // 12)[:, None]
    pool = publish(rows, 7)
    index = pool.neighbours
    assert [index.at(part).ntotal for part in range(index.count())] == [21, 21, 18]
    for at in range(12):
        answer = search(pool, np.eye(12)[[at]], 2, method="approximate")
        assert answer.ids == [f"id{48 + at}", f"id{36 + at}"]


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 4), (2, 1)])
def test_the_smallest_pools_have_an_index(publish, rows, width):
    matrix = np.random.default_rng(1).normal(size=(rows, width))
    pool = publish(matrix, 2)
    answer = search(pool, np.ones((2, width)), rows, method="approximate")
    assert sorted(answer.ids) == sorted(f"id{n}" for n in range(rows))


def test_a_pool_without_an_index_is_refused(publish, texts):
    pool = publish(texts[0][:50], 10, neighbours=False)
    with pytest.raises(
        BadInput, match=r"v50: has no index of neighbours; embed .* --embed.neighbours"
    ):
        search(pool, texts[1][0], 3, method="approximate")


def test_a_part_of_a_pool_and_an_index_that_is_gone_are_refused(small_pool, texts, tmp_path):
    part = Pool.open(small_pool.artifact.uri, part=PoolPart(1, 2))
    with pytest.raises(BadInput, match="v50: a part of a pool has no index of neighbours"):
        search(part, texts[1][0], 3, method="approximate")
    shutil.copytree(small_pool.artifact.uri, tmp_path / "v")
    pool = Pool.open(tmp_path / "v")
    shutil.rmtree(tmp_path / "v")  # as a night removes an old version
    with pytest.raises(
        BadInput, match=r"part-00000\.faiss: has been removed since the pool was opened"
    ):
        search(pool, texts[1][0], 3, method="approximate")


def test_a_closed_pool_with_an_index_may_leave_the_nodes_disk(
    small_pool, texts, tmp_path, monkeypatch
):
    monkeypatch.setenv("POLYRANK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("POLYRANK_CACHE_GIB", str(1 / 2**30))
    storage.upload(Path(small_pool.artifact.uri), "memory://searched/p/v50")
    storage.write_bytes("memory://searched/other/x", b"1")
    try:
        pool = Pool.open("memory://searched/p/v50")
        search(pool, texts[1][0], 3, method="approximate")
        pool.close()
        node_cache.local_folder("memory://searched/other", "v")
    finally:
        storage.delete("memory://searched")
    assert not pool.folder.exists()


def test_a_damaged_index_is_refused(small_pool, tmp_path):
    shutil.copytree(small_pool.artifact.uri, tmp_path / "v")
    file = tmp_path / "v" / "neighbours" / "part-00001.faiss"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(BadInput, match=r"neighbours/part-00001.faiss: damaged"):
        Pool.open(tmp_path / "v")


def test_without_faiss_the_job_says_so_before_it_begins(monkeypatch):
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        BadInput, match=r"embed.neighbours: needs the package faiss-cpu; pip install"
    ):
        build.require_faiss()

"""A pool of 100 million rows in a shell that allows 1,024 open files."""

from __future__ import annotations

import resource
import shutil
import time

import numpy as np
import pyarrow as pa
import pytest

from jobs import cluster, embed_pool
from pipeline.engine.draft import Draft, draft
from pipeline.pools import build
from pipeline.pools.pool import Pool
from pipeline.pools.shard import ROWS
from pipeline.pools.vector_format import encode
from pipeline.search import top_rows

pytestmark = [pytest.mark.long, pytest.mark.ray, pytest.mark.timeout(3600)]

ROWS_IN_ALL, ROWS_A_SHARD, WIDTH, TOP_K = 100_000_000, 1 << 14, 8, 10
BYTES = 20 << 30


def test_it_opens_and_finds_the_best(tmp_path):
    if shutil.disk_usage(tmp_path).free < BYTES:
        pytest.skip("needs 20 GB of disk")
    starts = range(0, ROWS_IN_ALL, ROWS_A_SHARD)
    sizes = [min(ROWS_A_SHARD, ROWS_IN_ALL - start) for start in starts]
    out = draft(
        str(tmp_path / "p" / "v1"),
        "pool",
        embed_pool.Config(model="", candidates=(), pools="", name="p"),
        {},
    )
    assert isinstance(out, Draft)
    names, entries = [], []
    # No shard's own numbers.
    context_MD = np.random.default_rng(ROWS_IN_ALL).standard_normal((4, WIDTH), np.float32)
    best = np.empty(0)
    for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        vectors_ND = np.random.default_rng(number).standard_normal((size, WIDTH), np.float32)
        ids = pa.array(np.arange(start, start + size)).cast(pa.string())
        names.append(f"part-{number:05d}")
        entries += build.write_shard(
            out, names[-1], pa.table([ids, ids, ids], ROWS), encode(vectors_ND, "float32")
        )
        # The oracle: the paper's formula in float64, over every row.
        logits_NM = vectors_ND.astype(np.float64) @ context_MD.astype(np.float64).T
        weights_NM = np.exp(logits_NM - logits_NM.max(1, keepdims=True))
        scores_N = (weights_NM * logits_NM).sum(1) / weights_NM.sum(1)
        best = np.sort(np.concatenate([best, scores_N]))[-TOP_K:]
    with cluster.session(for_tasks=True):
        index_entries, statistics = build.index(out, names, WIDTH)
    facts = {"dimensions": WIDTH, "dtype": "float32", "statistics": statistics}
    out.publish([*entries, *index_entries], {"candidates": ROWS_IN_ALL}, **facts)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        Pool.open(tmp_path / "p" / "v1").close()  # checksums are checked once on a node
        began = time.perf_counter()
        pool = Pool.open(tmp_path / "p" / "v1")
        seconds = time.perf_counter() - began
        answers = {
            method: top_rows(pool, context_MD[None], TOP_K, method=method)
            for method in ("exact", "pruned", "auto")
        }
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print(f"opened in {seconds:.1f} s (goal: 10)")
    assert len(pool) == ROWS_IN_ALL
    for method, answer in answers.items():
        assert answer.certified[0], method
        np.testing.assert_allclose(answer.scores[0], best[::-1].astype(np.float32), rtol=2e-7)

"""Searches of a million candidates beside the plain expression, the machine's memory, and each other.

Real questions: the contexts of a corpus, as a trained poly-encoder sees them. Real candidates: turns and
answers of this and of further corpora, embedded; where they are too few, each comes again, mixed with two
others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from unittest import mock

import faiss
import numpy as np
import pyarrow as pa
import torch

from jobs import cluster, embed_pool
from jobs.benchmark import Config
from jobs.benchmarks.inputs import read_contexts, read_texts
from jobs.benchmarks.measure import BenchmarkRow, in_turn
from pipeline.arrays import Floats
from pipeline.artifact import Artifact, FileEntry, open_artifact
from pipeline.config import digest, require
from pipeline.engine.draft import Draft, draft
from pipeline.models import inference
from pipeline.models.ranker import load_ranker
from pipeline.pools import build
from pipeline.pools.pool import Pool
from pipeline.pools.shard import ROWS, PoolPart
from pipeline.pools.vector_format import Dtype, decode, encode
from pipeline.search import Method, top_rows
from pipeline.search.exact import FORMS
from pipeline.search.threads import in_parallel

_CANDIDATES = {"small": 100_000, "full": 1_000_000}
_EMBEDDED = {"small": 5_000, "full": 100_000}
_QUESTIONS = {"small": 8, "full": 16}
_CHECKED = {"small": 50, "full": 200}  # the timed ones among them
_ROUNDS = {"small": 3, "full": 5}
_FEW = 100_000  # where poly is compared with bi, and all answers with float64
# Sizes of pools, as far as there are candidates; the first rows of the large one, in float32, the default of
# jobs.embed_pool.
_SIZES = (600, 1_000, 5_000, 10_000, 20_000, 100_000, 1_000_000)
_SMALL_POOL = 100_000
_CONTEXTS = (1, 4, 16)
_ENOUGH_RECALL = 0.99
_TOGETHER = 16
_TOP_K = 10
_SHARD_ROWS = 16_384
_MIXED = 0.35
Way = Callable[[int], object]
"""Answers the question of a number."""


def measure(config: Config, work: Path) -> Iterator[BenchmarkRow]:
    """All on the cores that this process may use."""
    size, model = config.size, open_artifact(config.model, "ranker")
    corpora = [open_artifact(uri, "corpus") for uri in config.corpus]
    ranker = load_ranker(model.local())
    has_several = ranker.config.vectors_per_context > 1
    several = "a ranker with several vectors per context"
    require(has_several, "model", ranker.config.architecture, several)
    count = _CHECKED[size]
    contexts, texts = read_contexts(corpora[0], count), read_texts(corpora, _EMBEDDED[size])
    require(len(contexts) == count, "corpus", corpora[0].uri, f"{count} examples at least")
    inputs = [model.fingerprint, *(corpus.fingerprint for corpus in corpora), size]
    folder = work / "search" / digest(inputs)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{len(texts):,} texts are embedded, and made {_CANDIDATES[size]:,}", flush=True)

    @functools.cache
    def real_vectors() -> Floats:  # of pools that an earlier run has not made
        return inference.candidate_vectors(ranker, texts).numpy()

    questions = inference.context_vectors(ranker, contexts)[0].numpy()
    with cluster.session(for_tasks=True):
        pool = _pool_of(folder / "pool", model, real_vectors, _CANDIDATES[size])
        pool_float32 = _pool_of(folder / "whole", model, real_vectors, _CANDIDATES[size], "float32")
        small_pool = _pool_of(folder / "few", model, real_vectors, min(_FEW, _CANDIDATES[size]))
    timed_questions, rounds = questions[: _QUESTIONS[size]], _ROUNDS[size]
    _check(small_pool, questions)
    yield from _times(pool, pool_float32, timed_questions, rounds, questions[:100])
    yield _poly_over_bi(small_pool, timed_questions, rounds)
    yield from _by_size(pool_float32, questions[: max(_CONTEXTS)], rounds)


def _times(
    pool: Pool, pool_float32: Pool, questions: Floats, rounds: int, compared: Floats
) -> Iterator[BenchmarkRow]:
    """All searches in turn, so that they have the same machine; the mean of each question's best round.

    `pool_float32`: the same candidates in float32, the default of jobs.embed_pool. `compared`: questions to
    compare the methods' answers by.
    """
    certified, recall = _agreement(pool, compared)
    matrices = [torch.from_numpy(shard.vectors.matrix.view(np.int64)) for shard in pool.shards]
    plain_ND = torch.empty(len(pool), pool.dimensions)
    for shard, end in zip(pool.shards, pool.ends, strict=True):
        plain_ND[end - len(shard) : end] = torch.from_numpy(decode(shard.vectors))

    exact = _search(pool, questions, "exact")
    searches: dict[str, Way] = {"read": lambda number: in_parallel(torch.sum, matrices)}
    methods: tuple[Method, ...] = ("exact", "pruned", "approximate")
    for method in methods:
        searches[method] = _search(pool, questions, method)
        searches[f"{method}, float32"] = _search(pool_float32, questions, method)
    batches: dict[str, Way] = {
        "together": lambda number: top_rows(pool, questions[:_TOGETHER], _TOP_K),
        "alone": lambda number: [exact(place) for place in range(_TOGETHER)],
    }
    plain: dict[str, Way] = {"plain": lambda number: _plain(plain_ND, questions[number])}
    seconds = _seconds(searches, len(questions), rounds)
    seconds |= _seconds(plain, 2, max(2, rounds // 2))
    if len(questions) >= _TOGETHER:
        seconds |= _seconds(batches, 1, rounds)
    ms = {name: 1e3 * value for name, value in seconds.items()}
    name, passes = "search.exact_1m_m64", "passes over the bf16 matrix"  # of the full size
    note = f"{len(pool):,} candidates, {questions.shape[1]} vectors a context."
    detail = {"milliseconds": {name: round(value, 2) for name, value in ms.items()}, "note": note}
    yield BenchmarkRow(
        f"{name}.vs_plain_torch", ms["exact"], "ms", ms["plain"], ms["plain"] / ms["exact"],
        floor=ms["read"], share_of_floor=ms["read"] / ms["exact"], detail=detail,
    )  # fmt: skip
    for row, method in ((name, "exact"), ("search.pruned_1m", "pruned")):
        over_read = ms[method] / ms["read"]
        yield BenchmarkRow.alone(f"{row}.time_over_read_floor", over_read, passes, note)
    exact_ms, *others_ms = (ms[f"{method}, float32"] for method in methods)
    pruned, approximate = (method_ms / exact_ms for method_ms in others_ms)
    detail = {"certified": f"{certified} of {len(compared)} questions", "note": note}
    yield BenchmarkRow("search.pruned_1m.time_share_of_exact", pruned, "share", detail=detail)
    yield BenchmarkRow.alone("search.approximate_1m.recall_at_10", recall, "recall@10", note)
    if recall < _ENOUGH_RECALL:  # what it leaves out has to be found by the exact search
        approximate += 1
    row = "search.approximate_1m.time_share_of_exact"
    yield BenchmarkRow.alone(row, approximate, "share", note)
    if "alone" in ms:
        together, alone = (ms[way] / _TOGETHER for way in ("together", "alone"))
        row, ratio = f"{name}.16_together_vs_alone", alone / together
        yield BenchmarkRow.beside(row, together, alone, "ms a question", note, ratio=ratio)


def _search(pool: Pool, questions_QMD: Floats, method: Method) -> Way:
    return lambda number: top_rows(pool, questions_QMD[number : number + 1], _TOP_K, method=method)


def _seconds(searches: Mapping[str, Way], questions: int, rounds: int) -> dict[str, float]:
    """Of each way: the mean over the questions of the best of all rounds."""
    ways = {
        (name, question): functools.partial(run, question)
        for question in range(questions)
        for name, run in searches.items()
    }
    best = {way: min(times) for way, times in in_turn(ways, rounds).items()}
    return {name: fmean(best[name, question] for question in range(questions)) for name in searches}


def _plain(candidates_CD: torch.Tensor, vectors_MD: Floats) -> torch.return_types.topk:
    logits_CM = candidates_CD @ torch.from_numpy(vectors_MD).T
    return (torch.softmax(logits_CM, 1) * logits_CM).sum(1).topk(_TOP_K)


def _poly_over_bi(pool: Pool, questions: Floats, rounds: int) -> BenchmarkRow:
    """The same pool, by all of a context's vectors and by one of them, as a bi-encoder has it."""
    searches = {
        "poly": _search(pool, questions, "exact"),
        "bi": _search(pool, questions[:, :1], "exact"),
    }
    seconds = _seconds(searches, len(questions), 3 * rounds)
    name, ratio = "search.exact_100k.poly64_time_over_bi", seconds["poly"] / seconds["bi"]
    note = f"{len(pool):,} candidates, {questions.shape[1]} vectors a context."
    return BenchmarkRow.alone(name, ratio, "times", note)


def _by_size(pool: Pool, questions: Floats, rounds: int) -> Iterator[BenchmarkRow]:
    """What `auto` takes, beside each form of exact search, three lines of PyTorch and FAISS' flat index."""
    over_best, over_plain, over_faiss = dict[str, float](), dict[str, float](), dict[str, float]()
    for size in [size for size in _SIZES if size <= len(pool)]:
        part = Pool.open(pool.artifact.uri, part=PoolPart(0, max(1, len(pool) // size)))
        matrix_ND = np.concatenate([decode(shard.vectors) for shard in part.shards])
        plain_ND = torch.from_numpy(matrix_ND)
        asked = [*((questions, count) for count in _CONTEXTS), (questions[:, :1].copy(), 1)]
        for vectors, contexts in asked:
            label = f"{len(part):,} rows, m = {vectors.shape[1]}, {contexts} contexts"
            times = _times_of_forms(part, plain_ND, vectors[:contexts], rounds)
            over_best[label] = times["auto"] / min(times[form] for form in _FORMS)
            if contexts == 1 and len(part) <= _SMALL_POOL + len(pool) // _SMALL_POOL:
                over_plain[label] = times["auto"] / times["plain"]
            if "faiss" in times:
                over_faiss[label] = times["auto"] / times["faiss"]
    for name, ratios in (
        ("search.auto.time_over_best", over_best),
        ("search.small_pools.time_over_plain_torch", over_plain),
        ("search.bi.time_over_faiss_flat", over_faiss),
    ):
        ratio, worst = max((ratio, label) for label, ratio in ratios.items())
        note = f"Worst of {len(ratios)}, up to {len(pool):,} rows: {worst}."
        rounded = {label: round(ratio, 2) for label, ratio in ratios.items()}
        yield BenchmarkRow(name, ratio, "times", detail={"ratios": rounded, "note": note})


_FORMS: dict[str, Method] = {"scores": "exact", "vectors": "exact", "sketch": "pruned"}
"""The forms of exact search, and the method that may take each."""


def _times_of_forms(
    pool: Pool, plain_ND: torch.Tensor, contexts_QMD: Floats, rounds: int
) -> dict[str, float]:
    """Seconds of each form for all contexts together, of `auto`, and of others for one context."""

    def by_form(form: str) -> Way:
        def run(number: int) -> object:
            with mock.patch.dict(FORMS, {_FORMS[form]: (form,)}):
                return top_rows(pool, contexts_QMD, _TOP_K, method=_FORMS[form])

        return run

    searches = {form: by_form(form) for form in _FORMS}
    searches["auto"] = lambda number: top_rows(pool, contexts_QMD, _TOP_K)
    if len(contexts_QMD) == 1:
        searches["plain"] = lambda number: _plain(plain_ND, contexts_QMD[0])
        if contexts_QMD.shape[1] == 1:
            index = faiss.IndexFlatIP(pool.dimensions)
            index.add(plain_ND.numpy())
            searches["faiss"] = lambda number: index.search(contexts_QMD[0], _TOP_K)
    repeats = 2 if len(pool) > _SMALL_POOL else 16
    return _seconds(searches, 1, rounds * repeats)


def _check(pool: Pool, questions: Floats) -> None:
    """Raises AssertionError where an exact answer is not that of float64 over all candidates."""
    rows_ND = np.concatenate([decode(shard.vectors, np.float64) for shard in pool.shards])
    methods: tuple[Method, Method] = ("exact", "pruned")
    answers = [top_rows(pool, questions, _TOP_K, method=method) for method in methods]
    for number, vectors_MD in enumerate(questions.astype(np.float64)):
        logits_NM = torch.from_numpy(rows_ND @ vectors_MD.T)
        scores_N = (logits_NM.softmax(1) * logits_NM).sum(1)
        best_scores = scores_N.topk(_TOP_K).values.float().numpy()
        for answer in answers:
            np.testing.assert_allclose(answer.scores[number], best_scores, rtol=2e-7, atol=0)
            assert answer.certified[number]


def _agreement(pool: Pool, questions: Floats) -> tuple[int, float]:
    """(questions whose pruned answer is proven to be exact, share of the exact answers that approximate
    search finds). Raises AssertionError where pruned search finds other rows than exact search."""
    exact = top_rows(pool, questions, _TOP_K, method="exact")
    certified = shared = 0
    for places, question_MD in zip(exact.places, questions, strict=True):
        pruned = top_rows(pool, question_MD[None], _TOP_K, method="pruned")
        np.testing.assert_array_equal(places, pruned.places[0])
        certified += bool(pruned.certified[0])
        approximate = top_rows(pool, question_MD[None], _TOP_K, method="approximate")
        shared += len({*places} & {*approximate.places[0]})
    return certified, shared / len(questions) / _TOP_K


def _pool_of(
    folder: Path,
    model: Artifact,
    real_vectors: Callable[[], Floats],
    count: int,
    dtype: Dtype = "bfloat16",
) -> Pool:
    """A pool with an index of neighbours; writes one shard at a time, to save memory."""
    config = embed_pool.Config(model="", candidates=(), pools="", name="benchmark")
    out = draft(str(folder), "pool", config, {"model": model})
    if isinstance(out, Draft):
        rng, entries, names = np.random.default_rng(0), list[FileEntry](), list[str]()
        real_ND = real_vectors()
        for start in range(0, count, _SHARD_ROWS):
            rows = np.arange(start, min(count, start + _SHARD_ROWS))
            vectors_ND, repeated = real_ND[rows % len(real_ND)], rows >= len(real_ND)
            left, right = real_ND[rng.integers(len(real_ND), size=(2, np.count_nonzero(repeated)))]
            lengths = np.linalg.norm(vectors_ND, axis=1, keepdims=True)
            vectors_ND[repeated] += _MIXED * (left - right)
            vectors_ND *= lengths / np.linalg.norm(vectors_ND, axis=1, keepdims=True)
            ids = [f"c{row:07d}" for row in rows.tolist()]
            table = pa.table([ids, ids, ids], ROWS)
            names.append(f"part-{len(names):05d}")
            entries += build.write_shard(out, names[-1], table, encode(vectors_ND, dtype))
        index_entries, statistics = build.index(out, names, real_ND.shape[1], neighbours=True)
        facts = {"dimensions": real_ND.shape[1], "dtype": dtype, "statistics": statistics}
        out.publish([*entries, *index_entries], {"candidates": count}, **facts)
    return Pool.open(str(folder))

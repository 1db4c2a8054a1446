"""A shard in an actor: what is copied, what is embedded, what is set aside, what the gate is told."""

from __future__ import annotations

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipeline.engine.records import to_json
from pipeline.models import inference
from pipeline.models.precision import use_bf16
from pipeline.models.ranker import Ranker, load_ranker
from pipeline.pools import candidates, embedder, gate, plan
from pipeline.pools.build_records import EmbedRecord
from pipeline.pools.candidates import content_hash
from pipeline.pools.embedder import Embedder
from pipeline.pools.plan import PlanInput, TextQuery
from pipeline.pools.shard import ROWS

from .conftest import stage_rows, write_version_before

ORIGINAL = content_hash
TEXTS = [f"{'long ' * (n % 4)}text {n}" for n in range(12)]
KNOWN = {
    "gate_name": "", "batch_tokens": 0, "source": "", "canaries": [], "top_k": 3, "sample": 0,
}  # fmt: skip


class Before:
    """A version before, with vectors that no model makes: place p has p + 1 everywhere."""

    def __init__(self, texts: list[str]) -> None:
        rows = [{"id": f"old {t}", "text": t, "content_hash": content_hash(t)} for t in texts]
        self.rows = tuple(pa.Table.from_pylist(part, schema=ROWS) for part in (rows[:2], rows[2:]))
        self.places: list[int] = []

    def rows_and_vectors_at(self, places):
        assert places.tolist() == sorted(places.tolist())
        self.places += places.tolist()
        vectors = np.repeat((places + 1.0)[:, None], 16, axis=1).astype(np.float32)
        return pa.concat_tables(self.rows).take(places), vectors


@pytest.fixture
def model(tiny_ranker) -> Path:
    return tiny_ranker("poly").local()


@pytest.fixture
def ranker(model) -> Ranker:
    """As an actor's is."""
    found = load_ranker(model)
    if use_bf16(torch.device("cpu")):
        inference.to_bf16(found)
    return found


@pytest.fixture
def tokenised(monkeypatch) -> list[str]:
    """The texts that have gone through the tokenizer for the model, but for the empty one."""
    seen, rows = [], Ranker.candidate_rows

    def tokenise(self, texts, max_tokens=0):
        if not max_tokens:  # as many as the model reads: no look at how long they are
            seen.extend(filter(None, texts))
        return rows(self, texts, max_tokens)

    monkeypatch.setattr(Ranker, "candidate_rows", tokenise)
    return seen


class Shard:
    """Texts as the candidates of one shard, and what an actor makes of them."""

    def __init__(self, folder: Path, texts: list[str], before: Before | None) -> None:
        self.out, parts = stage_rows(folder, [(f"id {t}", t) for t in texts])
        files = write_version_before(folder, before.rows if before else ())
        made = plan.make(self.out, PlanInput(parts, files), 1000, TextQuery())
        (self.slices,) = made.shards.values()
        self.plan = made.name

    def make(self, model: Path, **settings) -> EmbedRecord:
        known = {"plan": self.plan, **KNOWN}
        return Embedder(model, **{**known, **settings})(self.out, "part-00000", self.slices)


@pytest.fixture
def shard(tmp_path, monkeypatch):
    """`shard(texts, before)`; an actor that is told to opens `before`."""

    def run(texts: list[str], before: Before | None = None) -> Shard:
        monkeypatch.setattr(embedder.Pool, "open", lambda uri: before)
        return Shard(tmp_path, texts, before)

    return run


@pytest.fixture
def written(monkeypatch) -> dict[str, np.ndarray]:
    """The vectors that were written, by text."""
    found: dict[str, np.ndarray] = {}

    def write(draft, name, rows, layer):
        found.update(zip(rows["text"].to_pylist(), layer.matrix, strict=True))
        return []

    monkeypatch.setattr(embedder.build, "write_shard", write)
    return found


def test_known_texts_are_copied_from_their_places_and_only_the_others_go_through_the_model(
    shard, model, ranker, tokenised, written
):
    before = Before(["gone", TEXTS[5], TEXTS[2], "also gone", TEXTS[7]])
    record = shard(TEXTS, before).make(model, source="there")
    known = {TEXTS[5]: 2.0, TEXTS[2]: 3.0, TEXTS[7]: 5.0}
    assert before.places == [1, 2, 4]
    assert tokenised == [text for text in TEXTS if text not in known]
    assert record.rows_embedded == 9
    assert record.counts == {"candidates": 12, "shards": 1}
    for text in TEXTS:
        if text in known:
            assert written[text].tolist() == [known[text]] * 16
        else:
            alone = inference.candidate_vectors(ranker, [text])[0].numpy()
            np.testing.assert_allclose(written[text], alone, atol=0.03)


def test_where_the_vectors_would_be_others_nothing_is_copied(shard, model, tokenised, written):
    before = Before(TEXTS)
    assert shard(TEXTS, before).make(model).rows_embedded == 12
    assert before.places == []
    assert tokenised == TEXTS


def test_a_text_whose_hash_is_the_same_by_half_only_is_embedded(
    shard, model, tokenised, written, monkeypatch
):

    def alike(text: str, values: object = ()) -> str:
        return 16 * "7" + ORIGINAL(text)[16:]

    monkeypatch.setattr(candidates, "content_hash", alike)
    monkeypatch.setitem(globals(), "content_hash", alike)
    record = shard(TEXTS[:1], Before(["another"])).make(model, source="there")
    assert record.rows_embedded == 1
    assert tokenised == TEXTS[:1]


def test_a_shard_is_written_and_the_next_is_read_while_another_is_in_the_model(
    shard, model, monkeypatch
):
    """Two threads, as an actor has: the first shard's writing waits for the model to begin the second."""
    work = shard(TEXTS)
    actor = Embedder(model, plan=work.plan, **KNOWN)
    vectors, write = inference.row_vectors, embedder.build.write_shard
    in_model, second_in_model, at_once = threading.Lock(), threading.Event(), []
    calls = itertools.count(1)

    def compute(*arguments):
        at_once.append(in_model.acquire(blocking=False))
        if next(calls) == 2:
            second_in_model.set()
        found = vectors(*arguments)
        in_model.release()
        return found

    def write_late(*arguments):
        assert second_in_model.wait(timeout=60)
        return write(*arguments)

    monkeypatch.setattr(inference, "row_vectors", compute)
    monkeypatch.setattr(embedder.build, "write_shard", write_late)
    with ThreadPoolExecutor(2) as threads:
        names = ("part-00000", "part-00001")
        done = [threads.submit(actor, work.out, name, work.slices) for name in names]
        records = [each.result() for each in done]
    assert at_once == [True, True]  # the model itself takes one at a time
    digests = [[entry["sha256"] for entry in record.files] for record in records]
    assert digests[0] == digests[1]


@pytest.fixture
def poisoned(monkeypatch):
    """`poisoned(empty, infinite)`: texts without tokens, and texts that the model cannot digest."""

    def run(empty: list[str], infinite: list[str]) -> None:
        rows, vectors = Ranker.candidate_rows, inference.row_vectors

        def tokenise(self, texts, *more):
            found = rows(self, texts, *more)
            for text, row in zip(texts, found, strict=True):
                if text in empty or text in infinite:
                    row[1:-1] = [] if text in empty else [-1]
            return found

        def embed(ranker, rows, *more):
            good = [[7 if token == -1 else token for token in row] for row in rows]
            found = vectors(ranker, good, *more)
            found[[-1 in row for row in rows], 3] = torch.nan
            return found

        monkeypatch.setattr(Ranker, "candidate_rows", tokenise)
        monkeypatch.setattr(inference, "row_vectors", embed)

    return run


def test_poisoned_rows_are_set_aside_by_reason_and_the_others_stay(
    shard, model, written, poisoned, tmp_path
):
    poisoned([TEXTS[0], TEXTS[4]], [TEXTS[9]])
    work = shard(TEXTS)
    record = work.make(model)
    assert record.counts == {"candidates": 9, "shards": 1}
    reasons = {"text has no tokens": 2, "vector is not finite": 1}
    assert record.dropped == record.malformed == reasons
    assert list(written) == [t for t in TEXTS if t not in (TEXTS[0], TEXTS[4], TEXTS[9])]
    set_aside = pa.Table.from_pylist(
        [{"id": f"id {t}", "content_hash": content_hash(t)} for t in (TEXTS[9], TEXTS[4], TEXTS[0])]
    )
    assert record.set_aside == candidates.row_set(set_aside)
    lines = Path(work.out.path("rejected", "part-00000.jsonl")).read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == [
        f"id {f'id {text}'!r}: {text!r}" for text in (TEXTS[0], TEXTS[4], TEXTS[9])
    ]


@pytest.mark.parametrize("architecture", ["bi", "poly", "convert"])
def test_a_text_of_any_length_has_tokens(shard, tiny_ranker, architecture):
    """Rows of ConveRT have neither [CLS] nor [SEP]: "a" is two tokens, the mark of a beginning and "a"."""
    texts = [text[:length] for text in ("abcde", "?!?!?", "é €") for length in range(1, 6)]
    record = shard(sorted(set(texts))).make(tiny_ranker(architecture).local())
    assert (record.counts["candidates"], record.dropped) == (13, {})


def test_a_shard_of_nothing_but_poison_is_no_shard(shard, model, poisoned):
    poisoned(TEXTS[:2], TEXTS[2:3])
    work = shard(TEXTS[:3])
    record = work.make(model, canaries=[["hi"]], sample=2)
    assert (record.counts, record.files, record.check) == (
        {"candidates": 0, "shards": 0}, [], None,
    )  # fmt: skip
    assert not Path(work.out.path("vectors")).exists()


def test_the_gate_is_told_of_rows_that_are_not_what_the_model_makes(shard, model, written):
    good = shard(TEXTS).make(model, sample=12).check
    assert good.cosine > 0.999
    assert good.dimensions == 16
    norms = [np.linalg.norm(vector) for vector in written.values()]
    np.testing.assert_allclose(good.norms, [min(norms), np.mean(norms), max(norms)], rtol=1e-5)


def test_a_wrong_copy_is_noticed(shard, model, written):
    before = Before(TEXTS[:3])
    check = shard(TEXTS, before).make(model, source="there", sample=12).check
    assert check.cosine < 0.9


def test_answers_to_canaries_are_the_best_of_the_shard_and_of_its_known_texts(
    shard, model, ranker, written, monkeypatch
):
    monkeypatch.setattr(embedder, "_SCORED_ROWS", 5)
    contexts = [["text 3"], ["long ago", "another turn"]]
    before = Before(TEXTS[6:])
    work = shard(TEXTS, before)
    record = work.make(model, canaries=contexts, top_k=4)
    (shard_answers,) = gate.read_answers(work.out, ["part-00000"], KNOWN["gate_name"])
    assert all(answer[1] not in to_json(record) for answer in shard_answers.best[0])  # one by one
    vectors, mask = inference.context_vectors(ranker, contexts)
    all_vectors = torch.from_numpy(np.stack([written[text] for text in TEXTS]))
    with torch.inference_mode():
        scores = ranker.dual.scores(vectors, mask, all_vectors)
    for given, texts, found in (
        (shard_answers.best, TEXTS, scores),
        (shard_answers.best_known, TEXTS[6:], scores[:, 6:]),
    ):
        for answers, row in zip(given, found, strict=True):
            best = sorted(zip(row.tolist(), texts, strict=True), reverse=True)[:4]
            assert [key for _, key in answers] == [content_hash(text)[:16] for _, text in best]
            np.testing.assert_allclose([s for s, _ in answers], [s for s, _ in best], rtol=0.02)


def test_the_shard_that_was_begun_first_gets_the_model_next():
    lock, order = embedder.FirstBegun(), list[int]()

    def shard(number: int) -> None:
        lock._thread.number = number  # as `begin` in this order
        with lock:
            order.append(number)

    lock.begin()
    with ThreadPoolExecutor(3) as pool, lock:
        for number in (3, 1, 2):
            pool.submit(shard, number)
        while len(lock._waiting) < 3:
            threading.Event().wait(0.001)
    assert order == [1, 2, 3]

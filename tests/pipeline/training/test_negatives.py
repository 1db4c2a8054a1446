"""Hard negatives: the nearest wrong responses of the model as it is, but none that may be right."""

from __future__ import annotations

import pickle
from unittest.mock import patch

import numpy as np
import pytest
import torch

from pipeline.models import inference
from pipeline.training import negatives
from pipeline.training.data import PLACE, DualCollator, Epoch, Rows, example_columns
from pipeline.training.negatives import Miner
from pipeline.training.settings import Mining
from tests.helpers import memory_kib, restart_peak_memory, run_in_processes

# Some responses stand twice.
ROWS = [
    {"context": [f"w{n} w{n + 1}", f"w{n + 2}"], "response": f"w{50 + n % 37} w{n % 5}"}
    for n in range(90)
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setenv("POLYRANK_PROCESSOR", "avx2")
    monkeypatch.setattr(negatives, "_CONTEXTS_AT_ONCE", 16)
    monkeypatch.setattr(negatives, "_LOGITS_AT_ONCE", 16 * 4 * 10)  # ten columns at once


@pytest.fixture(scope="module")
def corpus(tiny):
    return tiny.corpus(ROWS)


def miner(corpus, ranker, same_group_negatives=True, **config):
    rows = Rows.of(corpus, "train", example_columns(same_group_negatives), 0, 1, seed=3)
    return Miner(ranker, rows, Mining(**config), 1, 0, 1, same_group_negatives)


@pytest.mark.parametrize("same_group_negatives", [True, False])
def test_other_replies_to_a_context_are_not_mined(tiny, same_group_negatives):
    """Nor those of the same group where that is asked for. Without a limit everything else is mined."""
    rows = [
        {"context": [f"w{n % 6}", "w9"], "response": f"w{50 + n}", "group_id": f"g{n % 3}"}
        for n in range(24)
    ]
    found = miner(tiny.corpus(rows), tiny.ranker(architecture="bi"), same_group_negatives, top_k=24,
                  max_share=1.0)  # fmt: skip
    with patch.object(negatives, "highest_allowed", lambda limits, right: right + torch.inf):
        found()
    divisor = 6 if same_group_negatives else 3
    for number, row in enumerate(rows):
        wrong = {other["response"] for n, other in enumerate(rows) if (n - number) % divisor}
        mined = found.negatives_of(number)
        assert row["response"] not in mined
        assert set(mined) == wrong and len(mined) == len(wrong)


LAYOUTS = ((90, 7), (20, 20), (13, 4))  # rows of a file, of a row group


@pytest.fixture(scope="module")
def layouts(tiny):
    return {
        layout: tiny.corpus(ROWS, rows_per_file=layout[0], rows_per_group=layout[1])
        for layout in LAYOUTS
    }


@pytest.mark.parametrize(("layout", "responses", "architecture", "limits"), [
    ((90, 7), 9, "bi", {"max_share": 0.9}), ((20, 20), 30, "poly", {"max_share": 0.6}),
    ((13, 4), 90, "bi", {"margin": 0.3, "max_share": 1.0}),
])  # fmt: skip
def test_what_is_found_is_what_a_search_with_everything_in_memory_finds(
    tiny, layouts, layout, responses, architecture, limits
):
    """The nearest below the limit, in numpy, with all scores at once."""
    ranker = tiny.ranker(architecture=architecture)
    found = miner(layouts[layout], ranker, responses=responses, top_k=5, **limits)
    found()
    found()
    drawn = np.random.default_rng([3, 2]).choice(90, responses, replace=False)
    pool = sorted({ROWS[place]["response"] for place in drawn})
    vectors = inference.context_vectors(ranker, [row["context"] for row in ROWS])
    rights_ND = inference.candidate_vectors(ranker, [row["response"] for row in ROWS])
    with torch.no_grad():
        right_N1 = ranker.dual.scores(*vectors, rights_ND[:, None]).numpy()
        scores_NP = ranker.dual.scores(*vectors, inference.candidate_vectors(ranker, pool)).numpy()
    most_N1 = right_N1 - limits.get("margin", 0.0)
    share_N1 = np.where(right_N1 > 0, right_N1 * np.float32(limits["max_share"]), np.inf)
    most_N1 = np.minimum(most_N1, share_N1)
    same_NP = np.array([[text == row["response"] for text in pool] for row in ROWS])
    allowed_NP = (scores_NP <= most_N1) & ~same_NP
    order_NP = np.argsort(np.where(allowed_NP, -scores_NP, np.inf), axis=1)[:, :5]
    expected = [[pool[place] for place in order if allowed[place]]
                for order, allowed in zip(order_NP, allowed_NP, strict=True)]  # fmt: skip
    assert [found.negatives_of(place) for place in range(90)] == expected
    assert any(expected)


def test_texts_are_read_by_row_groups_and_only_when_they_are_needed(tiny, layouts, monkeypatch):
    """Every rank, and the driver, used to hold all of train's texts from the start."""
    reads, drawn = [], []
    read, search = Epoch.read, Miner._search
    monkeypatch.setattr(
        Epoch, "read", lambda epoch, *rows: reads.append(rows) or read(epoch, *rows)
    )
    monkeypatch.setattr(
        Miner, "_search", lambda *args: drawn.extend(reads) or reads.clear() or search(*args)
    )
    found = miner(layouts[13, 4], tiny.ranker(architecture="bi"), responses=4)
    assert not reads
    found()
    assert max(stop - start for start, stop in drawn + reads) == 4
    assert [start for start, _ in reads] == [0, *(stop for _, stop in reads[:-1])]
    assert reads[-1][1] == 90
    assert 0 < len(drawn) <= 4  # row groups, for four responses


def test_a_pool_is_part_of_the_responses_another_each_time_and_a_state_brings_all_back(
    tiny, corpus
):
    """Before the first time there are none."""
    ranker, rounds = tiny.ranker(architecture="bi"), []
    first, again = (miner(corpus, ranker, responses=9, top_k=30, max_share=1.0) for _ in range(2))
    again.load(first.state())
    assert first.negatives_of(0) == again.negatives_of(0) == []
    for number in range(2):
        first()
        if number == 0:
            again.load(first.state())
        else:
            again()
        mined = [first.negatives_of(n) for n in range(90)]
        assert [again.negatives_of(n) for n in range(90)] == mined
        rounds.append({text for texts in mined for text in texts})
        assert 0 < len(rounds[-1]) <= 9
    assert rounds[0] != rounds[1]


def test_batches_take_what_is_mined_and_fill_up(tiny, corpus):
    ranker = tiny.ranker(architecture="bi")
    mined = {70 + n: [f"w{100 + n}", f"w{120 + n}"][: n % 3] for n in range(4)}
    rows = [{**row, PLACE: 70 + n, "candidates": ["w9"]} for n, row in enumerate(ROWS[:4])]
    collator = DualCollator(ranker, 2, mined=mined.__getitem__)
    assert "candidates" not in collator.columns and PLACE in collator.columns
    generator = torch.Generator().manual_seed(0)
    items = collator.prepare(rows, generator)
    for item, row in zip(items, rows, strict=True):
        wrong = [one.text for one in item.candidates[1:]]
        assert len(wrong) == 2 and set(mined[row[PLACE]]) <= set(wrong)


class Constant:
    """A ranker that has no network: what is measured is the memory of mining."""

    device = torch.device("cpu")
    dimensions = 2
    dual = property(lambda self: self)

    def eval(self):
        pass

    def scores(self, vectors_BMD, mask_BM, candidates):
        return torch.arange(candidates.shape[-2]).float().expand(len(vectors_BMD), -1)


def constant_candidates(ranker, texts):
    return torch.zeros(len(texts), 2)


def constant_contexts(ranker, texts):
    return torch.zeros(len(texts), 1, 2), torch.ones(len(texts), 1, dtype=torch.bool)


def measure_memory(folder, number):
    """Writes the KiB that mining the larger corpus needs above the smaller; in a process of its own."""

    def mine(name):
        corpus = pickle.loads((folder / name).read_bytes())
        rows = Rows.of(corpus, "train", example_columns(True), 0, 1, 0)
        found = Miner(Constant(), rows, Mining(responses=50), 1, 0, 1)
        found()
        assert len(found.state()["found"]) == len(rows)

    with (
        patch.object(inference, "candidate_vectors", constant_candidates),
        patch.object(inference, "context_vectors", constant_contexts),
    ):
        mine("small")  # imports and buffers
        restart_peak_memory()
        before = memory_kib("VmRSS")
        mine("large")
        (folder / "grown").write_text(str(memory_kib("VmHWM") - before))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_split(tiny, tmp_path):
    """3,000 rows with 48 MB of texts, in row groups of 4 MB; MiB above what 250 rows need, 13 measured,
    and 31 on a busy machine."""
    text = "a" * 8_000
    for name, count in (("small", 250), ("large", 3_000)):
        rows = [{"context": [f"{n} {text}"], "response": f"{n} {text}"} for n in range(count)]
        corpus = tiny.corpus(rows, rows_per_group=250)
        (tmp_path / name).write_bytes(pickle.dumps(corpus))
    run_in_processes(measure_memory, tmp_path, 1, timeout_s=200)
    assert int((tmp_path / "grown").read_text()) / 1024 < 40

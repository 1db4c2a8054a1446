"""The start from shared words: what an untrained model ranks, and what is refused."""

from __future__ import annotations

import random

import pytest
import torch

from pipeline.config import BadInput
from pipeline.models import inference
from pipeline.models.convert_rt.folder import COUNTS, VECTORS, save_counts, save_vectors
from pipeline.models.convert_rt.start import fit_bag, rarity
from pipeline.models.convert_rt.tokenizer import MARK, save_vocabulary
from pipeline.models.ranker import load_ranker, new_ranker
from pipeline.models.settings import ConvertConfig

COMMON, RARE, TEXTS = 12, 400, 60
WORDS = [f"word{number}x" for number in range(COMMON + RARE)]
SETTINGS = {
    "width": 128, "windows": (3, 5), "attention_width": 16, "intermediate": 64, "reduction_width": 16,
    "hidden": (64,), "encoding_width": 128, "buckets": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A vocabulary of whole words with counts, and the same without."""
    with_counts, without = (tmp_path_factory.mktemp(name) for name in ("counts", "none"))
    for folder in (with_counts, without):
        save_vocabulary([MARK + word for word in WORDS], folder)
    save_counts([500] * COMMON + [3] * RARE, 1_000, with_counts)
    return with_counts, without


def right(ranker):
    """Share of contexts whose response, which has two rare words of theirs, is scored highest.

    Every text has eight common words, so that pairs at random share more words than that.
    """
    rng = random.Random(0)
    contexts, responses = [], []
    for number in range(TEXTS):
        own = WORDS[COMMON + 2 * number : COMMON + 2 * number + 2]
        for texts in (contexts, responses):
            words = own + rng.sample(WORDS[:COMMON], 8) + rng.sample(WORDS[-100:], 2)
            texts.append(" ".join(rng.sample(words, len(words))))
    inference.place(ranker.eval(), torch.device("cpu"), "fp32")
    vectors, _ = inference.context_vectors(ranker, [[text] for text in contexts])
    scores = vectors[:, 0] @ inference.candidate_vectors(ranker, responses).T
    return (scores.argmax(dim=1) == torch.arange(TEXTS)).float().mean().item()


def test_an_untrained_model_ranks_by_shared_rare_words(folders):
    with_counts, without = folders
    shared = ConvertConfig(**SETTINGS, start="shared_words")
    found = {
        "rare words": right(new_ranker(shared, with_counts, seed=0)),
        "any words": right(new_ranker(shared, without, seed=0)),
        "paper": right(new_ranker(ConvertConfig(**SETTINGS), with_counts, seed=0)),
    }
    assert found["rare words"] > 0.75
    assert found["rare words"] > found["any words"] + 0.1
    assert found["any words"] > found["paper"]


def test_a_multi_context_model_and_one_with_codes_start_so_too(folders, tmp_path):
    for more in ({"earlier_turns": 3}, {"context_codes": 2}):
        config = ConvertConfig(**SETTINGS, start="shared_words", **more)
        ranker = new_ranker(config, folders[0], seed=0)
        assert all(value.isfinite().all() for value in ranker.parameters())
        ranker.save(tmp_path / next(iter(more)))
        assert load_ranker(tmp_path / next(iter(more))).config == config
        assert right(ranker) > 0.6


@pytest.mark.parametrize("length", [24, 200])  # 200 numbers are more than the width of 128 holds
def test_a_model_of_taught_words_encodes_as_their_bag(folders, tmp_path, length):
    """Also texts with words that no vocabulary has."""
    save_vocabulary([MARK + word for word in WORDS], tmp_path)
    generator = torch.Generator().manual_seed(1)
    directions_VE = torch.randn(len(WORDS), min(length, 24), generator=generator)
    directions_VE = directions_VE @ torch.randn(min(length, 24), length, generator=generator)
    weight_V = 1 + 3 * torch.rand(len(WORDS), generator=generator)
    vectors_VE = weight_V[:, None] * torch.nn.functional.normalize(directions_VE, dim=1)
    save_vectors(vectors_VE, tmp_path)
    config = ConvertConfig(**{**SETTINGS, "encoding_width": length}, start="taught_words")
    ranker = new_ranker(config, tmp_path, seed=0)
    inference.place(ranker.eval(), torch.device("cpu"), "fp32")
    rng = random.Random(0)
    rows = [rng.sample(range(len(WORDS)), 6) for _ in range(TEXTS)]
    texts = [" ".join(WORDS[number] for number in row) for row in rows]
    sums_BE = torch.stack([vectors_VE[row].sum(dim=0) for row in rows])
    found_BE = inference.candidate_vectors(ranker, texts)
    assert torch.nn.functional.cosine_similarity(found_BE, sums_BE).mean() > 0.85
    scores = found_BE @ torch.nn.functional.normalize(sums_BE, dim=1).T
    assert (scores.argmax(dim=1) == torch.arange(TEXTS)).float().mean() > 0.95
    assert inference.candidate_vectors(ranker, ["ñ", ""]).isfinite().all()
    with_others = inference.candidate_vectors(ranker, [f"{text} ñ 😀" for text in texts])
    assert torch.nn.functional.cosine_similarity(with_others, found_BE).mean() > 0.85


@pytest.mark.parametrize("more", [{}, {"earlier_turns": 3}, {"context_codes": 2}])
def test_parts_that_a_taught_model_lacks_start_near_nothing(folders, tmp_path, more):
    """It is trained on: the folder of a model has no vectors of subwords."""
    save_vocabulary([MARK + word for word in WORDS], tmp_path)
    generator = torch.Generator().manual_seed(1)
    vectors_VE = torch.randn(len(WORDS), 128, generator=generator)
    vectors_VE[:COMMON] *= 0.2
    save_vectors(vectors_VE, tmp_path)
    config = ConvertConfig(**SETTINGS, start="taught_words")
    first = new_ranker(config, tmp_path, seed=0)
    first.save(tmp_path / "model")
    longer = ConvertConfig(**SETTINGS, start="taught_words", **more)
    again = new_ranker(longer, tmp_path / "model", seed=1)
    assert right(again) > right(first) - 0.1 > 0.6


def test_taught_words_without_vectors_or_with_others_are_refused(folders, tmp_path):
    config = ConvertConfig(**SETTINGS, start="taught_words")
    with pytest.raises(BadInput, match=r"ranker.start: 'taught_words' is not .*tokenizer.vectors"):
        new_ranker(config, folders[0], seed=0)
    save_vocabulary([MARK + word for word in WORDS], tmp_path)
    for shape in ((len(WORDS), 64), (3, 128)):
        save_vectors(torch.ones(shape), tmp_path)
        with pytest.raises(BadInput, match=rf"{VECTORS}: vectors has \[{shape[0]}, {shape[1]}\]"):
            new_ranker(config, tmp_path, seed=0)


def test_a_bag_finds_the_words_directions_and_how_much_each_counts():
    """Texts of three of 20 words and of two that count for nothing; the teacher's is a sum of random ones."""
    generator = torch.Generator().manual_seed(0)
    rows = [[*torch.randperm(20, generator=generator)[:3].tolist(), 20, 21] for _ in range(20_000)]
    true_VE = torch.randn(20, 16, generator=generator)
    teacher_NE = torch.stack([true_VE[row[:3]].sum(dim=0) for row in rows])
    rows[5] = []
    found_VE = fit_bag(rows, teacher_NE.half(), torch.zeros(23))
    assert torch.equal(found_VE[22], torch.zeros(16))  # it is in no text
    cosines = torch.nn.functional.cosine_similarity(found_VE[:20], true_VE)
    assert cosines.min() > 0.95
    lengths = found_VE.norm(dim=1)
    assert lengths[20:22].mean() < 0.5 * lengths[:20].mean()


def test_a_bag_is_the_same_every_time_with_several_threads(monkeypatch):
    """Long texts: threads share their gradients. Where threads add up in any order, 5 steps differ."""
    monkeypatch.setattr("pipeline.models.convert_rt.start._LEAST_STEPS", 5)
    rng = random.Random(0)
    rows = [rng.choices(range(50), k=60) for _ in range(600)]
    teacher_NE = torch.randn(len(rows), 8, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first, again = (fit_bag(rows, teacher_NE, torch.zeros(50)) for _ in range(2))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(first, again)


def test_rarer_subwords_have_more_weight_and_all_have_one():
    found = rarity(torch.tensor([0, 1, 10, 1_000, 5_000]), 1_000)
    assert found.isfinite().all()
    assert found.tolist() == sorted(found.tolist(), reverse=True)
    assert found[0] == found[1] and found[3] == found[4]
    torch.testing.assert_close(found[2].exp(), torch.tensor(100.0).log() ** 1.5)


@pytest.mark.parametrize("counts", ["{", '{"texts": 5}', '{"texts": 5, "holding": [1, 2]}'])
def test_counts_of_another_vocabulary_are_refused(folders, tmp_path, counts):
    save_vocabulary(WORDS, tmp_path)
    (tmp_path / COUNTS).write_text(counts)
    with pytest.raises(BadInput, match=COUNTS) as caught:
        new_ranker(ConvertConfig(**SETTINGS, start="shared_words"), tmp_path, seed=0)
    assert "\n" not in str(caught.value)

"""The start from shared words: what an untrained model ranks, and what is refused."""

from __future__ import annotations

import random

import pytest
import torch

from pipeline.config import BadInput
from pipeline.models import inference
from pipeline.models.convert.files import COUNTS, save_counts
from pipeline.models.convert.start import rarity
from pipeline.models.convert.tokenizer import MARK, save_vocabulary
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

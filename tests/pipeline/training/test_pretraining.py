"""Pre-training pairs: true and random ones mixed, labels that are true, tokens hidden."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from pipeline.config import BadInput
from pipeline.models.sources import External
from pipeline.models.tokens import Tokenizer
from pipeline.models.transformer import Encoder, Shape
from pipeline.training.pretraining import PairMaker, PretrainConfig, Pretraining
from pipeline.training.settings import LoopConfig


def recipe(tiny, corpus, shape=None, **config):
    settings = {"batch_tokens": 120, "max_context_tokens": 10, "max_response_tokens": 8, **config}
    return Pretraining(corpus, External(str(tiny.encoder_folder()), ""), Shape(**(shape or tiny.shape)),
                       PretrainConfig(**settings), LoopConfig())  # fmt: skip


def pairs_of(tiny, count=190):
    """Row n: the context is wn and so is its response. A pair shows whether it is a true one."""
    return tiny.corpus([{"context": ["w195", f"w{n}"], "response": f"w{n}"} for n in range(count)])


def batches(task, count):
    walk = task.batches.start()
    try:
        return [batch for batch, _ in islice(walk, count)]
    finally:
        walk.close()


def true_ids(batch):
    """The tokens before any was hidden."""
    ids = batch.pairs.ids_BT
    return ids.flatten().index_copy(0, batch.predicted_N, batch.labels_N).view(ids.shape)


def test_every_batch_mixes_true_and_random_pairs(tiny):
    """A regression: pairs of one length kept their order, all true ones first.

    So whole batches were of one label.
    """
    task = recipe(tiny, pairs_of(tiny)).build(0, 1)
    found = batches(task, 30)
    assert {len(batch.is_next_B) for batch in found[:5]} == {20}
    labels = [batch.is_next_B.tolist() for batch in found if len(batch.is_next_B) == 20]
    shares = [sum(row) / 20 for row in labels]
    assert all(0.1 < share < 0.9 for share in shares)
    assert sum(shares) / len(shares) == pytest.approx(0.5, abs=0.1)


def test_labels_say_whether_the_second_text_is_the_contexts_own(tiny):
    for batch in batches(recipe(tiny, pairs_of(tiny)).build(0, 1), 10):
        ids = true_ids(batch)  # [CLS] w195 wn [SEP] wk [SEP]
        assert (ids[:, 1] == 200).all()
        assert torch.equal(ids[:, 2] == ids[:, 4], batch.is_next_B.bool())


def test_a_random_response_that_is_the_same_text_counts_as_true(tiny):
    corpus = tiny.corpus([{"context": [f"w{number}"], "response": "w1"} for number in range(60)])
    for batch in batches(recipe(tiny, corpus).build(0, 1), 5):
        assert batch.is_next_B.all()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_random_pairs_are_as_frequent_as_asked_and_use_each_response_once(tiny, share):
    maker = PairMaker(tiny.tokenizer(), PretrainConfig(random_share=share))
    rows = [{"context": ["w0"], "response": f"w{n % 200} w{n // 200}"} for n in range(2000)]
    pairs = maker.prepare(rows, torch.Generator().manual_seed(0))
    random = [pair for pair in pairs if not pair.is_next]
    # Four standard deviations of a share among 2,000.
    assert len(random) / 2000 == pytest.approx(share, abs=0.045)
    assert len({tuple(pair.response) for pair in pairs}) == 2000


def test_share_of_hidden_tokens_is_as_asked(tiny):
    found = batches(recipe(tiny, pairs_of(tiny), hidden_share=0.4).build(0, 1), 60)
    hidden = sum(len(batch.predicted_N) for batch in found)
    ordinary = sum(3 * len(batch.is_next_B) for batch in found)
    assert hidden / ordinary == pytest.approx(0.4, abs=0.05)


def test_special_tokens_stay_in_place(tiny):
    for batch in batches(recipe(tiny, pairs_of(tiny), hidden_share=0.9).build(0, 1), 5):
        assert (batch.pairs.ids_BT[:, [0, 3, 5]] == torch.tensor([2, 3, 3])).all()
        assert (batch.pairs.segments_BT == torch.tensor([0, 0, 0, 0, 1, 1])).all()


def test_pairs_keep_the_newest_and_the_first_tokens_within_the_batch(tiny):
    rows = [
        {"context": [" ".join(["w6"] * (n % 30))], "response": " ".join(["w7"] * (n % 20))}
        for n in range(100)
    ]
    maker = PairMaker(tiny.tokenizer(), PretrainConfig(max_context_tokens=5, max_response_tokens=4))
    (pair,) = maker.prepare([{"context": ["w1 w2", "w3 w4"], "response": "w5 w6 w7"}],
                            torch.Generator())  # fmt: skip
    assert (pair.context, pair.response) == ([2, 7, 8, 9, 3], [2, 10, 11, 3])
    for batch in batches(recipe(tiny, tiny.corpus(rows)).build(0, 1), 30):
        assert batch.pairs.ids_BT.numel() <= 120
        assert batch.pairs.ids_BT.shape[1] <= 17


def test_workers_share_the_tokens_and_start_from_the_same_weights(tiny):
    corpus = pairs_of(tiny)
    tasks = [recipe(tiny, corpus).build(rank, 2) for rank in (0, 1)]
    states = [task.module.state_dict() for task in tasks]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    contexts = []
    for task in tasks:
        found = batches(task, 10)
        assert all(batch.pairs.ids_BT.numel() <= 60 for batch in found)
        contexts.append({int(ids[2]) for batch in found[:9] for ids in true_ids(batch)})
    assert contexts[0].isdisjoint(contexts[1])


def test_steps_are_as_configured(tiny):
    made = recipe(tiny, pairs_of(tiny), steps=7)
    assert made.build(0, 1).steps == 7


@pytest.mark.parametrize("architecture", ["bert", "modernbert"])
def test_what_a_task_saves_is_its_encoder_and_tokenizer(tiny, tmp_path, architecture):
    shape = {**tiny.shape, "architecture": architecture}
    task = recipe(tiny, pairs_of(tiny), shape).build(0, 1)
    task.save(tmp_path)
    tokenizer, encoder = Tokenizer.load(tmp_path), Encoder.load(tmp_path).eval()
    tokens = tokenizer.batch(tokenizer.candidates(["w1 w2"], 10))
    with torch.no_grad():
        own = task.module.model.encoder.eval()(tokens)
        torch.testing.assert_close(encoder(tokens), own, rtol=0, atol=0)


def test_pairs_longer_than_the_encoders_positions_are_refused(tiny):
    corpus = pairs_of(tiny)
    settings = {"max_context_tokens": 50, "max_response_tokens": 15}
    recipe(tiny, corpus, **settings).build(0, 1)  # 64: the second text's own [CLS] is left out
    with pytest.raises(BadInput, match=r"pretrain\.max_context_tokens: 51 is not allowed.* 64"):
        recipe(tiny, corpus, **{**settings, "max_context_tokens": 51}).build(0, 1)


@pytest.mark.parametrize(("name", "value"), [
    ("steps", 0), ("batch_tokens", 251), ("max_context_tokens", 2), ("max_response_tokens", 2),
    ("hidden_share", 0), ("hidden_share", 1), ("random_share", 0), ("random_share", 1.5),
])  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(BadInput, match=rf"pretrain\.{name}: {value} is not allowed; allowed: "):
        PretrainConfig(**{name: value})

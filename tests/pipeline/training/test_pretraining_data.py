"""The global batch of a step: the same for every number of workers, wherever the run was resumed."""

from __future__ import annotations

import itertools
import json
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.artifact import Artifact
from pipeline.config import BadInput
from pipeline.training.pretraining_data import PretrainingBatches
from pipeline.training.settings import PretrainConfig
from pipeline.training.tokenized_corpus import TokenizedCorpus

PAD, CLS, SEP, MASK = 0, 2, 3, 4
FIRST = 10  # the token of row 0
SIZE = 5000
FACTS = {"size": SIZE, "pad": PAD, "cls": CLS, "sep": SEP, "mask": MASK, "special": [0, 1, 2, 3, 4]}


@pytest.fixture(scope="module")
def corpus_of(tmp_path_factory):
    """`corpus_of(70)`: row n is n's token 1 to 7 times, its response the same token 1 to 3 times.

    In files of 20 rows and row groups of 6. `first`: the number of row 0.
    """
    made = {}

    def make(count, first=0, valid=0, kept=510, tokenizer="t", same_response=False):
        key = (count, first, valid, kept, tokenizer, same_response)
        if key in made:
            return made[key]
        folder, files = tmp_path_factory.mktemp("tokens"), []
        numbers = np.arange(first, first + count + valid)
        for split, some in (("train", numbers[:count]), ("valid", numbers[count:])):
            (folder / split).mkdir()
            for start in range(0, len(some), 20):
                rows = [
                    {"context": [FIRST + n] * (1 + 5 * n % 7),
                     "response": [7] if same_response else [FIRST + n] * (1 + n % 3)}
                    for n in some[start : start + 20].tolist()
                ]  # fmt: skip
                kind = pa.list_(pa.uint16())
                schema = pa.schema([("context", kind), ("response", kind)])
                path = f"{split}/{start:05}.parquet"
                table = pa.Table.from_pylist(rows, schema=schema)
                pq.write_table(table, folder / path, row_group_size=6)
                files.append({"path": path, "rows": len(rows)})
        counts = np.bincount(FIRST + numbers[:count], minlength=SIZE)
        np.save(folder / "token_counts.npy", counts)
        limits = {"max_context_tokens": kept, "max_response_tokens": kept}
        lengths = {"tokens.train.context": sum(1 + 5 * n % 7 for n in numbers[:count].tolist()),
                   "tokens.train.response": sum(1 if same_response else 1 + n % 3
                                                for n in numbers[:count].tolist())}  # fmt: skip
        manifest = {"kind": "tokens", "fingerprint": folder.name, "files": files, "vocabulary": FACTS,
                    "counts": lengths, "tokenizer_version": tokenizer,
                    "config": {"tokenize": limits}}  # fmt: skip
        made[key] = TokenizedCorpus(Artifact(str(folder), manifest))
        return made[key]

    return make


def config_of(**more):
    values = {"batch_tokens": 160, "micro_batch_tokens": 40, "max_context_tokens": 9,
              "max_response_tokens": 5, "window_rows": 8, "masked_share": 0.3}  # fmt: skip
    return PretrainConfig(**{**values, **more})


def batches_of(corpora, rank=0, world=1, seed=0, weights=None, **config):
    corpora = corpora if isinstance(corpora, list) else [corpora]
    weights = weights or [1.0] * len(corpora)
    return PretrainingBatches(corpora, weights, config_of(**config), rank, world, seed)


def take(batches, steps, cursors=()):
    """[(micro-batches, cursor after them)]"""
    walk = batches.start(cursors)
    try:
        return [(batch.parts, cursor) for batch, cursor in itertools.islice(walk, steps)]
    finally:
        walk.close()


def plain(batch):
    """All that a model sees, to compare."""
    fields = [
        *batch.tokens, batch.predicted_N, batch.labels_N, batch.is_next_B, batch.answer_keys_BS,
    ]  # fmt: skip
    return str([field.tolist() if torch.is_tensor(field) else field for field in fields])


def global_batches(corpora, world, steps, cursors=(), **more):
    """Per step the micro-batches of all workers; and per step all workers' cursors."""
    workers = [
        take(batches_of(corpora, rank, world, **more), steps, cursors) for rank in range(world)
    ]
    together = [
        sorted(plain(batch) for worker in workers for batch in worker[step][0])
        for step in range(steps)
    ]
    saved = [
        json.loads(json.dumps([worker[step][1] for worker in workers])) for step in range(steps)
    ]
    return together, saved


def true_ids(batch):
    """The tokens without masks."""
    ids_BT = batch.tokens.ids_BT.clone()
    if batch.predicted_N is not None:
        ids_BT.view(-1)[batch.predicted_N] = batch.labels_N
    return ids_BT


def numbers(batch):
    """Per pair: (the number of its context, that of its response)."""
    found = []
    for row, length in zip(true_ids(batch).tolist(), batch.tokens.lengths, strict=True):
        assert row[0] == CLS and row[length - 1] == SEP
        assert row[length:] == [PAD] * (len(row) - length)
        middle = row.index(SEP)
        (context,), (response,) = set(row[1:middle]), set(row[middle + 1 : length - 1])
        found.append((context - FIRST, response - FIRST))
    return found


SINGLE_TEXTS = {"objective": "contrastive_mlm", "batch_tokens": 160, "micro_batch_tokens": 40}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"batch_tokens": 190}, {"objective": "alternate"}, SINGLE_TEXTS]
)
def test_the_global_batches_are_the_same_for_every_number_of_workers(corpus_of, settings):
    """Over more than one epoch, of 4 and of 5 lanes; another seed has others."""
    corpora = [corpus_of(40), corpus_of(20, first=1000)]
    one, saved = global_batches(corpora, 1, 20, **settings)
    lanes = config_of(**settings).lanes
    assert {len(step) for step in one} == {lanes}
    assert len({str(step) for step in one}) == 20
    assert all(at["corpora"][0][0] >= 1 for at in saved[-1][0].values())
    for world in (3, lanes):
        assert global_batches(corpora, world, 20, **settings)[0] == one
    other, _ = global_batches(corpora, 1, 3, seed=1, **settings)
    assert not {str(step) for step in one} & {str(step) for step in other}


@pytest.mark.slow
@settings(max_examples=5)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 15), st.integers(0, 3))
def test_a_run_goes_on_with_the_same_batches_on_another_number_of_workers(
    corpus_of, before, after, step, seed
):
    corpora = [corpus_of(70), corpus_of(40, first=1000)]
    whole, _ = global_batches(corpora, 1, step + 3, seed=seed, rare_token_alpha=0.5)
    first, saved = global_batches(corpora, before, step, seed=seed, rare_token_alpha=0.5)
    rest, _ = global_batches(corpora, after, 3, saved[-1], seed=seed, rare_token_alpha=0.5)
    assert first + rest == whole


@pytest.mark.parametrize("lanes", [1, 4])
def test_an_epoch_reads_every_row_once_over_the_lanes(corpus_of, lanes):
    """70 rows on 4 lanes: up to lanes - 1 are left out."""
    config = {"batch_tokens": 40 * lanes}
    read = {lane: [[], []] for lane in range(lanes)}
    epochs = [0] * lanes
    walk = batches_of(corpus_of(70), **config).start()
    while min(epochs) < 2:
        step_batch, cursor = next(walk)
        for lane, batch in enumerate(step_batch.parts):
            if epochs[lane] < 2:
                read[lane][epochs[lane]] += [context for context, _ in numbers(batch)]
            epochs[lane] = cursor[str(lane)]["corpora"][0][0]
    walk.close()
    orders = []
    for epoch in (0, 1):
        rows = [number for lane in range(lanes) for number in read[lane][epoch]]
        assert len(rows) == len(set(rows)) == 70 // lanes * lanes
        orders.append(rows)
    assert orders[0] != orders[1]


def test_micro_batches_stay_within_their_tokens_and_are_consistent(corpus_of):
    for batches, _ in take(batches_of(corpus_of(70), batch_tokens=150), 15):
        for batch in batches:
            ids_BT, mask_BT, lengths, segments_BT = batch.tokens
            assert len(lengths) == 1 or ids_BT.numel() <= 37
            assert mask_BT.sum(1).tolist() == list(lengths)
            assert max(lengths) == ids_BT.shape[1]
            assert batch.token_count == sum(lengths)
            assert batch.predicted_count == len(batch.predicted_N) == len(batch.labels_N)
            assert batch.pair_count == len(lengths) == len(batch.is_next_B)
            for row, segments, length in zip(true_ids(batch), segments_BT, lengths, strict=True):
                second = row.tolist().index(SEP) + 1
                wanted = [0] * second + [1] * (length - second)
                assert segments.tolist() == wanted + [0] * (len(row) - length)
            whole_numbers = (ids_BT, segments_BT, batch.predicted_N, batch.labels_N)
            assert {field.dtype for field in whole_numbers} == {torch.int64}
            assert mask_BT.dtype == batch.is_next_B.dtype == torch.bool
            assert plain(batch.to(torch.device("cpu"))) == plain(batch)


def test_texts_are_truncated_to_the_lengths_of_the_settings(corpus_of):
    settings = {"max_context_tokens": 5, "max_response_tokens": 4, "objective": "mlm"}
    for batches, _ in take(batches_of(corpus_of(70), **settings), 10):
        rows = zip(true_ids(batches[0]).tolist(), batches[0].tokens.lengths, strict=True)
        for ids, length in rows:
            number = ids[1] - FIRST
            context, response = min(3, 1 + 5 * number % 7), min(2, 1 + number % 3)
            assert ids[:length] == [CLS, *ids[1:2] * context, SEP, *ids[1:2] * response, SEP]


@pytest.mark.parametrize("window_rows", [8, 10_000])
def test_random_responses_are_never_the_true_ones_nor_of_the_window(corpus_of, window_rows):
    """One lane; a window of 10,000 rows is one of half of them, 35."""
    windows, at, labels = {}, [0, 0, 0], []
    settings = {"batch_tokens": 40, "window_rows": window_rows}
    for (batch,), cursor in take(batches_of(corpus_of(70), **settings), 60):
        pairs = numbers(batch)
        assert [context == response for context, response in pairs] == batch.is_next_B.tolist()
        windows.setdefault(tuple(at[:2]), []).extend(pairs)
        labels += batch.is_next_B.tolist()
        at = cursor["0"]["corpora"][0]
    assert np.mean(labels) == pytest.approx(0.5, abs=0.12)
    everywhere = set()
    for pairs in windows.values():
        contexts = {context for context, _ in pairs}
        random = {response for context, response in pairs if context != response}
        everywhere |= random
        assert not random & contexts
    assert len(everywhere) > 30


def test_an_epoch_has_as_many_steps_as_its_tokens_or_its_pairs_of_single_texts_fill(corpus_of):
    one, other = corpora = corpus_of(70), corpus_of(20, first=70)
    batches = batches_of([*corpora], rank=1, world=2)
    assert batches.steps_per_epoch == (one.train_tokens + other.train_tokens) / 160
    assert batches_of([*corpora], **SINGLE_TEXTS).steps_per_epoch == 90 / (4 * 2)


def test_an_alternating_run_masks_in_even_steps_and_asks_for_the_next_in_odd_ones(corpus_of):
    for step, (batches, _) in enumerate(take(batches_of(corpus_of(70), objective="alternate"), 8)):
        for batch in batches:
            assert (batch.predicted_N is None) == (batch.labels_N is None) == (step % 2 == 1)
            assert (batch.is_next_B is None) == (step % 2 == 0)
            assert (batch.pair_count, batch.predicted_count)[step % 2] == 0
            assert step % 2 == 0 or MASK not in batch.tokens.ids_BT


def numbers_of_single_texts(batch):
    """Per pair: (the number of its context, that of its response), each a row of its own."""
    found = []
    for row, length in zip(true_ids(batch).tolist(), batch.tokens.lengths, strict=True):
        assert row[0] == CLS and row[length - 1] == SEP
        assert row[length:] == [PAD] * (len(row) - length)
        (number,) = set(row[1 : length - 1])
        found.append(number - FIRST)
    half = len(found) // 2
    return list(zip(found[:half], found[half:], strict=True))


def test_a_contrastive_batch_has_contexts_and_then_their_own_responses(corpus_of):
    seen = set()
    for batches, _ in take(batches_of(corpus_of(70), **SINGLE_TEXTS), 20):
        for batch in batches:
            pairs = numbers_of_single_texts(batch)
            assert all(context == response for context, response in pairs)
            assert batch.tokens.ids_BT.numel() <= 40
            assert batch.tokens.mask_BT.sum(1).tolist() == list(batch.tokens.lengths)
            assert batch.tokens.segments_BT is None and batch.is_next_B is None
            assert batch.pair_count == len(batch.answer_keys_BS) == len(pairs)
            assert batch.answer_keys_BS.dtype == torch.int64
            assert len(batch.answer_keys_BS.unique(dim=0)) == len(pairs)
            assert plain(batch.to(torch.device("cpu"))) == plain(batch)
            seen.update(pairs)
    assert len(seen) == 70


def test_contrastive_micro_batches_have_as_many_pairs_whatever_their_lengths(corpus_of):
    """Two rows of at most 9 tokens a pair: 160 tokens hold 8; a window of 20 is cut into three. Without masks
    in the objective there are none."""
    settings = {
        **SINGLE_TEXTS,
        "objective": "contrastive",
        "micro_batch_tokens": 160,
        "window_rows": 20,
    }
    steps = [batches[0] for batches, _ in take(batches_of(corpus_of(60), **settings), 9)]
    windows = [sorted(batch.pair_count for batch in steps[at : at + 3]) for at in (0, 3, 6)]
    assert windows == [[6, 7, 7]] * 3
    assert all(batch.predicted_N is None and MASK not in batch.tokens.ids_BT for batch in steps)
    lengths = [batch.tokens.lengths[: batch.pair_count] for batch in steps]
    assert np.mean([max(row) - min(row) for row in lengths]) > 3


def test_equal_texts_have_equal_keys(corpus_of):
    """Of contexts, and of responses: all responses are equal here, and no two contexts."""
    for batches, _ in take(batches_of(corpus_of(70, same_response=True), **SINGLE_TEXTS), 5):
        for batch in batches:
            of_contexts, of_responses = batch.answer_keys_BS.T
            assert len(of_contexts.unique()) == len(of_contexts)
            assert len(of_responses.unique()) == 1


def test_a_contrastive_batch_masks_both_texts_each_for_itself(corpus_of):
    share = {0: [], 1: []}
    same = 0
    for batches, _ in take(batches_of(corpus_of(70), masked_share=0.5, **SINGLE_TEXTS), 20):
        for batch in batches:
            width, half = batch.tokens.ids_BT.shape[1], batch.pair_count
            is_predicted = torch.zeros(batch.tokens.ids_BT.numel(), dtype=torch.bool)
            is_predicted[batch.predicted_N] = True
            rows = is_predicted.view(-1, width)
            assert not rows[:, 0].any() and not rows[~batch.tokens.mask_BT].any()
            for number, length in enumerate(batch.tokens.lengths):
                share[number >= half] += rows[number, 1 : length - 1].tolist()
            same += (rows[:half, 1:3] == rows[half:, 1:3]).all(1).sum().item() / half
    for predicted in share.values():
        assert np.mean(predicted) == pytest.approx(0.5, abs=0.07)
    assert same < 0.5 * 80  # about 21; 65 if a response had its context's key


def masks_of(corpus, steps, **settings):
    """Example → epoch → the places that are predicted in it; all pairs are true."""
    found = {}
    batches = batches_of(corpus, objective="mlm", masked_share=0.5, **settings)
    epochs = [0] * len(batches.lanes)
    for step, cursor in take(batches, steps):
        for lane, batch in enumerate(step):
            assert batch.is_next_B is None
            width = batch.tokens.ids_BT.shape[1]
            places = batch.predicted_N.tolist()
            for row, (context, response) in enumerate(numbers(batch)):
                assert context == response
                own = tuple(place % width for place in places if place // width == row)
                found.setdefault(context, {})[epochs[lane]] = own
            epochs[lane] = cursor[str(lane)]["corpora"][0][0]
    return found


def test_an_example_is_masked_alike_in_other_lanes_windows_and_batches_but_not_epochs(corpus_of):
    """Its mask follows from the seed, the epoch and its place in the order of the epoch."""
    first = masks_of(corpus_of(70), 40)
    other = masks_of(corpus_of(70), 60, batch_tokens=100, micro_batch_tokens=50, window_rows=20)
    both = [(first[number][epoch], other[number][epoch]) for number in range(70) for epoch in (0, 1)
            if epoch in first.get(number, {}) and epoch in other.get(number, {})]  # fmt: skip
    assert len(both) > 120
    assert all(one == same for one, same in both)
    epochs = [(masks[0], masks[1]) for masks in first.values() if {0, 1} <= set(masks)]
    assert np.mean([one != other for one, other in epochs]) > 0.6


@pytest.mark.slow
def test_corpora_are_mixed_by_weight_each_with_a_position_of_its_own(corpus_of):
    corpora = [corpus_of(70), corpus_of(40, first=1000)]
    found, positions = [], None
    for batches, cursor in take(batches_of(corpora, weights=[3.0, 1.0]), 100):
        for lane, batch in enumerate(batches):
            (corpus,) = {context >= 1000 for context, _ in numbers(batch)}
            found.append(corpus)
            after = cursor[str(lane)]["corpora"]
            if positions:
                before = positions[str(lane)]["corpora"]
                assert after[corpus] > before[corpus] and after[1 - corpus] == before[1 - corpus]
        positions = cursor
    assert np.mean(found) == pytest.approx(0.25, abs=0.087)  # four standard deviations of 400
    # Not the same for all lanes, nor the same again and again.
    steps = np.array(found).reshape(100, 4)
    assert 10 < sum(len(set(step)) > 1 for step in steps.tolist()) < 100


def test_what_does_not_fit_is_refused_in_one_line(corpus_of):
    corpus = corpus_of(70)
    with pytest.raises(BadInput, match=r"resources.workers: 5 is not allowed; allowed: at most 4"):
        batches_of(corpus, 0, 5)
    with pytest.raises(BadInput, match="too few examples in train/ for 4 micro-batches"):
        batches_of(corpus_of(3))
    with pytest.raises(BadInput, match=r"pretrain.max_context_tokens: 9 .* at most 8"):
        batches_of(corpus_of(70, kept=6))
    with pytest.raises(BadInput, match="tokenized with another tokenizer"):
        batches_of([corpus, corpus_of(40, tokenizer="u")])


def test_cursors_of_another_run_are_refused(corpus_of):
    corpus = corpus_of(70)
    _, saved = global_batches(corpus, 2, 3)
    with pytest.raises(BadInput, match="has 4 micro-batches in a step, this run 5"):
        batches_of(corpus, batch_tokens=200).start(saved[-1])
    with pytest.raises(BadInput, match="has 2 micro-batches in a step, this run 4"):
        batches_of(corpus).start(saved[-1][:1])


def test_the_threads_end_with_the_iterator(corpus_of):
    before = set(threading.enumerate())
    walk = batches_of(corpus_of(70)).start()
    next(walk)
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    walk.close()
    for thread in started:
        thread.join(timeout=30)
        assert not thread.is_alive()


def valid_batches(corpora, seed=0, **config):
    return batches_of(corpora, seed=seed, **config).validation()


def test_validation_asks_the_same_of_other_rows(corpus_of):
    corpus = corpus_of(70, valid=90)
    first, second = valid_batches(corpus), valid_batches(corpus)
    assert [plain(batch) for batch in first] == [plain(batch) for batch in second]
    pairs = [pair for batch in first for pair in numbers(batch)]
    assert sorted(context for context, _ in pairs) == list(range(70, 160))
    assert {response for _, response in pairs} <= set(range(70, 160))
    for batch in first:
        assert [a == b for a, b in numbers(batch)] == batch.is_next_B.tolist()
        assert batch.tokens.ids_BT.numel() <= 40 and batch.predicted_N is not None
    alone = valid_batches(corpus, **SINGLE_TEXTS)
    pairs = [pair for batch in alone for pair in numbers_of_single_texts(batch)]
    assert sorted(pairs) == [(number, number) for number in range(70, 160)]


def test_validation_draws_its_examples_from_everywhere(corpus_of):
    """Of 90 rows in 15 row groups, 30: neighbours would lie in five of the groups."""
    batches = valid_batches(corpus_of(70, valid=90), valid_examples=30)
    drawn = [context for batch in batches for context, _ in numbers(batch)]
    assert len(drawn) == len(set(drawn)) == 30
    assert len({(number - 70) // 6 for number in drawn}) > 10


def test_validation_shares_its_examples_between_corpora_that_hold_some_out(corpus_of):
    corpora = [corpus_of(70, valid=90), corpus_of(40, first=1000), corpus_of(40, 2000, valid=50)]
    batches = valid_batches(corpora, valid_examples=40)
    drawn = [context for batch in batches for context, _ in numbers(batch)]
    assert (sum(n < 1000 for n in drawn), sum(n >= 2000 for n in drawn), len(drawn)) == (20, 20, 40)
    assert valid_batches(corpora[1]) == []


def test_validation_of_an_alternating_run_asks_each_pair_with_and_without_masks(corpus_of):
    batches = valid_batches(corpus_of(70, valid=90), objective="alternate")
    masked = [numbers(batch) for batch in batches if batch.is_next_B is None]
    asked = [numbers(batch) for batch in batches if batch.predicted_N is None]
    assert masked == asked and len(masked) * 2 == len(batches)
    alone = valid_batches(corpus_of(70, valid=90), objective="mlm")
    assert all(a == b for batch in alone for a, b in numbers(batch))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_batches_for_a_gpu_are_pinned_and_arrive_whole(corpus_of):
    """A copy from memory that is not pinned waits for the device."""
    [(parts, _)] = take(batches_of(corpus_of(70)), 1)
    for part in parts:
        tensors = [*part.tokens[:2], part.tokens.segments_BT, *part.model_inputs[1:4]]
        assert all(tensor.is_pinned() for tensor in tensors)
        there = part.to(torch.device("cuda"))
        assert there.tokens.ids_BT.device.type == "cuda"
        assert plain(there) == plain(part)

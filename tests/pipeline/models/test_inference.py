"""Batches by length: the same answers in the same order, within the budget, also after OOM."""

from __future__ import annotations

import pytest
import torch

from pipeline.models import inference, tokens
from pipeline.models.encoder import Encoder
from pipeline.models.precision import resolve_precision

pytestmark = pytest.mark.usefixtures("fp32")

RNG = torch.Generator().manual_seed(0)


def sentence(words):
    return " ".join(f"w{number}" for number in torch.randint(200, (words,), generator=RNG).tolist())


TEXTS = [sentence(words) for words in (3, 9, 0, 1, 9, 5, 2, 7, 30)]
CONTEXTS = [[sentence(words), sentence(2)] for words in (4, 1, 20, 0, 9, 2)]


@pytest.fixture
def batches(monkeypatch):
    """The shapes [rows, tokens] of all batches that are padded."""
    shapes, pad_rows = [], tokens.pad_rows

    def record(rows, pad):
        shapes.append((len(rows), max(map(len, rows))))
        return pad_rows(rows, pad)

    monkeypatch.setattr(tokens, "pad_rows", record)
    return shapes


def dual(tiny, **config):
    return tiny.ranker(**{"architecture": "poly", **config})


@pytest.mark.parametrize("budget", [1, 40])
def test_candidates_come_in_their_order_and_as_one_by_one(tiny, budget):
    ranker = dual(tiny)
    together = inference.candidate_vectors(ranker, TEXTS, budget)
    alone = torch.cat([inference.candidate_vectors(ranker, [text]) for text in TEXTS])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    assert torch.cdist(alone, alone).fill_diagonal_(9).min() > 0.01  # no two could be swapped
    assert (together.dtype, together.requires_grad) == (torch.float32, False)


@pytest.mark.parametrize(("codes", "budget"), [("learnt", 10_000), ("first_m", 40)])
def test_contexts_come_in_their_order_with_their_masks(tiny, codes, budget):
    ranker = dual(tiny, context_codes=codes, m=6)
    vectors, mask = inference.context_vectors(ranker, CONTEXTS, budget)
    lengths = [len(row) for row in ranker.context_rows(CONTEXTS)]
    present = [6 if codes == "learnt" else min(6, length) for length in lengths]
    assert mask.sum(dim=1).tolist() == present
    for place, context in enumerate(CONTEXTS):
        alone, _ = inference.context_vectors(ranker, [context])
        torch.testing.assert_close(
            vectors[place, mask[place]], alone[0, mask[place]], rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("budget", [1, 60])
def test_pairs_come_by_context_and_as_one_by_one(tiny, budget):
    ranker = tiny.ranker(architecture="cross")
    candidates = [TEXTS[:4], TEXTS[4:5], TEXTS[2:9], [], TEXTS[:2], TEXTS[1:3]]
    together = inference.pair_scores(ranker, CONTEXTS, candidates, budget)
    assert [len(scores) for scores in together] == [4, 1, 7, 0, 2, 2]
    for context, texts, scores in zip(CONTEXTS, candidates, together, strict=True):
        for text, score in zip(texts, scores, strict=True):
            alone = inference.pair_scores(ranker, [context], [[text]])[0]
            torch.testing.assert_close(score, alone[0], rtol=0, atol=1e-5)


def test_batches_are_sorted_and_bounded_by_their_tokens(tiny, batches):
    ranker = dual(tiny)
    inference.candidate_vectors(ranker, TEXTS, 24)
    assert sum(rows for rows, _ in batches) == len(TEXTS)
    assert all(rows * longest <= 24 for rows, longest in batches)
    longest = [length for _, length in batches]
    assert longest == sorted(longest, reverse=True)
    assert max(rows for rows, _ in batches) > 1


@pytest.mark.parametrize("architecture", ["poly", "cross"])
def test_encoders_see_few_widths_and_no_place_that_they_lack(tiny, architecture):
    """Widths are multiples of 8, or all positions of the encoder, here 27."""
    ranker = tiny.ranker(architecture=architecture)
    encoders = [part for part in ranker.modules() if isinstance(part, Encoder)]
    for encoder in encoders:
        encoder.hf.config.max_position_embeddings = 27
    widths = set()
    for encoder in encoders:
        encoder.register_forward_pre_hook(lambda _, inputs: widths.add(inputs[0].ids_BT.shape[1]))
    words = range(1, 9)
    for count in words:
        contexts, texts = [[sentence(count)]], [sentence(count), sentence(1)]
        if architecture == "cross":
            inference.pair_scores(ranker, contexts, [texts])
        else:
            inference.context_vectors(ranker, contexts)
            inference.candidate_vectors(ranker, texts)
    longest = max(len(row) for row in ranker.context_rows([[sentence(words[-1])]]))
    assert len(widths) < len(words)
    assert {width for width in widths if width % 8} <= {27}
    assert max(widths) >= min(longest, 27)


@pytest.fixture
def small_memory(monkeypatch):
    """A ranker whose candidate tower has no memory for more than `limit` rows; its batch sizes."""

    def limit_to(ranker, limit, error=None):
        sizes = []
        encode = ranker.dual.encode_candidates

        def limited(batch):
            sizes.append(len(batch.ids_BT))
            if sizes[-1] > limit:
                raise error or torch.OutOfMemoryError("too many rows")
            return encode(batch)

        monkeypatch.setattr(ranker.network, "encode_candidates", limited)
        return sizes

    return limit_to


@pytest.mark.parametrize("limit", [1, 5])
def test_batch_that_does_not_fit_is_halved_until_it_does(tiny, small_memory, limit):
    expected = inference.candidate_vectors(dual(tiny), TEXTS)
    ranker = dual(tiny)
    sizes = small_memory(ranker, limit)
    vectors = inference.candidate_vectors(ranker, TEXTS)
    torch.testing.assert_close(vectors, expected, rtol=0, atol=1e-5)
    fitted = [size for size in sizes if size <= limit]
    assert sum(fitted) == len(TEXTS)
    assert sizes[-1] <= limit < sizes[0]


def no_memory() -> Exception:
    """What torch says where a CPU has not enough."""
    with pytest.raises(RuntimeError) as failed:
        torch.empty(1 << 52)
    return failed.value


@pytest.mark.parametrize("error", [MemoryError(), no_memory()], ids=["python", "torch"])
def test_memory_of_a_cpu_that_does_not_do_halves_a_batch_too(tiny, small_memory, error):
    ranker = dual(tiny)
    sizes = small_memory(ranker, 2, error)
    assert len(inference.candidate_vectors(ranker, TEXTS)) == len(TEXTS)
    assert sizes[0] == len(TEXTS)
    assert sizes[-1] <= 2


def test_another_error_is_raised_and_so_is_one_of_a_single_text(tiny, small_memory):
    ranker = dual(tiny)
    sizes = small_memory(ranker, 2, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes"):
        inference.candidate_vectors(ranker, TEXTS)
    assert len(sizes) == 1
    small_memory(ranker, 0)  # not even one text fits
    with pytest.raises(torch.OutOfMemoryError):
        inference.candidate_vectors(ranker, TEXTS)


@pytest.mark.parametrize(
    "config", [{}, {"projection": 8, "vector_length": 4.5}, {"reduction": "mean_first_m"}]
)
def test_weights_in_bf16_give_nearly_the_same_vectors_in_float32(tiny, config, monkeypatch):
    exact = inference.candidate_vectors(dual(tiny, **config), TEXTS)
    ranker = dual(tiny, **config)
    inference.to_bf16(ranker)
    monkeypatch.setattr("pipeline.models.precision.use_bf16", lambda device: True)
    assert {weight.dtype for weight in ranker.dual.candidate_encoder.parameters()} == {
        torch.bfloat16
    }
    vectors = inference.candidate_vectors(ranker, TEXTS)
    assert vectors.dtype == torch.float32
    assert torch.cosine_similarity(vectors, exact).min() > 0.999
    assert not torch.equal(vectors.bfloat16().float(), vectors)  # no rounding behind the encoder
    contexts, mask = inference.context_vectors(ranker, CONTEXTS)
    assert not torch.equal(contexts.bfloat16().float(), contexts)
    monkeypatch.setenv("POLYRANK_PROCESSOR", "avx2")
    expected, _ = inference.context_vectors(dual(tiny, **config), CONTEXTS)
    assert torch.cosine_similarity(contexts[mask], expected[mask]).min() > 0.999


@pytest.mark.parametrize("hardware", [False, True])
def test_the_precision_is_the_rankers_whatever_the_hardware(tiny, monkeypatch, hardware):
    monkeypatch.setattr("pipeline.models.precision.use_bf16", lambda device: hardware)
    cpu = torch.device("cpu")
    assert resolve_precision("auto", cpu) == ("bf16" if hardware else "fp32")
    found = {}
    for precision in ("auto", "bf16", "fp32"):
        ranker = inference.place(dual(tiny), cpu, precision)
        assert ranker.precision == resolve_precision(precision, cpu)
        found[precision] = inference.candidate_vectors(ranker, TEXTS)
    assert torch.equal(found["auto"], found["bf16" if hardware else "fp32"])
    assert not torch.equal(found["bf16"], found["fp32"])
    torch.testing.assert_close(found["bf16"], found["fp32"], rtol=0, atol=0.05)

"""ConveRT against PolyAI's graphs and plain numpy in float64; its sizes, its folder, and what is refused."""

from __future__ import annotations

import importlib
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from pipeline.evaluation.ranking import own_scores
from pipeline.models import inference
from pipeline.models.convert_rt.encoder import (
    Blocks,
    ConvertNetwork,
    FeedForward2,
    Matrix,
    TokenVectors,
    feed_forward_2,
    reduced,
    token_vectors,
    token_weights,
)
from pipeline.models.convert_rt.folder import WEIGHTS
from pipeline.models.convert_rt.tokenizer import (
    VOCABULARY,
    ConvertTokenizer,
    join_earlier,
    save_vocabulary,
)
from pipeline.models.inference import explain
from pipeline.models.ranker import load_ranker, new_ranker
from pipeline.models.settings import ConvertConfig
from tests.helpers import refusal, softmax

from .conftest import SMALL

GRAPH_WEIGHTS = ("wide", "random", "saved")
GRAPHS = [f"{graph}.{weights}" for graph in ("single", "multi") for weights in GRAPH_WEIGHTS]
TOLERANCE = 1e-5


def close(ours, expected, tolerance=TOLERANCE):
    np.testing.assert_allclose(ours.detach().numpy(), expected, rtol=tolerance, atol=tolerance)


class Stored:
    """The arrays of one graph as tensors."""

    def __init__(self, golden, graph):
        self._arrays, self._graph = golden.arrays, graph

    def __call__(self, name):
        return torch.from_numpy(self._arrays[f"{self._graph}.{name}"])

    def side(self, side):
        start = f"{self._graph}.weights.{side}."
        return {name.removeprefix(start): torch.from_numpy(value)
                for name, value in self._arrays.items() if name.startswith(start)}  # fmt: skip


def test_the_former_package_still_imports():
    assert importlib.import_module("pipeline.models.convert").token_vectors is token_vectors


@pytest.fixture(params=GRAPHS)
def stored(golden, request):
    return Stored(golden, request.param)


@pytest.mark.shared
def test_token_vectors_and_their_reduction(golden, stored):
    ids_BT = torch.from_numpy(golden.arrays["tokenizer.ids"])
    norm = (stored("weights.token_norm.gamma"), stored("weights.token_norm.beta"))
    found = token_vectors(ids_BT, stored("weights.embedding"), [stored("weights.positions")], *norm)
    close(found, stored("embed.token_vectors"))
    query, key = stored("weights.reduction.query"), stored("weights.reduction.key")
    mask_BT = torch.from_numpy(golden.arrays["tokenizer.mask"])
    vectors_BTD = stored("embed.token_vectors")
    close(reduced(vectors_BTD, mask_BT, [query], [key]), stored("reduce.r"))
    weights_B1T = token_weights(vectors_BTD, mask_BT, [query], [key])
    close(weights_B1T[:, 0], stored("reduce.token_weight"))
    alone = stored("reduce_only.x"), stored("reduce_only.mask").bool()
    close(reduced(*alone, [query], [key]), stored("reduce_only.r"))


@pytest.mark.shared
def test_reduction_with_two_heads(golden):
    stored = Stored(golden, "two_heads")
    queries = [stored(f"weights.query_{head}") for head in (1, 2)]
    keys = [stored(f"weights.key_{head}") for head in (1, 2)]
    close(reduced(stored("x"), stored("mask"), queries, keys), stored("r"))


@pytest.mark.shared
def test_feed_forward_2(stored):
    skip = stored("weights.skip")
    for side in ("context", "response"):
        for name in ("ff2_only", f"ff2.{side}"):
            r = stored("ff2_only.r" if name == "ff2_only" else "reduce.r")
            expected = stored("ff2_only." + side + ".h" if name == "ff2_only" else f"{name}.h")
            close(feed_forward_2(r, stored.side(side), skip, "relu"), expected)


# Oracles in float64, text by text, without padding


def normed(rows, norm):
    centred = rows - rows.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-12)
    return scaled * weight(norm.gamma) + weight(norm.beta)


def weight(parameter):
    return parameter.detach().double().numpy()


def fast_gelu(values):
    return values / (1 + np.exp(-1.702 * values))


def block_oracle(block, rows_TD):
    """Reference 5.2, a pair of tokens at a time."""
    attention, count = block.attention, len(rows_TD)
    q, k, v = np.split(rows_TD @ weight(attention.qkv.weight).T, 3, axis=1)
    bias = weight(attention.bias)
    seen = np.zeros_like(v)
    for i in range(count):
        near = [j for j in range(count) if abs(i - j) <= attention.window]
        logits = [q[i] @ k[j] / np.sqrt(q.shape[1]) + bias[attention.longest - i + j] for j in near]
        seen[i] = softmax(np.array(logits)) @ v[near]
    rows_TD = normed(rows_TD + seen @ weight(attention.out.weight).T, block.norm_1)
    wide = fast_gelu(
        rows_TD @ weight(block.feed_forward.wide.weight).T + weight(block.feed_forward.wide.bias)
    )
    narrow = wide @ weight(block.feed_forward.narrow.weight).T + weight(
        block.feed_forward.narrow.bias
    )
    return normed(rows_TD + narrow, block.norm_2)


def noisy(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return module


@given(st.lists(st.integers(0, 20), min_size=1, max_size=4), st.integers(0, 99))
def test_blocks_are_the_papers_on_every_text_alone(lengths, seed):
    blocks = noisy(Blocks(ConvertConfig(**SMALL)), seed)
    mask_BT = torch.arange(max(1, *lengths)) < torch.tensor(lengths)[:, None]
    vectors_BTD = torch.from_numpy(
        np.random.default_rng(seed).standard_normal((*mask_BT.shape, 16))
    )
    found_BTD = blocks(vectors_BTD.float(), mask_BT)
    for found_TD, rows_TD, length in zip(found_BTD, vectors_BTD.numpy(), lengths, strict=True):
        expected = rows_TD[:length]
        for layer in blocks.layers:
            expected = block_oracle(layer, expected)
        close(
            found_TD[:length], expected, tolerance=5e-5
        )  # float32, and sums whose order threads decide
        assert not found_TD[length:].any()


def test_positions_are_the_sum_of_two_tables_that_repeat():
    tokens = noisy(TokenVectors(ConvertConfig(**SMALL), rows=9))
    ids_BT = torch.tensor([[number % 9 for number in range(25)]])
    first, second = (weight(table.weight) for table in tokens.positions)
    rows = weight(tokens.subwords.weight)
    summed = [rows[i % 9] * 4 + first[i % 7] + second[i % 3] for i in range(25)]  # 4: √16
    close(tokens(ids_BT)[0], normed(np.array(summed), tokens.norm))


@pytest.mark.parametrize("activation", ["relu", "fast_gelu"])
def test_feed_forward_2_is_the_formula(activation):
    skip = Matrix(6, 4)
    network = noisy(FeedForward2(6, (5, 7), 4, skip, activation))
    r = np.random.default_rng(0).standard_normal((3, 6))
    act = fast_gelu if activation == "fast_gelu" else lambda values: np.maximum(values, 0)
    hidden = normed(r, network.norm_in)
    for number in (1, 2):
        layer, norm = getattr(network, f"hidden_{number}"), getattr(network, f"norm_{number}")
        hidden = normed(act(hidden @ weight(layer.weight)), norm)
    summed = normed(hidden @ weight(network.out.weight) + r @ weight(skip.weight), network.norm_out)
    expected = summed / np.linalg.norm(summed, axis=1, keepdims=True)
    close(network(torch.from_numpy(r)), expected)
    assert "skip" not in " ".join(dict(network.named_parameters())), "it belongs to several sides"


def test_a_text_without_a_token_gives_zeros():
    vectors_BTD, query = torch.randn(2, 3, 4), torch.randn(4, 2)
    mask_BT = torch.tensor([[False] * 3, [True, False, False]])
    r = reduced(vectors_BTD, mask_BT, [query], [query])
    assert not r[0].any()
    close(r[1], vectors_BTD[1, 0].numpy())


CONTEXTS = [["the cat", "a dog"], ["a dog"], ["x", "", "y"], [""], ["yes", "the cat"], ["", "b"]]
TEXTS = ["the cat.", "", "😀 жж", "a longer text than the others, it is"]


def encoded(ranker):
    """Contexts [N, D] and candidates, in float32 but for what `to_bf16` made bf16."""
    ranker.precision = "fp32"
    vectors_BMD, mask_BM = inference.context_vectors(ranker, CONTEXTS)
    assert mask_BM.all()
    return vectors_BMD[:, 0], inference.candidate_vectors(ranker, TEXTS)


def explained(ranker):
    (row,) = ranker.context_rows([["a b", "the cat"]])
    vectors_BMD, mask_BM = inference.context_row_vectors(ranker, [row])
    vectors_CD = inference.candidate_vectors(ranker, TEXTS)
    return explain(ranker, row, vectors_BMD[0], mask_BM[0], vectors_CD)


@pytest.mark.parametrize("earlier", [0, 10])
def test_codes_give_a_context_several_vectors_that_are_compared_as_a_poly_encoders(
    convert, earlier
):
    """Each is the encoding and what its code attends to; with nothing of that it is the encoding alone."""
    ranker = convert(earlier_turns=earlier, context_codes=3)
    vectors_BMD, mask_BM = inference.context_vectors(ranker, CONTEXTS)
    candidates_CD = inference.candidate_vectors(ranker, TEXTS)
    assert vectors_BMD.shape[1] == ranker.config.vectors_per_context == 3 and mask_BM.all()
    for vectors in (vectors_BMD, candidates_CD):
        torch.testing.assert_close(vectors.norm(dim=-1), torch.full(vectors.shape[:-1], 8**0.25))
    logits = np.einsum("bmd,cd->bcm", vectors_BMD.double(), candidates_CD.double())
    weights = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
    scores = ranker.dual.scores(vectors_BMD, mask_BM, candidates_CD)
    close(scores, (weights * logits).sum(axis=2))
    assert not torch.allclose(vectors_BMD[0, 0], vectors_BMD[0, 1], atol=1e-3)
    attention_MT = explained(ranker).attention_MT
    torch.testing.assert_close(attention_MT.sum(dim=1), torch.ones(3))
    assert len({tuple(row) for row in attention_MT.tolist()}) == 3
    views = ranker.dual.context_views(ranker.tokenizer.batch(ranker.context_rows(CONTEXTS)))
    assert [view.vectors_BMD.shape for view in views] == [(6, 3, 8)] * len(views)
    with torch.no_grad():
        ranker.network.code_projection.weight.zero_()
    plain, _ = inference.context_vectors(ranker, CONTEXTS)
    torch.testing.assert_close(plain[:, 0], plain[:, 2])


@pytest.mark.parametrize("earlier", [0, 10])
def test_a_text_has_the_same_encoding_of_length_1_alone_and_in_a_batch(convert, earlier):
    ranker = convert(earlier_turns=earlier)
    h_x, h_y = encoded(ranker)
    for encodings in (h_x, h_y):
        torch.testing.assert_close(encodings.norm(dim=1), torch.ones(len(encodings)))
    mask = torch.ones(len(h_x), 1, dtype=torch.bool)
    torch.testing.assert_close(ranker.dual.scores(h_x[:, None], mask, h_y), h_x @ h_y.T)
    alone_x = [inference.context_vectors(ranker, [context])[0][0, 0] for context in CONTEXTS]
    alone_y = [inference.candidate_vectors(ranker, [text])[0] for text in TEXTS]
    torch.testing.assert_close(torch.stack(alone_x), h_x, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.stack(alone_y), h_y, rtol=0, atol=1e-5)


def test_the_combination_halves_the_newest_where_nothing_is_earlier(convert):
    """With the encodings of both texts from a single-context view of the same weights."""
    network = convert(earlier_turns=10).network
    ranker = convert(earlier_turns=10)
    tokens = ranker.tokenizer.batch(ranker.context_rows(CONTEXTS))
    with torch.no_grad():
        combined, newest, earlier = network.context_views(tokens)
        found, _ = network.encode_contexts(tokens)
        weights, skip = dict(network.combined.named_parameters()), network.combined_skip.weight
        present = torch.tensor([True, False, True, False, True, False])
        assert torch.equal(earlier.mask_BM[:, 0], present)
        assert not earlier.vectors_BMD[~present].any()
        mean = (newest.vectors_BMD + earlier.vectors_BMD)[:, 0] / 2
        expected = feed_forward_2(mean, weights, skip, "fast_gelu")
        own = network.encode_candidates(ranker.tokenizer.batch(ranker.candidate_rows(["a dog"])))
    torch.testing.assert_close(combined.vectors_BMD[:, 0], expected)
    assert torch.equal(found, combined.vectors_BMD)
    torch.testing.assert_close(newest.vectors_BMD[0], newest.vectors_BMD[1])
    assert not torch.allclose(own[0], newest.vectors_BMD[1, 0]), "each side has its own network"


def test_a_batch_without_any_earlier_turn_has_gradients_for_every_weight(convert):
    """DistributedDataParallel waits for them."""
    ranker = convert(earlier_turns=10)
    tokens = ranker.tokenizer.batch(ranker.context_rows([["a"], ["b"]]))
    views = ranker.network.context_views(tokens)
    candidates = ranker.network.encode_candidates(tokens)
    sum((view.vectors_BMD.sum() for view in views), candidates.sum()).backward()
    assert all(value.grad is not None for value in ranker.parameters())


def test_the_scale_is_annealed_from_1_to_the_root_of_the_dimensions(convert):
    network = convert(anneal_steps=4, quantised=False).network
    scales = []
    for step in range(6):
        network.before_step(step)
        scales.append(network.training_scale.item())
    root = np.sqrt(8)
    np.testing.assert_allclose(
        scales, [1 + (root - 1) * min(1, s / 4) for s in range(6)], rtol=1e-6
    )


@pytest.mark.slow
def test_parameters_are_the_papers():
    """Reference 5.5; single-context, with 31,476 subwords."""

    def millions(*parts):
        return sum(value.numel() for part in parts for value in part.parameters()) / 1e6

    with torch.device("meta"):
        papers = ConvertNetwork(ConvertConfig(), 31_476 + 1_000 + 1)
        multi = ConvertNetwork(ConvertConfig(earlier_turns=10), 10)
    assert millions(papers.tokens.subwords) == pytest.approx(16.63, abs=0.005)
    assert millions(papers.blocks) == pytest.approx(13.4, abs=0.05)
    assert millions(papers.context) == millions(papers.candidate) == pytest.approx(3.67, abs=0.02)
    assert millions(papers.reduction) == pytest.approx(0.13, abs=0.005)
    assert millions(multi.earlier) == millions(multi.context)


@pytest.mark.slow
def test_the_papers_model_is_at_most_60_megabytes(tmp_path):
    folder = tmp_path / "vocabulary"
    folder.mkdir()
    # As long as those of a real vocabulary: 7 characters on average.
    save_vocabulary([f"﹏{number:06d}" for number in range(31_476)], folder)
    new_ranker(ConvertConfig(), folder, seed=0).save(tmp_path / "model")
    size = sum(path.stat().st_size for path in (tmp_path / "model").iterdir())
    assert 58e6 < size <= 60e6


def in_16_bits(ranker):
    """Its weights, but those of the tables, rounded to float16."""
    with torch.no_grad():
        for name, value in ranker.network.named_parameters():
            if "subwords" not in name and "positions" not in name:
                value.copy_(value.half())
    return ranker


@pytest.mark.parametrize(
    "settings", [{"earlier_turns": 10}, {"quantised": False}, {"context_codes": 3}]
)
def test_a_saved_model_comes_back(convert, tmp_path, settings):
    ranker = convert(**settings)
    ranker.network.before_step(0)
    ranker.save(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}
    loaded = load_ranker(tmp_path)
    assert loaded.config == ranker.config
    assert not any(module.training for module in loaded.modules())
    expected = in_16_bits(ranker) if ranker.config.quantised else ranker
    for ours, theirs in zip(encoded(loaded), encoded(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    loaded.save(tmp_path / "again")
    again = load_ranker(tmp_path / "again")
    assert all(map(torch.equal, encoded(loaded), encoded(again)))


def test_training_goes_on_from_a_model_and_a_multi_context_one_from_a_single_one(convert, tmp_path):
    ranker = convert()
    ranker.save(tmp_path)
    saved = load_ranker(tmp_path)
    further = new_ranker(ranker.config, tmp_path, seed=5).eval()
    assert all(value.dtype == torch.float32 for value in further.parameters())
    for ours, theirs in zip(encoded(further), encoded(saved), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    multi = new_ranker(ConvertConfig(**{**SMALL, "earlier_turns": 10}), tmp_path, seed=5).eval()
    torch.testing.assert_close(encoded(multi)[1], encoded(saved)[1], rtol=0, atol=1e-5)
    tokens = multi.tokenizer.batch(multi.context_rows([["a dog", "the cat"], ["x", "a dog"]]))
    with torch.no_grad():
        _, newest, earlier = multi.network.context_views(tokens)
    torch.testing.assert_close(newest.vectors_BMD[1], earlier.vectors_BMD[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("change", ["buckets", "missing", "cut", "vocabulary"])
def test_a_folder_that_does_not_fit_is_refused_in_one_line(convert, tmp_path, change):
    convert().save(tmp_path)
    settings = tmp_path / "ranker.json"
    values = json.loads(settings.read_text())
    weights = load_file(tmp_path / WEIGHTS)
    if change == "buckets":
        settings.write_text(json.dumps({**values, "buckets": 6}))
    elif change == "missing":
        del weights["skip.weight"]
        save_file(weights, tmp_path / WEIGHTS)
    elif change == "cut":
        (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:100])
    else:
        (tmp_path / VOCABULARY).unlink()
    message = refusal(load_ranker, tmp_path)
    needed = {"buckets": "ranker.buckets", "missing": "skip.weight has nothing; the settings need",
              "cut": WEIGHTS, "vocabulary": VOCABULARY}  # fmt: skip
    assert needed[change] in message and str(tmp_path) in message


def test_what_it_explains_adds_up_to_1(convert):
    ranker = convert(earlier_turns=10)
    tokens, attention_MT, weights_CM = explained(ranker)
    assert attention_MT.shape == (1, len(tokens))
    torch.testing.assert_close(attention_MT.sum(), torch.tensor(1.0))
    divider = tokens.index("\n")
    torch.testing.assert_close(attention_MT[0, :divider].sum(), torch.tensor(0.5))
    assert weights_CM.tolist() == [[1.0]] * 4
    assert "dimensions" in refusal(ranker.cut, 4)


def test_bf16_weights_encode_as_float32_ones(convert):
    exact, rounded = convert(), convert()
    inference.to_bf16(rounded)
    assert {p.dtype for p in rounded.network.blocks.parameters()} == {torch.bfloat16}
    assert rounded.network.skip.weight.dtype == torch.float32
    for ours, theirs in zip(encoded(rounded), encoded(exact), strict=True):
        assert torch.nn.functional.cosine_similarity(ours, theirs).min() > 0.99


class Untouched(torch.nn.Module):
    """No blocks."""

    def forward(self, vectors_BTD, mask_BT):
        return vectors_BTD


@pytest.mark.shared
@pytest.mark.parametrize("weights", ["wide", "random", "saved"])
def test_whole_texts_are_encoded_as_by_the_graph(golden, weights):
    """Without blocks, as the graph: from joined texts to encodings and scores."""
    arrays, name = golden.arrays, f"multi.{weights}"
    sizes = {key: arrays[f"{name}.weights.{key}"].shape for key in
             ("embedding", "positions", "skip", "reduction.query", "context.hidden_1.weight",
              "context.hidden_2.weight")}  # fmt: skip
    about = golden.about["tokenizer"]
    config = ConvertConfig(
        buckets=about["hash_buckets"], width=sizes["embedding"][1], windows=(1,), reduction_heads=1,
        position_tables=(11,), reduction_width=sizes["reduction.query"][1], activation="relu",
        hidden=(sizes["context.hidden_1.weight"][1], sizes["context.hidden_2.weight"][1]),
        encoding_width=sizes["skip"][1], earlier_turns=10, quantised=False,
        max_context_tokens=200, max_candidate_tokens=200,
    )  # fmt: skip
    network = ConvertNetwork(config, sizes["embedding"][0])
    network.blocks = Untouched()
    named = {
        "embedding": "tokens.subwords.weight", "positions": "tokens.positions.0.weight",
        "token_norm.gamma": "tokens.norm.gamma", "token_norm.beta": "tokens.norm.beta",
        "reduction.query": "reduction.queries.0", "reduction.key": "reduction.keys.0",
        "skip": "skip.weight", "combined.skip": "combined_skip.weight",
    }  # fmt: skip
    start, state = f"{name}.weights.", {}
    for key, value in arrays.items():
        if key.startswith(start):
            own = key.removeprefix(start)
            own = own.replace("response.", "candidate.").replace("extra.", "earlier.")
            state[named.get(own, own)] = torch.from_numpy(value)
    network.load_state_dict(state, strict=False)
    assert set(state) == set(dict(network.named_parameters()))
    cases = golden.about["pairs"]["cases"]
    encodings = []
    for case in cases:
        tokenizer = ConvertTokenizer(about["vocabulary"], 7, 10, case["prefixes"])
        # The graph joins earlier turns as they are; we drop empty ones, and spaces around them, before.
        joined = join_earlier(case["earlier"], 10, case["prefixes"])
        context = [tokenizer.context_row(case["context"], joined, 200)]
        with torch.no_grad():
            h, _ = network.encode_contexts(tokenizer.batch(context))
            views = network.context_views(tokenizer.batch(context))
            y = network.encode_candidates(
                tokenizer.batch(tokenizer.candidates([case["response"]], 200))
            )
        encodings.append((views[1].vectors_BMD[0, 0], views[2].vectors_BMD[0, 0], h[0, 0], y[0]))
    h_x, h_z, h, h_y = (torch.stack(each) for each in zip(*encodings, strict=True))
    close(h_x, arrays[f"{name}.pairs.context.h"])
    present = arrays["pairs.extra_present"] == 1
    close(h_z[present], arrays[f"{name}.pairs.extra.h"][present])
    close(h, arrays[f"{name}.pairs.combined.h"])
    close(h_y, arrays[f"{name}.pairs.response.h"])
    close(h @ h_y.T, arrays[f"{name}.pairs.scores"])


def test_as_a_teacher_its_cosines_are_what_the_softmax_of_its_loss_takes(convert):
    """Bare cosines of several candidates are nearly the uniform distribution, to a student."""
    ranker = convert()
    contexts, candidates = [["the cat"], ["a", "at the"]], [["a", "the cat", "at"]] * 2
    bare = own_scores(ranker, contexts, candidates)
    found = own_scores(ranker, contexts, candidates, as_in_loss=True)
    factor = float(ranker.dual.training_scale)
    assert factor > 2
    np.testing.assert_allclose(found, factor * np.stack(bare), rtol=1e-5)


def test_parameters_in_8_bits_are_counted_too(convert, tmp_path):
    ranker = convert(quantised=True)
    trained = sum(value.numel() for value in ranker.parameters())
    ranker.save(tmp_path)
    loaded = load_ranker(tmp_path)
    assert sum(value.numel() for value in loaded.parameters()) < trained
    assert loaded.parameter_count == ranker.parameter_count == trained
    loaded.quantise()
    assert loaded.parameter_count == trained

"""The ONNX graph, run by ONNX Runtime, against the model itself."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from pipeline.config import BadInput
from pipeline.models import inference
from pipeline.models.int8 import linear_layers, replace_layer
from pipeline.models.interop import to_onnx
from pipeline.models.ranker import load_ranker

TEXTS = ["the cat.", "", "😀 жж", "a longer text than the others, it is", "The the the"]
WIDE = {
    "width": 512, "windows": (3, 5, 48, 48), "attention_width": 64, "intermediate": 1024,
    "reduction_width": 64, "hidden": (512,), "encoding_width": 384,
}  # fmt: skip
needs_onnx = pytest.mark.skipif(
    not (importlib.util.find_spec("onnxscript") and importlib.util.find_spec("onnxruntime")),
    reason="onnxscript and onnxruntime are not installed",
)


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"quantised": False}, pytest.param({"activation": "relu"}, marks=pytest.mark.long)],
)
def test_onnx_runtime_gives_the_same_encodings(convert, tmp_path, settings):
    import onnxruntime

    ranker = convert(**settings)
    ranker.save(tmp_path / "ranker")
    loaded = inference.place(load_ranker(tmp_path / "ranker"), torch.device("cpu"), "fp32")
    (tmp_path / "onnx").mkdir()
    to_onnx.export(loaded, tmp_path / "onnx")
    assert {path.name for path in (tmp_path / "onnx").iterdir()} == {
        "model.onnx", "ranker.json", "vocabulary.json"
    }  # fmt: skip
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx")
    tokens = loaded.tokenizer.batch(loaded.candidate_rows(TEXTS))
    context, candidate, r = session.run(None, {"ids": tokens.ids_BT.numpy()})
    ours = inference.candidate_vectors(loaded, TEXTS)
    np.testing.assert_allclose(candidate, ours, rtol=0, atol=1e-4)
    vectors, _ = inference.context_vectors(loaded, [[text] for text in TEXTS])
    np.testing.assert_allclose(context, vectors[:, 0], rtol=0, atol=1e-4)
    np.testing.assert_allclose(context @ candidate.T, vectors[:, 0] @ ours.T, rtol=0, atol=1e-3)
    with torch.no_grad():
        expected = loaded.network.encode_texts(tokens)
    np.testing.assert_allclose(r, expected, rtol=0, atol=1e-3)
    for place, ids_T in enumerate(
        loaded.candidate_rows(TEXTS)
    ):  # alone; the empty one is a single token
        (alone,) = session.run(["candidate"], {"ids": [ids_T]})
        np.testing.assert_allclose(alone[0], candidate[place], rtol=0, atol=1e-5)


@needs_onnx
@pytest.mark.slow
def test_blocks_of_8_bits_give_the_scores_of_their_weights(convert, tmp_path):
    """In a model as wide and deep as those that are trained, where rounded inputs would change scores."""
    import onnxruntime

    ranker = convert(**WIDE, block_weights="int8")
    ranker.save(tmp_path)
    to_onnx.export(load_ranker(tmp_path), tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    tokens = ranker.tokenizer.batch(ranker.candidate_rows(TEXTS))
    context, candidate, _ = session.run(None, {"ids": tokens.ids_BT.numpy()})
    expected = load_ranker(tmp_path)
    for name, layer in linear_layers(expected.network.blocks).items():
        weight_OI = layer.levels_OI * layer.scale_O1
        plain = torch.nn.Linear(*weight_OI.shape[::-1], bias=layer.bias is not None)
        plain.weight.data = weight_OI
        if layer.bias is not None:
            plain.bias.data = layer.bias
        replace_layer(expected.network.blocks, name, plain)
    inference.place(expected, torch.device("cpu"), "fp32")
    ours = inference.candidate_vectors(expected, TEXTS)
    vectors, _ = inference.context_vectors(expected, [[text] for text in TEXTS])
    scores = (vectors[:, 0] @ ours.T).numpy()
    np.testing.assert_allclose(context @ candidate.T, scores, rtol=0, atol=1e-4)


def test_other_models_are_refused(convert, tiny, tmp_path):
    for ranker in (convert(earlier_turns=3), tiny.ranker(architecture="bi")):
        with pytest.raises(BadInput, match="'convert' with ranker"):
            to_onnx.export(ranker, tmp_path)

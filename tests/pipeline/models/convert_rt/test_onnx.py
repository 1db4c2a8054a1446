"""The ONNX graph, run by ONNX Runtime, against the model itself."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from pipeline.config import BadInput
from pipeline.models import inference
from pipeline.models.int8 import Int8Linear, linear_layers
from pipeline.models.interop import to_onnx
from pipeline.models.ranker import load_ranker

TEXTS = ["the cat.", "", "😀 жж", "a longer text than the others, it is", "The the the"]
WIDE = {
    "width": 256, "windows": (3,), "attention_width": 32, "intermediate": 512, "reduction_width": 32,
    "hidden": (256,), "encoding_width": 128,
}  # fmt: skip
needs_onnx = pytest.mark.skipif(
    not (importlib.util.find_spec("onnxscript") and importlib.util.find_spec("onnxruntime")),
    reason="onnxscript and onnxruntime are not installed",
)


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {**WIDE, "block_weights": "int8"},
        pytest.param({"quantised": False, "activation": "relu"}, marks=pytest.mark.long),
    ],
)
def test_onnx_runtime_gives_the_same_encodings(convert, tmp_path, settings):
    """Blocks of 8 bits give those of their weights, in a model so wide that rounded inputs give others."""
    import onnxruntime

    ranker, folder = convert(**settings), tmp_path / "onnx"
    ranker.save(tmp_path / "ranker")
    folder.mkdir()
    to_onnx.export(load_ranker(tmp_path / "ranker"), folder)
    files = {path.name for path in folder.iterdir()}
    assert files == {"model.onnx", "ranker.json", "vocabulary.json"}
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    rows = ranker.candidate_rows(TEXTS)
    tokens = ranker.tokenizer.batch(rows)
    context, candidate, sentence = session.run(None, {"ids": tokens.ids_BT.numpy()})

    expected = load_ranker(tmp_path / "ranker")
    rounded = inference.candidate_vectors(expected, TEXTS)
    for name, layer in linear_layers(expected.network.blocks).items():
        if isinstance(layer, Int8Linear):
            weight_OI = layer.levels_OI * layer.scale_O1
            plain = torch.nn.Linear(*weight_OI.shape[::-1], bias=layer.bias is not None)
            plain.weight.data = weight_OI
            if layer.bias is not None:
                plain.bias.data = layer.bias
            expected.network.blocks.set_submodule(name, plain)
    inference.place(expected, torch.device("cpu"), "fp32")
    candidates = inference.candidate_vectors(expected, TEXTS)
    contexts = inference.context_vectors(expected, [[text] for text in TEXTS])[0][:, 0]
    np.testing.assert_allclose(candidate, candidates, rtol=0, atol=1e-4)
    if ranker.config.saves_int8:
        assert (rounded - candidates).abs().max() > 1e-3
    np.testing.assert_allclose(context, contexts, rtol=0, atol=1e-4)
    np.testing.assert_allclose(context @ candidate.T, contexts @ candidates.T, rtol=0, atol=1e-4)
    with torch.no_grad():
        np.testing.assert_allclose(
            sentence, expected.network.encode_texts(tokens), rtol=0, atol=1e-3
        )
    for place, row in enumerate(rows):  # alone; the empty text is a single token
        (alone,) = session.run(["candidate"], {"ids": [row]})
        np.testing.assert_allclose(alone[0], candidate[place], rtol=0, atol=1e-4)


def test_other_models_are_refused(convert, tiny, tmp_path):
    for ranker in (convert(earlier_turns=3), tiny.ranker(architecture="bi")):
        with pytest.raises(BadInput, match="'convert' with ranker"):
            to_onnx.export(ranker, tmp_path)

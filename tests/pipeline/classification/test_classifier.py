"""A head on disk, and the encoders that it may stand on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.classification import classifier, encoder
from pipeline.classification.classifier import Classifier, load
from pipeline.classification.head import Head
from pipeline.classification.settings import EncodeConfig, HeadConfig
from pipeline.config import BadInput
from pipeline.models import inference
from pipeline.models.interop import sentence_transformers
from pipeline.models.ranker import load_ranker
from pipeline.models.sources import open_text_encoder

TEXTS = ["w1 w2 w3", "w7", "w9 w9 w4 w150 w3"]
CONVERT_TEXTS = ["please block my card", "", "über", "a longer text than the others, it is"]
CPU = torch.device("cpu")
FP32 = EncodeConfig(precision="fp32")


@pytest.fixture
def made() -> Classifier:
    torch.manual_seed(0)
    head = Head(6, 8, 3)
    config = HeadConfig(hidden=8)
    return Classifier(head, ("block", "pay", "über"), 0.4, EncodeConfig(), config, "file", "f1")


@pytest.fixture
def written(made: Classifier, tmp_path: Path) -> Path:
    for name, data in made.files().items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def test_a_head_is_read_as_it_was_written(made: Classifier, written: Path):
    found = load(written)
    vectors = torch.randn(5, 6)
    assert torch.equal(found.probabilities(vectors), made.probabilities(vectors))
    assert replace(found, head=made.head) == made


def test_a_text_below_the_threshold_is_out_of_scope(made: Classifier):
    vectors = torch.randn(50, 6)
    best = made.probabilities(vectors).max(dim=1).values
    said = replace(made, threshold=best.median().item()).classify(vectors)
    assert [one.out_of_scope for one in said] == (best < best.median()).tolist()
    assert not any(one.out_of_scope for one in replace(made, threshold=0.0).classify(vectors))


def test_the_best_intents_come_first(made: Classifier):
    vectors = torch.randn(1, 6)
    (said,) = made.classify(vectors)
    (values_C,) = made.probabilities(vectors).tolist()
    best = sorted(zip(made.labels, values_C, strict=True), key=lambda intent: -intent[1])
    assert said.intents == best


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("classifier.json", b"{", "not the settings of a classifier"),
        ("head.safetensors", b"junk", "not the weights"),
        ("classifier.json", None, "not the settings of a classifier"),
    ],
)
def test_a_damaged_head_is_refused(written: Path, name, data, words):
    (written / name).unlink()
    if data is not None:
        (written / name).write_bytes(data)
    with pytest.raises(BadInput, match=words) as refusal:
        load(written)
    assert name in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_head_of_other_intents_is_refused(written: Path):
    settings = json.loads((written / "classifier.json").read_text())
    settings["labels"] = settings["labels"][:2]
    (written / "classifier.json").write_text(json.dumps(settings))
    with pytest.raises(BadInput, match="not the weights"):
        load(written)


# Encoders


@pytest.mark.parametrize(
    ("architecture", "side"), [("bi", "candidate"), ("bi", "context"), ("poly", "context")]
)
def test_a_rankers_towers_give_the_vectors(tiny, tmp_path: Path, architecture, side):
    """A poly-encoder's context counts as the mean of the vectors that it has."""
    tiny.ranker(architecture=architecture, context_codes="first_m").save(tmp_path)
    found = encoder.load(tmp_path, replace(FP32, side=side), CPU).vectors(TEXTS).numpy()
    ranker = load_ranker(tmp_path)
    ranker.precision = "fp32"
    if side == "candidate":
        expected = inference.candidate_vectors(ranker, TEXTS).numpy()
    else:
        vectors, mask = inference.context_vectors(ranker, [[text] for text in TEXTS])
        expected = np.stack([
            np.mean([v for v, there in zip(rows, some, strict=True) if there], axis=0)
            for rows, some in zip(vectors.double().numpy(), mask.tolist(), strict=True)
        ])  # fmt: skip
    assert np.abs(found - expected).max() < 1e-5


def test_convert_gives_its_r(tiny_ranker):
    """What its encodings are made of (reference 5.8), not of length 1; a text alone is the newest turn."""
    folder = tiny_ranker("convert").local()
    found = encoder.load(folder, FP32, CPU).vectors(CONVERT_TEXTS)
    ranker = load_ranker(folder)
    with torch.no_grad():
        expected = [ranker.network.encode_texts(ranker.tokenizer.batch(ranker.context_rows([[text]])))
                    for text in CONVERT_TEXTS]  # fmt: skip
    assert found.shape == (len(CONVERT_TEXTS), 2 * ranker.config.width)
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("side", ["context", "candidate"])
def test_a_side_of_what_was_exported_to_sentence_transformers(tiny, tmp_path: Path, side):
    ranker = tiny.ranker(architecture="bi")
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    ranker.save(tmp_path / "ours")
    sentence_transformers.export(ranker, tmp_path / "theirs")
    settings = replace(FP32, side=side)
    ours, theirs = (
        encoder.load(tmp_path / name, settings, CPU).vectors(TEXTS) for name in ("ours", "theirs")
    )
    assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "first"])
def test_a_plain_transformers_directory(tiny, reduction):
    folder = tiny.encoder_folder()
    found = encoder.load(folder, replace(FP32, reduction=reduction), CPU).vectors(TEXTS)
    model = tiny.encoder().hf.eval()
    for text, vector in zip(TEXTS, found, strict=True):
        ids = [2, *(int(word[1:]) + 5 for word in text.split()), 3]
        with torch.no_grad():
            hidden = model(torch.tensor([ids])).last_hidden_state[0]
        expected = hidden[0] if reduction == "first" else hidden.mean(0)
        assert torch.allclose(vector, expected, atol=1e-5)


def test_texts_are_cut_to_what_the_model_takes(tiny):
    long = " ".join(["w3"] * 500)
    made = encoder.load(tiny.encoder_folder(), FP32, CPU)
    assert len(made.rows([long])[0]) == tiny.shape["positions"]
    assert (
        len(encoder.load(tiny.encoder_folder(), replace(FP32, max_tokens=9), CPU).rows([long])[0])
        == 9
    )
    strange = ["😀", "مرحبا بالعالم", long, "w1 " * 3000]
    assert torch.isfinite(made.vectors(strange)).all()


def test_a_cross_encoder_has_no_vectors(tiny, tmp_path: Path):
    tiny.ranker(architecture="cross").save(tmp_path)
    with pytest.raises(BadInput, match="cross"):
        encoder.load(tmp_path, FP32, CPU)


def test_an_encoder_that_has_changed_is_refused(tiny, made: Classifier):
    folder = str(tiny.encoder_folder())
    _, reference = open_text_encoder(folder)
    with pytest.raises(BadInput, match="the encoder is"):
        replace(made, encoder_uri=folder).open_encoder()
    right = replace(made, encoder_uri=folder, encoder_fingerprint=reference["fingerprint"])
    assert right.open_encoder().local()


def test_what_is_no_classifier_is_refused(tmp_path: Path):
    with pytest.raises(BadInput, match="not a classifier"):
        classifier.open_classifier(str(tmp_path))

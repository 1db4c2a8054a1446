"""jobs.convert_model: what it makes of which model, and what it refuses."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch

from pipeline.artifact import open_artifact
from pipeline.evaluation.ranking import own_scores
from pipeline.models import inference, sources
from pipeline.models.int8 import Int8Linear
from pipeline.models.ranker import load_ranker
from serve.engine import Engine

CONTEXTS = [["hello there", "what do you do ?"], ["no"]]
TEXTS = ["i paint", "a nurse in the harbour", "yes"]


@pytest.fixture(autouse=True)
def float32(monkeypatch):
    monkeypatch.setenv("POLYRANK_PROCESSOR", "avx2")


@pytest.fixture
def convert(run_job_here):
    """`convert(model, output, …)`: what the job says."""

    def run(model: object, output: object, *options: object):
        return run_job_here("convert_model", "--model", model, "--output", output, *options)

    return run


THERE = ("--to", "sentence-transformers")


def scores(uri):
    ranker = load_ranker(open_artifact(str(uri), "ranker").local())
    if ranker.config.architecture == "cross":
        return torch.stack(inference.pair_scores(ranker, CONTEXTS, [TEXTS] * len(CONTEXTS)))
    vectors, mask = inference.context_vectors(ranker, CONTEXTS)
    return ranker.dual.scores(vectors, mask, inference.candidate_vectors(ranker, TEXTS))


@pytest.mark.parametrize("architecture", ["bi", "cross"])
def test_a_ranker_goes_to_another_format_and_back(convert, tiny_ranker, tmp_path, architecture):
    model = tiny_ranker(architecture)
    there, back = tmp_path / "there", tmp_path / "back"
    done = convert(model.uri, there, *THERE)
    assert done.summary["architecture"] == architecture
    exported = open_artifact(str(there), "sentence-transformers")
    assert exported.manifest["inputs"]["model"]["fingerprint"] == model.fingerprint
    done = convert(there, back)
    assert done.summary["counts"]["parameters"] > 0
    torch.testing.assert_close(scores(back), scores(model.uri), rtol=0, atol=1e-5)
    lineage = open_artifact(str(back), "ranker").manifest["inputs"]["model"]
    assert lineage["inputs"]["model"]["fingerprint"] == model.fingerprint
    assert convert(there, back).summary["already_done"]


@pytest.mark.parametrize("architecture", ["bi", "cross"])
def test_the_card_of_a_model_is_right(convert, tiny_ranker, tmp_path, monkeypatch, architecture):
    """Its code runs as it stands, and gives the original's scores in float32."""
    pytest.importorskip("sentence_transformers")
    model, there = tiny_ranker(architecture), tmp_path / "there"
    convert(model.uri, there, *THERE)
    text = (there / "README.md").read_text()
    assert model.uri in text and "--precision fp32" in text
    code = text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(there)
    names: dict[str, Any] = {}
    exec(code, names)
    (expected,) = own_scores(
        load_ranker(model.local()), [["hi", "what do you do ?"]], [names["texts"]]
    )
    assert names["scores"].ravel() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_a_converted_ranker_is_served(convert, tiny_ranker, tmp_path):
    """Its manifest has no settings of jobs.finetune."""
    there, back = tmp_path / "there", tmp_path / "back"
    model = tiny_ranker("bi")
    convert(model.uri, there, *THERE)
    convert(there, back)
    assert "polyrank serve --model .\n" in (back / "README.md").read_text()
    served, original = Engine(str(back)), Engine(model.uri)
    (found,) = own_scores(served.ranker, CONTEXTS[:1], [TEXTS])
    (expected,) = own_scores(original.ranker, CONTEXTS[:1], [TEXTS])
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_folder_that_no_job_made_is_read(convert, tiny_ranker, tmp_path):
    model = tiny_ranker("bi")
    there, plain = tmp_path / "there", tmp_path / "plain"
    convert(model.uri, there, *THERE)
    shutil.copytree(there / "context", plain)
    limits = ("--max-context-tokens", 30, "--max-candidate-tokens", 20)
    done = convert(plain, tmp_path / "back", *limits)
    manifest = open_artifact(done.summary["output"], "ranker").manifest
    assert manifest["inputs"]["model"]["kind"] == "external"
    config = load_ranker(tmp_path / "back").config
    assert config.share_towers
    assert (config.max_context_tokens, config.max_candidate_tokens) == (30, 20)


def test_vectors_are_cut_to_a_width_that_was_trained(convert, tiny_ranker, tmp_path):
    folder = tmp_path / "ranker"
    shutil.copytree(tiny_ranker("poly").local(), folder)
    (folder / "manifest.json").unlink()
    settings = json.loads((folder / "ranker.json").read_text())
    (folder / "ranker.json").write_text(json.dumps({**settings, "matryoshka": [4, 8]}))
    cut = tmp_path / "cut"
    convert(folder, cut, "--dimensions", 8)
    whole, ranker = load_ranker(folder), load_ranker(cut)
    expected = inference.candidate_vectors(whole, TEXTS)[:, :8]
    torch.testing.assert_close(inference.candidate_vectors(ranker, TEXTS), expected)
    said = convert(folder, cut, "--dimensions", 5).refusal
    assert "ranker.dimensions: 5 is not allowed; allowed: 0, or a width that was trained" in said


def test_a_convert_ranker_gets_blocks_of_8_bits(convert, tiny_ranker, tmp_path):
    """Its vectors stay nearly the same; another architecture is refused."""
    model, output = tiny_ranker("convert"), tmp_path / "int8"
    done = convert(model.uri, output, "--int8", "true")
    assert done.summary["architecture"] == "convert"
    ranker = load_ranker(open_artifact(str(output), "ranker").local())
    assert ranker.config.block_weights == "int8"
    assert any(isinstance(part, Int8Linear) for part in ranker.modules())
    before = inference.candidate_vectors(load_ranker(model.local()), TEXTS)
    after = inference.candidate_vectors(ranker, TEXTS)
    assert ((before * after).sum(dim=1) > 0.99).all() and not torch.equal(before, after)
    refused = convert(tiny_ranker("bi").uri, tmp_path / "bi", "--int8", "true")
    assert "int8: true is not allowed" in refused.refusal


@pytest.mark.parametrize(("architecture", "options", "message"), [
    ("poly", ("--to", "sentence-transformers"), "'poly' is unknown to sentence-transformers"),
    ("cross", ("--dimensions", 4), "'cross' has no candidate vectors"),
    ("bi", ("--dimensions", -1), "dimensions: -1 is not allowed; allowed: >= 0"),
    ("bi", ("--to", "onnx"), "onnx"),
])  # fmt: skip
def test_what_cannot_be_made_is_refused_and_nothing_is_left(
    convert, tiny_ranker, tmp_path, architecture, options, message
):
    model, output = tiny_ranker(architecture), tmp_path / "out"
    done = convert(model.uri, output, *options)
    assert message in done.refusal
    assert not list(tmp_path.iterdir())


def test_a_model_of_the_hub_is_named_by_its_id(convert, tiny_ranker, tmp_path, monkeypatch):
    made = tmp_path / "c0ffee"
    convert(tiny_ranker("bi").uri, made, *THERE)
    monkeypatch.setattr(sources, "snapshot_download", lambda name, **_: str(made / "context"))
    output = tmp_path / "ranker"
    done = convert("somebody/model", output)
    assert done.summary["architecture"] == "bi"
    inputs = open_artifact(str(output), "ranker").manifest["inputs"]
    assert inputs["model"]["uri"] == "somebody/model"


def test_what_is_no_model_is_refused(convert, convai2_corpus, tmp_path):
    def refusal(model):
        return convert(model, tmp_path / "out").refusal

    assert "there is no such folder" in refusal(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "modules.json is missing" in refusal(tmp_path / "empty")
    (tmp_path / "empty" / "model.opt").write_text("not json")
    assert "model.opt: not to be read" in refusal(tmp_path / "empty")
    assert "needed here: ranker or sentence-transformers" in refusal(convai2_corpus.uri)

"""Models on every node: what travels to workers finds its files there, not on the driver's disk."""

from __future__ import annotations

import pickle
import shutil
import socket
import time
from pathlib import Path

import pytest

from pipeline import storage
from pipeline.artifact import Artifact, folder_entries
from pipeline.config import BadInput
from pipeline.engine.draft import draft
from pipeline.models import sources
from pipeline.models.encoder import Encoder
from pipeline.models.ranker import load_ranker
from pipeline.models.settings import BiConfig, PolyConfig
from pipeline.models.sources import open_encoder, open_external, open_tokenizer
from pipeline.models.tokens import Tokenizer
from pipeline.training.finetuning import Finetuning
from pipeline.training.pretraining import Pretraining
from pipeline.training.settings import FinetuneConfig, LoopConfig, PretrainConfig


def published(folder: Path, kind: str, store: Path) -> Artifact:
    """A folder as an artifact in a store: fsspec's "local" is a scheme like an object store's."""
    out = draft(f"local://{store}/store/{kind}", kind, PolyConfig(), {})
    storage.upload(folder, out.staging)
    return out.publish(folder_entries(folder), {})


def weights(source) -> list[float]:
    return [value.sum().item() for value in Encoder.load(source.local()).parameters()]


def moved(source, node):
    """It, as a worker on another node gets it."""
    data = pickle.dumps(source)
    assert str(node()).encode() not in data
    return pickle.loads(data)


def test_every_kind_of_encoder_is_copied_to_the_node_that_needs_it(tiny, tmp_path, node):
    folder = tiny.encoder_folder()
    storage.upload(folder, f"local://{tmp_path}/theirs")
    ranker = tmp_path / "ranker"
    tiny.ranker(architecture="bi").save(ranker)
    wanted = {
        published(folder, "encoder", tmp_path).uri: folder,
        published(ranker, "ranker", tmp_path).uri: ranker / "context_encoder",
        f"local://{tmp_path}/theirs": folder,
        str(folder): folder,
    }
    for uri, original in wanted.items():
        source, reference = open_encoder(uri)
        there = moved(source, node)
        assert weights(there) == weights(sources.External(str(original), ""))
        assert reference["uri"] == uri
        assert there == source
    assert open_encoder(str(folder))[1]["fingerprint"] == reference["fingerprint"]


def test_another_model_in_the_same_folder_is_another_copy(tmp_path, node):
    uri = f"local://{tmp_path}/theirs"
    storage.write_bytes(f"{uri}/config.json", b"one")
    first, named = open_external(uri)
    assert (first.local() / "config.json").read_bytes() == b"one"
    storage.write_bytes(f"{uri}/config.json", b"two")
    second, renamed = open_external(uri)
    assert (second.local() / "config.json").read_bytes() == b"two"
    assert named["fingerprint"] != renamed["fingerprint"]
    storage.write_bytes(f"{uri}/README.md", b"about the model")
    assert open_external(uri)[1]["fingerprint"] == renamed["fingerprint"]


def test_a_model_of_the_hub_is_fetched_by_every_node_at_one_commit(tiny, tmp_path, monkeypatch):
    asked = []

    def fetch(name: str, revision: str | None = None, allow_patterns: object = None) -> str:
        asked.append((name, revision))
        folder = tmp_path / f"node-{len(asked)}" / "snapshots" / "c0ffee"
        shutil.copytree(tiny.encoder_folder(), folder)
        (folder / "README.md").write_text("fetched by somebody who wanted all of it")
        return str(folder)

    monkeypatch.setattr(sources, "snapshot_download", fetch)
    source, reference = open_encoder("somebody/model")
    before = len(asked)
    there = pickle.loads(pickle.dumps(source)).local()
    assert asked[0] == ("somebody/model", None)
    assert set(asked[1:]) == {("somebody/model", "c0ffee")}
    assert there.parent.parent.name == f"node-{before + 1}"
    _, same = open_encoder(str(tiny.encoder_folder()))
    assert reference == {**same, "uri": "somebody/model"}
    tokenizer, reference = open_tokenizer("somebody/model")
    assert Tokenizer.load(tokenizer.local()).ids(["w1"])
    assert reference == {**same, "uri": "somebody/model"}


def test_what_the_hub_has_not_is_refused(tmp_path, monkeypatch):
    def fetch(name: str, **_: object) -> str:
        if name == "a/gone":
            raise OSError("404\nnot found")
        (tmp_path / "c0ffee").mkdir(exist_ok=True)
        return str(tmp_path / "c0ffee")

    monkeypatch.setattr(sources, "snapshot_download", fetch)
    with pytest.raises(BadInput, match=r"--encoder a/gone: no such folder, nor .* hub \(404\)"):
        open_encoder("a/gone")
    with pytest.raises(BadInput, match=r"--encoder empty: not a model directory"):
        open_encoder("empty")  # bert-base-uncased has no owner either
    with pytest.raises(BadInput, match=r"a/empty: not a model directory \(config.json is miss"):
        open_encoder("a/empty")
    with pytest.raises(BadInput, match=r"--start a/empty: .* \(tokenizer.json is missing"):
        open_tokenizer("a/empty", "--start")


@pytest.mark.parametrize("revision", [None, "c0ffee" + 34 * "0"])
def test_a_hub_that_never_answers_is_refused(monkeypatch, revision):
    """Such as one behind a firewall, or a mirror that hangs."""
    constants = "huggingface_hub.constants"
    monkeypatch.setattr(f"{constants}.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(f"{constants}.HF_HUB_ETAG_TIMEOUT", 0.05)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the tries
    with socket.create_server(("127.0.0.1", 0)) as hub:
        monkeypatch.setattr(f"{constants}.ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        with pytest.raises(BadInput, match=r"^a/b: no such folder, nor to be had from the hub"):
            sources.fetch_from_hub("a/b", revision)


def test_a_node_without_a_way_to_the_hub_says_so_in_one_line(tiny, tmp_path, monkeypatch):
    shutil.copytree(tiny.encoder_folder(), tmp_path / "c0ffee")
    monkeypatch.setattr(sources, "snapshot_download", lambda *_, **__: str(tmp_path / "c0ffee"))
    source, _ = open_encoder("somebody/model")

    def fetch(*_: object, **__: object) -> str:
        raise RuntimeError("no network\nat all")

    monkeypatch.setattr(sources, "snapshot_download", fetch)
    with pytest.raises(
        BadInput, match=r"^somebody/model: no such folder, nor .* hub \(no network\)$"
    ):
        source.local()


def test_recipes_build_on_other_nodes_than_the_drivers(tiny, tmp_path, node):
    rows = [{"context": [f"w{n}"], "response": f"w{n + 50}"} for n in range(40)]
    corpus, encoder = tiny.corpus(rows), published(tiny.encoder_folder(), "encoder", tmp_path)
    settings = BiConfig(max_context_tokens=24, max_candidate_tokens=12)
    recipe = Finetuning(corpus, encoder, settings, FinetuneConfig(batch_examples=8), LoopConfig())
    recipe.build(0, 1).ranker.save(tmp_path / "here")
    moved(recipe, node).build(0, 1).ranker.save(tmp_path / "there")
    here, there = (load_ranker(tmp_path / name).network for name in ("here", "there"))
    for (name, one), other in zip(here.named_parameters(), there.parameters(), strict=True):
        assert one.equal(other), name

    config = PretrainConfig(batch_tokens=100, max_context_tokens=24, max_response_tokens=12)
    pretraining = Pretraining((tiny.tokens(corpus),), (1.0,), encoder, config, LoopConfig())
    here, there = (made.build(0, 1) for made in (pretraining, moved(pretraining, node)))
    for (name, one), other in zip(
        here.module.named_parameters(), there.module.parameters(), strict=True
    ):
        assert one.equal(other), name
    first = [next(task.batches.start(()))[0].parts[0].tokens.ids_BT for task in (here, there)]
    assert first[0].equal(first[1])

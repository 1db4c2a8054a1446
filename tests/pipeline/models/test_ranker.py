"""A ranker's directory: what it holds, that it comes back the same, and what is refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    AlbertConfig,
    AlbertModel,
    AutoModel,
    AutoTokenizer,
    BartConfig,
    BartModel,
    ElectraConfig,
    ElectraModel,
    MPNetConfig,
    MPNetModel,
    RobertaConfig,
    RobertaModel,
)

from pipeline.models import inference
from pipeline.models.encoder import Encoder, freeze, shorten
from pipeline.models.pretraining_heads import PretrainingModel
from pipeline.models.ranker import load_ranker, new_ranker
from pipeline.models.settings import PolyConfig, Shape, ranker_config
from tests.helpers import refusal

CONTEXTS = [["w1 w2", "w3"], ["w4 w5 w6 w7"], ["w8"]]
TEXTS = ["w9 w10", "w1", "w11 w12 w13"]
KINDS = {
    "bi_shared": {"architecture": "bi", "share_towers": True, "reduction": "first"},
    "poly": {"architecture": "poly", "output_scaling": 0.5, "candidate_attention": "scaled_dot"},
    "poly_heads": {
        "architecture": "poly", "code_attention": "multi_head", "candidate_attention": "multi_head",
    },
    "poly_projected": {"architecture": "poly", "context_codes": "last_m", "projection": 8},
    "poly_projected_shared": {"projection": 8, "share_towers": True, "context_codes": "last_m"},
    "cross": {"architecture": "cross"},
    "cross_pooler": {"architecture": "cross", "pooler": True},
}  # fmt: skip
_FOUR = [f"{layer}.{part}" for layer in "qkvo" for part in ("weight", "bias")]
HEADS = {
    "bi_shared": set(),
    "poly": {"codes_MD"},
    "poly_heads": {
        "codes_MD", *(f"{side}_heads.{name}" for side in ("code", "candidate") for name in _FOUR)
    },
    "poly_projected": {"context_projection.weight", "candidate_projection.weight"},
    "poly_projected_shared": {"context_projection.weight"},
    "cross": {"score.weight", "score.bias"},
    "cross_pooler": {"pooler.weight", "pooler.bias", "score.weight", "score.bias"},
}  # fmt: skip


def scores(ranker):
    if ranker.config.architecture == "cross":
        return torch.stack(inference.pair_scores(ranker, CONTEXTS, [TEXTS] * len(CONTEXTS)))
    candidates = inference.candidate_vectors(ranker, TEXTS)
    return ranker.dual.scores(*inference.context_vectors(ranker, CONTEXTS), candidates)


@pytest.fixture
def saved(tiny, tmp_path):
    """Saves a ranker and returns its folder."""

    def save(encoder="bert", **config):
        tiny.ranker(encoder, **config).save(tmp_path / "ranker")
        return tmp_path / "ranker"

    return save


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_ranker_scores_as_the_saved_one(tiny, tmp_path, kind):
    """From a directory of safetensors and JSON alone; its towers load without polyrank."""
    ranker = tiny.ranker("modernbert" if kind == "poly" else "bert", **KINDS[kind])
    ranker.save(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    with safe_open(tmp_path / "head.safetensors", "pt") as head:
        assert set(head.keys()) == HEADS[kind]
    loaded = load_ranker(tmp_path)
    assert loaded.config == ranker.config
    assert torch.equal(scores(loaded), scores(ranker))
    assert scores(ranker).unique().numel() == 9
    assert not any(module.training for module in loaded.modules())
    towers = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(towers) == (1 if "cross" in kind or "shared" in kind else 2)
    if "shared" in kind:
        assert loaded.dual.context_encoder is loaded.dual.candidate_encoder
    for tower in towers:
        plain = AutoModel.from_pretrained(tower, use_safetensors=True).eval()
        tokenizer = AutoTokenizer.from_pretrained(tower)
        (row,) = ranker.candidate_rows(["w1 w2 w3"])
        assert tokenizer("w1 w2 w3", add_special_tokens=False)["input_ids"] == row[1:-1]
        with torch.no_grad():
            theirs = plain(input_ids=torch.tensor([row])).last_hidden_state
            ours = getattr(ranker.network, tower.name)(ranker.tokenizer.batch([row]))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("start", ["poly", "bi_shared"])
def test_a_ranker_s_towers_are_what_another_starts_from(saved, start):
    folder = saved(**KINDS[start])
    ranker = load_ranker(folder)
    before = ranker.dual
    with torch.no_grad():
        for weight in before.candidate_encoder.parameters():
            weight.add_(0.01)  # as after training
    ranker.save(folder)
    config = PolyConfig(m=4, max_context_tokens=24, max_candidate_tokens=12)
    after = new_ranker(config, folder / "context_encoder", 0).dual
    for tower in ("context_encoder", "candidate_encoder"):
        pairs = zip(
            getattr(before, tower).parameters(), getattr(after, tower).parameters(), strict=True
        )
        assert all(torch.equal(left, right) for left, right in pairs)


def test_new_head_follows_from_the_seed(tiny):
    """Both towers start from the same weights and are two models."""
    config = PolyConfig(m=500, code_init_std=0.3, max_context_tokens=24, max_candidate_tokens=12)
    rankers = [new_ranker(config, tiny.encoder_folder(), seed) for seed in (1, 1, 2)]
    towers = rankers[0].dual.context_encoder, rankers[0].dual.candidate_encoder
    for left, right in zip(*(tower.parameters() for tower in towers), strict=True):
        assert torch.equal(left, right) and left is not right
    codes = [ranker.dual.codes_MD for ranker in rankers]
    assert torch.equal(codes[0], codes[1])
    assert not torch.equal(codes[0], codes[2])
    assert codes[0].shape == (500, 16)
    assert codes[0].std().item() == pytest.approx(0.3, rel=0.05)


@pytest.mark.parametrize("name", [
    "ranker.json", "context_encoder/tokenizer.json", "context_encoder/config.json",
    "candidate_encoder/model.safetensors", "head.safetensors",
])  # fmt: skip
def test_missing_file_is_named(saved, name):
    folder = saved(architecture="poly")
    (folder / name).unlink()
    message = refusal(load_ranker, folder)
    assert str(folder) in message
    assert "is missing" in message or "codes_MD" in message


@pytest.mark.parametrize(("name", "cut"), [("context_encoder/model.safetensors", -50),
                                           ("head.safetensors", 0), ("head.safetensors", 100),
                                           ("ranker.json", 0), ("ranker.json", 1)])  # fmt: skip
def test_broken_weights_are_refused(saved, name, cut):
    path = saved(architecture="poly") / name
    path.write_bytes(path.read_bytes()[:cut])
    assert str(path.parent) in refusal(load_ranker, path.parents[name.count("/")])


@pytest.mark.parametrize("tensors", [
    {"codes_MD": torch.zeros(5, 16)}, {"codes_MD": torch.zeros(4, 16), "more": torch.zeros(1)},
])  # fmt: skip
def test_head_of_another_shape_is_refused(saved, tensors):
    folder = saved(architecture="poly")
    save_file(tensors, folder / "head.safetensors")
    assert "[4, 16]" in refusal(load_ranker, folder)


def test_towers_of_different_widths_are_refused(tiny, saved):
    folder = saved(architecture="bi")
    tiny.encoder(width=8).save(folder / "candidate_encoder")
    assert "the candidates' encoder has 8 dimensions, the contexts' 16" in refusal(
        load_ranker, folder
    )


def test_a_model_that_also_decodes_is_refused(tmp_path):
    """It would give its decoder's outputs."""
    config = BartConfig(vocab_size=20, d_model=8, encoder_layers=1, decoder_layers=1,
                        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=8,
                        decoder_ffn_dim=8, max_position_embeddings=16)  # fmt: skip
    BartModel(config).save_pretrained(tmp_path)
    assert "BartModel is no encoder" in refusal(Encoder.load, tmp_path)


@pytest.mark.parametrize(("saved_as", "change", "message"), [
    ("poly", {"architecture": "bi"}, "head.safetensors: does not fit ranker.json"),
    ("bi", {"architecture": "poly"}, "head.safetensors: does not fit ranker.json"),
    ("poly", {"architecture": "cross"}, "/encoder: not a model directory"),
    ("cross", {"architecture": "poly"}, "/context_encoder: not a model directory"),
    ("poly", {"architecture": "other"}, "'other' is not allowed; allowed: bi, poly, cross"),
    ("poly", {"unknown": 1}, "not the settings of a ranker"),
    ("poly", {"m": "many"}, "m: 'many' is not allowed"),
    ("poly", {"m": 0}, "m: 0 is not allowed; allowed: above 0"),
    ("poly", {"reduction": "max"}, "reduction: 'max' is not allowed"),
])  # fmt: skip
def test_settings_that_do_not_fit_the_files_or_this_version_are_refused(
    saved, saved_as, change, message
):
    """A newer polyrank's ranker must not be scored as if it were something else."""
    path = saved(architecture=saved_as) / "ranker.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert message in refusal(load_ranker, path.parent)


@pytest.mark.parametrize("config", [
    {"architecture": "bi", "max_context_tokens": 65},
    {"architecture": "poly", "max_context_tokens": 24, "max_candidate_tokens": 65},
    {"architecture": "cross", "max_context_tokens": 40, "max_candidate_tokens": 26},
])  # fmt: skip
def test_more_tokens_than_positions_are_refused(tiny, config):
    """A cross-encoder's pair has one [CLS]: its two limits may add up to 65."""
    message = refusal(new_ranker, ranker_config(config), tiny.encoder_folder(), 0)
    assert "65" in message
    assert "at most 64" in message
    ranker = tiny.ranker(architecture="cross", max_context_tokens=40, max_candidate_tokens=25)
    long = " ".join(["w1"] * 100)
    assert inference.pair_scores(ranker, [[long]], [[long]])[0].isfinite().all()


def test_positions_of_a_roberta_leave_out_those_before_its_first(tmp_path):
    """Its first token has position pad + 1, so a table of 20 rows serves 18 tokens."""
    config = RobertaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1,
                           num_attention_heads=2, intermediate_size=32,
                           max_position_embeddings=20, pad_token_id=1)  # fmt: skip
    RobertaModel(config).save_pretrained(tmp_path)
    assert Encoder.load(tmp_path).positions == 18


@pytest.mark.parametrize("text", ["", "{}", '{"version": "1.0", "trunc'])
def test_a_damaged_tokenizer_is_refused(tiny, tmp_path, text):
    shutil.copytree(tiny.encoder_folder(), tmp_path / "encoder")
    (tmp_path / "encoder" / "tokenizer.json").write_text(text)
    message = refusal(new_ranker, ranker_config({"architecture": "bi"}), tmp_path / "encoder", 0)
    assert "encoder: its tokenizer cannot be read (" in message


def test_layers_that_share_their_weights_are_not_frozen(tmp_path):
    shape = AlbertConfig(vocab_size=50, embedding_size=8, hidden_size=16, num_hidden_layers=3,
                         num_attention_heads=2, intermediate_size=32)  # fmt: skip
    AlbertModel(shape).save_pretrained(tmp_path)
    encoder = Encoder.load(tmp_path)
    freeze(encoder, "all")
    assert "finetune.train_layers: 'top' is not allowed; allowed: all" in refusal(
        freeze, encoder, "top"
    )
    assert "finetune.keep_layers: 1 is not allowed; allowed: 0" in refusal(shorten, encoder, 1)


@pytest.mark.parametrize("train", ["all_but_embeddings", "top"])
def test_what_stands_below_the_trained_layers_is_frozen_whatever_its_name(tmp_path, train):
    """Electra's projection of narrower embeddings, and MPNet's positions that all layers share."""
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 32}  # fmt: skip
    for number, model in enumerate((ElectraModel(ElectraConfig(**sizes, embedding_size=8)),
                                    MPNetModel(MPNetConfig(**sizes)))):  # fmt: skip
        model.save_pretrained(tmp_path / str(number))
        encoder = Encoder.load(tmp_path / str(number))
        freeze(encoder, train)
        trained = {name for name, value in encoder.hf.named_parameters() if value.requires_grad}
        first = 0 if train == "all_but_embeddings" else 1
        layers = tuple(f"encoder.layer.{n}." for n in range(first, 2))
        assert {name for name in trained if not name.startswith("pooler.")} == {
            name for name, _ in encoder.hf.named_parameters() if name.startswith(layers)
        }


def test_weights_that_lack_a_tensor_are_refused(tiny, tmp_path):
    """`transformers` fills it with random numbers and warns."""
    tiny.encoder().save(tmp_path)
    path = tmp_path / "model.safetensors"
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors.pop("encoder.layer.1.output.dense.weight")
    save_file(tensors, path, {"format": "pt"})
    assert "encoder.layer.1.output.dense.weight" in refusal(Encoder.load, tmp_path)


@pytest.mark.parametrize("pooler", [False, True])
def test_a_cross_encoder_starts_from_the_next_utterance_head(tiny, tmp_path, pooler):
    """A published encoder of jobs.pretrain has that head beside it; with a pooler the score is new."""
    torch.manual_seed(5)
    model = PretrainingModel.new(
        Shape(**tiny.shape), tiny.vocabulary, {"pad": 0, "cls": 2, "sep": 3}
    )
    torch.nn.init.constant_(model.next.bias, 0.5)
    model.save(tmp_path)
    tiny.tokenizer().save(tmp_path)
    config = ranker_config({"architecture": "cross", "pooler": pooler, "max_context_tokens": 24,
                            "max_candidate_tokens": 12})  # fmt: skip
    score = new_ranker(config, tmp_path, seed=0).cross.score
    assert torch.equal(score.weight, model.next.weight) is not pooler
    assert torch.equal(score.bias, model.next.bias) is not pooler

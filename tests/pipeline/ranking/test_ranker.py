"""`pipeline.Ranker`: the scores of each architecture, vectors in any batches, and what is refused."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

from pipeline import BadInput, Pool, Ranker, tracking
from pipeline.artifact import open_artifact
from pipeline.models import inference
from pipeline.models.encoder import TextEncoder
from pipeline.models.ranker import load_ranker
from pipeline.ranking import ranker as ranker_module
from tests.helpers import formula_scores

from .conftest import REPLIES

CONTEXT = ["hi !", "do you like hot tea ?"]
TEXTS = ["it rains", "i like tea", "no", "a harbour that froze", "i like tea", "7"]
LENGTHS = [3, 90, 1, 17, 40, 2, 90, 8]
ARCHITECTURES = ["bi", "poly", "cross", "convert"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_candidates_stand_in_the_order_of_their_scores(home: Path, architecture: str):
    ranker = Ranker.load(f"rankers/{architecture}")
    wanted = formula_scores(load_ranker(home / "rankers" / architecture), CONTEXT, TEXTS)
    assert ranker.score(CONTEXT, TEXTS) == pytest.approx(wanted, rel=1e-5)
    ranking = ranker.rank(CONTEXT, TEXTS, top_k=4)
    order = sorted(range(len(TEXTS)), key=lambda place: (-round(wanted[place], 5), place))[:4]
    assert [one.index for one in ranking] == order
    assert [one.text for one in ranking] == [TEXTS[place] for place in order]
    assert [one.id for one in ranking] == [str(place) for place in order]
    assert [one.score for one in ranking] == pytest.approx([wanted[at] for at in order], rel=1e-5)
    assert ranking.certified


@pytest.fixture
def default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default_dtype")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("setting", ["meta", "autocast", "float64"])
def test_the_programs_settings_of_torch_change_nothing(home: Path, architecture: str, setting: str):
    def results() -> list[np.ndarray]:
        ranker = Ranker.load(f"rankers/{architecture}")
        if architecture == "cross":
            return [ranker.score(CONTEXT, TEXTS)]
        vectors = [*ranker.encode_contexts([CONTEXT, "tea ?"]), ranker.encode_candidates(TEXTS)]
        return [ranker.score(CONTEXT, TEXTS), *vectors, *ranker.explain(CONTEXT, TEXTS)[1:]]

    def searched() -> list[tuple[str, float]]:
        ranking = Ranker.load("rankers/poly").search(Pool.open("pools/replies"), CONTEXT)
        return [(result.id, result.score) for result in ranking]

    wanted, wanted_rows = results(), searched()
    settings = {
        "meta": torch.device("meta"),
        "autocast": torch.autocast("cpu", dtype=torch.float16),
        "float64": nullcontext(),
    }
    torch.set_default_dtype(torch.float64 if setting == "float64" else torch.float32)
    with settings[setting]:
        for array, expected in zip(results(), wanted, strict=True):
            np.testing.assert_array_equal(array, expected)
        assert searched() == wanted_rows


def test_a_text_is_a_context_of_one_turn(home: Path):
    ranker = Ranker.load("rankers/poly")
    np.testing.assert_array_equal(ranker.score("tea ?", TEXTS), ranker.score(["tea ?"], TEXTS))
    assert not np.allclose(ranker.score(["tea ?", "no"], TEXTS), ranker.score("tea ?", TEXTS))


def encoded_batches(ranker: Ranker) -> list[int]:
    """Grows by the number of texts of each batch that the ranker's encoders read."""
    sizes: list[int] = []
    for part in ranker.module.modules():
        if isinstance(part, TextEncoder):
            part.register_forward_hook(lambda part, inputs, output: sizes.append(len(output)))
    return sizes


@pytest.mark.parametrize("architecture", ["bi", "poly"])
def test_a_loop_over_questions_encodes_the_candidates_once(home: Path, architecture: str):
    path = f"rankers/{architecture}"
    ranker = Ranker.load(path)
    sizes = encoded_batches(ranker)
    questions = ["tea ?", "a harbour ?", ["hi !", "tea ?"], "tea ?"]
    scores = [ranker.score(question, TEXTS) for question in questions]
    assert sum(sizes) == len(set(TEXTS)) + len(questions)
    for question, scores_C in zip(questions, scores, strict=True):
        np.testing.assert_array_equal(scores_C, Ranker.load(path).score(question, TEXTS))
    ranker.score("tea ?", ["it rains"])
    assert sum(sizes[-2:]) == 2, "other candidates are encoded"


def test_vectors_of_other_weights_or_settings_are_not_used_again(home: Path):
    ranker = Ranker.load("rankers/bi")
    before = ranker.score("tea ?", TEXTS)
    with torch.no_grad():
        for tensor in ranker.module.parameters():
            tensor.mul_(0.5)
    changed = ranker.score("tea ?", TEXTS)
    assert not np.allclose(changed, before)
    ranker.module.load_state_dict(Ranker.load("rankers/bi").module.state_dict())
    np.testing.assert_array_equal(ranker.score("tea ?", TEXTS), before)
    ranker.module.config = replace(ranker.config, candidate_prompt="no : ")
    assert not np.allclose(ranker.score("tea ?", TEXTS), before)


def test_vectors_of_very_many_candidates_are_not_kept(home: Path, monkeypatch):
    monkeypatch.setattr(ranker_module, "_KEPT_NUMBERS", 3)
    ranker = Ranker.load("rankers/bi")
    sizes = encoded_batches(ranker)
    for _ in range(2):
        ranker.score("tea ?", TEXTS)
    assert sum(sizes) == 2 * (len(set(TEXTS)) + 1)


def test_equal_texts_tie_and_all_come_where_top_k_is_larger(home: Path):
    ranking = Ranker.load("rankers/bi").rank(CONTEXT, TEXTS, top_k=1000)
    assert sorted(one.index for one in ranking) == list(range(len(TEXTS)))
    (first, second) = [one for one in ranking if one.text == "i like tea"]
    assert (first.index, second.index, first.score) == (1, 4, second.score)


def test_candidates_may_have_ids_and_come_from_any_iterable(home: Path):
    ranker = Ranker.load("rankers/poly")
    by_id = ranker.rank(CONTEXT, {key: text for key, (text, _) in REPLIES.items()})
    plain = ranker.rank(tuple(CONTEXT), (text for text, _ in REPLIES.values()))
    keys = list(REPLIES)
    assert [one.id for one in by_id] == [keys[one.index] for one in plain]
    assert str(plain).splitlines()[0].endswith(f"  {plain[0].text}")


@pytest.mark.parametrize(
    ("architecture", "batch_tokens"), [("bi", 60), ("poly", 1), ("poly", 60), ("convert", 60)]
)
def test_vectors_do_not_depend_on_the_batch(home: Path, monkeypatch, architecture, batch_tokens):
    ranker = Ranker.load(f"rankers/{architecture}")
    texts = [("tea rain boat " * 30)[at : at + length] for at, length in enumerate(LENGTHS)]
    alone = np.concatenate([ranker.encode_candidates([text]) for text in texts])
    assert alone.dtype == np.float32 and alone.shape == (len(texts), ranker.dimensions)
    monkeypatch.setattr(inference, "_WINDOW", 3)
    together = ranker.encode_candidates(texts, batch_tokens=batch_tokens)
    np.testing.assert_allclose(together, alone, atol=1e-5)

    contexts = [["hi", text] for text in texts]
    each = [ranker.encode_contexts([context]) for context in contexts]
    found = ranker.encode_contexts(contexts, batch_tokens=batch_tokens)
    np.testing.assert_allclose(
        found.vectors, np.concatenate([one.vectors for one in each]), atol=1e-5
    )
    np.testing.assert_array_equal(found.mask, np.concatenate([one.mask for one in each]))
    assert found.vectors.dtype == np.float32 and found.mask.dtype == bool


def test_of_no_texts_there_are_no_vectors(home: Path):
    ranker = Ranker.load("rankers/poly")
    assert ranker.encode_candidates([]).shape == (0, 16)
    vectors, mask = ranker.encode_contexts([])
    assert (vectors.shape, mask.shape) == ((0, 3, 16), (0, 3))


def test_the_bar_is_an_option(home: Path, capfd: pytest.CaptureFixture[str]):
    ranker = Ranker.load("rankers/poly")
    ranker.encode_candidates(TEXTS)
    assert capfd.readouterr().err == ""
    ranker.encode_candidates(TEXTS, progress=True)
    ranker.encode_contexts(TEXTS, progress=True)
    said = capfd.readouterr().err
    assert "candidates: 100%" in said and "contexts: 100%" in said and "6/6" in said


@pytest.mark.parametrize("architecture", ["bi", "poly", "convert"])
def test_an_explanation_is_what_the_score_is_made_of(home: Path, architecture: str):
    ranker = Ranker.load(f"rankers/{architecture}")
    why = ranker.explain(CONTEXT, TEXTS)
    (vectors_1MD, mask_1M), candidates_CD = (
        ranker.encode_contexts([CONTEXT]),
        ranker.encode_candidates(TEXTS),
    )
    logits_CM = candidates_CD @ vectors_1MD[0].T
    weights_CM = np.exp(logits_CM - logits_CM.max(axis=1, keepdims=True)) * mask_1M
    weights_CM /= weights_CM.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(why.weights, weights_CM, atol=1e-5)
    np.testing.assert_allclose(why.attention.sum(axis=1), mask_1M[0], atol=1e-5)
    assert why.attention.shape[1] == len(why.tokens)
    np.testing.assert_allclose(why.token_weights.sum(axis=1), 1, atol=1e-5)
    assert (why.weights.dtype, why.attention.dtype) == (np.float32, np.float32)


# Pools


def test_a_search_finds_the_best_of_all(home: Path):
    ranker, pool = Ranker.load("rankers/poly"), Pool.open(home / "pools" / "replies")
    wanted = ranker.rank(CONTEXT, {key: text for key, (text, _) in REPLIES.items()}, top_k=3)
    found = ranker.search(pool, CONTEXT, top_k=3)
    assert [(r.index, r.id, r.text) for r in found] == [(r.index, r.id, r.text) for r in wanted]
    assert [r.score for r in found] == pytest.approx([r.score for r in wanted], rel=1e-5)
    assert found.certified and found[0].columns == {"topic": REPLIES[found[0].id][1]}
    assert pool.search(ranker, CONTEXT, top_k=3) == found
    assert len(ranker.search(pool, CONTEXT, top_k=1000)) == len(REPLIES)


def test_a_device_may_be_one_of_torch(home: Path):
    device = torch.device("cpu")
    ranker, pool = (
        Ranker.load("rankers/poly", device=device),
        Pool.open("pools/replies", device=device),
    )
    assert ranker.search(pool, CONTEXT).certified
    with pytest.raises(BadInput, match=r"device: 'meta' is not allowed; allowed: auto, cpu"):
        Ranker.load("rankers/poly", device=torch.device("meta"))


def test_a_ranker_and_a_pool_print_as_one_line(home: Path):
    ranker, pool = Ranker.load("rankers/poly"), Pool.open("pools/replies")
    assert (
        repr(pool)
        == f"Pool('{home}/pools/replies/v-1', {len(REPLIES)} candidates, 16 dimensions, float32)"
    )
    assert repr(ranker).startswith(f"Ranker('{home}/rankers/poly', poly, ")
    assert len(repr(ranker).splitlines()) == 1


def test_ids_may_be_an_array_or_a_series(home: Path):
    ranker, pool = Ranker.load("rankers/poly"), Pool.open("pools/replies")
    for ids in (np.array(["r1", "r2"]), pandas.Series(["r1", "r2"])):
        assert {r.id for r in ranker.search(pool, CONTEXT, allow=ids)} == {"r1", "r2"}
        assert {r.id for r in ranker.search(pool, CONTEXT, deny=ids)} == {"r3", "r4", "r5"}
    assert ranker.search(pool, CONTEXT, deny=None) == ranker.search(pool, CONTEXT)


def test_a_pool_refuses_another_ranker(home: Path):
    pool = Pool.open("pools/replies")
    with pytest.raises(BadInput, match=r"embedded by the model \w+, not by .*/rankers/bi"):
        Ranker.load("rankers/bi").search(pool, CONTEXT)
    ranker = Ranker.load("rankers/poly")
    for wrong in ({"context": " "}, {"context": CONTEXT, "top_k": 0}, {"context": 3}):
        with pytest.raises(BadInput, match=r"^(context|top_k): "):
            ranker.search(pool, **wrong)


@pytest.mark.filterwarnings("ignore:.*use of fork")  # of Python 3.12, where there are threads
def test_a_forked_process_computes_on_one_core(home: Path):
    """On several it would wait for the threads of its parent."""
    ranker, pool = Ranker.load("rankers/poly"), Pool.open("pools/replies")
    found, scores = ranker.search(pool, CONTEXT), ranker.score(CONTEXT, TEXTS)
    if not (child := os.fork()):
        same = torch.get_num_threads() == 1 and ranker.search(pool, CONTEXT) == found
        os._exit(0 if same and np.allclose(ranker.score(CONTEXT, TEXTS), scores) else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_copy_in_another_process_has_the_same_scores(
    home: Path, monkeypatch, architecture: str, precision: str
):
    monkeypatch.delenv("POLYRANK_PROCESSOR")  # layers for bf16 need more than AVX2
    ranker = Ranker.load(f"rankers/{architecture}", precision)
    texts = [*TEXTS, "[SEP] is a text"]
    scores = ranker.score(CONTEXT, texts)
    for twin in (pickle.loads(pickle.dumps(ranker)), copy.deepcopy(ranker)):
        np.testing.assert_array_equal(twin.score(CONTEXT, texts), scores)


# Where rankers come from


def test_a_plain_copy_is_the_published_ranker(tiny_ranker, tmp_path: Path):
    published = tiny_ranker("bi")
    folder = tmp_path / "copy"
    load_ranker(published.local()).save(folder)
    plain, opened = Ranker.load(folder), Ranker.load(published.uri)
    assert plain.artifact is None and opened.artifact == open_artifact(published.uri, "ranker")
    assert plain.fingerprint == opened.fingerprint == published.fingerprint
    np.testing.assert_array_equal(plain.score(CONTEXT, TEXTS), opened.score(CONTEXT, TEXTS))


def test_an_object_store_has_rankers(tiny_ranker, node):
    """`local://` stands for one: its files are copied to this node."""
    published = tiny_ranker("poly")
    remote = Ranker.load(published.uri.replace("/", "local:///", 1))
    assert remote.fingerprint == published.fingerprint
    here = Ranker.load(published.uri)
    np.testing.assert_array_equal(remote.score(CONTEXT, TEXTS), here.score(CONTEXT, TEXTS))


def test_an_alias_of_the_registry_is_a_ranker(tiny_ranker, tracking_uri: str):
    published = tiny_ranker("poly")
    tracking.register("api", published, "champion")
    assert Ranker.load("models:/api@champion").fingerprint == published.fingerprint
    with pytest.raises(BadInput, match="models:/api@challenger"):
        Ranker.load("models:/api@challenger")


def test_models_of_sentence_transformers(home: Path):
    ranker = Ranker.from_sentence_transformers(home / "st" / "candidate", max_candidate_tokens=9)
    assert (ranker.architecture, ranker.config.max_candidate_tokens) == ("bi", 9)
    prompted = Ranker.from_sentence_transformers(
        "st/candidate", context_prompt="query: ", candidate_prompt="passage: "
    )
    plain = Ranker.from_sentence_transformers("st/candidate")
    by_hand = plain.score("query: tea ?", ["passage: yes", "passage: no"])
    np.testing.assert_array_equal(prompted.score("tea ?", ["yes", "no"]), by_hand)
    whole = Ranker.from_sentence_transformers("st/context")
    vectors, _ = whole.encode_contexts(TEXTS)
    np.testing.assert_allclose(vectors[:, 0], whole.encode_candidates(TEXTS), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors[:, 0], axis=1), 1, atol=1e-5)


# What is refused

WRONG_CALLS = {
    'r.rank("", ["a"])': "context: empty",
    'r.rank([" ", ""], ["a"])': "context: empty",
    'r.rank(None, ["a"])': "context: None is not allowed",
    'r.rank(["a", 3], ["a"])': "context[1]: 3 is not allowed; allowed: a text",
    'r.rank("\\ud800", ["a"])': "context: the text holds half of a surrogate pair",
    'r.rank("a", [])': "candidates: none",
    'r.rank("a", {})': "candidates: none",
    'r.rank("a", "b")': "candidates: 'b' is not allowed; allowed: a list of texts",
    'r.rank("a", ["b", None])': "candidates[1]: None is not allowed; allowed: a text",
    'r.rank("a", ["b", " "])': "candidates[1]: ' ' is not allowed",
    'r.rank("a", {"x": 1})': "candidates['x']: 1 is not allowed; allowed: a text",
    'r.rank("a", {1: "x"})': "candidates: 1 is not allowed",
    'r.rank("a", ["b"], top_k=0)': "top_k: 0 is not allowed",
    'r.rank("a", ["b"], top_k=2.5)': "top_k: 2.5 is not allowed",
    'r.rank("a", pandas.DataFrame({"text": ["b"]}))': "candidates: text 0 b is not allowed; allowed: a list",
    'r.search("pools/replies", "a")': "pool: 'pools/replies' is not allowed; allowed: what Pool.open",
    'r.search(Pool.open("pools/replies"), "a", where="topic")': "where: 'topic' is not allowed",
    'r.score("a", [b"bytes"])': "candidates[0]: b'bytes' is not allowed",
    'r.encode_candidates("a")': "texts: 'a' is not allowed",
    'r.encode_contexts("a")': "contexts: 'a' is not allowed",
    'r.encode_contexts(["a", ["b", 4]])': "contexts[1][1]: 4 is not allowed",
    'r.explain("", ["a"])': "context: empty",
    'r.explain("a", [])': "candidates: none",
    'cross.encode_contexts(["a"])': "architecture: 'cross' has no candidate vectors",
    'cross.encode_candidates(["a"])': "architecture: 'cross' has no candidate vectors",
    'cross.explain("a", ["b"])': "architecture: 'cross' has no candidate vectors",
    'Ranker.load("gone")': "gone: not a ranker (there is no such folder)",
    'Ranker.load("some/model")': "hub: Ranker.from_sentence_transformers('some/model')",
    'Ranker.load("pools/replies/v-1")': "kind is 'pool'; needed here: ranker",
    'Ranker.load("st/candidate")': "Ranker.from_sentence_transformers",
    'Ranker.load("rankers/poly", precision="int4")': "precision: 'int4' is not allowed",
    'Ranker.load("rankers/poly", device="tpu")': "device: 'tpu' is not allowed",
    'Ranker.from_sentence_transformers("rankers/cross")': "not of sentence-transformers",
    'Ranker.from_sentence_transformers("gone/far/away")': "gone/far/away: no such folder",
    'Ranker.from_sentence_transformers("st/candidate", -1)': "max_context_tokens: -1",
    'Ranker.from_sentence_transformers("st/candidate", "64")': "max_context_tokens: '64'",
}


@pytest.fixture(scope="module")
def loaded(made: Path) -> dict[str, Ranker]:
    """The names that the wrong calls use."""
    return {name: Ranker.load(made / "rankers" / kind) for name, kind in
            (("r", "poly"), ("cross", "cross"))}  # fmt: skip


@pytest.mark.parametrize("call", WRONG_CALLS)
def test_one_clear_line_says_what_is_wrong(home: Path, loaded: dict[str, Ranker], call: str):
    with pytest.raises(BadInput) as refused:
        eval(call, {"Ranker": Ranker, "Pool": Pool, "pandas": pandas, **loaded})
    assert WRONG_CALLS[call] in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


# What is loaded when

LOADED = """
import json, sys
SLOW = {"ray", "torch", "mlflow", "transformers", "sklearn", "scipy", "pandas", "matplotlib"}
steps = []
for code in json.load(sys.stdin):
    exec(code)
    steps.append(sorted(SLOW & set(sys.modules)))
print(json.dumps(steps))
"""


def loaded_after(home: Path, *steps: str) -> list[list[str]]:
    """The slow modules that a process has loaded after each step."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED], input=json.dumps(steps), capture_output=True, text=True,
        cwd=home, env={"PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


NAMED = "from pipeline import BadInput, Pool, Ranker"
OPENED = "pool = Pool.open('pools/replies')"


def test_nothing_slow_is_loaded_before_it_is_needed(home: Path):
    assert loaded_after(home, "import pipeline", NAMED, OPENED) == [[], [], []]


@pytest.mark.long  # 8 s of a core; test_imports.py has the same by the text of the modules
def test_ray_is_never_loaded(home: Path):
    ranker = "ranker = Ranker.load('rankers/poly')"
    asked = "ranker.search(pool, 'tea ?'); ranker.explain('tea ?', ['no'])"
    *_, loaded = loaded_after(home, NAMED, OPENED, ranker, asked)
    assert "torch" in loaded
    assert not {"ray", "mlflow", "matplotlib", "sklearn"} & set(loaded)


def test_what_the_package_has_not_is_no_attribute_of_it():
    import pipeline

    assert not hasattr(pipeline, "Rankers")

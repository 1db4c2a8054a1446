"""What a ranker is fine-tuned on: batches, negatives and losses."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.config import BadInput
from pipeline.models import inference
from pipeline.models.losses import distillation_kl, margin_mse
from pipeline.training.data import (
    TEACHER_COLUMNS,
    DualCollator,
    PairCollator,
    has_values,
    right_answers,
)
from pipeline.training.guide import Guide
from pipeline.training.objectives import DualModule, PairModule, backward, guided
from pipeline.training.settings import Distillation, FinetuneConfig, GuideLimits
from tests.helpers import collated, formula_scores

pytestmark = pytest.mark.usefixtures("fp32")
GIVEN = FinetuneConfig(negatives_from="given")


def objective(ranker, config=None, negatives=3, teacher=()):
    """The module and the collator of a ranker."""
    config = config or FinetuneConfig()
    if ranker.config.architecture == "cross":
        return PairModule(ranker.cross, config), PairCollator(ranker, negatives, teacher)
    return DualModule(ranker.dual, config), DualCollator(ranker, negatives, teacher)


def texts_of(tokens, place):
    """The words of one row of a batch, [CLS] and [SEP] left out."""
    ids = tokens.ids_BT[place, tokens.mask_BT[place]].tolist()
    return " ".join(f"w{number - 5}" for number in ids if number > 4)


def candidates_of(batch, place):
    """The candidates' texts of one example of a pair batch."""
    count = len(batch.pairs.ids_BT) // len(batch)
    second = batch.pairs.segments_BT > 0
    alone = batch.pairs._replace(mask_BT=second)
    return [texts_of(alone, place * count + number) for number in range(count)]


def softmax_loss(scores, labels, excluded):
    losses = []
    for row, label, out in zip(scores, labels, excluded, strict=True):
        kept = np.where(out, -np.inf, row)
        losses.append(np.log(np.exp(kept - kept.max()).sum()) + kept.max() - row[label])
    return np.mean(losses)


def assert_taught(kind, student_BC, teacher_BC, shown, added):
    """0.3 times the distillation loss, at temperature 2, is shown and added."""
    if kind == "kl":
        expected = distillation_kl(student_BC, teacher_BC, 2.0)
    else:
        expected = margin_mse(student_BC, teacher_BC)
    assert expected > 0
    assert shown["distill_loss"].item() == pytest.approx(0.3 * expected.item(), rel=1e-4)
    assert added.item() == pytest.approx(0.3 * expected.item(), rel=1e-3)


DUAL_ROWS = [
    {"context": ["w1 w2", "w3"], "response": "w4"},
    {"context": ["w5"], "response": "w6 w7 w8"},
    {"context": ["w9 w10 w11"], "response": "w4"},
    {"context": ["w12"], "response": "w13"},
]


def test_only_a_batch_is_tokenised_not_the_window_it_is_drawn_from(tiny, monkeypatch):
    """The first step of a cross-encoder waited for 16,384 contexts and all their candidates."""
    ranker = tiny.ranker(architecture="cross")
    collator = PairCollator(ranker, 1)
    rows = [{"context": [f"w{n}"], "response": f"w{n + 1}"} for n in range(50)]
    tokenised = []
    for name in ("context_rows", "candidate_rows"):
        tokens_of = getattr(ranker, name)
        monkeypatch.setattr(
            ranker, name, lambda texts, of=tokens_of: tokenised.extend(texts) or of(texts)
        )
    items = collator.prepare(rows, torch.Generator())
    assert not tokenised
    batch = collator.collate(items[10:14])
    assert len(batch) == 4 and len(tokenised) == 4 * 3


def test_dual_batch_holds_contexts_and_their_responses(tiny):
    batch = collated(DualCollator(tiny.ranker()), DUAL_ROWS)
    for place, row in enumerate(DUAL_ROWS):
        assert texts_of(batch.contexts, place) == " ".join(row["context"])
        assert texts_of(batch.responses, place) == row["response"]
    keys = batch.keys_BS[:, 0].tolist()  # equal where the responses are
    assert [keys.index(key) for key in keys] == [0, 1, 0, 3]


@pytest.mark.parametrize("settings", [{"architecture": "bi"}, {"vector_length": 3.0}])
def test_matryoshka_loss_is_the_mean_of_the_losses_of_all_widths(tiny, settings):
    """Each as of a model whose vectors are cut to that width."""
    ranker = tiny.ranker(matryoshka=(3, 8), **settings)
    batch = collated(DualCollator(ranker), DUAL_ROWS)
    with torch.no_grad():
        loss, _ = DualModule(ranker.network)(batch)
        alone = []
        for width in (3, 8, 0):
            cut = tiny.ranker(matryoshka=(width,) if width else (), dimensions=width, **settings)
            cut.load_state_dict(ranker.state_dict())
            excluded = np.zeros((4, 4), bool)
            excluded[0, 2] = excluded[2, 0] = True
            vectors = cut.dual.encode_contexts(batch.contexts)
            scores = cut.dual.scores(*vectors, cut.dual.encode_candidates(batch.responses))
            alone.append(softmax_loss(scores.double().numpy(), range(4), excluded))
    assert len({round(one, 3) for one in alone}) == 3
    assert loss.item() == pytest.approx(np.mean(alone), rel=1e-4)


OWN = [
    {**row, "candidates": [f"w{20 + place}", row["response"], "w4", f"w{30 + place} w1"]}
    for place, row in enumerate(DUAL_ROWS)
]


def compared_texts(rows, place, wrong, negatives_from):
    """What the context of a row is compared with: its response, those of others, and wrong candidates."""
    others = [] if negatives_from == "given" else [row["response"] for row in rows]
    return [rows[place]["response"], *others[:place], *others[place + 1 :], *wrong]


@pytest.mark.parametrize(("negatives_from", "share"), [
    ("given", False), ("both", False), ("given", True), ("mined", True),
])  # fmt: skip
@pytest.mark.parametrize("architecture", ["bi", "poly"])
def test_dual_loss_over_given_candidates(tiny, architecture, negatives_from, share):
    """The softmax over each context's own two wrong ones, or those of all contexts (`share`), beside all
    responses of the batch or without them. Copies of the response do not count."""
    ranker = tiny.ranker(architecture=architecture)
    batch = collated(DualCollator(ranker, 2), OWN)
    wrong = [texts_of(batch.negatives, place) for place in range(8)]
    assert "w4" in wrong
    config = FinetuneConfig(negatives_from=negatives_from, share_negatives=share)
    loss, shown = DualModule(ranker.network, config)(batch)
    scores, excluded = [], []
    for place, row in enumerate(OWN):
        own = wrong[2 * place : 2 * place + 2]
        assert set(own) <= set(row["candidates"]) - {row["response"]}
        texts = compared_texts(OWN, place, wrong if share else own, negatives_from)
        scores.append(formula_scores(ranker, row["context"], texts))
        excluded.append([n > 0 and text == row["response"] for n, text in enumerate(texts)])
    assert loss.item() == pytest.approx(softmax_loss(scores, [0] * 4, excluded), rel=1e-4)
    kept = [np.where(out, -np.inf, row) for row, out in zip(scores, excluded, strict=True)]
    assert shown["accuracy"].item() == pytest.approx(np.mean([row.argmax() == 0 for row in kept]))


REPLIES = [  # rows 0 and 2 answer one context, rows 1 and 3 belong to one dialogue
    {"context": ["w1 w2"], "response": "w4", "group_id": "a", "candidates": ["w20", "w8"]},
    {"context": ["w5"], "response": "w6 w7", "group_id": "b", "candidates": ["w8"]},
    {"context": ["w1 w2"], "response": "w8", "group_id": "a", "candidates": ["w23", "w24"]},
    {"context": ["w12"], "response": "w13", "group_id": "b", "candidates": ["w25", "w26"]},
]
SAME_ANSWERS = {True: [{0, 2}, {1}, {0, 2}, {3}], False: [{0, 2}, {1, 3}, {0, 2}, {1, 3}]}


@pytest.mark.parametrize("same_group_negatives", [True, False])
@pytest.mark.parametrize("share", [False, True])
def test_other_replies_to_a_context_are_no_negatives_in_a_batch(tiny, same_group_negatives, share):
    """Nor those of the same dialogue where that is asked for; nor as another context's candidates."""
    ranker = tiny.ranker(architecture="bi")
    collator = DualCollator(ranker, 1, same_group_negatives=same_group_negatives)
    batch = collated(collator, REPLIES, seed=1)
    wrong = [texts_of(batch.negatives, place) for place in range(4)]
    config = FinetuneConfig(negatives_from="both", share_negatives=share)
    loss, _ = DualModule(ranker.dual, config)(batch)
    scores, excluded = [], []
    for place, same in enumerate(SAME_ANSWERS[same_group_negatives]):
        right = {REPLIES[number]["response"] for number in same}
        texts = [*(row["response"] for row in REPLIES), *(wrong if share else [wrong[place]])]
        scores.append(formula_scores(ranker, REPLIES[place]["context"], texts))
        excluded.append([n != place and text in right for n, text in enumerate(texts)])
    # The other candidate of row 0, w8, answers the same context in row 2; shared, that of row 1 does, too.
    assert wrong[:2] == ["w20", "w8"]
    assert loss.item() == pytest.approx(softmax_loss(scores, range(4), excluded), rel=1e-4)


def test_rows_with_the_same_answers_hold_them_once():
    """5,000 rows of one thread would hold 25 million texts."""
    answers = right_answers(REPLIES * 50, same_group_negatives=False)
    assert len({id(texts) for one in answers for texts in one.sets}) == 3 + 2  # contexts, groups
    for row, one in zip(REPLIES * 50, answers, strict=True):
        same = {"a": {"w4", "w8"}, "b": {"w6 w7", "w13"}}[row["group_id"]]
        assert {text for text in ("w4", "w6 w7", "w8", "w13", "w20") if text in one} == same


@pytest.mark.parametrize("same_group_negatives", [True, False])
def test_what_fills_up_is_no_other_reply_to_the_context(tiny, same_group_negatives):
    ranker = tiny.ranker(architecture="cross")
    collator = PairCollator(ranker, 6, same_group_negatives=same_group_negatives)
    batch = collated(collator, [{**row, "candidates": None} for row in REPLIES])
    for place, same in enumerate(SAME_ANSWERS[same_group_negatives]):
        right = {REPLIES[number]["response"] for number in same}
        assert set(candidates_of(batch, place)[1:]).isdisjoint(right)


def test_shared_negatives_have_the_loss_of_sentence_transformers(tiny):
    """MultipleNegativesRankingLoss of (anchor, positive, negatives), and its gradients."""
    losses = pytest.importorskip("sentence_transformers.losses")
    from sentence_transformers.util import dot_score

    ranker = tiny.ranker(architecture="bi")
    rows = [
        {"context": [f"w{n} w{n + 1}"], "response": f"w{20 + n}",
         "candidates": [f"w{30 + n} w{other}" for other in range(3)]}
        for n in range(6)
    ]  # fmt: skip
    batch = collated(DualCollator(ranker, 3), rows)
    config = FinetuneConfig(negatives_from="both", share_negatives=True)
    module = DualModule(ranker.dual, config)
    with torch.no_grad():
        encoded = module.encode(batch)
    floats = [tensor for tensor in encoded if tensor.is_floating_point()]
    for tensor in floats:
        tensor.requires_grad_()
    vectors_BVMD, _, own_BD, wrong_BKD = encoded
    ours, _ = module.loss(encoded, batch)
    gradients = torch.autograd.grad(ours, floats)
    reference = losses.MultipleNegativesRankingLoss(None, scale=1.0, similarity_fct=dot_score)
    columns = [vectors_BVMD[:, 0, 0], own_BD, *wrong_BKD.unbind(1)]
    theirs = reference.compute_loss_from_embeddings(columns, torch.arange(6))
    torch.testing.assert_close(ours, theirs)
    for own, other in zip(gradients, torch.autograd.grad(theirs, floats), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)
    alone, _ = DualModule(ranker.dual, replace(config, share_negatives=False)).loss(encoded, batch)
    assert alone < ours


def test_wrong_candidates_that_read_as_the_response_do_not_count(tiny):
    """Cut to their first tokens they are the same text to the model."""
    ranker = tiny.ranker(architecture="bi")
    same = "w1 " * 10
    row = {"context": ["w9"], "response": f"{same} w2", "candidates": [f"{same} w3", f"{same} w2"]}
    with torch.no_grad():
        loss, _ = DualModule(ranker.network, GIVEN)(collated(DualCollator(ranker, 1), [row]))
    assert loss.item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("negatives_from", "kind"), [("given", "margin_mse"), ("both", "kl")])
def test_a_teachers_scores_go_with_their_candidates(tiny, negatives_from, kind):
    """Wrong candidates are drawn in any order; what is filled up from the batch has no score."""
    ranker = tiny.ranker(architecture="bi")
    teacher = {f"w{n}": n / 7 for n in range(200)} | {f"w{30 + n} w1": -n / 3 for n in range(4)}
    rows = [
        {**row, "teacher_scores": [teacher.get(text, 1.5) for text in row["candidates"]]}
        for row in OWN
    ]
    batch = collated(DualCollator(ranker, 5, TEACHER_COLUMNS["candidates"]), rows)
    plain_config = FinetuneConfig(negatives_from=negatives_from)
    distill = Distillation(loss=kind, weight=0.3, temperature=2.0)
    with torch.no_grad():
        plain, _ = DualModule(ranker.dual, plain_config)(batch)
        loss, shown = DualModule(ranker.dual, replace(plain_config, distill=distill))(batch)
        students = []
        for place, row in enumerate(OWN):
            texts = [row["response"], *(texts_of(batch.negatives, 5 * place + n) for n in range(5))]
            vectors = inference.context_vectors(ranker, [row["context"]])
            candidates = inference.candidate_vectors(ranker, texts)
            students.append(ranker.dual.scores(*vectors, candidates)[0])
            given = dict(zip(row["candidates"], rows[place]["teacher_scores"], strict=True))
            scores = [given[text] for text in texts[:4] if text in given]
            assert batch.teacher_BC[place, : len(scores)].tolist() == pytest.approx(scores)
            assert batch.teacher_BC[place].isnan().sum() == 6 - len(set(row["candidates"]))
    student_BC = torch.stack(students)
    assert_taught(kind, student_BC, batch.teacher_BC, shown, loss - plain)


def taught(vectors_2BE, **more):
    """DUAL_ROWS with a teacher's vectors, contexts' first."""
    contexts_BE, responses_BE = vectors_2BE.astype("<f2")
    return [
        {
            **row,
            "teacher_context": context.tobytes(),
            "teacher_response": response.tobytes(),
            **more,
        }
        for row, context, response in zip(DUAL_ROWS, contexts_BE, responses_BE, strict=True)
    ]


@pytest.mark.parametrize(("architecture", "negatives_from", "kind"), [
    ("bi", "batch", "margin_mse"), ("poly", "both", "kl"),
])  # fmt: skip
def test_a_teachers_vectors_score_all_responses_of_the_batch(
    tiny, architecture, negatives_from, kind
):
    """The third response reads as the first one does: neither is a lesson for the other's context. Given
    candidates have no score."""
    ranker = tiny.ranker(architecture=architecture)
    contexts_BE, responses_BE = np.random.default_rng(0).normal(size=(2, 4, 3)).astype("<f2")
    rows = taught(np.stack([contexts_BE, responses_BE]), candidates=["w30"])
    batch = collated(DualCollator(ranker, 1, TEACHER_COLUMNS["batch"]), rows)
    plain_config = FinetuneConfig(negatives_from=negatives_from)
    distill = Distillation(loss=kind, over="batch", weight=0.3, temperature=2.0, teacher_scale=5.0)
    teacher_BC = 5 * contexts_BE.astype(float) @ responses_BE.astype(float).T
    teacher_BC[0, 2] = teacher_BC[2, 0] = np.nan
    first = [[n, *(other for other in range(4) if other != n)] for n in range(4)]  # the response
    with torch.no_grad():
        plain, _ = DualModule(ranker.dual, plain_config)(batch)
        loss, shown = DualModule(ranker.dual, replace(plain_config, distill=distill))(batch)
        vectors = inference.context_vectors(ranker, [row["context"] for row in DUAL_ROWS])
        candidates = inference.candidate_vectors(ranker, [row["response"] for row in DUAL_ROWS])
        student_BC = ranker.dual.scores(*vectors, candidates).numpy()
    student_BC, teacher_BC = (
        torch.from_numpy(np.take_along_axis(scores_BC, np.array(first), axis=1)).float()
        for scores_BC in (student_BC, teacher_BC)
    )
    assert_taught(kind, student_BC, teacher_BC, shown, loss - plain)


def test_the_cosine_loss_is_that_of_each_texts_two_vectors(tiny):
    """The teacher's lengths do not matter; equal vectors cost nothing."""
    ranker = tiny.ranker(architecture="bi")
    collator = DualCollator(ranker, 0, TEACHER_COLUMNS["batch"])
    length = ranker.dual.dimensions
    teacher_2BE = 3 * np.random.default_rng(0).normal(size=(2, 4, length)).astype("<f2")
    cosine = Distillation(loss="cosine", over="batch", weight=0.3)
    module = DualModule(ranker.dual, FinetuneConfig(distill=cosine))
    with torch.no_grad():
        batch = collated(collator, taught(teacher_2BE))
        plain, _ = DualModule(ranker.dual)(batch)
        loss, shown = module(batch)
        vectors_BVMD, _, responses_BD, _ = module.encode(batch)
        student_2BE = np.stack([vectors_BVMD[:, 0, 0].numpy(), responses_BD.numpy()])
        same, _ = module(collated(collator, taught(student_2BE)))
    student, teacher = student_2BE.astype(float), teacher_2BE.astype(float)
    norms = np.linalg.norm(student, axis=2) * np.linalg.norm(teacher, axis=2)
    cosines = (student * teacher).sum(axis=2) / norms
    expected = 0.3 * (1 - cosines).mean(axis=1).sum()
    assert shown["distill_loss"].item() == pytest.approx(expected, rel=1e-5)
    assert (loss - plain).item() == pytest.approx(expected, rel=1e-4)
    assert same.item() == pytest.approx(plain.item(), abs=1e-4)


def test_the_cosine_loss_refuses_a_teachers_vectors_of_another_length(tiny):
    ranker = tiny.ranker(architecture="bi")
    cosine = Distillation(loss="cosine", over="batch")
    module = DualModule(ranker.dual, FinetuneConfig(distill=cosine))
    batch = collated(DualCollator(ranker, 0, TEACHER_COLUMNS["batch"]), taught(np.ones((2, 4, 3))))
    with pytest.raises(
        BadInput, match=rf"vectors of 3 numbers .*allowed: {ranker.dual.dimensions},"
    ):
        module(batch)


@pytest.mark.parametrize("sizes", [(4, 0, 4, 0), (4, 4, 2, 6), (0, 0, 0, 0)])
def test_teachers_vectors_of_several_lengths_are_refused_not_cut_elsewhere(tiny, sizes):
    """Of a corpus that was joined from several; joined, two have as many numbers as four rows of 2 or 4.
    Where all are missing, the student would learn scores of 0."""
    rows = [
        {**row, "teacher_context": b"ab" * size, "teacher_response": b"ab" * 4}
        for row, size in zip(DUAL_ROWS, sizes, strict=True)
    ]
    counted = "4 of 0" if not any(sizes) else ".* 2 of 4"
    with pytest.raises(BadInput, match=rf"teacher_context: vectors of several lengths .*{counted}"):
        collated(DualCollator(tiny.ranker(), 0, TEACHER_COLUMNS["batch"]), rows)


@pytest.mark.parametrize("last", [None, ["w4", "w5"]])
def test_candidates_of_any_train_file_count_not_only_the_first_files(tiny, last):
    rows = [{"response": "w4", "candidates": given} for given in (None, [], None, last)]
    corpus = tiny.corpus(rows, rows_per_file=2, rows_per_group=1)
    assert has_values(corpus, "candidates") == bool(last)
    assert not has_values(corpus, "reply")


PAIR_ROWS = [
    {"context": ["w1 w2"], "response": "w3", "candidates": ["w4", "w5 w6", "w3", "w7"]},
    {"context": ["w8"], "response": "w9 w10", "candidates": None},
    {"context": ["w11"], "response": "w12", "candidates": ["w12", "w13"]},
    {"context": ["w14"], "response": "w3", "candidates": []},
]


def test_pair_loss_is_the_softmax_over_each_contexts_own_candidates(tiny):
    ranker = tiny.ranker(architecture="cross")
    batch = collated(PairCollator(ranker, 3), PAIR_ROWS)
    with torch.no_grad():
        loss, shown = PairModule(ranker.cross)(batch)
    contexts = [row["context"] for row in PAIR_ROWS]
    candidates = [candidates_of(batch, place) for place in range(4)]
    scores = torch.stack(inference.pair_scores(ranker, contexts, candidates)).double().numpy()
    expected = softmax_loss(scores, [0] * 4, np.zeros((4, 4), bool))
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    hits = scores.argmax(axis=1) == 0
    assert shown["accuracy"].item() == pytest.approx(hits.mean())


def test_a_cross_encoder_learns_from_a_teachers_scores_too(tiny):
    """Of candidates that were given; others, and rows without any, teach nothing."""
    ranker = tiny.ranker(architecture="cross")
    teacher = {"w3": 2.5, "w4": 1.0, "w5 w6": -1.0, "w7": 3.0, "w12": 0.5, "w13": -0.5}
    rows = [
        {**row, "teacher_scores": [teacher[text] for text in row["candidates"] or []] or None}
        for row in PAIR_ROWS
    ]
    collator = PairCollator(ranker, 3, TEACHER_COLUMNS["candidates"])
    assert "teacher_scores" in collator.columns
    batch = collated(collator, rows)
    given = [set(row["candidates"] or []) for row in rows]
    for place, scores_C in enumerate(batch.teacher_BC.tolist()):
        wanted = [teacher[text] if text in given[place] else np.nan
                  for text in candidates_of(batch, place)]  # fmt: skip
        assert scores_C == pytest.approx(wanted, nan_ok=True)
    config = Distillation(loss="kl", weight=0.3, temperature=2.0)
    with torch.no_grad():
        plain, _ = PairModule(ranker.cross)(batch)
        loss, shown = PairModule(ranker.cross, FinetuneConfig(distill=config))(batch)
        contexts = [row["context"] for row in rows]
        candidates = [candidates_of(batch, place) for place in range(4)]
        student_BC = torch.stack(inference.pair_scores(ranker, contexts, candidates))
    assert_taught("kl", student_BC, batch.teacher_BC, shown, loss - plain)


@pytest.mark.parametrize("architecture", ["bi", "cross"])
def test_a_scorer_of_one_number_is_never_right(tiny, architecture):
    """The label of a cross-encoder is always the first column: its accuracy of 1.0 was a collapse."""
    ranker = tiny.ranker(architecture=architecture)
    with torch.no_grad():
        for value in ranker.parameters():
            value.zero_()
        module, collator = objective(ranker, GIVEN)
        _, shown = module(collated(collator, PAIR_ROWS))
    assert shown["accuracy"].item() == 0.0


# Truncated to 12 tokens, the first candidate is the response.
SAME_TOKENS = {
    "context": ["w9"],
    "response": "w1 " * 12 + "w2",
    "candidates": ["w1 " * 12 + "w3", "w1 " * 12 + "w2", "w5", "w6"],
    "teacher_scores": [9.0, 2.0, 1.0, -1.0],
}


def test_a_pair_whose_candidate_reads_as_the_response_does_not_count(tiny):
    """Neither in the loss nor in the accuracy: the model cannot tell the two apart."""
    ranker = tiny.ranker(architecture="cross")
    batch = collated(PairCollator(ranker, 3), [SAME_TOKENS, SAME_TOKENS])
    texts = candidates_of(batch, 1)
    assert texts.count(texts[0]) == 2 and texts[0].startswith("w1 w1")
    excluded_BC = np.array([[n > 0 and text == own[0] for n, text in enumerate(own)]
                            for own in (candidates_of(batch, place) for place in range(2))])  # fmt: skip
    scores_BC = torch.where(torch.tensor(excluded_BC), 5.0, torch.tensor([1.0, -0.5, 0.5, 0.25]))
    loss, shown = PairModule(ranker.cross).loss([scores_BC], batch)
    assert loss.item() == pytest.approx(softmax_loss(scores_BC.numpy(), [0, 0], excluded_BC))
    assert shown["accuracy"].item() == 1.0
    second = batch.part(1, 2)
    assert torch.equal(second.key_BC, batch.key_BC[1:])


@pytest.mark.parametrize(("architecture", "kind"), [("bi", "kl"), ("cross", "margin_mse")])
def test_a_candidate_that_reads_as_the_response_teaches_nothing(tiny, architecture, kind):
    """Whatever its teacher's score, the loss is that of the candidates beside it."""
    ranker = tiny.ranker(architecture=architecture)
    losses = []
    for score in (9.0, -4.0, np.nan):
        row = {**SAME_TOKENS, "teacher_scores": [score, *SAME_TOKENS["teacher_scores"][1:]]}
        config = replace(GIVEN, distill=Distillation(loss=kind))
        module, collator = objective(ranker, config, teacher=TEACHER_COLUMNS["candidates"])
        with torch.no_grad():
            losses.append(module(collated(collator, [row]))[1]["distill_loss"].item())
    assert losses[0] > 0
    assert losses == pytest.approx([losses[2]] * 3)


@pytest.mark.parametrize("negatives", [1, 2, 6])
def test_negatives_are_the_given_ones_then_other_responses(tiny, negatives):
    batch = collated(PairCollator(tiny.ranker(architecture="cross"), negatives), PAIR_ROWS)
    responses = {row["response"] for row in PAIR_ROWS}
    for place, row in enumerate(PAIR_ROWS):
        found = candidates_of(batch, place)
        assert len(found) == negatives + 1
        assert found[0] == row["response"]
        assert found.count(row["response"]) == 1
        given = {text for text in row["candidates"] or [] if text != row["response"]}
        wrong = set(found) - {row["response"]}
        assert len(wrong & given) == min(negatives, len(given))
        assert wrong <= given | responses


def test_rows_with_one_response_in_all_still_make_a_batch(tiny):
    """Nothing else to choose from: better than to search for ever."""
    rows = [{"context": ["w1"], "response": "w2", "candidates": None}] * 3
    batch = collated(PairCollator(tiny.ranker(architecture="cross"), 2), rows)
    assert candidates_of(batch, 0) == ["w2", "w2", "w2"]


def test_moving_batches_takes_all_of_their_parts_along(tiny):
    meta = torch.device("meta")
    dual = collated(DualCollator(tiny.ranker()), DUAL_ROWS).to(meta)
    assert dual.contexts.ids_BT.is_meta
    assert dual.responses.mask_BT.is_meta
    assert dual.keys_BS.is_meta
    pair = collated(PairCollator(tiny.ranker(architecture="cross"), 1), PAIR_ROWS).to(meta)
    assert pair.pairs.segments_BT.is_meta
    assert pair.key_BC.is_meta
    assert pair.teacher_BC.is_meta


@pytest.mark.parametrize("settings", [
    {"architecture": "poly", "code_attention": "multi_head", "candidate_attention": "multi_head"},
    {"architecture": "poly", "projection": 8, "matryoshka": (4,), "vector_length": 2.0},
    {"architecture": "cross", "pooler": True},
])  # fmt: skip
def test_gradients_reach_every_weight_of_the_head(tiny, settings):
    ranker = tiny.ranker(**settings)
    module, collator = objective(ranker)
    module(collated(collator, PAIR_ROWS))[0].backward()
    head = {name: value for name, value in module.named_parameters() if "encoder." not in name}
    assert head
    for name, value in head.items():
        assert value.grad.isfinite().all(), name
        # Neither a key's bias nor the score's moves a softmax: all its logits move alike.
        assert value.grad.abs().max() > 1e-6 or name.endswith((".k.bias", "score.bias")), name


# A guide reads two words of a candidate: to it the first candidate of row 1 is the right response.
GUIDED = [
    {**row, "candidates": [f"w{40 + place}", row["response"], f"w{60 + place} w1"]}
    for place, row in enumerate([
        *DUAL_ROWS,
        *({"context": [f"w{70 + n} w{n}"], "response": f"w{80 + n}"} for n in range(8)),
    ])
]  # fmt: skip
GUIDED[1]["candidates"][0] = "w6 w7 w99"


def excluded_by(limits, scores_C):
    """By the rule of GISTEmbed, and of the limits; the first text is right. No score is near the limit."""
    right = scores_C[0]
    limit = right - limits.get("margin", 0.0)
    if right > 0:
        limit = min(limit, right * limits.get("max_share", 1.0))
    assert np.abs(scores_C[1:] - limit).min() > 1e-5
    return [False, *(scores_C[1:] > limit)]


@pytest.mark.parametrize(("negatives_from", "share"), [
    ("batch", False), ("given", False), ("mined", False), ("both", True),
])  # fmt: skip
@pytest.mark.parametrize(("architecture", "limits"), [
    ("bi", {"margin": 0.02}), ("poly", {"margin": 0.02, "max_share": 0.9}),
])  # fmt: skip
def test_what_a_guide_scores_above_the_limit_is_no_negative(
    tiny, architecture, limits, negatives_from, share
):
    """Beside what is no negative without a guide: copies of the right response."""
    ranker = tiny.ranker(architecture="bi", share_towers=True)
    reads = tiny.ranker(architecture=architecture, max_candidate_tokens=4)
    guide, given = Guide(reads, GuideLimits(**limits)), 0 if negatives_from == "batch" else 2
    batch = collated(DualCollator(ranker, given, guide=guide), GUIDED)
    wrong = [texts_of(batch.negatives, place) for place in range(given * len(GUIDED))]
    config = FinetuneConfig(negatives_from=negatives_from, share_negatives=share)
    module = DualModule(ranker.dual, config, guide)
    loss, shown = guided(backward, guide)(module, batch, nullcontext())
    scores, excluded, guide_alone, negatives = [], [], 0, 0
    for place, row in enumerate(GUIDED):
        own = wrong[given * place : given * (place + 1)]
        texts = compared_texts(GUIDED, place, wrong if share else own, negatives_from)
        is_copy = [n > 0 and text == row["response"] for n, text in enumerate(texts)]
        by_guide = excluded_by(limits, np.array(formula_scores(reads, row["context"], texts)))
        if given and place == 1:
            assert by_guide[texts.index("w6 w7 w99")]  # the false negative
        scores.append(formula_scores(ranker, row["context"], texts))
        excluded.append(np.array(is_copy) | by_guide)
        guide_alone += sum(excluded[-1]) - sum(is_copy)
        negatives += len(texts) - 1
    assert 0 < guide_alone < negatives
    assert loss.item() == pytest.approx(softmax_loss(scores, [0] * 12, excluded), rel=1e-5)
    assert shown["guide_excludes"].item() == pytest.approx(guide_alone / negatives)


def test_a_guide_of_a_cross_encoder_reads_its_candidates(tiny):
    ranker, reads = (tiny.ranker(architecture=name) for name in ("cross", "bi"))
    limits = {"margin": 0.01}
    guide = Guide(reads, GuideLimits(**limits))
    batch = collated(PairCollator(ranker, 3, guide=guide), PAIR_ROWS)
    loss, shown = guided(backward, guide)(
        PairModule(ranker.cross, guide=guide), batch, nullcontext()
    )
    candidates = [candidates_of(batch, place) for place in range(4)]
    contexts = [row["context"] for row in PAIR_ROWS]
    scores = torch.stack(inference.pair_scores(ranker, contexts, candidates)).double().numpy()
    excluded = [
        excluded_by(limits, np.array(formula_scores(reads, row["context"], texts)))
        for row, texts in zip(PAIR_ROWS, candidates, strict=True)
    ]
    assert 0 < np.mean(excluded) < 0.75
    assert loss.item() == pytest.approx(softmax_loss(scores, [0] * 4, excluded), rel=1e-5)
    assert shown["guide_excludes"].item() == pytest.approx(np.sum(excluded) / 12)


def test_a_guide_that_tells_no_texts_apart_changes_no_bit_of_the_loss(tiny):
    """Nor is it trained, or saved with the module."""
    ranker, reads = tiny.ranker(architecture="poly"), tiny.ranker(architecture="bi")
    with torch.no_grad():
        for value in reads.parameters():
            value.zero_()
    guide = Guide(reads, GuideLimits())
    batch = collated(DualCollator(ranker, 2, guide=guide), GUIDED)
    config = FinetuneConfig(negatives_from="both", share_negatives=True)
    module, plain = DualModule(ranker.dual, config, guide), DualModule(ranker.dual, config)
    assert module.state_dict().keys() == plain.state_dict().keys()
    loss, shown = guided(backward, guide)(module, batch, nullcontext())
    assert torch.equal(loss, plain(batch)[0])
    assert shown["guide_excludes"] == 0
    assert all(value.grad is None for value in reads.parameters())

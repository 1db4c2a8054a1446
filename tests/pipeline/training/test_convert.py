"""ConveRT's loss, and its training on the loop from raw examples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.config import BadInput
from pipeline.evaluation.questions import Question, Questions
from pipeline.models import inference
from pipeline.models.convert_rt.tokenizer import save_vocabulary
from pipeline.models.ranker import load_ranker, new_ranker
from pipeline.models.settings import ConvertConfig
from pipeline.models.sources import External
from pipeline.training.data import DualCollator
from pipeline.training.finetuning import Finetuning, Validation
from pipeline.training.loop import Listener, train
from pipeline.training.objectives import DualModule
from pipeline.training.settings import FinetuneConfig, LoopConfig
from tests.helpers import collated

CPU = torch.device("cpu")
SMALL = {
    "buckets": 5, "width": 16, "windows": (1, 4), "attention_width": 4, "intermediate": 32, "hidden": (16,),
    "reduction_width": 4, "encoding_width": 16, "max_context_tokens": 12, "max_candidate_tokens": 12,
    "anneal_steps": 20, "range_every_steps": 5,
}  # fmt: skip
ROWS = [
    {"context": ["w1", "w2"], "response": "w3"},
    {"context": ["w4"], "response": "w5 w6"},
    {"context": ["w7", "w8", "w9"], "response": "w3"},
    {"context": ["w2"], "response": "w9"},
]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabulary")
    save_vocabulary(["﹏", *"0123456789", "﹏w"], folder)
    return folder


def smoothed_loss(scores_BC, excluded_BC, smoothing):
    """Per row, in float64: the target has 1 - ε more at the diagonal than ε over all that count."""
    losses = []
    for place, (row, out) in enumerate(zip(scores_BC, excluded_BC, strict=True)):
        kept = np.flatnonzero(~out)
        target = np.where(kept == place, 1 - smoothing, 0) + smoothing / len(kept)
        largest = row[kept].max()
        log_sum = largest + np.log(np.exp(row[kept] - largest).sum())
        losses.append((target * (log_sum - row[kept])).sum())
    return np.array(losses)


@pytest.mark.parametrize("earlier", [0, 10])
def test_the_loss_is_the_sum_of_what_each_encoding_of_a_context_ranks(vocabulary, earlier):
    config = ConvertConfig(**{**SMALL, "earlier_turns": earlier, "quantised": False})
    ranker = new_ranker(config, vocabulary, seed=0)
    ranker.network.before_step(7)
    scale = 1 + (np.sqrt(16) - 1) * 7 / 20
    batch = collated(DualCollator(ranker), ROWS)
    with torch.no_grad():
        loss, shown = DualModule(ranker.dual, FinetuneConfig(label_smoothing=0.2))(batch)
        views = ranker.dual.context_views(batch.contexts)
        h_y = ranker.dual.encode_candidates(batch.responses).double().numpy()
    excluded_BC = np.zeros((4, 4), bool)
    excluded_BC[0, 2] = excluded_BC[2, 0] = True  # the same response
    has_view = [[True] * 4] * 2 + [[True, False, True, False]] if earlier else [[True] * 4]
    losses = []
    for view, present in zip(views, has_view, strict=True):
        scores_BC = scale * view.vectors_BMD[:, 0].double().numpy() @ h_y.T
        losses.append((smoothed_loss(scores_BC, excluded_BC, 0.2) * present).mean())
    assert loss.item() == pytest.approx(sum(losses), rel=1e-5)
    found, _ = inference.context_vectors(ranker, [row["context"] for row in ROWS])
    ranked = np.where(excluded_BC, -np.inf, found[:, 0].numpy() @ h_y.T).argmax(axis=1)
    assert shown["accuracy"].item() == pytest.approx((ranked == np.arange(4)).mean())


def test_the_validation_loss_scales_cosines_as_the_training_loss_does(vocabulary):
    config = ConvertConfig(**{**SMALL, "earlier_turns": 0, "quantised": False})
    ranker = new_ranker(config, vocabulary, seed=0)
    ranker.precision = "fp32"
    ranker.network.before_step(7)
    scale = 1 + (np.sqrt(16) - 1) * 7 / 20
    asked = [Question(f"e{n}", [f"w{n}"], [f"w{n + 1}", f"w{n + 2}"], n % 2) for n in range(6)]
    losses, hits = [], []
    for question in asked:
        vectors, _ = inference.context_vectors(ranker, [question.context])
        candidates = inference.candidate_vectors(ranker, question.candidates).double().numpy()
        scores = scale * candidates @ vectors[0, 0].double().numpy()
        losses.append(np.log(np.exp(scores - scores[question.label]).sum()))
        hits.append(scores.argmax() == question.label)
    found = Validation(ranker, Questions.of(asked), 0, 1)().metrics
    assert found == {"r1": pytest.approx(np.mean(hits)), "loss": pytest.approx(np.mean(losses))}


def finetuning(tiny, vocabulary, rows, loop, **settings):
    config = ConvertConfig(**{**SMALL, **settings})
    finetune = FinetuneConfig(batch_examples=16, epochs=100, max_steps=100, label_smoothing=0.1)
    return Finetuning(tiny.corpus(rows), External(str(vocabulary), ""), config, finetune, loop)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("adadelta", marks=pytest.mark.long)])
def test_a_multi_context_model_learns_from_raw_examples_and_keeps_it_in_8_bits(
    tiny, vocabulary, tmp_path, optimizer
):
    """Of two turns one says which response is right, the earlier or the newest one."""
    rows = [
        {"context": [f"w{a}", f"w{b}"], "response": f"w{a}w{b}"} for a in range(8) for b in range(8)
    ]
    rate = {"adamw": 0.01, "adadelta": 1.0}[optimizer]
    loop = LoopConfig(
        optimizer=optimizer, betas=(0.9, 0.999), epsilon=1e-6, learning_rate=rate, warmup_steps=10,
        initial_rate_share=0.1, schedule="cosine", final_rate_share=0.001, head_lr_factor=1.0,
        token_tables="apart", weight_decay=1e-5, precision="fp32", log_every_steps=50,
    )  # fmt: skip
    task = finetuning(tiny, vocabulary, rows, loop, earlier_turns=10).build(0, 1)
    losses = []
    listener = Listener(lambda step, metrics: losses.append(metrics["loss"]))
    train(task, task.module, loop, CPU, 0, listener)
    assert losses[-1] < losses[0]
    assert task.ranker.network.training_scale.item() == pytest.approx(4.0)
    task.save(tmp_path)
    loaded = load_ranker(tmp_path)
    candidates = inference.candidate_vectors(loaded, [row["response"] for row in rows])
    contexts, _ = inference.context_vectors(loaded, [row["context"] for row in rows])
    best = (contexts[:, 0] @ candidates.T).argmax(dim=1)
    accuracy = (best == torch.arange(64)).float().mean().item()
    assert accuracy > 0.5, "chance is 1/64; the newest turn alone gives 1/8"


@pytest.mark.parametrize(("name", "value"), [("keep_layers", 1), ("dropout", 0.1),
                                             ("train_layers", "top")])  # fmt: skip
def test_settings_of_a_pretrained_encoder_and_the_encoder_are_refused(
    tiny, vocabulary, name, value
):
    config = FinetuneConfig(batch_examples=2, **{name: value})
    for folder, message in (
        (vocabulary, f"finetune.{name}.*'convert'"),
        (tiny.encoder_folder(), "no vocabulary of subwords"),
    ):
        source, corpus = External(str(folder), ""), tiny.corpus(ROWS)
        recipe = Finetuning(corpus, source, ConvertConfig(**SMALL), config, LoopConfig())
        with pytest.raises(BadInput, match=message):
            recipe.build(0, 1)

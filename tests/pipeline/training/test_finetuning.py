"""What a recipe of fine-tuning makes: tasks, layers, steps, folds; what it refuses."""

from __future__ import annotations

import re
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from pipeline.artifact import Artifact
from pipeline.config import BadInput
from pipeline.evaluation.questions import Question, Questions
from pipeline.models import inference
from pipeline.models.encoder import Encoder, has_dropout, prepare_for_training
from pipeline.models.pretraining_heads import NEXT_HEAD
from pipeline.models.ranker import load_ranker
from pipeline.models.settings import ranker_config
from pipeline.models.sources import External, Tower
from pipeline.training import finetuning
from pipeline.training.data import teacher_dimensions
from pipeline.training.finetuning import Finetuning, Validation
from pipeline.training.loop import Listener, train
from pipeline.training.settings import Distillation, FinetuneConfig, GuideLimits, LoopConfig

pytestmark = pytest.mark.usefixtures("fp32")


def test_a_teacher_of_another_length_is_refused_before_the_first_step(tiny):
    """The first file has no vectors, as in a corpus that was joined from several."""
    rows = [{"response": "w4", "teacher_context": vector, "teacher_response": vector}
            for vector in (None, None, b"ab" * 5)]  # fmt: skip
    corpus = tiny.corpus(rows, rows_per_file=1)
    assert teacher_dimensions(corpus) == 5
    assert teacher_dimensions(tiny.corpus([{"response": "w4"}])) == 0
    taught = replace(
        recipe(tiny, architecture="bi", distill=Distillation(loss="cosine", over="batch")),
        corpus=corpus,
    )
    with pytest.raises(
        BadInput, match=r"finetune.distill.loss: 'cosine' .* have 5 numbers and the"
    ):
        taught.build(0, 1)


_NO_TEACHER = "has nothing of jobs.score_candidates --teaching.over"


@pytest.mark.parametrize(("settings", "message"), [
    ({"share_negatives": True, "negatives_from": "batch"}, "finetune.share_negatives: True is not allowed; "
     "allowed: false with finetune.negatives_from 'batch', which shares all that there are"),
    ({"share_negatives": True, "negatives_from": "given", "architecture": "cross"},
     "allowed: false with ranker.architecture 'cross', which would score every pair"),
    ({"distill": ("kl", "candidates"), "architecture": "cross"}, f"{_NO_TEACHER} candidates"),
    ({"distill": ("kl", "candidates")}, "finetune.distill.loss: 'kl' is not allowed; allowed: 'none', with "
     "finetune.negatives_from 'batch' and finetune.distill.over 'candidates'"),
    ({"distill": ("kl", "candidates"), "negatives_from": "mined"}, "finetune.negatives_from 'mined'"),
    ({"distill": ("kl", "batch")}, f"{_NO_TEACHER} batch"),
    ({"distill": ("kl", "batch"), "negatives_from": "given"}, "finetune.negatives_from 'given'"),
    ({"distill": ("kl", "batch"), "architecture": "cross"}, "finetune.distill.over: 'batch' is not allowed; "
     "allowed: candidates with ranker.architecture 'cross'"),
    ({"distill": ("cosine", "candidates"), "architecture": "bi"}, "finetune.distill.over: 'candidates' is "
     "not allowed; allowed: batch with finetune.distill.loss 'cosine'"),
    ({"distill": ("cosine", "batch")}, "allowed: kl, margin_mse, as a context has 3 vectors"),
    ({"distill": ("cosine", "candidates"), "architecture": "cross", "negatives_from": "given"},
     "allowed: kl, margin_mse with ranker.architecture 'cross'"),
    ({"negatives_from": "mined", "architecture": "cross"}, "finetune.negatives_from: 'mined' is not allowed; "
     "allowed: 'batch'"),
    ({"negatives_from": "both"}, "gives no candidates in train/"),
    ({"negatives_from": "mined", "epochs": 1}, "finetune.mine.every_epochs: 1.0 is not allowed; allowed: "
     "less: it is 5 steps, and the run has 5"),
    ({"rows_per_file": 20, "folds": 3}, "finetune.folds: 3 is not allowed; allowed: 1 to 2, the files of"),
    ({"encoder": {"layers": 3}, "keep_layers": 4}, "finetune.keep_layers: 4 is not allowed; allowed: 0 to 3, "
     "the encoder's layers"),
    ({"lora_rank": 2, "train_layers": "top"}, "finetune.train_layers: 'top' is not allowed; allowed: 'all'"),
    ({"lora_alpha": 3.0}, "finetune.lora_alpha: 3.0 is not allowed; allowed: 16.0 with finetune.lora_rank 0"),
    ({"world": 9}, "finetune.batch_examples: 8 is not allowed; allowed: at least the 9 workers"),
    ({"batch_examples": 41}, "too few for a batch of 41"),
])  # fmt: skip
def test_settings_that_do_not_fit_each_other_or_the_corpus_are_refused(tiny, settings, message):
    settings = {"world": 1, **settings}
    if distill := settings.pop("distill", None):
        settings["distill"] = Distillation(loss=distill[0], over=distill[1])
    world = settings.pop("world")
    with pytest.raises(BadInput, match=re.escape(message)):
        recipe(tiny, **settings).build(0, world)


@pytest.mark.parametrize("architecture", ["bi", "cross"])
def test_without_a_teacher_no_file_is_opened_for_its_scores(tiny, monkeypatch, architecture):
    """None has any, so a corpus of ten thousand files would be gone through by every worker."""
    asked = []
    monkeypatch.setattr(finetuning, "has_values", lambda *args: asked.append(args))
    recipe(tiny, architecture=architecture, negatives_from="batch").build(0, 1)
    assert not asked


@pytest.mark.parametrize(
    ("architecture", "negatives_from"), [("poly", "mined"), ("cross", "given")]
)
def test_a_guide_reads_every_batch_and_is_not_saved(tiny, tmp_path, architecture, negatives_from):
    """Also what is mined, and in chunks."""
    tiny.ranker(architecture="bi").save(tmp_path / "guide")
    loop = LoopConfig(precision="fp32", log_every_steps=1)
    settings = {"architecture": architecture, "negatives_from": negatives_from, "negatives": 2,
                "chunk_examples": 3, "epochs": 2, "loop": loop}  # fmt: skip
    rows = [{"context": [f"w{n}"], "response": f"w{n + 50}", "candidates": [f"w{n + 100}", "w3", "w4"]}
            for n in range(16)]  # fmt: skip
    plain = replace(recipe(tiny, **settings), corpus=tiny.corpus(rows))
    shown, weights = [], []
    for guide, margin in ((None, 0.0), (External(str(tmp_path / "guide"), ""), 0.05)):
        made = replace(plain, guide=guide)
        made = replace(made, finetune=replace(made.finetune, guide=GuideLimits(margin=margin)))
        task, metrics = made.build(0, 1), []
        listener = Listener(lambda step, shown, to=metrics: to.append(shown))
        train(task, task.module, made.loop, torch.device("cpu"), 0, listener)
        task.save(tmp_path / str(margin))
        shown.append([step.get("guide_excludes") for step in metrics])
        weights.append(load_ranker(tmp_path / str(margin)).state_dict())
    assert shown[0] == [None] * 4
    assert all(0 < share < 1 for share in shown[1])
    assert weights[0].keys() == weights[1].keys()
    assert any(not torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_a_guide_that_reads_both_texts_together_is_refused(tiny, tmp_path):
    tiny.ranker(architecture="cross").save(tmp_path)
    with pytest.raises(BadInput, match="'cross'"):
        replace(recipe(tiny), guide=External(str(tmp_path), "")).build(0, 1)


def recipe(
    tiny, count=40, architecture="poly", encoder=None, rows_per_file=1000, loop=None, **finetune
):
    rows = [{"context": [f"w{number}"], "response": f"w{number + 50}"} for number in range(count)]
    ranker = ranker_config({
        "architecture": architecture, "m": 3, "max_context_tokens": 24, "max_candidate_tokens": 12,
    })  # fmt: skip
    settings = {"batch_examples": 8, **finetune}
    source = External(str(tiny.encoder_folder(**encoder or {})), "")
    corpus = tiny.corpus(rows, rows_per_file=rows_per_file)
    return Finetuning(corpus, source, ranker, FinetuneConfig(**settings), loop or LoopConfig())


@pytest.mark.parametrize(("settings", "steps"), [
    ({"epochs": 1.5}, 8), ({"epochs": 0}, 0), ({"max_steps": 4}, 4), ({"max_steps": 400}, 15),
])  # fmt: skip
def test_steps_are_epochs_up_to_a_limit(tiny, settings, steps):
    made = recipe(tiny, **settings)
    assert made.build(0, 1).steps == steps


def test_a_fold_is_held_out(tiny):
    """50 rows in five files: of three folds, the first two have two files each."""
    common = {"count": 50, "rows_per_file": 10, "folds": 3, "batch_examples": 2}
    held_out = []
    for fold, wanted in enumerate(([0, 3], [1, 4], [2])):
        made = recipe(tiny, held_out=fold, **common)
        assert made.held_out() == [f"train/{10 * file:06}.parquet" for file in wanted]
        held_out += made.held_out()
        rows = made.build(0, 1).batches.rows
        read = rows.epoch(0).read(0, len(rows))["response"].to_pylist()
        out = {f"w{50 + 10 * file + n}" for file in wanted for n in range(10)}
        assert set(read) == {f"w{50 + n}" for n in range(50)} - out
        assert len(read) == len(set(read))
    assert sorted(held_out) == recipe(tiny, **{**common, "folds": 1}).corpus.paths("train/")
    assert recipe(tiny, **{**common, "folds": 1}).held_out() == []


@pytest.mark.parametrize(("kind", "same_corpus", "held_out", "unseen"), [
    ("ranker", True, [1, 2], [1]), ("ranker", True, [], []), ("ranker", False, [], [1, 3]),
    ("encoder", True, [], []), ("tokenizer", True, [], [1, 3]),
    ("ranker of an encoder", True, [], []), ("ranker of an encoder", False, [], [1, 3]),
])  # fmt: skip
def test_what_the_model_that_one_starts_from_has_read_is_not_unseen(
    tiny, kind, same_corpus, held_out, unseen
):
    """It read what was made of the corpus, such as scores of a teacher. The corpus of a ranker may be another
    one than that of its encoder. A tokenizer has learnt no answers."""

    def paths(files):
        return [f"train/{10 * file:06}.parquet" for file in files]

    made = recipe(tiny, rows_per_file=10, folds=2, held_out=1)
    assert made.unseen() == made.held_out() == paths([1, 3])
    read = made.corpus if same_corpus else tiny.corpus([{}])
    made_of_it = {"kind": "corpus" if kind == "ranker" else "tokens", "fingerprint": "made of it",
                  "inputs": {"corpus": read.reference()}}  # fmt: skip
    inputs = {"corpus" if kind == "ranker" else "corpus.0": made_of_it}
    if kind == "ranker of an encoder":
        encoder = {"kind": "encoder", "fingerprint": "encoder", "inputs": inputs}
        inputs = {"corpus": tiny.corpus([{}]).reference(), "encoder": encoder}
    kind = kind.split()[0]
    start = Artifact("start", {"kind": kind, "fingerprint": "start", "inputs": inputs})
    start.manifest["held_out"] = paths(held_out)
    source = Tower(start) if kind == "ranker" else start
    assert replace(made, encoder=source).unseen() == paths(unseen)


def test_only_new_heads_learn_faster(tiny, tmp_path):
    """A cross-encoder's score that comes from a next-utterance head is pre-trained, as its encoder is."""
    shutil.copytree(tiny.encoder_folder(), tmp_path / "encoder")
    save_file(
        {"weight": torch.ones(1, 16), "bias": torch.ones(1)}, tmp_path / "encoder" / NEXT_HEAD
    )

    def faster(folder, **ranker):
        config = ranker_config({"max_context_tokens": 24, "max_candidate_tokens": 12, **ranker})
        made = replace(recipe(tiny), encoder=External(str(folder), ""), ranker=config)
        task = made.build(0, 1)
        names = {id(value): name for name, value in task.module.named_parameters()}
        groups = task.optimize().optimizer.param_groups
        return {names[id(value)].removeprefix("network.") for group in groups
                for value in group["params"] if group["factor"] == 10.0}  # fmt: skip

    score = {"score.weight", "score.bias"}
    assert faster(tiny.encoder_folder(), architecture="bi") == set()
    new, pretrained = tiny.encoder_folder(), tmp_path / "encoder"
    assert faster(new, architecture="cross") == score
    assert faster(pretrained, architecture="cross") == set()
    assert faster(pretrained, architecture="cross", pooler=True) == (
        score | {"pooler.weight", "pooler.bias"}
    )
    assert faster(pretrained, architecture="poly", m=3) == {"codes_MD"}


def test_the_responses_that_are_mined_are_not_those_held_out(tiny):
    made = recipe(tiny, 40, rows_per_file=10, folds=2, held_out=1, negatives_from="mined",
                  negatives=3, batch_examples=4)  # fmt: skip
    task = made.build(0, 1)
    task.miner()
    mined = {text for place in range(20) for text in task.miner.negatives_of(place)}
    assert mined and mined <= {f"w{50 + n}" for n in (*range(10), *range(20, 30))}


def test_dropout_can_be_switched_off(tiny, tmp_path):
    """A saved ranker has the dropout of its encoder again."""
    for dropout, same in ((0.0, True), (0.3, False), (None, False)):
        task = recipe(tiny, dropout=dropout).build(0, 1)
        batch = next(task.batches.start())[0]
        task.module.train()
        losses = {task.module(batch)[0].item() for _ in range(2)}
        assert (len(losses) == 1) is same
        task.save(tmp_path / str(dropout))
        assert has_dropout(load_ranker(tmp_path / str(dropout)))


FROZEN = {
    "all": (),
    "all_but_embeddings": ("embeddings.",),
    "top4": ("embeddings.", "layer.0.", "layers.0."),
    "top": ("embeddings.", *(f"layer{s}.{place}." for s in ("", "s") for place in range(4))),
}


@pytest.mark.parametrize(("architecture", "encoder", "layers"), [
    ("cross", "bert", "all"), ("poly", "modernbert", "all_but_embeddings"), ("poly", "bert", "top4"),
    ("cross", "modernbert", "top"),
])  # fmt: skip
def test_layers_that_do_not_train_stay_as_they_are(tiny, encoder, architecture, layers):
    """Five layers: those below and the embeddings get no gradient and no optimizer state."""
    shape = {"layers": 5, "architecture": encoder, "dropout": 0.0}
    config = LoopConfig(learning_rate=0.1, warmup_steps=0, weight_decay=0.1)
    made = recipe(
        tiny,
        architecture=architecture,
        encoder=shape,
        loop=config,
        train_layers=layers,
        max_steps=1,
    )
    task = made.build(0, 1)
    names = dict(task.module.named_parameters())
    frozen = {name for name in names if any(f".{part}" in name for part in FROZEN[layers])}
    assert bool(frozen) is (layers != "all")
    before = {name: value.detach().clone() for name, value in names.items()}
    states = []
    listener = Listener(checkpoint=lambda state, cursor: states.append(state["optimizer"]))
    train(task, task.module, config, torch.device("cpu"), 0, listener)
    moved = {name for name in names if not torch.equal(names[name], before[name])}
    trained = set(names) - frozen
    # Added to all scores of a softmax, it has no gradient but for rounding.
    assert trained - {"network.score.bias"} <= moved <= trained
    held = sum(len(group["params"]) for group in states[0]["param_groups"])
    assert held == len(trained)


@pytest.mark.parametrize(("architecture", "encoder"), [("poly", "modernbert"), ("cross", "bert")])
def test_a_ranker_of_the_first_layers(tiny, encoder, architecture, tmp_path):
    """Its towers end where the whole one's hidden states do, are saved so, and are trained all."""
    shape = {"layers": 5, "architecture": encoder, "dropout": 0.0}
    config = LoopConfig(learning_rate=1e-6, warmup_steps=0)
    made = recipe(
        tiny, architecture=architecture, encoder=shape, loop=config, keep_layers=2, max_steps=1
    )
    task = made.build(0, 1)
    whole = AutoModel.from_pretrained(made.encoder.local()).eval()
    ids_BT = torch.tensor([[1, 5, 9, 7, 2]])
    with torch.no_grad():
        expected_BTD = whole(ids_BT, output_hidden_states=True).hidden_states[2]
        if encoder == "modernbert":
            expected_BTD = whole.final_norm(expected_BTD)
    train(task, task.module, config, torch.device("cpu"), 0, Listener())
    task.save(tmp_path)
    folders = [path.parent for path in tmp_path.glob("*/config.json")]
    assert len(folders) == (1 if architecture == "cross" else 2)
    for folder in folders:
        tower, report = AutoModel.from_pretrained(folder, output_loading_info=True)
        assert tower.config.num_hidden_layers == 2
        assert not report["unexpected_keys"]
        with torch.no_grad():
            torch.testing.assert_close(
                tower.eval()(ids_BT).last_hidden_state, expected_BTD, rtol=0, atol=1e-3
            )


@pytest.mark.parametrize(
    ("ranker", "encoder"),
    [
        ({"architecture": "poly", "m": 3, "share_towers": True}, "bert"),
        ({"architecture": "bi"}, "modernbert"),
        ({"architecture": "cross"}, "bert"),
    ],
)
def test_adapters_train_beside_weights_that_stay_and_are_merged_in_the_end(
    tiny, ranker, encoder, tmp_path
):
    """The saved ranker is a plain one, and scores as the trained one does."""
    pytest.importorskip("peft")
    config = LoopConfig(learning_rate=0.01, warmup_steps=0)
    made = recipe(
        tiny,
        encoder={"architecture": encoder},
        loop=config,
        lora_rank=2,
        lora_alpha=8.0,
        max_steps=3,
    )
    lengths = {"max_context_tokens": 24, "max_candidate_tokens": 12}
    made = replace(made, ranker=ranker_config({**ranker, **lengths}))
    task = made.build(0, 1)
    prepare_for_training(task.module, torch.device("cpu"))
    before = {name: value.detach().clone() for name, value in task.module.named_parameters()}
    assert train(task, task.module, config, torch.device("cpu"), 0, Listener())
    parameters = dict(task.module.named_parameters())
    moved = {name for name, value in parameters.items() if not torch.equal(value, before[name])}
    adapters = {name for name in parameters if ".lora_" in name}
    heads = {name for name in parameters if "encoder." not in name}
    towers = 2 if ranker["architecture"] == "bi" else 1
    linear_layers = {"bert": 6, "modernbert": 4}[encoder]  # of each of the two layers
    assert len(adapters) == 2 * 2 * linear_layers * towers
    # Added to all scores of a softmax, it has no gradient but for rounding.
    assert (adapters | heads) - {"network.score.bias"} <= moved <= adapters | heads

    batch = next(task.batches.start())[0]
    with torch.inference_mode():
        expected = task.module.eval().encode(batch)
        task.save(tmp_path)
        saved = load_ranker(tmp_path)
        found = replace(made, finetune=FinetuneConfig(batch_examples=8)).build(0, 1).module.eval()
        found.network.load_state_dict(saved.network.state_dict())
        for one, other in zip(found.encode(batch), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert sum(value.numel() for value in saved.parameters()) == task.parameters
    start = load_file(made.encoder.local() / "model.safetensors")
    changed = [
        name
        for folder in (path.parent for path in tmp_path.glob("*/config.json"))
        for name, value in load_file(folder / "model.safetensors").items()
        if not torch.equal(value, start[name])
    ]
    assert len(changed) == 2 * linear_layers * towers


def test_adapters_learn_alike_packed_padded_in_chunks_and_where_layers_are_computed_again(tiny):
    pytest.importorskip("peft")
    rows = [{"context": [f"w{n}"] * (1 + n % 7), "response": f"w{n + 50}"} for n in range(8)]

    def gradients(change=lambda encoder: None, **finetune):
        made = recipe(tiny, lora_rank=2, dropout=0.0, **finetune)
        task = replace(made, corpus=tiny.corpus(rows)).build(0, 1)
        prepare_for_training(task.module, torch.device("cpu"))
        change(task.ranker.dual.context_encoder)
        batch = next(task.batches.start())[0]
        task.backward(task.module.train(), batch, nullcontext())
        return {name: value.grad for name, value in task.module.named_parameters()}

    expected = gradients()
    assert any(value is not None and value.any() for value in expected.values())
    padded = gradients(lambda encoder: setattr(encoder, "packs", False))
    for other in (padded, gradients(Encoder.recompute_layers), gradients(chunk_examples=3)):
        for name, value in expected.items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_adapters_learn_as_fast_as_new_heads(tiny):
    pytest.importorskip("peft")
    task = recipe(tiny, lora_rank=2).build(0, 1)
    names = {id(value): name for name, value in task.module.named_parameters()}
    groups = task.optimize().optimizer.param_groups
    factors = {names[id(value)]: group["factor"] for group in groups for value in group["params"]}
    assert set(factors.values()) == {10.0}
    assert {name for name in factors if ".lora_" not in name} == {"network.codes_MD"}


def test_without_its_package_adapters_are_refused_in_one_line(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        BadInput, match=r"finetune.lora_rank: 2 needs the package peft; pip install"
    ):
        recipe(tiny, lora_rank=2).build(0, 1)
    recipe(tiny).build(0, 1)


def asked_with(counts) -> list[Question]:
    """Questions with so many candidates each, two at least."""
    return [
        Question(f"e{n}", [f"w{n}"], [f"w{n + other} w7" for other in range(0, 10 * count, 10)], n % 2)
        for n, count in enumerate(counts)
    ]  # fmt: skip


@pytest.mark.parametrize("architecture", ["poly", "cross"])
def test_r1_and_loss_are_those_of_the_scores(tiny, architecture):
    """Of questions with 2, 3 or 4 candidates. Two ranks' shares, put together, are the whole."""
    ranker = tiny.ranker(architecture=architecture)
    listed = asked_with([2 + n % 3 for n in range(11)])
    hits, losses = [], []
    for question in listed:
        if architecture == "cross":
            (scores,) = inference.pair_scores(ranker, [question.context], [question.candidates])
        else:
            vectors = inference.context_vectors(ranker, [question.context])
            candidates = inference.candidate_vectors(ranker, question.candidates)
            scores = ranker.dual.scores(*vectors, candidates)[0].detach()
        row = scores.double().numpy()
        hits.append(int(row.argmax()) == question.label)
        losses.append(np.log(np.exp(row - row[question.label]).sum()))
    asked = Questions.of(listed)
    found = Validation(ranker.train(), asked, 0, 1)()
    assert found.metrics["r1"] == pytest.approx(np.mean(hits))
    assert found.metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    parts = [Validation(ranker, asked, rank, 2)() for rank in (0, 1)]
    whole = sum(part.metrics["r1"] * size for part, size in zip(parts, (6, 5), strict=True)) / 11
    assert whole == pytest.approx(found.metrics["r1"])
    assert 0 < found.metrics["r1"] < 1 or architecture != "poly"

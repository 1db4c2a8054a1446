"""Two gloo ranks pre-train what one does: whole weights (DistributedDataParallel) or sharded ones (FSDP2)."""

from __future__ import annotations

import itertools
import pickle
import weakref
from dataclasses import replace
from itertools import islice
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForMaskedLM

from pipeline.training.checkpoint import is_sharded, read_saved, read_state, weights_of, write_saved
from pipeline.training.launch import distribute
from pipeline.training.loop import Listener, train
from pipeline.training.settings import LoopConfig
from tests.helpers import run_in_processes

CPU, WORLD, STEPS, HALF = torch.device("cpu"), 2, 4, 2
OBJECTIVES = ("joint", "alternate", "contrastive_mlm")


def gradients(recipe, rank, world):
    """Of the first two steps, without an update between them, and the micro-batches of each."""
    task = recipe.build(rank, world)
    model = DistributedDataParallel(task.module) if world > 1 else task.module
    found, walk = [], task.batches.start(())
    for step, (batch, _) in enumerate(islice(walk, 2)):
        task.module.zero_grad()
        task.before_step(step)
        task.backward(model, batch, torch.autocast("cpu", enabled=False))
        found.append({name: value.grad.clone() for name, value in task.module.named_parameters()})
    walk.close()
    return found


def trained(recipe, rank, world, *, shard=False, disk=None, start=None, terminated=lambda: False):
    """The whole weights after the last step, and the losses by step."""
    task, losses = recipe.build(rank, world), {}
    if shard:
        with patch.object(nn.Module, "to", side_effect=AssertionError("moved as a whole")):
            model = distribute(task.module, CPU, shard=True)
        assert is_sharded(model)
    else:
        model = DistributedDataParallel(task.module) if world > 1 else task.module

    def checkpoint(state, cursor):
        if disk is not None:
            folder = disk / str(state["step"])
            folder.mkdir(parents=True, exist_ok=True)
            write_saved(folder, state, cursor, rank, world)

    listener = Listener(
        losses.__setitem__, checkpoint,
        is_terminated=terminated,
    )  # fmt: skip
    train(
        task, model, recipe.loop, CPU, rank, listener, lambda: read_saved(start) if start else None
    )
    return {"weights": {k: v.clone() for k, v in weights_of(task.module).items()}, "shown": losses}


def gathered_at_once(recipe, rank):
    """The most whole tensors on the device while the weights of sharded ones are copied."""
    module = distribute(recipe.build(rank, WORLD).module, CPU, shard=True)
    gather, gathered, counts = DTensor.full_tensor, weakref.WeakSet(), []

    def counted(tensor):
        whole = gather(tensor)
        gathered.add(whole)
        counts.append(len(gathered))
        return whole

    with patch.object(DTensor, "full_tensor", counted):
        weights = weights_of(module)
    assert len(weights) == len(counts) > 10
    return max(counts)


def work(folder, rank):
    """One of the two processes."""
    recipes = pickle.loads((folder / "recipes").read_bytes())
    found = {
        f"gradients {objective}": gradients(recipes[objective], rank, WORLD)
        for objective in OBJECTIVES
    }
    for name, shard in {"whole": False, "sharded": True}.items():
        found[name] = trained(recipes["dropout"], rank, WORLD, shard=shard, disk=folder / name)
    dist.barrier()
    start = folder / "whole" / str(HALF)
    found["sharded from whole"] = trained(recipes["dropout"], rank, WORLD, shard=True, start=start)
    found["gathered at once"] = gathered_at_once(recipes["dropout"], rank)
    last_only, step = folder / "terminated", itertools.count(1)
    found["terminated"] = trained(
        replace(recipes["dropout"], loop=replace(recipes["dropout"].loop, checkpoint_every_steps=99)),
        rank, WORLD, disk=last_only, terminated=lambda: rank == 1 and next(step) == STEPS - 1,
    )  # fmt: skip
    torch.save(found, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def recipes(pretraining):
    """By objective, without dropout; "dropout": joint, with it, validated after every second step."""
    # A gradient that is 0 but for rounding (of the key's bias) must not become a step of Adam.
    loop = LoopConfig(
        precision="fp32", learning_rate=0.003, epsilon=1e-4, warmup_steps=2, log_every_steps=1,
        checkpoint_every_steps=HALF, validate_every_steps=2, stop_after_validations=0,
        schedule="constant",
    )  # fmt: skip
    config = replace(pretraining.pretrain, steps=STEPS)
    recipe = replace(pretraining, pretrain=config, loop=loop)
    sizes = {
        "contrastive_mlm": {"batch_tokens": 480, "micro_batch_tokens": 120}
    }  # four of three pairs
    made = {
        name: replace(recipe, pretrain=replace(config, objective=name, **sizes.get(name, {})))
        for name in OBJECTIVES
    }
    # The gradients of layers that are computed again are the oracle's, too.
    alternate = made["alternate"]
    made["alternate"] = replace(
        alternate, pretrain=replace(alternate.pretrain, gradient_checkpointing=True)
    )
    return {**made, "dropout": replace(recipe, start=replace(recipe.start, dropout=0.2))}


@pytest.fixture(scope="module")
def folder(recipes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "recipes").write_bytes(pickle.dumps(recipes))
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    """What each of the two processes found."""
    run_in_processes(work, folder, WORLD, timeout_s=200)
    return [torch.load(folder / f"{number}.pt", weights_only=True) for number in range(WORLD)]


@pytest.fixture(scope="module")
def alone(recipes, folder):
    """One process, uninterrupted."""
    return trained(recipes["dropout"], 0, 1, disk=folder / "alone")


def assert_close(found, wanted, tolerance=1e-5):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance, msg=name)


def oracle(recipe, folder):
    """Gradients of both steps by plain `transformers` in float64, each global batch at once."""
    task = recipe.build(0, 1)
    task.module.save(folder)
    found = []
    for batch, _ in islice(task.batches.start(()), 2):
        plain = AutoModelForMaskedLM.from_pretrained(folder).double().eval()
        head = torch.nn.Linear(16, 1).double()
        head.load_state_dict(task.module.next.state_dict())
        longest = max(part.tokens.ids_BT.shape[1] for part in batch.parts)

        def together(tensors, longest=longest):
            padded = [F.pad(value, (0, longest - value.shape[1])) for value in tensors]
            return torch.cat(padded)

        tokens = [part.tokens for part in batch.parts]
        ids, mask = (
            together([getattr(one, name).long() for one in tokens])
            for name in ("ids_BT", "mask_BT")
        )
        segments = torch.zeros_like(ids)
        if tokens[0].segments_BT is not None:
            segments = together([one.segments_BT for one in tokens])
        out = plain(ids, attention_mask=mask, token_type_ids=segments, output_hidden_states=True)
        labels = [
            torch.full(part.tokens.ids_BT.shape, -100).flatten().index_put(
                (part.predicted_N,), part.labels_N
            ).view_as(part.tokens.ids_BT)
            if part.predicted_N is not None
            else None
            for part in batch.parts
        ]  # fmt: skip
        loss = torch.zeros((), dtype=torch.float64)
        if labels[0] is not None:
            wanted = torch.cat(
                [F.pad(one, (0, longest - one.shape[1]), value=-100) for one in labels]
            )
            loss = loss + F.cross_entropy(out.logits.flatten(0, 1), wanted.flatten())
        if batch.parts[0].is_next_B is not None:
            wanted = torch.cat([part.is_next_B for part in batch.parts]).double()
            logits = head(out.hidden_states[-1][:, 0])[:, 0]
            loss = loss + F.binary_cross_entropy_with_logits(logits, wanted)
        if batch.parts[0].answer_keys_BS is not None:
            loss = loss + contrastive_loss(out.hidden_states[-1], mask, batch.parts)
        loss.backward()
        named = {
            **dict(plain.named_parameters()),
            "next.weight": head.weight,
            "next.bias": head.bias,
        }
        found.append({name: value.grad for name, value in named.items()})
    return found


def contrastive_loss(hidden, mask, parts):
    """The mean over all pairs; each chooses among the responses of its own micro-batch."""
    means = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
    losses, start = [], 0
    for part in parts:
        half = part.pair_count
        contexts, responses = means[start : start + half], means[start + half : start + 2 * half]
        start += 2 * half
        scores = 20 * F.cosine_similarity(contexts[:, None], responses[None], dim=2)
        losses.append(F.cross_entropy(scores, torch.arange(half), reduction="none"))
    return torch.cat(losses).mean()


def theirs(name):
    """Our parameter's name, as `transformers` has it."""
    if name.startswith("encoder.hf."):
        return name.replace("encoder.hf.", "bert.", 1)
    return name.removeprefix("mlm.")


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradients_do_not_depend_on_ranks_or_micro_batches(recipes, ranks, tmp_path, objective):
    """Of four micro-batches with unequal numbers of predicted tokens; float32 against float64."""
    recipe = recipes[objective]
    batch = next(recipe.build(0, 1).batches.start(()))[0]
    if recipe.pretrain.predicts_tokens(step=0):
        assert len({part.predicted_count for part in batch.parts}) > 1
    if recipe.pretrain.single_texts:
        assert [part.pair_count for part in batch.parts] == [3] * 4
    wanted = oracle(recipe, tmp_path)
    one = gradients(recipe, 0, 1)
    for found in (one, *(rank[f"gradients {objective}"] for rank in ranks)):
        for step in (0, 1):
            for name, gradient in found[step].items():
                true = wanted[step][theirs(name)]
                true = torch.zeros_like(gradient) if true is None else true.float()
                torch.testing.assert_close(gradient, true, rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("name", ["whole", "sharded"])
def test_two_ranks_train_what_one_does(ranks, alone, name):
    """With dropout, which is seeded by micro-batch; the best weights by validation are left."""
    for rank in ranks:
        assert_close(rank[name]["weights"], alone["weights"])
        assert_close(rank["sharded from whole"]["weights"], alone["weights"])
        for step, shown in alone["shown"].items():
            for metric in ("loss", "mlm_loss", "next_loss", "gradient_norm", "valid_loss"):
                if metric in shown:
                    found = rank[name]["shown"][step][metric]
                    assert found == pytest.approx(shown[metric], abs=1e-4), (step, metric)


def test_all_ranks_end_at_the_step_in_which_one_is_terminated(recipes, ranks, folder, alone):
    """And have saved it: the run continues from there."""
    assert [list(rank["terminated"]["shown"]) for rank in ranks] == [[1, 2, 3]] * WORLD
    (saved,) = (folder / "terminated").iterdir()
    assert saved.name == "3"
    resumed = trained(recipes["dropout"], 0, 1, start=saved)
    assert list(resumed["shown"]) == [STEPS]
    assert_close(resumed["weights"], alone["weights"])


def test_sharded_weights_are_copied_tensor_by_tensor(ranks):
    """For encoders that do not fit on one GPU."""
    assert [rank["gathered at once"] for rank in ranks] == [1, 1]


def test_one_rank_goes_on_from_the_checkpoint_of_two_with_sharded_weights(
    recipes, ranks, folder, alone
):
    """Sharded weights are saved as whole ones."""
    assert ranks
    states = [read_state(folder / name / str(HALF)) for name in ("alone", "sharded")]
    assert_close(states[1]["module"], states[0]["module"])
    resumed = trained(recipes["dropout"], 0, 1, start=folder / "sharded" / str(HALF))
    assert sorted(resumed["shown"]) == list(range(HALF + 1, STEPS + 1))
    assert_close(resumed["weights"], alone["weights"])
    for step, shown in resumed["shown"].items():
        assert shown["loss"] == pytest.approx(alone["shown"][step]["loss"], abs=1e-3)

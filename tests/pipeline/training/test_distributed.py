"""Two processes with half a batch each learn what one process learns from the whole batch."""

from __future__ import annotations

import pickle
import string
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pipeline.models import precision
from pipeline.models.convert_rt.tokenizer import MARK, save_vocabulary
from pipeline.models.ranker import load_ranker, new_ranker
from pipeline.models.settings import ranker_config
from pipeline.training import loop, negatives
from pipeline.training.data import TEACHER_COLUMNS, DualCollator, Epoch, Rows, example_columns
from pipeline.training.guide import Guide
from pipeline.training.loop import agree_on_precision
from pipeline.training.negatives import Miner
from pipeline.training.objectives import (
    DualModule,
    backward,
    cached_backward,
    gather,
    guided,
)
from pipeline.training.settings import Distillation, FinetuneConfig, GuideLimits, Mining
from tests.helpers import collated, run_in_processes

KINDS = {
    "bi_shared": {"architecture": "bi", "share_towers": True},
    "poly": {"architecture": "poly"},
    # Its last attention is used by the loss alone.
    "poly_heads": {"architecture": "poly", "candidate_attention": "multi_head"},
    # One rank alone has a context with an earlier turn.
    "convert": {
        "architecture": "convert", "earlier_turns": 2, "width": 16, "windows": (2, 4),
        "attention_width": 4, "intermediate": 24, "reduction_width": 6, "hidden": (12,),
        "encoding_width": 8, "anneal_steps": 0,
    },
}  # fmt: skip
# What a context is compared with beside both ranks' responses: wrong candidates of both ranks' contexts, or
# a teacher's vectors of both, or a guide's.
SHARED = {
    "bi_shared": {
        "negatives_from": "both",
        "share_negatives": True,
        "guide": GuideLimits(margin=0.01),
    },
    "poly": {"negatives_from": "both", "share_negatives": True, "distill": Distillation(loss="kl")},
    "poly_heads": {"negatives_from": "given", "share_negatives": True},
    "convert": {"distill": Distillation(loss="kl", over="batch")},
}
CASES = [*((kind, False) for kind in KINDS), *((kind, True) for kind in SHARED)]
WORLD = 2
CHUNKS = (0, 2)  # of the three rows on each rank; 0: all at once
# The third and the last response are the same text, on different ranks: no negatives of each other.
ROWS = [
    {"context": ["w1 w2", "w3"], "response": "w4"},
    {"context": ["w5"], "response": "w6 w7 w8 w9"},
    {"context": ["w10 w11 w12 w13"], "response": "w14 w15"},
    {"context": ["w16 w17"], "response": "w18 w19 w20"},
    {"context": ["w21"], "response": "w22"},
    {"context": ["w23 w24 w25 w26 w27"], "response": "w14 w15"},
]


# "w22" and "w4" are responses on the other rank: neither is a negative there.
WRONG = [
    ["w22", "w30"], ["w31", "w32"], ["w33", "w34 w35"], ["w4", "w36"], ["w37", "w38"], ["w39", "w40"],
]  # fmt: skip
# A teacher has scored candidates of one context of the first rank, and of all three of the second.
GIVEN = [
    {**row, "candidates": [*wrong, row["response"]],
     "teacher_scores": [n / 3, 1.0, 2.0] if n > 1 else None,
     "teacher_context": np.array([n, 1], "<f2").tobytes(),
     "teacher_response": np.array([-1, n / 2], "<f2").tobytes()}
    for n, (row, wrong) in enumerate(zip(ROWS, WRONG, strict=True))
]  # fmt: skip


def ranker_to_train(folder, kind):
    """`load_ranker` freezes ConveRT's tables."""
    if kind != "convert":
        return load_ranker(folder / kind)
    ranker = new_ranker(ranker_config(KINDS[kind]), folder / kind, seed=0)
    ranker.network.before_step(0)  # sets the ranges of its tables
    return ranker.eval()


def losses_and_gradients(folder, kind, own_rank, world, chunk=0, shared=False):
    """One step's mean loss over all ranks, and the gradients after it."""
    ranker = ranker_to_train(folder, kind)
    if shared:
        config, guide = FinetuneConfig(**SHARED[kind]), None
        if "guide" in SHARED[kind]:
            guide = Guide(load_ranker(folder / "poly"), config.guide)
        over = config.distill.over
        module, given = DualModule(ranker.network, config, guide), GIVEN
        count = 2 if over == "candidates" else 0
        collator = DualCollator(ranker, count, TEACHER_COLUMNS[over], guide=guide)
    else:
        module, collator, given = DualModule(ranker.network), DualCollator(ranker), ROWS
        guide = None
    model = DistributedDataParallel(module) if world > 1 else module
    share = len(ROWS) // world
    rows = given[own_rank * share : (own_rank + 1) * share]
    batch = collated(collator, rows)
    run = cached_backward(module, chunk) if chunk else backward
    run = guided(run, guide) if guide else run
    loss, shown = run(model, batch, nullcontext())
    means = torch.stack([loss, shown["accuracy"], shown.get("guide_excludes", loss)])
    if world > 1:
        dist.all_reduce(means)
    gradients = {name: value.grad for name, value in module.named_parameters()}
    return {"means": means / world, "gradients": gradients}


def mined(folder, own_rank, world, state=None):
    """What a miner finds in its second round, what it keeps of the first, and the contexts it reads.

    Neither its 11 responses nor its 15 contexts are shared out evenly. With the `state` of a first round
    it goes on from there.
    """
    corpus = pickle.loads((folder / "corpus").read_bytes())
    rows = Rows.of(corpus, "train", example_columns(True), 0, 1, seed=0)
    config = Mining(responses=9, top_k=5, max_share=1.0)
    miner = Miner(load_ranker(folder / "poly"), rows, config, 1, own_rank, world)
    contexts, read, search = [], Epoch.read, Miner._search

    def recorded(epoch, start, stop):
        contexts.append((start, stop))
        return read(epoch, start, stop)

    def recorded_search(*args):
        with patch.object(Epoch, "read", recorded):
            search(*args)

    with (
        patch.object(Miner, "_search", recorded_search),
        patch.object(negatives, "_ROWS_AT_ONCE", 3),
    ):
        if state:
            miner.load(state)
        else:
            miner()
            state = miner.state()
        first = [miner.negatives_of(place) for place in range(len(rows))]
        miner()
    second = [miner.negatives_of(place) for place in range(len(rows))]
    return {"first": first, "second": second, "state": state, "contexts": contexts}


def waited_share(seconds):
    """What a meter reads after 10 seconds on a clock of its own, of which the rank waited for data."""
    now = [0.0]

    def pass_time(duration):
        now[0] += duration

    with patch.object(loop, "time", SimpleNamespace(perf_counter=lambda: now[0])):
        of_rank = loop.Meter()
        of_rank.time_wait(pass_time, seconds)
        pass_time(10 - seconds)
        return of_rank.read()[0]["data_wait_share"]


def precisions(own_rank):
    """The agreed precision for each setting, where only the first rank's hardware multiplies in bf16."""
    with patch.object(precision, "use_bf16", lambda device: own_rank == 0):
        device = torch.device("cpu")
        return {name: agree_on_precision(name, device) for name in ("auto", "bf16", "fp32")}


def work(folder, own_rank):
    """One of the two processes."""
    found = {
        f"{kind} {shared} {chunk}": losses_and_gradients(
            folder, kind, own_rank, WORLD, chunk, shared
        )
        for kind, shared in CASES
        for chunk in CHUNKS
    }
    rows = torch.full((2, 3), float(own_rank), requires_grad=True)
    gathered = gather(rows)
    (gathered * torch.arange(4.0)[:, None] * (own_rank + 1)).sum().backward()
    found["gather"] = {
        "with_gradient": gathered.detach(),
        "without": gather(rows.detach()),
        "gradient": rows.grad,
    }
    found["mined"] = mined(folder, own_rank, WORLD)
    found["precision"] = precisions(own_rank)
    found["waited"] = waited_share((1.0, 4.0)[own_rank])
    torch.save(found, folder / f"{own_rank}.pt")


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    for kind, config in KINDS.items():
        if kind == "convert":
            (folder / kind).mkdir()
            save_vocabulary([MARK, *string.ascii_lowercase, *string.digits], folder / kind)
        else:
            tiny.ranker(**config).save(folder / kind)
    rows = [{"context": [f"w{n}"], "response": f"w{50 + n % 11} w3"} for n in range(15)]
    corpus = tiny.corpus(rows, rows_per_file=10, rows_per_group=4)
    (folder / "corpus").write_bytes(pickle.dumps(corpus))
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    """What each of the two processes found."""
    run_in_processes(work, folder, WORLD, timeout_s=120)
    return [torch.load(folder / f"{number}.pt", weights_only=True) for number in range(WORLD)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shared"), CASES)
def test_loss_and_gradients_are_those_of_one_process(folder, ranks, kind, shared):
    """At once or in chunks. One process has all negatives, and a teacher's vectors, in its batch."""
    alone = losses_and_gradients(folder, kind, 0, 1, shared=shared)
    assert alone["means"][0] > 0.1
    for found in (made[f"{kind} {shared} {chunk}"] for made in ranks for chunk in CHUNKS):
        torch.testing.assert_close(found["means"], alone["means"])
        assert found["gradients"].keys() == alone["gradients"].keys()
        for name, gradient in alone["gradients"].items():
            ours = found["gradients"][name]
            # Where large terms cancel, float32 is off by their size. ConveRT's subwords have gradients of up
            # to 24, and both sides are 4e-5 from those of float64; AVX2 rounds other sums than AVX-512.
            atol = 1e-6 * max(1.0, float(gradient.abs().max()))
            torch.testing.assert_close(ours, gradient, rtol=1e-4, atol=atol, msg=name)


def test_all_ranks_gather_the_same_rows_in_their_order_and_the_sum_of_the_gradients(ranks):
    expected = torch.tensor([[0.0] * 3] * 2 + [[1.0] * 3] * 2)
    for number, found in enumerate(ranks):
        assert torch.equal(found["gather"]["with_gradient"], expected)
        assert torch.equal(found["gather"]["without"], expected)
        # Row r is multiplied by r on the first rank and by 2 r on the second.
        rows = torch.tensor([[0.0], [1.0]]) + 2 * number
        assert torch.equal(found["gather"]["gradient"], (3 * rows).expand(2, 3))


def test_the_share_of_waiting_is_that_of_the_rank_that_waits_longest(ranks):
    """The first rank, which reports to the driver, waits a tenth of the time."""
    assert [found["waited"] for found in ranks] == [0.4, 0.4]


def test_ranks_mine_together_what_one_process_mines(folder, ranks):
    alone = mined(folder, 0, 1)
    for name in ("first", "second"):
        assert len(alone[name]) == 15 and max(map(len, alone[name])) == 5
        assert [found["mined"][name] for found in ranks] == [alone[name]] * WORLD
    assert alone["first"] != alone["second"]
    again = mined(folder, 0, 1, ranks[1]["mined"]["state"])  # goes on from what two ranks mined
    assert (again["first"], again["second"]) == (alone["first"], alone["second"])
    # Row groups of four: the first rank's share of the contexts are eight rows, the other's seven.
    assert ranks[0]["mined"]["contexts"] == [(0, 4), (4, 8)] * 2
    assert ranks[1]["mined"]["contexts"] == [(8, 10), (10, 14), (14, 15)] * 2


def test_all_ranks_train_in_the_precision_that_all_of_them_have(ranks):
    for found in ranks:
        assert found["precision"] == {"auto": "fp32", "bf16": "bf16", "fp32": "fp32"}

"""Nodes that die while jobs run: every job ends with what one node makes, without any kill.

    python -m pytest -m long tests/cluster/test_chaos.py       POLYRANK_KILLS=10: so many runs of each job

Four nodes of one core on this machine, each a raylet of its own. A run kills one of them at a random
moment, and the others go on without it. Where the driver was connected to the node that died, the same
command is given again.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.artifact import open_artifact
from pipeline.models.sources import External

from .conftest import ROOT, Nodes, nodes_of_one_core

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
NODES = 4
RUNS = int(os.environ.get("POLYRANK_KILLS", "1"))
JOBS = ("corpus", "embed", "finetune", "pretrain")
_ATTEMPTS = 4


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with nodes_of_one_core(NODES) as made:
        yield made


@dataclass(frozen=True)
class Ended:
    """A job that came to its end."""

    summary: dict[str, Any]
    seconds: float
    attempts: int


def run_on(
    address: str, command: list[str], later: Callable[[subprocess.Popen[str]], None] | None = None
) -> Ended:
    """Runs a job, and again where it failed. `later`: called once, when the first attempt has begun."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if address:
        environment |= {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}
    began = time.monotonic()
    output = ""
    for attempt in range(1, _ATTEMPTS + 1):
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if later and attempt == 1:
            later(process)
        try:
            output, _ = process.communicate(timeout=400)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode != 2, output
        if process.returncode == 0:
            lines = [line for line in output.splitlines() if line.startswith('{"job"')]
            return Ended(json.loads(lines[-1]), time.monotonic() - began, attempt)
    raise AssertionError(output)


@pytest.fixture(scope="module")
def commands(
    tiny_ranker, convai2_corpus, reddit_corpus, tokenize_in_process, tmp_path_factory
) -> dict[str, list[str]]:
    """Each job without its output."""
    folder = tmp_path_factory.mktemp("chaos-input")
    dump = [sys.executable, "-m", "jobs.generate_dump", "--comments", "60000", "--files", "3",
            "--output", str(folder / "dump")]  # fmt: skip
    subprocess.run(dump, cwd=ROOT, check=True, capture_output=True)
    rows = ({"id": str(number), "text": f"text {number} " * 5} for number in range(6000))
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = tiny_ranker("bi")
    tokenizer = External(str(model.local() / "context_encoder"), "")
    tokens = tokenize_in_process(reddit_corpus, tokenizer, folder / "tokens", valid_share=0.1)
    found = {
        "corpus": ("prepare_corpus", "--corpus", "reddit", "--authors", "plain",
                   "--input", folder / "dump", "--reddit.bucket-mib", 1),
        "embed": ("embed_pool", "--model", model.uri, "--candidates", folder / "texts.jsonl",
                  "--name", "texts", "--embed.rows-per-shard", 250,
                  "--resources.actors", 2, "--resources.cpus-per-actor", 1),
        "finetune": ("finetune", "--corpus", convai2_corpus.uri, "--encoder", model.uri,
                     "--ranker.architecture", "bi", "--ranker.max-context-tokens", 48,
                     "--finetune.batch-examples", 8, "--finetune.max-steps", 150,
                     "--loop.checkpoint-every-steps", 10, "--loop.precision", "fp32",
                     "--loop.validate-every-epochs", 0, "--resources.workers", 2,
                     "--resources.cpus-per-worker", 1),
        "pretrain": ("pretrain", "--corpus", tokens.artifact.uri, "--shape.layers", 1,
                     "--shape.width", 16, "--shape.heads", 2, "--shape.positions", 96,
                     "--pretrain.batch-tokens", 480, "--pretrain.micro-batch-tokens", 120,
                     "--pretrain.max-context-tokens", 40, "--pretrain.max-response-tokens", 20,
                     "--pretrain.steps", 120, "--pretrain.window-rows", 64,
                     "--loop.warmup-steps", 10, "--loop.precision", "fp32",
                     "--loop.epsilon", 1e-4, "--loop.checkpoint-every-steps", 10,
                     "--loop.validate-every-steps", 0, "--loop.validate-every-epochs", 0,
                     "--resources.workers", 2, "--resources.cpus-per-worker", 1),
    }  # fmt: skip
    return {
        name: [sys.executable, "-m", f"jobs.{verb}", *map(str, options)]
        for name, (verb, *options) in found.items()
    }


def to(name: str, folder: Path) -> list[str]:
    return ["--pools" if name == "embed" else "--output", str(folder)]


@pytest.fixture(scope="module")
def alone(commands, tmp_path_factory) -> Callable[[str], Ended]:
    """What one node makes of each job."""
    found: dict[str, Ended] = {}

    def run(name: str) -> Ended:
        if name not in found:
            folder = tmp_path_factory.mktemp(f"alone-{name}") / "out"
            found[name] = run_on("", [*commands[name], *to(name, folder)])
        return found[name]

    return run


@pytest.fixture(scope="module")
def on_four(nodes, commands, tmp_path_factory) -> Callable[[str], Ended]:
    """What four nodes make of each job when none dies."""
    found: dict[str, Ended] = {}

    def run(name: str) -> Ended:
        if name not in found:
            folder = tmp_path_factory.mktemp(f"four-{name}") / "out"
            found[name] = run_on(nodes.address, [*commands[name], *to(name, folder)])
        return found[name]

    return run


def is_same(name: str, one: Ended, other: Ended) -> bool:
    """Corpora and pools: the same bytes. Weights: the same but for the order of sums."""
    if name in ("corpus", "embed"):
        return bool(one.summary["fingerprint"] == other.summary["fingerprint"])
    kind = "ranker" if name == "finetune" else "encoder"
    left, right = (
        {file.relative_to(folder): load_file(file) for file in folder.rglob("*.safetensors")}
        for folder in (open_artifact(each.summary["output"], kind).local() for each in (one, other))
    )
    assert left.keys() == right.keys() and left
    return all(
        torch.allclose(value, right[file][weight], rtol=1e-4, atol=1e-5)
        for file, weights in left.items()
        for weight, value in weights.items()
    )


@pytest.mark.parametrize("name", JOBS)
def test_four_nodes_make_what_one_makes(on_four, alone, name):
    ended = on_four(name)
    assert ended.attempts == 1
    assert is_same(name, alone(name), ended)


@pytest.mark.parametrize("run", range(RUNS))
@pytest.mark.parametrize("name", JOBS)
def test_a_node_that_dies_changes_nothing(nodes, commands, on_four, alone, name, run, tmp_path):
    undisturbed = on_four(name).seconds
    chance = random.Random(f"{name} {run}")
    # Before, the job looks at its input. A job's last part, such as its publishing, is not hit.
    moment = chance.uniform(0.2, 0.6) * undisturbed
    victim = chance.randrange(NODES)
    for attempt in range(_ATTEMPTS):  # a job that is faster this time may end first
        out = to(name, tmp_path / f"out-{attempt}")
        ended, has_died = _run_and_kill(nodes, [*commands[name], *out], moment, victim)
        if has_died:
            break
        moment /= 2
    assert has_died, "the job ended each time before a node died"
    print(f"{name} {run}: a node died after {moment:.1f} s; {ended.seconds:.1f} s in all, "
          f"{undisturbed:.1f} s undisturbed; {ended.attempts} attempts")  # fmt: skip
    assert is_same(name, alone(name), ended)


def _run_and_kill(
    nodes: Nodes, command: list[str], moment: float, victim: int
) -> tuple[Ended, bool]:
    """(the job's end, whether the node died before it)"""
    timers: list[threading.Timer] = []
    died: list[float] = []

    def later(process: subprocess.Popen[str]) -> None:
        def kill() -> None:
            if process.poll() is None:
                nodes.kill(victim)
                died.append(moment)

        timers.append(threading.Timer(moment, kill))
        timers[0].daemon = True
        timers[0].start()

    ended = run_on(nodes.address, command, later)
    for timer in timers:
        timer.cancel()
        timer.join()
    while len(nodes.workers) < NODES:  # not by the timer: only the main thread may start a node
        nodes.add()
    return ended, bool(died)

"""Nodes that die while jobs run: every job ends with what one node makes, without any kill.

    python -m pytest -m long tests/cluster/test_chaos.py       POLYRANK_KILLS=10: so many kills of each job

Four nodes of one core on this machine, each a raylet of its own. Twice in a run one of them dies at a random
moment, the others go on, and a new one joins. If the driver was connected to the node that died, the same
command is given again.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
KILLS_OF_A_RUN = 2
RUNS = -(-int(os.environ.get("POLYRANK_KILLS", "2")) // KILLS_OF_A_RUN)
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


Event = tuple[float, Callable[[], None]]
"""(seconds after the beginning, what happens then)"""


def run_on(address: str, command: list[str], log: Path, events: Sequence[Event] = ()) -> Ended:
    """Runs a job, and again where it failed. `events` happen at their times, until the job has ended."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if address:
        environment |= {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}
    began = time.monotonic()
    coming = list(events)
    for attempt in range(1, _ATTEMPTS + 1):
        with log.open("w") as stream:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, start_new_session=True,
                stdout=stream, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            while process.poll() is None and coming:
                moment, happen = coming[0]
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, began + moment - time.monotonic()))
                    break
                coming.pop(0)
                happen()
            process.wait(timeout=400)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output = log.read_text()
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
                     "--finetune.batch-examples", 8, "--finetune.max-steps", 100,
                     "--loop.checkpoint-every-steps", 10, "--loop.precision", "fp32",
                     "--loop.validate-every-epochs", 0, "--resources.workers", 2,
                     "--resources.cpus-per-worker", 1),
        "pretrain": ("pretrain", "--corpus", tokens.artifact.uri, "--shape.layers", 1,
                     "--shape.width", 16, "--shape.heads", 2, "--shape.positions", 96,
                     "--pretrain.batch-tokens", 480, "--pretrain.micro-batch-tokens", 120,
                     "--pretrain.max-context-tokens", 40, "--pretrain.max-response-tokens", 20,
                     "--pretrain.steps", 80, "--pretrain.window-rows", 64,
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
            folder = tmp_path_factory.mktemp(f"alone-{name}")
            found[name] = run_on("", [*commands[name], *to(name, folder / "out")], folder / "log")
        return found[name]

    return run


@pytest.fixture(scope="module")
def on_four(nodes, commands, tmp_path_factory) -> Callable[[str], Ended]:
    """What four nodes make of each job when none dies."""
    found: dict[str, Ended] = {}

    def run(name: str) -> Ended:
        if name not in found:
            folder = tmp_path_factory.mktemp(f"four-{name}")
            command = [*commands[name], *to(name, folder / "out")]
            found[name] = run_on(nodes.address, command, folder / "log")
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
def test_nodes_that_die_change_nothing(nodes, commands, on_four, alone, name, run, tmp_path):
    undisturbed = on_four(name).seconds
    chance = random.Random(f"{name} {run}")
    # Before, the job looks at its input. A job's last part, such as its publishing, is not hit.
    moments = [chance.uniform(0.2, 0.6) * undisturbed, chance.uniform(0.7, 1.1) * undisturbed]
    died = 0

    def kill() -> None:
        nonlocal died
        nodes.kill(chance.randrange(NODES))
        nodes.add()
        died += 1

    for attempt in range(_ATTEMPTS):  # a job that is faster this time may end first
        died, out = 0, to(name, tmp_path / f"out-{attempt}")
        events = [(moment, kill) for moment in moments]
        ended = run_on(nodes.address, [*commands[name], *out], tmp_path / "log", events)
        if died == KILLS_OF_A_RUN:
            break
        moments = [moment / 2 for moment in moments]
    assert died == KILLS_OF_A_RUN, "the job ended each time before two nodes had died"
    times = " and ".join(f"{moment:.1f}" for moment in moments)
    print(f"{name} {run}: nodes died after {times} s; {ended.seconds:.1f} s in all, "
          f"{undisturbed:.1f} s undisturbed; {ended.attempts} attempts")  # fmt: skip
    assert is_same(name, alone(name), ended)

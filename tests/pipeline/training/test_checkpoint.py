"""A checkpoint comes back as it was, and one that is not whole is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch

from pipeline.artifact import Artifact
from pipeline.config import BadInput
from pipeline.training.checkpoint import (
    last_checkpoint,
    load_training_state,
    read_saved,
    read_start,
    read_state,
    require_same_run,
    training_state,
    write_state,
)


@pytest.fixture
def checkpoint(tmp_path):
    """A model of two layers that share weights, and Adam after one step."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    module[1].weight = module[0].weight
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = {**training_state(module, optimizer), "step": 7, "best": None, "text": "a"}
    write_state(state, tmp_path)
    (tmp_path / "cursor-00000.json").write_text(json.dumps([1, 2]))
    return module, optimizer, tmp_path


def test_a_state_comes_back_with_its_types(checkpoint):
    module, optimizer, folder = checkpoint
    saved = read_saved(folder)
    assert (saved.state["step"], saved.state["best"], saved.cursors) == (7, None, [[1, 2]])
    for name, value in module.state_dict().items():
        assert torch.equal(saved.state["module"][name], value)
    other = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    other[1].weight = other[0].weight
    again = torch.optim.AdamW(other.parameters())
    load_training_state(other, again, saved.state)
    for one, two in zip(optimizer.state.values(), again.state.values(), strict=True):
        assert all(torch.equal(value, two[name]) for name, value in one.items())


@pytest.mark.parametrize("name", ["state.safetensors", "state.json", "cursor-00000.json"])
@pytest.mark.parametrize("share", [None, 0.0, 0.5, 0.99])
def test_a_truncated_or_missing_file_is_refused(checkpoint, name, share):
    """As an upload leaves it that was killed; `share` of the file is there, None: no file."""
    folder = checkpoint[-1]
    data = (folder / name).read_bytes()
    (folder / name).unlink()
    if share is not None:
        (folder / name).write_bytes(data[: int(len(data) * share)])
    with pytest.raises(BadInput) as refused:
        read_saved(folder)
    assert str(folder) in str(refused.value)


def test_a_disk_that_fails_is_no_damaged_state(checkpoint):
    path = checkpoint[-1] / "state.json"
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(OSError, match=f"symbolic links: '{path}'$"):
        read_saved(checkpoint[-1])


@pytest.mark.parametrize("place", [0.1, 0.7, 0.99])
def test_a_file_of_the_whole_length_that_ends_in_zeros_is_refused(checkpoint, place):
    """As a machine that lost its power leaves it. Without the checksum its weights would be 0."""
    path = checkpoint[-1] / "state.safetensors"
    data = path.read_bytes()
    kept = data[: int(len(data) * place)]
    path.write_bytes(kept.ljust(len(data), b"\0"))
    with pytest.raises(BadInput, match=f"^{checkpoint[-1]}: not a training state"):
        read_saved(checkpoint[-1])


def test_a_state_of_an_earlier_version_has_no_checksum(checkpoint):
    path = checkpoint[-1] / "state.json"
    structure = json.loads(path.read_text())
    assert structure.pop("crc32")
    path.write_text(json.dumps(structure))
    assert read_saved(checkpoint[-1]).state["step"] == 7


class Pair(NamedTuple):
    ids: torch.Tensor
    lengths: tuple[int, ...]


def test_a_batch_is_kept_with_the_names_of_its_fields(tmp_path):
    batch = [Pair(torch.arange(3), (1, 2)), None]
    write_state({"batch": batch}, tmp_path)
    (pair, nothing) = read_state(tmp_path)["batch"]
    assert pair["ids"].tolist() == [0, 1, 2]
    assert (pair["lengths"], nothing) == ([1, 2], None)


@pytest.mark.parametrize(("steps", "expected"), [
    ({"1": [1], "2": [2, 3]}, "2/checkpoint_1"),
    ({"1": [1], "2": [2, -3]}, "2/checkpoint_0"),
    ({"1": [1], "2": [-2]}, "1/checkpoint_0"),
    ({"1": [3, 4], "2": [2, -5]}, "1/checkpoint_1"),  # names are times: the clock was put back
    ({"1": [2, 1]}, "1/checkpoint_0"),
    ({"1": [-1], "2": []}, ""), ({}, ""),
])  # fmt: skip
def test_a_run_goes_on_from_the_last_whole_checkpoint_of_all_attempts(
    checkpoint, tmp_path_factory, steps, expected, capsys
):
    """`steps` of the checkpoints of each attempt; below 0: a kill truncated it when it was written, which is
    said. Other attempts are removed."""
    root, state = tmp_path_factory.mktemp("checkpoints"), read_saved(checkpoint[-1]).state
    for attempt, checkpoints in steps.items():
        (root / attempt).mkdir()
        for number, step in enumerate(checkpoints):
            folder = root / attempt / f"checkpoint_{number}"
            shutil.copytree(checkpoint[-1], folder)
            write_state({**state, "step": abs(step)}, folder)
            if step < 0:
                (folder / "state.safetensors").write_bytes(b"")
    found = last_checkpoint(str(root))
    assert found == (str(root / expected) if expected else "")
    last = max((step for each in steps.values() for step in each), key=abs, default=0)
    assert capsys.readouterr().out.count("the run goes on from the one before") == (last < 0)
    assert [path.name for path in root.iterdir()] == ([expected[0]] if expected else [])


def test_a_checkpoint_without_the_cursors_of_all_ranks_is_refused(checkpoint):
    folder = checkpoint[-1]
    state = read_saved(folder).state
    write_state({**state, "ranks": 2}, folder)
    with pytest.raises(BadInput, match="1 cursors of 2 ranks"):
        read_saved(folder)


def test_a_damaged_state_of_another_run_is_named_where_it_lies(checkpoint):
    folder = checkpoint[-1]
    (folder / "state.json").write_text("{")
    with pytest.raises(BadInput, match=f"^{folder}: not a training state"):
        read_start(str(folder))


@dataclass(frozen=True, kw_only=True)
class Task:
    batch: int
    lora_rank: int = 0
    limit: float | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    task: Task = field(default_factory=lambda: Task(batch=8, lora_rank=2))


def test_a_setting_that_an_earlier_version_lacked_counts_as_its_default():
    earlier = Artifact("earlier", {"config": {"task": {"batch": 8}}, "inputs": {}})

    def require(run):
        require_same_run(earlier, run, {}, fixed=["task."], may_change=[], otherwise="a new run")

    require(Run())  # its own default is 2
    for name, task in {
        "lora_rank is 2": Task(batch=8),
        "lora_rank is 2 there, 4": Task(batch=8, lora_rank=4),
        "limit is None there, 0.5": Task(batch=8, lora_rank=2, limit=0.5),
        "batch is 8 there, 9": Task(batch=9, lora_rank=2),
    }.items():
        with pytest.raises(BadInput, match=f"^--continue-from earlier: task.{name}"):
            require(Run(task=task))

"""The checkpoints of a run: written, read, found again by the same run, and continued by a longer one.

    state.safetensors     every tensor of the state, which is the same on all ranks
    state.json            everything else; a tensor's place holds its name; and the CRC of the tensors' file
    cursor-00000.json …   each rank's place in the training data

Loading one runs no code.

Weights that are sharded over ranks (FSDP2) are saved whole, so another number of ranks may resume.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from pipeline import storage
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import BadInput, defaults_of, flatten, to_dict
from pipeline.storage import node_cache
from pipeline.training.settings import TRAINING_STATE

Cursor = Any
"""JSON-ready: where a rank stands in its batches."""

_TENSORS, _STRUCTURE = "state.safetensors", "state.json"
_PIECE_BYTES = 1 << 24
_FULL_STATE_ON_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)


def is_sharded(module: nn.Module) -> bool:
    return any(isinstance(value, DTensor) for value in module.parameters())


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the whole weights by name, on the CPU. For sharded weights it is a collective call, in
    which the device holds one whole tensor at a time."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value)
        .detach()
        .to("cpu", copy=True)
        for name, value in module.state_dict().items()
    }


def load_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Loads whole weights into the module. Every rank hands in the same weights."""
    if not is_sharded(module):
        module.load_state_dict(dict(weights))
        return
    set_model_state_dict(module, dict(weights), options=StateDictOptions(full_state_dict=True))


def training_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The weights and the optimizer's moments. For sharded weights it is a collective call, whose result is
    empty on all ranks but the first."""
    if not is_sharded(module):
        return {"module": module.state_dict(), "optimizer": optimizer.state_dict()}
    weights, moments = get_state_dict(module, optimizer, options=_FULL_STATE_ON_CPU)
    numbers = {name: number for number, name in _names(module, optimizer).items()}
    return {"module": weights, "optimizer": _rename_parameters(moments, numbers)}


def load_training_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Loads a `training_state` into the module and the optimizer; the weights may be sharded or whole."""
    if not is_sharded(module):
        module.load_state_dict(dict(state["module"]))
        optimizer.load_state_dict(dict(state["optimizer"]))
        return
    set_state_dict(
        module,
        optimizer,
        model_state_dict=dict(state["module"]),
        optim_state_dict=_rename_parameters(state["optimizer"], _names(module, optimizer)),
        options=StateDictOptions(full_state_dict=True),
    )


def _names(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """The names of the parameters by their numbers in the optimizer's state. The functions for sharded
    weights use names instead of numbers."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    parameters = (weight for group in optimizer.param_groups for weight in group["params"])
    return {number: names[parameter] for number, parameter in enumerate(parameters)}


def _rename_parameters(
    optimizer_state: Mapping[str, Any], names: Mapping[Any, Any]
) -> dict[str, Any]:
    """An optimizer's state with other keys for its parameters."""
    return {
        "state": {names[key]: value for key, value in optimizer_state.get("state", {}).items()},
        "param_groups": [
            {**group, "params": [names[key] for key in group["params"]]}
            for group in optimizer_state.get("param_groups", [])
        ],
    }


def write_state(state: Any, folder: Path) -> None:
    """Writes nested dictionaries and lists of tensors, numbers, texts and None. Dataclasses and named tuples
    become dictionaries."""
    tensors: dict[str, Tensor] = {}
    structure = _to_json(state, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / _TENSORS)
    text = json.dumps({**structure, "crc32": _crc32(folder / _TENSORS)})
    (folder / _STRUCTURE).write_text(text, encoding="utf-8")


def read_state(folder: Path) -> dict[str, Any]:
    """The state that `write_state` wrote, on the CPU.

    Raises BadInput for files that are missing, truncated or damaged, and OSError where the disk fails.
    """
    try:
        structure = json.loads((folder / _STRUCTURE).read_text(encoding="utf-8"))
        # A machine that loses its power may leave a file of the whole length that ends in zeros.
        crc32 = structure.get("crc32")  # earlier versions wrote none
        if crc32 is not None and crc32 != _crc32(folder / _TENSORS):
            raise ValueError(f"{_TENSORS} is damaged")
        state = _from_json(structure, load_file(folder / _TENSORS))
    except (FileNotFoundError, ValueError, KeyError, SafetensorError) as error:
        raise BadInput(f"{folder}: not a training state ({error})") from None
    assert isinstance(state, dict)
    return state


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def _to_json(value: Any, tensors: dict[str, Tensor]) -> Any:
    """JSON has no tensors, and only texts as keys: an optimizer's keys are numbers."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        # Tied weights come under two names, and safetensors stores no memory twice.
        memory = (value.data_ptr(), value.shape, value.dtype)
        same_names = (
            name
            for name, tensor in tensors.items()
            if value.numel() and (tensor.data_ptr(), tensor.shape, tensor.dtype) == memory
        )
        name = next(same_names, str(len(tensors)))
        tensors[name] = value
        return {"tensor": name}
    if dataclasses.is_dataclass(value):
        value = vars(value)
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {"items": [[key, _to_json(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [_to_json(item, tensors) for item in value]
    return value


def _from_json(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if "tensor" in value:
            return tensors[value["tensor"]]
        return {key: _from_json(item, tensors) for key, item in value["items"]}
    if isinstance(value, list):
        return [_from_json(item, tensors) for item in value]
    return value


@dataclass(frozen=True)
class Saved:
    """A checkpoint: the state, which all ranks share, and the cursor of each rank."""

    state: dict[str, Any]
    cursors: list[Cursor]

    @property
    def skipped_steps(self) -> int:
        """Steps so far that changed no weights; states of earlier code do not count them."""
        return int(self.state.get("skipped_steps", 0))


def write_saved(
    folder: Path, state: Mapping[str, Any], cursor: Cursor, rank: int, world: int
) -> None:
    """Writes a rank's cursor; of rank 0 the state, too."""
    (folder / f"cursor-{rank:05d}.json").write_text(json.dumps(cursor))
    if rank == 0:
        write_state({**state, "ranks": world}, folder)


def read_saved(folder: Path) -> Saved:
    """Raises BadInput for an incomplete checkpoint."""
    try:
        cursors = [json.loads(path.read_text()) for path in sorted(folder.glob("cursor-*.json"))]
    except ValueError as error:
        raise BadInput(f"{folder}: a cursor is truncated ({error})") from None
    state = read_state(folder)
    ranks = state.pop("ranks", len(cursors) or 1)
    if len(cursors) != ranks:
        raise BadInput(f"{folder}: {len(cursors)} cursors of {ranks} ranks, so the place in the training "
                       "data is unknown")  # fmt: skip
    return Saved(state, cursors)


def read_saved_at(uri: str) -> Saved:
    """Raises BadInput for an incomplete checkpoint."""
    with tempfile.TemporaryDirectory() as local:
        node_cache.download(uri, Path(local))
        try:
            return read_saved(Path(local))
        except BadInput as error:  # it names the copy
            raise BadInput(str(error).replace(local, uri)) from None


def read_start(uri: str) -> Saved:
    """The state of another run, which a new run continues. Validations of the other run without improvement
    do not count against the new one. Raises BadInput for an incomplete state."""
    saved = read_saved_at(uri)
    selection = {**saved.state["selection"], "without_better": 0}
    return Saved({**saved.state, "selection": selection}, saved.cursors)


def last_checkpoint(folder: str) -> str:
    """The readable checkpoint with the most steps of the earlier attempts of a run; "": there is none.

    Each attempt has a folder of its own in `folder`; attempts without that checkpoint are removed. A kill may
    have truncated the last checkpoint, which a line says.
    """
    attempts = storage.list_folders(folder)
    checkpoints = [uri for attempt in attempts for uri in storage.list_folders(attempt)]
    # Not by name: names are times, and a clock may be put back.
    checkpoints.sort(key=_steps_done)
    last = next((uri for uri in reversed(checkpoints) if _is_readable(uri)), "")
    for attempt in attempts:
        if not last.startswith(f"{attempt}/"):
            storage.delete(attempt)
    return last


def _steps_done(checkpoint: str) -> float:
    """The steps of a checkpoint; infinite if they cannot be read, so that `_is_readable` says why."""
    try:
        structure = json.loads(storage.read_bytes(storage.join(checkpoint, _STRUCTURE)))
        return float(dict(structure["items"])["step"])
    except (FileNotFoundError, ValueError, KeyError):
        return math.inf


def _is_readable(checkpoint: str) -> bool:
    try:
        read_saved_at(checkpoint)
    except BadInput as error:
        print(f"{error}; the run goes on from the one before, if there is one", flush=True)
        return False
    return True


# The optimizer's state holds these, and the seed decides which examples have been read.
_FIXED = tuple(
    f"loop.{name}" for name in
    ("optimizer", "betas", "epsilon", "weight_decay", "head_lr_factor", "token_tables", "seed")
)  # fmt: skip


def open_with_state(uri: str, kind: str, job: str) -> Artifact:
    """The result of an earlier run of `job`. Raises BadInput if it has no training state."""
    artifact = open_artifact(uri, kind)
    if not artifact.paths(f"{TRAINING_STATE}/"):
        raise BadInput(f"--continue-from {artifact.uri}: has no {TRAINING_STATE}; allowed: the {kind} of a "
                       f"run of {job} with --keep-training-state true, into another --output")  # fmt: skip
    return artifact


def require_same_run(
    earlier: Artifact,
    config: Any,
    inputs: Mapping[str, Sequence[str]],
    fixed: Sequence[str],
    may_change: Sequence[str],
    otherwise: str,
) -> None:
    """Raises BadInput for an input or a setting that a continued run cannot change.

    The run keeps its place in the corpora, the optimizer's state and the best validation. With other data or
    another task these would mean nothing. Learning rates, schedules and lengths may change.

    `inputs`: the fingerprints of each input. `fixed`: prefixes of the inputs and options that must stay,
    beside those of the optimizer. `may_change`: exceptions from `fixed`. `otherwise`: the end of the
    message.
    """
    earlier_settings, settings = flatten(earlier.manifest["config"]), flatten(to_dict(config))
    defaults = defaults_of(config)
    earlier_inputs = earlier.manifest["inputs"].items()
    for name, fingerprints in inputs.items():
        settings[name] = list(fingerprints)
        earlier_settings[name] = [
            ref["fingerprint"] for key, ref in earlier_inputs if key.split(".")[0] == name
        ]
    for name, value in settings.items():
        is_fixed = name.startswith((*_FIXED, *fixed)) and name not in may_change
        # A version of polyrank without the setting worked as its default does.
        earlier_value = earlier_settings.get(name, defaults.get(name, value))
        if is_fixed and earlier_value != value:
            raise BadInput(f"--continue-from {earlier.uri}: {name} is {earlier_value!r} there, {value!r} "
                           f"here; allowed: as there, or {otherwise}")  # fmt: skip

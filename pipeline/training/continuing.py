"""Checks a published run that `--continue-from` continues with more steps: its state and its settings.

Nothing here needs torch, so that a job can refuse settings before it loads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline import storage
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import BadInput, flatten, to_dict
from pipeline.training.settings import TRAINING_STATE

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


def state_uri(earlier: Artifact | None) -> str:
    """The URI of the state of an earlier run; "": there is no earlier run."""
    return storage.join(earlier.uri, TRAINING_STATE) if earlier else ""


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
    earlier_inputs = earlier.manifest["inputs"].items()
    for name, fingerprints in inputs.items():
        settings[name] = list(fingerprints)
        earlier_settings[name] = [
            ref["fingerprint"] for key, ref in earlier_inputs if key.split(".")[0] == name
        ]
    for name, value in settings.items():
        is_fixed = name.startswith((*_FIXED, *fixed)) and name not in may_change
        earlier_value = earlier_settings.get(name, value)
        if is_fixed and earlier_value != value:
            raise BadInput(f"--continue-from {earlier.uri}: {name} is {earlier_value!r} there, {value!r} "
                           f"here; allowed: as there, or {otherwise}")  # fmt: skip

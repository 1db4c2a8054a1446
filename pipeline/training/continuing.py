"""A published run that goes on with more steps (`--continue-from`): what it must have, and what must stay.

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
    ("optimizer", "betas", "epsilon", "weight_decay", "new_weights_factor", "token_tables", "seed")
)  # fmt: skip


def open_with_state(uri: str, kind: str, job: str) -> Artifact:
    """The result of an earlier run of `job`. Raises BadInput where it has no training state."""
    artifact = open_artifact(uri, kind)
    if not artifact.paths(f"{TRAINING_STATE}/"):
        raise BadInput(f"--continue-from {artifact.uri}: has no {TRAINING_STATE}; allowed: the {kind} of a "
                       f"run of {job} with --keep-training-state true, into another --output")  # fmt: skip
    return artifact


def state_uri(earlier: Artifact | None) -> str:
    """Where the state of an earlier run lies; "": there is no earlier run."""
    return storage.join(earlier.uri, TRAINING_STATE) if earlier else ""


def require_same_run(
    earlier: Artifact,
    config: Any,
    inputs: Mapping[str, Sequence[str]],
    fixed: Sequence[str],
    may_change: Sequence[str],
    otherwise: str,
) -> None:
    """Raises BadInput for an input or a setting that a run which goes on cannot change.

    Its place in the corpora, the optimizer's state and its best validation go on, too: with other data or
    another task they would mean nothing. Learning rates, schedules and lengths may change.

    `inputs`: the fingerprints of each input. `fixed`: beginnings of the names of inputs and options that
    must stay, beside the optimizer's. `may_change`: options among these that need not. `otherwise`: how the
    message ends.
    """
    then, now = flatten(earlier.manifest["config"]), flatten(to_dict(config))
    then_inputs = earlier.manifest["inputs"].items()
    for name, fingerprints in inputs.items():
        now[name] = list(fingerprints)
        then[name] = [ref["fingerprint"] for key, ref in then_inputs if key.split(".")[0] == name]
    for name, value in now.items():
        is_fixed = name.startswith((*_FIXED, *fixed))
        if is_fixed and name not in may_change and then.get(name, value) != value:
            raise BadInput(f"--continue-from {earlier.uri}: {name} is {then[name]!r} there, {value!r} here; "
                           f"allowed: as there, or {otherwise}")  # fmt: skip

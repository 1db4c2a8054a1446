"""What tells one job from another: the kind of its output, its inputs' contents, and its settings."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from pipeline.config import flatten, identity


def describe_request(
    kind: str, config: Any, inputs: Mapping[str, Mapping[str, Any]], unused: Collection[str] = ()
) -> dict[str, Any]:
    """JSON-ready. `inputs`: a reference to each, with its `fingerprint`; those of a list are numbered, such
    as corpus.0. Settings that are named like an input, that are `NOT_IDENTITY` or `unused` do not count."""
    settings = flatten(identity(config))
    named_by_contents = {re.sub(r"\.\d+$", "", name) for name in inputs}
    return {
        "kind": kind,
        "inputs": {name: reference["fingerprint"] for name, reference in inputs.items()},
        "config": {
            name: value
            for name, value in settings.items()
            if name not in named_by_contents and name.partition(".")[0] not in unused
        },
    }


def difference(earlier: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Names the first settings that differ: "max_steps: 3 there, 4 here"."""
    parts = ("inputs", "config")
    old = flatten({part: earlier.get(part, {}) for part in parts})
    new = flatten({part: wanted[part] for part in parts})
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    shown = [
        f"{name.partition('.')[2]}: {old.get(name)!r} there, {new.get(name)!r} here"
        for name in changed[:3]
    ]
    return "; ".join(shown) or "of another kind"

"""The identity of a job: the kind of its output, its inputs' contents, and its settings."""

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
    input_names = {re.sub(r"\.\d+$", "", name) for name in inputs}
    return {
        "kind": kind,
        "inputs": {name: reference["fingerprint"] for name, reference in inputs.items()},
        "config": {
            name: value
            for name, value in settings.items()
            if name not in input_names and name.partition(".")[0] not in unused
        },
    }


def difference(earlier_request: dict[str, Any], request: dict[str, Any]) -> str:
    """Names the first settings that differ: "max_steps: 3 there, 4 here"."""
    parts = ("inputs", "config")
    earlier_values = flatten({part: earlier_request.get(part, {}) for part in parts})
    values = flatten({part: request[part] for part in parts})
    changed_names = [
        name
        for name in {**earlier_values, **values}
        if earlier_values.get(name) != values.get(name)
    ]
    descriptions = [
        f"{name.partition('.')[2]}: {earlier_values.get(name)!r} there, {values.get(name)!r} here"
        for name in changed_names[:3]
    ]
    return "; ".join(descriptions) or "of another kind"

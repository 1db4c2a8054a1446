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
    """Names the inputs and the first settings that differ, for a person: "--corpus has other contents than
    it had; max_steps: 3 there, 4 here"."""
    earlier_inputs, inputs = earlier_request.get("inputs", {}), request["inputs"]
    earlier_settings = flatten(earlier_request.get("config", {}))
    settings = flatten(request["config"])
    descriptions = []
    for name in _changed(earlier_inputs, inputs):
        option = "--" + re.sub(r"\.\d+$", "", name).replace("_", "-")
        if name in earlier_inputs and name in inputs:
            descriptions.append(f"{option} has other contents than it had")
        else:
            descriptions.append(f"{option} is given only {'here' if name in inputs else 'there'}")
    descriptions += [
        f"{name}: {earlier_settings.get(name)!r} there, {settings.get(name)!r} here"
        for name in _changed(earlier_settings, settings)
    ]
    return "; ".join(list(dict.fromkeys(descriptions))[:3]) or "of another kind"


def _changed(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [name for name in {**earlier, **now} if earlier.get(name) != now.get(name)]

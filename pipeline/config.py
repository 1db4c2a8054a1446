"""How YAML and the command line become a frozen dataclass.

Precedence: the dataclass' defaults < `--config file.yaml` < `--name value` and `--group.name value`.
Unknown names, wrong types and values outside their range are refused before anything starts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import typing
import warnings
from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import jsonargparse

ConfigT = TypeVar("ConfigT")

NOT_IDENTITY: Mapping[str, Any] = MappingProxyType({"identity": False})
"""The `metadata` of a field that does not change a job's output: two jobs that differ in such fields
alone are the same job. On a field that is a dataclass it holds for the whole group."""


class BadInput(Exception):
    """The user's input, settings or usage are at fault; the message is one clear line (exit code 2)."""


class Stopped(Exception):
    """The job has stopped for a reason that it foresees; the message is one clear line (exit code 1)."""


def require(allowed: bool, field: str, value: object, meaning: str) -> None:
    """Raises BadInput naming `field`, `value` and what is allowed, unless `allowed`."""
    if not allowed:
        raise BadInput(f"{field}: {value!r} is not allowed; allowed: {meaning}")


def parse(config_class: type[ConfigT], argv: Sequence[str], prog: str) -> ConfigT:
    """Returns the configuration that `argv` describes.

    On the command line `--max-steps 3` and `--max_steps=3` are the same, a list field takes several
    values (`--input a b c`), and a boolean field alone (`--keep`) means true. A dataclass whose
    `POSITIONAL` names a field takes its value as the first argument, without a name. Where `PASSED_ON`
    names a list field and groups of another job's options, `--group.name value` goes unread into that
    field.

    Raises BadInput in one line; `--help` prints and exits with 0.
    """
    positional = getattr(config_class, "POSITIONAL", "")
    if positional and argv and not argv[0].startswith("-"):
        argv = [f"--{positional}", *argv]
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    description = (config_class.__doc__ or "").strip()
    parser = jsonargparse.ArgumentParser(
        prog=prog, description=description, exit_on_error=False, allow_abbrev=False
    )
    parser.add_argument("--config", action="config", help="A YAML file with any of the options.")
    parser.add_class_arguments(config_class, nested_key=None)
    fields = _option_types(config_class)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # jsonargparse's own deprecations are not the user's
            normal = _normalise(argv, fields)
            namespace = parser.parse_args(_passed_on(config_class, normal))
        values = namespace.as_dict()
        values.pop("config", None)
        return from_dict(config_class, values)
    except ArgumentError as error:
        raise BadInput(_one_line(error, fields)) from None


def from_dict(config_class: type[ConfigT], values: dict[str, Any]) -> ConfigT:
    """Builds the dataclass, and the dataclasses inside it, from plain values."""
    hints = typing.get_type_hints(config_class)
    arguments = {
        name: from_dict(hints[name], value)
        if dataclasses.is_dataclass(hints[name]) and isinstance(value, dict)
        else tuple(value)
        if isinstance(value, list)
        else value
        for name, value in values.items()
    }
    return config_class(**arguments)


def to_dict(config: Any) -> dict[str, Any]:
    """The resolved configuration as JSON-ready values."""
    values = json.loads(json.dumps(dataclasses.asdict(config)))
    assert isinstance(values, dict)
    return values


def identity(config: Any) -> dict[str, Any]:
    """As `to_dict`, without the fields that are `NOT_IDENTITY`."""
    return _without_excluded(config, to_dict(config))


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} → {"a.b": 1}, the names as on the command line."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def digest(values: Any) -> str:
    """A short name for JSON-ready values that is the same wherever the values are."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _without_excluded(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for field in dataclasses.fields(config):
        if field.metadata.get("identity", True):
            name, value = field.name, getattr(config, field.name)
            group = dataclasses.is_dataclass(value)
            kept[name] = _without_excluded(value, values[name]) if group else values[name]
    return kept


def _option_types(config_class: type, prefix: str = "") -> dict[str, Any]:
    """Each option's name, dotted, and its type."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(config_class).items():
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            found.update(_option_types(hint, f"{prefix}{name}."))
        else:
            found[prefix + name] = hint
    return found


def _normalise(argv: Sequence[str], fields: dict[str, Any]) -> list[str]:
    """Dashes to underscores; `--list a b` to one JSON value; a bare `--flag` to `--flag true`.

    `--config` comes first, wherever it stands: jsonargparse lets the later one win.
    """
    normal: list[str] = []
    config: list[str] = []
    position = 0
    while position < len(argv):
        argument = argv[position]
        position += 1
        if not argument.startswith("--"):
            normal.append(argument)
            continue
        name, equals, value = argument.partition("=")
        name = "--" + name[2:].replace("-", "_")
        hint = fields.get(name[2:])
        values = [value] if equals else []
        if not equals:
            is_list = typing.get_origin(hint) is tuple
            while position < len(argv) and not argv[position].startswith("--"):
                if values and not is_list:
                    break
                values.append(argv[position])
                position += 1
        if hint is bool and not values:
            values = ["true"]
        if typing.get_origin(hint) is tuple and not (len(values) == 1 and values[0][:1] == "["):
            values = [json.dumps(values)]
        (config if name == "--config" else normal).extend([name, *values])
    return config + normal


def _passed_on(config_class: type, argv: Sequence[str]) -> list[str]:
    """Gathers options of the groups that `PASSED_ON` names in its field; `argv` is normalised."""
    field, groups = getattr(config_class, "PASSED_ON", ("", ()))
    own, others = list[str](), list[str]()
    target = own
    for argument in argv:
        if argument.startswith("--"):
            group, dot, _ = argument[2:].partition(".")
            target = others if dot and group in groups else own
        target.append(argument)
    return [*own, f"--{field}", json.dumps(others)] if others else own


def _one_line(error: ArgumentError, fields: dict[str, Any]) -> str:
    text = " ".join(str(error).split())
    wrong_type = re.match(r"Parser key \"(.+?)\": Expected an? (.+?)\. Got value: (.*)", text)
    if wrong_type:
        name, expected, value = wrong_type.groups()
        expected = re.sub(r"<class '(\w+)'>|typing\.", r"\1", expected)
        return f"{name}: {value!r} is not allowed; allowed: {expected}"
    missing = re.match(r"the following arguments are required: (.*)", text)
    if missing:
        return f"--{missing[1].replace(', ', ', --')}: missing; see --help"
    text = re.sub(r"^Parser key \"config\": ", "--config: ", text)
    known = ", ".join(sorted(fields))
    return text if "nrecognized" not in text and "accept" not in text else f"{text}; known: {known}"

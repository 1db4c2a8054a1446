"""Finds options that nothing reads under the other settings, such as heads of an attention without heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

_CONDITIONS = "conditions"


def read_when(*conditions: Mapping[str, tuple[Any, ...]]) -> Mapping[str, Any]:
    """The `metadata` of a field that nothing reads under some settings: in each of `conditions`, one of the
    options, by its dotted name, has to have one of its values. On a field that is a dataclass it holds for
    the whole group.
    """
    return MappingProxyType({_CONDITIONS: conditions})


def unread_options(config: Any, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The options that have another value than their default and that nothing reads; why.

    `values`: those of `config`, by dotted names.
    """
    for name, value, conditions in _conditional_options(config):
        for condition in conditions:
            if not any(values.get(option) in allowed for option, allowed in condition.items()):
                requirement = " or ".join(
                    f"{option} {', '.join(map(repr, allowed))} "
                    + (f"(here {values[option]!r})" if option in values else "(no option here)")
                    for option, allowed in condition.items()
                )
                yield name, f"{name}: {value!r} has no effect; it is read with {requirement}"
                break


def _conditional_options(
    config: Any, defaults: Any = None, prefix: str = "", outer: tuple[Any, ...] = ()
) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """(name, value, conditions) of each option that has conditions and another value than its default.

    `defaults`: a group as the job has it by default; None: its own defaults.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        default = getattr(defaults, field.name, default_of(type(config), field.name))
        conditions = (*outer, *field.metadata.get(_CONDITIONS, ()))
        if dataclasses.is_dataclass(value):
            same_kind = default if type(default) is type(value) else None
            yield from _conditional_options(value, same_kind, f"{prefix}{field.name}.", conditions)
        elif conditions and value != default:
            yield f"{prefix}{field.name}", value, conditions


def default_of(config_class: type, name: str) -> Any:
    """A field's default, None where it has none."""
    (field,) = (field for field in dataclasses.fields(config_class) if field.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default

"""Finds options that nothing reads under the other settings, such as heads of an attention without heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

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
    for option in options_of(config):
        conditions = (each for data in option.metadata for each in data.get(_CONDITIONS, ()))
        unmet = next((each for each in conditions if not _is_met(each, values)), None)
        is_group = dataclasses.is_dataclass(option.value)
        if unmet is not None and not is_group and option.value != option.default:
            requirement = " or ".join(
                f"{name} {', '.join(map(repr, allowed))} "
                + (f"(here {values[name]!r})" if name in values else "(no option here)")
                for name, allowed in unmet.items()
            )
            fault = f"{option.name}: {option.value!r} has no effect; it is read with {requirement}"
            yield option.name, fault


def _is_met(condition: Mapping[str, tuple[Any, ...]], values: Mapping[str, Any]) -> bool:
    return any(values.get(name) in allowed for name, allowed in condition.items())


class Option(NamedTuple):
    """A field of a dataclass, or of one inside it."""

    name: str
    """Dotted, as on the command line."""
    value: Any
    default: Any
    """As the job has it; MISSING: it has none."""
    metadata: tuple[Mapping[str, Any], ...]
    """Those of the groups that it is in, from outside, and its own."""


def options_of(
    config: Any, defaults: Any = None, prefix: str = "", outer: tuple[Mapping[str, Any], ...] = ()
) -> Iterator[Option]:
    """The options and groups of a dataclass, those of its groups too.

    `defaults`: a group as the job has it by default; None: its own defaults.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        default = getattr(defaults, field.name, _default(field))
        option = Option(f"{prefix}{field.name}", value, default, (*outer, field.metadata))
        yield option
        if dataclasses.is_dataclass(value):
            same_kind = default if type(default) is type(value) else None
            yield from options_of(value, same_kind, f"{option.name}.", option.metadata)


def default_of(config_class: type, name: str) -> Any:
    """A field's default, None where it has none."""
    (field,) = (field for field in dataclasses.fields(config_class) if field.name == name)
    default = _default(field)
    return None if default is dataclasses.MISSING else default


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default

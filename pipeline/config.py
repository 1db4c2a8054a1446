"""Turns YAML and the command line into a frozen dataclass.

Precedence: the dataclass' defaults < `--config file.yaml` < `--name value` and `--group.name value`.
Unknown names, wrong types and values outside their range are refused before anything starts.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import sys
import types
import typing
import warnings
from argparse import ArgumentError
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import yaml

from pipeline import progress
from pipeline.options import arguments, faults, help_text
from pipeline.options.unread import Option, default_of, options_of, unread_options

if TYPE_CHECKING:
    import jsonargparse

ConfigT = TypeVar("ConfigT")

NOT_IDENTITY: Mapping[str, Any] = MappingProxyType({"identity": False})
"""The `metadata` of a field that does not change a job's output: two jobs that differ in such fields
alone are the same job. On a field that is a dataclass it holds for the whole group."""


def identity_with(option: str, *values: Any) -> Mapping[str, Any]:
    """The `metadata` of a field that is part of a job's identity only where `option`, by its dotted name, has
    one of `values`; without values: another one than its default.

    An option that is added to a job names itself here. Else the job would no longer know what it has made or
    begun before there was the option. On a field that is a dataclass it holds for the whole group.
    """
    return MappingProxyType({"identity_with": (option, values)})


class BadInput(Exception):
    """The user's input, settings or usage are wrong. The message is one clear line (exit code 2)."""


class Stopped(Exception):
    """The job has stopped for a reason that it foresees; the message is one clear line."""

    exit_code = 1


class Terminated(Stopped):
    """SIGTERM has ended the job, which has saved its work before."""

    exit_code = 128 + 15


MAX_WAIT_VARIABLE = "POLYRANK_MAX_WAIT_MINUTES"


def max_wait_minutes() -> float:
    """How long this process's job waits for cores and GPUs that others hold (`--max-wait-minutes`)."""
    return float(os.environ.get(MAX_WAIT_VARIABLE, "60"))


def require(allowed: bool, field: str, value: object, meaning: str) -> None:
    """Raises BadInput naming `field`, `value` and what is allowed, unless `allowed`."""
    if not allowed:
        raise BadInput(f"{field}: {value!r} is not allowed; allowed: {meaning}")


class Variants(NamedTuple):
    """Dataclasses that one field may hold, told apart by a Literal field that each of them has."""

    tag: str
    """The name of the Literal field."""
    kinds: dict[str, type]
    """The dataclasses by their value of the tag."""

    def option_names(self, kind: str) -> set[str]:
        """The fields of one dataclass."""
        return {field.name for field in dataclasses.fields(self.kinds[kind])}


def variants_of(hint: Any) -> Variants | None:
    """The union that a type is; None for any other type."""
    members = typing.get_args(hint)
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    if not is_union or not all(dataclasses.is_dataclass(member) for member in members):
        return None
    hints = [typing.get_type_hints(member) for member in members]
    for tag in hints[0]:
        values = [typing.get_args(fields.get(tag)) for fields in hints]
        literal = all(typing.get_origin(fields.get(tag)) is typing.Literal for fields in hints)
        if literal and len({value for tags in values for value in tags}) == len(members):
            return Variants(
                tag, {tags[0]: kind for tags, kind in zip(values, members, strict=True)}
            )
    raise TypeError(f"{hint}: no Literal field tells these dataclasses apart")


def parse(
    config_class: type[ConfigT], argv: Sequence[str], prog: str, allow_unread: bool = False
) -> ConfigT:
    """Returns the configuration that `argv` describes.

    On the command line `--max-steps 3` and `--max_steps=3` are the same, a list field takes several
    values (`--input a b c`), and a boolean field alone (`--keep`) means true. `--config a b` reads both
    files; the later one wins. A dataclass whose `POSITIONAL` names a field takes its value as the first
    argument, without a name. Where `PASSED_ON` names a list field and groups of another job's options,
    `--group.name value` goes unread into that field.

    What stands after `--` goes unread into the list field that `AFTER_DASHES` names. Where `ALIASES`
    gives an option a second name on the command line, files know the first one alone.

    A field may be a union of dataclasses (see `Variants`): files and command line say by its tag which one
    is meant, its default says so where they do not, and only the options of that one are known.

    An option that nothing reads (see `pipeline.options.unread`) is refused on the command line, if its value
    is not the default. A file may serve several models, so its options are only named on standard error.
    `allow_unread`: neither, for options that several configurations share.

    `--progress` and `--max-wait-minutes` are no fields: they are options of every job, see
    `pipeline.progress` and `pipeline.engine.waiting`.

    Raises BadInput in one line; `--help` and `--help GROUP` print and exit with 0.
    """
    argv, help_topic = help_text.take_help(argv)
    if (after_dashes := getattr(config_class, "AFTER_DASHES", "")) and "--" in argv:
        position = list(argv).index("--")
        argv = [*argv[:position], f"--{after_dashes}", arguments.list_text(argv[position + 1 :])]
    elif after_dashes and argv and not argv[0].startswith("-"):
        raise BadInput(
            f"{argv[0]}: what is passed on stands after --, as in: {prog} -- {' '.join(argv)}"
        )
    positional = getattr(config_class, "POSITIONAL", "")
    if positional and argv and not argv[0].startswith("-"):
        argv = [f"--{positional}", *argv]
    files: dict[str, dict[str, Any]] = {}
    fields = _option_types(config_class)
    try:
        normal = arguments.normalise(argv, fields, getattr(config_class, "ALIASES", {}))
        normal = arguments.gather_passed_on(normal, *getattr(config_class, "PASSED_ON", ("", ())))
        unions = _unions(config_class)
        files = _options_by_file(normal)
        _require_known_options(normal, files, fields)
        option_values = _option_values(normal, unions)
        chosen_kinds = {
            name: _chosen_kind(name, union, default_of(config_class, name), option_values)
            for name, union in unions.items()
        }
        parser = _parser(
            (config_class, prog, progress.mode(), max_wait_minutes(), tuple(chosen_kinds.items()))
        )
        if help_topic is not None:
            print(help_text.text(parser, help_topic, fields, positional, after_dashes))
            sys.exit(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # jsonargparse's own deprecations are not the user's
            namespace = parser.parse_args(normal)
        values = namespace.as_dict()
        values.pop("config", None)
        # Jobs that this one runs show the same, and wait as long.
        os.environ[progress.VARIABLE] = values.pop("progress")
        minutes = values.pop("max_wait_minutes")
        require(minutes >= 0, "max_wait_minutes", minutes, ">= 0")
        os.environ[MAX_WAIT_VARIABLE] = str(minutes)
        config = from_dict(config_class, values)
        if not allow_unread:
            _require_read(config, normal, files)
        return config
    except ArgumentError as error:
        raise BadInput(_in_file(faults.one_line(error, prog, positional), normal, files)) from None
    except BadInput as error:
        raise BadInput(_in_file(str(error), normal, files)) from None


@functools.cache
def _parser(
    job: tuple[type[Any], str, progress.Mode, float, tuple[tuple[str, str], ...]],
) -> jsonargparse.ArgumentParser:
    """`job`: its settings, its program, how it shows progress, how long it waits, and the kind of each
    union.

    To make a parser takes 0.1 s, most of it for docstrings: a process that runs many jobs makes one for each.
    """
    import jsonargparse  # takes longer than the rest that `import pipeline` loads

    config_class, prog, mode, minutes, chosen_kinds = job
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(
        prog=prog,
        description=(config_class.__doc__ or "").strip(),
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config")
    parser.add_argument("--progress", type=progress.Mode, default=mode)
    parser.add_argument("--max_wait_minutes", type=float, default=minutes)
    unions = _unions(config_class)
    parser.add_class_arguments(config_class, nested_key=None, skip=set(unions))
    for name, kind in chosen_kinds:
        _add_kind(parser, name, unions[name], kind, default_of(config_class, name))
    return parser


def from_dict(config_class: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Builds the dataclass, and the dataclasses inside it, from JSON's values.

    Raises TypeError or ValueError for values of another dataclass.
    """
    hints = typing.get_type_hints(config_class)
    field_values = {}
    for name, value in values.items():
        hint = hints.get(name)
        if isinstance(value, dict) and (union := variants_of(hint)):
            tag = value.get(union.tag)
            hint = union.kinds[tag] if tag else type(default_of(config_class, name))
        field_values[name] = _from_plain(hint, value)
    return config_class(**field_values)


def _from_plain(hint: Any, value: Any) -> Any:
    """JSON's value in the type that a field has: JSON knows no tuple and no dataclass."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if not isinstance(value, list | tuple | dict):
        return value  # if it is of the wrong type, the dataclass says so
    if origin in (types.UnionType, typing.Union):  # X | None
        return _from_plain(next(part for part in parts if part is not type(None)), value)
    if origin is list:
        return [_from_plain(parts[0], item) for item in value]
    if origin is tuple and parts[-1] is Ellipsis:
        return tuple(_from_plain(parts[0], item) for item in value)
    if origin is tuple:
        return tuple(_from_plain(part, item) for part, item in zip(parts, value, strict=True))
    if origin is dict and isinstance(value, dict):
        return {name: _from_plain(parts[1], item) for name, item in value.items()}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return from_dict(hint, value)
    return value


def to_dict(config: Any) -> dict[str, Any]:
    """The resolved configuration as JSON-ready values."""
    values = json.loads(json.dumps(dataclasses.asdict(config)))
    assert isinstance(values, dict)
    return values


def defaults_of(config: Any) -> dict[str, Any]:
    """The defaults of the options that have one, by their dotted names, JSON-ready. A union has those of the
    dataclass that `config` chose."""
    return {
        option.name: json.loads(json.dumps(option.default))
        for option in _single_options(config)
        if option.default is not dataclasses.MISSING
    }


def identity(config: Any) -> dict[str, Any]:
    """The settings that name a job, by their dotted names: not those that are `NOT_IDENTITY`, nor the
    `uncounted_options`."""
    uncounted = tuple(f"{option}." for option in uncounted_options(config))
    return {
        option.name: json.loads(json.dumps(option.value))
        for option in _single_options(config)
        if all(metadata.get("identity", True) for metadata in option.metadata)
        and not f"{option.name}.".startswith(uncounted)
    }


def uncounted_options(config: Any) -> list[str]:
    """The options and groups, by their dotted names, that are no part of the identity by `identity_with`."""
    settings, defaults = flatten(to_dict(config)), defaults_of(config)

    def is_set(option: str, values: Sequence[Any]) -> bool:
        value = settings.get(option)
        return value in values if values else value != defaults.get(option)

    conditions = {o.name: o.metadata[-1].get("identity_with") for o in options_of(config)}
    return [name for name, condition in conditions.items() if condition and not is_set(*condition)]


def _single_options(config: Any) -> Iterator[Option]:
    return (option for option in options_of(config) if not dataclasses.is_dataclass(option.value))


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


def _option_types(config_class: type, prefix: str = "") -> dict[str, Any]:
    """Each option's name, dotted, and its type."""
    option_types: dict[str, Any] = {}
    hints = typing.get_type_hints(config_class)
    for name in (field.name for field in dataclasses.fields(config_class)):
        hint = hints[name]
        union = variants_of(hint)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            option_types.update(_option_types(hint, f"{prefix}{name}."))
        elif union:
            for kind in union.kinds.values():
                option_types.update(_option_types(kind, f"{prefix}{name}."))
        else:
            option_types[prefix + name] = hint
    return option_types


def choice_options(config_class: type) -> set[str]:
    """Names of the options, dotted, that take one of a few fixed values; and other names for them."""
    choices = {name for name, hint in _option_types(config_class).items() if _is_choice(hint)}
    aliases: Mapping[str, str] = getattr(config_class, "ALIASES", {})
    return choices | {alias for alias, name in aliases.items() if name in choices}


def _is_choice(hint: Any) -> bool:
    """Whether a type, or the type of a tuple's items, is a Literal."""
    kinds = [kind for kind in typing.get_args(hint) if kind not in (..., type(None))]
    is_literal = typing.get_origin(hint) is typing.Literal
    return is_literal or (bool(kinds) and all(map(_is_choice, kinds)))


def _unions(config_class: type) -> dict[str, Variants]:
    """The fields that are unions of dataclasses."""
    hints = typing.get_type_hints(config_class)
    variants = {name: variants_of(hint) for name, hint in hints.items()}
    return {name: union for name, union in variants.items() if union}


def _chosen_kind(name: str, union: Variants, default: Any, option_values: Mapping[str, Any]) -> str:
    """Which dataclass of a union is meant. Raises BadInput for another's option."""
    tag_option = f"{name}.{union.tag}"
    chosen = option_values.get(tag_option, getattr(default, union.tag, None))
    require(chosen in union.kinds, tag_option, chosen, ", ".join(union.kinds))
    for option in option_values:
        field = option.removeprefix(f"{name}.")
        owners = [kind for kind in union.kinds if field in union.option_names(kind)]
        if option.startswith(f"{name}.") and owners and chosen not in owners:
            raise BadInput(f"{option}: is not allowed with {tag_option} {chosen!r}; allowed with: "
                           f"{', '.join(owners)}")  # fmt: skip
    return str(chosen)


def _add_kind(
    parser: jsonargparse.ArgumentParser, name: str, union: Variants, chosen: str, default: Any
) -> None:
    """Adds the tag, whose help says which dataclasses there are, and the options of the chosen one."""
    kind = union.kinds[chosen]
    docs = [(member.__doc__ or "").strip().partition("\n")[0] for member in union.kinds.values()]
    summary = " ".join(f"{value}: {text}" for value, text in zip(union.kinds, docs, strict=True))
    parser.add_class_arguments(
        kind,
        nested_key=name,
        skip={union.tag},
        default=to_dict(default) if isinstance(default, kind) else None,
    )
    parser.add_argument(
        f"--{name}.{union.tag}",
        type=typing.Literal[tuple(union.kinds)],
        default=chosen,
        help=f"{summary} Each has options of its own; these are those of {chosen}.",
    )


def _option_values(argv: Sequence[str], unions: Collection[str]) -> dict[str, Any]:
    """The options that are set, by their dotted names, the last value of each. `argv` is normalised;
    `unions`: fields that may be set as a whole, by a YAML file or text.

    A file or a text that cannot be read is left out: parsing will say what is wrong with it.
    """
    option_values: dict[str, Any] = {}
    for name, value in zip(argv, [*argv[1:], ""], strict=False):
        if name.startswith("--"):
            if name == "--config":
                option_values.update(flatten(_mapping(value)))
            elif name[2:] in unions:
                option_values.update(flatten(_mapping(value), f"{name[2:]}."))
            else:
                option_values[name[2:]] = value
    return option_values


def _options_by_file(argv: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The options in each settings file, by their dotted names. Raises BadInput for one that is no YAML."""
    options_by_file = {}
    for name, value in itertools.pairwise(argv):
        if name == "--config":
            mapping, fault = faults.read_mapping(value)
            if fault:
                raise BadInput(fault)
            options_by_file[value] = flatten(mapping)
    return options_by_file


def _require_known_options(
    argv: Sequence[str], files: Mapping[str, Mapping[str, Any]], fields: Collection[str]
) -> None:
    """Raises BadInput for an option or a file's key that is not there, naming the nearest one."""
    groups = {name[:at] for name in fields for at, letter in enumerate(name) if letter == "."}
    of_files = {*fields, *groups, "progress", "max_wait_minutes"}
    for argument in argv:
        name = argument[2:].partition("=")[0]
        if argument.startswith("--") and name not in {*of_files, "config", "help", "print_config"}:
            raise BadInput(faults.unknown_option(name, fields))
    for file, options in files.items():
        for name in options:
            if name not in of_files:
                raise BadInput(faults.unknown_key(file, name, fields))


def _require_read(config: Any, argv: Sequence[str], files: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises BadInput for an option that nothing reads; prints a line with those that only files have."""
    of_files = set().union(*files.values()) - {word.removeprefix("--") for word in argv}
    unread = list(unread_options(config, flatten(to_dict(config))))
    for name, fault in unread:
        if name not in of_files:
            raise BadInput(fault)
    if unread:
        names = ", ".join(name for name, _ in unread)
        print(f"without effect under the other settings: {names}", file=sys.stderr, flush=True)


def _in_file(text: str, argv: Sequence[str], files: Mapping[str, Mapping[str, Any]]) -> str:
    """Adds the settings file that the value at fault stands in, if it stands in one.

    A file's value has to be of the right type even where the command line sets another one.
    """
    if (match := re.match(r"-*([\w.]+): ", text)) is None:
        return text
    name = match[1]
    for file in reversed([file for file in files if name in files[file]]):
        if f"--{name}" not in argv or repr(str(files[file][name])) in text:
            return f"{text} (in {file})"
    return text


def _mapping(value: str) -> dict[str, Any]:
    """The mapping in a YAML file or text; empty where there is none."""
    try:
        is_file = Path(value).is_file()
        content = yaml.safe_load(Path(value).read_text(encoding="utf-8") if is_file else value)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}

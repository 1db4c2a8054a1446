"""The help of a job: `--help` lists what it needs and its own options, and names those in groups.

A job has up to a hundred options, most of them in groups such as `loop`. `--help loop` lists a group, and
`--help all` everything.
"""

from __future__ import annotations

import shutil
import textwrap
import typing
from argparse import SUPPRESS, Action, ArgumentError, ArgumentParser
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

ALL = "all"
_TYPE_NAMES = {str: "TEXT", int: "INTEGER", float: "NUMBER", bool: "true|false"}
_GENERAL = {
    "config": (
        "FILE …",
        "YAML files with any of the options; a later file wins over an earlier one.",
    ),
    "print_config": ("", "Print all options with their values as YAML, and exit."),
    "progress": (
        "bar|json|none",
        "bar: for a person; json: a line of JSON per event on standard error; none: nothing.",
    ),
    "max_wait_minutes": (
        "NUMBER",
        "Minutes to wait for cores and GPUs that a service or another job holds; then exit code 1.",
    ),
}
"""The options of every job: their values, and their meanings."""
_MAX_WIDTH = 110


class _Group(NamedTuple):
    meaning: str
    options: list[Action]


def take_help(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """The words without `--help TOPIC`, and the topic: "" where no word follows, None where no help is
    asked for."""
    words = list(argv)
    own_words = words[: words.index("--")] if "--" in words else words  # the rest is another job's
    for place, word in enumerate(own_words):
        if word in ("--help", "-h"):
            topics = [word for word in own_words[place + 1 : place + 2] if not word.startswith("-")]
            del words[place : place + 1 + len(topics)]
            return words, "".join(topics)
    return words, None


def text(
    parser: ArgumentParser, topic: str, types: Mapping[str, Any], positional: str, after_dashes: str
) -> str:
    """What `--help` prints. `topic`: a group, "all", or "" for the job's own options.

    `types`: each option's type by its dotted name. `positional`: the option that needs no name.
    `after_dashes`: the option that stands after `--`. Raises ArgumentError for a topic that is not there.
    """
    own_options, groups = _collect(parser, after_dashes)
    if topic not in ("", ALL, *groups):
        names = ", ".join([*groups, ALL])
        raise ArgumentError(None, f"--help {topic}: no such group of options; there are: {names}")
    if topic in groups:
        return "\n".join(_section(f"{groups[topic].meaning}:", groups[topic].options, types))
    required = [option for option in own_options if option.required]
    words = [
        option.dest.upper()
        if option.dest == positional
        else f"{_name(option)} {_metavar(option, types)}"
        for option in required
    ]
    dashes = ["-- VERB …"] if after_dashes else []
    usage = " ".join(["usage:", parser.prog, *words, "[--option value …]", *dashes])
    lines = [_wrap(usage, "", "    "), ""]
    for paragraph in (parser.description or "").split("\n\n"):
        lines += [_wrap(" ".join(paragraph.split()), "", ""), ""]
    lines += _section("Required:", required, types) if required else []
    optional = [option for option in own_options if not option.required]
    lines += _section("Options:", optional, types)
    if topic == ALL:
        for group in groups.values():
            lines += _section(f"{group.meaning}:", group.options, types)
    elif groups:
        lines.append("Groups of options (--help GROUP lists one, --help all everything):")
        for name, group in groups.items():
            names = ", ".join(_name(option).removeprefix(f"--{name}.") for option in group.options)
            lines.append(_wrap(f"--{name}.…  {group.meaning}: {names}", "  ", "      "))
    return "\n".join(lines).rstrip()


def _collect(parser: ArgumentParser, hidden: str) -> tuple[list[Action], dict[str, _Group]]:
    """The options of the job itself but the `hidden` one, those of every job last, and those of each group,
    of its inner groups too."""
    own_options, groups = list[Action](), dict[str, _Group]()
    titles = {getattr(section, "dest", None): section.title for section in parser._action_groups}
    for section in parser._action_groups:
        for option in section._group_actions:
            is_whole_group = option.metavar == "CONFIG" and option.default == SUPPRESS
            if option.dest in ("help", hidden) or is_whole_group:
                continue
            name, dot, _ = option.dest.partition(".")
            if not dot:
                own_options.append(option)
            else:
                group = groups.setdefault(name, _Group(titles.get(name) or name, []))
                group.options.append(option)
    own_options.sort(key=lambda option: option.dest in _GENERAL)
    return own_options, groups


def _section(title: str, options: Sequence[Action], types: Mapping[str, Any]) -> list[str]:
    lines = [title]
    for option in options:
        words = [_name(option), _metavar(option, types)]
        if not option.required and option.default not in (None, SUPPRESS, "", (), []):
            words.append(f"(default: {_plain(option.default)})")
        elif option.default is None and words[1].endswith("|null"):
            words.append("(default: null)")
        lines.append(_wrap(" ".join(filter(None, words)), "  ", "      "))
        meaning = _GENERAL.get(option.dest, ("", option.help or ""))[1].replace("%%", "%")
        lines.append(_wrap(" ".join(meaning.split()), "      ", "      "))
    return [*lines, ""]


def _name(option: Action) -> str:
    return option.option_strings[-1].replace("_", "-")


def _metavar(option: Action, types: Mapping[str, Any]) -> str:
    if option.dest in _GENERAL:
        return _GENERAL[option.dest][0]
    hint: Any = types.get(option.dest)
    if typing.get_origin(hint) is not tuple and option.metavar:  # the choices
        return str(option.metavar).strip("{}").replace(",", "|")
    members = [kind for kind in typing.get_args(hint) or [hint] if kind is not Ellipsis]
    name = "|".join(dict.fromkeys(name for kind in members for name in _value_names(kind)))
    return f"{name} …" if typing.get_origin(hint) is tuple else name


def _value_names(kind: Any) -> list[str]:
    """The words for the values of a type: its choices, or its name."""
    if typing.get_origin(kind) is typing.Literal:
        return [_plain(choice) for choice in typing.get_args(kind)]
    return [_TYPE_NAMES.get(kind, "null")]


def _plain(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)


def _wrap(words: str, first: str, later: str) -> str:
    width = min(shutil.get_terminal_size((_MAX_WIDTH, 24)).columns, _MAX_WIDTH)
    return textwrap.fill(words, width, initial_indent=first, subsequent_indent=later, break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip

"""Describes the fault of an option or a settings file in one line that helps to correct it."""

from __future__ import annotations

import difflib
import re
from argparse import ArgumentError
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

_SHOWN = 3  # of the nearest options


def one_line(error: ArgumentError, prog: str, positional: str) -> str:
    """The parser's error: the option, the value and what is allowed. `positional`: the option that is typed
    without its name, or ""."""
    text = " ".join(str(error).split())
    wrong_type = re.match(r"Parser key \"(.+?)\": Expected an? (.+?)\. Got value: (.*)", text)
    if wrong_type:
        name, expected, value = wrong_type.groups()
        return _wrong_value(name, value, [expected])
    union = re.match(r"Parser key \"(.+?)\": Does not validate .* Given value: (.*)", text)
    if union:
        name, value = union.groups()
        return _wrong_value(
            name, value, re.findall(r"- Expected an? (.+?)(?=\.? - | Given value)", text)
        )
    missing = re.match(r"the following arguments are required: (.*)", text)
    if missing and positional in missing[1].split(", "):
        word = positional.upper()
        return f"{word}: missing, as in: {prog} {word}; see --help"
    if missing:
        return f"--{missing[1].replace(', ', ', --')}: missing; see --help"
    return re.sub(r"^Parser key \"config\": ", "--config: ", text)


def _wrong_value(name: str, value: str, kinds: Collection[str]) -> str:
    """`kinds`: types and choices, as the parser writes them."""
    expected = ", ".join(
        re.sub(r"^Literal\[(.*)\]$", r"\1", re.sub(r"<class '(\w+)'>|typing\.", r"\1", kind))
        for kind in kinds
    ).replace("NoneType", "null")
    matches = difflib.get_close_matches(value, re.findall(r"'([^']+)'", expected), n=1)
    hint = f"; did you mean {matches[0]}?" if matches else ""
    return f"{name}: {value!r} is not allowed; allowed: {expected}{hint}"


def unknown_option(name: str, options: Collection[str]) -> str:
    """`name` and `options` are dotted, with underscores; the line has dashes, as one types them."""
    if nearest := _nearest_options(name, options):
        return f"--{_dashed(name)}: unknown option; did you mean {nearest}?"
    group = name.rpartition(".")[0]
    group_options = sorted(option for option in options if group and option.startswith(f"{group}."))
    if group_options:
        return f"--{_dashed(name)}: unknown option; there are: --{', --'.join(map(_dashed, group_options))}"
    return f"--{_dashed(name)}: unknown option; --help all lists them"


def unknown_key(file: str, name: str, options: Collection[str]) -> str:
    """The same for a key of a settings file."""
    return f"--config {file}: {name}: {unknown_option(name, options).partition(': ')[2]}"


def read_mapping(file: str) -> tuple[dict[str, Any], str]:
    """(content of a settings file, its fault); the fault is "" for a correct file and for a missing one."""
    path = Path(file)
    if not path.is_file():
        return {}, ""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        return {}, f"--config {file}: not UTF-8 (byte {error.start})"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        return {}, f"--config {file}{line}: not YAML ({error.problem or error.context})"
    except (OSError, ValueError, yaml.YAMLError) as error:
        return {}, f"--config {file}: not YAML ({' '.join(str(error).split())})"
    if content is None:
        return {}, ""
    if not isinstance(content, dict):
        return {}, f"--config {file}: holds no options; allowed: lines such as `name: value`"
    return {str(name): value for name, value in content.items()}, ""


def _nearest_options(name: str, options: Collection[str]) -> str:
    """The options that may have been meant: of a like name, or of that name in another group."""
    leaf = name.rpartition(".")[2]
    nearest = [option for option in sorted(options) if option.rpartition(".")[2] == leaf]
    nearest = nearest or difflib.get_close_matches(name, sorted(options), n=1, cutoff=0.8)
    leaves = {option.rpartition(".")[2]: option for option in sorted(options, reverse=True)}
    if not nearest and (similar_leaves := difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.8)):
        nearest = [leaves[similar_leaves[0]]]
    return " or ".join(f"--{_dashed(option)}" for option in nearest[:_SHOWN])


def _dashed(name: str) -> str:
    return name.replace("_", "-")

"""What is wrong with an option or a settings file, in one line that helps to mend it."""

from __future__ import annotations

import difflib
import re
from argparse import ArgumentError
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

_SHOWN = 3  # of the nearest options


def one_line(error: ArgumentError) -> str:
    """The parser's error: the option, the value and what is allowed."""
    text = " ".join(str(error).split())
    wrong_type = re.match(r"Parser key \"(.+?)\": Expected an? (.+?)\. Got value: (.*)", text)
    if wrong_type:
        name, expected, value = wrong_type.groups()
        expected = re.sub(r"<class '(\w+)'>|typing\.", r"\1", expected)
        expected = re.sub(r"^Literal\[(.*)\]$", r"\1", expected)
        near = difflib.get_close_matches(value, re.findall(r"'([^']+)'", expected), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{name}: {value!r} is not allowed; allowed: {expected}{hint}"
    missing = re.match(r"the following arguments are required: (.*)", text)
    if missing:
        return f"--{missing[1].replace(', ', ', --')}: missing; see --help"
    return re.sub(r"^Parser key \"config\": ", "--config: ", text)


def unknown_option(name: str, known: Collection[str]) -> str:
    """`name` and `known` are dotted, with underscores; the line has dashes, as one types them."""
    if nearest := _nearest(name, known):
        return f"--{_typed(name)}: unknown option; did you mean {nearest}?"
    group = name.rpartition(".")[0]
    own = sorted(option for option in known if group and option.startswith(f"{group}."))
    if own:
        return f"--{_typed(name)}: unknown option; there are: --{', --'.join(map(_typed, own))}"
    return f"--{_typed(name)}: unknown option; --help lists all"


def unknown_key(file: str, name: str, known: Collection[str]) -> str:
    """The same for a key of a settings file."""
    return f"--config {file}: {name}: {unknown_option(name, known).partition(': ')[2]}"


def read_mapping(file: str) -> tuple[dict[str, Any], str]:
    """(what a settings file holds, what is wrong with it; "": nothing, or it cannot be read)"""
    path = Path(file)
    if not path.is_file():
        return {}, ""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        return {}, f"--config {file}: not UTF-8 (byte {error.start})"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        return {}, f"--config {file}{line}: not YAML ({error.problem or error.context})"
    except (OSError, ValueError, yaml.YAMLError) as error:
        return {}, f"--config {file}: not YAML ({' '.join(str(error).split())})"
    if found is None:
        return {}, ""
    if not isinstance(found, dict):
        return {}, f"--config {file}: holds no options; allowed: lines such as `name: value`"
    return {str(name): value for name, value in found.items()}, ""


def _nearest(name: str, known: Collection[str]) -> str:
    """The options that may have been meant: of a like name, or of that name in another group."""
    leaf = name.rpartition(".")[2]
    found = [option for option in sorted(known) if option.rpartition(".")[2] == leaf]
    found = found or difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8)
    leaves = {option.rpartition(".")[2]: option for option in sorted(known, reverse=True)}
    if not found and (like := difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.8)):
        found = [leaves[like[0]]]
    return " or ".join(f"--{_typed(option)}" for option in found[:_SHOWN])


def _typed(name: str) -> str:
    return name.replace("_", "-")

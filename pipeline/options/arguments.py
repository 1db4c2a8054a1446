"""Brings the words of a command line into the form that the parser of options reads."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_LIST = re.compile(r"\[.*\]\s*", re.DOTALL)
_OTHER_LETTER = re.compile("[\x7f-\uffff]")  # some of these end a line, or are none, in YAML


def normalise(argv: Sequence[str], fields: dict[str, Any], aliases: Mapping[str, str]) -> list[str]:
    """Aliases to names, dashes to underscores, `--list a b` to one JSON value, `--flag` to `--flag true`.

    `--config a b` becomes `--config a --config b`, and comes first, wherever it stands: jsonargparse lets
    the later one win.
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
        name = name[2:].replace("-", "_")
        group, dot, field = name.partition(".")
        name = f"--{aliases.get(group, group)}{dot}{field}"
        hint = fields.get(name[2:])
        values = [value] if equals else []
        if not equals:
            is_list = typing.get_origin(hint) is tuple or name == "--config"
            while position < len(argv) and not argv[position].startswith("--"):
                if values and not is_list:
                    break
                values.append(argv[position])
                position += 1
        if hint is bool and not values:
            values = ["true"]
        if typing.get_origin(hint) is tuple and not (
            len(values) == 1 and _LIST.fullmatch(values[0])
        ):
            values = [list_text(values)]
        if name == "--config" and values:
            config.extend(part for file in values for part in (name, installed_file(file)))
        else:
            normal.extend([name, *values])
    return config + normal


def list_text(values: Sequence[str]) -> str:
    """The values as a list in YAML, which reads JSON, but not the two halves that JSON makes of an emoji."""
    text = json.dumps(list(values), ensure_ascii=False)
    return _OTHER_LETTER.sub(lambda letter: f"\\u{ord(letter[0]):04x}", text)


def installed_file(file: str) -> str:
    """The file itself; or, if the working directory has no such file, the installed recipe or workflow of
    that name (`jobs/configs/finetune/bi.yaml`), so that commands work outside of a checkout."""
    installed = _ROOT / file
    is_ours = installed.is_relative_to(_ROOT / "jobs") and installed.suffix == ".yaml"
    return str(installed) if is_ours and installed.is_file() and not Path(file).exists() else file


def gather_passed_on(argv: Sequence[str], field: str, groups: Collection[str]) -> list[str]:
    """Puts the options of another job's `groups` unread into the list `field`; `argv` is normalised."""
    own_arguments, passed_on = list[str](), list[str]()
    target = own_arguments
    for argument in argv:
        if argument.startswith("--"):
            group, dot, _ = argument[2:].partition(".")
            target = passed_on if dot and group in groups else own_arguments
        target.append(argument)
    return [*own_arguments, f"--{field}", list_text(passed_on)] if passed_on else own_arguments

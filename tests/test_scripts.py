"""What long tests and the scripts inside of tests name of ours exists, so that they do not drift unseen."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
OURS = ("pipeline", "jobs", "serve", "tests")
IMPORTS = re.compile(r"^(from [\w.]+ import |import \w)", re.MULTILINE)
MISSING = object()


def scripts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of the Python programs that a file holds as strings."""
    for node in ast.walk(ast.parse(path.read_text())):
        text = node.value if isinstance(node, ast.Constant) else ""
        if isinstance(text, str) and "\n" in text and IMPORTS.search(text):
            yield node.lineno, re.sub(r"\{\w+!r\}", "''", text)  # of str.format


def programs() -> Iterator[tuple[str, str]]:
    """(name, text)"""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text()
        if "mark.long" in text and path != Path(__file__):
            yield name, text
        for line, script in scripts(path):
            yield f"{name}:{line}", script


def is_ours(module: str) -> bool:
    return module.split(".")[0] in OURS


def imported(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """(name, what it means) of all imports of ours; `MISSING`: nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if is_ours(alias.name):
                    module = import_module(alias.name)
                    yield (alias.asname, module) if alias.asname else ("", module)
        elif isinstance(node, ast.ImportFrom) and not node.level and is_ours(node.module):
            module = import_module(node.module)
            for alias in node.names:
                found = getattr(module, alias.name, MISSING)
                if found is MISSING and find_spec(f"{node.module}.{alias.name}"):
                    found = import_module(f"{node.module}.{alias.name}")
                yield alias.asname or alias.name, found


def faults(text: str) -> Iterator[str]:
    """Names of ours that are not there, and calls whose arguments do not fit."""
    tree = ast.parse(text)
    meaning = dict(imported(tree))
    yield from (f"{name} is not there" for name, found in meaning.items() if found is MISSING)
    for node in ast.walk(tree):  # another thing of that name
        if isinstance(node, ast.arg):
            meaning.pop(node.arg, None)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            meaning.pop(node.id, None)

    def meant(node: ast.expr) -> Any:
        """What an expression means; None: nobody knows."""
        if isinstance(node, ast.Name):
            return meaning.get(node.id)
        owner = meant(node.value) if isinstance(node, ast.Attribute) else None
        known = isinstance(owner, ModuleType) and is_ours(owner.__name__)
        return getattr(owner, node.attr, MISSING) if known else None

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and meant(node) is MISSING:
            yield f"line {node.lineno}: {ast.unparse(node)} is not there"
        if isinstance(node, ast.Call) and callable(called := meant(node.func)):
            has_spread = any(isinstance(each, ast.Starred) for each in node.args)
            if has_spread or any(each.arg is None for each in node.keywords):
                continue
            try:
                inspect.signature(called).bind(
                    *node.args, **{each.arg: each.value for each in node.keywords}
                )
            except ValueError:  # no signature, as of exceptions
                continue
            except TypeError as error:
                yield f"line {node.lineno}: {ast.unparse(node.func)}: {error}"


def test_what_they_name_and_call_is_there():
    found = dict[str, list[str]]()
    for name, text in programs():
        try:
            found[name] = list(faults(text))
        except ModuleNotFoundError as error:
            if is_ours(error.name):
                raise
    assert len(found) > 50
    assert {name: problems for name, problems in found.items() if problems} == {}

"""The rooms of the library stand on each other in one order."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATHS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "pipeline").rglob("*.py")
}


def imported_modules(path: Path, modules: Collection[str], at_once: bool = False) -> Iterator[str]:
    """The `modules` that a file imports, also inside functions and for types only; `at_once`: those that
    its own import loads."""
    tree = ast.parse(path.read_text())
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in modules else node.module for name in names)


@pytest.mark.parametrize("depth", [2, 9], ids=["rooms", "modules"])
def test_nothing_imports_itself_through_others(depth):
    """A room is a module or a package right below `pipeline`, with all that lies in it."""
    sorter = TopologicalSorter[str]()
    for module, path in PATHS.items():
        for imported in imported_modules(path, PATHS):
            importer, other = (".".join(name.split(".")[:depth]) for name in (module, imported))
            if other not in (importer, "pipeline"):
                sorter.add(importer, other)
    sorter.prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize(
    "room",
    ["corpora", "corpora/formats", "engine", "evaluation", "models", "options", "pools", "search",
     "storage", "training", "../serve", "../serve/http"],
)  # fmt: skip
def test_the_map_of_a_room_names_its_modules(room):
    folder = ROOT / "pipeline" / room
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    modules = {path.stem for path in folder.glob("*.py")} | {
        path.parent.name for path in folder.glob("*/__init__.py")
    }
    assert [name for name in modules - {"__init__"} if not re.search(rf"\b{name}\b", text)] == []


def packages_at_once(path: Path) -> set[str]:
    """The packages that the import of a file loads."""
    imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import)]
    froms = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in imports for alias in node.names]
    return {name.partition(".")[0] for name in (*names, *(str(node.module) for node in froms))}


def test_a_ranker_that_searches_and_explains_loads_no_ray():
    """Neither the modules that it imports at its first use, nor those that these import."""
    waiting = list(imported_modules(PATHS["pipeline.ranking.ranker"], PATHS))
    loaded = set[str]()
    while waiting:
        module = waiting.pop()
        if module not in loaded:
            loaded.add(module)
            waiting += imported_modules(PATHS[module], PATHS, at_once=True)
    assert {"pipeline.search.exact", "pipeline.models.inference"} <= loaded
    heavy = {"ray", "mlflow", "matplotlib", "sklearn"}
    assert [module for module in loaded if packages_at_once(PATHS[module]) & heavy] == []


def test_workers_of_corpora_load_no_torch():
    """It takes 1.4 s and 200 MB of every worker, of which corpora need thousands."""
    rooms = [ROOT / "pipeline" / name for name in ("corpora", "engine", "storage")]
    files = [path.relative_to(ROOT) for room in rooms for path in room.rglob("*.py")]
    modules = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files]
    code = (
        f"import sys, {', '.join(modules)}\n"
        "print(sorted({'torch', 'mlflow', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr

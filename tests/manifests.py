"""What kustomize makes of a folder of kuberay/, by the few of its rules that these folders use."""

from __future__ import annotations

from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import yaml

_KUBERAY = Path(__file__).parents[1] / "kuberay"


def rendered(folder: str) -> dict[tuple[str, str], Any]:
    """The resources by kind and name. tests/test_project.py compares them with kustomize's own."""
    resources = {(each["kind"], each["metadata"]["name"]): each for each in _build(folder, [])}
    return {key: each for key, each in resources.items() if "annotations" not in each["metadata"]}


def _build(folder: str, found: list[Any]) -> list[Any]:
    rules = yaml.safe_load((_KUBERAY / folder / "kustomization.yaml").read_text())
    for path in (f"{folder}/{name}" for name in rules.get("resources", ())):
        is_file = path.endswith(".yaml")
        found += yaml.safe_load_all((_KUBERAY / path).read_text()) if is_file else _build(path, [])
    for name in rules.get("components", ()):
        _build(f"{folder}/{name}", found)
    for image in rules.get("images", ()):
        new_name = f"image: {image['newName']}:{image['newTag']}\n"
        text = yaml.safe_dump(found).replace(f"image: {image['name']}\n", new_name)
        found[:] = yaml.safe_load(text)
    by_kind = {each["kind"]: each for each in found}
    new = []
    for patch in rules.get("patches", ()):
        for operation in yaml.safe_load(patch["patch"]):
            path = operation["path"].split("/")[1:]
            new.append((patch["target"]["kind"], path, operation["value"]))
    for rule in rules.get("replacements", ()):
        value = by_kind[rule["source"]["kind"]][rule["source"]["fieldPath"]]
        for target in rule["targets"]:
            new.append((target["select"]["kind"], target["fieldPaths"][0].split("."), value))
    for kind, (*path, name), value in new:
        if kind in by_kind:
            reduce(getitem, path, by_kind[kind])[name] = value
    return found

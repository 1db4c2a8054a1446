"""Code that lies in a model's folder never runs."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from pipeline.config import BadInput
from pipeline.models.tokens import Tokenizer

ROOT = Path(__file__).parents[3]


def test_a_tokenizer_with_code_of_its_own_is_refused_whatever_the_terminal_answers(
    tmp_path, monkeypatch
):
    ran = tmp_path / "ran"
    files = {
        "config.json": json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}),
        "tokenizer.json": "{}",
        "tokenizer_config.json": json.dumps({"auto_map": {"AutoTokenizer": ["own.Own", None]}}),
        "own.py": f"open({str(ran)!r}, 'w').close()\nclass Own: pass\nclass Config: pass\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("builtins.input", lambda question="": "y")
    with pytest.raises(BadInput, match="tokenizer cannot be read"):
        Tokenizer.load(tmp_path)
    assert not ran.exists()


def _loading_calls() -> list[tuple[str, ast.Call]]:
    """Each call of a `from_pretrained` of transformers in the project."""
    files = [f for name in ("pipeline", "jobs", "serve") for f in (ROOT / name).rglob("*.py")]
    return [
        (f"{file.relative_to(ROOT)}:{node.lineno}", node)
        for file in files
        if "from_pretrained" in file.read_text()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "from_pretrained"
    ]


def test_every_loader_of_the_project_refuses_code_from_outside():
    calls = _loading_calls()
    assert len(calls) >= 3
    for place, call in calls:
        values = {keyword.arg: getattr(keyword.value, "value", None) for keyword in call.keywords}
        assert values.get("trust_remote_code") is False, place

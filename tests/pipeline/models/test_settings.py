"""Settings per architecture: what a ranker can do, and rankers that earlier versions published."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from pipeline.config import BadInput
from pipeline.models.settings import (
    BiConfig,
    ConvertConfig,
    CrossConfig,
    PolyConfig,
    RankerConfig,
    read_settings,
)

ROOT = Path(__file__).parents[3]
# What `ranker.json` held when one dataclass had the fields of all architectures.
FORMER = {
    "reduction": "mean", "reduction_m": 64, "context_codes": "learnt", "m": 16, "code_attention": "dot",
    "candidate_attention": "multi_head", "attention_heads": 4, "code_init_std": 0.05,
    "share_towers": True, "output_scaling": 0.5, "projection": 0, "vector_length": 0.0,
    "matryoshka": [], "dimensions": 0, "pooler": True, "max_context_tokens": 96,
    "max_candidate_tokens": 48,
}  # fmt: skip
LENGTHS = {"output_scaling": 0.5, "max_context_tokens": 96, "max_candidate_tokens": 48}


@pytest.mark.parametrize(("architecture", "expected"), [
    ("bi", BiConfig(share_towers=True, **LENGTHS)),
    ("poly", PolyConfig(share_towers=True, m=16, candidate_attention="multi_head", **LENGTHS)),
    ("cross", CrossConfig(pooler=True, **LENGTHS)),
])  # fmt: skip
def test_settings_of_former_rankers_load_without_other_architectures_fields(
    architecture, expected, tmp_path
):
    text = json.dumps({"architecture": architecture, **FORMER})
    (tmp_path / "ranker.json").write_text(text)
    assert read_settings(str(tmp_path)) == expected


@pytest.mark.parametrize(("config", "vectors"), [
    (BiConfig(), 1),
    (PolyConfig(m=5), 5),
    (PolyConfig(m=5, context_codes="last_m_and_first"), 6),
    (CrossConfig(), 0),
])  # fmt: skip
def test_settings_say_how_many_vectors_a_context_has(config, vectors):
    assert config.vectors_per_context == vectors
    assert config.has_vectors == (vectors > 0)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("m", 3.0, "a whole number"),
        ("m", True, "a whole number"),
        ("share_towers", "false", "true or false"),
        ("output_scaling", "1", "a number"),
        ("matryoshka", ["8"], "whole numbers"),
        ("matryoshka", 8, "whole numbers"),
    ],
)
def test_values_of_another_type_are_refused(name, value, allowed, tmp_path):
    text = json.dumps({"architecture": "poly", **FORMER, name: value})
    (tmp_path / "ranker.json").write_text(text)
    with pytest.raises(BadInput, match=rf"ranker\.{name}: .* is not allowed; allowed: {allowed}"):
        read_settings(str(tmp_path))


@pytest.mark.parametrize(("kind", "change"), [
    (PolyConfig, {"reduction_m": 0}), (PolyConfig, {"attention_heads": 0}),
    (PolyConfig, {"projection": -1}), (PolyConfig, {"vector_length": -1.0}),
    (PolyConfig, {"matryoshka": (0,)}), (PolyConfig, {"dimensions": 3}),
    (PolyConfig, {"matryoshka": (8,), "candidate_attention": "multi_head"}),
    (ConvertConfig, {"windows": ()}), (ConvertConfig, {"hidden": (0,)}), (ConvertConfig, {"buckets": 0}),
    (ConvertConfig, {"activation": "gelu"}), (ConvertConfig, {"earlier_turns": -1}),
    (ConvertConfig, {"anneal_steps": -1}), (CrossConfig, {"output_scaling": 0.0}),
    (BiConfig, {"max_context_tokens": 2}),
])  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(kind, change):
    with pytest.raises(
        BadInput, match=f"ranker.{next(iter(change))}: .* is not allowed; allowed: "
    ):
        kind(**change)
    assert ConvertConfig(anneal_steps=0, range_every_steps=1)


def test_settings_that_are_defaults_take_those_of_a_model_to_train_further():
    model = ConvertConfig(width=32, windows=(2, 4), activation="relu", anneal_steps=7, buckets=9)
    found = ConvertConfig(buckets=8, earlier_turns=2).sized_as(model)
    assert found == ConvertConfig(
        width=32, windows=(2, 4), activation="relu", buckets=8, earlier_turns=2
    )
    reads_more = {"earlier_turns": 10, "number_earlier_turns": True, "context_codes": 3}
    assert ConvertConfig().sized_as(ConvertConfig(**reads_more)) == ConvertConfig(**reads_more)


def test_no_other_module_asks_which_architecture_a_ranker_has():
    """`encoder.py` and `Shape` compare those of encoders; `to_onnx.py` writes the graph of one."""
    networks = {"BiEncoder", "PolyEncoder", "CrossEncoder", "ConvertNetwork"}
    networks |= {kind.__name__ for kind in get_args(RankerConfig)}
    wrong, models = [], ROOT / "pipeline" / "models"
    excepted = {models / name for name in ("ranker.py", "encoder.py", "interop/to_onnx.py")}
    for folder in ("pipeline", "jobs", "serve"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if path in excepted or not any(name in text for name in ("architecture", *networks)):
                continue
            tree = ast.parse(text)
            shapes = (part for part in ast.walk(tree) if getattr(part, "name", "") == "Shape")
            in_shapes = {part for shape in shapes for part in ast.walk(shape)}
            for node in set(ast.walk(tree)) - in_shapes:
                compared = isinstance(node, ast.Compare) and any(
                    isinstance(part, ast.Attribute) and part.attr == "architecture"
                    for part in ast.walk(node)
                )
                asked = (
                    isinstance(node, ast.Call)
                    and getattr(node.func, "id", "") == "isinstance"
                    and any(getattr(part, "id", "") in networks for part in ast.walk(node))
                )
                if compared or asked:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert wrong == []


def test_settings_need_no_torch_and_precisions_no_transformers():
    code = ("import sys, pipeline.models.settings; assert 'torch' not in sys.modules; "
            "import pipeline.models.precision; assert 'transformers' not in sys.modules")  # fmt: skip
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

"""Small ConveRT models, and the numbers of PolyAI's graphs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.models import inference
from pipeline.models.convert_rt.tokenizer import save_vocabulary
from pipeline.models.ranker import Ranker, new_ranker
from pipeline.models.settings import ConvertConfig

VOCABULARY = ["﹏", *"abcdefghijklmnopqrstuvwxyz", "﹏the", "﹏cat", "at", " ", ".", "﹏.", "ing"]
SMALL: dict[str, Any] = {
    "buckets": 5, "width": 16, "position_tables": (7, 3), "windows": (1, 2, 40), "attention_width": 4,
    "intermediate": 24, "reduction_width": 6, "hidden": (12, 10), "encoding_width": 8,
    "max_context_tokens": 20, "max_candidate_tokens": 20,
}  # fmt: skip


@pytest.fixture(scope="session")
def golden(shared: Path) -> SimpleNamespace:
    """`arrays` by name, and `about`: the texts and pieces."""
    about = json.loads((shared / "golden/convert.json").read_text(encoding="utf-8"))
    return SimpleNamespace(arrays=dict(np.load(shared / "golden/convert.npz")), about=about)


@pytest.fixture(scope="session")
def vocabulary_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary")
    save_vocabulary(VOCABULARY, folder)
    return folder


@pytest.fixture
def convert(vocabulary_folder: Path) -> Callable[..., Ranker]:
    """`convert(**settings)`: a model whose weights are far from their beginnings."""

    def build(**settings: Any) -> Ranker:
        config = ConvertConfig(**{**SMALL, **settings})
        ranker = new_ranker(config, vocabulary_folder, seed=0)
        noise = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in ranker.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=noise)
        return inference.place(ranker.eval(), torch.device("cpu"), "fp32")

    return build

"""Which numbers a precision stands for."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from pipeline.models import precision
from pipeline.models.precision import resolve_precision


@pytest.mark.parametrize("matrix_units", [True, False])
def test_only_auto_depends_on_the_hardware(monkeypatch, matrix_units):
    monkeypatch.setattr(precision, "use_bf16", lambda device: matrix_units)
    device = torch.device("cpu")
    assert resolve_precision("auto", device) == ("bf16" if matrix_units else "fp32")
    assert resolve_precision("bf16", device) == "bf16"
    assert resolve_precision("fp32", device) == "fp32"


def test_it_needs_no_transformers():
    code = "import sys, pipeline.models.precision; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

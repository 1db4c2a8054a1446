"""What a processor is taken for, and the bound that a user sets."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from pipeline.config import BadInput
from pipeline.models.precision import resolve_precision
from pipeline.processor import KINDS, kind_of, processor, processor_has

# What machines of each kind report.
AVX2 = ["avx2", "fma3", "f16c"]
SKYLAKE = [*AVX2, "avx512_f", "avx512_bw", "avx512_dq", "avx512_vl"]
ICE_LAKE = [*SKYLAKE, "avx512_vnni"]
ZEN_4 = [*ICE_LAKE, "avx512_bf16"]
SAPPHIRE_RAPIDS = [*ZEN_4, "amx_tile", "amx_int8", "amx_bf16"]
MACHINES = {
    "plain": ["avx", "sse4_2"], "avx2": AVX2, "avx512": SKYLAKE, "avx512_vnni": ICE_LAKE,
    "avx512_bf16": ZEN_4, "amx": SAPPHIRE_RAPIDS,
}  # fmt: skip


@pytest.fixture
def machine(monkeypatch):
    def become(instructions):
        capabilities = dict.fromkeys(SAPPHIRE_RAPIDS, False) | dict.fromkeys(instructions, True)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)

    monkeypatch.delenv("POLYRANK_PROCESSOR", raising=False)
    return become


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_can_do_what_its_instructions_do(machine, kind):
    machine(MACHINES[kind])
    assert processor() == kind
    able = [each for each in KINDS if processor_has(each)]
    assert able == [*KINDS[: KINDS.index(kind) + 1]]
    device = torch.device("cpu")
    assert resolve_precision("auto", device) == (
        "bf16" if kind in ("avx512_bf16", "amx") else "fp32"
    )


@pytest.mark.parametrize(("instructions", "kind"), [
    ([*AVX2, "avx_vnni"], "avx2"),  # Alder Lake
    (["neon", "fp16_arith", "bf16", "i8mm", "dot", "sve", "sve_bf16"], "plain"),  # Graviton 3
])  # fmt: skip
def test_unmeasured_processors_are_taken_for_less(instructions, kind):
    assert kind_of(dict.fromkeys(instructions, True)) == kind


@pytest.mark.parametrize("bound", KINDS)
def test_the_bound_only_lowers(machine, monkeypatch, bound):
    monkeypatch.setenv("POLYRANK_PROCESSOR", bound)
    for actual, instructions in MACHINES.items():
        machine(instructions)
        monkeypatch.setenv("POLYRANK_PROCESSOR", bound)
        assert processor() == min(actual, bound, key=KINDS.index)


def test_another_value_is_refused(monkeypatch, run_job_here):
    monkeypatch.setenv("POLYRANK_PROCESSOR", "AVX2")
    with pytest.raises(
        BadInput, match="POLYRANK_PROCESSOR: 'AVX2' is not allowed; allowed: plain, avx2, "
    ):
        processor()
    done = run_job_here("inspect", "--corpus", "anything")
    assert done.code == 2
    assert "POLYRANK_PROCESSOR: 'AVX2' is not allowed" in done.stderr


@pytest.mark.slow
def test_the_command_says_the_kind_alone():
    command = [sys.executable, "-m", "pipeline.processor"]
    environment = {**os.environ, "POLYRANK_PROCESSOR": "plain"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("plain\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bound", "kernels"),
    [
        ("plain", "DEFAULT"),
        pytest.param("avx2", "AVX2", marks=pytest.mark.long),
        pytest.param("amx", None, marks=pytest.mark.long),
    ],
)
def test_the_bound_holds_for_the_kernels_of_torch(bound, kernels):
    if not torch.cpu.get_capabilities().get("avx2") or sys.platform != "linux":
        pytest.skip("libraries are bounded on Linux with AVX2 alone")
    code = "import pipeline, torch; print(torch.backends.cpu.get_cpu_capability())"
    bounded = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
    environment = {name: value for name, value in os.environ.items() if name not in bounded}
    environment["POLYRANK_PROCESSOR"] = bound
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    unbounded = "AVX512" if torch.cpu.get_capabilities().get("avx512_f") else "AVX2"
    assert done.stdout.split()[0] == (kernels or unbounded)

"""What the processor of this machine is taken for: which kernels pay here, and whether it multiplies bf16.

The variable POLYRANK_PROCESSOR bounds it: with `avx2` a newer processor is taken for one that has AVX2 and
nothing later. It can only lower. A user with a bad kernel sets it on every node; a test on a new machine
proves an old one. On Linux it bounds torch, oneDNN and MKL, too, unless their own variables are set. They
read them at their first computation, so the variable belongs in the environment that a process starts with.

    plain          no instructions that this project asks for
    avx2           AVX2: most desktops and small cloud machines
    avx512         and AVX-512
    avx512_vnni    and products of int8. Without it torch's are slower than in float32
    avx512_bf16    and products of bf16: AMD since Zen 4, Intel since Cooper Lake. A Zen 5 makes 740 GFLOPS,
                   170 in float32; other processors emulate them at a quarter of float32's speed
    amx            and matrix units: Intel since Sapphire Rapids

A processor that is not x86 is `plain`, because nothing was measured there. `python -m pipeline.processor`
prints what this machine is taken for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from pipeline.config import require
from pipeline.library_kernels import VARIABLE

# What each kind has that those before it lack, as torch names it.
_INSTRUCTIONS = {
    "plain": (),
    "avx2": ("avx2", "fma3", "f16c"),
    "avx512": ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl"),
    "avx512_vnni": ("avx512_vnni",),
    "avx512_bf16": ("avx512_bf16",),
    "amx": ("amx_tile", "amx_int8", "amx_bf16"),
}
KINDS = tuple(_INSTRUCTIONS)
"""Weakest first."""


def processor() -> str:
    """The kind of this machine's processor, or the one in POLYRANK_PROCESSOR if that is less.

    Raises BadInput if the variable names no kind.
    """
    import torch

    actual = kind_of(torch.cpu.get_capabilities())
    return min(actual, bound_kind() or actual, key=KINDS.index)


def processor_has(kind: str) -> bool:
    """Whether the processor can do what this kind can."""
    return KINDS.index(processor()) >= KINDS.index(kind)


def bound_kind() -> str:
    """The kind in POLYRANK_PROCESSOR; "" if it is not set. Raises BadInput if it is none of `KINDS`."""
    kind = os.environ.get(VARIABLE, "")
    require(kind in ("", *KINDS), VARIABLE, kind, ", ".join(KINDS))
    return kind


def kind_of(capabilities: Mapping[str, object]) -> str:
    """The kind of a processor with these `torch.cpu.get_capabilities`."""
    found = "plain"
    for kind, instructions in _INSTRUCTIONS.items():
        if not all(capabilities.get(name) for name in instructions):
            break
        found = kind
    return found


if __name__ == "__main__":
    print(processor())

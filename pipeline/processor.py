"""What the processor of this machine is taken for: which kernels pay here, and whether it multiplies bf16.

The variable POLYRANK_PROCESSOR bounds it: with `avx2` a newer processor is taken for one that has AVX2 and
nothing later. It can only lower. A user with a bad kernel sets it on every node; a test on a new machine
proves an old one. On Linux it bounds torch, oneDNN and MKL, too, unless their own variables are set. They
read them at their first computation, so the variable belongs in the environment that a process starts with.

    plain          no instructions that this project asks for
    avx2           AVX2: most desktops and small cloud machines
    avx512         and AVX-512
    avx512_vnni    and products of int8
    avx512_bf16    and products of bf16: AMD since Zen 4, Intel since Cooper Lake
    amx            and matrix units: Intel since Sapphire Rapids

A processor that is not x86 is `plain`, because nothing was measured there. `python -m pipeline.processor`
prints what this machine is taken for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Processor:
    """A kind of processor, and what it can do."""

    kind: str
    """One of `KINDS`."""

    @property
    def avx2(self) -> bool:
        return self._reaches("avx2")

    @property
    def avx512(self) -> bool:
        return self._reaches("avx512")

    @property
    def vnni(self) -> bool:
        """Whether products of int8 are fast. Without it torch's are slower than in float32."""
        return self._reaches("avx512_vnni")

    @property
    def bf16(self) -> bool:
        """Whether products of bf16 are fast: a Zen 5 makes 740 GFLOPS, 170 in float32. Other processors
        emulate them at a quarter of float32's speed."""
        return self._reaches("avx512_bf16")

    def _reaches(self, kind: str) -> bool:
        return KINDS.index(self.kind) >= KINDS.index(kind)


def processor() -> Processor:
    """The processor of this machine, or the kind in POLYRANK_PROCESSOR if that is less.

    Raises BadInput if the variable names no kind.
    """
    import torch

    actual = kind_of(torch.cpu.get_capabilities())
    return Processor(min(actual, bound_kind() or actual, key=KINDS.index))


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
    print(processor().kind)

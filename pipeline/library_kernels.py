"""The kernels of torch, oneDNN and MKL, bounded by POLYRANK_PROCESSOR (`pipeline.processor`).

Apart from processor.py, because `import pipeline` loads this module: Python warns of a module that
`python -m` runs and that its package has loaded already.
"""

import os
from contextlib import suppress
from pathlib import Path

VARIABLE = "POLYRANK_PROCESSOR"
# What gives the libraries the kernels of a kind. torch's own know nothing above AVX-512.
_LIBRARY_VARIABLES = {
    "ATEN_CPU_CAPABILITY": {"plain": "default", "avx2": "avx2"},
    "ONEDNN_MAX_CPU_ISA": {"plain": "SSE41", "avx2": "AVX2", "avx512": "AVX512_CORE",
                           "avx512_vnni": "AVX512_CORE_VNNI", "avx512_bf16": "AVX512_CORE_BF16"},
    "MKL_ENABLE_INSTRUCTIONS": {"plain": "SSE4_2", "avx2": "AVX2", "avx512": "AVX512",
                                "avx512_vnni": "AVX512_E1", "avx512_bf16": "AVX512_E3"},
}  # fmt: skip


def bound_libraries() -> None:
    """Bounds their kernels by POLYRANK_PROCESSOR. They must not have computed yet."""
    kind, flags = os.environ.get(VARIABLE, ""), ""
    if not kind:
        return
    with suppress(OSError):
        flags = Path("/proc/cpuinfo").read_text()
    if "avx2" in flags:  # torch would take AVX2's kernels on a processor that lacks them
        for variable, values in _LIBRARY_VARIABLES.items():
            if kind in values:
                os.environ.setdefault(variable, values[kind])

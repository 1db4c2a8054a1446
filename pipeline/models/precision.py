"""What encoders compute in. Nothing here needs torch, so that settings can name it."""

from __future__ import annotations

from typing import Literal

Precision = Literal["auto", "bf16", "fp32"]
"""auto: bf16 where the hardware multiplies it, else fp32."""
Resolved = Literal["bf16", "fp32"]

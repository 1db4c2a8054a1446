"""Token outputs to one vector per text (Poly-encoder paper, section 4.2: red(·))."""

from __future__ import annotations

from torch import Tensor

from pipeline.models.settings import Reduction


def reduce(hidden_BTD: Tensor, mask_BT: Tensor, reduction: Reduction, m: int) -> Tensor:
    """[B, T, D], [B, T] → [B, D]: the first output, or the mean over all tokens that are not padding, or
    over the first `m` of them.

    The mean counts the special tokens too, as ParlAI's does. Pads stand at the right.
    """
    if reduction == "first":
        return hidden_BTD[:, 0]
    if reduction == "mean_first_m":
        hidden_BTD, mask_BT = hidden_BTD[:, :m], mask_BT[:, :m]
    weight_BT = mask_BT.to(hidden_BTD.dtype)
    count_B1 = weight_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return (hidden_BTD * (weight_BT / count_B1)[:, :, None]).sum(dim=1)

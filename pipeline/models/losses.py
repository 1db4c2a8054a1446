"""Ranking losses: softmax over the candidates of each context."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def ranking_loss(
    scores_BC: Tensor,
    label_B: Tensor,
    excluded_BC: Tensor | None = None,
    smoothing: float = 0.0,
    counted_B: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy of the right candidate among all (paper, section 4.1.2), in nats.

    scores_BC float32; label_B the right column; `excluded_BC`: columns that do not count, such as
    another example's response that is the same text. `smoothing`: share of the target that is spread
    evenly over all columns that count, as torch's `label_smoothing`. `counted_B`: the other rows add
    nothing to the sum, which is still divided by B, so that ranks need not agree on how many count.
    """
    if excluded_BC is None:
        excluded_BC = torch.zeros_like(scores_BC, dtype=torch.bool)
    scores_BC = scores_BC.masked_fill(excluded_BC, torch.finfo(scores_BC.dtype).min)
    losses_B = F.cross_entropy(scores_BC, label_B, reduction="none")
    if smoothing:
        surprise_BC = -scores_BC.log_softmax(dim=1).masked_fill(excluded_BC, 0.0)
        spread_B = surprise_BC.sum(dim=1) / (~excluded_BC).sum(dim=1)
        losses_B = (1 - smoothing) * losses_B + smoothing * spread_B
    if counted_B is not None:
        losses_B = losses_B * counted_B
    return losses_B.mean()


def false_negatives(keys_CS: Tensor, label_B: Tensor) -> Tensor:
    """[B, C]: columns that share one of S keys with the right candidate, which is not among them.

    Keys name a column's text, and whatever it answers. Without this a frequent answer is pushed away from
    its own contexts.
    """
    is_same_BC = (keys_CS[label_B][:, None] == keys_CS).any(dim=2)
    return is_same_BC & (torch.arange(len(keys_CS), device=keys_CS.device) != label_B[:, None])


@torch.no_grad()
def right_above_all(scores_BC: Tensor, label_B: Tensor, excluded_BC: Tensor) -> Tensor:
    """[B] bool: whether the right candidate scores above all others that count. A tie is none, so that a
    scorer that has collapsed to one number is never right."""
    label_B1 = label_B[:, None]
    others_BC = scores_BC.masked_fill(excluded_BC, -torch.inf).scatter(1, label_B1, -torch.inf)
    return scores_BC.gather(1, label_B1)[:, 0] > others_BC.amax(dim=1)


def distillation_kl(student_BC: Tensor, teacher_BC: Tensor, temperature: float) -> Tensor:
    """Mean KL divergence of the student's softmax from the teacher's, in nats (Hinton et al., 2015).

    Both are scores over `temperature`, whose square keeps the gradients' size. Candidates whose
    teacher score is NaN do not count; contexts with fewer than two others count as 0.
    """
    is_unknown_BC = teacher_BC.isnan()
    lowest = torch.finfo(student_BC.dtype).min
    student_BC = (student_BC / temperature).masked_fill(is_unknown_BC, lowest).log_softmax(dim=1)
    teacher_BC = (teacher_BC / temperature).masked_fill(is_unknown_BC, lowest).log_softmax(dim=1)
    divergence_BC = teacher_BC.exp() * (teacher_BC - student_BC)
    return divergence_BC.masked_fill(is_unknown_BC, 0.0).sum(dim=1).mean() * temperature**2


def margin_mse(student_BC: Tensor, teacher_BC: Tensor) -> Tensor:
    """Mean squared difference of the margins between the right candidate, the first, and each other
    (Hofstätter et al., 2020), so that the scores' levels do not matter.

    Margins in which a teacher score is NaN do not count. It is the mean over contexts of each one's mean,
    0 where a context has no margin: a mean over all margins would depend on how ranks share the contexts.
    """
    gap_BC = (student_BC[:, :1] - student_BC[:, 1:]) - (teacher_BC[:, :1] - teacher_BC[:, 1:])
    is_known_BC = ~gap_BC.isnan()
    squared_B = gap_BC.masked_fill(~is_known_BC, 0.0).square().sum(dim=1)
    return (squared_B / is_known_BC.sum(dim=1).clamp(min=1)).mean()


def cosine_loss(student_BE: Tensor, teacher_BE: Tensor) -> Tensor:
    """Mean of 1 - the cosine of each two vectors."""
    return 1 - F.cosine_similarity(student_BE, teacher_BE, dim=1).mean()


TEACHING: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "kl": distillation_kl,
    "margin_mse": lambda student_BC, teacher_BC, temperature: margin_mse(student_BC, teacher_BC),
}
"""The losses on a teacher's scores, by the name in `Distillation.loss`: a function of the
student's scores, the teacher's, and the temperature. The right candidate is the first column."""

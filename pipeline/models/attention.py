"""Attention of the poly-encoder's head that has weights of its own: ParlAI's `multihead`.

H heads, each on its D / H dimensions of q(query), k(key) and v(value); what they attend to is joined
and goes through a last layer, o. All four are linear, with bias; there is no dropout.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pipeline.config import BadInput


def no_autocast(tensor: Tensor) -> torch.autocast:
    """A block in which the tensor's device multiplies in the tensors' own dtype.

    Heads are float32: a logit that is rounded to bf16 has 8 bits, and near scores tie.
    """
    return torch.autocast(tensor.device.type, enabled=False)


def masked_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the last axis; the mask's value is finite, so that no row becomes NaN."""
    return logits.masked_fill(~mask.bool(), torch.finfo(logits.dtype).min).softmax(dim=-1)


class MultiHead(nn.Module):
    """Queries attend to keys, which are the values too."""

    def __init__(self, width: int, heads: int) -> None:
        """Raises BadInput where `heads` do not divide `width`."""
        super().__init__()
        if width % heads:
            raise BadInput(f"ranker.attention_heads: {heads} is not allowed; allowed: a divisor of "
                           f"{width}, the vectors' width")  # fmt: skip
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        for layer in (self.q, self.k, self.v, self.o):
            nn.init.xavier_normal_(layer.weight)

    def attend(self, queries_MD: Tensor, keys_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """[B, M, D]: what M queries see in each of B texts; float32, under autocast too."""
        with no_autocast(keys_BTD):
            keys_BTD = keys_BTD.float()
            weights_BHMT = self.weights(queries_MD, keys_BTD, mask_BT)
            values_BTHK = self._split(self.v(keys_BTD))
            sums_BMHK = torch.einsum("bhmt,bthk->bmhk", weights_BHMT, values_BTHK)
            attended: Tensor = self.o(sums_BMHK.flatten(-2))
        return attended

    def scores(self, vectors_BMD: Tensor, mask_BM: Tensor, candidates: Tensor) -> Tensor:
        """[B, C]: each candidate, [B, C, D] or [C, D], times the sum of the vectors that it attends to.

        With W and b of the last layer, candidate · (W seen + b) = Wᵀ candidate · seen + candidate · b.
        So the values are met by Wᵀ candidate, per head, and what is seen, [B, C, D], is never built.
        Float32, under autocast too.
        """
        axes = "chk" if candidates.dim() == 2 else "bchk"
        with no_autocast(candidates):
            vectors_BMD, candidates = vectors_BMD.float(), candidates.float()
            projected = self._split(candidates @ self.o.weight)
            products = torch.einsum(
                f"{axes},bmhk->bhcm", projected, self._split(self.v(vectors_BMD))
            )
            weights_BHCM = self.weights(candidates, vectors_BMD, mask_BM)
            return (weights_BHCM * products).sum(dim=(1, 3)) + candidates @ self.o.bias

    def weights(self, queries: Tensor, keys_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """[B, H, Q, T]: how much each head of the queries, [Q, D] or [B, Q, D], takes of each key.

        Queries and keys are float32; autocast would round their logits.
        """
        axes = "qhk" if queries.dim() == 2 else "bqhk"
        with no_autocast(keys_BTD):
            queries, keys_BTHK = self._split(self.q(queries)), self._split(self.k(keys_BTD))
            logits_BHQT = torch.einsum(f"{axes},bthk->bhqt", queries, keys_BTHK)
            return masked_softmax(self._scale(logits_BHQT), mask_BT[:, None, None, :])

    def _split(self, rows: Tensor) -> Tensor:
        return rows.reshape(*rows.shape[:-1], self.heads, -1)

    def _scale(self, logits: Tensor) -> Tensor:
        return logits / math.sqrt(self.q.in_features // self.heads)

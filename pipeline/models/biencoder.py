"""The bi-encoder: one vector per context, one per candidate, their plain dot product."""

from __future__ import annotations

from torch import Tensor

from pipeline.models.dualencoder import DualEncoder
from pipeline.models.polyencoder import poly_scores, poly_weights


class BiEncoder(DualEncoder):
    """Poly-encoder paper, section 4.2, in the poly-encoder's shapes with M = 1."""

    def context_vectors(self, hidden_BTD: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        return self.reduced(hidden_BTD, mask_BT)[:, None], mask_BT.new_ones(len(mask_BT), 1)

    def scores(self, vectors_BMD: Tensor, mask_BM: Tensor, candidates: Tensor) -> Tensor:
        return poly_scores(vectors_BMD, mask_BM, candidates)

    def vector_weights(self, vectors_BMD: Tensor, mask_BM: Tensor, candidates: Tensor) -> Tensor:
        return poly_weights(vectors_BMD, mask_BM, candidates)

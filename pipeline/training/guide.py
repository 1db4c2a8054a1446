"""Leaves negatives out that are probably right answers: the limits of their scores, and a guide that scores
every batch.

A batch holds wrong candidates that answer a context as well as its own response, because nobody marked all
right answers. A guide is a second model that only reads: a negative that it scores above the limit, which
follows from its score of the right response, counts for nothing in the loss (GISTEmbed: Solatorio, 2024).

    the batch's thread          token ids of the guide's own tokenizer       `Guide.rows`
    before the forward pass     the guide's vectors, once for each batch     `Guide.vectors`
    in the loss                 scores of all columns, and the limit         `Guide.excludes`

The guide's weights are those of inference: no gradients, no moments, and bf16 where training computes in
bf16. It encodes a batch in parts (`inference.encode_rows`), before the model in training holds activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.models import inference
from pipeline.models.precision import Precision
from pipeline.models.ranker import Ranker
from pipeline.training.settings import NegativeLimits


def highest_allowed(limits: NegativeLimits, right_scores: Tensor) -> Tensor:
    """The highest scores that negatives may have, by the scores of the right responses.

    A text that scores nearly as high as the right response, or higher, is probably right, too, because nobody
    marked all right answers (limits relative to the right one's score: Moreira et al., NV-Retriever, 2024).
    A share of a score below 0 lies above the score, so `max_share` says nothing there.
    """
    return torch.minimum(right_scores - limits.margin, right_scores * limits.max_share)


class GuideRows(NamedTuple):
    """The texts of B examples as the guide reads them: its own token ids."""

    contexts: list[list[int]]
    candidates: list[list[int]]
    """Of each example the right candidate, then K wrong ones; B · (1 + K) rows."""


class GuideVectors(NamedTuple):
    """The guide's vectors of B examples; float32, without a gradient."""

    contexts_BMD: Tensor
    mask_BM: Tensor
    candidates_BCD: Tensor
    """The right candidate first."""


class Guide:
    """A ranker that names false negatives. No module, so a module that holds it does not train it."""

    def __init__(
        self, ranker: Ranker, limits: NegativeLimits, precision: Precision = "auto"
    ) -> None:
        """Raises BadInput for a ranker without vectors."""
        ranker.config.require_vectors()
        self._ranker, self._limits, self._precision = ranker, limits, precision
        self._is_prepared = False

    def rows(self, contexts: Sequence[Sequence[str]], candidates: Sequence[str]) -> GuideRows:
        ranker = self._ranker
        return GuideRows(ranker.context_rows(contexts), ranker.candidate_rows(candidates))

    def vectors(self, rows: GuideRows, device: torch.device) -> GuideVectors:
        """The vectors of `rows`, on the device on which the loss is computed."""
        if not self._is_prepared:
            inference.prepare(self._ranker, device, self._precision)
            self._is_prepared = True
        contexts_BMD, mask_BM = inference.context_row_vectors(self._ranker, rows.contexts)
        candidates_ND = inference.row_vectors(self._ranker, rows.candidates)
        candidates_BCD = candidates_ND.view(len(rows.contexts), -1, candidates_ND.shape[1])
        return GuideVectors(*(part.to(device) for part in (contexts_BMD, mask_BM, candidates_BCD)))

    @torch.no_grad()
    def excludes(self, vectors: GuideVectors, columns: Sequence[Tensor], label_B: Tensor) -> Tensor:
        """[B, C]: the columns that score above the limit; never the right one, `label_B`.

        `columns`: the guide's vectors of all candidates, side by side as the loss has them, [N, D] or
        [B, N, D] each.
        """
        contexts_BMD, mask_BM, _ = vectors
        scores = [
            self._ranker.dual.scores(contexts_BMD, mask_BM, part)
            for part in columns
            if part.shape[-2]
        ]
        scores_BC, label_B1 = torch.cat(scores, dim=1), label_B[:, None]
        limit_B1 = highest_allowed(self._limits, scores_BC.gather(1, label_B1))
        return (scores_BC > limit_B1).scatter(1, label_B1, False)

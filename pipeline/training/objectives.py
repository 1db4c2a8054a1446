"""The training objectives of rankers: first every row is encoded alone, then rows are compared."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config import BadInput
from pipeline.models.losses import (
    TEACHING,
    cosine_loss,
    false_negatives,
    ranking_loss,
    right_above_all,
)
from pipeline.models.network import PairNetwork, VectorNetwork
from pipeline.training.data import TEACHER_RESPONSE, DualBatch, PairBatch
from pipeline.training.distributed import gather, gather_with_gradient, rank
from pipeline.training.settings import Distillation, NegativesFrom

LossMetrics = dict[str, Tensor]


class Objective(nn.Module):
    """A loss in two steps, so that the first can be done in parts (pipeline/training/caching.py)."""

    @abstractmethod
    def encode(self, batch: Any) -> tuple[Tensor, ...]:
        """Tensors with one row per example, each made of that example alone; float32 or bool."""

    @abstractmethod
    def loss(self, encoded: Sequence[Tensor], batch: Any) -> tuple[Tensor, LossMetrics]:
        """The mean loss over the examples and numbers to show; float32."""

    def forward(self, batch: Any, gradients: Sequence[Tensor] | None = None) -> Any:
        """`loss` of a batch. With gradients of the loss by each float tensor of `encode`: a number
        whose own gradient by the weights is that of the loss, as far as this batch makes it."""
        encoded = self.encode(batch)
        if gradients is None:
            with torch.autocast(encoded[0].device.type, enabled=False):
                return self.loss(encoded, batch)
        floats = [tensor for tensor in encoded if tensor.is_floating_point()]
        return torch.stack(
            [(tensor * gradient).sum() for tensor, gradient in zip(floats, gradients, strict=True)]
        ).sum()


_NO_TEACHER = Distillation()


class DualModule(Objective):
    """Softmax over candidates: every response of the global batch, or each context's own, or both.

    With `share_negatives`, a context's wrong candidates count for every context of the global batch, as
    sentence-transformers' MultipleNegativesRankingLoss has it. Responses and candidates that answer the
    context in another example of the batch do not count.
    """

    def __init__(
        self,
        network: VectorNetwork,
        negatives_from: NegativesFrom = "batch",
        distill: Distillation = _NO_TEACHER,
        share_negatives: bool = False,
        smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self.network = network
        self._smoothing = smoothing
        self._from_batch = negatives_from != "given"
        self._share_negatives = share_negatives
        self._distill = distill

    def encode(self, batch: DualBatch) -> tuple[Tensor, ...]:
        """Vectors [B, V, M, D] of V views of each context, their mask [B, V, M], responses [B, D],
        wrong candidates [B, K, D]."""
        views = self.network.context_views(batch.contexts)
        vectors_BVMD = torch.stack([view.vectors_BMD for view in views], dim=1)
        mask_BVM = torch.stack([view.mask_BM for view in views], dim=1)
        responses_BD = self.network.encode_candidates(batch.responses)
        negatives_BKD = responses_BD.new_zeros(len(batch), 0, responses_BD.shape[1])
        if len(batch.negatives.ids_BT):
            negatives_ND = self.network.encode_candidates(batch.negatives)
            negatives_BKD = negatives_ND.view(len(batch), -1, negatives_ND.shape[1])
        return vectors_BVMD.float(), mask_BVM, responses_BD.float(), negatives_BKD.float()

    def loss(self, encoded: Sequence[Tensor], batch: DualBatch) -> tuple[Tensor, LossMetrics]:
        """The sum over the views, each the mean over the widths; accuracy is the first view's."""
        vectors_BVMD, mask_BVM, responses_BD, negatives_BKD = encoded
        count, device = len(responses_BD), responses_BD.device
        keys_CS = gather(batch.keys_BS)
        if self._from_batch:
            responses = gather_with_gradient(responses_BD)  # [C, D]
            label_B = torch.arange(count, device=device) + rank() * count
            excluded_BC = false_negatives(keys_CS, label_B)
        else:
            responses = responses_BD[:, None]  # [B, 1, D]
            label_B = torch.zeros(count, dtype=torch.long, device=device)
            excluded_BC = torch.zeros(count, 1, dtype=torch.bool, device=device)
        k = negatives_BKD.shape[1]
        negatives, negative_keys = negatives_BKD, batch.negative_keys_BK  # [B, K, D] and [B, K]
        # The columns that a teacher has scored, the label's first: here the context's own negatives.
        column_BC = torch.arange(k, device=device).expand(count, k) + excluded_BC.shape[1]
        if self._share_negatives:
            # [N, D] and [N], N = ranks · B · K
            negatives = gather_with_gradient(negatives_BKD.flatten(0, 1))
            negative_keys = gather(batch.negative_keys_BK.flatten())
            first_column_B = (torch.arange(count, device=device) + rank() * count) * k
            column_BC = column_BC + first_column_B[:, None]
        column_BC, teacher_BC = torch.cat([label_B[:, None], column_BC], dim=1), batch.teacher_BC
        if self._distill.over == "batch" and self._distill.loss in TEACHING:
            columns = excluded_BC.shape[1]
            column_BC = (label_B[:, None] + torch.arange(columns, device=device)) % columns
            teacher_BC = batch.teacher_contexts_BE @ gather(batch.teacher_responses_BE).T
            teacher_BC = teacher_BC.gather(1, column_BC)
        is_right_BK = negative_keys == batch.keys_BS[:, :1]
        if self._share_negatives:
            is_answer_BC = (batch.keys_BS[:, None] == keys_CS).any(dim=2)
            is_same_CK = keys_CS[:, :1] == negative_keys
            is_right_BK = is_answer_BC.float() @ is_same_CK.float() > 0
        excluded_BC = torch.cat([excluded_BC, is_right_BK], dim=1)
        teacher_BC = teacher_BC.masked_fill(excluded_BC.gather(1, column_BC), math.nan)
        parts, metrics = [], dict[str, Tensor]()
        for vectors_BMD, mask_BM in zip(vectors_BVMD.unbind(1), mask_BVM.unbind(1), strict=True):
            losses, teacher_losses = [], []
            for width in self.network.widths:  # the last one is all that the vectors have
                scores_BC = self._scores(vectors_BMD, mask_BM, (responses, negatives), width)
                losses.append(
                    ranking_loss(
                        scores_BC, label_B, excluded_BC, self._smoothing, mask_BM.any(dim=1)
                    )
                )
                if self._distill.loss in TEACHING:
                    teacher_losses.append(
                        _distillation_loss(
                            self._distill, scores_BC.gather(1, column_BC), teacher_BC
                        )
                    )
            parts.append(torch.stack(losses).mean())
            if not metrics:
                is_right_B = right_above_all(scores_BC, label_B, excluded_BC)
                metrics["accuracy"] = is_right_B.float().mean()
                if self._distill.loss == "cosine":
                    teacher_losses.append(self._vector_loss(vectors_BMD[:, 0], responses_BD, batch))
                if teacher_losses:
                    teacher_loss = torch.stack(teacher_losses).mean()
                    metrics["distill_loss"] = teacher_loss.detach()
                    parts.append(teacher_loss)
        return torch.stack(parts).sum(), metrics

    def _vector_loss(self, contexts_BE: Tensor, responses_BE: Tensor, batch: DualBatch) -> Tensor:
        """Weighted. Raises BadInput where the batch has no vectors of the teacher, or of another length."""
        student, teacher = responses_BE.shape[1], batch.teacher_responses_BE.shape[1]
        if student != teacher:
            raise BadInput(f"{TEACHER_RESPONSE}: vectors of {teacher} numbers in a batch (0: none); allowed: "
                           f"{student}, as the ranker's, with finetune.distill.loss 'cosine'")  # fmt: skip
        of_contexts = cosine_loss(contexts_BE, batch.teacher_contexts_BE)
        of_responses = cosine_loss(responses_BE, batch.teacher_responses_BE)
        return (of_contexts + of_responses) * self._distill.weight

    def _scores(
        self, vectors_BMD: Tensor, mask_BM: Tensor, candidates: Sequence[Tensor], width: int
    ) -> Tensor:
        """[B, C] of the candidates side by side, as the loss takes them."""
        network = self.network
        cut_BMD = network.cut(vectors_BMD, width)
        columns = [
            network.scores(cut_BMD, mask_BM, network.cut(part, width))
            for part in candidates
            if part.shape[-2]
        ]
        return torch.cat(columns, dim=1) * network.training_scale


class PairModule(Objective):
    """Softmax over each context's own candidates. Copies of the right candidate are left out."""

    def __init__(self, network: PairNetwork, distill: Distillation = _NO_TEACHER) -> None:
        super().__init__()
        self.network = network
        self._distill = distill

    def encode(self, batch: PairBatch) -> tuple[Tensor, ...]:
        """Scores [B, C]."""
        return (self.network.score_pairs(batch.pairs).view(len(batch), -1),)

    def loss(self, encoded: Sequence[Tensor], batch: PairBatch) -> tuple[Tensor, LossMetrics]:
        (scores_BC,) = encoded
        label_B = torch.zeros(len(batch), dtype=torch.long, device=scores_BC.device)
        excluded_BC = batch.key_BC == batch.key_BC[:, :1]
        excluded_BC[:, 0] = False
        loss = ranking_loss(scores_BC, label_B, excluded_BC)
        is_right_B = right_above_all(scores_BC, label_B, excluded_BC)
        metrics = {"accuracy": is_right_B.float().mean()}
        if self._distill.loss != "none":
            teacher_BC = batch.teacher_BC.masked_fill(excluded_BC, math.nan)
            teacher_loss = _distillation_loss(self._distill, scores_BC, teacher_BC)
            loss, metrics["distill_loss"] = loss + teacher_loss, teacher_loss.detach()
        return loss, metrics


def _distillation_loss(config: Distillation, student_BC: Tensor, teacher_BC: Tensor) -> Tensor:
    """Weighted; the right candidate is the first column."""
    teacher_BC = config.teacher_scale * teacher_BC
    return TEACHING[config.loss](student_BC, teacher_BC, config.temperature) * config.weight

"""From a batch to the loss of a ranker: first every row is encoded alone, then rows are compared.

The losses themselves, functions of scores, are in `pipeline.models.losses`.

Negatives come from all ranks: their candidate vectors are gathered with gradient.

Gradient caching (GradCache: Gao, Zhang, Han and Callan, 2021) makes large batches fit in little memory:

    1. encode the batch in chunks, without a graph         memory: one chunk, and a row per example
    2. the loss of all rows, and its gradient by the rows  memory: the scores
    3. encode each chunk again, with a graph, and go back  memory: one chunk and its graph
       from the gradient of its rows

The gradients are those of the whole batch, because each row comes from its example alone. The price is a
second encoding without a graph: a step takes about a third longer.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.config import BadInput
from pipeline.models.heads import PairNetwork, VectorNetwork
from pipeline.models.losses import (
    TEACHING,
    cosine_loss,
    false_negatives,
    ranking_loss,
    right_above_all,
)
from pipeline.training.data import TEACHER_RESPONSE, DualBatch, PairBatch, RankingBatch
from pipeline.training.guide import Guide, GuideVectors
from pipeline.training.loop import Autocast, Backward, StepMetrics
from pipeline.training.settings import Distillation, FinetuneConfig

LossMetrics = dict[str, Tensor]


class _Gather(torch.autograd.Function):
    """Forward: every rank's rows, in the order of ranks. Backward: each rank's own rows of the sum of all
    ranks' gradients.

    DistributedDataParallel then divides by the number of ranks, so that with the mean loss over the
    local contexts the gradient is that of the mean loss over the whole global batch.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.rows = len(rows)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].contiguous()
        dist.all_reduce(total)
        start = dist.get_rank() * ctx.rows
        return total[start : start + ctx.rows]


def gather(rows: Tensor) -> Tensor:
    """[N, …] on each of W ranks → [W·N, …] on all of them, with gradient; the same tensor without a process
    group.

    Every rank must bring the same number of rows.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return rows
    gathered: Tensor = _Gather.apply(rows)  # type: ignore[no-untyped-call]
    return gathered


_DEFAULTS = FinetuneConfig()
NetworkT = TypeVar("NetworkT", bound=nn.Module)


class Objective(nn.Module, Generic[NetworkT]):
    """A loss in two steps, so that `cached_backward` can do the first one in parts."""

    def __init__(
        self, network: NetworkT, config: FinetuneConfig = _DEFAULTS, guide: Guide | None = None
    ) -> None:
        super().__init__()
        self.network = network
        self._config = config
        self._guide = guide

    @abstractmethod
    def encode(self, batch: Any) -> tuple[Tensor, ...]:
        """Tensors with one row per example, each made of that example alone; float32 or bool."""

    @abstractmethod
    def loss(self, encoded: Sequence[Tensor], batch: Any) -> tuple[Tensor, LossMetrics]:
        """The mean loss over the examples and numbers to show; float32."""

    def _by_guide(
        self,
        vectors: GuideVectors,
        columns: Sequence[Tensor],
        label_B: Tensor,
        excluded_BC: Tensor,
        metrics: LossMetrics,
    ) -> Tensor:
        """[B, C] bool: what the guide excludes by its vectors; shows the share of all wrong columns that
        count without the guide and not with it."""
        assert self._guide is not None
        by_guide_BC = self._guide.excludes(vectors, columns, label_B)
        count = excluded_BC.numel() - len(excluded_BC)
        metrics["guide_excludes"] = (by_guide_BC & ~excluded_BC).sum() / max(1, count)
        return by_guide_BC

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


class DualModule(Objective[VectorNetwork]):
    """Softmax over candidates: every response of the global batch, or each context's own, or both.

    With `share_negatives`, a context's wrong candidates count for every context of the global batch, as
    sentence-transformers' MultipleNegativesRankingLoss has it. Responses and candidates that answer the
    context in another example of the batch do not count, nor do those that the `guide` excludes.
    """

    @property
    def _from_batch(self) -> bool:
        """Whether other responses of the batch are wrong candidates."""
        return self._config.negatives_from != "given"

    def encode(self, batch: DualBatch) -> tuple[Tensor, ...]:
        """Vectors [B, V, M, D] of V views of each context, their mask [B, V, M], responses [B, D],
        wrong candidates [B, K, D]."""
        candidates = [batch.responses, *([batch.negatives] if len(batch.negatives.ids_BT) else [])]
        views, (responses_BD, *more) = self.network.encode_batch(batch.contexts, candidates)
        vectors_BVMD = torch.stack([view.vectors_BMD for view in views], dim=1)
        mask_BVM = torch.stack([view.mask_BM for view in views], dim=1)
        width = responses_BD.shape[1]
        negatives_BKD = (torch.cat(more) if more else responses_BD[:0]).view(len(batch), -1, width)
        return vectors_BVMD.float(), mask_BVM, responses_BD.float(), negatives_BKD.float()

    def loss(self, encoded: Sequence[Tensor], batch: DualBatch) -> tuple[Tensor, LossMetrics]:
        """The sum over the views, each the mean over the widths. The first view also gives the accuracy and
        learns from the teacher."""
        distill, smoothing = self._config.distill, self._config.label_smoothing
        vectors_BVMD, mask_BVM, responses_BD, negatives_BKD = encoded
        columns = self._columns(responses_BD, negatives_BKD)
        label_B = _places(batch) if self._from_batch else torch.zeros_like(_places(batch))
        excluded_BC, metrics = self._right_columns(batch, label_B), dict[str, Tensor]()
        if batch.guide is not None:
            own_BCD = batch.guide.candidates_BCD
            guide_columns = self._columns(own_BCD[:, 0], own_BCD[:, 1:])
            excluded_BC |= self._by_guide(batch.guide, guide_columns, label_B, excluded_BC, metrics)
        parts = list[Tensor]()
        views = zip(vectors_BVMD.unbind(1), mask_BVM.unbind(1), strict=True)
        for view, (vectors_BMD, mask_BM) in enumerate(views):
            counted_B = mask_BM.any(dim=1)
            scores = [  # the last width is all that the vectors have
                self._scores(vectors_BMD, mask_BM, columns, width) for width in self.network.widths
            ]
            losses = [
                ranking_loss(scores_BC, label_B, excluded_BC, smoothing, counted_B)
                for scores_BC in scores
            ]
            parts.append(torch.stack(losses).mean())
            if view == 0:
                is_right_B = right_above_all(scores[-1], label_B, excluded_BC)
                metrics["accuracy"] = is_right_B.float().mean()
                if distill.loss == "cosine":
                    parts.append(self._vector_loss(vectors_BMD[:, 0], responses_BD, batch))
                elif distill.loss != "none":
                    parts.append(self._score_loss(scores, columns, batch, label_B, excluded_BC))
                if distill.loss != "none":
                    metrics["distill_loss"] = parts[-1].detach()
        return torch.stack(parts).sum(), metrics

    def _right_columns(self, batch: DualBatch, label_B: Tensor) -> Tensor:
        """[B, C] bool: the columns, beside the label's, that answer the context in the batch."""
        keys_CS = gather(batch.keys_BS)
        if self._from_batch:
            responses_BC = false_negatives(keys_CS, label_B)
        else:
            responses_BC = torch.zeros_like(label_B, dtype=torch.bool)[:, None]
        if self._config.share_negatives:
            is_answer_BC = (batch.keys_BS[:, None] == keys_CS).any(dim=2)
            is_same_CN = keys_CS[:, :1] == gather(batch.negative_keys_BK.flatten())
            negatives_BN = is_answer_BC.float() @ is_same_CN.float() > 0
        else:
            negatives_BN = batch.negative_keys_BK == batch.keys_BS[:, :1]
        return torch.cat([responses_BC, negatives_BN], dim=1)

    def _columns(self, responses_BD: Tensor, negatives_BKD: Tensor) -> tuple[Tensor, Tensor]:
        """The candidates that are compared with each context, of the vectors of this rank's: responses of all
        ranks [C, D], or the own one [B, 1, D]; negatives of all ranks [N, D], or the own ones [B, K, D]."""
        responses = gather(responses_BD) if self._from_batch else responses_BD[:, None]
        if not self._config.share_negatives:
            return responses, negatives_BKD
        return responses, gather(negatives_BKD.flatten(0, 1))

    def _score_loss(
        self,
        scores: Sequence[Tensor],
        columns: Sequence[Tensor],
        batch: DualBatch,
        label_B: Tensor,
        excluded_BC: Tensor,
    ) -> Tensor:
        """The mean over the widths of the loss by the teacher's scores. `scores`: of each width, those of
        `columns`."""
        if self._config.distill.over == "batch":
            responses_CE = gather(batch.teacher_responses_BE)
            column_C = torch.arange(len(responses_CE), device=label_B.device)
            column_BC = (label_B[:, None] + column_C) % len(responses_CE)  # the label's first
            teacher_BC = (batch.teacher_contexts_BE @ responses_CE.T).gather(1, column_BC)
        else:  # the label's, then those of the context's own negatives, which come after all responses
            count, k = batch.negative_keys_BK.shape
            column_BK = torch.arange(k, device=label_B.device).expand(count, k)
            column_BK = column_BK + columns[0].shape[-2]
            if self._config.share_negatives:
                column_BK = column_BK + _places(batch)[:, None] * k
            column_BC = torch.cat([label_B[:, None], column_BK], dim=1)
            teacher_BC = batch.teacher_BC
        teacher_BC = teacher_BC.masked_fill(excluded_BC.gather(1, column_BC), math.nan)
        losses = [
            _distillation_loss(self._config.distill, scores_BC.gather(1, column_BC), teacher_BC)
            for scores_BC in scores
        ]
        return torch.stack(losses).mean()

    def _vector_loss(self, contexts_BE: Tensor, responses_BE: Tensor, batch: DualBatch) -> Tensor:
        """Weighted. Raises BadInput where the batch has no vectors of the teacher, or of another length."""
        student, teacher = responses_BE.shape[1], batch.teacher_responses_BE.shape[1]
        if student != teacher:
            raise BadInput(f"{TEACHER_RESPONSE}: vectors of {teacher} numbers in a batch (0: none); allowed: "
                           f"{student}, as the ranker's, with finetune.distill.loss 'cosine'")  # fmt: skip
        of_contexts = cosine_loss(contexts_BE, batch.teacher_contexts_BE)
        of_responses = cosine_loss(responses_BE, batch.teacher_responses_BE)
        return (of_contexts + of_responses) * self._config.distill.weight

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


class PairModule(Objective[PairNetwork]):
    """Softmax over each context's own candidates. Copies of the right candidate are left out, and what the
    `guide` excludes."""

    def encode(self, batch: PairBatch) -> tuple[Tensor, ...]:
        """Scores [B, C]."""
        return (self.network.score_pairs(batch.pairs).view(len(batch), -1),)

    def loss(self, encoded: Sequence[Tensor], batch: PairBatch) -> tuple[Tensor, LossMetrics]:
        (scores_BC,) = encoded
        label_B = torch.zeros(len(scores_BC), dtype=torch.long, device=scores_BC.device)
        excluded_BC = batch.key_BC == batch.key_BC[:, :1]
        excluded_BC[:, 0] = False
        metrics = dict[str, Tensor]()
        if batch.guide is not None:
            columns = [batch.guide.candidates_BCD]
            excluded_BC |= self._by_guide(batch.guide, columns, label_B, excluded_BC, metrics)
        loss = ranking_loss(scores_BC, label_B, excluded_BC)
        is_right_B = right_above_all(scores_BC, label_B, excluded_BC)
        metrics["accuracy"] = is_right_B.float().mean()
        if self._config.distill.loss != "none":
            teacher_BC = batch.teacher_BC.masked_fill(excluded_BC, math.nan)
            teacher_loss = _distillation_loss(self._config.distill, scores_BC, teacher_BC)
            loss, metrics["distill_loss"] = loss + teacher_loss, teacher_loss.detach()
        return loss, metrics


def _places(batch: DualBatch) -> Tensor:
    """[B]: the places of a rank's examples in the global batch."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.arange(len(batch), device=batch.keys_BS.device) + rank * len(batch)


def _distillation_loss(config: Distillation, student_BC: Tensor, teacher_BC: Tensor) -> Tensor:
    """Weighted; the right candidate is the first column."""
    teacher_BC = config.teacher_scale * teacher_BC
    return TEACHING[config.loss](student_BC, teacher_BC, config.temperature) * config.weight


def backward(model: nn.Module, batch: Any, autocast: Autocast) -> tuple[Tensor, StepMetrics]:
    """Computes the loss and its gradients on the whole batch at once."""
    with autocast:
        loss, metrics = model(batch)
    torch.autograd.backward(loss)
    return loss.detach(), metrics


def guided(backward: Backward, guide: Guide) -> Backward:
    """A `backward` before which the guide reads the batch, while no activations are in memory."""

    def run(
        model: nn.Module, batch: RankingBatch, autocast: Autocast
    ) -> tuple[Tensor, StepMetrics]:
        assert batch.guide_rows is not None
        vectors = guide.vectors(batch.guide_rows, batch.teacher_BC.device)
        return backward(model, replace(batch, guide=vectors), autocast)

    return run


def gradient_sync(model: Any, is_last: bool) -> AbstractContextManager[Any]:
    """Ranks exchange gradients in the last backward pass of a step only."""
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(is_last)
        return nullcontext()
    context: AbstractContextManager[Any] = (
        nullcontext() if is_last else getattr(model, "no_sync", nullcontext)()
    )
    return context


def cached_backward(objective: Objective[Any], chunk_examples: int) -> Backward:
    """A `backward` that works in chunks of `chunk_examples` examples. Its `model` is `objective`, wrapped
    for its ranks.

    Both encodings of a chunk draw the same dropout, which follows from torch's generator.
    """

    def run(model: nn.Module, batch: Any, autocast: Autocast) -> tuple[Tensor, StepMetrics]:
        parts = [
            batch.part(start, start + chunk_examples)
            for start in range(0, len(batch), chunk_examples)
        ]
        seeds = torch.randint(1 << 62, (len(parts),)).tolist()
        chunks = []
        with torch.no_grad(), autocast:
            for part, seed in zip(parts, seeds, strict=True):
                torch.manual_seed(seed)
                chunks.append(objective.encode(part))
        rows = [torch.cat(tensors) for tensors in zip(*chunks, strict=True)]
        floats = [tensor.requires_grad_() for tensor in rows if tensor.is_floating_point()]
        loss, metrics = objective.loss(rows, batch)
        torch.autograd.backward(loss)
        # Weights that only the loss uses have their gradients now. DistributedDataParallel averages
        # those of the weights that it sees in the last chunk.
        loss_parameters = [value for value in objective.parameters() if value.grad is not None]
        row_gradients = [torch.zeros_like(row) if row.grad is None else row.grad for row in floats]
        gradients = zip(*(torch.split(rows, chunk_examples) for rows in row_gradients), strict=True)
        for number, (part, seed, gradient) in enumerate(zip(parts, seeds, gradients, strict=True)):
            is_last = number == len(parts) - 1
            torch.manual_seed(seed)
            with gradient_sync(model, is_last):
                with autocast:
                    stand_in = model(part, gradient)
                if is_last:
                    stand_in = stand_in + sum((value * 0).sum() for value in loss_parameters)
                torch.autograd.backward(stand_in)
        return loss.detach(), metrics

    return run

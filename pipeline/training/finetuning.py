"""What fine-tuning is: rankers, their batches and their loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.artifact import Artifact
from pipeline.config import require
from pipeline.models.crossencoder import CrossEncoder
from pipeline.models.dualencoder import DualEncoder
from pipeline.models.losses import false_negatives, ranking_loss
from pipeline.models.ranker import Ranker, new_ranker
from pipeline.models.settings import RankerConfig
from pipeline.models.tokens import Tokens
from pipeline.models.transformer import Encoder, TrainLayers, freeze, set_dropout
from pipeline.training.batches import Batches, Row, Rows
from pipeline.training.distributed import gather, gather_with_gradient, rank


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Which examples, against which negatives, for how long."""

    batch_examples: int = 64
    """Examples in a batch over all workers. For bi and poly, each is a negative of all others."""
    negatives: int = 15
    """cross: wrong candidates per example, of those given; else other examples' responses."""
    epochs: float = 3.0
    """Passes over the training examples."""
    max_steps: int = 0
    """Stop after so many steps, whatever the epochs; 0: no limit."""
    train_layers: TrainLayers = "all"
    """Of the encoders; the head always trains. top, top4: the last one or four layers. The paper
    freezes the embeddings of Google's BERT (R@1/20 83.3 against 83.0) and nothing of its own."""
    dropout: float | None = None
    """Of the encoder while it is fine-tuned; null: as it comes. On CPUs dropout costs a third."""

    def __post_init__(self) -> None:
        require(self.batch_examples >= 2, "finetune.batch_examples", self.batch_examples, ">= 2")
        require(self.negatives >= 1, "finetune.negatives", self.negatives, ">= 1")
        require(self.epochs >= 0, "finetune.epochs", self.epochs, ">= 0")
        require(self.max_steps >= 0, "finetune.max_steps", self.max_steps, ">= 0")
        require(self.dropout is None or 0 <= self.dropout < 1, "finetune.dropout", self.dropout,
                "0 to below 1, or null")  # fmt: skip


@dataclass(frozen=True)
class DualBatch:
    """Contexts and their responses; row i answers row i."""

    contexts: Tokens
    responses: Tokens
    key_B: Tensor
    """int64; equal where the responses' tokens are."""

    def to(self, device: torch.device) -> DualBatch:
        return DualBatch(self.contexts.to(device), self.responses.to(device), self.key_B.to(device))


@dataclass(frozen=True)
class PairBatch:
    """Contexts, each with C candidates, as B · C pairs."""

    pairs: Tokens
    label_B: Tensor

    def to(self, device: torch.device) -> PairBatch:
        return PairBatch(self.pairs.to(device), self.label_B.to(device))


class _DualItem(NamedTuple):
    context: list[int]
    response: list[int]


class DualCollator:
    """For bi- and poly-encoders: the negatives are the batch's other responses."""

    columns = ("context", "response")

    def __init__(self, ranker: Ranker) -> None:
        self._ranker = ranker

    def prepare(self, rows: list[Row], generator: torch.Generator) -> list[_DualItem]:
        contexts = self._ranker.context_rows([row["context"] for row in rows])
        responses = self._ranker.candidate_rows([row["response"] for row in rows])
        return [_DualItem(*item) for item in zip(contexts, responses, strict=True)]

    def length(self, item: _DualItem) -> int:
        return len(item.context) + len(item.response)

    def collate(self, items: list[_DualItem], generator: torch.Generator) -> DualBatch:
        tokenizer = self._ranker.tokenizer
        keys = [hash(tuple(item.response)) for item in items]  # of integers: the same everywhere
        return DualBatch(
            tokenizer.batch([item.context for item in items]),
            tokenizer.batch([item.response for item in items]),
            torch.tensor(keys),
        )


class _PairItem(NamedTuple):
    context: list[int]
    candidates: list[list[int]]
    label: int


class PairCollator:
    """For cross-encoders: each context with its right candidate and `negatives` wrong ones."""

    columns = ("context", "response", "candidates")

    def __init__(self, ranker: Ranker, negatives: int) -> None:
        self._ranker = ranker
        self._negatives = negatives

    def prepare(self, rows: list[Row], generator: torch.Generator) -> list[_PairItem]:
        contexts = self._ranker.context_rows([row["context"] for row in rows])
        others = [row["response"] for row in rows]
        chosen = [self._choose(row, others, generator) for row in rows]
        tokens = iter(self._ranker.candidate_rows([text for texts in chosen for text in texts]))
        return [
            _PairItem(context, [next(tokens) for _ in texts], 0)
            for context, texts in zip(contexts, chosen, strict=True)
        ]

    def _choose(self, row: Row, others: Sequence[str], generator: torch.Generator) -> list[str]:
        """The right candidate, then wrong ones: given if there are any, else other responses.

        Missing ones are filled up by other responses, so that every example has as many.
        """
        given = [text for text in row["candidates"] or () if text != row["response"]]
        order = torch.randperm(len(given), generator=generator)[: self._negatives].tolist()
        wrong = [given[place] for place in order]
        while len(wrong) < self._negatives:
            text = others[int(torch.randint(len(others), (1,), generator=generator))]
            if text != row["response"] or len(set(others)) == 1:
                wrong.append(text)
        return [row["response"], *wrong]

    def length(self, item: _PairItem) -> int:
        return len(item.context) + max(map(len, item.candidates))

    def collate(self, items: list[_PairItem], generator: torch.Generator) -> PairBatch:
        contexts = [item.context for item in items for _ in item.candidates]
        candidates = [candidate for item in items for candidate in item.candidates]
        pairs = self._ranker.tokenizer.pairs(contexts, candidates)
        return PairBatch(pairs, torch.tensor([item.label for item in items]))


class DualModule(nn.Module):
    """In-batch softmax: every response of the global batch is a candidate of every context."""

    def __init__(self, network: DualEncoder) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: DualBatch) -> tuple[Tensor, dict[str, Tensor]]:
        vectors_BMD, mask_BM = self.network.encode_contexts(batch.contexts)
        own_BD = self.network.encode_candidates(batch.responses)
        with torch.autocast(own_BD.device.type, enabled=False):
            candidates_CD = gather_with_gradient(own_BD.float())
            key_C = gather(batch.key_B)
            label_B = torch.arange(len(own_BD), device=own_BD.device) + rank() * len(own_BD)
            excluded_BC = false_negatives(key_C, label_B)
            losses = []
            for width in self.network.widths:  # the last one is all that the vectors have
                scores_BC = self.network.scores(
                    self.network.cut(vectors_BMD.float(), width),
                    mask_BM,
                    self.network.cut(candidates_CD, width),
                )
                losses.append(ranking_loss(scores_BC, label_B, excluded_BC))
            loss = torch.stack(losses).mean()
        with torch.no_grad():
            best_B = scores_BC.masked_fill(excluded_BC, -torch.inf).argmax(dim=1)
        return loss, {"accuracy": (best_B == label_B).float().mean()}


class PairModule(nn.Module):
    """Softmax over each context's own candidates."""

    def __init__(self, network: CrossEncoder) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
        scores_BC = self.network.score_pairs(batch.pairs).view(len(batch.label_B), -1)
        with torch.no_grad():
            hit_B = scores_BC.argmax(dim=1) == batch.label_B
        return ranking_loss(scores_BC, batch.label_B), {"accuracy": hit_B.float().mean()}


@dataclass
class FinetuneTask:
    """One rank's part of fine-tuning a ranker."""

    ranker: Ranker
    module: nn.Module
    batches: Batches[Any]
    new_weights: Iterable[nn.Parameter] = field(default=())

    def save(self, folder: Path) -> None:
        self.ranker.save(folder)


@dataclass(frozen=True)
class Finetuning:
    """All that a worker needs to build its task."""

    corpus: Artifact
    encoder: Path
    ranker: RankerConfig
    finetune: FinetuneConfig
    seed: int

    def build(self, rank: int, world: int) -> FinetuneTask:
        """Raises BadInput for settings that do not fit the encoder or the corpus."""
        own, rest = divmod(self.finetune.batch_examples, world)
        require(rest == 0, "finetune.batch_examples", self.finetune.batch_examples,
                f"a multiple of the {world} workers")  # fmt: skip
        ranker = new_ranker(self.ranker, self.encoder, self.seed)
        network = ranker.network
        for part in network.modules():
            if isinstance(part, Encoder):
                freeze(part, self.finetune.train_layers)
        if self.finetune.dropout is not None:
            set_dropout(network, self.finetune.dropout)
        module: nn.Module
        collator: Any
        if isinstance(network, CrossEncoder):
            module = PairModule(network)
            collator = PairCollator(ranker, self.finetune.negatives)
        else:
            module, collator = DualModule(network), DualCollator(ranker)
        rows = Rows.of(self.corpus, "train", collator.columns, rank, world, self.seed)
        head = [value for name, value in network.named_parameters() if "encoder." not in name]
        return FinetuneTask(ranker, module, Batches(rows, collator, examples=own), head)

    def steps(self, task: FinetuneTask) -> int:
        """Steps of the whole run."""
        steps = round(self.finetune.epochs * task.batches.steps_per_epoch)
        return min(steps, self.finetune.max_steps or steps)

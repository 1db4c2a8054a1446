"""Pre-training: an encoder that predicts masked tokens (MLM) and the next utterance or sentence.

The next utterance is told from a random one where both stand in a pair (NUP), or from the other responses
of the micro-batch by the vectors of texts that are encoded alone (contrastive).

A step is one micro-batch of every lane (pretraining_data.py). Each loss is the sum over all
micro-batches of all workers, divided by the number of their predictions, so the number of workers does not
change the objective.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.config import BadInput, require
from pipeline.models.flops import TrainingFlops
from pipeline.models.precision import resolve_precision
from pipeline.models.pretraining_heads import PretrainingModel, PretrainingSums
from pipeline.models.settings import Shape
from pipeline.models.sources import Source
from pipeline.models.tokens import Tokenizer
from pipeline.training.loop import (
    Autocast,
    Measured,
    StepMetrics,
    Task,
    Weighted,
    derived_seed,
    optimization,
    reduce_over_ranks,
)
from pipeline.training.objectives import gradient_sync
from pipeline.training.pretraining_data import MicroBatch, PretrainingBatches, StepBatch
from pipeline.training.settings import LoopConfig, PretrainConfig
from pipeline.training.tokenized_corpus import TokenizedCorpus


def _accumulate(
    seed: int, model: nn.Module, batch: StepBatch, autocast: Autocast
) -> tuple[Tensor, StepMetrics]:
    """The loss of a step and its gradients, micro-batch by micro-batch."""
    predicted = sum(part.predicted_count for part in batch.parts)
    pairs = sum(part.pair_count for part in batch.parts)
    device = batch.parts[0].tokens.ids_BT.device
    counts = torch.tensor([predicted, pairs, 1], dtype=torch.float64, device=device)
    total_predicted, total_pairs, world = reduce_over_ranks(counts).tolist()
    total = torch.zeros(len(PretrainingSums._fields), device=device)
    loss = torch.zeros((), device=device)
    for number, (lane, part) in enumerate(zip(batch.lanes, batch.parts, strict=True)):
        # Dropout is the same for a micro-batch, whichever worker computes it.
        torch.manual_seed(derived_seed(seed, batch.step, lane, 1))
        with gradient_sync(model, is_last=number == len(batch.parts) - 1):
            with autocast:
                sums: PretrainingSums = model(*part.model_inputs)
            # Ranks' gradients are averaged, so each rank's share of the sum counts `world` times.
            share = sums.mlm_sum / max(1, total_predicted) + sums.next_sum / max(1, total_pairs)
            torch.autograd.backward(share * world)
        loss += share.detach() * world
        total += torch.stack([value.detach() for value in sums])
    step_sums = PretrainingSums(*total)
    return loss, {
        "mlm_loss": Weighted(step_sums.mlm_sum, predicted),
        "mlm_accuracy": Weighted(step_sums.mlm_hits, predicted),
        "next_loss": Weighted(step_sums.next_sum, pairs),
        "next_accuracy": Weighted(step_sums.next_hits, pairs),
    }


@dataclass(frozen=True)
class PretrainingValidation:
    """Both losses and accuracies on micro-batches of the held-out split, the same at every validation."""

    model: PretrainingModel
    batches: list[MicroBatch]
    """The micro-batches of all ranks."""
    rank: int
    world: int
    loop: LoopConfig

    @torch.inference_mode()
    def __call__(self) -> Measured:
        """A collective call. Leaves the model in evaluation mode."""
        self.model.eval()
        device = next(self.model.parameters()).device
        bf16 = resolve_precision(self.loop.precision, device) == "bf16"
        total = torch.zeros(len(PretrainingSums._fields), dtype=torch.float64, device=device)
        # Sharded weights are gathered in each pass: a rank that has none left computes one for nothing.
        for start in range(0, len(self.batches), self.world):
            number = start + self.rank
            batch = self.batches[min(number, len(self.batches) - 1)].to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                sums = self.model(*batch.model_inputs)
            if number < len(self.batches):
                total += torch.stack([value.double() for value in sums])
        mlm_sum, predicted, mlm_hits, next_sum, next_hits, pairs = reduce_over_ranks(total).tolist()
        metrics = {"loss": 0.0}
        if predicted:
            loss = mlm_sum / predicted
            metrics |= {
                "mlm_loss": loss,
                "perplexity": float(np.exp(loss)),
                "mlm_accuracy": mlm_hits / predicted,
            }
            metrics["loss"] += loss
        if pairs:
            metrics |= {"next_loss": next_sum / pairs, "next_accuracy": next_hits / pairs}
            metrics["loss"] += metrics["next_loss"]
        return Measured(metrics, (-metrics["loss"], -metrics["loss"]))


@dataclass(frozen=True)
class Pretraining:
    """Everything that a worker needs to build its task."""

    corpora: tuple[TokenizedCorpus, ...]
    weights: tuple[float, ...]
    start: Shape | Source
    """The shape of a new encoder, or a `transformers` directory that is trained on."""
    pretrain: PretrainConfig
    loop: LoopConfig

    def model(self) -> tuple[PretrainingModel, str]:
        """The model at the start, and what is new in it. Raises BadInput for settings that do not fit
        the corpora's tokenizer."""
        config, vocabulary = self.pretrain, self.corpora[0].vocabulary
        torch.manual_seed(self.loop.seed)
        if isinstance(self.start, Shape):
            special = {"pad": vocabulary.pad, "cls": vocabulary.cls, "sep": vocabulary.sep}
            model = PretrainingModel.new(self.start, vocabulary.size, special)
            start_note = "a new encoder"
        else:
            folder = self.start.local()
            model, start_note = PretrainingModel.from_encoder(folder)
            self._require_own_tokenizer(folder, int(model.encoder.hf.config.vocab_size))
        positions = model.encoder.positions
        require(config.longest_row <= positions, "pretrain.max_context_tokens",
                config.max_context_tokens,
                f"{'and' if config.single_texts else 'with'} max_response_tokens at most the encoder's "
                f"positions, {positions}")  # fmt: skip
        if config.gradient_checkpointing:
            model.encoder.recompute_layers()
        return model, start_note

    def _require_own_tokenizer(self, encoder: Path, size: int) -> None:
        """Raises BadInput if an encoder of `size` tokens has other ids for the tokens of the corpora, or
        lacks some: a token would then get the embedding of another one."""
        corpus = self.corpora[0]
        allowed = "allowed: corpora that were tokenized with the encoder's own tokenizer"
        if size < corpus.vocabulary.size:
            raise BadInput(f"--start: the encoder has {size:,} tokens, the tokenizer of "
                           f"{corpus.artifact.uri} {corpus.vocabulary.size:,}; {allowed}")  # fmt: skip
        if not (encoder / "tokenizer.json").exists():
            return
        id_of_token = Tokenizer.load(encoder).hf.get_vocab()
        tokens = Tokenizer.load(corpus.tokenizer().local()).hf.get_vocab()
        moved = [token for token, number in tokens.items() if id_of_token.get(token) != number]
        if moved:
            token = min(moved, key=tokens.__getitem__)
            raise BadInput(f"--start: {token!r} is token {tokens[token]} of {corpus.artifact.uri}, and "
                           f"{id_of_token.get(token)} of the encoder; {allowed}")  # fmt: skip

    def build(self, rank: int, world: int) -> Task:
        """Raises BadInput for settings that do not fit each other or the corpora."""
        config, seed = self.pretrain, self.loop.seed
        model, _ = self.model()
        tokenizer = Tokenizer.load(self.corpora[0].tokenizer().local())
        batches = PretrainingBatches(self.corpora, self.weights, config, rank, world, seed)
        valid_batches = batches.validation()
        cost = TrainingFlops.of(model.encoder, model.mlm)

        def save(folder: Path) -> None:
            model.save(folder, with_next_head=config.random_pairs)
            tokenizer.save(folder)

        def work(batch: StepBatch) -> Mapping[str, float]:
            return {
                "tokens": float(sum(part.token_count for part in batch.parts)),
                "flops": float(sum(
                    cost.step(part.tokens.lengths, part.predicted_count) for part in batch.parts
                )),
            }  # fmt: skip

        return Task(
            module=model,
            batches=batches,
            steps=config.steps,
            optimize=lambda: optimization(self.loop, model, config.steps),
            backward=partial(_accumulate, seed),
            save=save,
            validation=PretrainingValidation(model, valid_batches, rank, world, self.loop)
            if valid_batches
            else None,
            work=work,
        )

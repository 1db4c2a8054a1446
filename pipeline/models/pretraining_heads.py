"""Pre-training heads: masked language model (MLM) and next utterance or sentence (NUP, NSP); and the
contrastive loss, which has no head.

The MLM head is the one that `transformers` has for the encoder's architecture, so a published masked
language model is continued with its head, and what is saved is such a model again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForMaskedLM
from transformers.modeling_outputs import BaseModelOutput

from pipeline.config import BadInput
from pipeline.models.encoder import Encoder, load_pretrained, new_config, read_weights
from pipeline.models.heads import reduce
from pipeline.models.losses import false_negatives, ranking_loss, right_above_all
from pipeline.models.settings import Shape
from pipeline.models.tokens import Tokens

NEXT_HEAD = "next_head.safetensors"
# Predicted positions whose logits are in memory at once. Each takes some 360 kB on the way back with a
# vocabulary of 30,000: 120 kB as float32, as much for its gradient, half of both in bf16. In more chunks
# than one the head is computed twice: 1 to 2 % of a BERT-base step.
_POSITIONS_AT_ONCE = 4096
_COSINE_SCALE = 20.0


class PretrainingSums(NamedTuple):
    """Sums over a batch, float32 scalars on its device; those of an objective left out are 0.

    Only `mlm_sum` and `next_sum` have gradients. Divided by counts over all ranks and micro-batches they
    make means that do not depend on how the batch was split.
    """

    mlm_sum: Tensor
    """Cross-entropy of the predicted tokens, nats."""
    mlm_count: Tensor
    """Predicted tokens."""
    mlm_hits: Tensor
    """Predicted tokens whose most probable token is the true one."""
    next_sum: Tensor
    """Cross-entropy of the pairs, nats: binary, or over the responses of the batch (contrastive)."""
    next_hits: Tensor
    """Pairs that are judged rightly."""
    pairs: Tensor
    """Pairs that were judged."""


class PretrainingModel(nn.Module):
    """An encoder with both heads, made of a `transformers` masked language model.

    `encoder` is its base, `mlm` all of it except the base, `next` one logit from the first token's
    vector. Weights that encoder and MLM head share are one parameter, which belongs to both.
    """

    def __init__(self, masked_lm: Any) -> None:
        super().__init__()
        self.encoder = Encoder(masked_lm.base_model)
        self.mlm = masked_lm
        setattr(masked_lm, masked_lm.base_model_prefix, _BaseStub())
        self.next = nn.Linear(self.encoder.width, 1)
        nn.init.normal_(self.next.weight, std=0.02)
        nn.init.zeros_(self.next.bias)

    @classmethod
    def new(cls, shape: Shape, vocabulary: int, special: Mapping[str, int]) -> PretrainingModel:
        """Random weights; `special`: ids of the tokens "pad", "cls" and "sep"."""
        return cls(AutoModelForMaskedLM.from_config(new_config(shape, vocabulary, special)))

    @classmethod
    def from_encoder(cls, folder: Path) -> tuple[PretrainingModel, str]:
        """Continues from any `transformers` directory of an encoder; the text says which weights of the
        heads are new, because the directory has none for them.

        Raises BadInput where there is no such encoder, or its architecture has no MLM head.
        """
        masked_lm, missing = load_pretrained(AutoModelForMaskedLM, folder)
        prefix = f"{masked_lm.base_model_prefix}."
        if absent := [name for name in missing if name.startswith(prefix)]:
            raise BadInput(f"{folder}: the weights lack {len(absent)} of the encoder's tensors, "
                           f"among them {absent[0]}")  # fmt: skip
        model = cls(masked_lm)
        next_head = read_next_head(folder, model.encoder.width)
        if next_head:
            model.next.load_state_dict(next_head)
        mlm = f"MLM head new ({', '.join(missing)})" if missing else "MLM head loaded"
        return model, f"{mlm}, next head {'loaded' if next_head else 'new'}"

    def save(self, folder: Path, with_next_head: bool = True) -> None:
        """Writes the masked language model as a `transformers` directory, which AutoModelForMaskedLM
        loads with its head and AutoModel without, and the next head beside it."""
        prefix = self.mlm.base_model_prefix
        setattr(self.mlm, prefix, self.encoder.hf)
        try:
            self.mlm.save_pretrained(str(folder), safe_serialization=True)
        finally:
            setattr(self.mlm, prefix, _BaseStub())
        if with_next_head:
            head = {
                name: value.detach().contiguous() for name, value in self.next.named_parameters()
            }
            save_file(head, folder / NEXT_HEAD)

    def forward(
        self,
        tokens: Tokens,
        predicted_N: Tensor | None = None,
        labels_N: Tensor | None = None,
        is_next_B: Tensor | None = None,
        answer_keys_BS: Tensor | None = None,
    ) -> PretrainingSums:
        """The sums of one batch.

        `predicted_N`: places in [B · T] of the tokens to predict, int64, each once; `labels_N`: their
        true ids; both None: no MLM. `is_next_B`: whether the second text is the true one; None: no
        NUP. `answer_keys_BS`: the rows are B contexts and then their responses, each encoded alone, and
        the contrastive loss is computed; pairs that share a key have right answers in common. The head
        that is left out gets gradients of zeros, as DistributedDataParallel waits for one of every
        parameter.
        """
        hidden_BTD = self.encoder(tokens)
        zero = hidden_BTD.new_zeros((), dtype=torch.float32)
        mlm_sum = mlm_count = mlm_hits = next_sum = next_hits = pairs = zero
        if predicted_N is None or labels_N is None:
            mlm_sum = self._zero(self.mlm)
        else:
            hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, predicted_N)
            mlm_sum, mlm_hits = self._predict(hidden_ND, labels_N)
            mlm_count = zero + len(labels_N)
        if is_next_B is None:
            next_sum = self._zero(self.next)
        else:
            with torch.autocast(hidden_BTD.device.type, enabled=False):
                logits_B = self.next(hidden_BTD[:, 0].float())[:, 0]
            next_sum = F.binary_cross_entropy_with_logits(
                logits_B, is_next_B.float(), reduction="sum"
            )
            next_hits = ((logits_B.detach() > 0) == is_next_B).sum().float()
            pairs = zero + len(is_next_B)
        if answer_keys_BS is not None:
            vectors = reduce(hidden_BTD.float(), tokens.mask_BT)
            contrastive_sum, next_hits = _contrastive(vectors, answer_keys_BS)
            next_sum = next_sum + contrastive_sum
            pairs = zero + len(answer_keys_BS)
        return PretrainingSums(mlm_sum, mlm_count, mlm_hits, next_sum, next_hits, pairs)

    def mlm_logits(self, hidden_ND: Tensor) -> Tensor:
        """[N, V] from vectors of the encoder."""
        logits_NV: Tensor = self.mlm(inputs_embeds=hidden_ND[None]).logits[0]
        return logits_NV

    def _predict(self, hidden_ND: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the cross-entropies, and how many predictions are right."""
        if len(labels_N) <= _POSITIONS_AT_ONCE:
            return self._predict_chunk(hidden_ND, labels_N)
        chunks = zip(
            torch.split(hidden_ND, _POSITIONS_AT_ONCE),
            torch.split(labels_N, _POSITIONS_AT_ONCE),
            strict=True,
        )
        sums, hits = zip(
            *(checkpoint(self._predict_chunk, *chunk, use_reentrant=False) for chunk in chunks),
            strict=True,
        )
        return torch.stack(sums).sum(), torch.stack(hits).sum()

    def _predict_chunk(self, hidden_ND: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
        logits_NV = self.mlm_logits(hidden_ND).float()
        hits = (logits_NV.detach().argmax(dim=1) == labels_N).sum().float()
        return F.cross_entropy(logits_NV, labels_N, reduction="sum"), hits

    def _zero(self, head: nn.Module) -> Tensor:
        """0, with a gradient of zeros for each weight that is the head's alone."""
        shared = set(self.encoder.parameters())
        sums = [weight.sum() for weight in head.parameters() if weight not in shared]
        return torch.stack(sums).sum() * 0


def _contrastive(vectors: Tensor, answer_keys_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies of each context's response among those of the batch, and how many come
    first. `vectors` float32 [2B, D]: contexts, then responses.

    TOD-BERT's response contrastive loss (arXiv 2004.06871, section 3.3) with cosines in place of dot
    products, times 20 as in sentence-transformers' MultipleNegativesRankingLoss.
    """
    with torch.autocast(vectors.device.type, enabled=False):
        vectors, count = F.normalize(vectors, dim=1), len(answer_keys_BS)
        contexts_BD, responses_BD = vectors[:count], vectors[count:]
        scores_BB = _COSINE_SCALE * contexts_BD @ responses_BD.T
        label_B = torch.arange(count, device=vectors.device)
        excluded_BB = false_negatives(answer_keys_BS, label_B)
        loss_sum = ranking_loss(scores_BB, label_B, excluded_BB) * count
    return loss_sum, right_above_all(scores_BB, label_B, excluded_BB).sum().float()


class _BaseStub(nn.Module):
    """Stands in a masked language model for its base, so that only the head is computed."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=inputs_embeds)


def read_next_head(folder: Path, width: int) -> dict[str, Tensor]:
    """ "weight" [1, width] and "bias" [1] of the next head beside an encoder; {}: there is none.

    Raises BadInput for a file that holds something else.
    """
    path = folder / NEXT_HEAD
    if not path.exists():
        return {}
    weights = read_weights(path)
    shapes, needed = (
        {k: list(v.shape) for k, v in weights.items()},
        {"weight": [1, width], "bias": [1]},
    )
    if shapes != needed:
        raise BadInput(f"{path}: holds {shapes}; allowed: {needed}")
    return weights

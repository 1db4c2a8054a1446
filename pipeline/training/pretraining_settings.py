"""The settings of pre-training's data: which pairs, which tokens are predicted, how many at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pipeline.config import NOT_IDENTITY, require
from pipeline.options.unread import read_when

TOKENS = "tokens"
"""The kind of artifact that a tokenized corpus is."""
Objective = Literal["joint", "alternate", "mlm", "contrastive", "contrastive_mlm"]
MaskingRule = Literal["bert", "xlm"]

# About 10 GB of activations in a BERT-base encoder in bfloat16, without gradient checkpointing.
_MICRO_BATCH_TOKENS = 16_384
_RANDOM_PAIRS: tuple[Objective, ...] = ("joint", "alternate")
_PREDICT_TOKENS: tuple[Objective, ...] = ("joint", "alternate", "mlm", "contrastive_mlm")
_READ_WITH_MASKS = read_when({"pretrain.objective": _PREDICT_TOKENS})


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Which pairs, for how long."""

    batch_tokens: int = 32_000
    """Tokens of a step at most, over all workers, padding included."""
    micro_batch_tokens: int = 0
    """Tokens that a worker computes at once at most, padding included; 0: 16,384. A step has batch_tokens
    / micro_batch_tokens micro-batches, rounded up, which the workers share out. They are the same for
    every number of workers, so a resumed run needs the same value."""
    steps: int = field(default=100_000, metadata=NOT_IDENTITY)
    """Updates of the weights. A run that was stopped may be resumed with more."""
    objective: Objective = "joint"
    """joint: every batch trains masked tokens and the next utterance (BERT). alternate: even steps train
    masked tokens, odd steps the next utterance, without masks (the Poly-encoder paper). mlm: masked tokens
    only, and all pairs are true. contrastive: the encoder reads each text alone, and the mean vectors tell a
    context's own response from the others of its micro-batch (TOD-BERT); for bi- and poly-encoders.
    contrastive_mlm: the same with masks, and masked tokens in every batch."""
    masking: MaskingRule = field(default="bert", metadata=_READ_WITH_MASKS)
    """bert: special tokens are never predicted. xlm: separators are predicted like other tokens; only
    padding and the first position never are."""
    masked_share: float = field(default=0.15, metadata=_READ_WITH_MASKS)
    """Share of the tokens that are predicted. Of these 80 % become the mask token, 10 % a random token, and
    10 % stay."""
    rare_token_alpha: float = field(default=0.0, metadata=_READ_WITH_MASKS)
    """Predict a token with a probability proportional to (its count in the corpus)^-alpha, so that rare
    tokens are predicted more often (XLM's sample_alpha); 0: all tokens alike."""
    whole_words: bool = field(default=False, metadata=_READ_WITH_MASKS)
    """Predict all pieces of a word, or none."""
    max_context_tokens: int = 180
    """First text of a pair: its newest tokens, as many as fit with [CLS] and [SEP]."""
    max_response_tokens: int = 72
    """Second text of a pair: its first tokens, as many as fit with [CLS] and [SEP] where it stands alone.
    A pair shares the [CLS], so it has at most max_context_tokens + max_response_tokens - 1 tokens;
    contrastive and contrastive_mlm read two texts."""
    random_share: float = field(
        default=0.5, metadata=read_when({"pretrain.objective": _RANDOM_PAIRS})
    )
    """Share of the pairs that have the response of another example (next utterance, next sentence)."""
    window_rows: int = 16_384
    """Examples that are shuffled together and cut into micro-batches; of similar length, if a row is a
    pair."""
    gradient_checkpointing: bool = False
    """Compute layers again in the backward pass. A step takes a third longer and a fraction of the
    memory, for micro-batches that do not fit otherwise."""
    valid_examples: int = 4096
    """Examples of the held-out split that validation uses at most."""

    def __post_init__(self) -> None:
        for name in ("steps", "window_rows", "valid_examples"):
            require(getattr(self, name) >= 1, f"pretrain.{name}", getattr(self, name), ">= 1")
        for name in ("max_context_tokens", "max_response_tokens"):
            require(getattr(self, name) >= 3, f"pretrain.{name}", getattr(self, name), ">= 3")
        for name in ("masked_share", "random_share"):
            value = getattr(self, name)
            require(0 < value < 1, f"pretrain.{name}", value, "between 0 and 1")
        require(
            self.rare_token_alpha >= 0, "pretrain.rare_token_alpha", self.rare_token_alpha, ">= 0"
        )
        require(self.micro_batch_tokens >= 0, "pretrain.micro_batch_tokens",
                self.micro_batch_tokens, ">= 0")  # fmt: skip
        require(self.batch_tokens >= self.longest_pair, "pretrain.batch_tokens", self.batch_tokens,
                f">= {self.longest_pair}, the longest pair")  # fmt: skip
        require(self.lane_tokens >= self.longest_pair, "pretrain.micro_batch_tokens",
                self.micro_batch_tokens,
                f"0, or enough for the longest pair, {self.longest_pair}, in each of "
                f"{self.lanes} micro-batches of pretrain.batch_tokens {self.batch_tokens}")  # fmt: skip
        require(not self.single_texts or self.lane_pairs >= 2, "pretrain.micro_batch_tokens",
                self.micro_batch_tokens,
                f"enough for two pairs, {2 * self.longest_pair}, whose responses pretrain.objective "
                f"{self.objective!r} tells apart")  # fmt: skip

    @property
    def longest_pair(self) -> int:
        """Tokens that the longest pair takes in a micro-batch: [CLS] context [SEP] response [SEP], or two
        rows of a single text each, which are equally wide."""
        return 2 * self.longest_row if self.single_texts else self.longest_row

    @property
    def longest_row(self) -> int:
        """Tokens that the encoder reads at once at most."""
        if self.single_texts:
            return max(self.max_context_tokens, self.max_response_tokens)
        return self.max_context_tokens + self.max_response_tokens - 1

    @property
    def single_texts(self) -> bool:
        """Whether the encoder reads contexts and responses as rows of their own."""
        return self.objective in ("contrastive", "contrastive_mlm")

    @property
    def random_pairs(self) -> bool:
        """Whether a share of the contexts gets the response of another example."""
        return self.objective in _RANDOM_PAIRS

    def predicts_tokens(self, step: int) -> bool:
        """Whether a step has masks: those of an alternating run do if they are even."""
        if self.objective == "alternate":
            return step % 2 == 0
        return self.objective in _PREDICT_TOKENS

    def predicts_next(self, step: int) -> bool:
        """Whether a step tells true pairs from random ones."""
        return self.objective == "joint" or (self.objective == "alternate" and step % 2 == 1)

    @property
    def lanes(self) -> int:
        """Micro-batches of a step, whatever the number of workers."""
        return -(-self.batch_tokens // (self.micro_batch_tokens or _MICRO_BATCH_TOKENS))

    @property
    def lane_tokens(self) -> int:
        """Tokens of a micro-batch at most, padding included."""
        return self.batch_tokens // self.lanes

    @property
    def lane_pairs(self) -> int:
        """Pairs of a micro-batch at most, if all of them are as long as the longest."""
        return self.lane_tokens // self.longest_pair


@dataclass(frozen=True, kw_only=True)
class TokenizeConfig:
    """Which tokens of each example are kept."""

    max_context_tokens: int = 510
    """The newest tokens of a context that are kept, special tokens not counted."""
    max_response_tokens: int = 510
    """The first tokens of a response that are kept, special tokens not counted."""
    valid_share: float = 0.01
    """Share of the groups (threads, dialogues, articles) of train that go to validation, if the corpus
    has no valid split."""

    def __post_init__(self) -> None:
        for name in ("max_context_tokens", "max_response_tokens"):
            require(getattr(self, name) >= 1, f"tokenize.{name}", getattr(self, name), ">= 1")
        require(0 <= self.valid_share < 1, "tokenize.valid_share", self.valid_share,
                "at least 0 and less than 1")  # fmt: skip

"""A ranker's settings: what `ranker.json` holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

from pipeline.config import BadInput, require

Reduction = Literal["first", "mean", "mean_first_m"]
Architecture = Literal["bi", "poly", "cross"]
HeadAttention = Literal["dot", "scaled_dot", "multi_head"]
ContextCodes = Literal["learnt", "first_m", "last_m", "last_m_and_first"]


@dataclass(frozen=True, kw_only=True)
class RankerConfig:
    """What a scorer is; saved with it as `ranker.json`."""

    architecture: Architecture = "poly"
    """bi: one vector each. poly: several context vectors. cross: both texts in one sequence."""
    reduction: Reduction = "mean"
    """Token outputs to one vector: mean for sentence-encoder and Reddit weights, first for BERT's."""
    reduction_m: int = 64
    """mean_first_m: tokens that the mean is over."""
    context_codes: ContextCodes = "learnt"
    """poly: attend with learnt codes; or take the first m outputs, the last m, or the last m and the
    first one, which makes m + 1."""
    m: int = 64
    """poly: context vectors."""
    code_attention: HeadAttention = "dot"
    """poly: attention of the codes over tokens."""
    candidate_attention: HeadAttention = "dot"
    """poly: attention of a candidate over context vectors; pools cannot be searched by multi_head."""
    attention_heads: int = 4
    """multi_head: heads, each with its share of the width."""
    code_init_std: float = 0.05
    """poly: codes start as N(0, std). Small ones start at mean pooling; ParlAI's uniform(0, 1) needs
    weights made for it (ConvAI2, all-MiniLM, one epoch: R@1/20 0.675 against 0.583)."""
    share_towers: bool = False
    """bi and poly: one encoder for both sides."""
    output_scaling: float = 1.0
    """Factor on the encoder's outputs; 0.06 for weights pre-trained without weight decay."""
    projection: int = 0
    """bi and poly: vectors of this width, by a linear layer per tower; 0: the encoder's own width."""
    vector_length: float = 0.0
    """bi and poly: every vector is scaled to this L2 norm, so that a product is a cosine times its
    square (4.5: 20 · cosine); 0: vectors stay as they are."""
    matryoshka: tuple[int, ...] = ()
    """bi and poly: widths that vectors can be cut to later; training averages the losses of all of
    them and of the full width."""
    dimensions: int = 0
    """bi and poly: vectors are cut to their first dimensions, one of `matryoshka`; 0: all of them."""
    pooler: bool = False
    """cross: a layer with tanh before the score, as BERT's classifiers have."""
    max_context_tokens: int = 360
    """Contexts keep their newest tokens, [CLS] and [SEP] included."""
    max_candidate_tokens: int = 72
    """Candidates keep their first tokens, [CLS] and [SEP] included."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(RankerConfig).items():
            if get_origin(kind) is Literal:  # ranker.json is not read by jsonargparse
                allowed = get_args(kind)
                value = getattr(self, name)
                require(value in allowed, f"ranker.{name}", value, ", ".join(allowed))
        for name in ("m", "reduction_m", "attention_heads", "output_scaling", "code_init_std"):
            require(getattr(self, name) > 0, f"ranker.{name}", getattr(self, name), "above 0")
        for name in ("projection", "vector_length"):
            require(getattr(self, name) >= 0, f"ranker.{name}", getattr(self, name), ">= 0")
        for name in ("max_context_tokens", "max_candidate_tokens"):
            require(getattr(self, name) >= 3, f"ranker.{name}", getattr(self, name), ">= 3")
        require(all(width >= 1 for width in self.matryoshka), "ranker.matryoshka", self.matryoshka,
                "widths >= 1")  # fmt: skip
        require(self.dimensions in (0, *self.matryoshka), "ranker.dimensions", self.dimensions,
                f"0, or a width that was trained for: {list(self.matryoshka)}")  # fmt: skip
        # Its matrices have a row and a column for every dimension: none can be left out.
        require(not self.matryoshka or self.candidate_attention != "multi_head", "ranker.matryoshka",
                self.matryoshka, "none, where ranker.candidate_attention is 'multi_head'")  # fmt: skip

    @property
    def search_attention(self) -> Literal["dot", "scaled_dot"]:
        """How the search of a pool weighs a context's vectors; a bi-encoder has but one.

        Raises BadInput for what cannot search a pool: cross-encoders, whose candidates have no
        vectors, and multi_head, where a score is not bounded by the vectors' products.
        """
        if self.architecture == "cross":
            raise BadInput("architecture: 'cross' cannot search a pool; allowed: bi, poly")
        if self.architecture == "bi":
            return "dot"
        if self.candidate_attention == "multi_head":
            raise BadInput("candidate_attention: 'multi_head' cannot search a pool; allowed: dot, "
                           "scaled_dot")  # fmt: skip
        return self.candidate_attention

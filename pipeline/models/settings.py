"""The settings of a ranker, as in `ranker.json`, one dataclass per architecture; and the shape of an encoder.

Other modules ask the settings what a ranker can do (`has_vectors`, `search_attention`), not which
architecture it has. Nothing here needs torch, so that a job can refuse settings before it loads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self, cast, get_args, get_origin, get_type_hints

from pipeline import storage
from pipeline.config import BadInput, Variants, from_dict, require, variants_of
from pipeline.options.unread import read_when

SETTINGS = "ranker.json"

Reduction = Literal["first", "mean", "mean_first_m"]
Attention = Literal["dot", "scaled_dot"]
HeadAttention = Literal["dot", "scaled_dot", "multi_head"]
ContextCodes = Literal["learnt", "first_m", "last_m", "last_m_and_first"]
Activation = Literal["relu", "fast_gelu"]
ContextKeeps = Literal["last", "both_ends"]
CandidateKeeps = Literal["first", "both_ends"]
TrainLayers = Literal["all", "top", "top4", "all_but_embeddings"]

_HAS_CODES = read_when({"ranker.context_codes": ("learnt",)})
_HAS_HEADS = read_when(
    {"ranker.code_attention": ("multi_head",), "ranker.candidate_attention": ("multi_head",)}
)
_HAS_POOLER = read_when({"ranker.pooler": (True,)})

_TYPES: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
}
"""The types of a field's values, and how a refusal calls them."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A new encoder. The paper's is BERT-base: 12 layers, width 768, 12 heads."""

    architecture: Literal["bert", "modernbert"] = "bert"
    """bert: as in the paper. modernbert: rotary positions and gated layers; it learns from far fewer
    examples (sample corpora, 2 layers of 64, 2,000 steps: MLM loss 0.9 against 4.4)."""
    layers: int = 12
    """Transformer blocks."""
    width: int = 768
    """Size of a token's vector."""
    heads: int = 12
    """Attention heads in a block."""
    positions: int = 512
    """Tokens in a sequence at most."""
    dropout: float = 0.1
    """Dropout of embeddings, residuals and attention."""
    init_std: float = 0.02
    """New weights are normal with this standard deviation; small encoders need 0.05."""
    intermediate: int = 0
    """Width of a block's feed-forward layer; 0: 4 × the width, or 2 × for modernbert, which is gated.
    ModernBERT-base has 1,152 at a width of 768."""
    global_attention_every: int = 1
    """modernbert: every n-th block sees the whole text, the others 64 tokens to either side; 1: all see
    it, because windows save nothing on dialogues. ModernBERT has 3."""

    def __post_init__(self) -> None:
        require(self.layers >= 1, "shape.layers", self.layers, ">= 1")
        require(self.heads >= 1 and self.width % self.heads == 0, "shape.width", self.width,
                f"a multiple of shape.heads {self.heads}")  # fmt: skip
        require(0 <= self.dropout < 1, "shape.dropout", self.dropout, "0 to below 1")
        require(self.init_std > 0, "shape.init_std", self.init_std, "above 0")
        require(self.intermediate >= 0, "shape.intermediate", self.intermediate, ">= 0")
        require(self.global_attention_every >= 1, "shape.global_attention_every",
                self.global_attention_every, ">= 1")  # fmt: skip
        require(self.architecture == "modernbert" or self.global_attention_every == 1,
                "shape.global_attention_every", self.global_attention_every,
                "1, as shape.architecture is 'bert'")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ScorerConfig:
    """Settings that all rankers have."""

    architecture: str
    max_context_tokens: int = 360
    """Contexts keep their newest tokens, [CLS] and [SEP] included."""
    max_candidate_tokens: int = 72
    """Candidates keep their first tokens, [CLS] and [SEP] included."""

    starts_from_tokenizer: ClassVar[bool] = False
    """Whether a tokenizer is enough to start from; the others start from an encoder."""
    MAY_BE_0: ClassVar[tuple[str, ...]] = ()
    """Numbers are above 0, but for these and those that are 0 by default."""

    def __post_init__(self) -> None:
        # The types, too: jsonargparse does not read ranker.json.
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name, None)
            if get_origin(kind) is Literal:
                require(value in get_args(kind), f"ranker.{name}", value, ", ".join(get_args(kind)))
            elif kind in _TYPES:
                types, description = _TYPES[kind]
                require(type(value) in types, f"ranker.{name}", value, description)
            elif kind == tuple[int, ...]:
                is_tuple = isinstance(value, tuple) and all(type(n) is int for n in value)
                require(is_tuple, f"ranker.{name}", value, "whole numbers")
        for name in ("max_context_tokens", "max_candidate_tokens"):
            require(getattr(self, name) >= 3, f"ranker.{name}", getattr(self, name), ">= 3")
        for setting in fields(self):
            if type(setting.default) in (int, float):
                may_be_0 = setting.default == 0 or setting.name in self.MAY_BE_0
                value = getattr(self, setting.name)
                require(value > 0 or (may_be_0 and value == 0), f"ranker.{setting.name}", value,
                        ">= 0" if may_be_0 else "above 0")  # fmt: skip

    @property
    def vectors_per_context(self) -> int:
        """How many vectors a context has; 0: none, the network reads context and candidate together."""
        raise NotImplementedError

    @property
    def has_vectors(self) -> bool:
        """Whether contexts and candidates have vectors of their own, so that pools can be embedded."""
        return self.vectors_per_context > 0

    @property
    def has_two_towers(self) -> bool:
        """Whether contexts and candidates have encoders of their own."""
        return False

    def check_training(self) -> None:
        """Raises BadInput for settings that do not fit each other in a new ranker. Older rankers may have
        them, and still load."""

    def sized_as(self, model: ScorerConfig) -> Self:
        """These settings, with the sizes of a model that is trained further where they are the defaults; for
        architectures whose settings say the sizes."""
        return self

    @property
    def search_attention(self) -> Attention:
        """How the search of a pool weighs a context's vectors.

        Raises BadInput for a ranker that cannot search a pool.
        """
        raise BadInput(f"architecture: {self.architecture!r} cannot search a pool; allowed: "
                       f"{_with_vectors()}")  # fmt: skip

    def require_vectors(self) -> None:
        """Raises BadInput unless candidates have vectors of their own."""
        if not self.has_vectors:
            raise BadInput(f"architecture: {self.architecture!r} has no candidate vectors; allowed: "
                           f"{_with_vectors()}")  # fmt: skip

    def require_one_vector(self, option: str) -> None:
        """Raises BadInput unless contexts have one vector each, which `option` needs."""
        if self.vectors_per_context != 1:
            raise BadInput(f"{option}: needs one vector for each context; {self.architecture!r} has "
                           f"{self.vectors_per_context or 'none'}")  # fmt: skip

    def require_pairs(self) -> None:
        """Raises BadInput unless the network reads context and candidate together."""
        if self.has_vectors:
            allowed = ", ".join(architectures(lambda ranker: not ranker.has_vectors))
            raise BadInput(
                f"architecture: {self.architecture!r} scores no pairs; allowed: {allowed}"
            )


@dataclass(frozen=True, kw_only=True)
class OnEncoderConfig(ScorerConfig):
    """What rankers on a pre-trained encoder share."""

    output_scaling: float = 1.0
    """Factor on the encoder's outputs; 0.06 for weights pre-trained without weight decay."""
    context_prompt: str = ""
    """Text before every context, such as "query: " for E5. If both prompts are empty, jobs.finetune takes
    those that the encoder's own configuration names."""
    candidate_prompt: str = ""
    """Text before every candidate, such as "passage: "."""

    context_keeps: ContextKeeps = "last"
    """The tokens that a long context keeps: the last ones, or the first quarter and then the last ones, where
    dialogues begin with what holds for all turns, such as a persona or an instruction."""
    candidate_keeps: CandidateKeeps = "first"
    """The tokens that a long candidate keeps: the first ones, or the first quarter and the last ones (Sun et
    al., 2019, arXiv 1905.05583, found this best for long documents)."""


@dataclass(frozen=True, kw_only=True)
class DualConfig(OnEncoderConfig):
    """What bi- and poly-encoders share: two towers, and one vector per candidate."""

    reduction: Reduction = "mean"
    """How token outputs become one vector: mean for sentence encoders and Reddit weights, first for
    BERT's."""
    reduction_m: int = field(
        default=64, metadata=read_when({"ranker.reduction": ("mean_first_m",)})
    )
    """mean_first_m: number of tokens that the mean is over."""
    share_towers: bool = False
    """Use one encoder for both sides."""
    projection: int = 0
    """Width of the vectors, by a linear layer per tower; 0: the encoder's own width."""
    projection_bias: bool = False
    """The projection has a bias, as in LaBSE."""
    projection_activation: Literal["none", "tanh"] = "none"
    """What follows the projection: tanh in LaBSE."""
    vector_length: float = 0.0
    """Every vector is scaled to this L2 norm, so that a product is a cosine times its square (4.5:
    20 · cosine); 0: vectors stay as they are."""
    matryoshka: tuple[int, ...] = ()
    """Widths that vectors can be truncated to later. Training averages the losses of these widths and of
    the full one."""
    dimensions: int = 0
    """Truncate vectors to this width, one of `matryoshka`; 0: the full width."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(all(width >= 1 for width in self.matryoshka), "ranker.matryoshka", self.matryoshka,
                "widths >= 1")  # fmt: skip
        require(self.dimensions in (0, *self.matryoshka), "ranker.dimensions", self.dimensions,
                f"0, or a width that was trained for: {list(self.matryoshka)}")  # fmt: skip

    @property
    def has_two_towers(self) -> bool:
        return not self.share_towers


@dataclass(frozen=True, kw_only=True)
class BiConfig(DualConfig):
    """A bi-encoder: one vector per context, one per candidate, their product is the score."""

    architecture: Literal["bi"] = "bi"
    """One vector per context and one per candidate."""

    @property
    def vectors_per_context(self) -> int:
        return 1

    @property
    def search_attention(self) -> Attention:
        return "dot"


@dataclass(frozen=True, kw_only=True)
class PolyConfig(DualConfig):
    """A poly-encoder: several vectors per context, which a candidate attends to."""

    architecture: Literal["poly"] = "poly"
    """Several vectors per context and one per candidate."""
    context_codes: ContextCodes = "learnt"
    """Where the context vectors come from: learnt codes that attend to the tokens; the first m outputs;
    the last m; or the last m and the first one, which makes m + 1."""
    m: int = 64
    """Number of context vectors."""
    code_attention: HeadAttention = field(default="dot", metadata=_HAS_CODES)
    """Attention of the codes over tokens."""
    candidate_attention: HeadAttention = "dot"
    """Attention of a candidate over context vectors. With multi_head a ranker cannot search pools."""
    attention_heads: int = field(default=4, metadata=_HAS_HEADS)
    """multi_head: number of heads, each with its share of the width."""
    code_init_std: float = field(default=0.05, metadata=_HAS_CODES)
    """Codes start as N(0, std). With a small std they start at mean pooling; ParlAI's uniform(0, 1) needs
    weights made for it (ConvAI2, all-MiniLM, one epoch: R@1/20 0.675 against 0.583)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Its matrices have a row and a column for every dimension: none can be left out.
        require(not self.matryoshka or self.candidate_attention != "multi_head", "ranker.matryoshka",
                self.matryoshka, "none, where ranker.candidate_attention is 'multi_head'")  # fmt: skip

    @property
    def vectors_per_context(self) -> int:
        return self.m + (self.context_codes == "last_m_and_first")

    @property
    def search_attention(self) -> Attention:
        # With heads the vectors' products are no bound on a score.
        if self.candidate_attention == "multi_head":
            raise BadInput("candidate_attention: 'multi_head' cannot search a pool; allowed: dot, "
                           "scaled_dot")  # fmt: skip
        return self.candidate_attention


@dataclass(frozen=True, kw_only=True)
class CrossConfig(OnEncoderConfig):
    """A cross-encoder: context and candidate in one sequence."""

    architecture: Literal["cross"] = "cross"
    """Context and candidate in one sequence."""
    head: Literal["first", "mean", "two_means"] = "first"
    """first: the score is a linear function of the first output, as in the paper; mean: of the mean of all.
    two_means: the first, plus the product of the mean outputs of both texts, so that a ranker which starts
    from a bi-encoder with shared towers scores nearly as it does."""
    pooler: bool = False
    """A layer with an activation before the score, as BERT's classifiers have."""
    pooler_activation: Literal["tanh", "gelu", "relu"] = field(default="tanh", metadata=_HAS_POOLER)
    """The activation of the pooler: tanh as in BERT and RoBERTa, gelu as in ELECTRA and ModernBERT."""
    pooler_norm: bool = field(default=False, metadata=_HAS_POOLER)
    """Layer normalisation after the pooler, as in ModernBERT."""
    separators: int = 1
    """Separators between context and candidate: 2 for RoBERTa's family, else 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.separators in (1, 2), "ranker.separators", self.separators, "1, 2")

    @property
    def vectors_per_context(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(ScorerConfig):
    """ConveRT: a small encoder of its own, trained from raw examples. The defaults are the paper's size."""

    architecture: Literal["convert"] = "convert"
    """A small encoder that all texts share, trained without pre-training; cosines of encodings."""
    max_context_tokens: int = 60
    """The newest turn keeps its first tokens, and so does the text of the earlier turns."""
    max_candidate_tokens: int = 60
    """Candidates keep their first tokens."""
    earlier_turns: int = 0
    """Number of turns before the newest one that a context keeps, the latest ones; 0: single-context. The
    paper's multi-context model has 10."""
    number_earlier_turns: bool = False
    """Put "0: ", "1: ", … before earlier turns, 0 before the latest, as PolyAI's model for DSTC7 has
    them."""
    context_codes: int = 0
    """A poly-encoder on ConveRT: learnt codes give a context this many vectors, and a candidate attends
    to them; 0: one vector, as in the paper."""
    buckets: int = 1000
    """Number of embeddings for subwords outside the vocabulary, which are hashed to them."""
    width: int = 512
    """Size of a token's vector."""
    position_tables: tuple[int, ...] = (47, 11)
    """Rows of each table of positions; a token's position is the sum of its rows."""
    windows: tuple[int, ...] = (3, 5, 48, 48, 48, 48)
    """How far a token sees to either side, in each block."""
    attention_width: int = 64
    """Size of a block's queries, keys and values."""
    intermediate: int = 2048
    """Width of a block's feed-forward layer."""
    reduction_heads: int = 2
    """Attention heads that sum up the tokens of a text; their sums are joined."""
    reduction_width: int = 64
    """Size of the queries and keys of these heads."""
    hidden: tuple[int, ...] = (1024, 1024, 1024)
    """Widths of the hidden layers in the network of each side."""
    encoding_width: int = 512
    """Width of an encoding."""
    activation: Activation = "fast_gelu"
    """Activation of the hidden layers. Blocks always have fast_gelu."""
    anneal_steps: int = 10_000
    """Steps in which the factor on cosines grows from 1 to the root of `encoding_width`; 0: it has this
    value from the first step, which suits a model that is trained further."""
    start: Literal["paper", "shared_words", "taught_words"] = "paper"
    """How new weights start. paper: embeddings below 0.01, for AdaDelta. shared_words: embeddings are 20
    times as large, so that a step of AdamW changes them little, and other layers change their sum little:
    a new model already scores texts that share words higher. taught_words: the same, with vectors of
    subwords that `jobs.train_tokenizer --tokenizer.vectors true` has fitted to a teacher's;
    `encoding_width` is the teacher's."""
    quantised: bool = True
    """Use embeddings of 8 bits, in training too, and save all other weights in 16 bits; false:
    float32."""
    block_weights: Literal["float16", "int8"] = "float16"
    """Saved weights of the blocks' linear layers, if the model is quantised. int8: with a scale for each
    output; CPUs multiply them with inputs of 8 bits."""
    range_every_steps: int = field(default=100, metadata=read_when({"ranker.quantised": (True,)}))
    """Steps after which training sets the range of the 8-bit tables again."""

    starts_from_tokenizer = True
    MAY_BE_0 = ("anneal_steps",)
    OF_TRAINING: ClassVar[tuple[str, ...]] = (
        "anneal_steps", "start", "quantised", "block_weights", "range_every_steps",
    )  # fmt: skip
    """The settings that are no sizes: a trained model's weights fit whatever they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("position_tables", "windows", "hidden"):
            value = getattr(self, name)
            require(len(value) > 0 and min(value) >= 1, f"ranker.{name}", value, "numbers >= 1")

    def check_training(self) -> None:
        require(self.quantised or self.block_weights != "int8", "ranker.block_weights", "int8",
                "'float16' with ranker.quantised false, which saves float32")  # fmt: skip
        require(self.earlier_turns > 0 or not self.number_earlier_turns, "ranker.number_earlier_turns",
                True, "false with ranker.earlier_turns 0")  # fmt: skip

    def sized_as(self, model: ScorerConfig) -> Self:
        if type(model) is not type(self):
            return self
        return replace(self, **{
            setting.name: getattr(model, setting.name)
            for setting in fields(self)
            if setting.name not in self.OF_TRAINING and getattr(self, setting.name) == setting.default
        })  # fmt: skip

    @property
    def saves_int8(self) -> bool:
        """Whether a saved model has blocks of 8 bits."""
        return self.quantised and self.block_weights == "int8"

    @property
    def longest_text(self) -> int:
        """Tokens that any text has at most."""
        return max(self.max_context_tokens, self.max_candidate_tokens)

    @property
    def vectors_per_context(self) -> int:
        return self.context_codes or 1

    @property
    def search_attention(self) -> Attention:
        return "dot"


RankerConfig = BiConfig | PolyConfig | CrossConfig | ConvertConfig
_KINDS = cast(Variants, variants_of(RankerConfig))


def ranker_config(values: Mapping[str, Any]) -> RankerConfig:
    """Settings from plain values. Fields that only other architectures have are left out: rankers of
    earlier versions hold the fields of all.

    Raises BadInput for an unknown architecture, TypeError for an unknown field.
    """
    name = values["architecture"]
    require(name in _KINDS.kinds, "ranker.architecture", name, ", ".join(_KINDS.kinds))
    all_fields = set().union(*(_KINDS.option_names(kind) for kind in _KINDS.kinds))
    foreign_fields = all_fields - _KINDS.option_names(name)
    own_values = {field: value for field, value in values.items() if field not in foreign_fields}
    settings: RankerConfig = from_dict(_KINDS.kinds[name], own_values)
    return settings


def read_settings(uri: str) -> RankerConfig:
    """The settings of the ranker at this URI.

    Raises BadInput for settings that this version does not know.
    """
    file = storage.join(uri, SETTINGS)
    try:
        return ranker_config(json.loads(storage.read_bytes(file)))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadInput(f"{file}: not the settings of a ranker ({error!r})") from None


def architectures(are: Callable[[ScorerConfig], bool]) -> tuple[str, ...]:
    """The names of the architectures of which this is true, by their default settings."""
    return tuple(name for name, kind in _KINDS.kinds.items() if are(kind()))


def _with_vectors() -> str:
    return ", ".join(architectures(lambda ranker: ranker.has_vectors))

"""A ranker's settings and its directory: the one place that knows all architectures.

    ranker.json            the settings below
    context_encoder/       a plain `save_pretrained` directory with its tokenizer
    candidate_encoder/     likewise; absent where the towers are shared
    encoder/               a cross-encoder's only tower
    head.safetensors       codes of a poly-encoder, the linear layer of a cross-encoder
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipeline.config import BadInput, from_dict, require
from pipeline.models.biencoder import BiEncoder
from pipeline.models.crossencoder import CrossEncoder
from pipeline.models.polyencoder import Attention, PolyEncoder
from pipeline.models.reduction import Reduction
from pipeline.models.tokens import Tokenizer
from pipeline.models.transformer import Encoder

Architecture = Literal["bi", "poly", "cross"]
DualEncoder = BiEncoder | PolyEncoder
Network = BiEncoder | PolyEncoder | CrossEncoder

_HEAD = "head.safetensors"
_SETTINGS = "ranker.json"


@dataclass(frozen=True, kw_only=True)
class RankerConfig:
    """What a scorer is; saved with it as `ranker.json`."""

    architecture: Architecture = "poly"
    """bi: one vector each. poly: several context vectors. cross: both texts in one sequence."""
    reduction: Reduction = "mean"
    """Token outputs to one vector: mean for sentence-encoder and Reddit weights, first for BERT's."""
    context_codes: Literal["learnt", "first_m"] = "learnt"
    """poly: attend with learnt codes, or take the first m outputs."""
    m: int = 64
    """poly: context vectors."""
    code_attention: Attention = "dot"
    """poly: attention of the codes over tokens."""
    candidate_attention: Attention = "dot"
    """poly: attention of a candidate over context vectors."""
    code_init_std: float = 0.05
    """poly: codes start as N(0, std). Small ones start at mean pooling; ParlAI's uniform(0, 1) needs
    weights made for it (ConvAI2, all-MiniLM, one epoch: R@1/20 0.675 against 0.583)."""
    share_towers: bool = False
    """bi and poly: one encoder for both sides."""
    output_scaling: float = 1.0
    """Factor on the encoder's outputs; 0.06 for weights pre-trained without weight decay."""
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
        for name in ("m", "output_scaling", "code_init_std"):
            require(getattr(self, name) > 0, f"ranker.{name}", getattr(self, name), "above 0")
        for name in ("max_context_tokens", "max_candidate_tokens"):
            require(getattr(self, name) >= 3, f"ranker.{name}", getattr(self, name), ">= 3")


class Ranker(nn.Module):
    """A scorer with its tokenizer and its settings."""

    def __init__(self, config: RankerConfig, tokenizer: Tokenizer, network: Network) -> None:
        super().__init__()
        self.config = config
        self.tokenizer = tokenizer
        self.network = network

    @property
    def dual(self) -> DualEncoder:
        """The network of a bi- or poly-encoder.

        Raises BadInput for a cross-encoder: its candidates have no vectors of their own.
        """
        if isinstance(self.network, CrossEncoder):
            raise BadInput("architecture: 'cross' has no candidate vectors; allowed: bi, poly")
        return self.network

    @property
    def cross(self) -> CrossEncoder:
        """The network of a cross-encoder.

        Raises BadInput for the others.
        """
        if not isinstance(self.network, CrossEncoder):
            raise BadInput(f"architecture: {self.config.architecture!r} scores no pairs; allowed: cross")
        return self.network

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def context_rows(self, contexts: Sequence[Sequence[str]]) -> list[list[int]]:
        return self.tokenizer.contexts(contexts, self.config.max_context_tokens)

    def candidate_rows(self, texts: Sequence[str]) -> list[list[int]]:
        return self.tokenizer.candidates(texts, self.config.max_candidate_tokens)

    def save(self, folder: Path) -> None:
        """Writes the directory; safetensors only."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = json.dumps(asdict(self.config), indent=1)
        (folder / _SETTINGS).write_text(settings + "\n", encoding="utf-8")
        for name, encoder in _towers(self.network, self.config).items():
            encoder.save(folder / name)
            self.tokenizer.save(folder / name)
        save_file(_head(self.network), folder / _HEAD)


def new_ranker(config: RankerConfig, encoder_folder: Path, seed: int) -> Ranker:
    """A ranker on a pre-trained encoder: its head is new, both towers start from the same weights.

    Raises BadInput where the encoder has no tokenizer, or fewer positions than the settings need.
    """
    encoder = Encoder.load(encoder_folder)
    tokenizer = Tokenizer.load(encoder_folder)
    torch.manual_seed(seed)
    return Ranker(config, tokenizer, _network(config, encoder))


def load_ranker(folder: Path) -> Ranker:
    """Loads what `Ranker.save` wrote.

    Raises BadInput in one line for what is missing or does not fit.
    """
    path = folder / _SETTINGS
    if not path.exists():
        raise BadInput(f"{folder}: not a ranker ({_SETTINGS} is missing)")
    try:
        config = from_dict(RankerConfig, json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadInput(f"{path}: not the settings of a ranker ({error!r})") from None
    name = "encoder" if config.architecture == "cross" else "context_encoder"
    encoder = Encoder.load(folder / name)
    network = _network(config, encoder)
    if isinstance(network, (BiEncoder, PolyEncoder)) and not config.share_towers:
        network.candidate_encoder = Encoder.load(folder / "candidate_encoder")
    expected = _head(network)
    try:
        found = load_file(folder / _HEAD) if (folder / _HEAD).exists() else {}
    except SafetensorError as error:
        raise BadInput(f"{folder / _HEAD}: not to be read ({error})") from None
    shapes = {name: list(value.shape) for name, value in expected.items()}
    if {name: list(value.shape) for name, value in found.items()} != shapes:
        raise BadInput(f"{folder / _HEAD}: does not fit {_SETTINGS}, which needs {shapes}")
    with torch.no_grad():
        for key, value in expected.items():
            value.copy_(found[key])
    ranker = Ranker(config, Tokenizer.load(folder / name), network)
    return ranker.eval()


def _network(config: RankerConfig, encoder: Encoder) -> Network:
    needed = {"context": config.max_context_tokens, "candidate": config.max_candidate_tokens}
    if config.architecture == "cross":
        needed = {"context_tokens + max_candidate": sum(needed.values()) - 1}
    for name, tokens in needed.items():
        if tokens > encoder.positions:
            raise BadInput(f"ranker.max_{name}_tokens: {tokens} is not allowed; allowed: at most "
                           f"{encoder.positions}, the encoder's positions")  # fmt: skip
    if config.architecture == "cross":
        return CrossEncoder(encoder, config.output_scaling)
    other = encoder if config.share_towers else copy.deepcopy(encoder)
    if config.architecture == "bi":
        return BiEncoder(encoder, other, config.reduction, config.output_scaling)
    codes: Tensor | int = config.m
    if config.context_codes == "learnt":
        codes = torch.randn(config.m, encoder.width) * config.code_init_std
    return PolyEncoder(
        encoder,
        other,
        codes,
        config.reduction,
        config.code_attention,
        config.candidate_attention,
        config.output_scaling,
    )


def _towers(network: Network, config: RankerConfig) -> dict[str, Encoder]:
    if isinstance(network, CrossEncoder):
        return {"encoder": network.encoder}
    towers = {"context_encoder": network.context_encoder}
    if not config.share_towers:
        towers["candidate_encoder"] = network.candidate_encoder
    return towers


def _head(network: Network) -> dict[str, Tensor]:
    """The parameters outside the encoders, by name."""
    return {
        name: value.detach().contiguous()
        for name, value in network.named_parameters()
        if "encoder." not in name
    }

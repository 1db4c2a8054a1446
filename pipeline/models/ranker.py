"""A ranker and its directory: the one place that knows all architectures.

    ranker.json            `RankerConfig`
    context_encoder/       a plain `save_pretrained` directory with its tokenizer
    candidate_encoder/     likewise; absent where the towers are shared
    encoder/               a cross-encoder's only tower
    head.safetensors       codes, projections and attention of a bi- or poly-encoder, the linear
                           layer of a cross-encoder

A ConveRT model has files of its own instead of folders (pipeline/models/convert_rt/folder.py). Weights are
safetensors, so that loading a model never runs code of its maker.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeline.config import BadInput
from pipeline.models import convert_rt
from pipeline.models.convert_rt import ConvertNetwork, ConvertTokenizer
from pipeline.models.encoder import Encoder, read_weights
from pipeline.models.heads import (
    BiEncoder,
    CrossEncoder,
    DualEncoder,
    PairNetwork,
    PolyEncoder,
    VectorNetwork,
)
from pipeline.models.int8 import Int8Linear, quantise_layers
from pipeline.models.precision import Precision
from pipeline.models.pretraining_heads import read_next_head
from pipeline.models.settings import (
    SETTINGS,
    BiConfig,
    ConvertConfig,
    CrossConfig,
    DualConfig,
    OnEncoderConfig,
    PolyConfig,
    RankerConfig,
    read_settings,
)
from pipeline.models.tokens import RowTokenizer, Tokenizer, Tokens

OnEncoder = DualEncoder | CrossEncoder
RankerNetwork = OnEncoder | ConvertNetwork

NETWORKS: dict[type[DualConfig], type[DualEncoder]] = {
    BiConfig: BiEncoder,
    PolyConfig: PolyEncoder,
}
"""The network of each architecture with two towers, by its settings."""

_HEAD = "head.safetensors"
_CONTEXTS, _CANDIDATES = "context_encoder", "candidate_encoder"  # folders of the towers
_ONLY = "encoder"  # folder of a cross-encoder's tower


class Ranker(nn.Module):
    """A scorer with its tokenizer and its settings."""

    def __init__(
        self, config: RankerConfig, tokenizer: RowTokenizer, network: RankerNetwork
    ) -> None:
        super().__init__()
        self.config = config
        self.tokenizer = tokenizer
        self.network = network
        self.precision: Precision = "auto"
        """The precision of inference; heads are always float32."""

    @property
    def dual(self) -> VectorNetwork:
        """The network of a ranker whose contexts and candidates have vectors of their own.

        Raises BadInput for one that reads both together.
        """
        self.config.require_vectors()
        assert isinstance(self.network, VectorNetwork)
        return self.network

    @property
    def parameter_count(self) -> int:
        """Numbers that were trained, those that are kept in 8 bits too."""
        levels = [value for name, value in self.named_buffers() if "levels" in name.split(".")[-1]]
        biases = [layer.bias for layer in self.modules() if isinstance(layer, Int8Linear)]
        tensors = [*self.parameters(), *levels, *(bias for bias in biases if bias is not None)]
        return sum(value.numel() for value in tensors)

    @property
    def loss_scale(self) -> float:
        """The factor on the scores in the loss of training: a softmax over scaled scores is the distribution
        that the ranker has learnt."""
        return float(self.dual.training_scale) if self.config.has_vectors else 1.0

    @property
    def cross(self) -> PairNetwork:
        """The network of a ranker that reads context and candidate together.

        Raises BadInput for the others.
        """
        self.config.require_pairs()
        assert isinstance(self.network, PairNetwork)
        return self.network

    def cut(self, dimensions: int) -> None:
        """Lets vectors have their first `dimensions` only.

        Raises BadInput unless it was trained for them (`DualConfig.matryoshka`).
        """
        self.config.require_vectors()
        if not (isinstance(self.config, DualConfig) and isinstance(self.network, DualEncoder)):
            raise BadInput(f"dimensions: {dimensions} is not allowed; allowed: none, with architecture "
                           f"{self.config.architecture!r}")  # fmt: skip
        self.config = self.network.config = replace(self.config, dimensions=dimensions)

    def quantise(self) -> None:
        """Gives the blocks of a ConveRT model linear layers of 8 bits, for inference.

        Raises BadInput for other models, and for one that keeps float32.
        """
        config, network = self.config, self.network
        if not (
            isinstance(config, ConvertConfig)
            and isinstance(network, ConvertNetwork)
            and config.quantised
        ):
            raise BadInput("int8: true is not allowed; allowed: false, but for architecture 'convert' with "
                           "ranker.quantised true")  # fmt: skip
        self.config = network.config = replace(config, block_weights="int8")
        quantise_layers(network.blocks)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def positions(self) -> int:
        """Tokens that each of its encoders takes at most; of a ranker on a pre-trained encoder."""
        assert not isinstance(self.network, ConvertNetwork)
        return min(tower.positions for tower in _towers(self.network, self.config).values())

    def context_rows(
        self, contexts: Sequence[Sequence[str]], max_tokens: int = 0
    ) -> list[list[int]]:
        """`max_tokens`: the most of a row; 0: those of the settings."""
        config, tokens = self.config, max_tokens or self.config.max_context_tokens
        if isinstance(config, OnEncoderConfig) and isinstance(self.tokenizer, Tokenizer):
            prompt, keeps = config.context_prompt, config.context_keeps
            return self.tokenizer.contexts(contexts, tokens, prompt, keeps)
        return self.tokenizer.contexts(contexts, tokens)

    def candidate_rows(self, texts: Sequence[str], max_tokens: int = 0) -> list[list[int]]:
        config, tokens = self.config, max_tokens or self.config.max_candidate_tokens
        if isinstance(config, OnEncoderConfig) and isinstance(self.tokenizer, Tokenizer):
            prompt, keeps = config.candidate_prompt, config.candidate_keeps
            return self.tokenizer.candidates(texts, tokens, prompt, keeps)
        return self.tokenizer.candidates(texts, tokens)

    def pairs(
        self, contexts: Sequence[Sequence[int]], candidates: Sequence[Sequence[int]]
    ) -> Tokens:
        """Padded pairs of a row of `context_rows` and one of `candidate_rows`. Raises BadInput for a ranker
        that does not read both together."""
        self.config.require_pairs()
        assert isinstance(self.config, CrossConfig) and isinstance(self.tokenizer, Tokenizer)
        return self.tokenizer.pairs(contexts, candidates, self.config.separators)

    def save(self, folder: Path) -> None:
        """Writes the directory; safetensors only."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = json.dumps(asdict(self.config), indent=1)
        (folder / SETTINGS).write_text(settings + "\n", encoding="utf-8")
        if isinstance(self.network, ConvertNetwork):
            assert isinstance(self.tokenizer, ConvertTokenizer)
            convert_rt.save(self.network, self.tokenizer, folder)
            return
        for name, encoder in _towers(self.network, self.config).items():
            encoder.save(folder / name)
            self.tokenizer.save(folder / name)
        save_file(_head(self.network), folder / _HEAD)


def new_ranker(config: RankerConfig, encoder_folder: Path, seed: int) -> Ranker:
    """A ranker on a pre-trained encoder: its head is new, both towers start from the same weights.
    A ConveRT model, whose folder holds a vocabulary, starts from nothing else, or from another such model.

    Where the folder is the contexts' tower of a ranker, the other one starts from its candidates' tower.
    A cross-encoder without pooler starts from the encoder's next-utterance head, if there is one beside
    it: that head has learnt which response follows a context.

    Raises BadInput where the encoder has no tokenizer, or fewer positions than the settings need.
    """
    if isinstance(config, ConvertConfig):
        return Ranker(config, *convert_rt.new(config, encoder_folder, seed))
    encoder, candidate_encoder = Encoder.load(encoder_folder), None
    if config.has_two_towers and encoder_folder.name == _CONTEXTS:
        candidate_folder = encoder_folder.parent / _CANDIDATES
        candidate_encoder = Encoder.load(candidate_folder) if candidate_folder.exists() else None
    tokenizer = Tokenizer.load(encoder_folder)
    torch.manual_seed(seed)
    network = new_network(config, encoder, candidate_encoder)
    if isinstance(network, CrossEncoder) and network.pooler is None:
        next_head = read_next_head(encoder_folder, encoder.width)
        if next_head:
            network.start_score(next_head)
        elif network.product_gain is not None:
            network.start_as_bi()
    return Ranker(config, tokenizer, network)


def load_ranker(folder: Path) -> Ranker:
    """Loads what `Ranker.save` wrote.

    Raises BadInput in one line for what is missing or does not fit.
    """
    path = folder / SETTINGS
    if not path.exists():
        raise BadInput(f"{folder}: not a ranker ({SETTINGS} is missing)")
    config = read_settings(str(folder))
    if isinstance(config, ConvertConfig):
        return Ranker(config, *convert_rt.load(config, folder)).eval()
    name = _ONLY if isinstance(config, CrossConfig) else _CONTEXTS
    encoder = Encoder.load(folder / name)
    candidate_encoder = Encoder.load(folder / _CANDIDATES) if config.has_two_towers else None
    network = new_network(config, encoder, candidate_encoder)
    head = read_weights(folder / _HEAD) if (folder / _HEAD).exists() else {}
    set_head(network, head, f"{folder / _HEAD}: does not fit {SETTINGS}")
    ranker = Ranker(config, Tokenizer.load(folder / name), network)
    return ranker.eval()


def set_head(network: OnEncoder, weights: Mapping[str, Tensor], problem: str) -> None:
    """Fills the parameters outside the encoders.

    Raises BadInput, with the `problem` and what is needed, unless the weights are exactly those.
    """
    head = _head(network)
    shapes = {name: list(value.shape) for name, value in head.items()}
    if {name: list(value.shape) for name, value in weights.items()} != shapes:
        raise BadInput(f"{problem}, which needs {shapes}")
    with torch.no_grad():
        for name, value in head.items():
            value.copy_(weights[name])


def new_network(
    config: DualConfig | CrossConfig, encoder: Encoder, candidate_encoder: Encoder | None = None
) -> OnEncoder:
    """A network with a new head. `candidate_encoder`: the candidates' tower; None: the contexts' tower, or
    a copy of it, as the settings say.

    Raises BadInput for settings that an encoder is too small for.
    """
    needed = {"context": config.max_context_tokens, "candidate": config.max_candidate_tokens}
    if isinstance(config, CrossConfig):
        needed = {"context_tokens + max_candidate": sum(needed.values()) + config.separators - 2}
    positions = min(tower.positions for tower in (encoder, candidate_encoder) if tower is not None)
    for name, tokens in needed.items():
        if tokens > positions:
            raise BadInput(f"ranker.max_{name}_tokens: {tokens} is not allowed; allowed: at most "
                           f"{positions}, the encoder's positions")  # fmt: skip
    if isinstance(config, CrossConfig):
        return CrossEncoder(encoder, config)
    if candidate_encoder is None:
        candidate_encoder = encoder if config.share_towers else copy.deepcopy(encoder)
    if candidate_encoder.width != encoder.width:
        raise BadInput(f"the candidates' encoder has {candidate_encoder.width} dimensions, the contexts' "
                       f"{encoder.width}; allowed: as many")  # fmt: skip
    return NETWORKS[type(config)](encoder, candidate_encoder, config)


def _towers(network: OnEncoder, config: RankerConfig) -> dict[str, Encoder]:
    if isinstance(network, CrossEncoder):
        return {_ONLY: network.encoder}
    towers = {_CONTEXTS: network.context_encoder}
    if config.has_two_towers:
        towers[_CANDIDATES] = network.candidate_encoder
    return towers


def _head(network: OnEncoder) -> dict[str, Tensor]:
    """The parameters outside the encoders, by name."""
    return {
        name: value.detach().contiguous()
        for name, value in network.named_parameters()
        if "encoder." not in name
    }

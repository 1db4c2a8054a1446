"""A ConveRT model's folder.

ranker.json            the settings
vocabulary.json        subwords in the order of their ids
counts.json            of a tokenizer: how many texts hold each subword
subword_vectors.safetensors    of a tokenizer, where a teacher taught it: a vector for each, float16
weights.safetensors    the tables' levels, uint8, and their ranges; all other weights in float16.
                       ranker.block_weights int8: the blocks' linear layers as int8, and their scales.
                       Settings that are not quantised: everything in float32
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from pipeline.config import BadInput
from pipeline.models.convert_rt.encoder import ConvertNetwork
from pipeline.models.convert_rt.quantisation import Table, dequantise
from pipeline.models.convert_rt.start import (
    rarity,
    start_from_shared_words,
    start_from_taught_words,
)
from pipeline.models.convert_rt.tokenizer import VOCABULARY, ConvertTokenizer, load_vocabulary
from pipeline.models.encoder import read_weights
from pipeline.models.int8 import Int8Linear, linear_layers
from pipeline.models.settings import ConvertConfig

WEIGHTS = "weights.safetensors"
COUNTS = "counts.json"
VECTORS = "subword_vectors.safetensors"
_LEVELS, _RANGE, _SCALE = "levels", "range", "scale"
_BLOCKS, _NEWEST, _EARLIER = "blocks.", "context.", "earlier."
_SUBWORDS = "tokens.subwords."


def new(config: ConvertConfig, folder: Path, seed: int) -> tuple[ConvertTokenizer, ConvertNetwork]:
    """A model to train, on the vocabulary of a folder. Where the folder is a ConveRT model's, its weights
    are the first ones. Parts that it lacks start new; the network of the earlier turns starts as that of the
    newest turn.

    Raises BadInput for a folder without a vocabulary, for weights of another size, and for vectors of
    subwords that the settings ask for and the folder lacks.
    """
    tokenizer = load_tokenizer(config, folder)
    torch.manual_seed(seed)
    network = ConvertNetwork(config, len(tokenizer))
    has_weights = (folder / WEIGHTS).exists()
    if config.start == "taught_words" and not has_weights:
        start_from_taught_words(network, _vectors(folder, tokenizer, network.dimensions))
    elif config.start != "paper":  # with weights: for the parts that they lack
        start_from_shared_words(network, _rarity(folder, tokenizer))
    if has_weights:
        weights = _to_parameters(_read_weights(folder), network.tables)
        state = network.state_dict()
        for name in [name for name in weights if name.startswith(_NEWEST)]:
            weights.setdefault(_EARLIER + name.removeprefix(_NEWEST), weights[name])
        matching = {name: value for name, value in weights.items() if name in state}
        _require_shapes(folder, matching, {name: state[name] for name in matching})
        network.load_state_dict(matching, strict=False)
    return tokenizer, network


def load(config: ConvertConfig, folder: Path) -> tuple[ConvertTokenizer, ConvertNetwork]:
    """A model to encode with: 8-bit tables stay as they are, other weights become float32.

    Raises BadInput in one line for what is missing or does not fit the settings.
    """
    tokenizer = load_tokenizer(config, folder)
    weights = _read_weights(folder)
    # To draw the paper's 38 million weights would take longer than to read them.
    with torch.device("meta"):
        network = ConvertNetwork(config, len(tokenizer))
    expected = _saved_shapes(config, network)
    _require_shapes(folder, weights, expected)
    network = network.to_empty(device="cpu")
    network.reset_buffers()
    if config.quantised:
        for name, table in network.tables.items():
            low, high = weights.pop(f"{name}.{_RANGE}").tolist()
            table.freeze(weights.pop(f"{name}.{_LEVELS}"), low, high)
    if config.saves_int8:
        for name in linear_layers(network.blocks):
            levels, scale = (weights.pop(f"{_BLOCKS}{name}.{part}") for part in (_LEVELS, _SCALE))
            bias = weights.pop(f"{_BLOCKS}{name}.bias", None)
            layer = Int8Linear(levels, scale, None if bias is None else bias.float())
            network.blocks.set_submodule(name, layer)
    network.load_state_dict({name: value.float() for name, value in weights.items()}, strict=False)
    return tokenizer, network


def save(network: ConvertNetwork, tokenizer: ConvertTokenizer, folder: Path) -> None:
    """Writes what `load` reads, but the settings."""
    tokenizer.save(folder)
    weights = {name: value.detach() for name, value in network.named_parameters()}
    if network.config.quantised:
        weights = {name: value.half() for name, value in weights.items()}
        for name, table in network.tables.items():
            levels, low, high = table.to_levels()
            weights.pop(f"{name}.weight", None)
            weights[f"{name}.{_LEVELS}"] = levels
            weights[f"{name}.{_RANGE}"] = torch.tensor([low, high])
    if network.config.saves_int8:
        for name, layer in linear_layers(network.blocks).items():
            weights.pop(f"{_BLOCKS}{name}.weight", None)
            int8_layer = layer if isinstance(layer, Int8Linear) else Int8Linear.of(layer)
            weights[f"{_BLOCKS}{name}.{_LEVELS}"] = int8_layer.levels_OI
            weights[f"{_BLOCKS}{name}.{_SCALE}"] = int8_layer.scale_O1
            if int8_layer.bias is not None:
                weights[f"{_BLOCKS}{name}.bias"] = int8_layer.bias.half()
    save_file({name: value.contiguous().cpu() for name, value in weights.items()}, folder / WEIGHTS)


def load_tokenizer(config: ConvertConfig, folder: Path) -> ConvertTokenizer:
    """Raises BadInput for a folder without a vocabulary."""
    vocabulary = load_vocabulary(folder)
    return ConvertTokenizer(
        vocabulary, config.buckets, config.earlier_turns, config.number_earlier_turns
    )


def save_counts(holding: Sequence[int], texts: int, folder: Path) -> None:
    """How many of so many texts hold each subword, in the order of the ids."""
    counts = {"texts": texts, "holding": list(holding)}
    (folder / COUNTS).write_text(json.dumps(counts, separators=(",", ":")))


def _rarity(folder: Path, tokenizer: ConvertTokenizer) -> Tensor | None:
    """The rarity of the subwords, by the counts of `save_counts`; None where there are no counts.

    Raises BadInput for counts of another vocabulary.
    """
    path = folder / COUNTS
    if not path.exists():
        return None
    try:
        counts = json.loads(path.read_text())
        holding_V, texts = torch.tensor(counts["holding"]), int(counts["texts"])
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(f"{path}: no counts of subwords ({error})") from None
    if holding_V.shape != (len(tokenizer.vocabulary),):
        raise BadInput(f"{path}: {len(holding_V)} counts; allowed: {len(tokenizer.vocabulary)}, one for "
                       f"each subword of {VOCABULARY}")  # fmt: skip
    return rarity(holding_V, texts)


def save_vectors(vectors_VE: Tensor, folder: Path) -> None:
    """The vectors of the subwords, in the order of the ids (`fit_bag`)."""
    save_file({"vectors": vectors_VE.half()}, folder / VECTORS)


def _vectors(folder: Path, tokenizer: ConvertTokenizer, length: int) -> Tensor:
    """[V, E] of `save_vectors`. Raises BadInput where there are none, or of another shape."""
    path = folder / VECTORS
    if not path.exists():
        raise BadInput(f"ranker.start: 'taught_words' is not allowed; allowed: another, as {folder} has no "
                       f"{VECTORS} (jobs.train_tokenizer --tokenizer.vectors true makes them)")  # fmt: skip
    vectors_VE = read_weights(path).get("vectors", torch.empty(0)).float()
    expected = [len(tokenizer.vocabulary), length]
    if list(vectors_VE.shape) != expected:
        raise BadInput(f"{path}: vectors has {list(vectors_VE.shape)}; allowed: {expected}, the subwords of "
                       f"{VOCABULARY} and ranker.encoding_width")  # fmt: skip
    return vectors_VE


def _read_weights(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    if not path.exists():
        raise BadInput(f"{folder}: the model has no weights ({WEIGHTS} is missing)")
    return read_weights(path)


def _to_parameters(weights: Mapping[str, Tensor], tables: Mapping[str, Table]) -> dict[str, Tensor]:
    """Saved weights as float32 parameters."""
    parameters = {name: value.float() for name, value in weights.items()}
    for name in tables:
        if f"{name}.{_LEVELS}" in weights:
            low, high = parameters.pop(f"{name}.{_RANGE}")
            levels = parameters.pop(f"{name}.{_LEVELS}")
            parameters[f"{name}.weight"] = dequantise(levels, low, high)
    for name in [name for name in parameters if name.endswith(f".{_SCALE}")]:
        layer = name.removesuffix(f".{_SCALE}")
        parameters[f"{layer}.weight"] = parameters.pop(f"{layer}.{_LEVELS}") * parameters.pop(name)
    return parameters


def _saved_shapes(config: ConvertConfig, network: ConvertNetwork) -> dict[str, Tensor]:
    """The tensors in the file of such a model, for their shapes."""
    expected: dict[str, Tensor] = dict(network.named_parameters())
    if config.quantised:
        for name in network.tables:
            expected[f"{name}.{_LEVELS}"] = expected.pop(f"{name}.weight")
            expected[f"{name}.{_RANGE}"] = torch.empty(2)
    if config.saves_int8:
        for name in linear_layers(network.blocks):
            weight = expected.pop(f"{_BLOCKS}{name}.weight")
            expected[f"{_BLOCKS}{name}.{_LEVELS}"] = weight
            expected[f"{_BLOCKS}{name}.{_SCALE}"] = torch.empty(len(weight), 1)
    return expected


def _require_shapes(
    folder: Path, weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> None:
    """Raises BadInput, naming the first tensor that is missing, too many or of another size."""
    for name in sorted(weights.keys() | expected.keys()):
        shape = list(weights[name].shape) if name in weights else "nothing"
        expected_shape = list(expected[name].shape) if name in expected else "nothing"
        if shape == expected_shape:
            continue
        rows = "subwords of vocabulary.json + ranker.buckets + 1 rows, "
        hint = rows if name.startswith(_SUBWORDS) else ""
        raise BadInput(
            f"{folder / WEIGHTS}: {name} has {shape}; the settings need {hint}{expected_shape}"
        )

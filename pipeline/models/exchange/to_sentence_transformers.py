"""A ranker as directories that sentence-transformers loads and that give the same numbers.

    context/            a bi-encoder's side as a SentenceTransformer
    candidate/          likewise
    (the folder itself) a cross-encoder as a CrossEncoder, its scores without an activation

    each of them: modules.json, what runs one after the other
                  config.json, model.safetensors, tokenizer*.json: the Transformer
                  1_Pooling/, 2_Dense/, …: what follows it

The library itself is not needed here: its format is JSON and safetensors. It cuts pairs that are longer than
both limits together, where polyrank cuts each text to its own limit: pairs of texts within their own limits
have the same scores.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeline.config import BadInput
from pipeline.models.encoder import Encoder
from pipeline.models.heads import BiEncoder, CrossEncoder, DualEncoder
from pipeline.models.ranker import Ranker
from pipeline.models.tokens import RowTokenizer, Tokenizer, set_template

_POOLING = {"first": "cls", "mean": "mean"}
_IDENTITY = "torch.nn.modules.linear.Identity"
_ACTIVATIONS = {
    name: f"torch.nn.modules.activation.{layer}"
    for name, layer in (("tanh", "Tanh"), ("gelu", "GELU"), ("relu", "ReLU"))
}


@dataclass(frozen=True)
class _Module:
    """One module that runs after the Transformer."""

    kind: str
    config: dict[str, Any]
    weights: dict[str, Tensor] = field(default_factory=dict)


def export(ranker: Ranker, folder: Path) -> None:
    """Writes the directory, which is there and empty.

    Raises BadInput for what sentence-transformers has no modules for.
    """
    _export(ranker.network, ranker, folder)


@singledispatch
def _export(network: nn.Module, ranker: Ranker, folder: Path) -> None:
    raise BadInput(f"architecture: {ranker.config.architecture!r} is unknown to "
                   "sentence-transformers; allowed: bi, cross")  # fmt: skip


@_export.register
def _(network: BiEncoder, ranker: Ranker, folder: Path) -> None:
    config = network.config
    if config.reduction not in _POOLING:
        raise BadInput(f"ranker.reduction: {config.reduction!r} is unknown to sentence-transformers; "
                       f"allowed: {', '.join(_POOLING)}")  # fmt: skip
    metadata = {"model_type": "SentenceTransformer", "similarity_fn_name": "dot"}
    tokenizer = _tokenizer(ranker.tokenizer)
    encoder = network.context_encoder
    modules = _vector_modules(network, encoder, network.context_projection)
    tokens = config.max_context_tokens
    prompt = _prompt_metadata("query", config.context_prompt)
    _write_model(folder / "context", encoder, tokenizer, tokens, "left", modules, metadata | prompt)
    encoder = network.candidate_encoder
    modules = _vector_modules(network, encoder, network.candidate_projection)
    tokens = config.max_candidate_tokens
    prompt = _prompt_metadata("document", config.candidate_prompt)
    _write_model(
        folder / "candidate", encoder, tokenizer, tokens, "right", modules, metadata | prompt
    )


@_export.register
def _(network: CrossEncoder, ranker: Ranker, folder: Path) -> None:
    """First output, then the pooler if there is one, then the score; scaling goes into the weights."""
    config = network.config
    if config.head not in _POOLING:
        raise BadInput(f"ranker.head: {config.head!r} is unknown to sentence-transformers; allowed: "
                       f"{', '.join(_POOLING)}")  # fmt: skip
    if config.pooler_norm or config.context_prompt or config.candidate_prompt:
        raise BadInput(
            "ranker.pooler_norm, prompts: unknown to a CrossEncoder of modules; allowed: none"
        )
    scaling = config.output_scaling
    modules = [_pooling(network.encoder, _POOLING[config.head])]
    if network.pooler is not None:
        weight, bias = network.pooler.weight, network.pooler.bias
        modules.append(
            _dense(weight * scaling, bias, activation=_ACTIVATIONS[config.pooler_activation])
        )
        scaling = 1.0
    weight, bias = network.score.weight * scaling, network.score.bias
    modules.append(_dense(weight, bias, output="scores"))
    tokens = config.max_context_tokens + config.max_candidate_tokens + config.separators - 2
    metadata = {"model_type": "CrossEncoder", "activation_fn": _IDENTITY}
    tokenizer = _tokenizer(ranker.tokenizer, config.separators)
    _write_model(folder, network.encoder, tokenizer, tokens, "left", modules, metadata)


def _vector_modules(
    dual: DualEncoder, encoder: Encoder, projection: nn.Linear | None
) -> list[_Module]:
    """The modules from token outputs to a vector; scaling, projection and cut are one matrix."""
    config = dual.config
    modules = [_pooling(encoder, _POOLING[config.reduction])]
    matrix = torch.eye(encoder.width) if projection is None else projection.weight
    matrix = matrix[: dual.dimensions] * config.output_scaling
    bias = (
        None
        if projection is None or projection.bias is None
        else projection.bias[: dual.dimensions]
    )
    if config.projection and config.projection_activation == "tanh":
        modules.append(_dense(matrix, bias, activation=_ACTIVATIONS["tanh"]))
    elif bias is not None or not torch.equal(matrix, torch.eye(encoder.width)):
        modules.append(_dense(matrix, bias))
    if config.vector_length:
        modules.append(_Module("Normalize", {}))
        if config.vector_length != 1:
            modules.append(_dense(torch.eye(dual.dimensions) * config.vector_length))
    return modules


def _prompt_metadata(name: str, prompt: str) -> dict[str, Any]:
    """What makes `encode` put the prompt before each text."""
    return {"prompts": {name: prompt}, "default_prompt_name": name} if prompt else {}


def _pooling(encoder: Encoder, mode: str) -> _Module:
    """The Pooling module, also in the older form, which has a flag for each mode."""
    modes = {"cls": "cls_token", "mean": "mean_tokens"}
    flags = {f"pooling_mode_{name}": mode == key for key, name in modes.items()}
    return _Module("Pooling", {"word_embedding_dimension": encoder.width, **flags})


def _dense(
    weight: Tensor, bias: Tensor | None = None, output: str = "", activation: str = _IDENTITY
) -> _Module:
    config = {
        "in_features": weight.shape[1],
        "out_features": weight.shape[0],
        "bias": bias is not None,
        "activation_function": activation,
        **({"module_output_name": output} if output else {}),
    }
    weights = {"linear.weight": weight, **({} if bias is None else {"linear.bias": bias})}
    return _Module("Dense", config, weights)


def _tokenizer(tokenizer: RowTokenizer, separators: int = 1) -> Tokenizer:
    """A copy that adds the special tokens by itself."""
    assert isinstance(tokenizer, Tokenizer)
    plain = Tokenizer(copy.deepcopy(tokenizer.hf))
    set_template(plain.hf, separators)
    return plain


def _write_model(
    folder: Path,
    encoder: Encoder,
    tokenizer: Tokenizer,
    max_tokens: int,
    truncation_side: Literal["left", "right"],
    modules: Sequence[_Module],
    metadata: dict[str, Any],
) -> None:
    encoder.save(folder)
    tokenizer.save(folder)
    path = folder / "tokenizer_config.json"
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if encoder.segments else [])]
    _write_json(
        path,
        {
            **json.loads(path.read_text(encoding="utf-8")),
            "tokenizer_class": "PreTrainedTokenizerFast",  # reads tokenizer.json as it is
            "model_max_length": max_tokens,
            "model_input_names": names,
            "truncation_side": truncation_side,
            "padding_side": "right",
            "split_special_tokens": True,  # "[SEP]" in somebody's text is text
        },
    )
    limits = {"max_seq_length": max_tokens, "do_lower_case": False}
    _write_json(folder / "sentence_bert_config.json", limits)
    _write_json(folder / "config_sentence_transformers.json", metadata)
    listing = [("", "Transformer")]
    for number, module in enumerate(modules, 1):
        name = f"{number}_{module.kind}"
        (folder / name).mkdir()
        listing.append((name, module.kind))
        if module.config:
            _write_json(folder / name / "config.json", module.config)
        if module.weights:
            weights = {key: value.detach().contiguous() for key, value in module.weights.items()}
            save_file(weights, folder / name / "model.safetensors")
    types = [f"sentence_transformers.models.{kind}" for _, kind in listing]
    entries = [
        {"idx": number, "name": str(number), "path": path, "type": types[number]}
        for number, (path, _) in enumerate(listing)
    ]
    _write_json(folder / "modules.json", entries)


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

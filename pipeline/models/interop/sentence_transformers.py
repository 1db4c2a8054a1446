"""Models of sentence-transformers: rankers from what the library saved, and rankers as directories that it
loads and that give the same numbers. The library itself is not needed: its format is JSON and safetensors.

What is loaded:

    modules.json            Transformer → Pooling (cls, mean) → Dense (LaBSE: tanh) → Normalize: a bi-encoder,
                            the last two only where there are any; one model serves both sides
    context/, candidate/    two of these, as `export` writes them: one model a side
    modules.json            Transformer → Pooling (cls) → Dense with tanh → Dense: a cross-encoder
    config.json             of a …ForSequenceClassification with one label (`_CLASSIFIERS`): a
                            cross-encoder, whose scores are those before the activation (a sigmoid, mostly)

The prompts that `config_sentence_transformers.json` names become those of contexts and candidates, as
`encode_query` and `encode_document` apply them. A model with any other part is refused. Weights are read
from safetensors only, and no code of the model is run. Contexts that are too long keep their end, not their
beginning.

What is written:

    context/, candidate/    a bi-encoder's sides, a SentenceTransformer each
    (the folder itself)     a cross-encoder as a CrossEncoder, its scores without an activation

    each of them: modules.json, what runs one after the other
                  config.json, model.safetensors, tokenizer*.json: the Transformer
                  1_Pooling/, 2_Dense/, …: what follows it

The library cuts pairs that are longer than both limits together, where polyrank cuts each text to its own
limit: pairs of texts within their own limits have the same scores.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import singledispatch
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import normalizers
from torch import Tensor, nn

from pipeline.config import BadInput, flatten, require
from pipeline.models.encoder import ADAPTER, HOW_TO_MERGE, Encoder, read_weights
from pipeline.models.heads import BiEncoder, CrossEncoder, DualEncoder
from pipeline.models.ranker import Ranker, new_network, set_head
from pipeline.models.settings import BiConfig, CrossConfig, OnEncoderConfig, Reduction
from pipeline.models.sources import REDUCTIONS, Prompts, read_prompts
from pipeline.models.tokens import RowTokenizer, Tokenizer, set_template

_HAS_TANH = {"Identity": False, "Tanh": True}
_IDENTITY = "torch.nn.modules.linear.Identity"
_ACTIVATIONS = {
    "none": _IDENTITY,
    "tanh": "torch.nn.modules.activation.Tanh",
    "gelu": "torch.nn.modules.activation.GELU",
    "relu": "torch.nn.modules.activation.ReLU",
}
_WEIGHTS = "model.safetensors"
_TASKS = ("feature-extraction", "sequence-classification")
_READ = (
    r"max_seq_length|do_lower_case|(query|document)_length|processing_kwargs\.text\.max_length"
    r"|(tokenizer_args|processor_kwargs)\.model_max_length"
)
"""The settings of a Transformer that are read, in all versions of the library."""
_WITHOUT_EFFECT = (
    r"transformer_task|module_output_name|unpad_inputs|modality_config\..*"
    r"|model_(args|kwargs)\.(attn_implementation|(torch_)?dtype|add_pooling_layer)"
)
_CLASSIFIER = "ForSequenceClassification"
_VECTOR = "sentence_embedding"  # its name between modules
_CLASSIFIERS = {
    "albert": ("albert.pooler", "tanh", "classifier"),
    "bert": ("bert.pooler.dense", "tanh", "classifier"),
    "camembert": ("classifier.dense", "tanh", "classifier.out_proj"),
    "data2vec-text": ("classifier.dense", "tanh", "classifier.out_proj"),
    "deberta-v2": ("pooler.dense", "pooler_hidden_act", "classifier"),
    "distilbert": ("pre_classifier", "relu", "classifier"),
    "electra": ("classifier.dense", "gelu", "classifier.out_proj"),
    "ernie": ("ernie.pooler.dense", "tanh", "classifier"),
    "modernbert": ("head.dense", "classifier_activation", "classifier"),
    "mpnet": ("classifier.dense", "tanh", "classifier.out_proj"),
    "roberta": ("classifier.dense", "tanh", "classifier.out_proj"),
    "xlm-roberta": ("classifier.dense", "tanh", "classifier.out_proj"),
    "xlm-roberta-xl": ("classifier.dense", "tanh", "classifier.out_proj"),
}
"""By the model type: the layer before the score, its activation or the name of that setting, the score."""


@dataclass(frozen=True)
class Lengths:
    """The lengths that texts are truncated to, special tokens included; 0: those of the model."""

    context: int = 0
    candidate: int = 0


@dataclass(frozen=True)
class _Transformer:
    folder: Path
    encoder: Encoder
    tokenizer: Tokenizer
    max_tokens: int
    limits: Lengths
    """Those of queries and documents, at most `max_tokens`."""


@dataclass(frozen=True)
class _Dense:
    weight: Tensor
    bias: Tensor | None
    tanh: bool

    def named(self, layer: str) -> dict[str, Tensor]:
        """Its tensors by the names of a layer of ours."""
        bias = {} if self.bias is None else {f"{layer}.bias": self.bias}
        return {f"{layer}.weight": self.weight, **bias}


@dataclass(frozen=True)
class _Chain:
    """A modules.json: what follows the Transformer."""

    transformer: _Transformer
    reduction: Reduction
    layers: tuple[_Dense, ...]
    length: float
    """The length of the vectors; 0: any."""
    prompts: Prompts


def load(folder: Path, lengths: Lengths) -> Ranker:
    """The ranker of a folder. Raises BadInput, in one line, for a model that a ranker cannot reproduce."""
    try:
        ranker = _load(folder, lengths)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise BadInput(f"{folder}: not in the form of sentence-transformers ({error!r})") from None
    for name, value in ranker.named_parameters():
        if not value.isfinite().all():
            raise BadInput(f"{folder}: {name} has weights that are not finite")
    config = ranker.config
    assert isinstance(config, OnEncoderConfig)
    if config.context_prompt or config.candidate_prompt:
        print(f"{folder}: prompts of its configuration: {config.context_prompt!r} before contexts, "
              f"{config.candidate_prompt!r} before candidates", file=sys.stderr)  # fmt: skip
    return ranker


def _load(folder: Path, lengths: Lengths) -> Ranker:
    sides = [folder / side for side in ("context", "candidate")]
    if all((side / "modules.json").exists() for side in sides):
        return _bi([_chain(side) for side in sides], lengths)
    config = _json_if_there(folder / "config.json")
    path = folder / "config_sentence_transformers.json"
    metadata = _json_if_there(path)
    architecture = (config.get("architectures") or [""])[0]
    # With modules behind it, the Transformer gives vectors: its classifier, if any, is unused.
    if architecture.endswith(_CLASSIFIER) and len(_modules(folder)) < 2:
        kind = config.get("model_type")
        require(kind in _CLASSIFIERS, f"{folder / 'config.json'}: model_type", kind,
                ", ".join(_CLASSIFIERS))  # fmt: skip
        _require_no_default_prompt(path, metadata)
        return _classifier(_transformer(folder), config, lengths)
    kind = metadata.get("model_type")  # older models do not say it
    require(kind in (None, "SentenceTransformer", "CrossEncoder"), f"{path}: model_type", kind,
            "SentenceTransformer, CrossEncoder")  # fmt: skip
    chain = _chain(folder)
    if kind == "CrossEncoder":
        _require_no_default_prompt(path, metadata)
        return _cross(chain, lengths)
    require(metadata.get("truncate_dim") is None, f"{path}: truncate_dim",
            metadata.get("truncate_dim"), "null: all dimensions")  # fmt: skip
    # The library's default compares cosines: then vectors have length 1, also where the model leaves them.
    similarity = metadata.get("similarity_fn_name") or "cosine"
    name = f"{path}: similarity_fn_name"
    require(similarity in ("cosine", "dot"), name, similarity, "cosine, dot")
    chain = chain if similarity == "dot" else replace(chain, length=1.0)
    return _bi([chain], lengths)


def _require_no_default_prompt(path: Path, metadata: Mapping[str, Any]) -> None:
    """Cross-encoders of the library put a default prompt before pairs, and ours put none."""
    name = metadata.get("default_prompt_name")
    require(not name or not metadata["prompts"][name], f"{path}: default_prompt_name", name,
            "null for a cross-encoder")  # fmt: skip


def _bi(chains: list[_Chain], lengths: Lengths) -> Ranker:
    """A bi-encoder of one chain for both sides, or of two chains."""
    context, candidate = chains[0], chains[-1]
    weights = dict[str, Tensor]()
    for side, chain in zip(("context", "candidate"), chains, strict=False):
        if len(chain.layers) > 1:
            folder = chain.transformer.folder
            raise BadInput(f"{folder}: these Dense layers are not allowed; allowed: one")
        for layer in chain.layers:
            weights |= layer.named(f"{side}_projection")
    projection = next(iter(context.layers), None)
    config = BiConfig(
        reduction=context.reduction,
        projection=len(projection.weight) if projection else 0,
        projection_bias=projection is not None and projection.bias is not None,
        projection_activation="tanh" if projection and projection.tanh else "none",
        share_towers=len(chains) == 1,
        vector_length=context.length,
        max_context_tokens=lengths.context or context.transformer.limits.context,
        max_candidate_tokens=lengths.candidate or candidate.transformer.limits.candidate,
        context_prompt=context.prompts.context,
        candidate_prompt=candidate.prompts.candidate,
    )
    if candidate.transformer.tokenizer.hf.truncation_side == "left" and len(chains) == 1:
        print(f"{candidate.transformer.folder}: truncation_side: left out: long candidates keep their "
              "beginning", file=sys.stderr, flush=True)  # fmt: skip
    kinds = {
        (chain.transformer.tokenizer.hf.backend_tokenizer.to_str(), chain.reduction, chain.length,
         tuple(layer.tanh for layer in chain.layers))
        for chain in chains
    }  # fmt: skip
    if len(kinds) > 1:
        raise BadInput(f"{context.transformer.folder}, {candidate.transformer.folder}: not the same "
                       "tokenizer, Pooling and Normalize on both sides")  # fmt: skip
    candidate_encoder = None if config.share_towers else candidate.transformer.encoder
    return _ranker(config, context.transformer, weights, candidate_encoder)


def _cross(chain: _Chain, lengths: Lengths) -> Ranker:
    """First output → Dense with tanh, if it is there → Dense to one number."""
    poolers, score = chain.layers[:-1], next(reversed(chain.layers), None)
    fits = all(layer.tanh and layer.bias is not None for layer in poolers) and len(poolers) <= 1
    if score is None or chain.reduction != "first" or not fits or score.tanh or chain.length:
        raise BadInput(f"{chain.transformer.folder}: these modules make no cross-encoder; allowed: Pooling "
                       "(cls) → Dense with bias and tanh, or none → Dense to one score")  # fmt: skip
    weights = {"score.bias": torch.zeros(1), **score.named("score")}
    for layer in poolers:
        weights |= layer.named("pooler")
    return _pair_ranker(chain.transformer, weights, lengths)


def _classifier(transformer: _Transformer, config: Mapping[str, Any], lengths: Lengths) -> Ranker:
    """A head of `transformers`: dropout aside, layer → activation → norm, if any → score."""
    pooler, activation, score = _CLASSIFIERS[config["model_type"]]
    saved_weights = _weights(transformer.folder)
    pooler_weight, labels = saved_weights[f"{pooler}.weight"], len(saved_weights[f"{score}.weight"])
    weights = {
        "pooler.weight": pooler_weight,
        "pooler.bias": saved_weights.get(f"{pooler}.bias", torch.zeros(len(pooler_weight))),
        "score.weight": saved_weights[f"{score}.weight"],
        "score.bias": saved_weights[f"{score}.bias"],
    }
    require(labels == 1, f"{transformer.folder}: labels", labels, "1, whose score ranks")
    settings = {"pooler_activation": config.get(activation, activation)}
    if config["model_type"] == "modernbert":
        require(
            "head.norm.bias" not in saved_weights, f"{transformer.folder}: norm_bias", True, "false"
        )
        require(config.get("norm_eps", 1e-5) == 1e-5, f"{transformer.folder}: norm_eps",
                config.get("norm_eps"), "1e-05")  # fmt: skip
        weights["pooler_norm.weight"] = saved_weights["head.norm.weight"]
        settings["head"] = REDUCTIONS[config["classifier_pooling"]]
    return _pair_ranker(transformer, weights, lengths, **settings)


def _pair_ranker(
    transformer: _Transformer, weights: dict[str, Tensor], lengths: Lengths, **settings: Any
) -> Ranker:
    """The model limits a pair; by default either text may take half of the limit."""
    tokenizer, encoder = transformer.tokenizer, transformer.encoder
    encoding = tokenizer.hf.backend_tokenizer.encode("a b", "c")
    (context,), (candidate,) = tokenizer.contexts([["a b"]], 9), tokenizer.candidates(["c"], 9)
    separators = 1 + len(encoding.ids) - len(context + candidate[1:])
    batch = tokenizer.pairs([context], [candidate], separators)
    assert batch.segments_BT is not None
    has_segments = "token_type_ids" in tokenizer.hf.model_input_names and any(encoding.type_ids)
    if not has_segments:
        encoder.copy_first_segment()
    segments = batch.segments_BT[0].tolist()
    are_other = encoder.segments and has_segments and encoding.type_ids != segments
    if encoding.ids != batch.ids_BT[0].tolist() or are_other:
        raise BadInput(f"{transformer.folder}: pairs are not [CLS] context [SEP] candidate [SEP]")
    total = transformer.max_tokens + 2 - separators  # the candidate's [CLS] is not in the pair
    require(lengths.context <= total - 3, "max_context_tokens", lengths.context,
            f"0 to {total - 3}: the model takes pairs of {transformer.max_tokens}")  # fmt: skip
    kept = lengths.candidate or (total - lengths.context if lengths.context else total // 2)
    config = CrossConfig(
        pooler="pooler.weight" in weights,
        max_context_tokens=lengths.context or total - kept,
        max_candidate_tokens=kept,
        pooler_norm="pooler_norm.weight" in weights,
        separators=separators,
        **settings,
    )
    return _ranker(config, transformer, weights)


def _ranker(
    config: BiConfig | CrossConfig,
    transformer: _Transformer,
    weights: dict[str, Tensor],
    candidate_encoder: Encoder | None = None,
) -> Ranker:
    network = new_network(config, transformer.encoder, candidate_encoder)
    set_head(network, weights, f"{transformer.folder}: its layers do not fit a ranker")
    return Ranker(config, transformer.tokenizer, network).eval()


def _chain(folder: Path) -> _Chain:
    path = folder / "modules.json"
    if not path.exists():
        reason = f"modules.json is missing{_other_model(folder)}"
        raise BadInput(f"{folder}: not of sentence-transformers ({reason})")
    # Dropout does nothing after training.
    modules = [module for module in _modules(folder) if module[0] != "Dropout"]
    kinds = [kind for kind, _ in modules]
    require(kinds[:2] == ["Transformer", "Pooling"] and set(kinds[2:]) <= {"Dense", "Normalize"},
            str(path), " → ".join(kinds), "Transformer → Pooling → Dense → Normalize")  # fmt: skip
    layers: list[_Dense] = []
    length = 0.0
    for kind, place in modules[2:]:
        _require_vectors(place)
        if kind == "Normalize":
            length = 1.0
        elif length:
            length *= _factor(_dense(place), place)
        else:
            layers.append(_dense(place))
    transformer = _transformer(modules[0][1])
    prompts = read_prompts(folder)
    if prompts != Prompts():
        pooling = modules[1][1] / "config.json"
        require(
            _json(pooling).get("include_prompt", True), f"{pooling}: include_prompt", False, "true"
        )
    return _Chain(transformer, _reduction(modules[1][1]), tuple(layers), length, prompts)


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """(kind, folder) of each entry of modules.json; [] without the file. Of a module from elsewhere the kind
    is its whole name."""
    modules = []
    for entry in _json_if_there(folder / "modules.json"):
        kind = entry["type"]
        is_of_library = kind.startswith("sentence_transformers.")
        modules.append((kind.split(".")[-1] if is_of_library else kind, folder / entry["path"]))
    return modules


def _require_vectors(folder: Path) -> None:
    """Raises BadInput for a module that reads or writes something else, such as the vectors of tokens."""
    path = folder / "config.json"
    config = _json_if_there(path)
    for name in ("module_input_name", "module_output_name"):
        value = config.get(name) or _VECTOR
        require(value in (_VECTOR, "scores"), f"{path}: {name}", value, _VECTOR)


def _other_model(folder: Path) -> str:
    """What a folder without modules.json holds instead, for a message; "": nothing that is known."""
    if (folder / ADAPTER).exists():
        return f"; {ADAPTER} is {HOW_TO_MERGE}"
    names = ", ".join(_json_if_there(folder / "config.json").get("architectures") or ())
    allowed = f"a modules.json, or a reranker …{_CLASSIFIER}"
    return f"; its config.json is of {names}; allowed: {allowed}" if names else ""


def _transformer(folder: Path) -> _Transformer:
    encoder, tokenizer = Encoder.load(folder), Tokenizer.load(folder)
    if tokenizer.hf.backend_tokenizer.encode("a b").ids != tokenizer.candidates(["a b"], 9)[0]:
        raise BadInput(f"{folder}: its texts are not [CLS] text [SEP]")
    _require_rows(folder, encoder, tokenizer)
    _require_own_outputs(folder, encoder, tokenizer)
    settings = _settings(folder)
    if settings.get("do_lower_case"):
        _lower_case(tokenizer.hf.backend_tokenizer)
    own_limit = settings.get("max_seq_length") or settings.get("model_max_length")
    limits = [encoder.positions, own_limit or tokenizer.hf.model_max_length]
    most = min(*limits, settings.get("max_length") or limits[0])
    of_tasks = [settings.get(f"{task}_length") or most for task in ("query", "document")]
    sides = Lengths(*(min(limit, most) for limit in of_tasks))
    return _Transformer(folder, encoder, tokenizer, most, sides)


def _require_rows(folder: Path, encoder: Encoder, tokenizer: Tokenizer) -> None:
    """Raises BadInput where a text may have a token without an embedding. Special tokens are no text."""
    rows = encoder.hf.get_input_embeddings().num_embeddings
    if len(tokenizer) <= rows:
        return
    special = {
        token.content for token in tokenizer.hf.added_tokens_decoder.values() if token.special
    }
    for token, number in tokenizer.hf.get_vocab().items():
        if number >= rows and token not in special:
            raise BadInput(f"{folder}: the tokenizer has the token {token!r} of the id {number}, the model "
                           f"has {rows:,} embeddings")  # fmt: skip


def _require_own_outputs(folder: Path, encoder: Encoder, tokenizer: Tokenizer) -> None:
    """Raises BadInput unless a text beside a longer one has the outputs that `transformers` gives for it
    alone: of some networks (FNet, Nyströmformer) they depend on the padding, or are random (YOSO)."""
    texts = ["a b", "a b a b a b"]
    alone = tokenizer.hf(texts[0], return_tensors="pt")
    names = inspect.signature(encoder.hf.forward).parameters
    tokens = tokenizer.batch(tokenizer.candidates(texts, encoder.positions))
    with torch.no_grad():
        expected_TD = encoder.hf(
            **{n: v for n, v in alone.items() if n in names}
        ).last_hidden_state[0]
        found_TD = encoder(tokens)[0, : len(expected_TD)]
    if not expected_TD.isfinite().all():
        raise BadInput(f"{folder}: its outputs are not finite, so its weights are damaged")
    scale = expected_TD.abs().max().clamp(min=1)
    if not torch.allclose(found_TD, expected_TD, rtol=0, atol=1e-3 * scale.item()):
        raise BadInput(f"{folder}: {type(encoder.hf).__name__} gives a text other outputs beside other texts "
                       "than alone; allowed: networks such as BERT")  # fmt: skip


def _lower_case(fast: FastTokenizer) -> None:
    """Makes a tokenizer read texts in lower case, if it does not."""
    normaliser = fast.normalizer
    if normaliser is None or normaliser.normalize_str("A") != "a":
        others = [] if normaliser is None else [normaliser]
        fast.normalizer = normalizers.Sequence([normalizers.Lowercase(), *others])


def _settings(folder: Path) -> dict[str, Any]:
    """The settings of a Transformer, by the last part of their names. Says which others it leaves out."""
    # The library has a name for each family, and tries BERT's first.
    paths = sorted(
        folder.glob("sentence_*_config.json"), key=lambda path: "_bert_" not in path.name
    )
    if not paths:
        return {}
    path, settings = paths[0], flatten(_json(paths[0]))
    task = settings.get("transformer_task") or _TASKS[0]
    require(task in _TASKS, f"{path}: transformer_task", task, ", ".join(_TASKS))
    known = f"{_READ}|{_WITHOUT_EFFECT}"
    left_out = [
        name
        for name, value in settings.items()
        if value not in (None, "", []) and not re.fullmatch(known, name)
    ]
    if left_out:
        print(f"{path}: settings left out: {', '.join(left_out)}", file=sys.stderr, flush=True)
    read_names = (name for name in settings if re.fullmatch(_READ, name))
    return {name.split(".")[-1]: settings[name] for name in read_names}


def _reduction(folder: Path) -> Reduction:
    config = _json(folder / "config.json")
    switches = {name: on for name, on in config.items() if name.startswith("pooling_mode_")}
    default = [name for name, on in switches.items() if on is True] if switches else "mean"
    modes = config.get("pooling_mode") or default
    modes = [modes] if isinstance(modes, str) else modes
    if len(modes) != 1 or modes[0] not in REDUCTIONS:
        raise BadInput(
            f"{folder}: {' and '.join(modes) or 'none'} is not allowed; allowed: cls or mean"
        )
    return REDUCTIONS[modes[0]]


def _dense(folder: Path) -> _Dense:
    config = _json(folder / "config.json")
    activation = config.get("activation_function", "Tanh").split(".")[-1]
    allowed = ", ".join(_HAS_TANH)
    require(activation in _HAS_TANH, f"{folder}: activation_function", activation, allowed)
    require(not config.get("use_residual"), f"{folder}: use_residual", True, "false")
    weights = _weights(folder)
    return _Dense(weights["linear.weight"], weights.get("linear.bias"), _HAS_TANH[activation])


def _factor(layer: _Dense, folder: Path) -> float:
    """The factor of a Dense after Normalize, which can only make vectors longer or shorter."""
    factor = layer.weight[0, 0].item()
    is_scaling = torch.equal(layer.weight, torch.eye(len(layer.weight)) * factor)
    if not is_scaling or factor <= 0 or layer.bias is not None or layer.tanh:
        raise BadInput(f"{folder}: Dense after Normalize is not allowed; allowed: before it")
    return factor


def _weights(folder: Path) -> dict[str, Tensor]:
    """Those of the one file, or of the shards of an index: others may lie beside them."""
    index = folder / f"{_WEIGHTS}.index.json"
    is_sharded = index.exists() and not (folder / _WEIGHTS).exists()
    names = sorted(set(_json(index)["weight_map"].values())) if is_sharded else [_WEIGHTS]
    if missing := [name for name in names if not (folder / name).exists()]:
        raise BadInput(f"{folder}: no weights ({missing[0]} is missing; pickles such as "
                       "pytorch_model.bin are never loaded)")  # fmt: skip
    files = [folder / name for name in names]
    return {name: value.float() for file in files for name, value in read_weights(file).items()}


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: not to be read ({error})") from None


def _json_if_there(path: Path) -> Any:
    return _json(path) if path.exists() else {}


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
    tokenizer = _tokenizer(ranker.tokenizer)
    sides = {"context": ("left", "query"), "candidate": ("right", "document")}
    for side, (truncated, prompt_name) in sides.items():
        encoder = getattr(network, f"{side}_encoder")
        modules = _vector_modules(network, encoder, getattr(network, f"{side}_projection"))
        about: dict[str, Any] = {"model_type": "SentenceTransformer", "similarity_fn_name": "dot"}
        if prompt := getattr(config, f"{side}_prompt"):  # `encode` puts it before each text
            about |= {"prompts": {prompt_name: prompt}, "default_prompt_name": prompt_name}
        tokens = getattr(config, f"max_{side}_tokens")
        _write_model(folder / side, encoder, tokenizer, tokens, truncated, modules, about)


@_export.register
def _(network: CrossEncoder, ranker: Ranker, folder: Path) -> None:
    """First output, then the pooler if there is one, then the score; scaling goes into the weights."""
    config = network.config
    if config.pooler_norm or config.context_prompt or config.candidate_prompt:
        raise BadInput(
            "ranker.pooler_norm, prompts: unknown to a CrossEncoder of modules; allowed: none"
        )
    scaling = config.output_scaling
    modules = [_pooling(network.encoder, "head", config.head)]
    if network.pooler is not None:
        weight, activation = network.pooler.weight * scaling, config.pooler_activation
        modules.append(_dense_module(weight, network.pooler.bias, activation=activation))
        scaling = 1.0
    weight, bias = network.score.weight * scaling, network.score.bias
    modules.append(_dense_module(weight, bias, output="scores"))
    tokens = config.max_context_tokens + config.max_candidate_tokens + config.separators - 2
    metadata = {"model_type": "CrossEncoder", "activation_fn": _IDENTITY}
    tokenizer = _tokenizer(ranker.tokenizer, config.separators)
    _write_model(folder, network.encoder, tokenizer, tokens, "left", modules, metadata)


def _vector_modules(
    dual: DualEncoder, encoder: Encoder, projection: nn.Linear | None
) -> list[_Module]:
    """The modules from token outputs to a vector; scaling, projection and cut are one matrix."""
    config = dual.config
    modules = [_pooling(encoder, "reduction", config.reduction)]
    matrix = torch.eye(encoder.width) if projection is None else projection.weight
    matrix = matrix[: dual.dimensions] * config.output_scaling
    bias: Tensor | None = None if projection is None else projection.bias
    bias = None if bias is None else bias[: dual.dimensions]
    activation = config.projection_activation if config.projection else "none"
    is_identity = bias is None and torch.equal(matrix, torch.eye(encoder.width))
    if activation != "none" or not is_identity:
        modules.append(_dense_module(matrix, bias, activation=activation))
    if config.vector_length:
        modules.append(_Module("Normalize", {}))
        if config.vector_length != 1:
            modules.append(_dense_module(torch.eye(dual.dimensions) * config.vector_length))
    return modules


def _pooling(encoder: Encoder, option: str, reduction: str) -> _Module:
    """The Pooling module in the older form, which has a flag for each mode."""
    modes = {"first": "cls_token", "mean": "mean_tokens"}
    require(reduction in modes, f"ranker.{option}", reduction,
            f"{', '.join(modes)}, in sentence-transformers")  # fmt: skip
    flags = {f"pooling_mode_{mode}": reduction == name for name, mode in modes.items()}
    return _Module("Pooling", {"word_embedding_dimension": encoder.width, **flags})


def _dense_module(
    weight: Tensor, bias: Tensor | None = None, output: str = "", activation: str = "none"
) -> _Module:
    config = {
        "in_features": weight.shape[1],
        "out_features": weight.shape[0],
        "bias": bias is not None,
        "activation_function": _ACTIVATIONS[activation],
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
    truncation_side: str,
    modules: Sequence[_Module],
    metadata: dict[str, Any],
) -> None:
    encoder.save(folder)
    tokenizer.save(folder)
    path = folder / "tokenizer_config.json"
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if encoder.segments else [])]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # reads tokenizer.json as it is
        "model_max_length": max_tokens,
        "model_input_names": names,
        "truncation_side": truncation_side,
        "padding_side": "right",
        "split_special_tokens": True,  # "[SEP]" in somebody's text is text
    }
    _write_json(path, _json(path) | settings)
    limits = {"max_seq_length": max_tokens, "do_lower_case": False}
    _write_json(folder / "sentence_bert_config.json", limits)
    _write_json(folder / "config_sentence_transformers.json", metadata)
    paths = {"": "Transformer"}
    for number, module in enumerate(modules, 1):
        name = f"{number}_{module.kind}"
        paths[name] = module.kind
        (folder / name).mkdir()
        if module.config:
            _write_json(folder / name / "config.json", module.config)
        if module.weights:
            weights = {key: value.detach().contiguous() for key, value in module.weights.items()}
            save_file(weights, folder / name / _WEIGHTS)
    library = "sentence_transformers.models"
    entries = [
        {"idx": number, "name": str(number), "path": path, "type": f"{library}.{kind}"}
        for number, (path, kind) in enumerate(paths.items())
    ]
    _write_json(folder / "modules.json", entries)


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

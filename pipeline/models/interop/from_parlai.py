"""A ranker from ParlAI's checkpoint of a poly-encoder (`--model transformer/polyencoder`).

    model               {"model": tensors by name, …}: encoder_ctxt.*, encoder_cand.*, codes,
                        and code_attention.*, attention.* where these are multi-head
    model.opt           JSON: the settings it was trained with
    model.dict          word TAB count, in the order of their ids
    model.dict.codecs   the merges of its BPE (subword-nmt, version 0.2)

The towers are BERT's network by other names (ParlAI's variant "xlm"), the tokenizer is BPE with a
mark at the end of words, and [S], which surrounds a text, is both [CLS] and [SEP]. A checkpoint is a
pickle: it is loaded as one of nothing but tensors and plain values, or refused.
"""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from torch import Tensor
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from pipeline.config import BadInput, require
from pipeline.models.encoder import Encoder
from pipeline.models.ranker import Ranker, new_network, set_head
from pipeline.models.settings import HeadAttention, PolyConfig
from pipeline.models.tokens import Tokenizer

CHECKPOINT = "model"
_ATTENTION: dict[str, HeadAttention] = {
    "basic": "dot",
    "sqrt": "scaled_dot",
    "multihead": "multi_head",
}
_LAYER_NORM_EPS = 1e-5  # ParlAI's; XLM's and BERT's is 1e-12
# What a setting must be, and what it is where an older model.opt does not have it.
_NEEDED: dict[str, tuple[tuple[Any, ...], Any]] = {
    "variant": (("xlm",), "aiayn"),
    "activation": (("gelu", "relu"), "relu"),
    "reduction_type": (("first", "mean"), "mean"),
    "polyencoder_type": (("codes", "n_first"), None),
    "poly_attention_type": (tuple(_ATTENTION), "basic"),
    "codes_attention_type": (tuple(_ATTENTION), "basic"),
    "polyencoder_attention_keys": (("context",), "context"),
    "polyencoder_image_encoder_num_layers": ((0,), 0),
    "dict_tokenizer": (("bpe",), None),
}
_WORDS = r"[\p{L}\p{N}_]+|[^\p{L}\p{N}_\s]"  # Python's \w+|[^\w\s]
_END = "</w>"
_NAMES = {
    "embeddings": "embeddings.word_embeddings",
    "position_embeddings": "embeddings.position_embeddings",
    "segment_embeddings": "embeddings.token_type_embeddings",
    "norm_embeddings": "embeddings.LayerNorm",
    "attention.q_lin": "attention.self.query",
    "attention.k_lin": "attention.self.key",
    "attention.v_lin": "attention.self.value",
    "attention.out_lin": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "ffn.lin1": "intermediate.dense",
    "ffn.lin2": "output.dense",
    "norm2": "output.LayerNorm",
}


def load(folder: Path) -> Ranker:
    """Raises BadInput, in one line, for what is missing, damaged or no such poly-encoder."""
    options = _read_options(folder / f"{CHECKPOINT}.opt")
    state = _read_state(folder / CHECKPOINT)
    tokenizer, words = _tokenizer(folder / f"{CHECKPOINT}.dict", options)
    checkpoint = str(folder / CHECKPOINT)
    context, candidate = (
        _encoder(state, side, options, tokenizer, words, checkpoint)
        for side in ("encoder_ctxt", "encoder_cand")
    )
    heads = {options.get(f"{name}_attention_num_heads", 4) for name in _multi_heads(options)}
    if len(heads) > 1:
        raise BadInput(f"{checkpoint}: poly_attention_num_heads and codes_attention_num_heads: "
                       f"{sorted(heads)} is not allowed; allowed: the same number")  # fmt: skip
    config = PolyConfig(
        reduction=options["reduction_type"],
        context_codes="learnt" if options["polyencoder_type"] == "codes" else "first_m",
        m=options["poly_n_codes"],
        code_attention=_ATTENTION[options["codes_attention_type"]],
        candidate_attention=_ATTENTION[options["poly_attention_type"]],
        attention_heads=max(heads, default=4),
        output_scaling=options.get("output_scaling", 1.0),
        # ParlAI cuts contexts before it adds [S] on both sides, candidates afterwards.
        max_context_tokens=_limit(options, "text_truncate", context.positions - 2) + 2,
        max_candidate_tokens=_limit(options, "label_truncate", context.positions),
    )
    network = new_network(config, context, candidate)
    set_head(network, _head(state), f"{checkpoint}: does not fit {CHECKPOINT}.opt")
    return Ranker(config, tokenizer, network).eval()


def _read_options(path: Path) -> dict[str, Any]:
    try:
        options = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(
            f"{path}: not to be read; allowed: ParlAI's settings as JSON ({error})"
        ) from None
    for name, (allowed, default) in _NEEDED.items():
        value = options.setdefault(name, default)
        require(value in allowed, f"{path}: {name}", value, ", ".join(map(str, allowed)))
    for name in ("n_heads", "n_layers", "poly_n_codes"):
        require(
            isinstance(options.get(name), int), f"{path}: {name}", options.get(name), "a number"
        )
    return options


def _read_state(path: Path) -> Mapping[str, Tensor]:
    """The tensors; `weights_only` lets the pickle name no code but that of tensors."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        state = {str(name): value.float() for name, value in checkpoint["model"].items()}
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise BadInput(f"{path}: not to be read as tensors ({reason})") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}: not a checkpoint of ParlAI ({error!r})") from None
    return state


def _limit(options: Mapping[str, Any], name: str, maximum: int) -> int:
    """The limit of tokens; `truncate` stands for a limit that is not set, and -1 for none."""
    limits = [options.get(key) or -1 for key in (name, "truncate")]
    return int(min(next((limit for limit in limits if limit > 0), maximum), maximum))


def _multi_heads(options: Mapping[str, Any]) -> list[str]:
    """Which of both attentions have heads; with n_first the codes' does not exist."""
    names = ["poly", *(["codes"] if options["polyencoder_type"] == "codes" else [])]
    return [name for name in names if options[f"{name}_attention_type"] == "multihead"]


def _encoder(
    state: Mapping[str, Tensor],
    side: str,
    options: Mapping[str, Any],
    tokenizer: Tokenizer,
    words: int,
    checkpoint: str,
) -> Encoder:
    """A tower as BERT. `words`: ids of ParlAI's dictionary; the tokenizer may have more."""
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        if name.startswith(f"{side}."):
            match = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+)\.(weight|bias)", name[len(side) + 1 :])
            if match is None or match[2] not in _NAMES:
                raise BadInput(f"{checkpoint}: no place for the tensor {name}")
            layer = "" if match[1] is None else f"encoder.layer.{match[1]}."
            tensors[f"{layer}{_NAMES[match[2]]}.{match[3]}"] = value
    try:
        table = tensors["embeddings.word_embeddings.weight"]
        config = BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=table.shape[1],
            num_hidden_layers=options["n_layers"],
            num_attention_heads=options["n_heads"],
            intermediate_size=len(tensors["encoder.layer.0.intermediate.dense.bias"]),
            hidden_act=options["activation"],
            max_position_embeddings=len(tensors["embeddings.position_embeddings.weight"]),
            type_vocab_size=len(tensors["embeddings.token_type_embeddings.weight"]),
            hidden_dropout_prob=options.get("dropout", 0.1),
            attention_probs_dropout_prob=options.get("attention_dropout", 0.1),
            layer_norm_eps=_LAYER_NORM_EPS,
            pad_token_id=tokenizer.pad,
        )
    except KeyError as error:
        raise BadInput(f"{checkpoint}: no tensor for {side}'s {error.args[0]}") from None
    if len(table) != words:
        raise BadInput(
            f"{checkpoint}: embeddings of {len(table):,} words, {words:,} in {CHECKPOINT}.dict"
        )
    if options.get("embeddings_scale", True):
        table = table * math.sqrt(table.shape[1])
    # Pieces that are not in the dictionary are unknown words to ParlAI.
    unknown = table[tokenizer.hf.unk_token_id].expand(len(tokenizer) - words, -1)
    tensors["embeddings.word_embeddings.weight"] = torch.cat([table, unknown])
    bert = BertModel(config, add_pooling_layer=False)
    expected = {name: value.shape for name, value in bert.state_dict().items()}
    shapes = {name: value.shape for name, value in tensors.items()}
    if misfits := sorted(
        name for name in expected | shapes if expected.get(name) != shapes.get(name)
    ):
        raise BadInput(f"{checkpoint}: {side} has not the tensors of {options['n_layers']} layers of BERT, "
                       f"among them {misfits[0]}")  # fmt: skip
    bert.load_state_dict(tensors)
    return Encoder(bert)


def _head(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors outside the towers, by our names."""
    head = {}
    for name, value in state.items():
        if not name.startswith(("encoder_ctxt.", "encoder_cand.")):
            name = re.sub(r"^codes$", "codes_MD", name)
            name = re.sub(r"^code_attention\.", "code_heads.", name)
            name = re.sub(r"^attention\.", "candidate_heads.", name)
            head[re.sub(r"\.([qkvo])(ut)?_lin\.", r".\1.", name)] = value
    return head


def _tokenizer(path: Path, options: Mapping[str, Any]) -> tuple[Tokenizer, int]:
    """(tokenizer, words in the dictionary), whose ids it keeps.

    The dictionary has "lo@@" and "wer" where `tokenizers` has "lo" and "wer</w>". Merges need every
    piece on the way to have an id; those that the dictionary lacks come after its own.
    """
    names = {"null": "__null__", "start": "__start__", "end": "__end__", "unk": "__unk__"}
    special = {name: options.get(f"dict_{name}token", usual) for name, usual in names.items()}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        version, *merges = Path(f"{path}.codecs").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: not to be read, or its .codecs ({error})") from None
    require(
        version.strip() == "#version: 0.2", f"{path}.codecs: first line", version, "#version: 0.2"
    )
    words = list(dict.fromkeys([*special.values(), *(line.split("\t")[0] for line in lines)]))
    ids = {_piece(word, special.values()): number for number, word in enumerate(words)}
    pairs = [(left, right) for left, _, right in (merge.strip().partition(" ") for merge in merges)]
    for left, right in pairs:
        for piece in (left, right, left + right):
            ids.setdefault(piece, len(ids))
    fast = FastTokenizer(models.BPE(ids, pairs, unk_token=special["unk"], end_of_word_suffix=_END))
    lower = [normalizers.Lowercase()] if options.get("dict_lower") else []
    fast.normalizer = normalizers.Sequence([normalizers.Replace("\n", " __newln__ "), *lower])
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(_WORDS), "removed", invert=True)
    hf = PreTrainedTokenizerFast(
        tokenizer_object=fast,
        pad_token=special["null"],
        unk_token=special["unk"],
        cls_token=special["start"],
        sep_token=special["end"],
    )
    return Tokenizer(hf), len(words)


def _piece(word: str, special: Any) -> str:
    if word in special:
        return word
    return word.removesuffix("@@") if word.endswith("@@") else word + _END

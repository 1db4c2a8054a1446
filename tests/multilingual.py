"""A tiny XLM-RoBERTa with a Unigram tokenizer, as published multilingual encoders have, and texts for it."""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import (
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import Tokenizer as FastTokenizer
from torch import Tensor
from transformers import (
    AutoModel,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    XLMRobertaConfig,
    XLMRobertaModel,
)

# Of each answer four questions.
ASKED = {
    "Die Karte {} ist in der Post.": ("Wo bleibt {}?", "Ist Karte {} da?", "Wann kommt {}?", "Wo ist {}?"),
    "Счёт {} можно оплатить онлайн.": ("Как оплатить {}?", "Где счёт {}?", "Что делать с {}?", "Когда {}?"),
    "您可以在网上支付账单{}。": ("怎么支付{}？", "账单{}在哪里？", "{}是什么？", "什么时候付{}？"),
}  # fmt: skip
NUMBERS = {
    "D": ("eins", "zwei", "drei", "vier", "fünf", "sechs"),
    "С": ("один", "два", "три", "четыре", "пять", "шесть"),
    "您": ("一", "二", "三", "四", "五", "六"),
}
PAIRS = [
    (question.format(number), answer.format(number))
    for answer, questions in ASKED.items()
    for number in NUMBERS[answer[0]]
    for question in questions
]
PROMPTS = {"query": "query: ", "passage": "passage: "}
LIMIT = 40
"""Tokens that the model reads."""
_SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>",
            "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}  # fmt: skip


def _vocabulary() -> list[tuple[str, float]]:
    """Pieces and their logarithms of probability: every character, every word, and Chinese characters two by
    two, so that a text can be split in several ways. Training a vocabulary gives another one each time."""
    texts = [*(text for pair in PAIRS for text in pair), *PROMPTS.values()]
    texts += [unicodedata.normalize("NFKC", text) for text in texts]
    special = list(dict.fromkeys(_SPECIAL.values()))  # in XLM-RoBERTa's order: padding is 1
    characters = {"▁", *"".join(texts)} - {" "}
    words = {
        f"▁{word}" for text in texts for word in text.split() if word.isalpha() and word < "\u3000"
    }
    twos = {
        "".join(two) for text in texts if text[0] > "\u3000" for two in itertools.pairwise(text)
    }
    pieces = [(piece, -10.0) for piece in sorted(characters | words)]
    return [*((name, 0.0) for name in special), *pieces, *((two, -15.0) for two in sorted(twos))]


def save_encoder(folder: Path, tokenizer_class: str = "XLMRobertaTokenizer") -> Path:
    """A directory as sentence-transformers saves one: XLM-RoBERTa → mean → length 1, with E5's prompts."""
    fast = FastTokenizer(models.Unigram(_vocabulary(), unk_id=3, byte_fallback=False))
    spaces = normalizers.Replace(Regex(" {2,}"), " ")
    fast.normalizer = normalizers.Sequence([normalizers.NFKC(), spaces])
    words = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    fast.pre_tokenizer = pre_tokenizers.Sequence(words)
    fast.decoder = decoders.Metaspace()
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, **_SPECIAL)
    assert (tokenizer.pad_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id) == (1, 0, 2)
    torch.manual_seed(0)
    config = XLMRobertaConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=LIMIT + 2, type_vocab_size=1,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    XLMRobertaModel(config, add_pooling_layer=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "tokenizer_class": tokenizer_class})
    )
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": place, "name": str(place), "path": f"{place}_{kind}" if place else "",
         "type": f"sentence_transformers.models.{kind}"}
        for place, kind in enumerate(kinds)
    ]  # fmt: skip
    files = {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
        "2_Normalize/config.json": {},
        "sentence_bert_config.json": {"max_seq_length": LIMIT, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": PROMPTS, "similarity_fn_name": "cosine"},
    }
    for name, values in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(values))
    return folder


def outputs(folder: Path, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """[N, T, D] of the tokens of N padded texts, and their mask [N, T]: by `transformers` alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(
        list(texts), padding=True, truncation=True, max_length=LIMIT, return_tensors="pt"
    )
    with torch.no_grad():
        model = AutoModel.from_pretrained(folder).eval()
        hidden_NTD = model(tokens["input_ids"], tokens["attention_mask"]).last_hidden_state
    return hidden_NTD, tokens["attention_mask"].bool()


def mean_vectors(folder: Path, texts: Sequence[str]) -> Tensor:
    """[N, D], of length 1: by `transformers` alone."""
    hidden_NTD, mask_NT = outputs(folder, texts)
    sums_ND = (hidden_NTD * mask_NT[..., None]).sum(dim=1)
    return torch.nn.functional.normalize(sums_ND, dim=1)

"""Milliseconds to encode a text, by its length in tokens.

The texts of each length have the same number of tokens together. Slope 1 means that the rate of tokens does
not depend on the length. Attention makes the curve steeper, because its work per token grows with the length.
A text is a row of random subwords, because the time does not depend on which they are. All texts of a length
are equally long, so there is no padding. Tokenizing is not part of the time.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path

import torch

from jobs.benchmarks.measure import BenchmarkRow, in_turn
from pipeline.config import require
from pipeline.engine.resources import best_device
from pipeline.models import inference
from pipeline.models.dualencoder import DualEncoder
from pipeline.models.ranker import new_ranker
from pipeline.models.settings import BiConfig
from pipeline.models.tokens import Tokenizer

_LENGTHS = (32, 64, 128, 256, 512)
"""Tokens of a text, [CLS] and [SEP] included."""
_TOKENS_PER_THREAD = {"small": 8_192, "full": 65_536}  # small: 4 batches of `inference`
_ROUNDS = {"small": 2, "full": 3}


def measure(size: str, encoder: Path) -> BenchmarkRow:
    """Milliseconds a text for the longest texts, with the curve over all lengths that the encoder takes.

    `encoder`: a folder of a `transformers` encoder with its tokenizer. The vector of a text is that of an
    untrained bi-encoder. All lengths are measured in turn, some rounds; the fastest round counts.
    """
    device = best_device()
    shortest = _LENGTHS[0]
    config = BiConfig(share_towers=True, max_context_tokens=shortest, max_candidate_tokens=shortest)
    ranker = inference.prepare(new_ranker(config, encoder, seed=0), device)
    network, tokenizer = ranker.network, ranker.tokenizer
    assert isinstance(network, DualEncoder) and isinstance(tokenizer, Tokenizer)
    lengths = [length for length in _LENGTHS if length <= network.context_encoder.positions]
    require(len(lengths) > 1, "encoder", str(encoder), f"one of {_LENGTHS[1]} positions or more")
    tokens = _TOKENS_PER_THREAD[size] * torch.get_num_threads()
    texts = {length: _random_rows(tokenizer, tokens // length, length) for length in lengths}
    ways = {
        length: functools.partial(inference.row_vectors, ranker, rows)
        for length, rows in texts.items()
    }
    seconds = in_turn(ways, _ROUNDS[size])
    ms = {length: 1e3 * min(seconds[length]) / len(texts[length]) for length in lengths}
    rates = {length: round(1e3 * length / ms[length]) for length in lengths}
    first, last = lengths[0], lengths[-1]
    return BenchmarkRow(
        "embed.by_length", ms[last], f"ms a text of {last} tokens",
        detail={
            "curve": {"x": "tokens a text", "y": "ms a text", "points": [[n, ms[n]] for n in lengths]},
            "tokens/s": rates,
            "tokens of each length": tokens,
            "parameters": sum(weights.numel() for weights in network.context_encoder.parameters()),
            "precision": ranker.precision, "device": device.type, "threads": torch.get_num_threads(),
            "seconds, by round": {n: [round(s, 3) for s in seconds[n]] for n in lengths},
            "note": f"{rates[first]:,} tokens/s in texts of {first} tokens, {rates[last]:,} in texts of "
                    f"{last}. Random subwords, no padding, without tokenizing.",
        },
    )  # fmt: skip


def _random_rows(tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """`count` texts of `length` tokens, as `Ranker.candidate_rows` lays them out."""
    special = set(tokenizer.hf.all_special_ids)
    subwords = [token for token in range(len(tokenizer)) if token not in special]
    rng = random.Random(length)
    return [
        [tokenizer.cls, *rng.choices(subwords, k=length - 2), tokenizer.sep] for _ in range(count)
    ]

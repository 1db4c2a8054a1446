"""What is no negative: a text that is right for a context, too, or probably is.

The other responses to the same context are right, too (Reddit, AmazonQA), and where the settings say so those
of the same group (dialogue, thread, product). A text that a ranker scores nearly as high as the response, or
higher, is probably right, because nobody marked all right answers (limits relative to the score of the right
one: Moreira et al., NV-Retriever, 2024).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from pipeline.training.settings import NegativeLimits


def example_columns(same_group_negatives: bool) -> tuple[str, ...]:
    """The columns of a corpus that make a context, its response and its `answer_keys`."""
    return ("context", "response", *(() if same_group_negatives else ("group_id",)))


def answer_keys(row: Mapping[str, Any], same_group_negatives: bool) -> list[int]:
    """64-bit hashes, equal in all processes. Rows that share one have their right answers in common."""
    texts = ["\n".join(row["context"])]
    if not same_group_negatives:
        texts.append(row["group_id"])
    digests = [blake2b(text.encode(), digest_size=8).digest() for text in texts]
    return [int.from_bytes(digest, "little", signed=True) for digest in digests]


@dataclass(frozen=True)
class RightAnswers:
    """The responses that answer a row, its own among them."""

    sets: Sequence[set[str]]
    """Rows share them: 5,000 rows of one thread would otherwise hold 25 million texts."""

    def __contains__(self, text: str) -> bool:
        return any(text in texts for texts in self.sets)

    def __len__(self) -> int:
        """At least as many as there are."""
        return sum(map(len, self.sets))


def right_answers(
    rows: Sequence[Mapping[str, Any]], same_group_negatives: bool
) -> list[RightAnswers]:
    """The right answers of each row among the responses of all these rows."""
    responses_of_key = defaultdict[int, set[str]](set)
    sets_of_rows = [
        [responses_of_key[key] for key in answer_keys(row, same_group_negatives)] for row in rows
    ]
    for row, sets in zip(rows, sets_of_rows, strict=True):
        for texts in sets:
            texts.add(row["response"])
    return [RightAnswers(sets) for sets in sets_of_rows]


def highest_allowed(limits: NegativeLimits, right_score: float) -> float:
    """The highest score that a negative may have, given the right response's."""
    share_limit = right_score * limits.max_share if right_score > 0 else math.inf
    return min(right_score - limits.margin, share_limit)

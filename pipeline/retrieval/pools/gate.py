"""What a version of a pool has to pass before anybody can open it.

Every shard's record brings along what the gate looks at, so that nothing is read again:

    {"dimensions": 384, "norms": [least, mean, most], "cosine": 0.9997,
     "answers": [[[score, key], …], …], "known_answers": …}

`cosine` is the least one of some rows to the same texts embedded once more. The answers are the shard's
best for each canary, a query that every version is asked; `known_answers` those among the texts that
the version before had too. A key is the first 16 digits of a text's content hash.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from pipeline.config import Stopped, require
from pipeline.corpora import raw

KEY_DIGITS = 16
# Norms so many times the mean, or the mean so many times a norm, are no norms of texts.
_NORM_RANGE = 100

Record = dict[str, Any]
Answers = list[list[tuple[float, str]]]
"""(score, key) of the best candidates for each canary, best first"""


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """What a version has to pass."""

    sample: int = 8
    """Rows of each shard that are embedded once more, one by one, and compared; 0: none."""
    min_cosine: float = 0.99
    """Of every such row to itself."""
    canaries: str = ""
    """File of queries, one a line, a dialogue's turns parted by tabs, which another model of the same
    kind has to answer alike; empty: texts of the pool's own, which the same model has to."""
    canary_texts: int = 16
    """Texts of its own that a pool without a file is asked for; 0: none."""
    top_k: int = 10
    """Answers that are compared with those of the version before."""
    min_recall: float = 0.5
    """Share of those, where their texts are still there, that have to be found again."""

    def __post_init__(self) -> None:
        for name in ("sample", "canary_texts"):
            require(getattr(self, name) >= 0, f"gate.{name}", getattr(self, name), ">= 0")
        require(self.top_k >= 1, "gate.top_k", self.top_k, ">= 1")
        require(-1 <= self.min_cosine <= 1, "gate.min_cosine", self.min_cosine, "-1 to 1")
        require(0 <= self.min_recall <= 1, "gate.min_recall", self.min_recall, "0 to 1")


def read_canaries(uri: str) -> list[list[str]]:
    """The contexts in a file of canaries.

    Raises BadInput where there are none.
    """
    lines = [line for _, line in raw.read_lines(uri, raw.Reading()) if line.strip()]
    require(bool(lines), "gate.canaries", uri, "a file with a query in each line")
    return [line.split("\t") for line in lines]


def check(
    config: GateConfig,
    records: Sequence[Record],
    kind: str,
    contexts: Sequence[Sequence[str]],
    before: Record | None,
    present: Collection[str],
) -> tuple[Record, Record]:
    """(what was found, the canaries for the next version) of a pool's shards.

    `kind` of model: answers of others are not compared. `contexts`: the canaries. `before`: those of
    the version before. `present`: which of its answers are still in the pool.

    Raises Stopped, naming all that does not pass.
    """
    faults = []
    dimensions = sorted({record["dimensions"] for record in records})
    if len(dimensions) != 1:
        faults.append(f"shards of different dimensions: {dimensions}")
    least, mean, most = (
        min(record["norms"][0] for record in records),
        sum(record["norms"][1] for record in records) / len(records),
        max(record["norms"][2] for record in records),
    )
    if not mean / _NORM_RANGE <= least <= most <= mean * _NORM_RANGE or not mean > 0:
        faults.append(f"norms from {least:g} to {most:g}; allowed: 1/{_NORM_RANGE} to {_NORM_RANGE} "
                      f"times their mean, {mean:g}")  # fmt: skip
    cosines = [record["cosine"] for record in records if record["cosine"] is not None]
    if apart := [cosine for cosine in cosines if not cosine >= config.min_cosine]:
        faults.append(f"a row's cosine to itself, embedded once more, is {min(apart):.4f}; allowed: "
                      f"gate.min_cosine {config.min_cosine:g} at least")  # fmt: skip
    share, why_not = _recall(config, records, kind, contexts, before, set(present))
    if share is not None and share < config.min_recall:
        faults.append(f"the canaries' answers found again are {share:.3f} of those of the version "
                      f"before; allowed: gate.min_recall {config.min_recall:g} at least")  # fmt: skip
    if faults:
        raise Stopped(f"the gate: {'; '.join(faults)}. Nothing is published")
    found = {
        "norms": [least, mean, most],
        "min_cosine": min(cosines, default=None),
        "recall": share if share is not None else f"skipped: {why_not}",
    }
    answers = _best(records, "answers", config.top_k)
    return found, {"kind": kind, "contexts": list(map(list, contexts)), "answers": answers}


def _recall(
    config: GateConfig,
    records: Sequence[Record],
    kind: str,
    contexts: Sequence[Sequence[str]],
    before: Record | None,
    present: set[str],
) -> tuple[float | None, str]:
    """(mean over the canaries of the share of their answers that are found again, or why there is none)"""
    if before is None:
        return None, "there is no version before"
    if before["kind"] != kind:
        return (
            None,
            f"the version before is of another kind of model ({before['kind']}, not {kind})",
        )
    old = dict(zip(map(tuple, before["contexts"]), before["answers"], strict=True))
    shares = []
    for context, new in zip(contexts, _best(records, "known_answers", config.top_k), strict=True):
        if wanted := present.intersection(old.get(tuple(context), ())[: config.top_k]):
            shares.append(len(wanted.intersection(new)) / len(wanted))
    if not shares:
        return None, "no canary has an answer of the version before that is still there"
    return sum(shares) / len(shares), ""


def _best(records: Sequence[Record], name: str, top_k: int) -> list[list[str]]:
    """The keys of the pool's best answers to each canary; ties by key."""
    of_shards: list[Answers] = [record[name] for record in records]
    return [
        [key for _, key in sorted(chain(*answers), key=lambda one: (-one[0], one[1]))[:top_k]]
        for answers in zip(*of_shards, strict=True)
    ]

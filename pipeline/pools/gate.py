"""The checks that a version of a pool has to pass before it is published.

Every shard's record holds the facts that the gate checks (`ShardCheck`), so that no vector is read again. A
canary is a query that checks every version. The answers of a shard are a file of the draft, because those to
200 canaries take 658 kB: the driver reads one file after the other and keeps the best answers.

    _answers/part-00000-<gate>.json    `ShardAnswers` to the gate's questions of this name
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import NotRequired, TypedDict

from pipeline import storage
from pipeline.config import Stopped, require
from pipeline.corpora import raw
from pipeline.engine.draft import Draft
from pipeline.pools.changes import Changes
from pipeline.storage.prefetch import map_prefetched

KEY_DIGITS = 16
# Norms so many times the mean, or the mean so many times a norm, are no norms of texts.
_NORM_RANGE = 100

Answer = tuple[float, str]
"""(score, key). A key is the first 16 digits of a text's hash,
without values to filter by; those may change while the vectors stay."""
Answers = list[list[Answer]]
"""The best texts for each canary, best first."""


@dataclass(frozen=True)
class ShardCheck:
    """The facts of a shard that the gate checks."""

    dimensions: int
    norms: tuple[float, float, float]
    """The least, the mean, the greatest."""
    cosine: float | None
    """The least one of some rows to the same texts embedded once more; None: no row was."""


@dataclass(frozen=True)
class ShardAnswers:
    """The answers of a shard to the canaries."""

    best: Answers
    """The best texts of the shard."""
    best_known: Answers
    """The best of the shard's texts that the version before has, too."""


class Canaries(TypedDict):
    """The canaries in a version's manifest."""

    kind: str
    """The kind of the model."""
    contexts: list[list[str]]
    answers: list[list[str]]
    """The keys of the best texts for each, best first."""
    file: NotRequired[str]
    """The file of the canaries; "": they are texts of the pool."""


class Passed(TypedDict):
    """The gate's results in a version's manifest."""

    removed_share: float
    changed_share: float

    norms: list[float]
    min_cosine: float | None
    recall: float | str
    """Or why it was not measured."""


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """The checks that a version has to pass."""

    sample: int = 8
    """Rows of each shard that are embedded once more, one by one, and compared with their vectors; 0:
    none."""
    min_cosine: float = 0.99
    """The least cosine between the two vectors of each such row."""
    canaries: str = ""
    """File of canaries: one query a line, the turns of a dialogue separated by tabs. Another model of the
    same kind has to answer them alike. Empty: texts of the pool are the canaries, and only the same model
    has to."""
    canary_texts: int = 16
    """Number of texts of the pool that are canaries, if there is no file; 0: none."""
    top_k: int = 10
    """Answers to a canary that are compared with those of the version before."""
    min_recall: float = 0.5
    """Share of the earlier answers that have to be found again, as far as their texts are still in the
    pool."""
    max_removed_share: float = 0.2
    """Share of the ids of the version before that may be gone; 1: all of them. It stops an incomplete
    export before anything is embedded."""
    max_changed_share: float = 0.5
    """Share of those ids that may have another text or filter column. 1: all of them."""

    def __post_init__(self) -> None:
        for name in ("sample", "canary_texts"):
            require(getattr(self, name) >= 0, f"gate.{name}", getattr(self, name), ">= 0")
        require(self.top_k >= 1, "gate.top_k", self.top_k, ">= 1")
        require(-1 <= self.min_cosine <= 1, "gate.min_cosine", self.min_cosine, "-1 to 1")
        for name in ("min_recall", "max_removed_share", "max_changed_share"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"gate.{name}", value, "0 to 1")


def read_canaries(uri: str) -> list[list[str]]:
    """The contexts in a file of canaries.

    Raises BadInput where there are none.
    """
    require(storage.exists(uri), "gate.canaries", uri, "a file with a query in each line")
    lines = [line for _, line in raw.read_lines(uri, raw.Reading()) if line.strip()]
    require(bool(lines), "gate.canaries", uri, "a file with a query in each line")
    return [line.split("\t") for line in lines]


@dataclass(frozen=True)
class Shares:
    """The shares of the ids of the version before that are missing or have another text; 0 without one."""

    removed: float
    changed: float


def shares_of(changes: Changes, rows: int, rows_before: int) -> Shares:
    """`rows_before`: the rows of the version before, which may be one that nobody can open any more."""
    rows_before = max(1, rows_before)
    removed = max(changes.gone, rows_before - rows, 0)
    return Shares(removed / rows_before, changes.changed / rows_before)


def refusal(config: GateConfig, shares: Shares, version_before: str, rows_before: int) -> str:
    """Why a version may not replace the one before, and which options would allow it; "": it may."""
    limits = (
        ("max_removed_share", shares.removed, "are gone"),
        ("max_changed_share", shares.changed, "have another text or filter column"),
    )
    faults = [
        (name, f"{round(share * rows_before):,} of the {rows_before:,} ids of {version_before} {state} "
         f"({share:.1%}; allowed: gate.{name} {getattr(config, name):g})")
        for name, share, state in limits
        if share > getattr(config, name)
    ]  # fmt: skip
    if not faults:
        return ""
    options = " ".join(f"--gate.{name.replace('_', '-')} 1" for name, _ in faults)
    return (
        f"the gate: {'; '.join(text for _, text in faults)}. Nothing is published. If this is meant, "
        f"allow it once: the same command with {options}"
    )


def check(
    config: GateConfig,
    shards: Sequence[ShardCheck],
    answers: Iterable[ShardAnswers],
    kind: str,
    contexts: Sequence[Sequence[str]],
    before: Canaries | None,
    present: Collection[str],
    shares: Shares = Shares(0.0, 0.0),
) -> tuple[Passed, Canaries]:
    """(the results, the canaries for the next version) of the checks of a pool's shards.

    `answers` of the shards are read one by one. `kind`: the kind of the model; answers of other kinds are
    not compared. `contexts`: the canaries. `before`: the canaries of the version before. `present`: its
    answers that are still in the pool. `shares`: the shares that `refusal` has accepted.

    Raises Stopped, naming all failed checks.
    """
    faults = []
    dimensions = sorted({shard.dimensions for shard in shards})
    if len(dimensions) != 1:
        faults.append(f"shards of different dimensions: {dimensions}")
    lowest, means, highest = zip(*(shard.norms for shard in shards), strict=True)
    min_norm, mean_norm, max_norm = min(lowest), sum(means) / len(means), max(highest)
    low, high = mean_norm / _NORM_RANGE, mean_norm * _NORM_RANGE
    if not (low <= min_norm <= max_norm <= high and mean_norm > 0):
        faults.append(f"norms from {min_norm:g} to {max_norm:g}; allowed: 1/{_NORM_RANGE} to {_NORM_RANGE} "
                      f"times their mean, {mean_norm:g}")  # fmt: skip
    cosines = [shard.cosine for shard in shards if shard.cosine is not None]
    if low_cosines := [cosine for cosine in cosines if not cosine >= config.min_cosine]:
        faults.append(f"a text that was embedded twice has two vectors, of cosine {min(low_cosines):.4f}; "
                      f"allowed: gate.min_cosine {config.min_cosine:g} at least")  # fmt: skip
    best, best_known = _best_keys(answers, len(contexts), config.top_k)
    recall, skip_reason = _recall(config, best_known, kind, contexts, before, set(present))
    if recall is not None and recall < config.min_recall:
        faults.append(f"the test queries (canaries) find {recall:.3f} of the answers of the version "
                      f"before; allowed: gate.min_recall {config.min_recall:g} at least")  # fmt: skip
    if faults:
        raise Stopped(f"the gate: {'; '.join(faults)}. Nothing is published")
    passed: Passed = {
        "removed_share": round(shares.removed, 4),
        "changed_share": round(shares.changed, 4),
        "norms": [min_norm, mean_norm, max_norm],
        "min_cosine": min(cosines, default=None),
        "recall": recall if recall is not None else f"skipped: {skip_reason}",
    }
    return passed, {"kind": kind, "contexts": list(map(list, contexts)), "answers": best}


def passed_line(passed: Passed) -> str:
    """What a person reads of a gate that is passed."""
    parts = [f"removed {passed['removed_share']:.1%}", f"changed {passed['changed_share']:.1%}"]
    if (cosine := passed["min_cosine"]) is not None:
        parts.append(f"texts embedded twice have equal vectors (cosine {cosine:.4f} at least)")
    recall = passed["recall"]
    found = recall if isinstance(recall, str) else f"{recall:.1%} of the earlier ones"
    parts.append(f"answers to the test queries {found}")
    return f"the gate is passed: {', '.join(parts)}"


def write_answers(draft: Draft, name: str, gate_name: str, answers: ShardAnswers) -> None:
    """Keeps a shard's answers to the questions of this name."""
    draft.write_file(_answers_file(name, gate_name), json.dumps(asdict(answers)).encode())


def read_answers(draft: Draft, names: Iterable[str], gate_name: str) -> Iterator[ShardAnswers]:
    """The answers of these shards, in order."""

    def read(name: str) -> ShardAnswers:
        data = storage.read_bytes(draft.path(_answers_file(name, gate_name)))
        return ShardAnswers(**json.loads(data))

    return map_prefetched(read, names)


def _answers_file(name: str, gate_name: str) -> str:
    return f"_answers/{name}-{gate_name}.json"


def _recall(
    config: GateConfig,
    answers: Sequence[Sequence[str]],
    kind: str,
    contexts: Sequence[Sequence[str]],
    before: Canaries | None,
    present: set[str],
) -> tuple[float | None, str]:
    """(mean over the canaries of the share of their answers that are found again, or why there is none)"""
    if before is None:
        return None, "there is no version before"
    if before["kind"] != kind:
        kinds = f"({before['kind']}, not {kind})"
        return None, f"the version before is of another kind of model {kinds}"
    answers_before = dict(zip(map(tuple, before["contexts"]), before["answers"], strict=True))
    shares = []
    for context, keys in zip(contexts, answers, strict=True):
        if expected := present.intersection(answers_before.get(tuple(context), ())[: config.top_k]):
            shares.append(len(expected.intersection(keys)) / len(expected))
    if not shares:
        return None, "no test query has an answer of the version before that is still there"
    return sum(shares) / len(shares), ""


def _best_keys(
    answers: Iterable[ShardAnswers], canaries: int, top_k: int
) -> tuple[list[list[str]], list[list[str]]]:
    """The keys of the pool's best answers to each canary, and of the best known ones."""
    best, best_known = ([list[Answer]() for _ in range(canaries)] for _ in range(2))
    for shard in answers:
        for running, shard_answers in ((best, shard.best), (best_known, shard.best_known)):
            for canary, ranked in enumerate(zip(running, shard_answers, strict=True)):
                running[canary] = _best_answers(chain(*ranked), top_k)
    best_keys, best_known_keys = (
        [[key for _, key in ranked] for ranked in running] for running in (best, best_known)
    )
    return best_keys, best_known_keys


def _best_answers(answers: Iterable[Answer], top_k: int) -> list[Answer]:
    """Each key once, by its best score; ties by key."""
    score_of_key = dict[str, float]()
    for score, key in sorted(answers, key=lambda answer: (-answer[0], answer[1])):
        score_of_key.setdefault(key, score)
    return [(score, key) for key, score in score_of_key.items()][:top_k]

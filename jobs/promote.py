"""Moves services to another version of a model and its pool, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from jobs import program
from pipeline import registry, storage
from pipeline.artifact import Artifact, read_artifact
from pipeline.config import BadInput, Stopped, require, to_dict
from pipeline.evaluation import protocols
from pipeline.pools import promotion, versions
from pipeline.pools.lock import current_locked, locked
from pipeline.pools.pool import KIND, Pool
from pipeline.storage.locks import Lock

_CANDIDATE = "candidate"
_LOCK_EXPIRES_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Config:
    """Makes a version of a registered model its champion, a version of a pool CURRENT, or both together.

    It needs `--registered-model`, or `--pools` and `--name`, or all three. Services that follow the alias
    and the pool take them over within seconds. `--rollback` goes back. With `--corpus` a model is promoted
    only if it is better than the champion on that corpus (`--min-difference`).
    """

    ALIASES = MappingProxyType({"model": "registered_model"})

    registered_model: str = ""
    """Name of a registered model in MLflow; `--model` means the same."""
    alias: str = "champion"
    """The model's alias that moves; the alias `previous` then names the version that it leaves,
    or `previous-<alias>` if the alias is not champion."""
    pools: str = field(default="", metadata=program.OUTPUT)
    """Folder of all pools; with `--name`."""
    name: str = ""
    """The pool's name. With a model the pool moves to its newest version of that model."""
    version: str = ""
    """The version to promote. Of a model: a number or an alias; empty: the alias candidate. Of a pool
    alone: its name, such as v-0123456789ab."""
    rollback: bool = False
    """Go back to the version before. A model goes back to its alias `previous`, and its pool with it. A
    pool alone goes back to the version that was CURRENT before. A second rollback undoes the first
    one."""
    corpus: str = ""
    """The test corpus, on which candidate and champion are compared. Always use the same one."""
    split: Literal["train", "valid", "test"] = "test"
    """The split of that corpus."""
    protocol: protocols.Name | Literal["auto"] = "auto"
    """Where the candidates come from, and how many; as in jobs.evaluate."""
    max_examples: int = 10_000
    """Ask both models at most this many questions."""
    min_difference: float = 0.0
    """Promote only if the 95 % interval of R@1(candidate) - R@1(champion) lies above this number. 0:
    significantly better. -0.01: at most one point worse."""
    pin: bool = False
    """Keep the pool at this version: nightly jobs publish further versions and leave CURRENT as it is.
    A rollback always pins."""
    unpin: bool = False
    """Let nightly jobs move CURRENT again. Alone it moves nothing. To promote a model with a pinned pool give
    this option or `--pin`."""
    dry_run: bool = False
    """Compare and print what would move."""

    def __post_init__(self) -> None:
        model, is_set = self.registered_model, bool(self.pools)
        require(is_set == bool(self.name), "name", self.name, "set exactly if pools is set")
        require(is_set or bool(model), "registered_model", model, "a model, or pools and name")
        is_one = not (self.version and self.rollback)
        require(is_one, "version", self.version, "empty with rollback")
        has_pool = is_set or not (self.pin or self.unpin)
        require(has_pool, "pin", True, "only with pools and name")
        unpins_alone = not (self.unpin and (self.pin or self.rollback))
        require(unpins_alone, "unpin", True, "false with pin and rollback")
        has_model = bool(model) or not self.corpus
        require(has_model, "corpus", self.corpus, "empty without a model")
        require(-1 <= self.min_difference <= 1, "min_difference", self.min_difference, "-1 to 1")
        require(self.max_examples >= 1, "max_examples", self.max_examples, ">= 1")
        if model:
            registry.require_name("registered_model", model)
            registry.require_alias("alias", self.alias)


def run(config: Config) -> program.Summary:
    with _lock_pool(config) as lock:
        if config.registered_model:
            summary = _promote_model(config, lock)
        else:
            summary = {"pool": _move_pool(config, _pool_version(config), lock)}
        return {"dry_run": config.dry_run, **summary}


@contextmanager
def _lock_pool(config: Config) -> Iterator[Lock | None]:
    """Locks the pool, so that no other job publishes a version.

    None if no pool moves, and for a rollback, which cannot wait for a build: that takes hours.
    """
    if not config.pools:
        yield None
        return
    is_there = storage.exists(storage.join(config.pools, config.name))
    if not (is_there and versions.newest_versions(config.pools, config.name)):
        # A lock would make the folder.
        raise BadInput(f"pool {config.name}: {config.pools} has no such pool, or no version of it")
    if config.dry_run or config.rollback or _only_pins(config):
        yield None
        return
    with locked(config.pools, config.name, _LOCK_EXPIRES_S) as lock:
        yield lock


def _only_pins(config: Config) -> bool:
    """Whether the pool stays at its version."""
    moves = config.rollback or config.version or config.registered_model
    return (config.pin or config.unpin) and not moves


def _promote_model(config: Config, lock: Lock | None) -> program.Summary:
    """The pool first, then the alias: until both agree, services answer with the model they have. After a
    failure in between, the same command does what is missing."""
    from pipeline import tracking

    is_told = config.rollback or config.pin or config.unpin
    if config.pools and not is_told and promotion.is_pinned(config.pools, config.name):
        # The model that a rollback has left is still the candidate, and as good in the comparison as before.
        raise BadInput(f"pool {config.name}: it is pinned, as by a rollback; allowed: --unpin, which lets "
                       "nightly jobs move CURRENT again, or --pin")  # fmt: skip
    previous = tracking.previous_alias(config.alias)
    version_name = config.version or (previous if config.rollback else _CANDIDATE)
    version, candidate = tracking.registered_version(config.registered_model, version_name)
    version_before = tracking.version_of_alias(config.registered_model, config.alias)
    summary: program.Summary = {"model": config.registered_model, "alias": config.alias, "version": version,
                                "before": version_before}  # fmt: skip
    pool = _version_of_model(config, candidate) if config.pools else ""
    name = config.registered_model
    if config.corpus and not version_before:
        print(f"model {name}: it has no {config.alias} yet, so nothing is compared")
    elif config.corpus and version_before != version:
        _, champion = tracking.registered_version(name, version_before)
        summary["comparison"] = _compare(config, champion, candidate)
    promotion_run = tracking.start_without_artifact(
        "promote", name, {"model": candidate}, to_dict(config)
    )
    with nullcontext() if config.dry_run else promotion_run as run:
        if config.pools:
            summary["pool"] = _move_pool(config, pool, lock)
        if not config.dry_run:
            tracking.move_alias(config.registered_model, config.alias, version)
        _say_move(config, f"model {name}: {config.alias}", version_before, version)
        if run:
            run.attach({"promotion.json": json.dumps(summary, indent=1).encode()})
    return summary


def _compare(config: Config, champion: Artifact, candidate: Artifact) -> dict[str, Any]:
    """Candidate and champion on the same questions. Raises Stopped if the candidate is not good enough."""
    from jobs import evaluate

    if candidate.fingerprint == champion.fingerprint:
        return {"difference": 0.0, "interval": [0.0, 0.0], "p": 1.0}
    asked = evaluate.Config(
        model=(candidate.uri, champion.uri), corpus=config.corpus, split=config.split,
        protocol=config.protocol, max_examples=config.max_examples, slow=True, baselines=False,
        latency_queries=0,
    )  # fmt: skip
    evaluation = evaluate.run(asked)
    (pair,) = evaluation["comparisons"]
    low, high = pair["interval"]
    comparison = {
        "corpus": evaluation["corpus"],
        "examples": evaluation["examples"],
        "difference": round(pair["difference"], 6),
        "interval": [round(low, 6), round(high, 6)],
        "p": pair["p"],
    }
    if low <= config.min_difference:
        difference = f"{pair['difference']:+.4f}, 95 % interval {low:+.4f} to {high:+.4f}"
        raise Stopped(
            f"model {config.registered_model}: not promoted: R@1 of the candidate minus the "
            f"champion's is {difference} on {evaluation['examples']:,} questions; allowed: an interval above "
            f"--min-difference {config.min_difference:g}"
        )
    return comparison


def _version_of_model(config: Config, model: Artifact) -> str:
    """The pool's newest version that the model embedded."""
    version = promotion.newest_of_model(config.pools, config.name, model.fingerprint)
    if not version:
        raise BadInput(
            f"pool {config.name}: no version was embedded by {model.uri} ({model.fingerprint}); make one: "
            f"jobs.embed_pool --model {model.uri} --publish-only true"
        )
    return version


def _pool_version(config: Config) -> str:
    """The version that a pool alone moves to."""
    current = versions.current_name(config.pools, config.name)
    if config.rollback or config.version == "previous":
        return promotion.version_before(config.pools, config.name)
    if not config.version and not (current and (config.pin or config.unpin)):
        by_age = promotion.versions_by_age(config.pools, config.name)
        names = ", ".join(f"{name} (CURRENT)" if name == current else name for name in by_age)
        raise BadInput("version: '' is not allowed; allowed: --rollback, or one of the pool's versions, "
                       f"newest first: {names}")  # fmt: skip
    return config.version or current


def _move_pool(config: Config, version: str, lock: Lock | None) -> dict[str, Any]:
    pools, name = config.pools, config.name
    uri = storage.join(pools, name, version)
    if not _only_pins(config):
        Pool.open(uri)
    pin = config.pin or config.rollback
    with nullcontext() if config.dry_run else current_locked(pools, name):
        version_before = versions.current_name(pools, name)
        if _only_pins(config):  # a build may have moved CURRENT meanwhile
            version = version_before
        if not config.dry_run:
            if lock:  # a comparison takes minutes, in which it may have been lost
                lock.check()
            if not _only_pins(config) and not versions.is_version(uri):
                raise Stopped(f"pool {name}: {version} has been removed meanwhile")
            if pin or config.unpin:  # first: the same command does the rest if this one is killed
                promotion.set_pin(pools, name, pin)
            promotion.promote(pools, name, version)
        is_pinned = pin or (not config.unpin and promotion.is_pinned(pools, name))
    _say_move(config, f"pool {name}: CURRENT", _described(config, version_before),
              _described(config, version))  # fmt: skip
    if is_pinned:
        print(
            f"pool {name} is pinned: nightly jobs leave CURRENT as it is, until --unpin", flush=True
        )
    return {"name": name, "version": version, "before": version_before, "pinned": is_pinned}


def _described(config: Config, version: str) -> str:
    """A version with its age and size: a model's newest version may be weeks older than CURRENT."""
    try:
        made = read_artifact(storage.join(config.pools, config.name, version), KIND)
    except BadInput:  # CURRENT names none, or one that cannot be opened
        return version
    time = str(made.manifest["created_at"])[:16].replace("T", " ")
    return f"{version} ({time} UTC, {made.counts.get('candidates', 0):,} candidates)"


def _say_move(config: Config, subject: str, before: str, after: str) -> None:
    moves = "would move" if config.dry_run else "has moved"
    before, after = before or "none", after or "none"
    moved = f"stays {after}" if before == after else f"{moves} from {before} to {after}"
    print(f"{subject} {moved}", flush=True)


if __name__ == "__main__":
    program.main(Config, run, "promote")

"""A look at a pool: the best candidates for a context."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

from jobs import program
from pipeline.arrays import Floats
from pipeline.artifact import open_artifact
from pipeline.config import BadInput, require
from pipeline.models.precision import Precision
from pipeline.pools.pool import Method, Pool, describe
from pipeline.registry import model_uri

_SHOWN_VECTORS, _SHOWN_CHARACTERS = 3, 80


@dataclass(frozen=True, kw_only=True)
class Config:
    """Searches a pool and prints the best candidates for a context.

    A line has the score (with --cross the cross-encoder's score before it), the id, the context's vectors
    that carried most of the score (of a poly-encoder: its codes, from 0) with their shares, the text, and
    the columns that the pool keeps to filter by.
    """

    pool: str
    """<pools>/<name>, or one of its versions."""
    model: str
    """The ranker that embedded the pool, or models:/name@alias of MLflow's registry."""
    context: tuple[str, ...]
    """The turns, oldest first."""
    top_k: int = 10
    """Candidates to show."""
    method: Method = "auto"
    """auto: exact or pruned, which give the same answer, whichever is faster here. approximate: needs a pool
    that was made with --embed.neighbours true."""
    certify: bool = False
    """Continue after an approximate answer until the answer is certified."""
    allow: tuple[str, ...] = ()
    """Only candidates with these ids."""
    deny: tuple[str, ...] = ()
    """No candidates with these ids."""
    where: tuple[str, ...] = ()
    """Only candidates with this value in a column: column=value. Several values of one column: any of
    them."""
    cross: str = ""
    """A cross-encoder that orders the best candidates anew."""
    cross_candidates: int = 100
    """Number of the best candidates that the cross-encoder reads."""
    precision: Precision = "auto"
    """The precision that encoders compute in; auto: bf16 where the hardware multiplies it."""
    device: str = "cpu"
    """cuda, or cuda:1 …: copy the vectors to this GPU and search them there; the models run there, too."""
    together: bool = False
    """Order them by the mean of the cross-encoder's score and the search's, not by the cross-encoder's
    alone."""

    def __post_init__(self) -> None:
        require(any(turn.strip() for turn in self.context), "context", self.context, "some text")
        require(self.top_k >= 1, "top_k", self.top_k, ">= 1")
        require(self.method in get_args(Method), "method", self.method, ", ".join(get_args(Method)))
        for condition in self.where:
            require("=" in condition[1:], "where", condition, "column=value")
        reads_enough = self.cross_candidates >= self.top_k
        require(not self.cross or reads_enough, "cross_candidates", self.cross_candidates,
                f"top_k {self.top_k} at least")  # fmt: skip
        require(bool(self.cross) or not self.together, "together", True, "false without cross")


def run(config: Config) -> program.Summary:
    model = open_artifact(model_uri(config.model), "ranker")
    pool = Pool.open(config.pool, device="" if config.device == "cpu" else config.device)
    pool.require_model(model)
    cross_model = open_artifact(model_uri(config.cross), "ranker") if config.cross else None

    import torch

    from pipeline.models import inference
    from pipeline.ranking.ranker import Ranker
    from pipeline.ranking.results import results_at
    from pipeline.search import rerank, top_rows, weights_of_vectors

    ranker = Ranker.load(model.uri, config.precision, device=config.device)
    attention = ranker.config.search_attention
    cross = None
    if cross_model:
        cross = rerank.load_cross_encoder(cross_model)
        inference.prepare(cross, torch.device(config.device), config.precision)
    options = (attention, config.method, _row_mask(config, pool), config.certify)
    count = config.cross_candidates if cross else config.top_k
    milliseconds: dict[str, float] = {}
    for _ in range(2):  # the first maps pages and allocates; the second is what a service takes
        with _timed("encode", milliseconds):
            vectors_1MD, mask_1M = ranker.encode_contexts([config.context])
        with _timed("search", milliseconds):
            hits = top_rows(pool, vectors_1MD, count, mask_1M, *options)
    results: list[dict[str, Any]] = []
    for hit in results_at(pool, hits.places[0], hits.scores[0]):
        weights = weights_of_vectors(pool, hit.index, vectors_1MD[0], mask_1M[0], attention)
        facts = {name: getattr(hit, name) for name in ("id", "score", "text", "columns")}
        results.append({**facts, "vectors": _heaviest(weights)})
    if cross:
        texts = [result["text"] for result in results]
        scale = ranker.module.loss_scale
        first = [scale * result["score"] for result in results] if config.together else None
        with _timed("cross", milliseconds):
            order = rerank.rerank(cross, config.context, texts, first)
        results = [{**results[entry.place], "cross_score": entry.score} for entry in order]
    results = results[: config.top_k]
    certified = bool(hits.certified[0])
    searched_on = "cpu" if pool.on_device is None else config.device
    on_device = "" if pool.on_device is None else f"on {config.device}, "
    for result in results:
        print(_line(result))
    print(f"certified: {'yes' if certified else 'no'}; {len(pool):,} candidates, "
          f"{on_device}computed in {pool.precision}, the context in {ranker.precision}; milliseconds: "
          f"{', '.join(f'{name} {value}' for name, value in milliseconds.items())}")  # fmt: skip
    return {
        "pool": describe(pool),
        "results": results,
        "certified": certified,
        "precision": ranker.precision,
        "searched_on": searched_on,
        "milliseconds": milliseconds,
    }


def _row_mask(config: Config, pool: Pool) -> Any:
    if not (config.allow or config.deny or config.where):
        return None
    from pipeline.search import filters

    where: dict[str, list[str]] = {}
    for condition in config.where:
        column, _, value = condition.partition("=")
        where.setdefault(column, []).append(value)
    row_mask = filters.select(pool, config.allow or None, config.deny, where)
    if not row_mask.any():
        values = "".join(
            f"; values of {column!r} are such as {', '.join(map(repr, examples))}"
            for column in where
            if (examples := filters.examples_of_values(pool, column))
        )
        raise BadInput(f"{config.pool}: allow, deny, where: no candidate is left{values}")
    return row_mask


def _heaviest(weights_M: Floats) -> dict[str, float]:
    """The vectors that carried most of a score, by their number, and their shares."""
    heaviest = (-weights_M).argsort(kind="stable")[:_SHOWN_VECTORS].tolist()
    shares = {str(number): float(weights_M[number]) for number in heaviest}
    return {number: round(share, 3) for number, share in shares.items() if share > 0}


@contextmanager
def _timed(step: str, milliseconds: dict[str, float]) -> Iterator[None]:
    began = time.perf_counter()
    yield
    milliseconds[step] = round((time.perf_counter() - began) * 1e3, 2)


def _line(result: dict[str, Any]) -> str:
    scores = [result[name] for name in ("cross_score", "score") if name in result]
    shares = result["vectors"].items()  # of one vector, a bi-encoder's, there is nothing to say
    vectors = " ".join(f"{name}:{share:.2f}" for name, share in shares) if len(shares) > 1 else ""
    numbers = "".join(f"{score:9.3f}" for score in scores)
    columns = "".join(f"  {name}={value}" for name, value in result["columns"].items())
    text = " ".join(result["text"].split())[:_SHOWN_CHARACTERS]
    return f"{numbers}  {result['id']:<24}  {vectors and f'{vectors:<24}  '}{text}{columns}"


if __name__ == "__main__":
    program.main(Config, run, "search")

"""Measures search over all documents of a collection, with and without a second stage."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jobs import embed_pool, program
from jobs.evaluate import models_by_name
from pipeline import progress, storage
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import NOT_IDENTITY, require, to_dict
from pipeline.engine import executors
from pipeline.engine.actors import HERE, Actors
from pipeline.engine.resources import best_device
from pipeline.evaluation import retrieval
from pipeline.evaluation.retrieval import DEPTH, METRICS, Collection
from pipeline.evaluation.significance import mean_interval
from pipeline.models.precision import Precision
from pipeline.pools.gate import GateConfig
from pipeline.pools.settings import EmbedConfig
from pipeline.registry import model_uri

if TYPE_CHECKING:
    from pipeline.ranking.ranker import Ranker

Search = Callable[[str], dict[str, float]]
"""A query to the best documents, best first: their scores by id."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Searches a collection in BEIR's format and prints nDCG@10, MAP, recall, MRR, R@1 and milliseconds.

    A query may have several right documents, with grades. Each model embeds all documents into a pool, which
    is searched exactly. The next run with the same --work embeds only what is new.
    """

    model: tuple[str, ...]
    """Rankers (of jobs.finetune or jobs.convert_model): bi, poly or convert. Each is a row of the table."""
    data: str
    """A folder with corpus.jsonl, queries.jsonl and qrels/."""
    split: str = "test"
    """The file of qrels/ without .tsv."""
    work: str = field(metadata=program.OUTPUT)
    """Folder for the pools."""
    second_stage: tuple[str, ...] = ()
    """Cross-encoders. Each orders the best documents of each model anew, in a further row."""
    second_stage_documents: int = 50
    """Number of documents that they read for a query."""
    together: bool = False
    """Add a row for the mean of a cross-encoder's scores and the model's."""
    baseline: bool = True
    """A row for BM25."""
    max_queries: int = 10_000
    """Ask at most this many queries, the first of the file."""
    precision: Precision = "auto"
    """The precision that encoders compute in; auto: bf16 where the hardware multiplies it."""
    json: str = field(default="", metadata=program.OUTPUT_FILE)
    """Write the table to this file too."""
    resources: Actors = field(default=HERE, metadata=NOT_IDENTITY)
    """The hardware that documents are embedded on; by default this process alone, without a cluster."""

    def __post_init__(self) -> None:
        require(bool(self.model), "model", self.model, "one ranker at least")
        has_stage = bool(self.second_stage) or not self.together
        require(has_stage, "together", True, "false without second_stage")
        for name in ("second_stage_documents", "max_queries"):
            require(getattr(self, name) >= 1, name, getattr(self, name), ">= 1")


@dataclass(frozen=True)
class Row:
    """A way to search, and how well it did."""

    name: str
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    """95 % intervals."""
    milliseconds: float
    """Median of a query, one at a time."""


def run(config: Config) -> program.Summary:
    """A row for each model, each pair with a second stage, and BM25; an MLflow run for each model."""
    models, stages = (_rankers(uris, config) for uris in (config.model, config.second_stage))
    for _, ranker in models.values():
        ranker.config.require_vectors()
    for _, ranker in stages.values():
        ranker.config.require_pairs()
    collection = retrieval.read_beir(config.data, config.split).first(config.max_queries)

    from pipeline import tracking

    tracking.connect()  # refuses a server that is away before the work
    rows = [_measure("bm25", _bm25(collection), collection)] if config.baseline else []
    documents = _write_documents(collection, config)
    for name, (model, ranker) in models.items():
        search = _pool_search(ranker, documents, collection, config)
        own_rows = [_measure(name, search, collection)]
        for stage_name, (_, stage) in stages.items():
            for together in (False, True) if config.together else (False,):
                count = config.second_stage_documents
                scale = ranker.module.loss_scale if together else None
                reranked = _reranked(search, stage, collection, count, scale)
                row_name = f"{name} + {stage_name}{', together' if together else ''}"
                own_rows.append(_measure(row_name, reranked, collection))
        rows += own_rows
        with tracking.start_without_artifact(
            "evaluate_search", storage.name_of(model.uri), {"model": model}, to_dict(config)
        ) as tracked:
            numbers = {
                metric if row.name == name else f"{row.name}/{metric}": value
                for row in own_rows
                for metric, value in {**row.metrics, "ms": row.milliseconds}.items()
            }
            tracked.log(numbers, wait=True)
    summary: program.Summary = {
        "data": config.data,
        "split": config.split,
        "documents": len(collection.documents),
        "queries": len(collection.queries),
        "left_out": dict(collection.left_out),
        "models": {model.uri: model.fingerprint for model, _ in (models | stages).values()},
        "table": {row.name: asdict(row) for row in rows},
    }
    print(_markdown(rows, collection, config))
    if config.json:
        storage.write_bytes(config.json, json.dumps(summary, indent=1).encode())
    return summary


def _rankers(uris: Sequence[str], config: Config) -> dict[str, tuple[Artifact, Ranker]]:
    """Models by the names of their rows."""
    from pipeline.models import inference
    from pipeline.ranking.ranker import Ranker

    loaded = models_by_name([open_artifact(model_uri(uri), "ranker") for uri in uris])
    rankers = dict[str, tuple[Artifact, Ranker]]()
    for name, (model, module) in loaded.items():
        inference.prepare(module, best_device(), config.precision)
        rankers[name] = model, Ranker(module, model.uri, model)
    return rankers


def _measure(name: str, search: Search, collection: Collection) -> Row:
    found, seconds = dict[str, list[str]](), list[float]()
    search(next(iter(collection.queries.values())))  # maps pages and allocates
    with progress.bar(name, len(collection.queries), unit="query") as bar:
        for query, text in collection.queries.items():
            began = time.perf_counter()
            ids = search(text)
            seconds.append(time.perf_counter() - began)
            # As BEIR has it; but own collections may count both queries and documents from 1.
            right = collection.grades[query]
            found[query] = [each for each in ids if each != query or each in right]
            bar.update()
    values = retrieval.metrics(found, collection.grades)
    return Row(
        name,
        {metric: float(values_N.mean()) for metric, values_N in values.items()},
        {metric: mean_interval(values_N) for metric, values_N in values.items()},
        round(1e3 * statistics.median(seconds), 2),
    )


def _write_documents(collection: Collection, config: Config) -> str:
    """A table of the documents, as `embed_pool` reads it."""
    documents = collection.documents
    table = pa.table({"id": list(documents), "text": list(documents.values())})
    file = storage.join(config.work, "documents.parquet")
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    storage.write_bytes(file, sink.getvalue())
    return file


def _pool_search(ranker: Ranker, documents: str, collection: Collection, config: Config) -> Search:
    """Embeds the documents into a pool, or finds it, and searches it."""
    from pipeline import Pool

    embed = embed_pool.Config(
        model=ranker.uri,
        candidates=(documents,),
        pools=config.work,
        name=f"by-{ranker.fingerprint[:12]}",
        embed=EmbedConfig(precision=config.precision),
        # The collection may be another one than the last time, with the same ids.
        gate=GateConfig(max_removed_share=1.0, max_changed_share=1.0),
        resources=config.resources,
    )
    with executors.in_this_process() if config.resources == HERE else nullcontext():
        pool = Pool.open(embed_pool.run(embed)["output"])
    # A pool keeps each text once, with its first id.
    ids_of_text = dict[str, list[str]]()
    for document, text in collection.documents.items():
        ids_of_text.setdefault(text, []).append(document)

    def search(query: str) -> dict[str, float]:
        results = ranker.search(pool, query, top_k=DEPTH + 1)
        return {name: found.score for found in results for name in ids_of_text[found.text]}

    return search


def _reranked(
    search: Search, stage: Ranker, collection: Collection, count: int, scale: float | None
) -> Search:
    """The first `count` documents in the order of a cross-encoder, and then the others. `scale`: the order
    is that of the mean of both scores, those of the search times this."""

    def search_again(query: str) -> dict[str, float]:
        found = search(query)
        first = list(found)[:count]
        texts = [collection.documents[document] for document in first]
        ranked = stage.rank(query, texts, top_k=count)
        scores = {first[result.index]: result.score for result in ranked}
        if scale is not None:
            means = {name: (scores[name] + scale * found[name]) / 2 for name in first}
            scores = dict(sorted(means.items(), key=lambda pair: -pair[1]))
        return scores | {document: found[document] for document in list(found)[count:]}

    return search_again


def _bm25(collection: Collection) -> Search:
    from pipeline.evaluation.baselines import BM25

    texts, ids = list(collection.documents.values()), list(collection.documents)
    scores_of = BM25.fit(texts).scorer(texts)

    def search(query: str) -> dict[str, float]:
        scores_T = scores_of(query)
        best = np.argsort(-scores_T, kind="stable")[: DEPTH + 1].tolist()
        return {ids[place]: float(scores_T[place]) for place in best if scores_T[place] > 0}

    return search


def _markdown(rows: Sequence[Row], collection: Collection, config: Config) -> str:
    first, *others = METRICS
    header = ["search", first, f"95 % of {first}", *others, "ms"]
    lines = [header, ["---", *("---:" for _ in header[1:])]]
    for row in rows:
        low, high = row.intervals[first]
        numbers = [f"{row.metrics[metric]:.3f}" for metric in others]
        lines.append([row.name, f"{row.metrics[first]:.3f}", f"{low:.3f} to {high:.3f}", *numbers,
                      f"{row.milliseconds:g}"])  # fmt: skip
    notes = [
        f"{len(collection.queries):,} queries of {config.split}, {len(collection.documents):,} documents",
        *(f"left out: {count:,} {reason}" for reason, count in collection.left_out.items()),
    ]
    if config.second_stage:
        notes.append(f"a second stage orders the first {config.second_stage_documents} documents")
    return "\n".join([*(f"| {' | '.join(cells)} |" for cells in lines), "", *notes])


if __name__ == "__main__":
    program.main(Config, run, "evaluate_search")

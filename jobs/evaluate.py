"""How well a ranker finds the right candidate, beside TF-IDF and chance."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import mlflow
import pyarrow.parquet as pq

from jobs import program
from pipeline import storage, tracking
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import require, to_dict
from pipeline.evaluation.baselines import Chance, TfIdf
from pipeline.evaluation.metrics import summarise
from pipeline.evaluation.ranking import Question, RankerScorer, Scorer, Source, questions, ranks
from pipeline.models import inference
from pipeline.models.ranker import load_ranker

_MAX_TFIDF_TEXTS = 200_000


@dataclass(frozen=True, kw_only=True)
class Config:
    """Ranks each example's candidates and prints R@k/C and MRR.

    Candidates are shuffled, and ties count against the scorer.
    """

    model: tuple[str, ...]
    """Rankers (of jobs.finetune); each is a row of the table."""
    corpus: str
    """A corpus (of jobs.prepare_corpus)."""
    split: Literal["train", "valid", "test"] = "valid"
    """Which part of it."""
    source: Source = "given"
    """given: the corpus' own candidates; sampled: the response among other responses."""
    candidates: int = 20
    """C: candidates of an example, the right one among them."""
    recall_at: tuple[int, ...] = (1, 2, 5, 10)
    """The k of R@k/C."""
    max_examples: int = 100_000
    """At most so many, drawn at random."""
    baselines: bool = True
    """Rows for TF-IDF (weights from the train split) and chance."""
    json: str = ""
    """Write the table to this file too."""
    seed: int = 0
    """Of the draw and of the candidates' order."""

    def __post_init__(self) -> None:
        require(self.candidates >= 2, "candidates", self.candidates, ">= 2")
        require(self.max_examples >= 1, "max_examples", self.max_examples, ">= 1")
        require(all(k >= 1 for k in self.recall_at), "recall_at", self.recall_at, "numbers >= 1")


def run(config: Config) -> program.Summary:
    corpus = open_artifact(config.corpus, "corpus")
    models = [open_artifact(uri, "ranker") for uri in config.model]
    asked = questions(
        corpus, config.split, config.source, config.candidates, config.max_examples, config.seed
    )
    table: dict[str, dict[str, float]] = {}
    if config.baselines:
        table["chance"] = _measure(Chance(config.seed), asked, config)
        known = list(_train_texts(corpus)) or [q.candidates[q.label] for q in asked]
        table["tf-idf"] = _measure(TfIdf.fit(known), asked, config)
    for model in models:
        ranker = load_ranker(model.local())
        ranker.to(inference.best_device())
        name: str = ranker.config.architecture
        name = name if name not in table else f"{name} {model.fingerprint[:8]}"
        table[name] = _measure(RankerScorer(ranker), asked, config)
        with tracking.start_evaluation(model, corpus, to_dict(config)) as tracked:
            tracked.log({metric.replace("@", "_at_"): n for metric, n in table[name].items()})
            mlflow.log_dict(table, "table.json")
    print(markdown(table))
    summary: program.Summary = {
        "examples": len(asked),
        "corpus": corpus.uri,
        "split": config.split,
        "models": {model.uri: model.fingerprint for model in models},
        "table": table,
    }
    if config.json:
        storage.write_bytes(config.json, json.dumps(summary, indent=1).encode())
    return summary


def markdown(table: dict[str, dict[str, float]]) -> str:
    """One row per scorer."""
    names = list(next(iter(table.values())))
    lines = [["scorer", *names], ["---", *("---:" for _ in names)]]
    lines += [[row, *(f"{table[row][name]:.3f}" for name in names)] for row in table]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _measure(scorer: Scorer, asked: list[Question], config: Config) -> dict[str, float]:
    return summarise(ranks(scorer, asked), config.candidates, config.recall_at)


def _train_texts(corpus: Artifact) -> Iterator[str]:
    """The responses that TF-IDF's weights come from."""
    left = _MAX_TFIDF_TEXTS
    for uri in corpus.files("train/", ".parquet"):
        with storage.open_input(uri) as stream:
            texts = pq.read_table(stream, columns=["response"])["response"]
        yield from texts[:left].to_pylist()
        left -= min(left, len(texts))


if __name__ == "__main__":
    program.main(Config, run, "evaluate")

"""Rankers' scores of a corpus' candidates, once, for others to learn from.

    train/….parquet      the corpus' rows, in their order, with `teacher_scores` list<float>: one for
                         each of `candidates`, the mean of the teachers'; null where a row has none
    valid/…, test/…      as they are, `teacher_scores` null

Scores are what a softmax over candidates takes, so their mean stands for the geometric mean of the
teachers' distributions (Hinton et al., 2015, section 1). Each shard is one task.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import cost, storage
from pipeline.actors import Actors
from pipeline.artifact import Artifact, corpora_of
from pipeline.config import require
from pipeline.drafts import Draft
from pipeline.evaluation.ranking import own_scores
from pipeline.models.ranker import Ranker, load_ranker
from pipeline.models.settings import SETTINGS, RankerConfig, parse_settings
from pipeline.records import TaskRecord
from pipeline.resources import best_device
from pipeline.shards import Work, run_tasks_on_actors
from pipeline.training.batches import ExampleRow
from pipeline.training.examples import TEACHER
from pipeline.training.settings import TeachingConfig

# Rows that are scored together, their texts sorted by length and each candidate embedded once: 7,316 of
# ConvAI2, 20 candidates each of 6,965 in all, embed 101,695 by 256 rows.
# Contexts of poly-360, d = 768, take 1.1 GB.
_AT_ONCE = 1024
_MEASURED_ROWS = 64
_ADDED = pa.field(TEACHER, pa.list_(pa.float32()))


def score(
    draft: Draft,
    corpus: Artifact,
    teachers: Sequence[Artifact],
    config: TeachingConfig,
    actors: Actors,
) -> list[TaskRecord]:
    """Makes the shards; returns their records."""
    by_shard = teachers_of(corpus, teachers, config)
    tasks = {
        path.replace("/", "-"): {"uri": storage.join(corpus.uri, path), "path": path,
                                 "teachers": by_shard.get(path, [])}
        for split in ("train", "valid", "test")
        for path in corpus.paths(f"{split}/", ".parquet")
    }  # fmt: skip

    def make() -> Work[TaskRecord]:
        device = best_device()
        rankers = [load_ranker(teacher.local()).to(device) for teacher in teachers]

        def work(draft: Draft, name: str, shard: dict[str, Any]) -> TaskRecord:
            return _score_shard(draft, shard, [rankers[at] for at in shard["teachers"]], config)

        return work

    return run_tasks_on_actors(draft, tasks, make, "score candidates", TaskRecord, actors)


def estimate(
    corpus: Artifact, teachers: Sequence[Artifact], config: TeachingConfig
) -> cost.Estimate:
    """Scores a few rows of the first shard, here, to measure a rate."""
    device = best_device()
    rankers = [load_ranker(teacher.local()).to(device) for teacher in teachers]
    files = corpus.files("train/", ".parquet")
    with storage.open_input(files[0]) as stream:
        rows = next(pq.ParquetFile(stream).iter_batches(_MEASURED_ROWS)).to_pylist()
    bare = [row for row in rows if not row["candidates"]]
    texts = list(dict.fromkeys(row["response"] for row in rows))
    began = time.perf_counter()
    if config.random_candidates and len(texts) > 1:
        _add_candidates(bare, texts, rankers, config, np.random.default_rng(config.seed))
    asked = [row for row in rows if row["candidates"]]
    _add_scores(asked, rankers, config.batch_tokens)
    scored = corpus.rows("train/") * len(asked) / len(rows)
    hours = (time.perf_counter() - began) / max(len(asked), 1) * scored / 3600
    sizes = [entry["bytes"] for entry in corpus.manifest["files"]]
    return cost.measured_here(
        hours,
        f"{len(asked)} rows",
        input_files=len(sizes),
        input_bytes=sum(sizes),
        rows=corpus.rows("train/"),
        tasks=len(sizes),
        requests=cost.reads(sizes) + 3 * len(sizes),
    )


def teachers_of(
    corpus: Artifact, teachers: Sequence[Artifact], config: TeachingConfig
) -> dict[str, list[int]]:
    """Which teachers score each shard of train. Raises BadInput for a shard that none does, or none
    that can tell the hardest."""
    paths, everyone = corpus.paths("train/", ".parquet"), list(range(len(teachers)))
    found = dict.fromkeys(paths, everyone)
    if config.held_out:
        for teacher in teachers:
            require(bool(corpora_of(teacher) & corpora_of(corpus)), "teaching.held_out", True,
                    f"false, as {teacher.uri} was trained on another corpus' files")  # fmt: skip
        unseen = [set(teacher.manifest.get("held_out", ())) for teacher in teachers]
        found = {path: [at for at in everyone if path in unseen[at]] for path in paths}
    dual = [_settings(teacher).has_vectors for teacher in teachers]
    for path, some in found.items():
        require(bool(some), "teaching.held_out", True,
                f"false, as no teacher held out {path} (finetune.folds, finetune.held_out)")  # fmt: skip
        require(config.hardest_of == 0 or any(dual[at] for at in some), "teaching.hardest_of",
                config.hardest_of, f"0, as no teacher of {path} is a bi- or poly-encoder")  # fmt: skip
    return found


def _settings(teacher: Artifact) -> RankerConfig:
    uri = storage.join(teacher.uri, SETTINGS)
    return parse_settings(storage.read_bytes(uri), uri)


def _score_shard(
    draft: Draft, shard: dict[str, Any], rankers: Sequence[Ranker], config: TeachingConfig
) -> TaskRecord:
    with storage.open_input(shard["uri"]) as stream:
        table = pq.read_table(stream)
    split = shard["path"].split("/")[0]
    counts: Counter[str] = Counter({f"examples.{split}": table.num_rows})
    rows = table.to_pylist()
    if split == "train":
        draw = np.random.default_rng([config.seed, *shard["path"].encode()])
        texts = list(dict.fromkeys(row["response"] for row in rows))
        bare = [row for row in rows if not row["candidates"]]
        if config.random_candidates == 0 or len(texts) < 2:
            bare = []
        for start in range(0, len(bare), _AT_ONCE):
            _add_candidates(bare[start : start + _AT_ONCE], texts, rankers, config, draw)
        asked = [row for row in rows if row["candidates"]]
        for start in range(0, len(asked), _AT_ONCE):
            _add_scores(asked[start : start + _AT_ONCE], rankers, config.batch_tokens)
        counts["scored"] = len(asked)
        counts["without_candidates"] = len(rows) - len(asked)
    schema = table.schema.append(_ADDED) if TEACHER not in table.schema.names else table.schema
    scored = pa.Table.from_pylist([{TEACHER: None, **row} for row in rows], schema=schema)
    return TaskRecord(files=[draft.write_table(shard["path"], scored)], counts=dict(counts))


def _add_candidates(
    rows: list[ExampleRow],
    texts: Sequence[str],
    rankers: Sequence[Ranker],
    config: TeachingConfig,
    draw: np.random.Generator,
) -> None:
    """Gives each row its response at a random place among others of the shard's, `texts`."""
    count = config.random_candidates
    drawn = max(count, config.hardest_of)
    each = []
    for row in rows:
        taken = draw.choice(len(texts), size=min(drawn + 1, len(texts)), replace=False)
        each.append([texts[at] for at in taken if texts[at] != row["response"]][:drawn])
    if config.hardest_of:
        dual = next(ranker for ranker in rankers if ranker.config.has_vectors)
        contexts = [row["context"] for row in rows]
        scores = own_scores(dual, contexts, each, config.batch_tokens)
        best = [np.argsort(-some_C, kind="stable")[:count].tolist() for some_C in scores]
        each = [[others[at] for at in some] for others, some in zip(each, best, strict=True)]
    for row, others in zip(rows, each, strict=True):
        label = int(draw.integers(len(others) + 1))
        row["candidates"] = [*others[:label], row["response"], *others[label:]]
        row["label"] = label


def _add_scores(rows: list[ExampleRow], rankers: Sequence[Ranker], batch_tokens: int) -> None:
    contexts = [row["context"] for row in rows]
    candidates = [row["candidates"] for row in rows]
    each = [
        own_scores(ranker, contexts, candidates, batch_tokens, as_in_loss=True)
        for ranker in rankers
    ]
    for row, *given_C in zip(rows, *each, strict=True):
        row[TEACHER] = np.mean(given_C, axis=0).tolist()

"""Adds the scores or vectors of teachers to a corpus, for other rankers to learn from.

    train/….parquet      the corpus' rows, in their order, and beside them
        over candidates  `teacher_scores` list<float>: one for each of `candidates`, the mean of the
                         teachers'; null where a row has none
        over batch       `teacher_context` and `teacher_response`, a vector each (TEACHER_CONTEXT in
                         data.py)
    valid/…, test/…      as they are, these columns null

Scores are logits of a softmax over candidates, so their mean stands for the geometric mean of the teachers'
distributions (Hinton et al., 2015, section 1). Each shard is one task.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from pipeline import cost, storage
from pipeline.artifact import Artifact, corpora_of
from pipeline.config import require
from pipeline.engine.actors import Actors
from pipeline.engine.attempts import Work
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord
from pipeline.engine.resources import best_device
from pipeline.engine.run import run_tasks_on_actors
from pipeline.evaluation.ranking import own_scores
from pipeline.models import inference
from pipeline.models.ranker import Ranker, load_ranker
from pipeline.models.settings import read_settings
from pipeline.training.data import (
    TEACHER,
    TEACHER_COLUMNS,
    TEACHER_CONTEXT,
    TEACHER_RESPONSE,
    ExampleRow,
    RightAnswers,
    right_answers,
)
from pipeline.training.guide import highest_allowed
from pipeline.training.settings import TeachingConfig

# Rows that are scored together, their texts sorted by length and each candidate embedded once: 7,316 of
# ConvAI2, 20 candidates each of 6,965 in all, embed 101,695 by 256 rows.
# Contexts of poly-360, d = 768, take 1.1 GB.
_ROWS_AT_ONCE = 1024
_MEASURED_ROWS = 64
RowT = TypeVar("RowT")
_TYPES = {
    TEACHER: pa.list_(pa.float32()),
    TEACHER_CONTEXT: pa.binary(),
    TEACHER_RESPONSE: pa.binary(),
}


def score(
    draft: Draft,
    corpus: Artifact,
    teachers: Sequence[Artifact],
    config: TeachingConfig,
    actors: Actors,
) -> list[TaskRecord]:
    """Writes the shards with scores or vectors; returns their records."""
    teachers_of_shard = teachers_of(corpus, teachers, config)
    tasks = {
        path.replace("/", "-"): {"uri": storage.join(corpus.uri, path), "path": path,
                                 "teachers": teachers_of_shard.get(path, [])}
        for split in ("train", "valid", "test")
        for path in corpus.paths(f"{split}/", ".parquet")
    }  # fmt: skip

    def make() -> Work[TaskRecord]:
        rankers = _load(teachers)

        def work(draft: Draft, name: str, shard: dict[str, Any]) -> TaskRecord:
            return _score_shard(draft, shard, [rankers[n] for n in shard["teachers"]], config)

        return work

    return run_tasks_on_actors(draft, tasks, make, "score candidates", TaskRecord, actors)


def _load(teachers: Sequence[Artifact]) -> list[Ranker]:
    device = best_device()
    return [inference.prepare(load_ranker(teacher.local()), device) for teacher in teachers]


def estimate(
    corpus: Artifact, teachers: Sequence[Artifact], config: TeachingConfig
) -> cost.Estimate:
    """Estimates the cost: scores a few rows of the first shard in this process to measure a rate."""
    rankers = _load(teachers)
    files = corpus.files("train/", ".parquet")
    with storage.open_input(files[0]) as stream:
        rows = next(pq.ParquetFile(stream).iter_batches(_MEASURED_ROWS)).to_pylist()
    began = time.perf_counter()
    scored_rows = _teach(rows, rankers, config, np.random.default_rng(config.seed))
    expected_rows = corpus.rows("train/") * len(scored_rows) / len(rows)
    hours = (time.perf_counter() - began) / max(len(scored_rows), 1) * expected_rows / 3600
    sizes = [entry["bytes"] for entry in corpus.manifest["files"]]
    return cost.measured_here(
        hours,
        f"{len(scored_rows)} rows",
        input_files=len(sizes),
        input_bytes=sum(sizes),
        rows=corpus.rows("train/"),
        tasks=len(sizes),
        requests=cost.reads(sizes) + 3 * len(sizes),
    )


def teachers_of(
    corpus: Artifact, teachers: Sequence[Artifact], config: TeachingConfig
) -> dict[str, list[int]]:
    """The teachers that score each shard of train, by their numbers.

    Raises BadInput for a shard that no teacher scores, or no teacher that can choose the hardest
    candidates, and for teachers over the batch whose scores are not products of two vectors.
    """
    paths, all_numbers = corpus.paths("train/", ".parquet"), list(range(len(teachers)))
    teachers_of_path = dict.fromkeys(paths, all_numbers)
    if config.held_out:
        for teacher in teachers:
            require(bool(corpora_of(teacher) & corpora_of(corpus)), "teaching.held_out", True,
                    f"false, as {teacher.uri} was trained on another corpus' files")  # fmt: skip
        unseen_paths = [set(teacher.manifest.get("held_out", ())) for teacher in teachers]
        teachers_of_path = {
            path: [number for number in all_numbers if path in unseen_paths[number]]
            for path in paths
        }
    settings = [read_settings(teacher.uri) for teacher in teachers]
    if config.over == "batch":
        require(len(teachers) == 1, "teacher", len(teachers), "one, with teaching.over 'batch'")
        count = settings[0].vectors_per_context
        require(count == 1, "teaching.over", "batch", f"candidates with {teachers[0].uri}, whose contexts "
                f"have {count} vectors; 1 is needed, as of a bi-encoder")  # fmt: skip
    is_dual = [ranker.has_vectors for ranker in settings]
    for path, numbers in teachers_of_path.items():
        require(bool(numbers), "teaching.held_out", True,
                f"false, as no teacher held out {path} (finetune.folds, finetune.held_out)")  # fmt: skip
        require(config.hardest_of == 0 or any(is_dual[number] for number in numbers), "teaching.hardest_of",
                config.hardest_of, f"0, as no teacher of {path} is a bi- or poly-encoder")  # fmt: skip
    return teachers_of_path


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
        scored_rows = _teach(rows, rankers, config, draw)
        counts["scored"] = len(scored_rows)
        if config.over == "candidates":
            counts["without_candidates"] = len(rows) - len(scored_rows)
    schema = table.schema
    for name in TEACHER_COLUMNS[config.over]:
        if name in schema.names:
            schema = schema.remove(schema.get_field_index(name))
        schema = schema.append(pa.field(name, _TYPES[name]))
    scored_table = pa.Table.from_pylist(rows, schema=schema)
    return TaskRecord(files=[draft.write_table(shard["path"], scored_table)], counts=dict(counts))


def _teach(
    rows: list[ExampleRow],
    rankers: Sequence[Ranker],
    config: TeachingConfig,
    draw: np.random.Generator,
) -> list[ExampleRow]:
    """Adds the scores or vectors to these rows of a shard; returns the rows that have them now."""
    if config.over == "batch":
        for part in _parts(rows):
            _add_vectors(part, rankers[0], config.batch_tokens)
        return rows
    texts = list(dict.fromkeys(row["response"] for row in rows))
    if config.random_candidates and len(texts) > 1:
        answers = right_answers(rows, config.same_group_negatives)
        pairs = [pair for pair in zip(rows, answers, strict=True) if not pair[0]["candidates"]]
        for pairs_part in _parts(pairs):
            _add_candidates(pairs_part, texts, rankers, config, draw)
    scored_rows = [row for row in rows if row["candidates"]]
    for part in _parts(scored_rows):
        _add_scores(part, rankers, config.batch_tokens)
    return scored_rows


def _parts(rows: list[RowT]) -> Iterator[list[RowT]]:
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        yield rows[start : start + _ROWS_AT_ONCE]


def _add_vectors(rows: list[ExampleRow], ranker: Ranker, batch_tokens: int) -> None:
    contexts, texts = ([row[name] for row in rows] for name in ("context", "response"))
    vectors_BMD, _ = inference.context_vectors(ranker, contexts, batch_tokens)
    contexts_BD = ranker.loss_scale * vectors_BMD[:, 0]
    responses_BD = inference.candidate_vectors(ranker, texts, batch_tokens)
    for name, vectors in ((TEACHER_CONTEXT, contexts_BD), (TEACHER_RESPONSE, responses_BD)):
        for row, vector in zip(rows, vectors.numpy().astype("<f2"), strict=True):
            row[name] = vector.tobytes()


def _add_candidates(
    rows_with_answers: list[tuple[ExampleRow, RightAnswers]],
    texts: Sequence[str],
    rankers: Sequence[Ranker],
    config: TeachingConfig,
    draw: np.random.Generator,
) -> None:
    """Gives each row its response at a random place among others of the shard's, `texts`, that are wrong."""
    count = config.random_candidates
    draw_count = max(count, config.hardest_of)
    rows = [row for row, _ in rows_with_answers]
    negatives_of_rows = []
    for _, answers in rows_with_answers:
        size = min(draw_count + len(answers), len(texts))
        places = draw.choice(len(texts), size=size, replace=False)
        wrong = [texts[place] for place in places if texts[place] not in answers]
        negatives_of_rows.append(wrong[:draw_count])
    if config.hardest_of:
        dual = next(ranker for ranker in rankers if ranker.config.has_vectors)
        contexts = [row["context"] for row in rows]
        pairs = zip(rows, negatives_of_rows, strict=True)
        candidates = [[row["response"], *negatives] for row, negatives in pairs]
        scores = own_scores(dual, contexts, candidates, config.batch_tokens)
        for (right_score, *wrong_scores), negatives in zip(scores, negatives_of_rows, strict=True):
            limit = highest_allowed(config, torch.tensor(right_score)).item()
            hardest = sorted(zip(wrong_scores, negatives, strict=True), key=lambda pair: -pair[0])
            negatives[:] = [text for score, text in hardest if score <= limit][:count]
    for row, negatives in zip(rows, negatives_of_rows, strict=True):
        label = int(draw.integers(len(negatives) + 1))
        row["candidates"] = [*negatives[:label], row["response"], *negatives[label:]]
        row["label"] = label


def _add_scores(rows: list[ExampleRow], rankers: Sequence[Ranker], batch_tokens: int) -> None:
    contexts, candidates = ([row[name] for row in rows] for name in ("context", "candidates"))
    scores_of_rankers = [
        own_scores(ranker, contexts, candidates, batch_tokens, as_in_loss=True)
        for ranker in rankers
    ]
    for row, *scores_C in zip(rows, *scores_of_rankers, strict=True):
        row[TEACHER] = np.mean(scores_C, axis=0).tolist()

"""A small table of questions and answers: how often the right answer comes first for new questions.

The tables are made of labelled texts: an intent is an answer, its name is the answer's text, some of its
texts are the table's questions, and others are asked. So the asked questions are paraphrases that no training
has seen, while the answers are known. All answers of the table are ranked. The commands are those of README.
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

import numpy as np

from jobs.benchmark import Config
from jobs.benchmarks.inputs import minilm_folder
from jobs.benchmarks.measure import BenchmarkRow, run_job
from pipeline import Pool, Ranker
from pipeline.classification.texts import Dataset, Labelled, ReadConfig, draw, labels_of, read_texts
from pipeline.config import require
from pipeline.corpora.raw import Reading
from pipeline.evaluation.significance import mean_interval

_TABLES = {"banking77": (8, 8), "clinc150": (4, 6)}
"""Questions of an answer that the table has, and that are asked."""
_ANSWERS = {"small": 20, "full": 1_000}
_RECIPE = Path(__file__).parents[1] / "configs" / "finetune" / "pairs.yaml"


def measure(config: Config, work: Path) -> Iterator[BenchmarkRow]:
    encoder = minilm_folder()
    untrained = work / "untrained"
    shutil.rmtree(untrained, ignore_errors=True)
    run_job("convert_model", "--model", encoder, "--output", untrained)
    for dataset, counts in _TABLES.items():
        source = Path(config.data, "intent", dataset)
        require(source.is_dir(), "data", config.data, f"a folder with intent/{dataset}")
        folder = work / dataset
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        known, asked = _draw(source, dataset, *counts, _ANSWERS[config.size])
        table = _write(known, folder / "table.csv")
        run_job(
            "prepare_corpus", "--format", "pairs", "--input", table, "--output", folder / "corpus"
        )
        run_job("finetune", "--config", _RECIPE, "--corpus", folder / "corpus", "--encoder", encoder,
                "--output", folder / "trained")  # fmt: skip
        note = f"{len(known):,} pairs, {len(labels_of(known)):,} answers, {len(asked):,} new questions."
        for name, model, options in (
            ("untrained_texts_alone", untrained, ()),
            ("untrained", untrained, ("--embed.context-column", "question")),
            ("trained", folder / "trained", ("--embed.context-column", "question")),
        ):
            run_job("embed_pool", "--model", model, "--candidates", table, "--embed.text-column", "answer",
                    "--embed.id-column", "", "--pools", folder, "--name", name, *options)  # fmt: skip
            right_N = _is_right(Ranker.load(model), Pool.open(str(folder / name)), asked)
            low, high = mean_interval(right_N)
            unit = f"R@1 ({low:.3f} to {high:.3f})"
            yield BenchmarkRow.alone(f"tables.{dataset}.{name}", float(right_N.mean()), unit, note)


def _draw(
    source: Path, dataset: str, known_count: int, asked_count: int, answers: int
) -> tuple[list[Labelled], list[Labelled]]:
    """The table's questions, and those that are asked, none of which the table has."""
    texts = read_texts([str(source)], ReadConfig(dataset=cast(Dataset, dataset)), Reading())
    inside = {
        row: None for row in (*texts.train, *texts.tested, *texts.threshold) if not row.out_of_scope
    }
    chosen = set(labels_of(list(inside))[:answers])
    rows = [row for row in inside if row.intent in chosen]
    known = draw(rows, known_count, seed=0)
    questions = {row.text for row in known}
    drawn = draw(rows, known_count + asked_count, seed=0)
    return known, [row for row in drawn if row.text not in questions]


def _write(rows: Iterable[Labelled], file: Path) -> Path:
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(("question", "answer"))
        writer.writerows((row.text, _answer(row)) for row in rows)
    return file


def _answer(row: Labelled) -> str:
    return row.intent.replace("_", " ").capitalize() + "."


def _is_right(ranker: Ranker, pool: Pool, asked: Iterable[Labelled]) -> np.ndarray:
    """[N] float64, 1 where the right answer is ranked first of all answers."""
    first = ((ranker.search(pool, row.text, top_k=1)[0].text, _answer(row)) for row in asked)
    return np.array([found == right for found, right in first], np.float64)

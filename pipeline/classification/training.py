"""Trains and tests heads on texts with vectors. Finished work is marked, so a killed job does not repeat
it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pipeline import cost, storage
from pipeline.classification import encoder, evaluation, head
from pipeline.classification.classifier import Classifier
from pipeline.classification.settings import PLOT, EncodeConfig, HeadConfig
from pipeline.classification.texts import Labelled, Texts, draw, labels_of
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord
from pipeline.engine.resources import best_device
from pipeline.models.sources import Source
from pipeline.storage import npy

_VECTORS = "_vectors.npy"
_MEASURED_TEXTS = 256


@dataclass(frozen=True, kw_only=True)
class HeadRecord(TaskRecord):
    """One head that was trained and tested."""

    seed: int
    numbers: dict[str, float]
    """The result of `evaluation.numbers`."""
    threshold: float
    seconds: float
    details: dict[str, Any] = field(default_factory=dict)
    """The result of `evaluation.report` for the first head."""


@dataclass(frozen=True)
class Vectors:
    """One vector of each text."""

    place_of_text: Mapping[str, int]
    vectors_NF: Tensor

    def of(self, rows: Sequence[Labelled]) -> Tensor:
        """[rows, F]"""
        return self.vectors_NF[[self.place_of_text[row.text] for row in rows]]


def encode(out: Draft, texts: Texts, source: Source, config: EncodeConfig) -> Vectors:
    """The vectors of all texts, each text once; a resumed job reads them."""
    distinct = _distinct_texts(texts)
    device = best_device()
    if "vectors" not in out.finished_tasks():
        began = time.perf_counter()
        model = encoder.load(source.local(), config, device)
        vectors = model.vectors(distinct).numpy()
        storage.write_bytes(out.path(_VECTORS), npy.to_bytes(vectors))
        out.mark("vectors", TaskRecord(counts={"texts": len(distinct)}))
        print(f"{len(distinct):,} texts have vectors after {time.perf_counter() - began:.1f} s "
              f"({model.ranker.precision})", flush=True)  # fmt: skip
    vectors_NF = torch.from_numpy(npy.from_bytes(storage.read_bytes(out.path(_VECTORS))))
    return Vectors({text: place for place, text in enumerate(distinct)}, vectors_NF.to(device))


def estimate(texts: Texts, source: Source, config: EncodeConfig) -> cost.Estimate:
    """Extrapolates from the vectors of a sample, made here; heads train in seconds."""
    distinct = _distinct_texts(texts)
    model = encoder.load(source.local(), config, best_device())
    sample = distinct[:: max(1, len(distinct) // _MEASURED_TEXTS)][:_MEASURED_TEXTS]
    model.vectors(sample[:1])  # the first allocates
    began = time.perf_counter()
    model.vectors(sample)
    rate = len(sample) / (time.perf_counter() - began)
    hours = len(distinct) / rate / 3600
    return cost.measured_here(hours, f"{rate:,.0f} texts a second", rows=len(distinct))


def _distinct_texts(texts: Texts) -> list[str]:
    """The texts that get a vector."""
    rows = (*texts.train, *texts.tested, *texts.threshold)
    return list(dict.fromkeys(row.text for row in rows))


@dataclass(frozen=True)
class TrainingPlan:
    """The settings that all heads of a job share."""

    encode: EncodeConfig
    head: HeadConfig
    shots: int
    """Texts of every intent; 0: all."""
    first_seed: int
    """The seed of the head whose files go into the output."""
    encoder: Mapping[str, Any]
    """The manifest's reference to the encoder."""


def train(out: Draft, texts: Texts, vectors: Vectors, plan: TrainingPlan, seed: int) -> HeadRecord:
    """Trains a head and tests it. A resumed job reads the finished heads."""
    task, finished = f"head-{seed}", out.finished_tasks()
    if task in finished:
        return finished.record(task, HeadRecord)
    began, labels = time.perf_counter(), labels_of(texts.train)
    train_rows = draw(texts.train, plan.shots, seed) if plan.shots else texts.train
    place_of_label = {label: place for place, label in enumerate(labels)}
    labels_N = torch.tensor([place_of_label[row.intent] for row in train_rows])
    vectors_NF = vectors.of(train_rows)
    labels_N = labels_N.to(vectors_NF.device)
    trained_head = head.fit(vectors_NF, labels_N, len(labels), plan.head, seed).cpu()
    encoder_reference = str(plan.encoder["uri"]), str(plan.encoder["fingerprint"])
    classifier = Classifier(trained_head, labels, 0.0, plan.encode, plan.head, *encoder_reference)
    if texts.threshold:
        probabilities = classifier.probabilities(vectors.of(texts.threshold).cpu())
        calibration = evaluation.answers(texts.threshold, probabilities, labels)
        classifier = replace(classifier, threshold=evaluation.best_threshold(calibration))
    test_probabilities = classifier.probabilities(vectors.of(texts.tested).cpu())
    answers = evaluation.answers(texts.tested, test_probabilities, labels)
    numbers = evaluation.numbers(answers, classifier.threshold)
    record = HeadRecord(
        seed=seed,
        numbers=numbers,
        threshold=classifier.threshold,
        seconds=round(time.perf_counter() - began, 1),
        counts={
            "intents": len(labels),
            "train_examples": len(train_rows),
            "examples": len(answers.true_N),
            "out_of_scope_examples": len(answers.outside_M),
        },
    )
    if seed == plan.first_seed:
        files = {**classifier.files(), PLOT: evaluation.plot(answers, labels)}
        entries = [out.write_file(name, data) for name, data in files.items()]
        record = replace(record, files=entries, details=evaluation.report(answers, labels))
    out.mark(task, record)
    return record


def means(records: Sequence[HeadRecord]) -> dict[str, float]:
    """The heads' numbers, averaged."""
    names = records[0].numbers
    return {name: statistics.fmean(record.numbers[name] for record in records) for name in names}


def report(texts: Texts, records: Sequence[HeadRecord], plan: TrainingPlan) -> dict[str, Any]:
    """The content of `report.json`: means over the heads, and the details of the first head."""
    first_record = records[0]
    accuracies = [record.numbers["accuracy"] for record in records]
    return {
        **means(records),
        "accuracy_std": statistics.stdev(accuracies) if len(records) > 1 else None,
        **first_record.counts,
        "asked_split": texts.asked_split,
        "shots": plan.shots or "full",
        "encoder": {name: plan.encoder[name] for name in ("uri", "fingerprint")},
        "threshold": first_record.threshold,
        "heads": [
            {"seed": record.seed, **record.numbers, "seconds": record.seconds} for record in records
        ],
        "dropped": dict(texts.dropped),
        "notes": list(texts.notes),
        **first_record.details,
    }

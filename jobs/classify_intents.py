"""Labelled texts and a frozen encoder to a classifier of intents, and how well it does."""

from __future__ import annotations

import io
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jobs import program
from pipeline import storage
from pipeline.artifact import Artifact, Draft, draft
from pipeline.classification import texts as intent_texts
from pipeline.classification.settings import EncodeConfig, HeadConfig
from pipeline.classification.texts import (
    Labelled,
    ReadConfig,
    Texts,
    draw,
    labels_of,
    parse_shots,
)
from pipeline.config import NOT_IDENTITY, require
from pipeline.corpora.raw import Reading
from pipeline.records import TaskRecord

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.models.sources import Source

_VECTORS = "_vectors.npy"
_PROGRESS_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Config:
    """Trains a classifier on the vectors of a frozen encoder, and prints its accuracy.

    It is asked the test split of the input, else the valid split; of one file alone a tenth of every
    intent's texts. `pipeline/classification/README.md` has the rules and the numbers of public sets.
    """

    encoder: str
    """A ranker (of jobs.finetune), an encoder (of jobs.pretrain), or a directory of sentence-transformers or
    transformers. It is not trained."""
    input: tuple[str, ...]
    """Files or folders; a name that begins with train, valid or test says which split a file is."""
    output: str = field(metadata=NOT_IDENTITY)
    """Folder of the classifier, which `serve.app:build classifier=…` serves."""
    read: ReadConfig = field(default_factory=ReadConfig)
    """The files' format."""
    shots: str = "full"
    """Texts of every intent to train on, drawn by the seed: 10, 30 or another number; full: all."""
    seeds: int = 1
    """So many heads, each with its own draw; the numbers are means, the output is the first."""
    seed: int = 0
    """Of the first head and its draw; the others have the next ones."""
    encode: EncodeConfig = field(default_factory=EncodeConfig)
    """A text's vector."""
    head: HeadConfig = field(default_factory=HeadConfig)
    """The classifier."""
    json: str = field(default="", metadata=NOT_IDENTITY)
    """Write the numbers to this file too."""
    reading: Reading = field(default_factory=Reading, metadata=NOT_IDENTITY)
    """Damaged input."""

    def __post_init__(self) -> None:
        parse_shots(self.shots)
        require(self.seeds >= 1, "seeds", self.seeds, ">= 1")
        require(self.seed >= 0, "seed", self.seed, ">= 0")


@dataclass(frozen=True, kw_only=True)
class HeadRecord(TaskRecord):
    """One head that was trained and asked."""

    seed: int
    numbers: dict[str, float]
    """Of `evaluation.numbers`."""
    threshold: float
    seconds: float
    details: dict[str, Any] = field(default_factory=dict)
    """Of `evaluation.report`, of the first head."""


@dataclass(frozen=True)
class Vectors:
    """One vector of each text."""

    place_of: Mapping[str, int]
    all_NF: Tensor

    def of(self, rows: Sequence[Labelled]) -> Tensor:
        """[rows, F]"""
        return self.all_NF[[self.place_of[row.text] for row in rows]]


def run(config: Config) -> program.Summary:
    files = storage.expand(config.input)
    texts = intent_texts.read(config.input, config.read, config.reading)

    from pipeline import tracking
    from pipeline.classification import classifier, encoder

    source, reference = encoder.open_source(config.encoder)
    fingerprint = storage.raw_fingerprint(files, whole=True)
    given = {"uri": " ".join(config.input), "kind": "raw", "fingerprint": fingerprint}
    out = draft(config.output, classifier.KIND, config, {"encoder": reference, "input": given})
    if isinstance(out, Artifact):
        return _summary(config, out, already_there=True)
    with tracking.start("classify_intents", out) as tracked:
        vectors = _vectors(config, texts, source, out)
        records = list[HeadRecord]()
        for seed in range(config.seed, config.seed + config.seeds):
            records.append(_head(config, texts, vectors, reference, out, seed))
            tracked.log(records[-1].numbers, step=seed)
        report = json.dumps(_report(config, texts, records), indent=1, ensure_ascii=False).encode()
        plot = storage.read_bytes(out.path(classifier.PLOT))
        tracked.attach({classifier.PLOT: plot, classifier.REPORT: report})
        entries = [*records[0].files, out.write_file(classifier.REPORT, report)]
        done = out.publish(entries, records[0].counts, texts.dropped, tracked.run_id)
        tracking.finish(tracked, done, _means(records))
    return _summary(config, done, already_there=False)


def _vectors(config: Config, texts: Texts, source: Source, out: Draft) -> Vectors:
    """Of all texts, each once; a resumed job has them."""
    import torch

    from pipeline.classification import encoder
    from pipeline.resources import best_device

    rows = (*texts.train, *texts.asked, *texts.threshold)
    distinct = list(dict.fromkeys(row.text for row in rows))
    device = best_device()
    if "vectors" not in out.marks():
        began = time.perf_counter()
        model = encoder.load(source.local(), config.encode, device)
        buffer = io.BytesIO()
        np.save(buffer, model.vectors(distinct).numpy())
        storage.write_bytes(out.path(_VECTORS), buffer.getvalue())
        out.mark("vectors", TaskRecord(counts={"texts": len(distinct)}))
        print(f"{len(distinct):,} texts have vectors after {time.perf_counter() - began:.1f} s "
              f"({model.ranker.precision})", flush=True)  # fmt: skip
    vectors_NF = torch.from_numpy(np.load(io.BytesIO(storage.read_bytes(out.path(_VECTORS)))))
    return Vectors({text: place for place, text in enumerate(distinct)}, vectors_NF.to(device))


def _head(
    config: Config,
    texts: Texts,
    vectors: Vectors,
    reference: Mapping[str, Any],
    out: Draft,
    seed: int,
) -> HeadRecord:
    """Trains a head and asks it; a resumed job has those that were finished. The first one's files go
    into the output."""
    import torch

    from pipeline.classification import evaluation
    from pipeline.classification.classifier import PLOT, Classifier
    from pipeline.classification.head import fit
    from pipeline.classification.metrics import best_threshold

    task, marks = f"head-{seed}", out.marks()
    if task in marks:
        return marks.record(task, HeadRecord)
    began, labels = time.perf_counter(), labels_of(texts.train)
    shots = parse_shots(config.shots)
    train = draw(texts.train, shots, seed) if shots else texts.train
    place_of = {label: place for place, label in enumerate(labels)}
    numbers_N = torch.tensor([place_of[row.intent] for row in train])
    vectors_NF = vectors.of(train)
    head = fit(
        vectors_NF,
        numbers_N.to(vectors_NF.device),
        len(labels),
        config.head,
        seed,
        _Progress(f"head {seed}", config.head.epochs),
    ).cpu()
    named = str(reference["uri"]), str(reference["fingerprint"])
    made = Classifier(head, labels, 0.0, config.encode, config.head, *named)
    if texts.threshold:
        probabilities = made.probabilities(vectors.of(texts.threshold).cpu())
        known = evaluation.answers(texts.threshold, probabilities, labels)
        threshold = best_threshold(known.confidence_N, known.right, known.outside_M)
        made = replace(made, threshold=threshold)
    asked = made.probabilities(vectors.of(texts.asked).cpu())
    answers = evaluation.answers(texts.asked, asked, labels)
    numbers = evaluation.numbers(answers, len(labels), made.threshold)
    record = HeadRecord(
        seed=seed,
        numbers=numbers,
        threshold=made.threshold,
        seconds=round(time.perf_counter() - began, 1),
        counts={
            "intents": len(labels),
            "train_examples": len(train),
            "examples": len(answers.true_N),
            "out_of_scope_examples": len(answers.outside_M),
        },
    )
    if seed == config.seed:
        files = {**made.files(), PLOT: evaluation.plot(answers, labels)}
        entries = [out.write_file(name, data) for name, data in files.items()]
        record = replace(record, files=entries, details=evaluation.report(answers, labels))
    out.mark(task, record)
    return record


def _means(records: Sequence[HeadRecord]) -> dict[str, float]:
    names = records[0].numbers
    return {name: statistics.fmean(record.numbers[name] for record in records) for name in names}


def _report(config: Config, texts: Texts, records: Sequence[HeadRecord]) -> dict[str, Any]:
    """What --json writes; numbers are means over the heads, the details are of the first."""
    first = records[0]
    accuracies = [record.numbers["accuracy"] for record in records]
    return {
        **_means(records),
        "accuracy_std": statistics.stdev(accuracies) if len(records) > 1 else None,
        **first.counts,
        "asked_split": texts.asked_split,
        "shots": config.shots,
        "threshold": first.threshold,
        "heads": [
            {"seed": record.seed, **record.numbers, "seconds": record.seconds} for record in records
        ],
        "dropped": dict(texts.dropped),
        "notes": list(texts.notes),
        **first.details,
    }


def _summary(config: Config, done: Artifact, already_there: bool) -> program.Summary:
    from pipeline.classification.classifier import REPORT

    data = storage.read_bytes(storage.join(done.uri, REPORT))
    report: dict[str, Any] = json.loads(data)
    if config.json:
        storage.write_bytes(config.json, data)
    for line in _lines(report):
        print(line)
    numbers = {name: report[name] for name in report["heads"][0] if name in report}
    return program.published(done, already_there, **numbers)


def _lines(report: Mapping[str, Any]) -> list[str]:
    """The report for a person."""
    heads = len(report["heads"])
    spread = f" ± {report['accuracy_std']:.3f} over {heads} heads" if heads > 1 else ""
    lines = [
        f"accuracy {report['accuracy']:.3f}{spread}, macro-F1 {report['macro_f1']:.3f}: "
        f"{report['examples']:,} texts ({report['asked_split']}) of {report['intents']} intents, "
        f"trained on {report['train_examples']:,}"
    ]
    if report["out_of_scope_examples"]:
        lines.append(
            f"with the threshold {report['threshold']:.3f}: in-scope accuracy "
            f"{report['in_scope_accuracy']:.3f}, out-of-scope recall {report['oos_recall']:.3f} "
            f"({report['out_of_scope_examples']:,} texts)"
        )
    if report["worst"]:
        lines.append("worst intents (F1, texts, taken for):")
    for one in report["worst"]:
        lines.append(
            f"  {one['f1']:.2f} {one['examples']:5,} {one['intent']}"
            + (f" → {one['taken_for']}" if one["taken_for"] else "")
        )
    lines += [f"dropped: {count:,} {reason}" for reason, count in report["dropped"].items()]
    return [*lines, *report["notes"]]


class _Progress:
    """A line now and then."""

    def __init__(self, name: str, epochs: int) -> None:
        self._name, self._epochs, self._shown = name, epochs, time.monotonic()

    def __call__(self, epoch: int, loss: float) -> None:
        if time.monotonic() - self._shown >= _PROGRESS_S:
            self._shown = time.monotonic()
            print(
                f"{self._name}: epoch {epoch + 1:,} of {self._epochs:,}, loss {loss:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    program.main(Config, run, "classify_intents")

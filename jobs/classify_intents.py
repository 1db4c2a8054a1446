"""Trains a classifier of intents on labelled texts and a frozen encoder, and measures its accuracy."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jobs import program
from pipeline import cost, storage
from pipeline.artifact import Artifact
from pipeline.classification import texts as intent_texts
from pipeline.classification.settings import KIND, PLOT, REPORT, EncodeConfig, HeadConfig
from pipeline.classification.texts import ReadConfig, parse_shots
from pipeline.config import NOT_IDENTITY, require
from pipeline.corpora.formats import intents
from pipeline.corpora.raw import Reading
from pipeline.engine.draft import draft
from pipeline.models.sources import open_text_encoder
from pipeline.storage import fingerprints


@dataclass(frozen=True, kw_only=True)
class Config:
    """Trains a classifier on the vectors of a frozen encoder, and prints its accuracy.

    The accuracy is that on the test split of the input, or else on the valid split. Of an input without
    either, a tenth of every intent's texts is held out for it. `pipeline/classification/README.md` has the
    rules and the numbers of public sets.
    """

    encoder: str
    """A ranker (of jobs.finetune), an encoder (of jobs.pretrain), or a directory of sentence-transformers or
    transformers. It is not trained."""
    input: tuple[str, ...]
    """Files or folders; a name that begins with train, valid or test says which split a file is."""
    output: str = field(metadata=program.OUTPUT)
    """Folder of the classifier, which jobs.serve --arguments classifier=FOLDER serves."""
    read: ReadConfig = field(default_factory=ReadConfig)
    """The files' format."""
    shots: str = "full"
    """Texts of every intent to train on, drawn by the seed: 10, 30 or another number; full: all."""
    seeds: int = 1
    """Train this many heads, each with its own draw. The numbers are their means; the output is the first
    head."""
    seed: int = 0
    """Seed of the first head and its draw; the other heads have the next seeds."""
    encode: EncodeConfig = field(default_factory=EncodeConfig)
    """How a text becomes a vector."""
    head: HeadConfig = field(default_factory=HeadConfig)
    """The classifier."""
    dry_run: bool = field(default=False, metadata=NOT_IDENTITY)
    """Print the texts and the hours of their vectors, measured on this machine, and write nothing."""
    json: str = field(default="", metadata=program.OUTPUT_FILE)
    """Write the numbers to this file too."""
    reading: Reading = field(default_factory=Reading, metadata=NOT_IDENTITY)
    """How much damage in the input is tolerated."""

    def __post_init__(self) -> None:
        parse_shots(self.shots)
        require(self.seeds >= 1, "seeds", self.seeds, ">= 1")
        require(self.seed >= 0, "seed", self.seed, ">= 0")


def run(config: Config) -> program.Summary:
    files = storage.expand(config.input)
    stamps = fingerprints.Stamps.of(files)
    texts = intent_texts.read_texts(config.input, config.read, config.reading)
    source, reference = open_text_encoder(config.encoder)
    if config.dry_run:
        from pipeline.classification import training

        return cost.show("classify_intents", training.estimate(texts, source, config.encode))
    input_name = functools.partial(intents.input_name, corpus=config.read.dataset)
    fingerprint = fingerprints.raw_fingerprint(files, whole=True, input_name=input_name)
    raw_input = {"uri": " ".join(config.input), "kind": "raw", "fingerprint": fingerprint}
    out = draft(config.output, KIND, config, {"encoder": reference, "input": raw_input})
    if isinstance(out, Artifact):
        return _summary(config, out, already_there=True)
    stamps.check("input", out.staging)

    from pipeline import tracking
    from pipeline.classification import training

    plan = training.TrainingPlan(
        config.encode, config.head, parse_shots(config.shots), config.seed, reference
    )
    with tracking.start("classify_intents", out) as tracked:
        vectors = training.encode(out, texts, source, config.encode)
        records = []
        for seed in range(config.seed, config.seed + config.seeds):
            records.append(training.train(out, texts, vectors, plan, seed))
            tracked.log(records[-1].numbers, step=seed, wait=True)
        numbers = training.report(texts, records, plan)
        report = json.dumps(numbers, indent=1, ensure_ascii=False).encode()
        plot = storage.read_bytes(out.path(PLOT))
        tracked.attach({PLOT: plot, REPORT: report})
        entries = [*records[0].files, out.write_file(REPORT, report)]
        classifier = out.publish(entries, records[0].counts, texts.dropped, tracked.run_id)
        tracking.finish(tracked, classifier, training.means(records))
    return _summary(config, classifier, already_there=False)


def _summary(config: Config, classifier: Artifact, already_there: bool) -> program.Summary:
    data = storage.read_bytes(storage.join(classifier.uri, REPORT))
    report: dict[str, Any] = json.loads(data)
    if config.json:
        storage.write_bytes(config.json, data)
    for line in _lines(report):
        print(line)
    numbers = {name: report[name] for name in report["heads"][0] if name in report}
    return program.artifact_summary(classifier, already_there, **numbers)


def _lines(report: Mapping[str, Any]) -> list[str]:
    """The report for a person."""
    heads = len(report["heads"])
    spread = f" ± {report['accuracy_std']:.3f} over {heads} heads" if heads > 1 else ""
    if heads == 1 and (interval := report.get("accuracy_interval")):  # older reports have none
        spread = f" (95 %: {interval[0]:.3f} to {interval[1]:.3f})"
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
    for intent in report["worst"]:
        lines.append(
            f"  {intent['f1']:.2f} {intent['examples']:5,} {intent['intent']}"
            + (f" → {intent['taken_for']}" if intent["taken_for"] else "")
        )
    lines += [f"dropped: {count:,} {reason}" for reason, count in report["dropped"].items()]
    return [*lines, *report["notes"]]


if __name__ == "__main__":
    program.main(Config, run, "classify_intents")

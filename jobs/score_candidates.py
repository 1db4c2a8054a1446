"""A corpus to the same corpus with a cross-encoder's scores, for bi- and poly-encoders to learn from."""

from __future__ import annotations

from dataclasses import dataclass, field

from jobs import cluster, program
from pipeline import storage, tracking
from pipeline.artifact import Artifact, draft, open_artifact, sum_counts
from pipeline.config import BadInput
from pipeline.models.ranker import SETTINGS, parse_settings
from pipeline.shards import Actors
from pipeline.training import teaching
from pipeline.training.teaching import TeachingConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    """Scores the candidates of a corpus' train split with a cross-encoder.

    The output has all rows and columns of the input, and `teacher_scores`.
    """

    corpus: str
    """A corpus (of jobs.prepare_corpus)."""
    teacher: str
    """A ranker (of jobs.finetune): cross."""
    output: str
    """Folder of the corpus with scores."""
    teaching: TeachingConfig = field(default_factory=TeachingConfig)
    """What is scored."""
    resources: Actors = field(default_factory=Actors)
    """What it runs on."""


def run(config: Config) -> program.Summary:
    corpus = open_artifact(config.corpus, "corpus")
    teacher = open_artifact(config.teacher, "ranker")
    where = storage.join(teacher.uri, SETTINGS)
    architecture = parse_settings(storage.read_bytes(where), where).architecture
    if architecture != "cross":
        raise BadInput(f"--teacher {config.teacher}: architecture {architecture!r} is not allowed; "
                       "allowed: cross")  # fmt: skip
    out = draft(config.output, "corpus", config, {"corpus": corpus, "teacher": teacher})
    if isinstance(out, Artifact):
        return program.published(out, already_there=True)
    with cluster.session(), tracking.start("score_candidates", out) as tracked:
        records = teaching.score(out, corpus, teacher.local(), config.teaching, config.resources)
        counts = sum_counts(records, "counts")
        if not counts.get("scored"):
            raise BadInput(f"--corpus {config.corpus}: no example of train has candidates; "
                           "--teaching.random-candidates draws some")  # fmt: skip
        scored = out.publish([record["file"] for record in records], counts, run_id=tracked.run_id)
        tracking.finish(tracked, scored)
    return program.published(scored, already_there=False)


if __name__ == "__main__":
    program.main(Config, run, "score_candidates")

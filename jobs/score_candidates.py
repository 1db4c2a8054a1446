"""Adds the scores of rankers to a corpus, so that other rankers can learn from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from jobs import cluster, program
from pipeline import cost
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import NOT_IDENTITY, BadInput, require
from pipeline.engine.actors import Actors
from pipeline.engine.draft import draft
from pipeline.engine.records import sum_counts
from pipeline.training.settings import TeachingConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    """Scores the candidates of a corpus' train split with a ranker, or with several.

    The output has all rows and columns of the input, and `teacher_scores`; or, with --teaching.over batch,
    a ranker's vectors of context and response.
    """

    corpus: str
    """A corpus (of jobs.prepare_corpus)."""
    teacher: tuple[str, ...]
    """Rankers (of jobs.finetune). A cross-encoder teaches bi- and poly-encoders; these teach a
    cross-encoder that has few examples of its own. Several teachers: the mean of their scores."""
    output: str = field(metadata=program.OUTPUT)
    """Folder of the corpus with scores."""
    dry_run: bool = field(default=False, metadata=NOT_IDENTITY)
    """Print sizes, tasks and hours, measured on this machine, and write nothing."""
    teaching: TeachingConfig = field(default_factory=TeachingConfig)
    """What is scored."""
    resources: Actors = field(default_factory=Actors, metadata=NOT_IDENTITY)
    """The hardware that the job runs on."""


def run(config: Config) -> program.Summary:
    corpus = open_artifact(config.corpus, "corpus")
    require(bool(config.teacher), "teacher", "none", "one ranker or more")
    teachers = [open_artifact(uri, "ranker") for uri in config.teacher]
    differ = len({teacher.fingerprint for teacher in teachers}) == len(teachers)
    require(differ, "teacher", config.teacher, "each ranker once")

    from pipeline import tracking
    from pipeline.training import teaching
    from pipeline.training.data import has_values
    from pipeline.training.tokenized_corpus import require_train

    require_train(corpus)
    if config.teaching.over == "candidates" and not has_values(corpus, "candidates"):
        require(config.teaching.random_candidates > 0, "teaching.random_candidates", 0,
                f"1 or more, as no example of {corpus.uri}/train has candidates")  # fmt: skip
    names = ["teacher", *(f"teacher-{number}" for number in range(2, len(teachers) + 1))]
    teaching.teachers_of(corpus, teachers, config.teaching)  # refuses before the draft
    if config.dry_run:
        return cost.show("score_candidates", teaching.estimate(corpus, teachers, config.teaching))
    inputs = dict(zip(names, teachers, strict=True))
    out = draft(config.output, "corpus", config, {"corpus": corpus, **inputs})
    if isinstance(out, Artifact):
        return program.artifact_summary(out, already_there=True)
    with tracking.start("score_candidates", out) as tracked, cluster.session(for_tasks=True):
        records = teaching.score(out, corpus, teachers, config.teaching, config.resources)
        files = [file for record in records for file in record.files]
        counts = sum_counts(record.counts for record in records)
        if not counts.get("scored"):
            hint = "--teaching.random-candidates draws some"
            if config.teaching.random_candidates:
                hint = "each file has only one response"
            raise BadInput(f"--corpus {config.corpus}: no example of train has candidates; {hint}")
        scored_corpus = out.publish(files, counts, run_id=tracked.run_id)
        tracking.finish(tracked, scored_corpus)
    return program.artifact_summary(scored_corpus, already_there=False)


if __name__ == "__main__":
    program.main(Config, run, "score_candidates")

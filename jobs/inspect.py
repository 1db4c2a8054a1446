"""A look at a corpus, in the terminal and as an HTML page, or at a pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from jobs import program
from pipeline import storage
from pipeline.artifact import open_artifact
from pipeline.config import require
from pipeline.pools import survey as pool_survey
from pipeline.pools.pool import Pool, describe

_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, kw_only=True)
class Config:
    """Shows what a corpus or a pool holds.

    It needs `--corpus` or `--pool`. Of a corpus it shows examples, lengths, repeated texts and what was left
    out, and the same with plots as HTML. Of a pool: rows, lengths of vectors, equal vectors, nearest pairs.
    """

    corpus: str = ""
    """A corpus (of jobs.prepare_corpus)."""
    pool: str = ""
    """A pool (of jobs.embed_pool), or one of its versions."""
    html: str = field(default="", metadata=program.OUTPUT_FILE)
    """File of a corpus's HTML page; by default <name of the corpus>.html in the working directory."""
    sample_rows: int = 200_000
    """Take the numbers from at most this many rows, spread evenly over all files; 0: from all rows."""
    examples: int = 3
    """Number of examples of each split, drawn at random. For a pool: number of nearest pairs."""
    seed: int = 0
    """Seed of the draw; another seed shows other examples."""

    def __post_init__(self) -> None:
        is_one = bool(self.corpus) != bool(self.pool)
        require(is_one, "corpus, pool", (self.corpus, self.pool), "one of both")
        for name in ("sample_rows", "examples", "seed"):
            require(getattr(self, name) >= 0, name, getattr(self, name), ">= 0")


def run(config: Config) -> program.Summary:
    return _inspect_pool(config) if config.pool else _inspect_corpus(config)


def _inspect_corpus(config: Config) -> program.Summary:
    corpus = open_artifact(config.corpus, "corpus")
    html = storage.absolute(config.html or f"{storage.name_of(corpus.uri)}.html")
    storage.require_file("html", html)  # also the name that nobody gave

    from pipeline.corpora.report import page, survey, text

    corpus_survey = survey.survey_corpus(corpus, config.sample_rows, config.examples, config.seed)
    for line in text.lines(corpus_survey):
        print(line)
    storage.write_bytes(html, page.page(corpus_survey).encode())
    print(f"== The same with plots: {html}")
    return {
        "corpus": corpus.uri,
        "fingerprint": corpus.fingerprint,
        "rows": corpus_survey.rows,
        "sampled": corpus_survey.sampled,
        "median": {
            name: float(np.median(counts)) for name, counts in corpus_survey.lengths.items()
        },
        "repeated_share": {name: repeats.share for name, repeats in corpus_survey.repeats.items()},
        "dropped": corpus_survey.dropped,
        "html": html,
    }


def _inspect_pool(config: Config) -> program.Summary:
    pool = Pool.open(config.pool)
    survey = pool_survey.survey(pool, config.sample_rows, config.examples, config.seed)
    for line in _lines(pool, survey):
        print(line)
    return {
        "pool": describe(pool),
        "fingerprint": pool.artifact.fingerprint,
        "model": pool.model_fingerprint,
        "lengths": survey.lengths,
        "sampled": survey.sampled,
        "equal_vectors": survey.equal,
        "nearest": [[pair.cosine, pair.first.id, pair.second.id] for pair in survey.pairs],
        "dropped": pool.artifact.manifest["dropped"],
    }


def _lines(pool: Pool, survey: pool_survey.Survey) -> Iterator[str]:
    size = sum(entry["bytes"] for entry in pool.artifact.manifest["files"]) / 1e6
    yield (f"== Pool {pool.name}, version {pool.version}: {survey.rows:,} candidates, {pool.dimensions} "
           f"dimensions, {pool.dtype}, {len(pool.shards)} shards, {size:,.1f} MB")  # fmt: skip
    for reason, count in pool.artifact.manifest["dropped"].items():
        yield f"   left out: {count:,} ({reason})"
    if survey.lengths:
        minimum, low, median, high, maximum = survey.lengths
        yield (f"== Lengths of vectors: {minimum:.4g} to {maximum:.4g}; 5 %: {low:.4g}, "
               f"median: {median:.4g}, 95 %: {high:.4g}")  # fmt: skip
        yield (f"== Sketch: {pool.rotation.shape[1]} directions; of a vector's length it misses "
               f"{survey.missed:.1%}")  # fmt: skip
    yield f"== Equal vectors: {survey.equal:,} of {survey.sampled:,} rows have another's"
    if survey.most_equal:
        row, count = survey.most_equal
        yield f"   {count:,} times that of {row.id}: {_shown(row.text)}"
    yield f"== Nearest pairs of {survey.compared:,} rows, by cosine"
    for cosine, *pair in survey.pairs:
        for row in pair:
            yield f"   {cosine:.4f}  {row.id:<24}  {_shown(row.text)}"


def _shown(text: str) -> str:
    """The beginning of a text, in one line."""
    return " ".join(text.split())[:_SHOWN_CHARACTERS]


if __name__ == "__main__":
    program.main(Config, run, "inspect")

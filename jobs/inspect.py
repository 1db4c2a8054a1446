"""A look at a corpus, in the terminal and as an HTML page."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jobs import program
from pipeline import storage
from pipeline.artifact import open_artifact
from pipeline.config import require
from pipeline.corpora.report import page, survey, text


@dataclass(frozen=True, kw_only=True)
class Config:
    """Shows examples, lengths, repeated texts and what was left out; writes the same with plots as HTML."""

    corpus: str
    """A corpus (of jobs.prepare_corpus)."""
    html: str = ""
    """The page's file; by default <name of the corpus>.html in the working directory."""
    sample_rows: int = 200_000
    """Numbers are of so many rows at most, spread evenly over all files; 0: all rows."""
    examples: int = 3
    """Examples of each split, drawn at random."""
    seed: int = 0
    """Other examples."""

    def __post_init__(self) -> None:
        for name in ("sample_rows", "examples", "seed"):
            require(getattr(self, name) >= 0, name, getattr(self, name), ">= 0")


def run(config: Config) -> program.Summary:
    corpus = open_artifact(config.corpus, "corpus")
    found = survey.survey(corpus, config.sample_rows, config.examples, config.seed)
    for line in text.lines(found):
        print(line)
    html = storage.absolute(config.html or f"{storage.name_of(corpus.uri)}.html")
    storage.write_bytes(html, page.page(found).encode())
    print(f"== The same with plots: {html}")
    return {
        "corpus": corpus.uri,
        "fingerprint": corpus.fingerprint,
        "rows": found.rows,
        "sampled": found.sampled,
        "median": {name: float(np.median(v)) for name, v in found.lengths.items()},
        "repeated_share": {name: repeats.share for name, repeats in found.repeats.items()},
        "dropped": found.dropped,
        "html": html,
    }


if __name__ == "__main__":
    program.main(Config, run, "inspect")

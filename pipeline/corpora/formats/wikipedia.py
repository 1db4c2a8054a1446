"""Turns Wikipedia into sentence pairs (for next-sentence prediction) or into article search.

The input is Wikipedia's own dumps (`wikipedia_xml`) or WikiExtractor's output (`wikipedia_extracted`); the
first bytes of a file tell which. An article that is twice in a file, or in a part of a large dump, is used
once. An article that is in two files is used twice, with the same ids and in the same split.

`search` writes beside the examples the fixed wrong answers of an evaluation (`others`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from pipeline.config import require
from pipeline.corpora import file_tasks, fixed_candidates, raw
from pipeline.corpora.formats import articles, wikipedia_extracted, wikipedia_xml
from pipeline.corpora.privacy import Privacy
from pipeline.corpora.schema import hash_split, schema_with
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord

_SPLIT = (900, 50, 50)
_SCHEMA = schema_with(("title", pa.string()))


@dataclass(frozen=True, kw_only=True)
class Options(articles.Search):
    """What becomes of an article."""

    task: Literal["pairs", "search"] = "pairs"
    """`pairs`: each sentence and the one after it. `search`: a sentence and the rest of its article."""
    min_words: int = 5
    """Sentences with fewer words are left out, and with them most headings."""

    def __post_init__(self) -> None:
        require(self.min_words >= 1, "wikipedia.min_words", self.min_words, ">= 1")
        self.check("wikipedia")


def prepare(
    draft: Draft, uris: list[str], options: Options, reading: raw.Reading, privacy: Privacy
) -> Sequence[TaskRecord]:
    """Fills the draft and returns the records of its tasks."""
    parts = [part for uri in uris for part in wikipedia_xml.parts(uri)]
    parse_part = functools.partial(parse, options=options)
    label = f"wikipedia: files to {options.task}"
    records = file_tasks.prepare(draft, parts, parse_part, _SCHEMA, reading, privacy, label)
    count = options.others if options.task == "search" else 0
    return [*records, *fixed_candidates.choose_others(draft, records, count, privacy)]


def parse(
    uri: str, reading: raw.Reading, report: file_tasks.ParseReport, options: Options
) -> Iterator[file_tasks.ParsedRow]:
    """The examples of a file, or of a part of a dump."""
    read = wikipedia_xml if wikipedia_xml.is_dump(uri) else wikipedia_extracted
    article_ids: set[str] = set()  # some 100 bytes an article
    for article in read.articles(uri, reading, report):
        sentences = [
            sentence
            for paragraph in article.paragraphs
            for sentence in articles.split_sentences(paragraph)
            if articles.count_words(sentence) >= options.min_words
        ]
        ruled_out = ""
        if article.title.lower().endswith("(disambiguation)"):
            ruled_out = "disambiguation page"
        elif len(sentences) < 2:
            ruled_out = "fewer than 2 sentences"
        elif article.id in article_ids:
            ruled_out = "the same article again"
        if ruled_out:
            report.dropped.add(ruled_out, uri, article.place, article.title)
            continue
        article_ids.add(article.id)
        common = {
            "group_id": article.id,
            "title": article.title,
            "source": "wikipedia",
            "split": hash_split(article.id, _SPLIT),
        }
        if options.task == "pairs":
            yield from articles.pair_rows(common, sentences)
        else:
            yield from articles.search_rows(common, sentences, options)

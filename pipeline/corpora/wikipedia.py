"""WikiExtractor output to sentence pairs (for next-sentence prediction) or to article search.

    <doc id="25" url="https://en.wikipedia.org/wiki?curid=25" title="Autism">
    Autism

    Paragraphs, one a line.
    </doc>

Article search is StarSpace's task (Wu et al. 2018): a random sentence of an article is the query,
the article without it the right answer, other articles the wrong ones.
"""

from __future__ import annotations

import functools
import html
import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from pipeline.artifact import Draft
from pipeline.config import require
from pipeline.corpora import files, raw
from pipeline.corpora.filters import Privacy
from pipeline.corpora.schema import hash_split, schema_with

_SPLIT = (900, 50, 50)
_SCHEMA = schema_with(("title", pa.string()))
_DOC = re.compile(r'<doc id="([^"]*)".*? title="(.*)">')
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]?[A-Z0-9])")
_ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Mt|Jr|Sr|No|Vol|vs|etc|ca|cf|approx|Inc|Ltd|Co|Corp|Gen|Col|Sgt|Lt"
    r"|Rev|Hon|Gov|Sen|Rep|Fig|e\.g|i\.e)|\b[A-Za-z])\.$"
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What becomes of an article."""

    task: Literal["pairs", "search"] = "pairs"
    """`pairs`: each sentence and the one after it. `search`: a sentence and the rest of its article."""
    min_words: int = 5
    """Sentences with fewer words are not used; headings go with them."""
    queries: int = 1
    """For `search`: examples per article, each with another sentence as its query."""
    max_article_characters: int = 4000
    """For `search`: the article's text is cut after so many."""

    def __post_init__(self) -> None:
        require(self.min_words >= 1, "wikipedia.min_words", self.min_words, ">= 1")
        require(self.queries >= 1, "wikipedia.queries", self.queries, ">= 1")
        require(self.max_article_characters >= 1, "wikipedia.max_article_characters",
                self.max_article_characters, ">= 1")  # fmt: skip


class Article(NamedTuple):
    """A document of the extractor; `paragraphs` without its title."""

    id: str
    title: str
    line: int
    paragraphs: list[str]


def prepare(
    draft: Draft, uris: list[str], options: Options, reading: raw.Reading, privacy: Privacy
) -> list[dict[str, Any]]:
    """Fills the draft and returns the records of its tasks."""
    parse_file = functools.partial(parse, options=options)
    label = f"wikipedia: files to {options.task}"
    return files.prepare(draft, uris, parse_file, _SCHEMA, reading, privacy, label)


def parse(
    uri: str, reading: raw.Reading, account: files.Account, options: Options
) -> Iterator[files.Row]:
    """The examples of a file of documents."""
    for article in articles(uri, reading, account):
        found = [text for paragraph in article.paragraphs for text in sentences(paragraph)]
        long = [text for text in found if len(text.split()) >= options.min_words]
        if len(long) < 2:
            account.dropped.add("fewer than 2 sentences", uri, article.line, article.title)
            continue
        common = {
            "group_id": article.id,
            "title": article.title,
            "candidates": None,
            "label": None,
            "source": "wikipedia",
            "split": hash_split(article.id, _SPLIT),
        }
        if options.task == "pairs":
            for number, (sentence, following) in enumerate(itertools.pairwise(long)):
                name = f"{article.id}/{number}"
                yield {**common, "example_id": name, "context": [sentence], "response": following}
        else:
            rng = random.Random(f"query {article.id}")
            for query in rng.sample(range(len(long)), k=min(options.queries, len(long))):
                name = f"{article.id}/{query}"
                rest = " ".join(long[:query] + long[query + 1 :])[: options.max_article_characters]
                yield {**common, "example_id": name, "context": [long[query]], "response": rest}


def articles(uri: str, reading: raw.Reading, account: files.Account) -> Iterator[Article]:
    """The documents of a file; text outside of them, and one without an end, is malformed."""
    article: Article | None = None
    number, line = 0, ""
    for number, line in raw.read_lines(uri, reading):
        start = _DOC.match(line) if line.startswith("<doc ") else None
        if start:
            if article:
                account.malformed.add("document without an end", uri, number, article.title)
            account.records += 1
            article = Article(start[1], html.unescape(start[2]), number, [])
            if not (article.id and article.title):
                account.malformed.add("document without id or title", uri, number, line)
        elif line == "</doc>":
            if article and article.id and article.title:
                yield article
            article = None
        elif article:
            text = html.unescape(line).strip()
            if text and text != article.title:
                article.paragraphs.append(text)
        elif line.strip():
            account.records += 1
            account.malformed.add("text outside a document", uri, number, line)
    if article:
        account.malformed.add("document without an end", uri, number, article.title)


def sentences(paragraph: str) -> list[str]:
    """Splits at sentence ends: . ! or ? before a space and a capital, except after abbreviations."""
    found: list[str] = []
    start = 0
    for end in _SENTENCE_END.finditer(paragraph):
        text = paragraph[start : end.start()]
        if not _ABBREVIATION.search(text):
            found.append(paragraph[start : end.end()].strip())
            start = end.end()
    found.append(paragraph[start:].strip())
    return [text for text in found if text]

"""Makes examples of articles, whatever their format.

pairs     each sentence, and the one after it
search    a random sentence, and the article without it (StarSpace's task, Wu et al. 2018)
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.config import require
from pipeline.corpora.file_tasks import ParsedRow

ROWS_PER_SHARD = 50_000  # of some 4,000 characters in a search: 0.2 GB in a task's memory

_OPENING, _CLOSING = "\"'(\\[«»„“”‚‘’「『（¿¡", "\"')\\]»«“”’‘」』）"
# Letters of scripts that put no spaces between words.
_UNSPACED_LETTER = (
    r"[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3041-\u30ff\u3400-\u9fff\uf900-\ufaff\uff66-\uff9f]"
)
_UNSPACED = re.compile(_UNSPACED_LETTER)
# In Unicode the usual letters of Georgian are lower case, but its texts have no capitals.
_LOWER = "".join(
    letter for letter in map(chr, range(0x10000)) if letter.islower() and not "ა" <= letter <= "ჿ"
)
_MARKS = ".!?…؟۔‼⁇⁈⁉"
_MARKS_WITHOUT_SPACE = "。！？｡।॥։።፧။។៕།༎᱾꯫"
_GERMAN_DATE = (
    r"(?<=\d\.\s)(?:Januar|Februar|März|April|Mai|Juni|Juli|August|September|Oktober|November"
    r"|Dezember|Jahrhundert|Jh)\b"
)
# A mark, and the beginning of a sentence: a digit or a letter that is not lower case, so also one of a script
# without cases, such as Arabic or Hindi. A semicolon asks a question in Greek, and a colon ends a sentence in
# Armenian. The marks of Chinese, Japanese and Hindi need no space behind them.
_SENTENCE_END = re.compile(
    rf"[{_MARKS}{_MARKS_WITHOUT_SPACE}．;\u037e:](?:"
    rf"(?:(?<=[{_MARKS}])|(?<=[\u0370-\u03ff\u1f00-\u1fff][;\u037e])|(?<=[\u0561-\u0587]:))"
    rf"(?:[{_CLOSING}]|\s»|\[\d{{1,3}}\])*\s+(?!{_GERMAN_DATE})"
    rf"(?=(?:[{_OPENING}]\s?)?(?![{_LOWER}])[^\W_])"
    rf"|(?<=[{_MARKS_WITHOUT_SPACE}])(?![{_CLOSING}{_MARKS_WITHOUT_SPACE}])\s*(?=\S)"
    r"|(?<=．)\s*(?=[^\W\d])"  # not ３．１４
    r"|(?<=。)[”’」』）]\s*(?![とっなのはがをにでも，、])(?=\S)"  # と: he said
    rf"|(?<={_UNSPACED_LETTER}[?!])(?={_UNSPACED_LETTER}))"
)
_ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Mt|Jr|Sr|No|Vol|vs|etc|ca|cf|approx|Inc|Ltd|Co|Corp|Gen|Col|Sgt|Lt"
    r"|Rev|Hon|Gov|Sen|Rep|Fig|e\.g|i\.e|Nr|Abb|bzw|Bd|Str|geb|gest|evtl|ggf|inkl|Mio|Mrd|Hr|Fr|Mme|Mlle"
    r"|Sra?|Ud|[Uu]l|[Уу]л|им|[Сс]м|[Nn]p|tzw|[Nn]apř|tzv)"
    # An initial, which is not the last letter behind a vowel sign, as in Thai.
    r"|(?<![^\s.(\[\"'«„“-])[^\W\d_])\.$"
)
_LONGEST_ABBREVIATION = 12  # characters, with what stands before it


@dataclass(frozen=True, kw_only=True)
class Search:
    """Options of article search."""

    queries: int = 1
    """For search: number of examples per article. Each has another sentence as its query."""
    max_article_characters: int = 4000
    """For search: the article's text is truncated after this many characters."""
    others: int = 10_000
    """For search: number of articles in others/, the fixed wrong answers of an evaluation; 0: none."""

    def check(self, corpus: str) -> None:
        require(self.queries >= 1, f"{corpus}.queries", self.queries, ">= 1")
        require(self.max_article_characters >= 1, f"{corpus}.max_article_characters",
                self.max_article_characters, ">= 1")  # fmt: skip
        require(self.others >= 0, f"{corpus}.others", self.others, ">= 0")


class Article(NamedTuple):
    """An article without its title, and its place in the file: a line, or a page of a dump."""

    id: str
    title: str
    place: int
    paragraphs: list[str]


def pair_rows(common: ParsedRow, sentences: list[str]) -> Iterator[ParsedRow]:
    """The examples of `pairs`; `common` holds the columns that all rows of an article share."""
    for number, (sentence, following) in enumerate(itertools.pairwise(sentences)):
        name = f"{common['group_id']}/{number}"
        yield {**common, "example_id": name, "context": [sentence], "response": following}


def search_rows(common: ParsedRow, sentences: list[str], options: Search) -> Iterator[ParsedRow]:
    """The examples of `search`, the same ones whenever the article is read."""
    rng = random.Random(f"query {common['group_id']}")
    for query in rng.sample(range(len(sentences)), k=min(options.queries, len(sentences))):
        yield {
            **common,
            "example_id": f"{common['group_id']}/{query}",
            "context": [sentences[query]],
            "response": article_text(sentences[:query] + sentences[query + 1 :], options),
        }


def article_text(sentences: list[str], options: Search) -> str:
    """The article's text for ranking."""
    return " ".join(sentences)[: options.max_article_characters]


def count_words(text: str) -> int:
    """Where a script puts no spaces between words, two letters count as a word, as in most of Chinese."""
    return len(text.split()) + len(_UNSPACED.findall(text)) // 2


def split_sentences(paragraph: str) -> list[str]:
    """Cuts at sentence ends, in any script, except after abbreviations and initials."""
    sentences: list[str] = []
    start = 0
    for end in _SENTENCE_END.finditer(paragraph):
        # Of a list of initials, the whole text before each would take the square of the time.
        ending = paragraph[max(start, end.start() - _LONGEST_ABBREVIATION) : end.start() + 1]
        if not _ABBREVIATION.search(ending):
            sentences.append(paragraph[start : end.end()].strip())
            start = end.end()
    sentences.append(paragraph[start:].strip())
    return [text for text in sentences if text]

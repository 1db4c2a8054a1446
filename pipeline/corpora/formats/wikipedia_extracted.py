"""WikiExtractor's output as articles, in its two forms.

    <doc id="25" url="https://en.wikipedia.org/wiki?curid=25" title="Autism">
    Autism

    Paragraphs, one a line. In some versions headings, too, with a full stop.
    </doc>

    {"id": "25", "url": "…", "title": "Autism", "text": "Autism\\n\\nParagraphs, one a line."}

Titles and texts may hold escaped characters and markup that the tool left over (`<br>`, `<ref>`, whole
links): a line with any goes through the cleaner of the dumps.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator

from pipeline.corpora import raw
from pipeline.corpora.file_tasks import ParseReport
from pipeline.corpora.formats import tables, wikitext
from pipeline.corpora.formats.articles import Article

# A title may hold quotes that are not escaped, and other attributes may follow it.
_DOC = re.compile(r'<doc id="([^"]*)".*? title="(.*?)"(?: \w+="[^"]*")*>$')
_END = "</doc>"


def articles(uri: str, reading: raw.Reading, report: ParseReport) -> Iterator[Article]:
    """The documents of a file; text outside of them, and one without an end, is malformed."""
    article: Article | None = None
    number, line = 0, ""
    for number, line in raw.read_lines(uri, reading, report.notes):
        line = line.rstrip()
        start = _DOC.match(line) if line.startswith("<doc ") else None
        if start:
            if article:
                report.malformed.add("document without an end", uri, number, article.title)
            report.records += 1
            article = Article(start[1], html.unescape(start[2]), number, [])
            if not (article.id and article.title):
                report.malformed.add("document without id or title", uri, number, line)
        elif line.endswith(_END) and (article or line == _END):
            if article and article.id and article.title:
                article.paragraphs.extend(_paragraphs(line.removesuffix(_END), article.title))
                yield article
            article = None
        elif article:
            article.paragraphs.extend(_paragraphs(line, article.title))
        elif line.startswith("{"):
            report.records += 1
            if document := _json_article(line, number):
                yield document
            else:
                report.malformed.add("no JSON with id, title and text", uri, number, line)
        elif line.strip():
            report.records += 1
            report.malformed.add("text outside a document", uri, number, line)
    if article:
        report.malformed.add("document without an end", uri, number, article.title)


def _json_article(line: str, number: int) -> Article | None:
    try:
        document = json.loads(line)
        name, title, text = tables.cell_text(document["id"]), document["title"], document["text"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not (name and title and all(map(raw.is_text, (name, title, text)))):
        return None
    title = html.unescape(title)
    paragraphs = [paragraph for line in text.split("\n") for paragraph in _paragraphs(line, title)]
    return Article(name, title, number, paragraphs)


def _paragraphs(line: str, title: str) -> list[str]:
    """The paragraphs of a line of text: none (the title's line), one, or more."""
    text = html.unescape(line).strip()
    if not text or text == title or raw.is_overlong(text):
        return []
    if wikitext.has_markup(text):
        try:
            return wikitext.paragraphs(text)
        except wikitext.MarkupError:
            return []
    tidy = wikitext.tidy(text)
    return [tidy] if tidy else []

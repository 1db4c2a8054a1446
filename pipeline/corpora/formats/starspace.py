"""StarSpace's own files of Wikipedia (its "labelDoc"): an article a line, its sentences between TABs.

    He was born in 1905 .<TAB>He wrote three novels .<TAB>…

A random sentence is the query, the article without it the right answer. The name of a file says its split
(wikipedia_train5M.txt, wikipedia_shuf_train5M.txt, wikipedia_test10k.txt). A file that names no split is
divided 90 : 5 : 5 by article. Articles have no ids, so their hashes are the ids.

Files with "basedocs" in their names (wikipedia_test_basedocs.txt) are the published others of the
evaluation (`others`): give those of one split. Without them others are chosen from `train`. An
article that is in valid or test, too, is never one of them.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline import storage
from pipeline.config import BadInput
from pipeline.corpora import file_kinds, file_tasks, fixed_candidates, raw
from pipeline.corpora.formats import articles
from pipeline.corpora.privacy import Privacy
from pipeline.corpora.schema import EXAMPLE, split_by_name_or_group
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord

_PREFIX = re.compile(r"^wikipedia_(shuf_)?", re.IGNORECASE)
_BASE = "basedocs"
_ALLOWED = "allowed: an article a line, its sentences between TABs, as StarSpace has it"


@dataclass(frozen=True, kw_only=True)
class Options(articles.Search):
    """What becomes of an article."""

    def __post_init__(self) -> None:
        self.check("starspace")


def prepare(
    draft: Draft, uris: list[str], options: Options, reading: raw.Reading, privacy: Privacy
) -> Sequence[TaskRecord]:
    """Fills the draft and returns the records of its tasks."""
    base_files = sorted(uri for uri in uris if _BASE in storage.name_of(uri).lower())
    parse_file = functools.partial(parse, options=options)
    files = [uri for uri in uris if uri not in base_files]
    label = "starspace: articles to examples"
    records = file_tasks.prepare(draft, files, parse_file, EXAMPLE, reading, privacy, label)

    def published(draft: Draft, report: file_tasks.ParseReport) -> Iterator[tuple[str, str]]:
        for uri in base_files:
            for _, name, sentences in _read_articles(uri, reading, report):
                yield name, articles.article_text(sentences, options)

    others = fixed_candidates.choose_others(
        draft, records, options.others, privacy, published if base_files else None
    )
    return [*records, *others]


def parse(
    uri: str, reading: raw.Reading, report: file_tasks.ParseReport, options: Options
) -> Iterator[file_tasks.ParsedRow]:
    """The examples of a file."""
    file = _PREFIX.sub("", raw.plain_name(uri))
    article_ids: set[str] = set()  # some 100 bytes an article
    for number, name, sentences in _read_articles(uri, reading, report):
        if len(sentences) < 2 or name in article_ids:
            reason = "the same article again" if name in article_ids else "fewer than 2 sentences"
            report.dropped.add(reason, uri, number, " ".join(sentences))
            continue
        article_ids.add(name)
        common = {
            "group_id": name,
            "source": "starspace",
            "split": split_by_name_or_group(file, name),
        }
        yield from articles.search_rows(common, sentences, options)


def _read_articles(
    uri: str, reading: raw.Reading, report: file_tasks.ParseReport
) -> Iterator[tuple[int, str, list[str]]]:
    """(line, id, sentences) of each article of a file; an empty line is none.

    Raises BadInput for tables and for ConvAI2's dialogues, whose lines would be articles, too."""
    if file_kinds.named_table(raw.plain_name(uri)):
        raise BadInput(f"{uri}: has the name of a table; {_ALLOWED}")
    numbered = 0
    for number, line in raw.read_lines(uri, reading, report.notes):
        numbered += number <= 2 and line.startswith(f"{number} ")
        if numbered == 2:
            raise BadInput(f"{uri}: its lines are numbered, as in ConvAI2; {_ALLOWED}")
        sentences = [text for part in line.split("\t") if (text := " ".join(part.split()))]
        if not sentences:
            continue
        report.records += 1
        if raw.is_overlong(line):
            report.malformed.add("line too long", uri, number, line)
            continue
        name = hashlib.blake2b("\t".join(sentences).encode(), digest_size=8).hexdigest()
        yield number, name, sentences

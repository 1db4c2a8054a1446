"""Inputs from the field, read by the formats that people chose for them.

Each kind of fault also has tests beside its format."""

from __future__ import annotations

import functools
import re

import pytest

from pipeline.config import BadInput
from pipeline.corpora import reddit
from pipeline.corpora.file_tasks import ParseReport
from pipeline.corpora.formats import intents, opensubtitles, pairs, wikipedia
from pipeline.corpora.raw import Reading

pytestmark = pytest.mark.shared


@pytest.mark.parametrize("form", ["xml", "srt"])
def test_subtitles_with_times_or_xml_are_refused(prepare_here, cases, form):
    files = sorted((cases / "subtitles-markup" / form).iterdir())
    with pytest.raises(BadInput, match="allowed: raw text"):
        prepare_here(opensubtitles.prepare, files, opensubtitles.Options())


def test_notices_of_removal_are_no_texts(prepare_here, cases):
    files = list((cases / "reddit-removal-notices" / "data").iterdir())
    rows = prepare_here(reddit.prepare, files, reddit.Options()).rows
    texts = [text for row in rows for text in (*row["context"], row["response"])]
    assert rows
    assert not [
        text for text in texts if re.match(r"\[ ?(removed|deleted)\b.*\]$", text, re.IGNORECASE)
    ]


def test_a_folder_of_variants_is_refused(prepare_here, cases):
    files = sorted((cases / "clinc-folder" / "data").iterdir())
    prepare = functools.partial(intents.prepare, corpus="clinc150")
    with pytest.raises(BadInput, match="variants of the same texts"):
        prepare_here(prepare, files)


def test_russian_articles_have_sentences(cases):
    file = cases / "wiki-cyrillic" / "data" / "wiki_00"
    rows = list(wikipedia.parse(str(file), Reading(), ParseReport(), wikipedia.Options()))
    assert len({row["group_id"] for row in rows}) == 40
    assert len(rows) == 200


@pytest.mark.parametrize(
    ("case", "file", "rows"),
    [
        ("padded-streams", "plain.jsonl.gz", 200),
        ("padded-streams", "blocked.jsonl.gz", 200),
        ("padded-streams", "padding-4.jsonl.xz", 200),
        ("padded-streams", "padding-8.jsonl.xz", 200),
        ("padded-streams", "padding-512.jsonl.xz", 200),
        ("json-array", "faq.json", 120),
    ],
)
def test_tables_of_other_tools_are_read_whole(prepare_here, cases, case, file, rows):
    found = prepare_here(pairs.prepare, [cases / case / "data" / file], pairs.Options())
    assert len(found.rows) == rows
    assert not found.dropped

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.corpora.file_tasks import ParseReport
from pipeline.corpora.formats import wikipedia, wikipedia_extracted
from pipeline.corpora.raw import Reading

from ..conftest import parse_file

HEAD = '<doc id="{id}" url="https://en.wikipedia.org/wiki?curid={id}" title="{title}">\n{title}\n\n'
FOUR = [f"This is the {n} sentence of it." for n in ("first", "second", "third", "fourth")]


def doc(text: str, name: str = "12", title: str = "Autism") -> str:
    return HEAD.format(id=name, title=title) + text + "\n</doc>\n"


def read(folder: Path, text: str, **options: Any) -> tuple[list[dict[str, Any]], ParseReport]:
    return parse_file(wikipedia, folder / "wiki_00", text, **options)


# Pairs and search


def test_pairs_are_each_sentence_and_the_one_after_it(tmp_path):
    rows, report = read(tmp_path, doc(" ".join(FOUR[:2]) + "\n\n" + " ".join(FOUR[2:])))
    assert [(row["context"], row["response"]) for row in rows] == [
        ([FOUR[0]], FOUR[1]),
        ([FOUR[1]], FOUR[2]),
        ([FOUR[2]], FOUR[3]),
    ]
    assert len({row["example_id"] for row in rows}) == 3
    assert {(row["group_id"], row["title"], row["source"]) for row in rows} == {
        ("12", "Autism", "wikipedia")
    }
    assert (report.records, report.dropped.counts, report.malformed.counts) == (1, {}, {})


def test_search_asks_with_one_sentence_for_the_article_without_it(tmp_path):
    articles = "".join(doc(" ".join(FOUR), str(n), f"Article {n}") for n in range(40))
    rows, _ = read(tmp_path, articles, task="search")
    assert len(rows) == 40
    for row in rows:
        (query,) = row["context"]
        assert row["response"] == " ".join(text for text in FOUR if text != query)
        assert "candidates" not in row
    assert {row["context"][0] for row in rows} == set(FOUR)
    assert read(tmp_path, articles, task="search")[0] == rows


def test_search_may_ask_several_times_for_an_article_each_time_with_another_sentence(tmp_path):
    rows, _ = read(tmp_path, doc(" ".join(FOUR)), task="search", queries=3)
    assert len({row["context"][0] for row in rows}) == len(rows) == 3
    assert len({row["example_id"] for row in rows}) == 3
    assert {row["group_id"] for row in rows} == {"12"}
    rows, _ = read(
        tmp_path, doc(" ".join(FOUR)), task="search", queries=9, max_article_characters=40
    )
    assert {row["context"][0] for row in rows} == set(FOUR)
    assert {len(row["response"]) for row in rows} == {40}


def test_headings_and_short_sentences_are_left_out(tmp_path):
    rows, _ = read(tmp_path, doc(f"Geology.\n{FOUR[0]} Too short.\nBibliography\n{FOUR[1]}"))
    assert [(row["context"], row["response"]) for row in rows] == [([FOUR[0]], FOUR[1])]
    rows, _ = read(tmp_path, doc(f"{FOUR[0]} Too short. {FOUR[1]}"), min_words=2)
    assert [row["response"] for row in rows] == ["Too short.", FOUR[1]]


def test_splits_never_cut_an_article(tmp_path):
    articles = "".join(doc(" ".join(FOUR), str(n), f"Article {n}") for n in range(300))
    rows, _ = read(tmp_path, articles)
    pairs = {(row["group_id"], row["split"]) for row in rows}
    assert len(pairs) == 300
    shares = [sum(split == name for _, split in pairs) for name in ("train", "valid", "test")]
    assert shares[0] > 240 and min(shares) >= 5


def test_escaped_titles_and_texts_are_read_as_what_they_mean(tmp_path):
    first = "Dungeons &amp; Dragons is a fantasy game."
    rows, _ = read(tmp_path, doc(f"{first} {FOUR[0]}", title="Dungeons &amp; Dragons"))
    assert rows[0]["title"] == "Dungeons & Dragons"
    assert rows[0]["context"] == ["Dungeons & Dragons is a fantasy game."]


# Documents


def test_empty_one_sentence_and_disambiguation_articles_are_counted(tmp_path):
    ambiguous = doc(" ".join(FOUR), title="Mercury (disambiguation)")
    rows, report = read(tmp_path, doc("") + doc(FOUR[0]) + ambiguous + doc(" ".join(FOUR)))
    assert (len(rows), report.records) == (3, 4)
    assert report.dropped.counts == {"fewer than 2 sentences": 2, "disambiguation page": 1}


@pytest.mark.parametrize(
    ("head", "end"),
    [
        ('<doc id="12" url="u" title="Autism">', "</doc>\n"),
        ('<doc id="12" title="Autism" url="u" revid="3"> ', "\n</doc> \n"),
    ],
)
def test_marks_of_documents_may_stand_as_other_versions_write_them(tmp_path, head, end):
    rows, report = read(tmp_path, f"{head}\nAutism\n\n{' '.join(FOUR)}{end}")
    assert (report.records, report.malformed.counts) == (1, {})
    assert rows == read(tmp_path, doc(" ".join(FOUR)))[0]


def test_a_document_without_an_end_is_counted_and_the_others_are_read(tmp_path):
    unclosed = doc(" ".join(FOUR), "1", "Open").replace("</doc>\n", "")
    rows, report = read(tmp_path, unclosed + doc(" ".join(FOUR), "2") + unclosed)
    assert {row["group_id"] for row in rows} == {"2"}
    assert report.records == 3
    assert report.malformed.counts == {"document without an end": 2}


def test_text_outside_of_documents_is_counted(tmp_path):
    rows, report = read(tmp_path, "stray\n\n" + doc(" ".join(FOUR)) + "\nstray too\n")
    assert len(rows) == 3
    assert report.malformed.counts == {"text outside a document": 2}
    assert [sample["line"] for sample in report.malformed.samples] == [1, 9]


def test_a_document_that_has_no_id_is_counted(tmp_path):
    rows, report = read(tmp_path, doc("", name="") + doc(" ".join(FOUR)))
    assert len(rows) == 3
    assert report.malformed.counts["document without id or title"] == 1


def test_an_article_that_stands_twice_is_used_once(tmp_path):
    again = doc(" ".join(FOUR[::-1]), "1", "Again")
    rows, report = read(tmp_path, doc("", "1") + doc(" ".join(FOUR), "1") + again + again)
    assert {row["title"] for row in rows} == {"Autism"}
    assert report.dropped.counts == {"fewer than 2 sentences": 1, "the same article again": 2}
    assert report.records == 4


# What the extractor leaves over, and its other form


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ('It was cut.<ref name="06/04"></ref> So it ended.', ["It was cut. So it ended."]),
        ('It was cut.<ref name="a/b">A book, p. 1.</ref>', ["It was cut."]),
        ('In 2012 he left&lt;ref name="a/b"&gt;&lt;/ref&gt; it.', ["In 2012 he left it."]),
        ("First it rained.<br>Then it snowed.<br/>", ["First it rained.", "Then it snowed."]),
        ("First it rained.&lt;br&gt;Then.", ["First it rained.", "Then."]),
        ("A <nowiki>thing</nowiki> of <small>it</small>.</div>", ["A thing of it."]),
        ("[[File:A.png|thumb|B]]", []),
        ("A [[violin]]ist of the [[Art|arts]].", ["A violinist of the arts."]),
        ("Hearts &amp; Flowers at 3 &lt; 4", ["Hearts & Flowers at 3 < 4"]),
        ("• 32 playgrounds", []),
        ("- 32 playgrounds", []),
        ("Ayn Rand (; born in 1905) was ( ) here .", ["Ayn Rand (born in 1905) was here."]),
    ],
)
def test_markup_that_the_extractor_left_over_is_taken_out(tmp_path, line, shown):
    (tmp_path / "wiki_00").write_text(doc(line), encoding="utf-8")
    uri = str(tmp_path / "wiki_00")
    (article,) = wikipedia_extracted.articles(uri, Reading(), ParseReport())
    assert article.paragraphs == shown


def test_both_writing_styles_give_the_same_examples(tmp_path):
    """2018's has headings as sentences and "?curid="; the other has empty lines in between."""
    dense = doc("\n".join([" ".join(FOUR[:2]), "Early life.", " ".join(FOUR[2:])]))
    loose = doc("\n\n".join([" ".join(FOUR[:2]), "Bibliography", " ".join(FOUR[2:])]))
    rows, _ = read(tmp_path, dense.replace("https://en.wikipedia.org/wiki", ""))
    assert rows == read(tmp_path, loose)[0] != []


@pytest.mark.parametrize("title_first", [True, False])
def test_json_lines_give_the_examples_of_documents(tmp_path, title_first):
    text = " ".join(FOUR[:2]) + "\nDungeons &amp; <br>\n" + " ".join(FOUR[2:])
    lines = ("Q&amp;A\n\n" if title_first else "") + text + "\n"
    fields = {"id": "12", "revid": "3", "url": "https://e.org", "title": "Q&A", "text": lines}
    rows, report = read(tmp_path, json.dumps(fields) + "\n")
    assert (report.records, report.malformed.counts) == (1, {})
    assert rows == read(tmp_path, doc(text, title="Q&amp;A"))[0]
    assert {row["title"] for row in rows} == {"Q&A"}
    for name in (12, 12.0):
        assert read(tmp_path, json.dumps({**fields, "id": name}))[0] == rows


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"id": "1", "title": "A"}',
        '{"id": "1", "title": "A", "text": null}',
        '{"id": "", "title": "A", "text": "b"}',
        '{"id": null, "title": "A", "text": "b"}',
        '{"id": "1", "title": ["A"], "text": "b"}',
        '{"id": "1", "title": "A", "text": "\\ud800"}',
        '{"a":' * 100_000,
    ],
)
def test_lines_that_are_no_documents_are_counted(tmp_path, line):
    rows, report = read(tmp_path, line + "\n" + doc(" ".join(FOUR)))
    assert len(rows) == 3
    assert (report.records, report.malformed.counts.total()) == (2, 1)


# The real files


@pytest.mark.shared
def test_real_files_are_read_to_the_last_article(real_data):
    report = ParseReport()
    seen = bare = 0
    text = ""
    for file in sorted((real_data / "wikipedia" / "extracted_stubs_2018").rglob("wiki_*"))[::4]:
        text += file.read_text(encoding="utf-8")
        for article in wikipedia_extracted.articles(str(file), Reading(), report):
            seen += 1
            bare += not article.paragraphs
            assert not any("<br" in line or "<ref" in line for line in article.paragraphs)
    documents = re.findall(r'^<doc id="[^\n]*>\n(.*?)\n</doc>', text, re.DOTALL | re.MULTILINE)
    assert seen == report.records == len(documents) == 7_869
    titles_alone = sum("\n" not in document.strip() for document in documents)
    assert titles_alone <= bare <= 1.02 * titles_alone  # those of lists only, too
    assert not report.malformed.counts

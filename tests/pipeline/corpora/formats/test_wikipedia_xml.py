from __future__ import annotations

import bz2
import gzip
import itertools
import re
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import BadInput
from pipeline.corpora.file_tasks import ParseReport
from pipeline.corpora.formats import wikipedia, wikipedia_xml
from pipeline.corpora.formats.wikipedia import Options
from pipeline.corpora.formats.wikipedia_xml import cut_pages
from pipeline.corpora.raw import Reading

HEAD = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="en">
  <siteinfo>
    <sitename>Wikipedia</sitename>
    <namespaces>
      <namespace key="0" case="first-letter" />
      <namespace key="6" case="first-letter">Datei</namespace>
      <namespace key="14" case="first-letter">Kategorie</namespace>
    </namespaces>
  </siteinfo>
"""
TAIL = "</mediawiki>\n"
TEXT = "'''It''' is the first [[sentence]] here. This is the second sentence of it."
SENTENCES = ["It is the first sentence here.", "This is the second sentence of it."]


def page(name: object, text: str = TEXT, ns: int = 0, more: str = "", title: str = "") -> str:
    return f"""  <page>
    <title>{escape(title or f"Title {name}")}</title>
    <ns>{ns}</ns>
    <id>{name}</id>{more}
    <revision>
      <id>999</id>
      <contributor><username>Somebody</username><id>7</id></contributor>
      <model>wikitext</model>
      <text bytes="9" xml:space="preserve">{escape(text)}</text>
    </revision>
  </page>
"""


def dump(*pages: str) -> bytes:
    return (HEAD + "".join(pages) + TAIL).encode()


@pytest.fixture
def read(tmp_path: Path):
    """The articles of a file of the given bytes, of all its parts, and the report of them."""

    def run(data: bytes, **reading: Any) -> tuple[list[Any], ParseReport]:
        (tmp_path / "dump").write_bytes(data)
        report = ParseReport()
        found = [
            article
            for part in wikipedia_xml.parts(str(tmp_path / "dump"))
            for article in wikipedia_xml.articles(part, Reading(**reading), report)
        ]
        return found, report

    return run


# Pages


def test_a_page_becomes_an_article_of_plain_paragraphs(read):
    text = f"{{{{Infobox}}}}\n{TEXT}\n\n== Heading ==\n[[Datei:A.jpg|mini|Bild]]* & more.\n[[Kategorie:B]]"
    (article,), report = read(dump(page(12, text, title="Q&A")))
    assert (article.id, article.title, article.place) == ("12", "Q&A", 1)
    assert article.paragraphs == [" ".join(SENTENCES)]
    assert (report.records, report.malformed.counts, report.dropped.counts) == (1, {}, {})


@pytest.mark.parametrize(
    ("pack", "before"),
    [
        (bz2.compress, ""),
        (gzip.compress, '<?xml version="1.0" encoding="utf-8"?>\n'),
        (bytes, "\ufeff"),
        (bytes, "\n"),
    ],
)
def test_a_dump_is_known_by_its_first_bytes(tmp_path, pack, before):
    (tmp_path / "anything").write_bytes(pack(before.encode() + dump(page(1), page(2))))
    report = ParseReport()
    uri = str(tmp_path / "anything")
    rows = list(wikipedia.parse(uri, Reading(), report, Options()))
    assert [(row["context"], row["response"]) for row in rows] == [
        ([SENTENCES[0]], SENTENCES[1])
    ] * 2
    assert [row["group_id"] for row in rows] == ["1", "2"]


def test_pages_that_are_no_articles_are_counted_by_reason(read):
    articles, report = read(
        dump(
            page(1, "#REDIRECT [[Two]]", more='\n    <redirect title="Two" />'),
            page(2, " #redirect[[Two]]"),
            page(3, ns=1),
            page(4, ns=14, more='\n    <redirect title="Two" />'),
            page(5).replace("wikitext", "json"),
            page(6, "'''Mercury''' may refer to:\n* One\n{{disambiguation|geo}}"),
            page(7, "It may refer to:\n{{Human name disambiguation}}"),
            page(8, "{{hndis|A, B}}"),
            page(9, TEXT + " See [[Mercury]]{{disambiguation needed|date=May 2016}}."),
            page(10),
        )
    )
    assert [article.id for article in articles] == ["9", "10"]
    assert report.records == 10
    assert report.dropped.counts == {
        "redirect": 2,
        "outside the main namespace": 2,
        "no wikitext": 1,
        "disambiguation page": 3,
    }
    assert [sample["line"] for sample in report.dropped.samples] == list(range(1, 9))


def test_a_damaged_page_costs_that_page_only(read):
    broken = [
        page(1).replace("</title>", "</tittle>"),
        page(2).replace("</page>", ""),
        page(3).replace("<id>3</id>", ""),
        page(4, title="x").replace("<title>x</title>", "<title></title>"),
        page(5).replace("It", "&bull;"),
        page(6).replace("It", "\x01"),
        page(7, "[[a|" * 5000),
    ]
    pages = [text for number, bad in enumerate(broken) for text in (bad, page(100 + number))]
    articles, report = read(dump(*pages))
    assert [article.id for article in articles] == [str(100 + n) for n in range(7)]
    assert report.records == 14
    # The third has its revision's id only in the revision.
    assert report.malformed.counts == {
        "page that is no XML": 3,
        "page without an end, or too large": 1,
        "page without id, title or text": 2,
        "markup beyond the limits": 1,
    }


def test_bytes_that_are_no_utf8_become_a_sign_of_that(read):
    (article,), _ = read(dump(page(1, "It is caf\u00e9.")).replace("é".encode(), b"\xe9"))
    assert article.paragraphs == ["It is caf\ufffd."]


# Attacks


BOMB = (
    '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa">'
    + "".join(f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in itertools.pairwise("abcdefghij"))
    + "]>"
)


@pytest.mark.parametrize(
    "before", ['<?xml version="1.0"?>\n' + BOMB, '<!DOCTYPE x SYSTEM "file:///etc/passwd">']
)
def test_a_document_type_is_refused_whatever_it_holds(tmp_path, before):
    (tmp_path / "dump").write_bytes(before.encode() + dump(page(1).replace("It", "&j;")))
    with pytest.raises(BadInput, match=r"allowed: <mediawiki>.* never with a document type"):
        list(wikipedia.parse(str(tmp_path / "dump"), Reading(), ParseReport(), Options()))


def test_a_document_type_and_entities_inside_of_a_dump_are_never_expanded(read):
    inside = '<!DOCTYPE x [<!ENTITY a "aaa"><!ENTITY b SYSTEM "file:///etc/passwd">]>'
    articles, report = read(
        dump(
            inside, page(1).replace("It", "&a;&b;"), page(2).replace("<title>", inside + "<title>")
        )
    )
    assert articles == []
    assert report.malformed.counts == {"page that is no XML": 2}


def test_a_page_that_never_ends_is_given_up(monkeypatch):
    monkeypatch.setattr(wikipedia_xml, "MAX_PAGE_BYTES", 1000)
    read_so_far = 0

    def pieces():
        nonlocal read_so_far
        yield b"<page>1</page><page>2"
        for _ in range(100):
            read_so_far += 90
            yield b"x" * 90
        yield b"</page><pa"
        yield b"ge>3</page></mediawiki>"

    found = cut_pages(pieces(), [])
    assert next(found) == b"<page>1</page>"
    too_long = next(found)
    assert too_long.startswith(b"<page>2x") and 900 < len(too_long) < 1100
    assert read_so_far < 1200
    assert list(found) == [b"<page>3</page>"]


# Parts


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[bytes], int]:
    """A dump, in pieces cut anywhere, and the number of those that are ours."""
    inner = st.sampled_from([b"", b"a", b"<pag", b"</page", b"<id>", b"page>", b"\n"])
    pages = draw(st.lists(inner.map(lambda text: b"<page>" + text + b"</page>"), max_size=6))
    gaps = draw(st.lists(st.sampled_from([b"", b" ", b"\n<pag "]), min_size=7, max_size=7))
    data = b"<mediawiki>" + b"".join(
        map(b"".join, itertools.zip_longest(gaps, pages, fillvalue=b""))
    )
    data += b"</mediawiki>"
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    pieces = [data[a:b] for a, b in itertools.pairwise([0, *cuts, len(data)])]
    return data, pieces, draw(st.integers(0, len(pieces)))


@given(streams())
def test_wherever_a_dump_is_cut_each_page_is_in_one_part(stream):
    data, pieces, ours = stream
    every = re.findall(rb"<page>.*?</page>", data, re.DOTALL)
    first = list(cut_pages(pieces[:ours], pieces[ours:]))
    second = list(cut_pages(pieces[ours:], []))
    assert first + second == every
    # Ours are those whose tag begins in our pieces.
    place = len(b"".join(pieces[:ours]))
    assert len(first) == sum(found.start() < place for found in re.finditer(b"<page>", data))


PAGES = [
    page(n, f"{TEXT} Number {n} has these words. " + f"{n * 7919:x} " * 40) for n in range(100)
]
WHOLE = dump(*PAGES)


def multistream(data: bytes, bounds: list[int]) -> bytes:
    return b"".join(bz2.compress(data[a:b]) for a, b in itertools.pairwise([0, *bounds, len(data)]))


AT_PAGES = [WHOLE.index(f"<title>Title {n}<".encode()) - 13 for n in range(0, 100, 10)]
ANYWHERE = list(range(5000, len(WHOLE), 5000))


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (WHOLE, "many"),
        (multistream(WHOLE, AT_PAGES), "many"),
        (multistream(WHOLE, ANYWHERE), "many"),
        (bz2.compress(WHOLE), "many"),
        (gzip.compress(WHOLE, mtime=0), "one"),
    ],
    ids=["plain", "multistream", "streams cut anywhere", "one stream", "gz"],
)
def test_a_dump_read_in_parts_gives_each_page_once(read, monkeypatch, tmp_path, data, parts):
    monkeypatch.setattr(wikipedia_xml, "PART_BYTES", 1500)
    articles, report = read(data)
    uris = wikipedia_xml.parts(str(tmp_path / "dump"))
    assert len(uris) == (1 if parts == "one" else -(-len(data) // 1500))
    assert [int(article.id) for article in articles] == list(range(100))
    assert report.records == 100
    whole, _ = read_whole(str(tmp_path / "dump"))
    assert [a.paragraphs for a in articles] == [a.paragraphs for a in whole]


def read_whole(uri: str) -> tuple[list[Any], ParseReport]:
    report = ParseReport()
    return list(wikipedia_xml.articles(uri, Reading(), report)), report


def test_the_streams_of_a_multistream_dump_are_shared_out(read, monkeypatch, tmp_path):
    monkeypatch.setattr(wikipedia_xml, "PART_BYTES", 1500)
    read(multistream(WHOLE, AT_PAGES))
    sizes = [
        len(list(wikipedia_xml.articles(part, Reading(), ParseReport())))
        for part in wikipedia_xml.parts(str(tmp_path / "dump"))
    ]
    assert sum(sizes) == 100
    assert max(sizes) <= 40 and sum(size > 0 for size in sizes) >= 3


def test_small_files_and_files_of_other_formats_are_read_whole(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_bytes(dump(page(1)))
    assert wikipedia_xml.parts(str(file)) == [str(file)]
    monkeypatch.setattr(wikipedia_xml, "PART_BYTES", 10)
    file.write_text('<doc id="1" url="" title="A">\nA\n</doc>\n')
    assert wikipedia_xml.parts(str(file)) == [str(file)]


# Dumps that are cut off


@pytest.mark.parametrize("cut", ["in a page", "between pages", "in the bzip2 stream"])
def test_a_dump_that_is_cut_off_is_refused_until_it_is_told_to_keep_what_is_there(read, cut):
    text = dump(page(1), page(2), page(3))
    if cut == "in a page":
        data = text[: text.index(b"<id>3</id>")]
    elif cut == "between pages":
        data = text[: text.index(b"  <page>\n    <title>Title 3")]
    else:
        data = bz2.compress(text[: text.index(b"<id>3</id>")]) + bz2.compress(text)[:-20]
    with pytest.raises(BadInput, match=r"after 2 whole pages; --reading\.truncated keep"):
        read(data)
    articles, report = read(data, truncated="keep")
    assert [article.id for article in articles] == ["1", "2"]
    assert report.records == 2
    assert len(report.notes) == 1 and "its 2 whole pages are used" in report.notes[0]

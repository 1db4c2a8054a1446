from __future__ import annotations

import bz2
import html
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.corpora.file_tasks import ParseReport
from pipeline.corpora.formats import wikipedia_extracted, wikipedia_xml, wikitext
from pipeline.corpora.formats.articles import Article, split_sentences
from pipeline.corpora.formats.wikitext import MarkupError, paragraphs, tidy
from pipeline.corpora.raw import Reading

LEFT_OVER = re.compile(r"\[\[|\]\]|\{\{|\}\}|\{\||\|\}|</?ref\b|''|&[a-z]+;")


@pytest.mark.parametrize(
    ("markup", "shown"),
    [
        # Links
        ("An [[apple]] and [[pear]]s.", ["An apple and pears."]),
        ("A [[mental disorder|disorder]].", ["A disorder."]),
        ("A [[a|''b'' [[c]]]].", ["A b c."]),
        ("See [http://a.org this page] or http://b.org [http://c.org].",
         ["See this page or http://b.org."]),
        ("One.[[File:A.jpg|thumb|A [[nested]] caption.]] Two.", ["One. Two."]),
        ("One. [[image : A.jpg|left]][[Category:Things]]", ["One."]),
        ("See [[:Category:Things]].", ["See :Category:Things."]),
        ("[[fr:Autisme]]\nOne.[[zh-yue:X]]", ["One."]),
        ("[[wikt:word|word]]", ["word"]),
        ("[[Star Trek: Voyager]]", ["Star Trek: Voyager"]),
        # Templates, references, formulas, comments
        ("{{Infobox\n| a = {{b}}\n| c = [[d]]\n}}\nOne.", ["One."]),
        ("One.<ref name=a>Two.</ref> Three.<ref name=\"b/c\" />", ["One. Three."]),
        ("One <!-- two --> three.", ["One three."]),
        ("Now <math>a^{2}</math> holds. Good.", ["Good."]),
        ("One.\n<gallery>\nA.jpg|Two\n</gallery>\nThree.", ["One.", "Three."]),
        ("<syntaxhighlight lang=c>int a[[1]];</syntaxhighlight>", []),
        # Headings, lists, tables
        ("One.\n== Two ==\nThree.\n===Four ''five''===", ["One.", "Three."]),
        ("One.\n* two\n** three\n# four\n; five : six\n: seven\nEight.", ["One.", "Eight."]),
        ("<ul><li>One</li></ul>\nTwo.", ["Two."]),
        ("One.\n{| class=a\n|+ Two\n! Three\n|-\n| four || {{five}}\n{|\n| six\n|}\n|}\nSeven.",
         ["One.", "Seven."]),
        ("<table><tr><td>One</td></tr></table>Two.", ["Two."]),
        ("One.\n----\nTwo.", ["One.", "Two."]),
        # Style, entities, spaces
        ("'''''A''' b'' is ''c''.", ["A b is c."]),
        ("'''A is not closed.\nIt's ''one.", ["A is not closed.", "It's one."]),
        ("1&nbsp;km &amp; 2&thinsp;m &lt; 3 &#8211; 4", ["1 km & 2 m < 3 – 4"]),
        ("One  two.\n\n\nThree\t four.", ["One two.", "Three four."]),
        ("One.<br>Two.<br/>Three.", ["One.", "Two.", "Three."]),
        ("<p>One.</p><p>Two.</p><div>Three <small>four</small>.</div>",
         ["One.", "Two.", "Three four."]),
        ("<nowiki>[[a]]</nowiki> b", []),  # what looks like markup is no good text
        ("__NOTOC__\nOne __init__.", ["One __init__."]),
        # Holes
        ("A ({{IPA|a}}; born 1905) is ({{x}}) b{{c}}, d.", ["A (born 1905) is b, d."]),
        ("The tower is {{convert|300|m}} tall. It is old.", ["It is old."]),
        ("It is old. It weighs {{convert|3|t}}.", ["It is old."]),
        ("{{I|a}}It grew.{{sfn|A}} {{efn|a}} Then {{cn}} it fell. {{flag}}", ["It grew. Then it fell."]),
        ("It has {{pop|3}} people.", []),
        ("{{nowrap|The house}} is big. It is red.", ["It is red."]),
        ("It was in {{snd}}1990{{snd}}good. It is {{lang|de|Haus}}", []),
        ("{{Infobox}} 今天。 It was built in 1990{{cn}}", ["今天。 It was built in 1990"]),
        ("他用-{电脑}-看-{zh-hans:信息;zh-hant:資訊}-。-{H|zh-cn:a;zh-tw:b}-", ["他用电脑看信息。"]),
        # Markup that never ends
        ("One.\n{{a|b\nTwo.", ["One.", "Two."]),
        ("One.\n{| class=a\n| two\nThree.", ["One.", "Three."]),
        ("One.\n[[Two\nThree.", ["One.", "Three."]),
        ("One.\nTwo.<ref>Three.\nFour.", ["One.", "Four."]),
        ("One.</div></small> <div style='a'>Two.", ["One. Two."]),
        ("", []),
    ],
)  # fmt: skip
def test_what_markup_shows(markup, shown):
    assert paragraphs(markup) == shown


def test_a_wikis_own_names_hide_files_and_categories():
    markup = "Eins.[[Datei:A.jpg|mini|Zwei.]][[Kategorie:B]] [[Drei]]."
    assert paragraphs(markup, wikitext.HIDDEN | {"datei", "kategorie"}) == ["Eins. Drei."]
    assert paragraphs(markup) == ["Eins.mini|Zwei.Kategorie:B Drei."]


PIECES = ["[[", "]]", "{{", "}}", "{|", "|}", "|", "!", "\n", "<ref>", "</ref>", "<ref a=", "/>", "<br>",
          "'''", "''", "==", "*", ":", "&amp;", "<!--", "-->", "<div>", "</div>", "<math>", "http://a.b",
          "[", "]", "File:", "word", " ", ". ", "<nowiki>", "</nowiki>", "<", ">", "\u00a0"]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=60).map("".join))
def test_whatever_the_markup_no_mark_is_left_in_the_text(markup):
    for line in paragraphs(markup):
        assert not re.search(r"\[\[|\]\]|\{\{|\}\}|\{\||\|\}|</?ref\b|''", line), line
        assert line == " ".join(line.split()) != ""
        assert not line.startswith(("*", ":", "|", "!"))


@given(st.lists(st.text("abcXYZ 019,.é–?", max_size=60)))
def test_text_without_markup_is_shown_as_it_is(lines):
    found = paragraphs("\n".join(lines))
    squeezed = ["".join(line.split()) for line in lines]
    assert ["".join(line.split()) for line in found] == [line for line in squeezed if line]


@pytest.mark.parametrize("line", ["- an item", "• an item", ":: an answer", "  "])
def test_an_item_of_a_list_is_no_text(line):
    assert tidy(line) == ""


# Limits


@pytest.mark.parametrize(
    "mark",
    ["{{a|", "<ref>", "{|\n", "[http://a ", "<!--", '<b a="', "<br x", "[[{{<b>", "{", "<td a="],
)
def test_marks_beyond_measure_are_refused_before_they_cost_time(mark):
    with pytest.raises(MarkupError, match="more than 1,000 open marks"):
        paragraphs(mark * 20_000)
    with pytest.raises(MarkupError, match="never closed"):
        paragraphs(mark * 300 + "word " * 40_000)
    with pytest.raises(MarkupError, match="never closed"):  # however they hide behind others
        paragraphs("<s>" + mark * 300 + "word " * 40_000 + "</s>" + "word " * 1000)


def test_a_page_is_read_up_to_its_limits():
    assert paragraphs("{{a|" * 30 + "}}" * 30 + "One.") == ["One."]
    assert paragraphs("{{a|" * 900 + "}}" * 900 + "One.\nTwo.") == ["Two."]
    assert paragraphs("<p>One.\n" * 500) == ["One."] * 500
    assert paragraphs("a" * wikitext.MAX_CHARACTERS) == ["a" * wikitext.MAX_CHARACTERS]
    with pytest.raises(MarkupError, match="more than 1,048,576 characters"):
        paragraphs("a" * (wikitext.MAX_CHARACTERS + 1))


# Real pages


@pytest.fixture(scope="module")
def real_dumps(shared: Path) -> dict[Path, tuple[list[Article], ParseReport]]:
    """The articles of the XML dumps of 2016 and 2017, and their reports, by file."""
    dumps = {}
    for file in (shared / "data" / "wikipedia" / "xml_dump").glob("*.bz2"):
        report = ParseReport()
        dumps[file] = list(wikipedia_xml.articles(str(file), Reading(), report)), report
    return dumps


@pytest.fixture(scope="module")
def real_articles(real_dumps) -> list[Article]:
    return [article for articles, _ in real_dumps.values() for article in articles]


@pytest.mark.slow
@pytest.mark.shared
def test_the_real_dump_is_read_to_its_last_page(real_dumps):
    """The facts are those of a search for tags: 206 pages, 205 in the main namespace, 100 redirects."""
    (file,) = (file for file in real_dumps if file.name.endswith("shortened.bz2"))
    articles, report = real_dumps[file]
    pages = re.findall(rb"<page>.*?</page>", bz2.decompress(file.read_bytes()), re.DOTALL)
    main = [text for text in pages if b"<ns>0</ns>" in text]
    redirects = [text for text in main if b"<redirect title=" in text]
    assert report.records == len(pages) == 206
    assert report.dropped.counts == {
        "redirect": len(redirects),
        "outside the main namespace": len(pages) - len(main),
        "disambiguation page": 8,
    }
    assert len(articles) == 206 - report.dropped.counts.total() == 98
    assert not report.malformed.counts and not report.notes
    texts = {article.title: " ".join(article.paragraphs) for article in articles}
    assert "advocates self-governed societies based on voluntary institutions" in texts["Anarchism"]
    assert not {"Ada", "Austin (disambiguation)", "AccessibleComputing"} & texts.keys()


@pytest.mark.shared
def test_articles_full_of_tables_keep_their_prose_only(real_dumps):
    (file,) = (file for file in real_dumps if "table-markup" in file.name)
    articles, _ = real_dumps[file]
    assert len(articles) == 5
    vote = next(a for a in articles if a.title == "Constructive vote of no confidence")
    assert vote.paragraphs[0].startswith(
        "The constructive vote of no confidence (in German: konstruktives Misstrauensvotum, in Spanish:"
    )
    assert "Germany" not in vote.paragraphs  # a heading
    for article in articles:
        assert not [text for text in article.paragraphs if "|" in text or "bgcolor" in text]


@pytest.mark.shared
def test_real_pages_read_as_wikiextractor_reads_them(real_articles, real_data: Path):
    """Five articles are in the dump of 2016 and in WikiExtractor's output of later years, which keeps
    sentences with holes."""
    wanted = {"25": 0.6, "339": 0.6, "666": 0.45, "736": 0.5, "751": 0.84}
    ours = {a.id: sentence_set(a.paragraphs) for a in real_articles if a.id in wanted}
    folders = (real_data / "wikipedia" / f"extracted_{name}" for name in ("featured", "good"))
    files = (file for folder in folders for file in folder.rglob("wiki_*"))
    found = {}
    for file in sorted(files, key=lambda file: file.parts[-2:]):  # in order of the articles' ids
        text = file.read_text(encoding="utf-8")
        for name, body in re.findall(r'<doc id="(\d+)".*?>\n(.*?)</doc>', text, re.DOTALL):
            if name in wanted:
                theirs = sentence_set(html.unescape(body).split("\n"))
                found[name] = len(theirs & ours[name]) / len(theirs)
        if found.keys() == wanted.keys():
            break
    assert found.keys() == wanted.keys()
    assert {name for name in wanted if found[name] < wanted[name]} == set(), found


def sentence_set(lines: list[str]) -> set[str]:
    """The sentences of 5 words and more, as their letters: the tool writes ''a'' as "a"."""
    found = [text for line in lines for text in split_sentences(line)]
    return {" ".join(re.findall(r"\w+", text)).lower() for text in found if len(text.split()) >= 5}


@pytest.mark.shared
def test_no_mark_is_left_in_the_text_of_real_pages(real_articles, real_data: Path):
    texts = [text for article in real_articles for text in article.paragraphs]
    assert len(texts) > 5000
    (file,) = (real_data / "wikipedia" / "extracted_good" / "AA").glob("wiki_00")
    for article in wikipedia_extracted.articles(str(file), Reading(), ParseReport()):
        texts += article.paragraphs
    assert [text for text in texts if LEFT_OVER.search(text)] == []

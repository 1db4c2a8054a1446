"""Wikipedia's own dumps (`pages-articles`) as articles.

    <mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" xml:lang="en">
      <siteinfo> … <namespace key="6" case="first-letter">File</namespace> … </siteinfo>
      <page>
        <title>Autism</title> <ns>0</ns> <id>25</id>
        <revision> … <model>wikitext</model> <text>'''Autism''' is a …</text> </revision>
      </page>
    </mediawiki>

A page is cut out of the stream by its tags (its text has every "<" escaped) and parsed alone. So one page is
in memory, damage costs one page, and no document type, which XML's attacks by entities need, reaches the
parser. A large dump is read in parts, one task each. A part is a range of the stored bytes and owns the pages
that begin in it. Plain files can be divided anywhere, bzip2 files only where a stream begins: the multistream
dumps begin one every 100 pages.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from xml.etree import ElementTree

from pipeline import storage
from pipeline.config import BadInput
from pipeline.corpora import raw
from pipeline.corpora.file_tasks import Malformed, ParseReport
from pipeline.corpora.formats import wikitext
from pipeline.corpora.formats.articles import Article

PART_BYTES = 32 << 20  # of a multistream dump: some 20,000 articles, a minute or two of work
MAX_PAGE_BYTES = 8 << 20
_HEAD_BYTES = 1 << 16
_PART = re.compile(r"(.*)#bytes=(\d+)-(\d+)", re.DOTALL)
_XML = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:mediawiki|[?]xml|!DOCTYPE)\b")
_DUMP = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:<[?]xml[^>]*>\s*)?<mediawiki\b")
_HIDDEN = re.compile(r'<namespace key="(?:6|14)"[^>]*>([^<]+)<')  # of files and of categories
_STREAM = re.compile(rb"BZh[1-9]1AY&SY")  # the first 10 bytes of a bzip2 stream
_BEGIN, _END, _LAST = b"<page>", b"</page>", b"</mediawiki>"
_REDIRECT = re.compile(r"\s*#redirect\b", re.IGNORECASE)
# English templates that say so; not {{disambiguation needed}}, which stands behind a link.
_DISAMBIGUATION = re.compile(
    r"\{\{\s*(?:(?:[\w -]+ )?disambig(?:uation)?(?: page| cleanup)?|dab|disamb|hndis|geodis|geodab"
    r"|numberdis|roaddis|schooldis|mil-unit-dis)\s*[|}]|__DISAMBIG__",
    re.IGNORECASE,
)


def is_dump(part: str) -> bool:
    """Whether a file, or a part of one, begins like a dump.

    Raises BadInput for any other XML.
    """
    uri, *_ = _bounds(part)
    head = _head(uri)
    if _XML.match(head) and not _DUMP.match(head):
        raise BadInput(f"{uri}: begins with {head[:40]!r}; allowed: <mediawiki>, with or without an "
                       "XML declaration, never with a document type")  # fmt: skip
    return bool(_DUMP.match(head))


def parts(uri: str) -> list[str]:
    """A large dump that can be cut as `uri#bytes=first-end` for each part, any other file as it is."""
    size = storage.size_of(uri)
    if size <= PART_BYTES or not is_dump(uri):
        return [uri]
    with storage.open_input(uri) as stream:
        stored = stream.read(_HEAD_BYTES)
    if not (stored.startswith(b"BZh") or _DUMP.match(stored)):
        return [uri]  # gzip, Zstandard or xz: one stream
    starts = range(0, size, PART_BYTES)
    return [f"{uri}#bytes={start:012d}-{min(start + PART_BYTES, size)}" for start in starts]


def articles(part: str, reading: raw.Reading, report: ParseReport) -> Iterator[Article]:
    """The articles of a dump or a part of one; every other page is counted with its reason.

    Raises BadInput for a truncated stream, unless `reading` keeps those: then a note says so.
    """
    uri, start, end = _bounds(part)
    namespaces = _HIDDEN.findall(_head(uri).decode(errors="replace"))
    hidden = wikitext.HIDDEN.union(name.lower() for name in namespaces)
    place = 0
    try:
        for place, page in enumerate(_pages(uri, start, end), start=1):
            report.records += 1
            try:
                article, ruled_out = _article(page, place, hidden)
            except Malformed as error:
                report.malformed.add(str(error), part, place, page.decode(errors="replace"))
                continue
            if ruled_out:
                report.dropped.add(ruled_out, part, place, article.title)
            else:
                yield article
    except raw.Truncated as error:
        raw.accept_truncated(error, reading, report.notes, place, "pages")


def _article(page: bytes, place: int, hidden: frozenset[str]) -> tuple[Article, str]:
    """A page and why it is no article, "" if it is one.

    Raises Malformed.
    """
    if not page.endswith(_END):
        raise Malformed("page without an end, or too large")
    try:
        tree = ElementTree.fromstring(page.decode(errors="replace"))
    except ElementTree.ParseError:
        raise Malformed("page that is no XML") from None
    name, title = tree.findtext("id"), tree.findtext("title")
    markup = tree.findtext("revision/text")
    if not (name and title) or markup is None:
        raise Malformed("page without id, title or text")
    reason = ""
    if tree.findtext("ns", "0") != "0":
        reason = "outside the main namespace"
    elif tree.find("redirect") is not None or _REDIRECT.match(markup):
        reason = "redirect"
    elif tree.findtext("revision/model", "wikitext") != "wikitext":
        reason = "no wikitext"
    elif _DISAMBIGUATION.search(markup):
        reason = "disambiguation page"
    try:
        text = [] if reason else wikitext.paragraphs(markup, hidden)
    except wikitext.MarkupError:
        raise Malformed("markup beyond the limits") from None
    return Article(name, title, place, text), reason


# ---------------------------------------------------------------------------------------------------
# A range of the stored bytes to pages


def _bounds(part: str) -> tuple[str, int, int | None]:
    match = _PART.fullmatch(part)
    return (match[1], int(match[2]), int(match[3])) if match else (part, 0, None)


def _head(uri: str) -> bytes:
    """The first 64 KiB of the contents, which hold a dump's <siteinfo>; fewer of a broken stream."""
    head = b""
    with suppress(raw.Truncated):  # a later read raises it, too
        for piece in raw.slices(raw.read_decompressed(uri)):
            head += piece
            if len(head) >= _HEAD_BYTES:
                break
    return head[:_HEAD_BYTES]


def _boundary(uri: str, start: int, end: int) -> int:
    """The first place in the range where reading can begin; in bzip2, where a stream begins.

    Returns `end` if the range has no such place.
    """
    with storage.open_input(uri) as stream:
        if start == 0 or stream.read(3) != b"BZh":
            return start
        stream.seek(start)
        window = b""
        while stream.tell() < end + 9 and (piece := stream.read(1 << 20)):
            window = window[-9:] + piece
            if match := _STREAM.search(window):
                return min(end, int(stream.tell()) - len(window) + match.start())
    return end


def _pages(uri: str, start: int, end: int | None) -> Iterator[bytes]:
    """The pages that begin in the range. Raises Truncated where the dump does not go on to its end."""
    size = storage.size_of(uri)
    end = size if end is None else end
    read_start = _boundary(uri, start, end)
    if read_start == end:  # one stream of bzip2 goes on through all of the range
        return
    read_end = _boundary(uri, end, size)
    range_bytes = raw.slices(raw.read_decompressed(uri, read_start, read_end))
    is_complete = yield from cut_pages(
        range_bytes, raw.slices(raw.read_decompressed(uri, read_end))
    )
    if not is_complete:
        raise raw.Truncated(f"{uri}: the dump ends without </mediawiki>")


def cut_pages(
    range_pieces: Iterable[bytes], later_pieces: Iterable[bytes]
) -> Generator[bytes, None, bool]:
    """`<page>…</page>` of every page that begins in `range_pieces`; the last may end in `later_pieces`.

    A page without an end is cut off where the next one begins, one that is too long at 8 MiB.
    Returns whether another page or the dump's end follows.
    """
    text = b""  # begins with the page that is open, or is too short for any tag
    range_end: int | None = None  # pages from here on belong to the next range
    is_complete = False
    pieces = itertools.chain(
        ((piece, True) for piece in range_pieces), ((piece, False) for piece in later_pieces)
    )
    for piece, in_range in pieces:
        if not in_range and range_end is None:
            range_end = len(text)
        text += piece
        position = 0
        while (page := text.find(_BEGIN, position)) >= 0:
            if range_end is not None and page >= range_end:
                return True
            end = text.find(_END, page)
            following = text.find(_BEGIN, page + 1, end if end >= 0 else len(text))
            if following >= 0:
                position = following
            elif end >= 0:
                position = end + len(_END)
            elif len(text) - page >= MAX_PAGE_BYTES:
                position = len(text) - len(_LAST) + 1
            else:
                position = page
                break
            yield text[page:position]
        else:
            is_complete = is_complete or _LAST in text[position:]
            position = max(position, len(text) - len(_LAST) + 1)
        text = text[position:]
        range_end = None if range_end is None else range_end - position
    return is_complete

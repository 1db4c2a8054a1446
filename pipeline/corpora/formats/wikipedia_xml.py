"""Wikipedia's own dumps (`pages-articles`) as articles.

    <mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" xml:lang="en">
      <siteinfo> … <namespace key="6" case="first-letter">File</namespace> … </siteinfo>
      <page>
        <title>Autism</title> <ns>0</ns> <id>25</id>
        <revision> … <model>wikitext</model> <text>'''Autism''' is a …</text> </revision>
      </page>
    </mediawiki>

A page is cut out of the stream by its tags (its text has every "<" escaped) and parsed alone. So the
memory is that of one page, one page's damage costs that page, and no document type, which XML's
attacks by entities need, ever gets to the parser. A large dump is read in parts, a task each: a part is a
range of the stored bytes and owns the pages that begin in it. Plain files can be cut anywhere, bzip2
where one of its streams begins: the multistream dumps begin one every 100 pages.
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
from pipeline.corpora.file_tasks import Account
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
    """Whether it is a file, or a part of one, that begins as a dump does.

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


class _Malformed(Exception):
    """Its text is the reason."""


def articles(part: str, reading: raw.Reading, account: Account) -> Iterator[Article]:
    """The articles of a dump or a part of one; every other page is counted with its reason.

    Raises BadInput for a stream that is cut off, unless those are kept: then a note says so.
    """
    uri, start, end = _bounds(part)
    namespaces = _HIDDEN.findall(_head(uri).decode(errors="replace"))
    hidden = wikitext.HIDDEN.union(name.lower() for name in namespaces)
    place = 0
    try:
        for place, page in enumerate(_pages(uri, start, end), start=1):
            account.records += 1
            try:
                article, ruled_out = _article(page, place, hidden)
            except _Malformed as error:
                account.malformed.add(str(error), part, place, page.decode(errors="replace"))
                continue
            if ruled_out:
                account.dropped.add(ruled_out, part, place, article.title)
            else:
                yield article
    except raw.CutOff as error:
        if reading.truncated == "stop":
            raise raw.cut_off_input(error, place, "pages") from None
        account.notes.append(raw.cut_off_note(error, place, "pages"))


def _article(page: bytes, place: int, hidden: frozenset[str]) -> tuple[Article, str]:
    """A page and why it is no article, "" if it is one.

    Raises _Malformed.
    """
    if not page.endswith(_END):
        raise _Malformed("page without an end, or too large")
    try:
        tree = ElementTree.fromstring(page.decode(errors="replace"))
    except ElementTree.ParseError:
        raise _Malformed("page that is no XML") from None
    name, title = tree.findtext("id"), tree.findtext("title")
    markup = tree.findtext("revision/text")
    if not (name and title) or markup is None:
        raise _Malformed("page without id, title or text")
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
        raise _Malformed("markup beyond the limits") from None
    return Article(name, title, place, text), reason


# ---------------------------------------------------------------------------------------------------
# A range of the stored bytes to pages


def _bounds(part: str) -> tuple[str, int, int | None]:
    found = _PART.fullmatch(part)
    return (found[1], int(found[2]), int(found[3])) if found else (part, 0, None)


def _head(uri: str) -> bytes:
    """The first 64 KiB of the contents, which hold a dump's <siteinfo>; fewer of a broken stream."""
    head = b""
    with suppress(raw.CutOff):  # who reads on meets it, too
        for piece in raw.slices(raw.decompressed(uri)):
            head += piece
            if len(head) >= _HEAD_BYTES:
                break
    return head[:_HEAD_BYTES]


def _boundary(uri: str, first: int, before: int) -> int:
    """The first place in the range where reading can begin: in bzip2, where a stream does.

    `before`, its end, where there is none.
    """
    with storage.open_input(uri) as stream:
        if first == 0 or stream.read(3) != b"BZh":
            return first
        stream.seek(first)
        window = b""
        while stream.tell() < before + 9 and (piece := stream.read(1 << 20)):
            window = window[-9:] + piece
            if found := _STREAM.search(window):
                return min(before, int(stream.tell()) - len(window) + found.start())
    return before


def _pages(uri: str, start: int, end: int | None) -> Iterator[bytes]:
    """The pages that begin in the range. Raises CutOff where the dump does not go on to its end."""
    size = storage.size_of(uri)
    end = size if end is None else end
    begin = _boundary(uri, start, end)
    if begin == end:  # one stream of bzip2 goes on through all of the range
        return
    finish = _boundary(uri, end, size)
    own = raw.slices(raw.decompressed(uri, begin, finish))
    whole = yield from cut_pages(own, raw.slices(raw.decompressed(uri, finish)))
    if not whole:
        raise raw.CutOff(f"{uri}: the dump ends without </mediawiki>")


def cut_pages(own: Iterable[bytes], after: Iterable[bytes]) -> Generator[bytes, None, bool]:
    """`<page>…</page>` of every page that begins in `own`; the last one may end in `after`.

    A page without an end is cut off where the next one begins, one that is too long at 8 MiB.
    Returns whether another page or the dump's end follows.
    """
    text = b""  # begins with the page that is open, or is too short for any tag
    own_end: int | None = None  # the place in it from which on pages are not ours
    whole = False
    pieces = itertools.chain(((piece, True) for piece in own), ((piece, False) for piece in after))
    for piece, is_own in pieces:
        if not is_own and own_end is None:
            own_end = len(text)
        text += piece
        at = 0
        while (page := text.find(_BEGIN, at)) >= 0:
            if own_end is not None and page >= own_end:
                return True
            end = text.find(_END, page)
            following = text.find(_BEGIN, page + 1, end if end >= 0 else len(text))
            if following >= 0:
                at = following
            elif end >= 0:
                at = end + len(_END)
            elif len(text) - page >= MAX_PAGE_BYTES:
                at = len(text) - len(_LAST) + 1
            else:
                at = page
                break
            yield text[page:at]
        else:
            whole = whole or _LAST in text[at:]
            at = max(at, len(text) - len(_LAST) + 1)
        text = text[at:]
        own_end = None if own_end is None else own_end - at
    return whole

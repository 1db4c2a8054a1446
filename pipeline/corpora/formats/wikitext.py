"""Wikipedia's markup to plain text: paragraphs, one a line, as WikiExtractor writes them.

    '''Autism''' is a [[mental disorder|disorder]].<ref>A book</ref>   →   Autism is a disorder.

Templates, tables, lists, headings, references, formulas, files and categories are left out, and so are
their remains (empty brackets, marks of markup that does not end). A sentence in whose middle a template or a
formula stood, such as "is {{convert|300|m}} tall", is left out, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import mwparserfromhell
from mwparserfromhell.nodes import (
    ExternalLink,
    Heading,
    HTMLEntity,
    Node,
    Tag,
    Template,
    Text,
    Wikilink,
)
from mwparserfromhell.parser import ParserError
from mwparserfromhell.wikicode import Wikicode

from pipeline.corpora.formats.articles import LOWER, split_sentences

# Half of what MediaWiki takes ($wgMaxArticleSize). The parsed tree has up to 600 bytes a character; the
# few longer pages are lists and tables.
MAX_CHARACTERS = 1 << 20
_MAX_DEPTH = 1000
# The parser begins again behind each mark that is never closed, and reads up to where the page, or
# what holds the mark, ends: 0.2 µs a character of text, 2 µs of tables. Real pages have up to 0.2 M.
_MAX_REREAD_CHARACTERS = 20_000_000

# Namespaces whose links show no text, in any language; a wiki's own names come with its dump.
HIDDEN = frozenset({"file", "image", "media", "category"})
_DROPPED = {
    "ce", "chem", "code", "dl", "gallery", "graph", "h1", "h2", "h3", "h4", "h5", "h6", "hiero",
    "imagemap", "indicator", "inputbox", "mapframe", "maplink", "math", "ol", "pre", "ref", "references",
    "score", "script", "section", "source", "style", "syntaxhighlight", "table", "templatedata",
    "timeline", "ul",
}  # fmt: skip
_IN_SENTENCES = {"ce", "chem", "code", "hiero", "math", "score"}  # of those dropped
# Templates that show a note or nothing; their lack is no hole.
_NOTES = re.compile(
    r"(?:#|:|cit|ref|sfn|efn|harv|note|r$|rp$|cn$|fact$|clarify|when|who|which|where|by whom|dead|better|page"
    r"|verif|dubious|anchor|pp\b|ipa|respell|audio|pron|coord|short desc|use |main$|see also|further)",
    re.IGNORECASE,
)
_HOLE = "\ue000"  # for private use: no page has it
_NO_HOLE = (
    re.compile(rf"(?<=\()[^()]*{_HOLE}[^()]*(?=\))"),  # in brackets, which are tidied
    # Before the first sentence, behind the last one, right behind a word, and between sentences.
    re.compile(
        rf"^[\s{_HOLE}]+(?![{LOWER}\s{_HOLE}])|(?<=[^\w\s{_HOLE}])[\s{_HOLE}]+$"
        rf"|(?<=[^\s{_HOLE}]){_HOLE}+(?!\w)|(?<=[.!?])\s{_HOLE}+(?=\s)"
    ),
)
_OWN_LINE = {
    "blockquote", "br", "center", "dd", "div", "dt", "hr", "li", "p", "poem", "td", "th", "tr",
}  # fmt: skip

_MARK = re.compile(
    r"<!--|-->|\{\{|\}\}|\{\||\|\}|\[\[|\]\]|\[(?=\w+:|//)|\]|</?[a-zA-Z]+[^<>{}\[\]]*>?"
)
_ENDS = {"-->": "<!--", "}}": "{{", "|}": "{|", "]]": "[[", "]": "["}
_TAG_NAME = re.compile(r"<(/?)([a-z]+)")
_ALONE = {"br", "dd", "dt", "hr", "img", "li", "td", "th", "tr", "wbr"}  # need no end

_STYLE = re.compile(r"'{2,}|__[A-Z]{4,}__")
_TAG = re.compile(  # those that have lost their other half; "<QUOTE>" may be text
    r"</?(?:abbr|b|big|blockquote|br|center|cite|code|div|em|font|hr|i|includeonly|li|nowiki|noinclude|ol"
    r"|onlyinclude|p|poem|references|s|section|small|span|strike|strong|sub|sup|table|td|th|tr|tt|u|ul)"
    r"\b[^<>]*>",
    re.IGNORECASE,
)
# Markup that the parser could not make out. Such a line is no text any more.
_BROKEN = re.compile(r"\[\[|\]\]|\{\{|\}\}|\{\||\|\}|</?ref\b|^\||^!", re.IGNORECASE)
_ITEM = ("*", "#", ":", ";", "- ", "• ")
_HOLES = (
    (re.compile(r"\(\s*[,;:]\s*"), "("),  # "(; born 1905)": a pronunciation was there
    (re.compile(r"\s*\(\s*\)|\s*\[\s*\]"), ""),
    (re.compile(r"\s+(?=[,.;:)](?:\s|$))"), ""),
)
# Chinese in two scripts: -{电脑}-, -{zh-hans:信息;zh-hant:資訊}-, -{H|zh-cn:…}-, which shows nothing.
_VARIANTS = re.compile(r"-\{(?:([A-Za-z;-]*)\|)?(?:\s*zh[\w-]*\s*:)?([^{}:;]*)(?:;[^{}]*)?\}-")
_INTERWIKI = re.compile(r"[a-z][a-z-]+:")


class MarkupError(Exception):
    """The page is beyond what can be read in bounded time and memory."""


def paragraphs(markup: str, hidden: frozenset[str] = HIDDEN) -> list[str]:
    """The text of a page. `hidden`: names of the namespaces of files and categories, lower case.

    Raises MarkupError where the page is too large or its marks are too deep or too many.
    """
    _check_limits(markup)
    try:
        # Bold and italics are read as text and taken out below: they are often not closed.
        code = mwparserfromhell.parse(markup, skip_style_tags=True)
        pieces: list[str] = []
        _write(code, pieces.append, hidden)
    except (ParserError, RecursionError) as error:
        raise MarkupError(f"markup that the parser gives up on ({error})") from None
    text = _TAG.sub("", _STYLE.sub("", "".join(pieces)))
    return [line for raw in text.split("\n") if (line := tidy(raw))]


def tidy(line: str) -> str:
    """A line of text without holes; "" for an item of a list and for broken markup."""
    line = _VARIANTS.sub(lambda match: "" if match[1] in ("H", "T") else match[2], line)
    line = " ".join(line.split())
    if _HOLE in line:
        for pattern in _NO_HOLE:
            line = pattern.sub(lambda match: match[0].replace(_HOLE, ""), line)
        line = " ".join(text for text in split_sentences(line) if _HOLE not in text)
    if line.startswith(_ITEM) or _BROKEN.search(line):
        return ""
    for pattern, replacement in _HOLES:
        line = pattern.sub(replacement, line)
    return line


def has_markup(line: str) -> bool:
    """Whether a line that should be text holds what only markup does."""
    return "[[" in line or "{{" in line or "<" in line


def _check_limits(markup: str) -> None:
    """Refuses markup that would take the parser too long: it counts the marks that are never closed."""
    if len(markup) > MAX_CHARACTERS:
        raise MarkupError(f"more than {MAX_CHARACTERS:,} characters")
    open_marks: list[tuple[str, int]] = []
    reread_characters = 0
    for match in _MARK.finditer(markup):
        mark = match[0].lower()
        if tag := _TAG_NAME.match(mark):
            slash, name = tag.groups()
            mark, opening = f"<{name}", f"<{name}" if slash else None
            if not slash and (match[0].endswith("/>") or (name in _ALONE and match[0][-1] == ">")):
                continue
        else:
            opening = _ENDS.get(mark)
        if opening:
            for place in range(len(open_marks) - 1, -1, -1):
                if open_marks[place][0] == opening:
                    reread_characters += sum(
                        match.start() - start for _, start in open_marks[place + 1 :]
                    )
                    del open_marks[place:]
                    break
        else:
            open_marks.append((mark, match.start()))
            if len(open_marks) > _MAX_DEPTH:
                raise MarkupError(f"more than {_MAX_DEPTH:,} open marks")
    reread_characters += sum(len(markup) - start for _, start in open_marks)
    if reread_characters > _MAX_REREAD_CHARACTERS:
        raise MarkupError("too many marks that are never closed")


# ---------------------------------------------------------------------------------------------------
# The text of each node

Write = Callable[[str], None]


def _write(code: Wikicode, write: Write, hidden: frozenset[str]) -> None:
    for node in code.nodes:
        _show(node, write, hidden)


def _show(node: Node, write: Write, hidden: frozenset[str]) -> None:
    """Arguments of templates and comments show nothing."""
    match node:
        case Text():
            write(str(node.value))
        case Template() if not _NOTES.match(str(node.name).strip()):
            write(_HOLE)
        case HTMLEntity():
            write(node.normalize())
        case Heading():
            write("\n")
        case Wikilink():
            _show_link(node, write, hidden)
        case ExternalLink() if node.title is not None:
            _write(node.title, write, hidden)
        case ExternalLink() if not node.brackets:
            write(str(node.url))
        case Tag():
            _show_tag(node, write, hidden)


def _show_link(node: Wikilink, write: Write, hidden: frozenset[str]) -> None:
    target = str(node.title).strip()
    namespace = target.partition(":")[0].strip().lower() if ":" in target else ""
    if namespace in hidden:
        return
    if node.text is not None:
        _write(node.text, write, hidden)
    elif not _INTERWIKI.match(target):  # [[fr:Autisme]] is a link at the page's side
        _write(node.title, write, hidden)


def _show_tag(node: Tag, write: Write, hidden: frozenset[str]) -> None:
    name = str(node.tag).strip().lower()
    if name in _DROPPED:
        if name in _IN_SENTENCES:
            write(_HOLE)
        return
    own_line = name in _OWN_LINE
    if own_line:
        # An item's mark stays, so that `tidy` knows the line by it.
        write(str(node.wiki_markup) if node.wiki_markup in _ITEM else "\n")
    if node.contents is not None:
        _write(node.contents, write, hidden)
    if own_line and not node.wiki_markup:
        write("\n")

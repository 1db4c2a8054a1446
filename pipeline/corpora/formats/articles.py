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

_OPENING, _CLOSING = "\"'(\\[«»„“”‚‘’「『（¿¡—–", "\"')\\]»«“”’‘」』）"
# Letters of scripts that put no spaces between words.
_UNSPACED_LETTER = (
    r"[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u1980-\u19df\u1a20-\u1aad\u1b00-\u1b7f\u3041-\u30ff\u3400-\u9fff"
    r"\ua980-\ua9df\uf900-\ufaff\uff66-\uff9f]"
)
_UNSPACED = re.compile(_UNSPACED_LETTER)
# Thai and Lao end a sentence by a space alone, which stands beside numbers and names as well. So one ends
# a sentence where 10 letters, some five words, stand on both sides.
_THAI_WORDS = r"[\u0e01-\u0e2e\u0e30-\u0e45\u0e47-\u0e4e\u0e81-\u0ec4\u0ec8-\u0ecd]{10}"
_THAI_END = re.compile(rf"\s(?<={_THAI_WORDS}\s)\s*(?={_THAI_WORDS})")
# In Unicode the usual letters of Georgian are lower case, but its texts have no capitals.
LOWER = "".join(
    letter for letter in map(chr, range(0x10000)) if letter.islower() and not "ა" <= letter <= "ჿ"
)
_MARKS = ".!?…؟۔‼⁇⁈⁉"
_MARKS_WITHOUT_SPACE = "。！？｡।॥։።፧။។៕།༎᱾꯫܀᠃᠉꧉꩝᭟"
# German writes ordinals as digits with a full stop.
_GERMAN_ORDINAL = (
    r"(?<=\d\.\s)(?:(?:Januar|Februar|März|April|Mai|Juni|Juli|August|September|Oktober|November|Dezember"
    r"|Jahrhunderts?|Jahrtausends?|Jh|Bundesliga|Liga|Kreisklasse|Klasse|Mannschaft|Platz|Rang|Auflage|Weltkrieg"
    r"|Armee|Division|Wahlperiode|Spieltag|Runde|Etage|Stock|Obergeschoss|Lebensjahr|Geburtstag|Todestag|FC)\b"
    r"|(?:Jan|Feb|Sept?|Okt|Nov|Dez)\.)"
)
# A day, a month and a year, as in 3. 5. 1900 and 1990. 3. 1.; in Korean a word follows.
_DATE = r"(?:(?<=\d\.\s)\d{1,2}\.(?!\d)|(?:(?<=\d\.\s\d\.\s)|(?<=\d\.\s\d\d\.\s))(?:\d{4}\b|[\uac00-\ud7a3]))"
# A mark, and the beginning of a sentence: a digit or a letter that is not lower case, so also one of a script
# without cases, such as Arabic or Hindi. A semicolon asks a question in Greek, a colon ends a sentence in
# Armenian, and many write Hindi's mark as | and Amharic's as two word separators, ፡፡. Marks of Chinese,
# Japanese and Hindi need no space behind them.
_SENTENCE_END = re.compile(
    rf"[{_MARKS}{_MARKS_WITHOUT_SPACE}．;\u037e:|፡](?:"
    rf"(?:(?<=[{_MARKS}])|(?<=[\u0370-\u03ff\u1f00-\u1fff][;\u037e])|(?<=[\u0561-\u0587]:)"
    rf"|(?<=[\u0900-\u0d7f]\|)|(?<=[\u0900-\u0d7f]\s\|))"
    rf"(?:[{_CLOSING}]|\s»|\[\d{{1,3}}\])*\s+(?!{_GERMAN_ORDINAL}|{_DATE})"
    rf"(?=(?:[{_OPENING}]\s?){{0,2}}[$€£₹¥]?(?![{LOWER}])[^\W_])"
    rf"|(?<=[{_MARKS_WITHOUT_SPACE}])(?![{_CLOSING}{_MARKS_WITHOUT_SPACE}])\s*(?=\S)"
    rf"|(?<=፡፡)(?![{_CLOSING}፡])\s*(?=\S)"
    r"|(?<=．)\s*(?=[^\W\d])"  # not ３．１４
    r"|(?<=。)[”’」』）]\s*(?![とっなのはがをにでも，、。」』）])(?=\S)"  # と: he said
    rf"|(?<={_UNSPACED_LETTER}[?!])(?={_UNSPACED_LETTER}))"
)
_ABBREVIATION = re.compile(
    r"(?:(?<!['’])\b(?:Mr|Mrs|Ms|Messrs|Dr|Prof|St|Mt|Jr|Sr|No|Vol|vs|etc|ca|cf|viz|approx|eds?|et al"
    r"|op\. cit|Inc|Ltd|Co|Corp|Gen|Col|Capt|Maj|Cmdr|Adm|Sgt|Lt|Rev|Hon|Gov|Sen|Rep|Fig|e\.g|i\.e"
    r"|Nr|Abb|bzw|Bd|Str|geb|gest|evtl|ggf|inkl|Mio|Mrd|Hr|Fr|Fa|Dr\. (?:med|jur|phil|rer|nat)|[Vv]gl|sog"
    r"|ehem|Hrsg|röm|kath|evang|lat|griech|engl|franz|frz|ital|österr|dt|Pfr"
    r"|Mme|Mlle|MM|Mgr|Ste|[Bb]oul|[Éé]d|trad|p\. ex"
    r"|Sra?|Sto|Sta|Dra?|Dña|Ing|Lic|EE|Av|Avda|Uds?|[Ss]igg?|[Dd]ott|avv|[Aa]d es|[Cc]fr|tzw|bijv"
    r"|dhr|mevr|eks|t\.ex|esim"
    r"|[Uu]l|[Nn]p|tj|tzn|prof|im|inż|mgr|św|ang|niem|łac|ros|[Nn]apř|tzv|sv|angl|něm|pl|örn|TP|ThS|Αγ"
    r"|[Уу]л|[Вв]ул|[Пп]росп|[Пп]ер|[Пп]л|[Бб]ул|им|[Сс]м|[Сс]р|[Аа]кад|[Пп]роф|[Дд]оц|[Ии]зд|[Рр]ед"
    r"|[Гг]р|[Кк]н|[Сс]в|[Оо]з|[Пп]ос|[Дд]ер|[Кк]в|англ|н[еі]м|фр|франц|лат|греч|гр|исп|итал?"
    r"|польск|укр|рос|рус|яп|араб|ивр|нидерл|швед|болг|чеш|серб"
    r"|डॉ|प्रो|कि\.मी)"
    # An initial, which is not the last letter behind a vowel sign, as in Thai, nor that of т. д. (etc.), nor
    # an island or a river of Scandinavia.
    r"|(?<![^\s.(\[\"'«„“-])(?![øöå]\.|(?:(?<=т\.)|(?<=т\.\s))[дп]\.)[^\W\d_])\.$"
)
# What stands before a number, of figures, pages, days or years, and elsewhere may end a sentence.
_BEFORE_NUMBER = re.compile(
    r"(?:\b(?:[Ff]igs?|[Ee]qs?|[Ss]ects?|[Ss][eé]c|[Cc]h|[Cc]haps?|[Tt]ab|[Aa]rts?|[Nn]os?|[Nn]rn?|[Rr]efs?|[Vv]ols?"
    r"|pp|[Oo]p|[Ee]x|[Aa]pp|Abs|[Kk]ap|Abt|Ausg|Aufl|Jg|\w*[Ss]tr|[Tt]abl|[Rr]ys|[Cc]ap|[Pp][áa]gs?|[Nn]úm|kb"
    r"|[Рр]ис|[Тт]абл|[Гг]л|[Сс]тр|[Сс]т|пп|[Рр]азд|[Ии]лл?|[Тт]ом|[Вв]ып|[Оо]к|[Рр]од|[Уу]м|ok"
    r"|[Jj]an|[Ff]eb|[Mm]ar|[Aa]pr|[Jj]un|[Jj]ul|[Aa]ug|[Ss]ept?|[Oo][ck]t|[Nn]ov|[Dd]e[cz]|janv|févr|juil"
    r"|ene|abr|янв|февр?|апр|авг|сент?|окт|нояб?|дек|[Aa]vr?))\.$"
)
_NUMBER = re.compile(r"[\d§№]|[IVXLCM]{2,}\b|[VX]\b|J\.-C")  # not the word I; av. J.-C. is BC
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
    """Where a script puts no spaces between words, two letters count as a word, as in most of Chinese.
    Amharic may put ፡ between them."""
    return len(text.replace("፡", " ").split()) + len(_UNSPACED.findall(text)) // 2


def split_sentences(paragraph: str) -> list[str]:
    """Cuts at sentence ends, in any script, except after abbreviations and initials."""
    sentences: list[str] = []
    start = 0
    for end in _SENTENCE_END.finditer(paragraph):
        # Of a list of initials, the whole text before each would take the square of the time.
        ending = paragraph[max(start, end.start() - _LONGEST_ABBREVIATION) : end.start() + 1]
        is_before_number = _NUMBER.match(paragraph, end.end()) and _BEFORE_NUMBER.search(ending)
        if not (_ABBREVIATION.search(ending) or is_before_number):
            sentences.append(paragraph[start : end.end()].strip())
            start = end.end()
    sentences.append(paragraph[start:].strip())
    if not paragraph.isascii():
        sentences = [part for text in sentences for part in _THAI_END.split(text)]
    return [text for text in sentences if text]

"""The embedded sample corpora: raw files in the public formats, generated from a seed in seconds.

    <folder>/reddit_dump/RC_2011-01.zst  RC_2011-02.bz2         Reddit comment dumps
    <folder>/convai2/train_self_original.sample_no_cands.txt    ConvAI2 without candidates
    <folder>/convai2/valid_self_original.sample.txt             ConvAI2 with 20 candidates
    <folder>/wikipedia/extracted/AA/wiki_00 …                   WikiExtractor output

People have traits and talk about what goes with them (`world.yaml`). A reply names the things that go with a
trait, never its words: what links "i work as a nurse" to "the ward was full again" has to be learnt from
other people who are nurses. No person is in two files of ConvAI2, so that a score on `valid` is learnt from
other people. Threads hold what real dumps hold: deleted, overlong and one-word comments, bots, names and
addresses.
"""

from __future__ import annotations

import bz2
import html
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
import zstandard

CANDIDATES = 20
ECHO_SHARE = 0.5


class Value(NamedTuple):
    """One thing that a person can be, have or like."""

    statements: list[str]
    things: list[str]


@dataclass(frozen=True)
class Topic:
    """Something people ask each other about."""

    questions: list[str]
    """With the *word* that an answer may take up."""
    replies: list[str]
    """`{a}` and `{b}` stand for things of the speaker's value; without `{b}`, `{a}` is two of them."""
    heading: str
    """The section of an article about a town that this topic becomes."""
    facts: list[str]
    """Sentences of that section."""
    values: list[Value]


_WORLD = yaml.safe_load(Path(__file__).with_name("world.yaml").read_text(encoding="utf-8"))
_TOPICS = {
    name: Topic(**{**topic, "values": [Value(**value) for value in topic["values"]]})
    for name, topic in _WORLD["topics"].items()
}
_PHRASES: dict[str, list[str]] = _WORLD["phrases"]


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is generated; the defaults make 8 MB of raw text in 3 seconds."""

    reddit_threads: int = 4000
    train_dialogues: int = 3000
    valid_dialogues: int = 300
    articles: int = 1600


@dataclass
class Person:
    """A mind: one value for each topic, and which things of it were talked about already."""

    values: dict[str, Value]
    rng: random.Random

    def __post_init__(self) -> None:
        self._unused: dict[str, list[str]] = {}

    def statement(self, topic: str) -> str:
        return self.rng.choice(self.values[topic].statements)

    def answer(self, topic: str, question: str) -> str:
        """A reply to `ask`'s question that often takes up its word, as people do."""
        reply = self.reply(topic)
        if self.rng.random() < ECHO_SHARE:
            word = question.split("*")[1]
            reply = _phrase(self.rng, "echoes").format(word=word, reply=reply)
        return reply

    def reply(self, topic: str) -> str:
        """Something about the person's value of a topic that does not name it."""
        frame = self.rng.choice(_TOPICS[topic].replies)
        a, b = self._thing(topic), self._thing(topic)
        text = frame.format(a=a, b=b) if "{b}" in frame else frame.format(a=f"{a} and {b}")
        opener, closer = _phrase(self.rng, "openers"), _phrase(self.rng, "closers")
        return " ".join(f"{opener} {text} {closer}".split())

    def _thing(self, topic: str) -> str:
        unused = self._unused.setdefault(topic, [])
        if not unused:
            unused += self.rng.sample(self.values[topic].things, k=8)
        return unused.pop()


def generate(folder: Path, seed: int = 0, size: Size | None = None) -> None:
    """Writes the files of all three corpora."""
    size = size or Size()
    rng = random.Random(seed)
    people = _people(rng)
    _write_convai2(folder / "convai2", people, rng, size)
    _write_reddit(folder / "reddit_dump", people, rng, size)
    _write_wikipedia(folder / "wikipedia" / "extracted" / "AA", rng, size)


def _phrase(rng: random.Random, kind: str) -> str:
    return rng.choice(_PHRASES[kind])


def _people(rng: random.Random) -> Iterator[Person]:
    """People without end, no two of them alike."""
    keys = set()
    while True:
        values = {name: rng.choice(topic.values) for name, topic in _TOPICS.items()}
        key = tuple(tuple(value.statements) for value in values.values())
        if key not in keys:
            keys.add(key)
            yield Person(values, rng)


# ---------------------------------------------------------------------------------------------------
# ConvAI2


class _Turn(NamedTuple):
    """The partner's utterance, my answer, and the subject of the answer: my value of a topic."""

    utterance: str
    answer: str
    about: Sequence[str]


def _dialogue(me: Person, partner: Person, rng: random.Random) -> tuple[list[str], list[_Turn]]:
    """(my persona, my turns)"""
    topics = rng.sample(list(_TOPICS), k=3)
    persona = [f"your persona: {me.statement(topic)} ." for topic in topics]
    turns = []
    if rng.random() < 0.3:
        turns.append(_Turn(_phrase(rng, "greetings"), _phrase(rng, "greeting_replies"), ()))
    for topic in rng.sample(topics, k=rng.randrange(1, 4)):
        utterance = _phrase(rng, "reactions")
        if rng.random() < 0.15:
            utterance = partner.reply(rng.choice(list(_TOPICS))) + " ."
        question = rng.choice(_TOPICS[topic].questions)
        utterance = " ".join(f"{utterance} {question}".replace("*", "").split())
        about = me.values[topic].statements
        turns.append(_Turn(utterance, me.answer(topic, question), about))
        if rng.random() < 0.2:  # what it is about stands only further up
            turns.append(_Turn(_phrase(rng, "follow_ups"), me.reply(topic), about))
    return persona, turns


def _write_convai2(folder: Path, people: Iterator[Person], rng: random.Random, size: Size) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    personas: set[frozenset[str]] = set()
    for name, dialogue_count, with_candidates in (
        ("train_self_original.sample_no_cands.txt", size.train_dialogues, False),
        ("valid_self_original.sample.txt", size.valid_dialogues, True),
    ):
        dialogues: list[tuple[list[str], list[_Turn]]] = []
        while len(dialogues) < dialogue_count:
            dialogue = _dialogue(next(people), next(people), rng)
            if frozenset(dialogue[0]) not in personas:  # in no other file
                dialogues.append(dialogue)
        personas.update(frozenset(persona) for persona, _ in dialogues)
        all_turns = [turn for _, turns in dialogues for turn in turns]
        lines = []
        for persona, turns in dialogues:
            dialogue_lines = list(persona)
            for turn in turns:
                fields = [turn.utterance, turn.answer]
                if with_candidates:
                    fields += ["", "|".join([*_wrong_answers(turn, all_turns, rng), turn.answer])]
                dialogue_lines.append("\t".join(fields))
            lines += [f"{line} {text}\n" for line, text in enumerate(dialogue_lines, start=1)]
        (folder / name).write_text("".join(lines), encoding="utf-8")


def _wrong_answers(turn: _Turn, all_turns: list[_Turn], rng: random.Random) -> list[str]:
    """Other people's answers that are wrong here: about something else, or another value of it."""
    answers = sorted({other.answer for other in all_turns if other.about != turn.about})
    return rng.sample(answers, CANDIDATES - 1)


# ---------------------------------------------------------------------------------------------------
# Reddit


class _Thread:
    """Comments on one submission, as the lines of a dump."""

    def __init__(self, number: int, subreddit: str, rng: random.Random) -> None:
        self.comments: list[dict[str, Any]] = []
        self._link = np.base_repr(50_000_000 + number, 36).lower()
        self._first = number * 100
        self._subreddit = subreddit
        self._rng = rng

    def add(self, parent: dict[str, Any] | None, author: str, body: str) -> dict[str, Any]:
        rng = self._rng
        roll = rng.random()
        if roll < 0.05:
            author, body = "[deleted]", rng.choice(["[deleted]", "[removed]"])
        elif roll < 0.08:
            body = " ".join([body] * (2 + 130 // len(body)))
        elif roll < 0.10:
            body = rng.choice(["lol", "this", "ok", "same", "no"])
        elif roll < 0.11:
            body += f" ask u/{author} or mail {author}@example.org"
        comment = {
            "id": np.base_repr(900_000_000 + self._first + len(self.comments), 36).lower(),
            "link_id": f"t3_{self._link}",
            "parent_id": f"t1_{parent['id']}" if parent else f"t3_{self._link}",
            "author": author,
            "body": body,
            "subreddit": self._subreddit,
            "score": rng.randrange(-5, 60),
            "created_utc": 1_293_840_000 + self._first * 60 + len(self.comments),
            "controversiality": 0,
            "edited": False,
            "gilded": 0,
        }
        self.comments.append(comment)
        return comment


def _thread(number: int, people: Iterator[Person], rng: random.Random) -> list[dict[str, Any]]:
    """Either a topic's thread, or one in which somebody introduces themselves."""
    me, name = next(people), _user(rng)
    if rng.random() < 0.5:
        topics = rng.sample(list(_TOPICS), k=3)
        thread = _Thread(number, "introductions", rng)
        root = thread.add(None, name, " . ".join(me.statement(topic) for topic in topics))
    else:
        topics = [rng.choice(list(_TOPICS))]
        thread = _Thread(number, f"Ask_{topics[0]}", rng)
        root = thread.add(None, name, f"{me.statement(topics[0])} . {me.reply(topics[0])}")
        for _ in range(rng.randrange(1, 4)):  # others who are the same
            like_me = Person(me.values, rng)
            comment = thread.add(
                root, _user(rng), f"{_phrase(rng, 'agreements')} {like_me.reply(topics[0])}"
            )
            if rng.random() < 0.5:
                thread.add(comment, name, like_me.reply(topics[0]))
    for _ in range(rng.randrange(1, 4)):  # others who ask
        comment, asker = root, _user(rng)
        for topic in rng.sample(topics, k=len(topics)):
            question = rng.choice(_TOPICS[topic].questions)
            question_text = f"{_phrase(rng, 'reactions')} {question}".replace("*", "").strip()
            comment = thread.add(comment, asker, question_text)
            comment = thread.add(comment, name, me.answer(topic, question))
            if rng.random() < 0.3:
                break
    if rng.random() < 0.1:
        thread.add(
            root, "AutoModerator", "i am a bot , and this action was performed automatically ."
        )
    return thread.comments


def _write_reddit(folder: Path, people: Iterator[Person], rng: random.Random, size: Size) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    comments = [
        comment for number in range(size.reddit_threads) for comment in _thread(number, people, rng)
    ]
    half = len(comments) // 2
    first, second = (
        "".join(json.dumps(comment) + "\n" for comment in part).encode()
        for part in (comments[:half], comments[half:])
    )
    # The public dumps need a 2 GiB window; this one declares it too.
    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (folder / "RC_2011-01.zst").write_bytes(compressor.compress(first) + compressor.flush())
    (folder / "RC_2011-02.bz2").write_bytes(bz2.compress(second))


def _user(rng: random.Random) -> str:
    first, last = _phrase(rng, "first_syllables"), _phrase(rng, "last_syllables")
    return f"{first}_{last}{rng.randrange(100)}".lower()


# ---------------------------------------------------------------------------------------------------
# Wikipedia


def _article(title: str, rng: random.Random) -> list[str]:
    """Paragraphs of an article about a town: sections on two topics, each on a few things."""
    year, people = rng.randrange(900, 1800), rng.randrange(400, 90_000)
    lines = [
        f"{title} is a town in {_phrase(rng, 'counties')}. It was first mentioned in {year}. "
        f"As of the last census it had {people:,} inhabitants."
    ]
    topics = [
        (_TOPICS[name], rng.choice(_TOPICS[name].values)) for name in rng.sample(list(_TOPICS), k=2)
    ]
    for topic, value in topics:
        sentences = []
        for fact in rng.sample(topic.facts, k=3):
            text = _fact(fact, value, rng)
            if rng.random() < 0.6:  # a sentence of two facts says which town it must be
                other_topic, other_value = rng.choice(topics)
                fact_text = _fact(rng.choice(other_topic.facts), other_value, rng)
                text = f"{text[:-1]}, and {fact_text[0].lower()}{fact_text[1:]}"
            if rng.random() < 0.4:
                text = f"{text[:-1]} {_phrase(rng, 'eras')}."
            if rng.random() < 0.15:
                text = f"In {title}, {text[0].lower()}{text[1:]}"
            sentences.append(text)
        lines += [f"{topic.heading}.", " ".join(sentences)]
    return lines


def _fact(frame: str, value: Value, rng: random.Random) -> str:
    a, b = rng.sample(value.things, k=2)
    text = frame.format(a=a, b=b)
    return text[0].upper() + text[1:]


def _write_wikipedia(folder: Path, rng: random.Random, size: Size) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    titles = [a + b for a in _PHRASES["first_syllables"] for b in _PHRASES["last_syllables"]]
    titles += [f"{place} {title}" for place in ("New", "Little", "Great") for title in titles]
    rng.shuffle(titles)
    documents = []
    for number, title in enumerate(titles[: size.articles], start=1):
        lines = _article(title, rng) if rng.random() > 0.03 else []  # redirects have no text
        escaped_title = html.escape(title)
        head = f'<doc id="{number}" url="https://en.example.org/wiki?curid={number}" title="{escaped_title}">'
        documents.append("\n".join([head, title, "", *lines, "", "</doc>", ""]))
    for part in range(2):
        text = "".join(documents[part::2])
        (folder / f"wiki_{part:02d}").write_text(text, encoding="utf-8")

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import BadInput
from pipeline.corpora.formats import opensubtitles
from pipeline.corpora.formats.opensubtitles import clean

from ..conftest import parse_file


def read(folder: Path, lines: list[str], name: str = "lines-aaa", **options: Any):
    text = "".join(f"{line}\n" for line in lines)
    return parse_file(opensubtitles, folder / name, text, **options)


# Lines


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("- You still there?", "You still there?"),
        ("  -- Yes. -", "Yes."),
        ("JOHN: Come in.", "Come in."),
        ("John Smith: Come in.", "John Smith: Come in."),  # names are one word
        ("Who is it? MARY: It's me.", "Who is it It's me."),  # the end of the sentence goes as well
        ("Stop! A: no. B: yes", "Stop no yes"),
        ("It is 10:30 now.", "It is 10:30 now."),
        ("10:30 it is.", "30 it is."),
        ("Здравствуй: да", "да"),
        ("[DOOR OPENS] Hello (quietly), you.", "Hello , you."),
        ("(mixed] brackets [too) go", "brackets  go"),
        ("(not closed", "(not closed"),
        ("(two) words (more)", "words"),
        ("[MUSIC]", ""),
        ("- (sighs) -", ""),
        ("", ""),
        ("\tTabs stay\t", "\tTabs stay\t"),
        ("(JOHN): hi", ": hi"),
        ("-JOHN: hi", "JOHN: hi"),
    ],
)
def test_names_sounds_and_hyphens_are_taken_out(line, left):
    assert clean(line) == left


def test_a_line_is_a_response_to_the_lines_before_it_oldest_first(tmp_path):
    lines = [f"This is line number {number}." for number in range(14)]
    rows, report = read(tmp_path, lines)
    assert [row["response"] for row in rows] == lines[1:]
    assert rows[0]["context"] == lines[:1]
    assert rows[-1]["context"] == lines[2:13]
    assert max(len(row["context"]) for row in rows) == 11
    assert {(row["group_id"], row["source"]) for row in rows} == {("lines-aaa", "opensubtitles")}
    assert report.records == 14
    assert report.dropped.counts == {"first line of a file": 1}


@pytest.mark.parametrize("length", [8, 9, 127, 128])
def test_a_line_of_9_to_127_characters_is_context_and_response(tmp_path, length):
    lines = ["Long enough.", "é" * length, "As long as that."]
    rows, report = read(tmp_path, lines)
    if 9 <= length <= 127:
        assert [row["response"] for row in rows] == lines[1:]
        return
    wrong = "short" if length < 9 else "long"
    assert rows == []
    assert report.dropped.counts == {
        "first line of a file": 1, f"response too {wrong}": 1, f"context too {wrong}": 1,
    }  # fmt: skip


def test_earlier_lines_may_be_of_any_length_and_empty_ones_do_not_part_a_pair(tmp_path):
    rows, report = read(tmp_path, ["Hm.", "[DOOR]", "Who is there?", "", "It is me again."])
    assert [(row["context"], row["response"]) for row in rows] == [
        (["Hm.", "Who is there?"], "It is me again.")
    ]
    assert report.dropped.counts == {
        "first line of a file": 1, "no text": 2, "context too short": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "lines",
    [
        ["1", "00:00:00,000 --> 00:00:00,900", "<i>Where is the kettle?</i>"],
        ["WEBVTT", "", "00:00.000 --> 00:00.900", "Where is the kettle?"],
        ['<?xml version="1.0" encoding="utf-8"?>', "<document>", '<s id="1">'],
        ["[Script Info]", "Dialogue: 0,0:00:00.00,0:00:00.90,Default,,0,0,0,,Where is the kettle?"],
        ["{0}{22}Where is the kettle?"],
        ["00:00:00.00,00:00:00.90", "Where is the kettle?"],
        ["[00:12.30]Where is the kettle?"],
        ["00:00:12 Where is the kettle?"],
        ["<p>", "<sub start='1'>Where is the kettle?</sub>"],
        ['{"text": "Where is the kettle?"}'],
        ["[", "  {", '    "text": "Where is the kettle?"'],
        ["Where is the kettle?\tIn the kitchen."],
        ['"Where is the kettle?","In the kitchen."'],
        *(
            [line.format(number, f"Where is kettle {number}?") for number in range(4)]
            for line in (
                "0:0{} {}",
                "00.00.0{} {}",
                "00:0{} - {}",
                "{0}\n{1}",
                '{0}, {0}9,"{1}"',
                "{} | {}",
                "{}. {}",
                "{} {}\tIn the kitchen.",
                "{1} ||| In the kitchen {0}.",
                "L{} +++$+++ u0 +++$+++ m0 +++$+++ TOM +++$+++ {}",
                "film 1 {0}.00 0.30 {1}",
                'intervals [{0}]:\nxmin = {0}\ntext = "{1}"',
                "timestamp: 00:00:0{}:000, filepos: 0000{}",
                "Speaker 1  0:0{}\n{}",
                "12/31/20, 10:0{} PM - Tom: {}",
                '(src)="{}">{}',
                "- text: {1}",
                'msgid "{1}"\nmsgstr ""',
                "{0}.0,{0}.9,{1}",
                "{1},{0}.0,{0}.9",
                "| 00:0{} | {} |",
            )
        ),
    ],
)
def test_subtitles_of_another_layout_are_refused(tmp_path, lines):
    with pytest.raises(
        BadInput, match="of subtitles with time codes, XML or a table; allowed: raw text"
    ):
        read(tmp_path, [""] * 30 + lines)


@pytest.mark.parametrize("name", ["film.csv", "film.JSON.gz"])
def test_a_table_is_refused_by_its_name(tmp_path, name):
    with pytest.raises(BadInput, match="has the name of a table; allowed: raw text"):
        read(tmp_path, ["context,response", "where is it,over there"], name)


def test_some_numbers_are_no_other_layout(tmp_path):
    lines = ["3", "2", "1", "10:30 at the station.", *(f"This is line {n}." for n in range(13))]
    rows, _ = read(tmp_path, [*lines, "1990", "The year was 1990."])
    assert len(rows) == 13


@pytest.mark.parametrize(
    "line", ['["Silent Night" playing]', "<i>Where is it?</i>", "[DOOR OPENS]"]
)
def test_brackets_of_raw_text_are_no_other_layout(tmp_path, line):
    rows, _ = read(tmp_path, [line, "This is a line.", "This is another."])
    assert rows[-1]["response"] == "This is another."


def test_time_codes_and_tags_within_raw_text_are_taken_out(tmp_path):
    lines = [f"This is line {number}." for number in range(25)]
    tags = [
        "<i>Where did you put it?</i>",
        "{\\an8}- I have lost it.",
        "{y:i}Then<br />ask\\Nhim.",
        "&lt;b&gt;Tom &amp; Ann&lt;/b&gt;",
    ]
    rows, report = read(tmp_path, [*lines, "00:00:01,000 --> 00:00:02,000", "0:03", *tags])
    assert [row["response"] for row in rows[-4:]] == [
        "Where did you put it?",
        "I have lost it.",
        "Then ask him.",
        "Tom & Ann",
    ]
    assert report.dropped.counts == {"first line of a file": 1, "time code": 2}


@pytest.mark.parametrize("line", ["word " * (11 << 18), "(" * 1_000_000])
def test_a_line_that_is_too_long_is_set_aside_and_the_others_are_read(tmp_path, line):
    rows, report = read(tmp_path, ["This is a line.", line, "This is another."])
    assert [(row["context"], row["response"]) for row in rows] == [
        (["This is a line."], "This is another.")
    ]
    assert report.malformed.counts == {"line too long": 1}


_pieces = ["A: ", "hello there", "long enough text", ". ", "! ", "[x]", "(y", ")", " - ", "-", "é", "x:",
           "?"]  # fmt: skip
_lines = st.lists(st.lists(st.sampled_from(_pieces), max_size=6).map("".join), max_size=30)


@given(_lines, st.integers(0, 3))
def test_any_file_gives_the_pairs_of_its_cleaned_lines(tmp_path_factory, lines, earlier):
    """Against the rules in their plainest form: a list of lines, and pairs of neighbours in it."""
    cleaned = []
    for line in lines:
        line = re.sub(r"(^|[.!?]\s)(\w+):", "", line)
        line = re.sub(r"[\[(][^\])]*[\])]", "", line)
        cleaned.append(line.strip(" -"))
    spoken = [line for line in cleaned if line]
    expected = [
        (spoken[max(0, at - 1 - earlier) : at], spoken[at])
        for at in range(1, len(spoken))
        if all(9 <= len(side) <= 127 for side in spoken[at - 1 : at + 1])
    ]
    rows, report = read(tmp_path_factory.getbasetemp(), lines, earlier_lines=earlier)
    assert [(row["context"], row["response"]) for row in rows] == expected
    assert report.records == len(lines) == len(rows) + report.dropped.counts.total()
    assert len({row["example_id"] for row in rows}) == len(rows)


# Files


def test_a_file_is_train_or_test_by_the_md5_of_its_name(tmp_path):
    splits = []
    for letter in "abcdefghijklmnopqrstuvwxyz":
        name = f"lines-ab{letter}"
        rows, _ = read(tmp_path, ["This is a line."] * 3, name)
        place = int(hashlib.md5(name.encode()).hexdigest(), 16) % 4096
        splits.append("train" if (1 + place) / 4096 < 0.9 else "test")
        assert {row["split"] for row in rows} == {splits[-1]}
    assert set(splits) == {"train", "test"}


def test_one_file_in_parts_is_what_its_parts_are_in_files(tmp_path):
    lines = [f"This is line number {number}." for number in range(28 * 4 - 1)]
    whole, report = read(tmp_path, lines, "lines", lines_per_part=4)
    letters = "abcdefghijklmnopqrstuvwxyz"
    parts = []
    for number, name in enumerate([f"lines-aa{a}" for a in letters] + ["lines-aba", "lines-abb"]):
        parts += read(tmp_path, lines[4 * number : 4 * number + 4], name)[0]
    assert whole == parts
    assert report.dropped.counts == {"first line of a file": 28}


def test_the_job_makes_a_corpus_of_them(run_job_here, tmp_path):
    for number in range(3):
        part = "xyz"[number]
        read(tmp_path, [f"This is line {part} {n}." for n in range(40)], f"lines-aa{part}")
    summary = run_job_here(
        "prepare_corpus", "--corpus", "opensubtitles", "--input", *sorted(tmp_path.glob("lines-*")),
        "--output", tmp_path / "out", "--opensubtitles.lines-per-part", "20"
    ).summary  # fmt: skip
    assert summary["counts"]["records"] == 120
    assert summary["counts"]["examples"] == 6 * 19
    assert summary["dropped"] == {"first line of a file": 6}

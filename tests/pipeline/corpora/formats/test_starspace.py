from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import BadInput
from pipeline.corpora.formats import starspace
from pipeline.corpora.raw import MAX_LINE_BYTES

from ..conftest import parse_file

LINE = "he was born .\tHe wrote  three novels .\tthey are long ."
SENTENCES = ["he was born .", "He wrote three novels .", "they are long ."]


def test_a_line_is_an_article_and_a_random_sentence_its_query(tmp_path):
    lines = [f"{LINE}\tnumber {n} ." for n in range(100)]
    rows, report = parse_file(starspace, tmp_path / "articles.txt", "\n".join(lines) + "\n")
    assert report.records == len(rows) == 100
    for number, row in enumerate(rows):
        every = [*SENTENCES, f"number {number} ."]
        (query,) = row["context"]
        assert row["response"] == " ".join(text for text in every if text != query)
        assert row["source"] == "starspace" and "candidates" not in row
    places = {[*SENTENCES].index(r["context"][0]) for r in rows if r["context"][0] in SENTENCES}
    assert places == {0, 1, 2}
    assert len({row["example_id"] for row in rows}) == 100
    assert len({row["split"] for row in rows}) > 1
    assert (
        parse_file(starspace, tmp_path / "other name.txt", "\n".join(lines[::-1]))[0] == rows[::-1]
    )


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("wikipedia_train5M.txt", "train"),
        ("wikipedia_shuf_train5M.txt", "train"),
        ("wikipedia_test10k.txt", "test"),
        ("test.txt", "test"),
    ],
)
def test_a_file_is_the_split_that_its_name_says(tmp_path, name, split):
    rows, _ = parse_file(starspace, tmp_path / name, "\n".join(f"{LINE}\t{n}" for n in range(50)))
    assert {row["split"] for row in rows} == {split}


def test_articles_that_make_no_example_are_counted(tmp_path):
    long = b"x" * (MAX_LINE_BYTES + (2 << 20))
    data = "\n".join(["one sentence only .", "", "\t \t", f"{LINE}\t", LINE, "a\tb"]).encode()
    rows, report = parse_file(
        starspace, tmp_path / "train.txt", data + b"\n" + long + b"\n" + LINE.encode()
    )
    assert len(rows) == 2
    assert report.records == 6
    assert report.dropped.counts == {"fewer than 2 sentences": 1, "the same article again": 2}
    assert report.malformed.counts == {"line too long": 1}


def test_options_are_those_of_article_search(tmp_path):
    rows, _ = parse_file(
        starspace, tmp_path / "train.txt", LINE, queries=2, max_article_characters=10
    )
    assert len({row["context"][0] for row in rows}) == len(rows) == 2
    assert {len(row["response"]) for row in rows} == {10}


@pytest.mark.shared
def test_the_real_articles_are_all_read(real_data: Path):
    file = real_data / "wikipedia" / "derived_starspace" / "wikipedia_train.txt"
    rows, report = parse_file(starspace, file)
    lines = file.read_text(encoding="utf-8").splitlines()
    assert report.records == len(rows) == 1500
    assert not report.dropped.counts and not report.malformed.counts
    for row, line in zip(rows, lines, strict=True):
        left = [" ".join(text.split()) for text in line.split("\t")]
        assert 5 <= len(left) <= 30
        place = int(row["example_id"].split("/")[1])  # a sentence may stand twice in an article
        assert row["context"] == [left.pop(place)]
        assert row["response"] == " ".join(left)[:4000]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "faq.tsv",
            "question\tanswer\nhow ?\tso\n",
            "has the name of a table; allowed: an article",
        ),
        (
            "train.txt",
            "1 your persona: x\n2 hi ?\tfine .\n",
            "its lines are numbered, as in ConvAI2;",
        ),
    ],
)
def test_tables_and_dialogues_are_refused(tmp_path, name, text, message):
    """Their lines were articles of two sentences."""
    with pytest.raises(BadInput, match=message):
        parse_file(starspace, tmp_path / name, text)

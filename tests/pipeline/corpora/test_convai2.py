from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import BadInput
from pipeline.corpora import convai2
from pipeline.corpora.files import Account
from pipeline.corpora.raw import Reading

TWO_DIALOGUES = """\
1 your persona: i like to remodel homes.
2 your persona: i have two dogs.
3 hi , how are you ?\tfine , i am painting .
4 a house ?\tyes , my own .
1 your persona: i work as a nurse.
2 hello .\thi there .
"""


def read(folder: Path, text: str, name: str = "train.txt") -> tuple[list[dict[str, Any]], Account]:
    (folder / name).write_text(text, encoding="utf-8")
    account = Account()
    return list(convai2.parse(str(folder / name), Reading(), account)), account


def test_persona_comes_first_then_the_turns_oldest_first(tmp_path):
    rows, account = read(tmp_path, TWO_DIALOGUES)
    persona = ["your persona: i like to remodel homes.", "your persona: i have two dogs."]
    assert [(row["context"], row["response"]) for row in rows] == [
        ([*persona, "hi , how are you ?"], "fine , i am painting ."),
        ([*persona, "hi , how are you ?", "fine , i am painting .", "a house ?"], "yes , my own ."),
        (["your persona: i work as a nurse.", "hello ."], "hi there ."),
    ]
    assert (account.records, account.dropped.counts) == (6, {"persona line (part of contexts)": 3})
    assert not account.malformed.counts


def test_without_candidates_there_is_no_label(tmp_path):
    rows, _ = read(tmp_path, TWO_DIALOGUES)
    assert {(row["candidates"], row["label"], row["source"]) for row in rows} == {
        (None, None, "convai2")
    }


@pytest.mark.parametrize(
    ("candidates", "label"),
    [
        (["first", "second", "right"], 2),
        (["right", "second", "third"], 0),
        (["right", "second", "right"], 2),  # in the genuine files the right one is the last
        (["right"], 0),
    ],
)
def test_the_label_is_the_place_of_the_right_answer(tmp_path, candidates, label):
    rows, _ = read(tmp_path, f"1 said\tright\t\t{'|'.join(candidates)}\n")
    assert [(row["candidates"], row["label"]) for row in rows] == [(candidates, label)]


def test_dialogues_are_told_apart_and_never_share_a_group(tmp_path):
    rows, _ = read(tmp_path, TWO_DIALOGUES)
    assert [row["group_id"] for row in rows] == ["train.txt/1", "train.txt/1", "train.txt/2"]
    assert [row["example_id"] for row in rows] == ["train.txt/1/3", "train.txt/1/4", "train.txt/2/2"]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train_self_original.txt", "train"),
        ("valid_self_original.txt", "valid"),
        ("dev.txt", "valid"),
        ("Test_both.txt", "test"),
    ],
)
def test_a_file_is_the_split_that_its_name_begins_with(tmp_path, name, split):
    rows, _ = read(tmp_path, TWO_DIALOGUES, name)
    assert {row["split"] for row in rows} == {split}


def test_a_file_that_names_no_split_is_cut_between_dialogues_only(tmp_path):
    dialogue = "1 your persona: x.\n2 a\tb\n3 c\td\n4 e\tf\n"
    rows, _ = read(tmp_path, dialogue * 400, "convai2.txt")
    of_group: dict[str, set[str]] = {}
    for row in rows:
        of_group.setdefault(row["group_id"], set()).add(row["split"])
    assert len(of_group) == 400
    assert all(len(splits) == 1 for splits in of_group.values())
    counts = [sum({s} == splits for splits in of_group.values()) for s in ("train", "valid", "test")]
    assert counts[0] > 300 and min(counts) > 5


def test_both_personas_and_escaped_line_breaks_are_read(tmp_path):
    rows, _ = read(
        tmp_path, "1 partner's persona: a.\n2 your persona: b.\n3 one\\ntwo\tthree\\nfour\n"
    )
    assert [(row["context"], row["response"]) for row in rows] == [
        (["partner's persona: a.", "your persona: b.", "one\ntwo"], "three\nfour")
    ]


def test_a_text_that_speaks_of_a_persona_is_a_turn(tmp_path):
    rows, _ = read(tmp_path, "1 your persona: what is that ?\tno idea .\n")
    assert [row["context"] for row in rows] == [["your persona: what is that ?"]]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("no number\tanswer", "no line number"),
        ("² superscript\tanswer", "no line number"),
        ("-1 negative\tanswer", "no line number"),
        ("7 only said", "no answer after a tab"),
        ("7 said\t", "no answer after a tab"),
        ("7 said\t\t\ta|b", "no answer after a tab"),
        ("7 said\tright\t\ta|b", "answer not among its candidates"),
    ],
)
def test_a_line_without_an_example_is_set_aside_and_the_rest_is_read(tmp_path, line, reason):
    text = f"1 your persona: x.\n2 a\tb\n{line}\n8 c\td\n"
    rows, account = read(tmp_path, text)
    assert [row["response"] for row in rows] == ["b", "d"]
    assert account.malformed.counts == {reason: 1}
    (sample,) = account.malformed.samples
    assert (sample["line"], sample["text"]) == (3, line)


_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_lines = st.builds("{}{}{}".format, st.sampled_from(["", "1 ", "2 ", "3", "³ ", "٣ "]), _text,
                   st.one_of(_text, _text.map("\t{}".format)))  # fmt: skip


@given(st.lists(_lines, max_size=12))
def test_every_line_of_any_text_is_an_example_or_counted(tmp_path_factory, lines):
    file = tmp_path_factory.getbasetemp() / "train any text.txt"
    file.write_bytes("\n".join(lines).encode())
    account = Account()
    rows = list(convai2.parse(str(file), Reading(), account))
    counted = account.dropped.counts.total() + account.malformed.counts.total()
    assert len(rows) + counted == account.records
    assert len({row["example_id"] for row in rows}) == len(rows)


def test_two_files_of_one_name_are_refused_since_ids_come_from_names(local_ray, tmp_path):
    from jobs import prepare_corpus

    files = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        read(tmp_path / folder, TWO_DIALOGUES)
        files.append(str(tmp_path / folder / "train.txt"))
    config = prepare_corpus.Config(
        corpus="convai2", input=tuple(files), output=str(tmp_path / "out")
    )
    with pytest.raises(BadInput, match=r"train\.txt"):
        prepare_corpus.run(config)


def test_the_sample_files_give_every_answer_with_its_candidates(sample_files):
    account = Account()
    file = str(sample_files / "convai2" / "valid_self_original.txt")
    rows = list(convai2.parse(file, Reading(), account))
    assert len(rows) > 100 and not account.malformed.counts
    for row in rows:
        assert len(row["candidates"]) == 20
        assert row["candidates"][row["label"]] == row["response"]
        personas = [text.startswith("your persona: ") for text in row["context"]]
        assert personas == sorted(personas, reverse=True) and sum(personas) == 3


@pytest.mark.shared
@pytest.mark.parametrize("kind", ["self_original", "both_original", "both_revised"])
def test_the_official_validation_file_gives_the_published_number_of_examples(shared, kind):
    account = Account()
    folder = shared / "data" / "convai2" / "original"
    file = folder / f"valid_{kind}_no_cands.first500.txt"
    rows = list(convai2.parse(str(file), Reading(), account))
    assert len(rows) == 3907
    assert len({row["group_id"] for row in rows}) == 500
    assert not account.malformed.counts

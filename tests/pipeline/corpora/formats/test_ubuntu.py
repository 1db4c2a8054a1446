from __future__ import annotations

import csv
import io
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import BadInput
from pipeline.corpora.file_tasks import ParseReport
from pipeline.corpora.formats import ubuntu

from ..conftest import parse_file

TRAIN = ["Context", "Utterance", "Label"]
RANKED = ["Context", "Ground Truth Utterance", *(f"Distractor_{n}" for n in range(9))]
CONTEXT = "hi __eou__ help? __eou__ __eot__ with what? __eou__ __eot__ "


def table(*rows: list[str]) -> str:
    """CSV as the public script writes it."""
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


def read(
    folder: Path, text: str, name: str = "train.csv", **options: Any
) -> tuple[list[dict[str, Any]], ParseReport]:
    return parse_file(ubuntu, folder / name, text, **options)


def counted(report: ParseReport) -> int:
    return report.malformed.counts.total() + report.dropped.counts.total()


@pytest.mark.parametrize(
    ("options", "turns", "response"),
    [
        ({}, ["hi . help? .", "with what? ."], "my screen ."),
        ({"end_of_utterance": "none"}, ["hi help?", "with what?"], "my screen"),
    ],
)
def test_a_turn_is_one_text_of_the_context(tmp_path, options, turns, response):
    (row,), _ = read(tmp_path, table(TRAIN, [CONTEXT, "my screen __eou__", "1.0"]), **options)
    assert (row["context"], row["response"]) == (turns, response)
    assert (row["candidates"], row["label"], row["split"]) == (None, None, "train")


def test_only_rows_with_label_1_are_examples(tmp_path):
    labels = ["1", "0", "1.0", "0.0", "", "2", "-1", "1.00", "true"]
    rows, report = read(tmp_path, table(TRAIN, *([CONTEXT, f"a{at}", at] for at in labels)))
    assert [row["response"] for row in rows] == ["a1", "a1.0"]
    assert report.dropped.counts == {"label 0": 2}
    assert report.malformed.counts == {"label is neither 1 nor 0": 5}
    assert report.records == len(labels)


def test_the_first_of_ten_is_the_right_one(tmp_path):
    answers = [f"answer {place} __eou__" for place in range(10)]
    (row,), _ = read(tmp_path, table(RANKED, [CONTEXT, *answers]), "valid.csv")
    assert row["candidates"] == [f"answer {place} ." for place in range(10)]
    assert (row["label"], row["response"], row["split"]) == (0, "answer 0 .", "valid")


_lines = st.lists(
    st.sampled_from(['"', ",", "1", "0", "\t", "a __eot__ b", "\n", "\r\n", '"",', *TRAIN])
)


@given(st.sampled_from(["Context,Utterance,Label\n", "1\ta\tb\n"]), _lines)
def test_every_record_of_any_text_is_an_example_or_counted(tmp_path_factory, head, parts):
    rows, report = read(tmp_path_factory.getbasetemp(), head + "".join(parts))
    assert len(rows) + counted(report) == report.records
    assert len({row["example_id"] for row in rows}) == len(rows)


@pytest.mark.parametrize(
    ("context", "answer", "reason"),
    [
        (" __eou__ __eot__ ", "b", "no turn before the answer"),
        ("a", " __eou__ ", "empty answer"),
    ],
)
def test_a_row_without_a_text_makes_no_example(tmp_path, context, answer, reason):
    rows, report = read(tmp_path, table(TRAIN, [context, answer, "1"]))
    assert (rows, report.dropped.counts) == ([], {reason: 1})


@pytest.mark.parametrize("text", ["Context,Utterance\n", '{"a": 1}\n'])
def test_a_file_without_the_header_is_refused_with_what_it_begins_with(tmp_path, text):
    first_line = re.escape(text.partition("\n")[0])
    allowed = "allowed: Context,Utterance,Label; .* or lines that begin with 1 or 0 and a tab"
    with pytest.raises(BadInput, match=rf"train\.csv, header: '{first_line}' .*{allowed}"):
        read(tmp_path, text + "a,b,1\n")


# Groups


def test_rows_of_a_dialogue_are_one_group_and_never_parted(tmp_path):
    rows = [
        [" __eot__ ".join(f"turn {turn} of {dialogue}" for turn in range(2 + row)), "b", "1"]
        for row in range(3)
        for dialogue in range(300)
    ]
    found, _ = read(tmp_path, table(TRAIN, *rows), "ubuntu.csv")
    groups = Counter((row["group_id"], row["split"]) for row in found)
    assert len(groups) == 300 and set(groups.values()) == {3}
    assert {split for _, split in groups} == {"train", "valid", "test"}


# The text form

TEXT = "1\thi\twith what?\tmy screen\n0\thi\twith what?\tfour\n0\thi\twith what?\tfive\n1\tbye\tsee you\n"


def test_in_the_text_form_wrong_answers_follow_the_right_one(tmp_path):
    rows, report = read(tmp_path, TEXT, "test.txt")
    assert [(row["context"], row["response"], row["candidates"], row["label"]) for row in rows] == [
        (["hi", "with what?"], "my screen", ["my screen", "four", "five"], 0),
        (["bye"], "see you", None, None),
    ]
    assert report.dropped.counts == {"wrong answer (a candidate)": 2}
    assert (report.records, rows[0]["split"]) == (4, "test")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("0\tother\tfour", "wrong answer without the right one"),
        ("1\tno context", "not a label, turns and an answer"),
        ("a\tb\tc", "not a label, turns and an answer"),
    ],
)
def test_a_line_of_text_that_is_no_answer_is_set_aside(tmp_path, line, reason):
    rows, report = read(tmp_path, f"1\ta\tb\n{line}\n0\ta\tc\n", "train.txt")
    assert [row["candidates"] for row in rows] == [["b", "c"]]
    assert report.malformed.counts == {reason: 1}


# The job


def test_the_job_reads_both_kinds_of_file(run_job_here, tmp_path):
    (tmp_path / "in").mkdir()
    train = [[f"a{at} __eot__ b", f"mail me@example.org {at}", str(at % 2)] for at in range(10)]
    (tmp_path / "in" / "train.csv").write_text(table(TRAIN, *train))
    valid = [[f"v{at} __eot__ b", *(f"{at} {n}" for n in range(10))] for at in range(4)]
    (tmp_path / "in" / "valid.csv").write_text(table(RANKED, *valid))
    done = run_job_here("prepare_corpus", "--corpus", "ubuntu", "--input", tmp_path / "in", "--output",
                   tmp_path / "out", "--ubuntu.end_of_utterance", "none")  # fmt: skip
    counts = done.summary["counts"]
    assert (counts["examples.train"], counts["examples.valid"], counts["records"]) == (5, 4, 14)
    assert done.summary["dropped"] == {"label 0": 5}
    assert [
        (row["files"], row["found"], row["published"]) for row in done.summary["published"]
    ] == [
        ("train.csv", 5, 1_000_000),
        ("valid.csv", 4, 19_560),
    ]


# Real records


def _with_marks(text: str) -> str:
    """What ParlAI's record was before it replaced the marks, as far as it can be told."""
    return re.sub(r" \.(?= |$)", " __eou__", text)


@pytest.mark.shared
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_genuine_records_give_the_texts_of_parlai(shared, tmp_path, split):
    file = shared / "data" / "ubuntu" / "parlai_fixtures" / f"ubuntu_{split}.yml"
    acts = [act for episode in yaml.safe_load(file.read_text())["acts"] for act in episode]
    header, rows = (TRAIN if split == "train" else RANKED), []
    for act in acts:
        (answer,) = act.get("labels") or act["eval_labels"]
        turns = [_with_marks(turn.strip()) for turn in act["text"].split("\n")]
        wrong = [text for text in act.get("label_candidates", ()) if text != answer]
        rest = ["1.0"] if split == "train" else map(_with_marks, wrong)
        rows.append([" __eot__ ".join(turns), _with_marks(answer), *rest])
    assert any("__eou__" in field for row in rows for field in row)
    found, _ = read(tmp_path, table(header, *rows), f"{split}.csv")
    for row, act in zip(found, acts, strict=True):
        theirs = [turn.strip() for turn in act["text"].split("\n")]
        assert row["context"] == theirs  # to the letter, with their double spaces
        assert [row["response"]] == (act.get("labels") or act["eval_labels"])
        if split != "train":
            assert Counter(row["candidates"]) == Counter(act["label_candidates"])


@pytest.mark.shared
def test_real_rows_are_those_of_the_csv_module(real_data):
    folder = real_data / "ubuntu" / "derived_v2"
    rows, report = parse_file(ubuntu, folder / "valid.csv", end_of_utterance="none")
    with (folder / "valid.csv").open(newline="", encoding="utf-8") as stream:
        theirs = list(csv.reader(stream))[1:]

    def words(text: str) -> list[str]:
        return text.replace("__eou__", " ").replace("__eot__", " ").split()

    assert len(rows) == len(theirs) == report.records == 2491
    for row, fields in zip(rows, theirs, strict=True):
        assert words(" ".join(row["context"])) == words(fields[0])
        assert len(row["context"]) == fields[0].count("__eot__")
        assert [words(text) for text in row["candidates"]] == [words(text) for text in fields[1:]]
    assert len({row["group_id"] for row in rows}) == 654  # dialogues

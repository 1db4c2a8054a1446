from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifact import open_artifact
from pipeline.config import BadInput
from pipeline.corpora.file_tasks import ParseReport
from pipeline.corpora.formats import dstc7
from pipeline.corpora.raw import Reading


def option(name: str, text: str | None = None) -> dict[str, str]:
    return {"candidate-id": name, "utterance": text or f"text of {name}"}


def dialogue(number: int = 7, **changes: Any) -> dict[str, Any]:
    """An example of sub-task 1: candidates c0 to c99, of which c42 is right."""
    speakers = ["participant_1", "participant_2", "participant_1"]
    found = {
        "data-split": "train",
        "example-id": number,
        "messages-so-far": [
            {"speaker": who, "utterance": text}
            for who, text in zip(speakers, ["hey", "hello", "it hangs"], strict=True)
        ],
        "options-for-correct-answers": [option("c42")],
        "options-for-next": [option(f"c{place}") for place in range(100)],
        "scenario": 1,
        **changes,
    }
    return {name: value for name, value in found.items() if value is not ...}


def read(
    folder: Path,
    dialogues: list[Any],
    name: str = "ubuntu_train_subtask_1.json",
    answers: dstc7.Answers | None = None,
    **options: Any,
) -> tuple[list[dict[str, Any]], ParseReport]:
    (folder / name).write_text(json.dumps(dialogues), encoding="utf-8")
    report = ParseReport()
    rows = dstc7.parse(
        str(folder / name), Reading(), report, dstc7.Options(**options), answers or {}
    )
    return list(rows), report


def test_a_dialogue_is_an_example_with_its_100_candidates(tmp_path):
    (row,), report = read(tmp_path, [dialogue()])
    turns = ["participant 1: hey", "participant 2: hello", "participant 1: it hangs"]
    assert row["context"] == turns
    assert (row["response"], row["label"]) == ("text of c42", 42)
    assert row["candidates"] == [f"text of c{place}" for place in range(100)]
    assert (row["group_id"], row["split"]) == ("ubuntu_train_subtask_1.json/7", "train")
    assert (report.records, report.counts) == (1, {"dialogues": 1})


def test_speakers_can_be_left_out(tmp_path):
    (row,), _ = read(tmp_path, [dialogue()], speakers="none")
    assert row["context"] == ["hey", "hello", "it hangs"]


def test_the_label_is_the_place_of_the_right_id_even_among_equal_texts(tmp_path):
    same = [option(f"c{place}", "yes") for place in range(100)]
    (row,), _ = read(tmp_path, [dialogue(**{"options-for-next": same})])
    assert (row["label"], row["response"]) == (42, "yes")


@pytest.mark.parametrize(
    ("said", "name", "split"),
    [
        ("train", "x.json", "train"),
        ("dev", "ubuntu_train_subtask_1.json", "valid"),
        (..., "ubuntu_dev_subtask_1.json", "valid"),
        (..., "ubuntu_test_subtask_1.json", "test"),
    ],
)
def test_the_split_is_what_the_record_says_else_the_file(tmp_path, said, name, split):
    (row,), _ = read(tmp_path, [dialogue(**{"data-split": said})], name)
    assert row["split"] == split


# Augmented training sets

SEVEN = [(f"participant_{1 + place % 2}", text) for place, text in enumerate("ABCDEFG")]


def seven(**changes: Any) -> dict[str, Any]:
    messages = [{"speaker": who, "utterance": text} for who, text in SEVEN]
    return dialogue(**{"messages-so-far": messages, **changes})


def test_an_augmented_set_has_an_example_for_every_turn_of_participant_2(tmp_path):
    rows, report = read(tmp_path, [seven()], augment=True, speakers="none")
    assert [("".join(row["context"]), row["response"]) for row in rows] == [
        ("A", "B"), ("ABC", "D"), ("ABCDE", "F"), ("ABCDEFG", "text of c42")
    ]  # fmt: skip
    assert [row["candidates"] is None for row in rows] == [True, True, True, False]
    assert [row["label"] for row in rows] == [None, None, None, 42]
    assert len({row["example_id"] for row in rows}) == 4
    assert len({row["group_id"] for row in rows}) == 1
    assert (report.records, report.counts) == (4, {"dialogues": 1})


@pytest.mark.parametrize("split", ["dev", "test"])
def test_only_training_files_are_augmented(tmp_path, split):
    rows, _ = read(tmp_path, [seven(**{"data-split": split})], augment=True)
    assert len(rows) == 1


def test_a_first_turn_of_participant_2_answers_nothing(tmp_path):
    messages = [{"speaker": "participant_2", "utterance": text} for text in ("hi", "there")]
    rows, _ = read(tmp_path, [dialogue(**{"messages-so-far": messages})], augment=True)
    assert [row["response"] for row in rows] == ["there", "text of c42"]


@pytest.mark.parametrize("candidates", [[], None, ...])
def test_a_training_file_may_have_no_candidates_and_an_id_several_times(tmp_path, candidates):
    found = dialogue(**{"options-for-next": candidates})
    rows, _ = read(tmp_path, [found, found])
    assert [(row["response"], row["candidates"], row["label"]) for row in rows] == [
        ("text of c42", None, None)
    ] * 2
    assert len({row["example_id"] for row in rows}) == 2
    _, report = read(tmp_path, [{**found, "data-split": "dev"}])
    assert report.malformed.counts == {"not 100 candidates": 1}


# Sub-task 4: the right answer may be absent


@pytest.mark.parametrize(
    ("right", "label", "response"), [([option("c42")], 42, "text of c42"), ([], 100, "NONE")]
)
def test_in_subtask_4_none_is_one_more_candidate(tmp_path, right, label, response):
    found = dialogue(**{"scenario": 4, "options-for-correct-answers": right})
    (row,), _ = read(tmp_path, [found])
    assert (len(row["candidates"]), row["candidates"][100]) == (101, "NONE")
    assert (row["label"], row["response"]) == (label, response)


# The test file and its answers


def answers_in(folder: Path, text: str, name: str = "ubuntu_responses_subtask_1.tsv"):
    (folder / name).write_text(text, encoding="utf-8")
    return dstc7.read_answers([str(folder / name)], Reading())


def unanswered(number: int = 7, **changes: Any) -> dict[str, Any]:
    changes = {"data-split": "test", "options-for-correct-answers": ..., **changes}
    return dialogue(number, **changes)


def test_answers_come_from_the_file_beside_it_whatever_quotes_it_holds(tmp_path):
    answers = answers_in(tmp_path, '7\tc3\t"no closing quote\n8\tc5\tsay "hi"\tor not\n')
    rows, _ = read(tmp_path, [unanswered(7), unanswered(8)], "ubuntu_test_subtask_1.json", answers)
    assert [(row["label"], row["response"]) for row in rows] == [
        (3, "text of c3"),
        (5, "text of c5"),
    ]


def test_further_right_answers_leave_the_candidates(tmp_path):
    answers = answers_in(tmp_path, "7\tc9,c3,c42\tx\n")
    (row,), _ = read(tmp_path, [unanswered(7)], answers=answers)
    assert (row["label"], row["response"], len(row["candidates"])) == (3, "text of c3", 98)
    assert not {"text of c9", "text of c42"} & set(row["candidates"])


def test_the_file_of_subtask_4_may_answer_none_but_not_nothing(tmp_path):
    answers = answers_in(tmp_path, "7\tNONE\tNone\n", "ubuntu_responses_subtask_4.tsv")
    rows, report = read(
        tmp_path, [unanswered(7, scenario=4), unanswered(8, scenario=4)], answers=answers
    )
    assert [(row["label"], row["response"]) for row in rows] == [(100, "NONE")]
    assert report.malformed.counts == {"no right answer among the candidates": 1}


@pytest.mark.parametrize("subtask", [1, 4])
def test_a_test_file_without_its_answers_is_refused_and_told_where_they_are(tmp_path, subtask):
    other = answers_in(tmp_path, "7\tc3\tx\n", f"ubuntu_responses_subtask_{5 - subtask}.tsv")
    with pytest.raises(
        BadInput, match=rf"ubuntu_responses_subtask_{subtask}\.tsv, as another --input"
    ):
        read(tmp_path, [unanswered(scenario=subtask)], answers=other)


@pytest.mark.parametrize(
    "line", ["seven\tc3\tx", "7 c3 x", "7\t\tx", "7\tc3", "example-id\tcandidate-id\tutterance"]
)
def test_a_line_that_is_no_answer_is_refused_by_name_and_number(tmp_path, line):
    with pytest.raises(BadInput, match=r"subtask_1\.tsv, line 2: .* allowed: example-id<TAB>"):
        answers_in(tmp_path, f"6\tc1\tx\n{line}\n")


@pytest.mark.parametrize("names", [["answers.tsv"], ["a_subtask_1.tsv", "b_subtask_1.tsv"]])
def test_each_subtask_has_one_file_of_answers_named_after_it(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text("7\tc3\tx\n")
    with pytest.raises(BadInput, match="one file of answers for each sub-task"):
        dstc7.read_answers([str(tmp_path / name) for name in names], Reading())


# What is not of the format


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"example-id": "7"}, "example-id is no integer"),
        ({"data-split": "tune"}, "data-split names no split"),
        ({"scenario": 2}, "scenario is not 1, 3, 4 or 5"),
        ({"messages-so-far": []}, "messages-so-far is empty"),
        ({"messages-so-far": ...}, "messages-so-far is empty"),
        ({"messages-so-far": 5}, "messages-so-far is no list of speaker and utterance"),
        ({"messages-so-far": [{"speaker": "participant_1", "utterance": None}]},
         "messages-so-far holds what is no text"),
        ({"options-for-next": [option("c42")] * 99}, "not 100 candidates"),
        ({"options-for-next": [{"candidate-id": "c1"}]},
         "options-for-next is no list of candidate-id and utterance"),
        ({"options-for-next": [option("c42", "\ud800")]}, "options-for-next holds what is no text"),
        ({"options-for-correct-answers": [option("c100")]}, "no right answer among the candidates"),
        ({"options-for-correct-answers": []}, "no right answer among the candidates"),  # in sub-task 1
    ],
)  # fmt: skip
def test_a_dialogue_that_is_not_of_the_format_is_set_aside_and_the_rest_read(
    tmp_path, changes, reason
):
    rows, report = read(tmp_path, [dialogue(1), dialogue(**changes), "text", dialogue(3)])
    assert [row["group_id"][-2:] for row in rows] == ["/1", "/3"]
    assert report.malformed.counts == {reason: 1, "not a JSON object": 1}
    assert report.records == 4
    assert {sample["line"] for sample in report.malformed.samples} == {2, 3}


def test_an_empty_answer_makes_no_example(tmp_path):
    empty = [option(f"c{place}", " ") for place in range(100)]
    messages = [{"speaker": f"participant_{who}", "utterance": ""} for who in (1, 2)]
    rows, report = read(
        tmp_path,
        [dialogue(**{"options-for-next": empty, "messages-so-far": messages})],
        augment=True,
    )
    assert (rows, report.records, report.dropped.counts) == ([], 2, {"empty answer": 2})


_odd = st.sampled_from([None, 1, "x", [], [1], {}, [{}], [option("c42")], "dev", "test", ...])


@given(
    st.lists(st.dictionaries(st.sampled_from(sorted(dialogue())), _odd), max_size=4), st.booleans()
)
def test_every_dialogue_of_any_array_is_an_example_or_counted(tmp_path_factory, changes, augment):
    folder = tmp_path_factory.getbasetemp()
    found = [dialogue(number, **change) for number, change in enumerate(changes)]
    rows, report = read(folder, found, answers={1: {}}, augment=augment)
    counted = report.dropped.counts.total() + report.malformed.counts.total()
    assert len(rows) + counted == report.records
    assert len({row["example_id"] for row in rows}) == len(rows)


# The job


def test_the_job_reads_a_folder_of_files_and_answers(run_job_here, tmp_path):
    (tmp_path / "in").mkdir()
    train = [seven(), dialogue(8), dialogue(9)]
    dev = [dialogue(3, **{"data-split": "dev"})]
    packed = gzip.compress(json.dumps(train).encode())
    (tmp_path / "in" / "ubuntu_train_subtask_1.json.gz").write_bytes(packed)
    (tmp_path / "in" / "ubuntu_dev_subtask_1.json").write_text(json.dumps(dev, indent=4))
    (tmp_path / "in" / "ubuntu_test_subtask_1.json").write_text(json.dumps([unanswered(5)]))
    options = ("prepare_corpus", "--corpus", "dstc7", "--input", tmp_path / "in", "--output",
               tmp_path / "out", "--dstc7.augment", "true")  # fmt: skip
    assert "ubuntu_responses_subtask_1.tsv, as another --input" in run_job_here(*options).refusal
    (tmp_path / "in" / "ubuntu_responses_subtask_1.tsv").write_text("5\tc99\ttext of c99\n")
    (tmp_path / "out.partial").rename(tmp_path / "other")  # the input is another one now
    counts = run_job_here(*options).summary["counts"]
    assert {name: counts[f"examples.{name}"] for name in ("train", "valid", "test")} == {
        "train": 8, "valid": 1, "test": 1
    }  # fmt: skip
    assert (counts["records"], counts["dialogues"]) == (10, 5)
    assert len(open_artifact(str(tmp_path / "out"), "corpus").files(suffix=".parquet")) == 3


# Real records


@pytest.mark.shared
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_contexts_are_those_of_parlai(shared, tmp_path, split):
    file = shared / "data" / "dstc7" / "parlai_fixtures" / f"dstc7_{split}.yml"
    acts = [act for episode in yaml.safe_load(file.read_text())["acts"] for act in episode]
    for act in acts:
        said = re.split(r"^participant ([12]): ", act["text"], flags=re.MULTILINE)[1:]
        messages = [
            {"speaker": f"participant_{who}", "utterance": text.removesuffix("\n")}
            for who, text in zip(said[::2], said[1::2], strict=True)
        ]
        (answer,) = act.get("labels") or act["eval_labels"]
        texts = [text for text in act["label_candidates"] if text != answer]  # 20 of the 100
        options = [option(f"c{at}", text) for at, text in enumerate([*texts, answer])]
        options += [option(f"more{at}", "x") for at in range(100 - len(options))]
        found = dialogue(**{"messages-so-far": messages, "options-for-next": options,
                            "options-for-correct-answers": [option(f"c{len(texts)}", answer)]})  # fmt: skip
        (row,), _ = read(tmp_path, [found])
        assert "".join(f"{turn}\n" for turn in row["context"]) == act["text"]
        assert row["candidates"][row["label"]] == row["response"] == answer
    assert len(acts) == 5


@pytest.mark.shared
def test_real_dialogues_are_read_whole_and_augmented_by_each_turn_of_participant_2(real_data):
    file = real_data / "dstc7" / "derived" / "ubuntu_train_subtask_1.json"
    report, options = ParseReport(), dstc7.Options(speakers="none", augment=True)
    rows = list(dstc7.parse(str(file), Reading(), report, options, {}))
    dialogues = json.loads(file.read_text(encoding="utf-8"))
    whole = [row for row in rows if row["candidates"] is not None]
    for row, theirs in zip(whole, dialogues, strict=True):
        assert row["context"] == [message["utterance"] for message in theirs["messages-so-far"]]
        assert row["response"] == theirs["options-for-correct-answers"][0]["utterance"]
        assert row["candidates"] == [text["utterance"] for text in theirs["options-for-next"]]
        assert row["candidates"][row["label"]] == row["response"]
    expected = Counter(
        message["utterance"]
        for dialogue in dialogues
        for message in dialogue["messages-so-far"][1:]
        if message["speaker"] == "participant_2"
    )
    added = [row for row in rows if row["candidates"] is None]
    assert Counter(row["response"] for row in added) == expected
    assert (len(whole), len(added)) == (2500, 4641)
    assert all(len(row["context"]) % 2 for row in added)
    assert not report.malformed.counts and not report.dropped.counts

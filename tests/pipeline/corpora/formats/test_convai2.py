from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import BadInput
from pipeline.corpora.file_tasks import ParseReport
from pipeline.corpora.formats import convai2

from ..conftest import parse_file

TWO_DIALOGUES = """\
1 your persona: i like to remodel homes.
2 your persona: i have two dogs.
3 hi , how are you ?\tfine , i am painting .
4 a house ?\tyes , my own .
1 your persona: i work as a nurse.
2 hello .\thi there .
"""


def read(
    folder: Path, text: str, name: str = "train.txt", **options: Any
) -> tuple[list[dict[str, Any]], ParseReport]:
    return parse_file(convai2, folder / name, text, **options)


def test_persona_comes_first_then_the_turns_oldest_first(tmp_path):
    rows, report = read(tmp_path, TWO_DIALOGUES)
    persona = ["your persona: i like to remodel homes.", "your persona: i have two dogs."]
    assert [(row["context"], row["response"]) for row in rows] == [
        ([*persona, "hi , how are you ?"], "fine , i am painting ."),
        ([*persona, "hi , how are you ?", "fine , i am painting .", "a house ?"], "yes , my own ."),
        (["your persona: i work as a nurse.", "hello ."], "hi there ."),
    ]
    assert (report.records, report.dropped.counts) == (6, {"persona line (part of contexts)": 3})
    assert report.counts == {"dialogues": 2}
    assert not report.malformed.counts
    assert [row["group_id"] for row in rows] == ["train.txt/1", "train.txt/1", "train.txt/2"]
    ids = [row["example_id"] for row in rows]
    assert ids == ["train.txt/1/3", "train.txt/1/4", "train.txt/2/2"]
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


def test_a_file_that_names_no_split_is_cut_between_dialogues_only(tmp_path):
    dialogue = "1 your persona: x.\n2 a\tb\n3 c\td\n4 e\tf\n"
    rows, _ = read(tmp_path, dialogue * 400, "convai2.txt")
    groups = {(row["group_id"], row["split"]) for row in rows}
    assert len(groups) == 400
    assert {split for _, split in groups} == {"train", "valid", "test"}


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
    ("persona", "lines"),
    [
        ("all", ["partner's persona: a.", "your persona: b.", "partner's persona: c."]),
        ("self", ["your persona: b."]),
        ("none", []),
    ],
)
def test_whose_persona_contexts_begin_with_is_an_option(tmp_path, persona, lines):
    both = "1 partner's persona: a.\n2 your persona: b.\n3 partner's persona: c.\n"
    rows, report = read(tmp_path, f"{both}4 hi\tho\n5 so ?\tyes\n", persona=persona)
    assert [row["context"] for row in rows] == [[*lines, "hi"], [*lines, "hi", "ho", "so ?"]]
    assert report.dropped.counts == {"persona line (part of contexts)": 3}


@pytest.mark.parametrize(
    ("whose", "lines", "text", "ending"),
    [
        ("self", ["your persona: "], "original", ""),
        ("other", ["partner's persona: "], "revised", "_no_cands"),
        ("both", ["partner's persona: ", "your persona: "], "revised", ""),
        ("none", [], "original", "_no_cands"),
    ],
)
def test_every_variant_of_the_files_is_read(tmp_path, whose, lines, text, ending):
    wrong = [f"w{place}" for place in range(19)]
    shown = "" if ending else f"\t\t{'|'.join([*wrong, 'ho'])}"
    head = [f"{who}i am {text}." for who in lines]
    numbered = [f"{number} {line}\n" for number, line in enumerate([*head, f"hi\tho{shown}"], 1)]
    (row,), report = read(tmp_path, "".join(numbered), f"valid_{whose}_{text}{ending}.txt")
    assert (row["context"], row["response"], row["split"]) == ([*head, "hi"], "ho", "valid")
    assert row["label"] == (None if ending else 19)
    assert not report.malformed.counts and not report.notes


def test_another_number_of_candidates_than_20_is_noted(tmp_path):
    rows, report = read(tmp_path, "1 a\tb\t\tx|b\n2 c\td\n3 e\tf\t\tf|y|z\n")
    assert len(rows) == 3
    (note,) = report.notes
    assert note.endswith("train.txt: 2 examples have not 20 candidates")


# Xpersona's JSON

XPERSONA = [
    {"persona": ["i like to remodel homes.", "i have two dogs."],
     "dialogue": [["hi , how are you ?", "fine , i am painting ."], ["a house ?", "yes , my own ."]]},
    {"persona": ["i work as a nurse."], "dialogue": [["hello .", "hi there ."]]},
]  # fmt: skip


def test_json_gives_what_the_text_layout_gives(tmp_path):
    texts, _ = read(tmp_path, TWO_DIALOGUES)
    rows, report = read(tmp_path, json.dumps(XPERSONA), "train.json")
    for name in ("context", "response", "candidates", "label", "source", "split"):
        assert [row[name] for row in rows] == [row[name] for row in texts]
    ids = [row["example_id"] for row in rows]
    assert ids == ["train.json/1/1", "train.json/1/2", "train.json/2/1"]
    assert (report.records, report.counts, report.dropped.counts) == (3, {"dialogues": 2}, {})


@pytest.mark.parametrize(
    "found", [{}, {"persona": [], "dialogue": []}, {"persona": "x", "dialogue": [["a", "b"]]},
              {"persona": [1], "dialogue": [["a", "b"]]}, {"persona": [], "dialogue": "ab"}]
)  # fmt: skip
def test_an_object_that_is_no_dialogue_is_set_aside(tmp_path, found):
    rows, report = read(tmp_path, json.dumps([found, XPERSONA[1]]), "train.json")
    assert [row["group_id"] for row in rows] == ["train.json/2"]
    assert (report.records, report.malformed.counts) == (2, {"no persona or no dialogue": 1})


@pytest.mark.parametrize("pair", [["a"], ["a", "b", "c"], ["a", ""], ["a", None], "ab", None])
def test_a_pair_that_is_none_is_set_aside_and_the_rest_of_the_dialogue_read(tmp_path, pair):
    found = {"persona": [], "dialogue": [["a", "b"], pair, ["c", "d"]]}
    rows, report = read(tmp_path, json.dumps([found]), "train.json")
    assert [(row["context"], row["response"]) for row in rows] == [
        (["a"], "b"),
        (["a", "b", "c"], "d"),
    ]
    assert (report.records, report.malformed.counts) == (
        3,
        {"not what was said and an answer": 1},
    )


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
    rows, report = read(tmp_path, text)
    assert [row["response"] for row in rows] == ["b", "d"]
    assert report.malformed.counts == {reason: 1}
    (sample,) = report.malformed.samples
    assert (sample["line"], sample["text"]) == (3, line)


_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_lines = st.builds("{}{}{}".format, st.sampled_from(["", "1 ", "2 ", "3", "³ ", "٣ "]), _text,
                   st.one_of(_text, _text.map("\t{}".format)))  # fmt: skip


@given(st.lists(_lines, max_size=12))
def test_every_line_of_any_text_is_an_example_or_counted(tmp_path_factory, lines):
    file = tmp_path_factory.getbasetemp() / "train any text.txt"
    file.write_bytes("\n".join(lines).encode())
    rows, report = parse_file(convai2, file)
    counted = report.dropped.counts.total() + report.malformed.counts.total()
    assert len(rows) + counted == report.records
    assert len({row["example_id"] for row in rows}) == len(rows)


@pytest.mark.parametrize(
    "names",
    [
        ("valid_self_original.txt", "valid_both_original.txt"),
        ("valid_self_original.txt", "valid_self_revised.txt"),
        ("valid_self_original.txt", "valid_self_original_no_cands.txt"),
        ("valid_none_original_no_cands.first500.txt", "valid_other_original_no_cands.first500.txt"),
    ],
)
def test_variants_of_the_same_dialogues_are_refused(prepare_here, tmp_path, names):
    for name in ("train_self_original.txt", *names):
        read(tmp_path, TWO_DIALOGUES, name)
    with pytest.raises(
        BadInput, match="are variants of the same dialogues; allowed: one file"
    ) as e:
        prepare_here(convai2.prepare, sorted(tmp_path.iterdir()), convai2.Options())
    assert all(name in str(e.value) for name in names)


def test_parts_of_one_variant_are_read_together(prepare_here, tmp_path):
    parts = ("train_self_original.0.txt", "train_self_original.1.txt", "valid_both_revised.txt")
    for name in parts:
        read(tmp_path, TWO_DIALOGUES, name)
    made = prepare_here(convai2.prepare, sorted(tmp_path.iterdir()), convai2.Options())
    assert made.counts["dialogues"] == 6


@pytest.mark.shared
def test_the_real_persona_variants_are_the_same_dialogues(shared):
    folder = shared / "data" / "convai2" / "original"
    kinds = ("self_original", "both_original", "both_revised")
    found = [
        parse_file(convai2, folder / f"valid_{kind}_no_cands.first500.txt", persona=persona)[0]
        for kind, persona in zip(kinds, ("self", "self", "none"), strict=True)
    ]
    own, both, none = ([(row["context"], row["response"]) for row in rows] for rows in found)
    assert len(own) == 3907 and len({row["group_id"] for row in found[0]}) == 500
    assert own == both
    assert none == [
        ([text for text in context if not text.startswith("your persona: ")], response)
        for context, response in own
    ]


@pytest.mark.shared
def test_the_real_json_is_the_text_file_made_from_it(shared, real_data):
    rows, report = parse_file(
        convai2, shared / "data" / "convai2" / "original" / "En_persona_valid.json"
    )
    derived = real_data / "convai2" / "derived"
    texts, _ = parse_file(convai2, derived / "train_self_original_no_cands.txt")
    for name in ("context", "response"):
        assert [row[name] for row in rows] == [row[name] for row in texts]
    assert (len(rows), report.counts) == (7316, {"dialogues": 1000})


@pytest.mark.shared
@pytest.mark.parametrize("kind", ["convai2_train", "convai2_valid", "convai2_both_train"])
def test_genuine_records_give_the_contexts_and_candidates_of_parlai(shared, tmp_path, kind):
    file = shared / "data" / "convai2" / "parlai_fixtures" / f"{kind}.yml"
    for acts in yaml.safe_load(file.read_text())["acts"]:
        lines, theirs, said = list[str](), list[tuple[Any, ...]](), list[str]()
        for act in acts:
            (answer,) = act.get("labels") or act["eval_labels"]
            *persona, text = act["text"].split("\n")
            lines += [*persona, f"{text}\t{answer}\t\t{'|'.join(act['label_candidates'])}"]
            said += [*persona, text]
            theirs.append(([*said], answer, act["label_candidates"], 19))
            said.append(answer)
        rows, report = read(tmp_path, "".join(f"{at} {line}\n" for at, line in enumerate(lines, 1)))
        assert theirs == [
            (row["context"], row["response"], row["candidates"], row["label"]) for row in rows
        ]
        assert not report.notes

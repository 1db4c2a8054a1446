"""Labelled texts: whose are train, whose are asked, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.classification import texts as intent_texts
from pipeline.classification.texts import Labelled, ReadConfig, Texts, draw, parse_shots
from pipeline.config import BadInput
from pipeline.corpora.raw import Reading

HEAD = "text,label\n"
ALL_IN_SCOPE = "no text out of scope sets a threshold: it is 0, so every text gets an intent"


def rows(intent: str, count: int, start: int = 0) -> str:
    return "".join(f"{intent} number {start + at},{intent}\n" for at in range(count))


@pytest.fixture
def read(tmp_path: Path):
    """The texts of files with these contents."""

    def run(files: dict[str, str], damaged: float = 0.01, **config) -> Texts:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        reading = Reading(max_malformed_share=damaged)
        return intent_texts.read_texts([str(tmp_path)], ReadConfig(**config), reading)

    return run


# Splits


def test_one_file_is_cut_eight_to_one_to_one_of_every_intent(read):
    found = read({"mine.csv": HEAD + rows("pay", 40) + rows("block", 20)})
    train = [row.intent for row in found.train]
    assert (train.count("pay"), train.count("block")) == (32, 16)
    asked = [row.intent for row in found.tested]
    assert (asked.count("pay"), asked.count("block")) == (4, 2)
    assert found.asked_split == "tenth"
    assert not {row.text for row in found.train} & {row.text for row in found.tested}
    assert not found.threshold


def test_the_cut_depends_on_the_texts_alone(read):
    body = (rows("pay", 40) + rows("block", 20)).splitlines(keepends=True)
    first = read({"mine.csv": HEAD + "".join(body)})
    second = read({"mine.csv": HEAD + "".join(reversed(body))})
    assert set(first.tested) == set(second.tested)
    assert set(first.train) == set(second.train)


def test_equal_texts_of_an_intent_stay_together(read):
    body = "".join(f"Pay  {at},pay\npay {at},pay\n" for at in range(30)) + rows("block", 10)
    found = read({"mine.csv": HEAD + body})
    normal = [
        {" ".join(row.text.lower().split()) for row in part} for part in (found.train, found.tested)
    ]
    assert not normal[0] & normal[1]


@pytest.mark.parametrize("count", [2, 3, 11])
def test_an_intent_of_few_texts_is_both_trained_and_asked(read, count):
    found = read({"mine.csv": HEAD + rows("pay", 30) + rows("rare", count)})
    assert [row.intent for row in found.train].count("rare") >= 1
    assert [row.intent for row in found.tested].count("rare") == 1


def test_splits_of_the_files_names_stand(read):
    found = read({
        "train.csv": HEAD + rows("pay", 3) + rows("block", 1),
        "valid.csv": HEAD + rows("pay", 1, 10),
        "test.csv": HEAD + rows("block", 2, 20),
    })  # fmt: skip
    assert (len(found.train), len(found.tested), found.asked_split) == (4, 2, "test")


def test_a_file_of_another_name_beside_a_test_file_is_for_training(read):
    found = read(
        {"mine.csv": HEAD + rows("pay", 3) + rows("block", 3), "test.csv": HEAD + rows("pay", 1, 9)}
    )
    assert (len(found.train), len(found.tested)) == (6, 1)


def test_files_without_one_to_ask_are_cut_together(read):
    found = read({
        "train.csv": HEAD + rows("pay", 20) + rows("block", 10),
        "faq.csv": HEAD + rows("pay", 20, 20) + rows("block", 10, 10),
    })  # fmt: skip
    assert (len(found.train), len(found.tested), found.asked_split) == (48, 6, "tenth")


def clinc(**parts: list[list[str]]) -> str:
    return json.dumps(parts)


def test_clinc150_without_its_test_part(read):
    """The valid part is asked, a tenth of train sets the threshold with the other texts out of scope."""
    inside = [[f"{intent} {at}", intent] for intent in ("pay", "block") for at in range(20)]
    outside = [[f"who {at}", "oos"] for at in range(6)]
    body = clinc(train=inside, val=[["pay x", "pay"]], oos_train=outside[:4], oos_val=outside[4:])
    found = read({"data_full.json": body}, dataset="clinc150")
    assert found.asked_split == "valid"
    assert [row.out_of_scope for row in found.tested] == [False, True, True]
    assert len(found.train) == 36 and not any(row.out_of_scope for row in found.train)
    assert [row.out_of_scope for row in found.threshold] == [False] * 4 + [True] * 4


def test_clinc150_with_its_test_part(read):
    inside = [[f"{intent} {at}", intent] for intent in ("pay", "block") for at in range(20)]
    asked = {"val": [["pay x", "pay"]], "test": [["block y", "block"]]}
    outside = {name: [[name, "oos"]] for name in ("oos_train", "oos_val", "oos_test")}
    found = read({"data_full.json": clinc(train=inside, **asked, **outside)}, dataset="clinc150")
    assert [row.text for row in found.tested] == ["block y", "oos_test"]
    assert len(found.train) == 40
    assert sorted(row.text for row in found.threshold) == ["oos_train", "oos_val", "pay x"]


def test_ones_own_texts_out_of_scope(read):
    found = read({"mine.csv": HEAD + rows("pay", 20) + rows("block", 20) + rows("oos", 20)},
                 out_of_scope_label="oos")  # fmt: skip
    assert intent_texts.labels_of(found.train) == ("block", "pay")
    assert sum(row.out_of_scope for row in found.tested) == 2
    assert sum(row.out_of_scope for row in found.threshold) == 18
    assert sum(not row.out_of_scope for row in found.threshold) == 4


def test_hwu64s_folders(read):
    found = read({
        "train/seq.in": "what alarms\nplay jazz\n", "train/label": "alarm_query\nplay_music\n",
        "valid/seq.in": "wake me\n", "valid/label": "alarm_query\n",
    }, dataset="hwu64")  # fmt: skip
    assert found.train[0] == Labelled("what alarms", "alarm_query")
    assert (len(found.tested), found.asked_split) == (1, "valid")


@pytest.mark.parametrize("number", [int, float])  # pandas writes integers with a gap as floats
def test_columns_have_any_name_and_labels_may_be_numbers(read, number):
    lines = [json.dumps({"q": f"text {at}", "class": number(at % 2)}) for at in range(20)]
    found = read({"mine.jsonl": "\n".join(lines)}, text_column="q", label_column="class")
    assert intent_texts.labels_of(found.train) == ("0", "1")


# Bad input


@pytest.mark.parametrize(
    ("files", "note"),
    [
        ({"mine.csv": "pay number 1,block\n"}, "texts with more than one intent: 1"),
        ({"train.csv": "", "train_5.csv": rows("pay", 5), "test.csv": "else,pay\n"},
         "of 45 texts to train on, repeats of others: 5"),
        ({"train.csv": "", "test.csv": "Pay  NUMBER 1,pay\nanything else,block\n"},
         "of 2 asked texts, trained on too: 1"),
        ({"mine.csv": "".join(f"Pay {at},PAY\n" for at in range(9))},
         "different intents, but for case and white space: 'PAY' and 'pay'"),
    ],
)  # fmt: skip
def test_texts_that_stand_more_than_once_are_reported(read, files, note):
    (first, text), *others = files.items()
    known = {first: HEAD + rows("pay", 20) + rows("block", 20) + text}
    found = read(known | {name: HEAD + text for name, text in others})
    assert found.notes == (note, ALL_IN_SCOPE)


def test_texts_for_the_threshold_that_are_known_are_reported(read):
    found = read({
        "train.csv": HEAD + rows("pay", 20) + rows("block", 20) + rows("oos", 2),
        "valid.csv": HEAD + rows("pay", 1) + rows("block", 1, 90),
        "test.csv": HEAD + "pay 20,pay\nOOS number 1,oos\n",
    }, out_of_scope_label="oos")  # fmt: skip
    assert found.notes == ("of 4 texts for the threshold, trained on or asked too: 2",)


def test_empty_texts_and_intents_are_counted(read):
    found = read({"mine.csv": HEAD + rows("pay", 20) + rows("block", 20) + " ,pay\nhello,\n"})
    assert found.dropped == {"empty text": 1, "no intent": 1}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"mine.csv": HEAD + rows("pay", 20)}, ["1 intents (pay)", "2 at least"]),
        ({"train.csv": HEAD + rows("pay", 20), "test.csv": HEAD + rows("pay", 2)}, ["1 intents (pay)"]),
        ({"mine.csv": HEAD + rows("pay", 20) + rows("rare", 1)}, ["'rare' has 1 text", "test.csv"]),
        ({"train.csv": HEAD + rows("pay", 2) + rows("a", 2), "test.csv": HEAD + rows("b", 3)},
         ["test has 1 intents that train lacks", "'b'", "of 3 texts"]),
        ({"mine.csv": HEAD}, ["no text with an intent"]),
        ({"mine.csv": ""}, ["no text with an intent"]),
        ({"mine.csv": "text,intent\na,b\n"}, ["read.label_column", "'label'", "text, intent"]),
        ({"mine.csv": "question,label\na,b\n"}, ["read.text_column: 'text' is not allowed"]),
        ({"mine.csv": HEAD + "a,b,c\n" + rows("pay", 9)}, ["1 of 10 rows are malformed", "line 2"]),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_or_asked_is_refused(read, files, words):
    with pytest.raises(BadInput) as refusal:
        read(files)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_a_label_out_of_scope_that_no_text_has_is_refused(read):
    with pytest.raises(
        BadInput, match=r"out_of_scope_label: 'oos'.* such as 'OOS', 'block', 'pay'"
    ):
        read({"mine.csv": HEAD + rows("pay", 9) + rows("block", 9) + rows("OOS", 9)},
             out_of_scope_label="oos")  # fmt: skip


def test_what_a_tenth_of_train_stands_for_is_named(read):
    files = {"train.csv": HEAD + rows("pay", 9) + rows("rare", 1) + rows("oos", 2),
             "test.csv": HEAD + rows("pay", 1)}  # fmt: skip
    with pytest.raises(BadInput, match=r"'rare' has 1 text .* or a file valid.csv beside it"):
        read(files, out_of_scope_label="oos")


def test_a_public_set_has_no_columns_to_name():
    with pytest.raises(BadInput, match=r"read.label_column: 'intent' .* read.dataset 'hwu64'"):
        ReadConfig(dataset="hwu64", label_column="intent")


@pytest.mark.parametrize("text", ["0", "-1", "ten", ""])
def test_shots_are_a_number_or_full(text):
    with pytest.raises(BadInput, match="shots"):
        parse_shots(text)
    assert (parse_shots("full"), parse_shots("30")) == (0, 30)


# Draws


def test_a_draw_has_as_many_of_every_intent_and_its_seed_decides():
    texts = [Labelled(f"{intent} {at}", intent) for intent in "abc" for at in range(20)]
    texts += [Labelled(f"d {at}", "d") for at in range(3)]
    drawn = draw(texts, 10, seed=0)
    assert [[row.intent for row in drawn].count(intent) for intent in "abcd"] == [10, 10, 10, 3]
    assert drawn == draw(texts, 10, seed=0)
    assert set(drawn) != set(draw(texts, 10, seed=1))
    assert set(drawn) <= set(draw(texts, 15, seed=0))

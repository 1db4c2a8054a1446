from __future__ import annotations

import csv
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifact import open_artifact
from pipeline.config import BadInput
from pipeline.corpora.formats import intents
from pipeline.corpora.formats.intents import intent_words
from tests.helpers import rows_of


def write(folder: Path, files: dict[str, str]) -> list[Path]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, newline="")
    return [folder / name for name in files]


@pytest.fixture
def prepare(prepare_here, tmp_path: Path):
    """What files of the given contents leave."""

    def run(corpus: intents.Corpus, files: dict[str, str]):
        return prepare_here(partial(intents.prepare, corpus=corpus), write(tmp_path, files))

    return run


def shown(found: Any) -> list[tuple[str, str, str, bool, str]]:
    rows = sorted(found.rows, key=lambda row: row["example_id"])
    assert all(row["group_id"] == row["example_id"] and row["candidates"] is None for row in rows)
    return [
        (row["example_id"], *row["context"], row["intent"], row["out_of_scope"], row["split"]) for row in rows
    ]  # fmt: skip


# Each set's layout


def test_banking77_is_csv_with_line_breaks_in_quotes(prepare):
    found = prepare("banking77", {
        "train.csv": 'text,category\nWhere is it?,card_arrival\n"\nHelp, please\n\n\n",Refund_not_there\n',
        "test.csv": "text,category\r\nIt is gone,reverted_card_payment?\r\n",
        "categories.json": "[]",
    })  # fmt: skip
    assert shown(found) == [
        ("test.csv/2", "It is gone", "reverted_card_payment?", False, "test"),
        ("train.csv/2", "Where is it?", "card_arrival", False, "train"),
        ("train.csv/3", "Help, please", "Refund_not_there", False, "train"),
    ]
    assert {row["source"] for row in found.rows} == {"banking77"}
    aside, no_valid = found.notes
    assert aside.endswith("categories.json: set aside, not a file of banking77")
    assert no_valid.endswith("--banking77.valid-share 0.1 takes one from train")


def test_a_file_of_banking77_that_names_no_split_is_cut(prepare):
    lines = "".join(f"text {n},intent_{n % 7}\n" for n in range(400))
    found = prepare("banking77", {"all.csv": f"text,category\n{lines}"})
    counts = Counter(row["split"] for row in found.rows)
    assert counts["train"] > 320 and min(counts["valid"], counts["test"]) > 5


def test_banking77_gets_a_valid_split_from_train_where_one_is_asked_for(prepare_here, tmp_path):
    lines = "text,category\n" + "".join(f"text {n},intent_{n % 7}\n" for n in range(400))
    files = write(tmp_path, {"train.csv": lines, "test.csv": lines})

    def splits(share: float) -> Counter[str]:
        options = intents.Options(valid_share=share)
        found = prepare_here(partial(intents.prepare, corpus="banking77"), files, options)
        assert any("no valid split" in note for note in found.notes) == (share == 0)
        return Counter(row["split"] for row in found.rows)

    assert splits(0) == {"train": 400, "test": 400}
    counts = splits(0.1)
    assert counts["test"] == 400 and 20 < counts["valid"] < 60


def test_clinc150_names_its_splits_and_what_is_out_of_scope(prepare):
    parts = {
        "oos_val": [["how old is it", "oos"]],
        "val": [["fly in italian", "translate"]],
        "train": [["what is my balance ", "bill_balance"], ["hi", "greeting"]],
        "oos_train": [["who won", "oos"]],
        "test": [["pay it", "pay_bill"]],
        "oos_test": [["so what", "oos"]],
    }
    found = prepare(
        "clinc150", {"data_full.json": json.dumps(parts), "domains.json": '{"banking": []}'}
    )
    assert shown(found) == [
        ("data_full.json/oos_test/1", "so what", "oos", True, "test"),
        ("data_full.json/oos_train/1", "who won", "oos", True, "train"),
        ("data_full.json/oos_val/1", "how old is it", "oos", True, "valid"),
        ("data_full.json/test/1", "pay it", "pay_bill", False, "test"),
        ("data_full.json/train/1", "what is my balance", "bill_balance", False, "train"),
        ("data_full.json/train/2", "hi", "greeting", False, "train"),
        ("data_full.json/val/1", "fly in italian", "translate", False, "valid"),
    ]
    assert {row["response"] for row in found.rows if row["out_of_scope"]} == {"out of scope"}
    assert [note.rsplit("/", 1)[1] for note in found.notes] == [
        "domains.json: set aside, not a file of clinc150"
    ]


def test_hwu64_and_snips_are_two_files_line_by_line(prepare):
    found = prepare("snips", {
        "train/seq.in": "what alarms do i have\nadd it \n",
        "train/label": "alarm_query\nAddToPlaylist\n",
        "valid/seq.in": "play it",
        "valid/label": "PlayMusic",
        "test/seq.in": "is it raining\n",
        "test/label": "GetWeather\r\n",
        "train/seq.out": "O O O O O\nO O\n",
    })  # fmt: skip
    assert shown(found) == [
        ("test/1", "is it raining", "GetWeather", False, "test"),
        ("train/1", "what alarms do i have", "alarm_query", False, "train"),
        ("train/2", "add it", "AddToPlaylist", False, "train"),
        ("valid/1", "play it", "PlayMusic", False, "valid"),
    ]
    assert len(found.notes) == 1 and "seq.out" in found.notes[0]


@pytest.mark.parametrize(
    ("intent", "words"),
    [
        ("card_payment_wrong_exchange_rate", "card payment wrong exchange rate"),
        ("AddToPlaylist", "Add To Playlist"),
        ("reverted_card_payment?", "reverted card payment?"),
        ("PTO_request", "PTO request"),
        ("__iot__hue_", "iot hue"),
    ],
)
def test_a_response_is_the_intents_name_in_words(intent, words):
    assert intent_words(intent) == words


# Bad input

CLINC150 = "not an object of lists; allowed: train, val"


@pytest.mark.parametrize(
    ("corpus", "files", "message"),
    [
        ("hwu64", {"train/seq.in": "a\nb\n", "train/label": "x\n"},
         "/train: seq.in has more than the 1 lines of the other"),
        ("hwu64", {"train/seq.in": "a\n", "train/label": "x\ny\nz\n"},
         "/train: label has more than the 1 lines of the other"),
        ("hwu64", {"train/seq.in": "a", "train/label": "x", "valid/seq.in": "a"},
         "^--input: .*/valid/label is missing"),
        ("snips", {"some/seq.in": "a", "some/label": "x"},
         r"/some/seq\.in: the folder names no split; allowed: train"),
        ("snips", {f"{n}/test/{f}": "a\n" for n in (1, 2) for f in ("seq.in", "label")},
         "2 files are named test"),
        ("banking77", {"train.csv": "text,label\na,b\n"},
         r"'category' is not allowed; .*train\.csv: text, label$"),
        *((name, {"rows.txt": "a,b\n"}, rf"rows\.txt: not a file of {name}; allowed: ")
          for name in intents.CORPORA),
        *(("clinc150", {"data_full.json": data}, rf"data_full\.json: {message}") for data, message in (
            ('{"train": [["a", "b"]', "not a whole JSON file"),
            ("[" * 100_000, "not a whole JSON file"),
            ('[["a", "b"]]', CLINC150),
            ('{"train": {"a": "b"}}', CLINC150),
            ('{"train": [["a", "b"]], "train": [["c", "d"]]}', "several lists are called train"),
            ('{"trein": [["a", "b"]]}', "'trein' is not allowed; allowed: train, val"),
        )),
    ],
)  # fmt: skip
def test_what_is_not_of_the_set_is_refused(prepare, corpus, files, message):
    with pytest.raises(BadInput, match=message):
        prepare(corpus, files)


@pytest.mark.parametrize(
    ("corpus", "names"),
    [
        ("clinc150", ["data_full.json", "data_small.json", "domains.json"]),
        ("banking77", ["train.csv", "train_10.csv"]),
        ("banking77", ["train.csv", "few/train-5shot.csv"]),
        ("hwu64", ["train/seq.in", "train_5/seq.in", "train/label", "train_5/label"]),
    ],
)
def test_variants_of_the_same_texts_are_refused(prepare, corpus, names):
    first, second = (name.removesuffix("/seq.in") for name in names[:2])
    with pytest.raises(BadInput, match=f"{first} and .*{second} are variants of the same texts"):
        prepare(corpus, dict.fromkeys(names, "{}"))


@pytest.mark.parametrize("pair", [["a"], "ab", ["a", 1], ["\ud83d", "b"]])
def test_an_entry_that_is_no_pair_is_set_aside(prepare, pair):
    found = prepare(
        "clinc150", {"data_full.json": json.dumps({"train": [["a", "b"], pair, ["c", "d"]]})}
    )
    assert [row[0] for row in shown(found)] == ["data_full.json/train/1", "data_full.json/train/3"]
    assert found.dropped == {"not a text and an intent": 1}


def test_lines_without_a_text_or_an_intent_are_counted(prepare):
    found = prepare("hwu64", {"train/seq.in": "a\n\nc\n", "train/label": "x\ny\n \n"})
    assert [row[0] for row in shown(found)] == ["train/1"]
    assert found.dropped == {"empty text": 1, "no intent": 1}


# Real data


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize(
    ("corpus", "counts", "intents_there"),
    [
        ("banking77", {"train": 10003}, 77),
        ("clinc150", {"train": 15100, "valid": 3100}, 151),
        ("hwu64", {"train": 8954, "valid": 1076}, 64),
        ("snips", {"train": 13084, "valid": 700}, 7),
    ],
)
def test_the_real_sets_are_read_to_the_last_text(
    run_job_here, shared, tmp_path, corpus, counts, intents_there
):
    folder = shared / "data" / "intent" / corpus
    summary = run_job_here(
        "prepare_corpus", "--corpus", corpus, "--input", folder, "--output", tmp_path / "out",
        "--redact", "off"
    ).summary  # fmt: skip
    total = sum(counts.values())
    assert summary["counts"] == {
        "records": total, "examples": total, **{f"examples.{split}": n for split, n in counts.items()}
    }  # fmt: skip
    rows = rows_of(open_artifact(str(tmp_path / "out"), "corpus"))
    assert len({row["intent"] for row in rows}) == intents_there
    assert len({row["response"] for row in rows}) == intents_there
    out_of_scope = sum(row["out_of_scope"] for row in rows)
    assert out_of_scope == (200 if corpus == "clinc150" else 0)
    if corpus == "banking77":
        with (folder / "train.csv").open(newline="") as stream:
            by_hand = Counter(
                (row["text"].strip(), row["category"]) for row in csv.DictReader(stream)
            )
        assert Counter((row["context"][0], row["intent"]) for row in rows) == by_hand

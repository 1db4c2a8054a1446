from __future__ import annotations

import csv
import json
import tempfile
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import BadInput
from pipeline.corpora.file_tasks import ParseReport
from pipeline.corpora.formats import pairs
from pipeline.corpora.formats.pairs import Options
from pipeline.corpora.raw import Reading

Row = dict[str, Any]
ASKED = {"context": "how are you ?", "response": "fine ."}
ALL = Options(
    group_column="group", id_column="id", candidates_column="options", label_column="label",
    split_column="split",
)  # fmt: skip
FULL = {"context": ["hi", "how are you ?"], "response": "fine .", "group": "g", "id": "1",
        "options": ["no .", "fine ."], "label": 1, "split": "train"}  # fmt: skip


def write(file: Path, rows: list[Row]) -> Path:
    """The rows as the file's ending says."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with file.open("w", newline="") as stream:
            writer = csv.DictWriter(
                stream, list(rows[0]), delimiter="\t" if file.suffix == ".tsv" else ","
            )
            writer.writeheader()
            writer.writerows(
                {k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()}
                for row in rows
            )
    return file


def read(
    folder: Path, rows: list[Row], options: Options | None = None, name: str = "rows.jsonl"
) -> tuple[list[Row], ParseReport]:
    """What one file gives."""
    file, report = write(folder / name, rows), ParseReport()
    root = f"{folder}/"
    return list(pairs.parse(str(file), Reading(), report, options or Options(), root)), report


# Rows


@pytest.mark.parametrize("form", ["jsonl", "parquet", "csv", "tsv"])
def test_a_row_is_an_example_in_every_form(tmp_path, form):
    rows = [{**FULL, "context": "how are\nyou ?"}, {**FULL, "context": 'and, "you" ?', "id": "2"}]
    found, report = read(tmp_path, rows, ALL, f"rows.{form}")
    common = {"group_id": "g", "response": "fine .", "candidates": ["no .", "fine ."], "label": 1,
              "source": "pairs", "split": "train"}  # fmt: skip
    assert found == [
        {**common, "example_id": "1", "context": ["how are\nyou ?"]},
        {**common, "example_id": "2", "context": ['and, "you" ?']},
    ]
    assert report.records == 2


def test_a_text_is_one_turn_even_where_it_looks_like_a_list(tmp_path):
    found, _ = read(tmp_path, [{"context": '["hi"]', "response": "[1]"}], name="rows.csv")
    assert [(row["context"], row["response"]) for row in found] == [(['["hi"]'], "[1]")]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "csv"])
def test_earlier_turns_may_stand_in_numbered_columns_the_latest_first(tmp_path, form):
    absent = "" if form == "csv" else None
    rows = [
        {**ASKED, "context/0": "hey", "context/1": "hi", "context/10": "never read"},
        {**ASKED, "context/0": "hey", "context/1": absent, "context/10": absent},
        {**ASKED, "context/0": absent, "context/1": "hi", "context/10": absent},
    ]
    if form == "jsonl":
        rows = [{name: value for name, value in row.items() if value} for row in rows]
    found, _ = read(tmp_path, rows, Options(earlier_turns="numbered"), f"rows.{form}")
    assert [row["context"] for row in found] == [
        ["hi", "hey", "how are you ?"],
        ["hey", "how are you ?"],
        ["how are you ?"],
    ]
    assert read(tmp_path, rows, None, f"rows.{form}")[0][0]["context"] == ["how are you ?"]


def test_a_column_without_a_name_is_ignored_as_the_index_of_pandas_is(tmp_path):
    found, report = read(tmp_path, [{"": "0", **ASKED}], name="rows.csv")
    assert [row["response"] for row in found] == ["fine ."]
    assert not report.malformed.counts


def test_the_first_file_with_a_row_tells_the_columns(tmp_path):
    files = [tmp_path / name for name in ("README.md", "a.csv", "b.csv", "c.csv")]
    for file, text in zip(
        files, ("# FAQ\n", "", "question,answer\n", "question,answer\na,b\n"), strict=True
    ):
        file.write_text(text)
    guessed, _ = pairs.with_guessed_columns([str(file) for file in files], Options(), Reading())
    assert (guessed.context_column, guessed.response_column) == ("question", "answer")
    pairs.require_columns([str(file) for file in files], guessed, Reading())


@pytest.mark.parametrize(
    ("given", "columns", "taken"),
    [
        ({}, ("Question", "Answer", "topic"), ("Question", "Answer")),
        ({}, ("id", "query", "positive", "negative"), ("query", "positive")),
        ({}, ("context", "answer"), ("context", "answer")),
        ({}, ("context", "response", "question", "answer"), ("context", "response")),
        ({"context_column": "frage"}, ("frage", "answer", "query"), ("frage", "answer")),
        ({"context_column": "question"}, ("context", "question", "answer"), ("question", "answer")),
        ({}, ("context", "question", "answer"), None),  # SQuAD's context is a paragraph
        ({}, ("question", "reply", "answer"), None),
        ({}, ("instruction", "input", "output"), None),  # of Alpaca, whose input is often empty
        ({}, ("instruction", "output"), ("instruction", "output")),
        ({}, ("frage", "answer"), ("context", "answer")),
        ({}, ("Customer question", "Our reply", "question id"), ("Customer question", "Our reply")),
        ({}, ("question", "sub_question", "answer"), ("question", "answer")),
    ],
)
def test_columns_with_usual_names_are_taken_where_one_alone_fits(tmp_path, given, columns, taken):
    file = write(tmp_path / "rows.csv", [dict.fromkeys(columns, "a")])
    options = Options(**given)
    guessed, line = pairs.with_guessed_columns([str(file)], options, Reading())
    if taken is None:
        assert (guessed, line) == (options, "")
        with pytest.raises(BadInput, match=", ".join(columns)):
            pairs.require_columns([str(file)], guessed, Reading())
    else:
        assert (guessed.context_column, guessed.response_column) == taken
        assert bool(line) == (guessed != options and set(taken) <= set(columns))
        assert not line or all(repr(name) in line for name in taken)
        if set(taken) <= set(columns):
            pairs.require_columns([str(file)], guessed, Reading())
        else:
            with pytest.raises(BadInput, match=", ".join(columns)):
                pairs.require_columns([str(file)], guessed, Reading())


def test_without_a_label_the_first_candidate_with_the_responses_text_is_meant(tmp_path):
    rows = [{**ASKED, "options": ["no .", "fine .", "fine ."]}, {**ASKED, "options": ["no ."]}]
    (found,), report = read(tmp_path, rows, Options(candidates_column="options"), "rows.csv")
    assert (found["candidates"], found["label"]) == (["no .", "fine .", "fine ."], 1)
    assert report.malformed.counts == {"response is not among options": 1}


@pytest.mark.parametrize("label", [2, 2.0, "2", "2.0", Decimal("2"), Decimal("2.00")])
def test_a_label_may_be_written_as_other_programs_write_it(tmp_path, label):
    options = Options(candidates_column="options", label_column="label")
    rows = [{**ASKED, "options": ["no .", "fine .", "fine ."], "label": label}]
    name = "rows.parquet" if isinstance(label, Decimal) else "rows.jsonl"
    assert [row["label"] for row in read(tmp_path, rows, options, name)[0]] == [2]


def test_candidates_may_be_null(tmp_path):
    rows = [FULL, {**FULL, "options": None, "label": None, "id": "2"}]
    for form in ("jsonl", "parquet"):
        found, _ = read(tmp_path, rows, ALL, f"rows.{form}")
        assert [(row["candidates"], row["label"]) for row in found] == [
            (["no .", "fine ."], 1),
            (None, None),
        ]


def test_ids_and_groups_of_a_column_with_gaps_are_whole_numbers(tmp_path):
    """pandas writes them as floats."""
    for form in ("jsonl", "parquet"):
        found, _ = read(tmp_path, [{**FULL, "id": 7.0, "group": 3.0}], ALL, f"rows.{form}")
        assert [(row["example_id"], row["group_id"]) for row in found] == [("7", "3")]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_numbers_are_texts_as_in_csv(tmp_path, form):
    """1886 of a column of integers with a gap is a float."""
    rows = [{"context": 7, "response": 1886.0}, {"context": 0, "response": None}]
    found, report = read(tmp_path, rows, name=f"rows.{form}")
    assert [(row["context"], row["response"]) for row in found] == [(["7"], "1886")]
    assert report.dropped.counts == {"empty response": 1}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"context": "\ud83d"}, "context: broken text; allowed: text, numbers, dates"),
        ({"context": ["hi", None]}, "context is no list of texts"),
        ({"response": ["fine ."]}, "response: list; allowed: text, numbers, dates"),
        ({"group": ""}, "no group"),
        ({"group": {"a": 1}}, "group: dict; allowed: text, numbers, dates"),
        ({"id": [1]}, "id: list; allowed: text, numbers, dates"),
        ({"options": "no . | fine ."}, "options is no list of texts"),
        ({"options": '{"a": "fine ."}'}, "options is no list of texts"),
        ({"options": None}, "label without options"),
        ({"label": "one"}, "label is no whole number"),
        ({"label": 0.5}, "label is no whole number"),
        ({"label": True}, "label is no whole number"),
        ({"label": 2}, "label is no place in options"),
        ({"label": -1}, "label is no place in options"),
        ({"options": []}, "label is no place in options"),
        ({"label": 0}, "response is not the candidate that label names"),
        ({"split": "holdout"}, "split is none of train, valid and test"),
    ],
)
def test_a_row_that_does_not_fit_is_set_aside_and_the_rest_is_read(tmp_path, change, reason):
    found, report = read(tmp_path, [FULL, {**FULL, **change}, {**FULL, "id": "3"}], ALL)
    assert [row["example_id"] for row in found] == ["1", "3"]
    assert report.malformed.counts == {reason: 1}
    (sample,) = report.malformed.samples
    assert sample["line"] == 2


@pytest.mark.parametrize(
    ("change", "side"),
    [
        ({"context": [" ", "\n"]}, "context"),
        ({"context": []}, "context"),
        ({"response": " \t"}, "response"),
        ({"context": None}, "context"),  # as CSV's empty cells, and null in embed_pool
        ({"response": None}, "response"),
    ],
)
def test_a_row_without_text_is_counted(tmp_path, change, side):
    found, report = read(tmp_path, [ASKED, {**ASKED, **change}])
    assert len(found) == 1
    assert report.dropped.counts == {f"empty {side}": 1}


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
_rows = st.dictionaries(st.sampled_from(list(FULL)), _values).map(lambda row: {**FULL, **row})


@given(st.lists(_rows, max_size=4))
def test_any_row_is_an_example_that_fits_the_contract_or_counted(tmp_path_factory, rows):
    found, report = read(tmp_path_factory.getbasetemp(), [FULL, *rows], ALL)
    counted = report.malformed.counts.total() + report.dropped.counts.total()
    assert len(found) + counted == report.records == 1 + len(rows)
    for row in found:
        assert row["response"].strip() and "".join(row["context"]).strip()
        assert (row["candidates"] is None) == (row["label"] is None)
        if row["candidates"] is not None:
            assert row["candidates"][row["label"]] == row["response"]


# Splits and groups


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("validation-00000-of-00002.parquet", "valid"),
        ("test/part-0.jsonl", "test"),
        ("split=valid/part-0.jsonl", "valid"),
        ("valid/train.jsonl", "train"),
        ("test_run/rows.jsonl", None),  # these only look like the name of a split
        ("latest.jsonl", None),
        ("train.d/rows.csv", None),
    ],
)
def test_a_file_is_the_split_that_it_or_its_folder_names(tmp_path, name, split):
    rows = [{**ASKED, "context": f"how are you {n} ?"} for n in range(100)]
    found, _ = read(tmp_path, rows, None, name)
    splits = {row["split"] for row in found}
    assert splits == {split} if split else splits > {"train"}
    found, _ = read(tmp_path, rows, Options(split_by="groups"), name)
    assert {row["split"] for row in found} > {"train"}


def test_the_job_says_which_files_are_a_split_by_their_name(prepare_here, tmp_path):
    names = ("train/a.jsonl", "train/b.jsonl", "test/a.jsonl", "more/a.jsonl")
    files = [write(tmp_path / name, [ASKED]) for name in names]
    found = prepare_here(pairs.prepare, files, Options())
    assert found.notes == [
        "pairs: 1 of 4 files are test by their names (pairs.split_by)",
        "pairs: 2 of 4 files are train by their names (pairs.split_by)",
    ]
    assert {row["example_id"] for row in found.rows} == {f"{name}/1" for name in names}
    assert prepare_here(pairs.prepare, files, Options(split_by="groups")).notes == []


def test_the_folder_that_holds_all_files_names_no_split(prepare_here, tmp_path):
    """`polyrank faq faq.csv` in ~/dev had no example to train on."""
    rows = [{**ASKED, "context": f"how are you {n} ?"} for n in range(100)]
    found = prepare_here(pairs.prepare, [write(tmp_path / "dev" / "faq.jsonl", rows)], Options())
    assert found.notes == []
    assert {row["split"] for row in found.rows} > {"train"}


def test_a_column_of_splits_decides_alone(tmp_path):
    values = {"train": "train", "valid": "valid", "dev": "valid", "Validation": "valid", "val": "valid",
              "test": "test"}  # fmt: skip
    rows = [{**ASKED, "part": value} for value in values]
    found, _ = read(tmp_path, rows, Options(split_column="part"), "test.jsonl")
    assert [row["split"] for row in found] == list(values.values())


def test_groups_are_shared_out_as_asked_for(tmp_path):
    rows = [{**ASKED, "group": n // 2} for n in range(4000)]
    options = Options(group_column="group", shares=(0.5, 0.3, 0.2))
    found, _ = read(tmp_path, rows, options)
    counts = Counter(row["split"] for row in found)
    for split, share in (("train", 0.5), ("valid", 0.3), ("test", 0.2)):
        assert abs(counts[split] / 4000 - share) < 0.04
    assert found[0]["group_id"] == found[1]["group_id"] == "0"


_turns = st.lists(st.sampled_from(["hi", "hey", "yo", "ok"]), min_size=1, max_size=3)
_files = st.dictionaries(
    st.sampled_from(["a.jsonl", "b.csv.jsonl", "train.jsonl", "x/test.jsonl", "y/dev.jsonl"]),
    st.lists(st.fixed_dictionaries({"context": _turns, "response": st.just("so")}), min_size=1, max_size=6),
    min_size=1,
)  # fmt: skip


@pytest.mark.slow
@given(_files)
@settings(max_examples=8)
def test_contexts_that_begin_alike_are_never_in_two_splits_of_a_hash(prepare_here, files):
    """`prepare_here` checks that no group is in two splits, and that ids differ."""
    with tempfile.TemporaryDirectory() as folder:
        written = [write(Path(folder) / name, rows) for name, rows in files.items()]
        shares = (0.34, 0.33, 0.33)
        found = prepare_here(pairs.prepare, written, Options(split_by="groups", shares=shares)).rows
    of_first: dict[str, set[str]] = {}
    for row in found:
        of_first.setdefault(row["context"][0], set()).add(row["split"])
    assert all(len(splits) == 1 for splits in of_first.values())


# The user's own ids and groups


def test_ids_that_repeat_are_refused_wherever_they_stand(prepare_here, tmp_path):
    options = Options(id_column="key")
    files = [write(tmp_path / f"{n}.jsonl", [{**ASKED, "key": k} for k in keys])
             for n, keys in enumerate([("a", "b"), ("c", "d")])]  # fmt: skip
    assert {row["example_id"] for row in prepare_here(pairs.prepare, files, options).rows} == set(
        "abcd"
    )
    write(tmp_path / "1.jsonl", [{**ASKED, "key": "c"}, {**ASKED, "key": "a"}])
    with pytest.raises(BadInput, match=r"^pairs\.id_column key: 'a' is the id of several rows"):
        prepare_here(pairs.prepare, files, options)


def test_a_group_in_two_splits_is_refused(prepare_here, tmp_path):
    options = Options(group_column="thread")
    one, two = ([{**ASKED, "thread": k} for k in keys] for keys in ([1, 1, 2], [3, 4, 3]))
    files = [write(tmp_path / "train.jsonl", one), write(tmp_path / "test.jsonl", two)]
    found = prepare_here(pairs.prepare, files, options).rows
    assert {row["group_id"] for row in found} == set("1234")
    write(tmp_path / "test.jsonl", [{**ASKED, "thread": 2}])
    with pytest.raises(BadInput, match=r"^pairs\.group_column thread: '2' is in several splits"):
        prepare_here(pairs.prepare, files, options)
    assert prepare_here(
        pairs.prepare, files, Options(group_column="thread", split_by="groups")
    ).rows


# The job


def test_a_corpus_read_as_pairs_is_the_same_again(run_job_here, convai2_corpus, tmp_path):
    files = convai2_corpus.files("valid", ".parquet")
    summary = run_job_here(
        "prepare_corpus", "--corpus", "pairs", "--input", *files, "--output", tmp_path / "out",
        "--pairs.id-column", "example_id", "--pairs.group-column", "group_id",
        "--pairs.split-column", "split", "--pairs.candidates-column", "candidates",
        "--pairs.label-column", "label",
    ).summary  # fmt: skip

    def rows(uris: list[str]) -> dict[str, Row]:
        found = [row for uri in uris for row in pq.read_table(uri, partitioning=None).to_pylist()]
        return {row["example_id"]: {**row, "source": ""} for row in found}

    assert rows([str(f) for f in (tmp_path / "out" / "valid").iterdir()]) == rows(files)
    assert summary["counts"]["examples"] == len(rows(files)) > 100


@pytest.mark.shared
def test_polyais_json_gives_its_turns_oldest_first(prepare_here, shared):
    file = shared / "data" / "reddit_polyai_json" / "sample-dataset.json"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    options = Options(group_column="thread_id", earlier_turns="numbered")
    found = prepare_here(pairs.prepare, [file], options)
    assert len(found.rows) == len(lines) == 848
    by_hand = Counter(
        (
            *(line[f"context/{n}"] for n in range(8, -1, -1) if f"context/{n}" in line),
            line["context"],
        )
        for line in lines
    )
    assert Counter(tuple(row["context"]) for row in found.rows) == by_hand
    assert {row["group_id"] for row in found.rows} == {line["thread_id"] for line in lines}


def test_a_rejected_row_shows_no_column_that_nobody_named(tmp_path):
    _, report = read(tmp_path, [{"context": "hi", "response": "", "phone": "5550100", "who": "Jo"}])
    assert json.loads(report.dropped.samples[0]["text"]) == {"context": "hi", "response": ""}

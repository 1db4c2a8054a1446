from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pipeline import storage
from pipeline.config import BadInput
from pipeline.corpora import raw
from pipeline.corpora.file_tasks import ParseReport
from pipeline.corpora.formats import pairs, tables
from pipeline.corpora.raw import Reading

WANTED = {"pairs.a_column": "a", "pairs.b_column": "b"}
ROWS = [{"a": "one", "b": "two"}, {"a": "three, four", "b": 'a "word" of five'}]


def read(file: Path, data: bytes | None = None, **more: Any) -> tuple[list[Any], ParseReport]:
    if data is not None:
        file.write_bytes(data)
    report = ParseReport()
    return list(tables.read(str(file), WANTED, Reading(), report, **more)), report


def as_csv(rows: list[dict[str, str]], columns: list[str], delimiter: str = ",") -> bytes:
    stream = io.StringIO()
    writer = csv.writer(stream, delimiter=delimiter)
    writer.writerows([columns, *([row[name] for name in columns] for row in rows)])
    return stream.getvalue().encode()


def as_json(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def as_parquet(rows: list[dict[str, Any]], **more: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink, **more)
    return sink.getvalue().to_pybytes()


FORMS = {
    "csv": as_csv(ROWS, ["a", "b"]),
    "tsv": as_csv(ROWS, ["a", "b"], "\t"),
    "jsonl": as_json(ROWS),
    "parquet": as_parquet(ROWS),
}


# Which form a file has


@pytest.mark.parametrize(
    ("name", "indent", "mark"),
    [
        ("rows.json", None, ""),
        ("rows.jsonl", 2, "\ufeff"),
        ("rows", None, "\ufeff"),
        ("rows.txt", 2, ""),
        ("rows.txt", None, "\n[ "),
    ],
)
def test_a_json_array_is_a_table(tmp_path, name, indent, mark):
    table = json.dumps(ROWS, indent=indent)
    data = mark + (table[1:] if mark.endswith("[ ") else table)
    rows, report = read(tmp_path / name, data.encode())
    assert rows == list(enumerate(ROWS, start=1))
    assert report.records == 2
    form = tables.TableFormat(encoding="utf-16")
    assert read(tmp_path / name, data.encode("utf-16"), form=form)[0] == rows


def carriage_returns_alone(table: bytes) -> bytes:
    return table.replace(b"\r\n", b"\n").replace(b"\n", b"\r")


WRITTEN = [
    ("rows.json", "\n".join(json.dumps(row, indent=1) for row in ROWS)),
    ("rows.json", "".join(map(json.dumps, ROWS))),
    ("rows.json", ",\n".join(map(json.dumps, ROWS))),
    ("rows.jsonl", "\n".join(f"\x1e{json.dumps(row)}" for row in ROWS)),
    ("rows.csv", "sep=;\r\n" + as_csv(ROWS, ["a", "b"], ";").decode()),
    ("rows.csv", '"sep=;"\r\n' + as_csv(ROWS, ["a", "b"], ";").decode()),
    ("rows.csv", "\ufeff\ufeffSEP=;\r\n" + as_csv(ROWS, ["a", "b"], ";").decode()),
    ("rows.csv", "sep=\t\r\n" + FORMS["tsv"].decode()),
    *(
        (f"rows.{form}", carriage_returns_alone(FORMS[form]).decode())
        for form in ("csv", "tsv", "jsonl")
    ),
]


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_a_table_is_read_however_programs_write_it(tmp_path, name, text):
    """Objects of several lines, several in a line, with commas or record separators between them; Excel's
    first line, which names the delimiter; carriage returns alone at the ends of lines."""
    for encoding in ("utf-8", "utf-16"):
        form = tables.TableFormat(encoding=encoding)
        rows, report = read(tmp_path / name, text.encode(encoding), form=form)
        assert [row for _, row in rows] == ROWS
        assert not report.malformed.counts
    for packed in (f"{name}.gz", "rows.gz", "rows"):
        assert read(tmp_path / packed, gzip.compress(text.encode()))[0] == rows


def test_objects_of_several_lines_that_are_cut_off_are_refused(tmp_path):
    data = WRITTEN[0][1]
    with pytest.raises(BadInput, match=r"rows.json: the JSON array is .* after 1 whole objects"):
        read(tmp_path / "rows.json", data[:-3].encode())


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    ("table", "held"),
    [
        ({"0": ROWS[0], "1": ROWS[1]}, "objects, such as '0'"),
        ({"a": ["one"], "b": ["two"]}, "lists, such as 'a'"),
        (
            {"columns": ["a", "b"], "index": [0], "data": [["one", "two"]]},
            "lists, such as 'columns'",
        ),
    ],
)
def test_a_table_of_pandas_that_is_one_object_is_refused_with_a_hint(tmp_path, table, held, indent):
    with pytest.raises(BadInput, match=rf"holds {held}; .* by to_json\(…, orient='records'\)"):
        read(tmp_path / "rows.json", json.dumps(table, indent=indent).encode())


def test_the_names_of_columns_are_no_row_where_files_were_joined(tmp_path):
    rows, report = read(tmp_path / "rows.csv", 2 * ("\ufeff".encode() + FORMS["csv"]))
    assert [row for _, row in rows] == 2 * ROWS
    assert (report.records, report.dropped.counts) == (5, {"the names of the columns again": 1})


def test_what_programs_write_in_empty_cells_of_csv_is_empty_and_what_people_write_is_text(tmp_path):
    written = ["NULL", "\\N", "nan", "NaN", "<NA>", "#N/A", "nan", "#NAME?", "#DIV/0!"]
    typed = ["None", "N/A", "null", "NA", "-", "Null", "nan bread", " nan"]
    table = as_csv([{"a": "what", "b": text} for text in (*written, *typed)], ["a", "b"])
    rows, report = read(tmp_path / "rows.csv", table)
    assert [row["b"] for _, row in rows] == [""] * len(written) + typed
    counts = "1 #DIV/0!, 1 #N/A, 1 #NAME?, 1 <NA>, 1 NULL, 1 NaN, 1 \\N, 2 nan"
    assert report.notes == [f"{tmp_path}/rows.csv: cells that count as empty: {counts}"]
    table = as_json([{"a": "what", "b": "NULL"}])  # JSON has a null of its own
    assert read(tmp_path / "rows.jsonl", table)[0] == [(1, {"a": "what", "b": "NULL"})]


def test_a_table_without_names_of_columns_is_refused_with_where_they_stand(tmp_path):
    with pytest.raises(
        BadInput, match=r": one, two \(which its first line that is not blank names\)"
    ):
        read(tmp_path / "rows.csv", b"one,two\nthree,four\n")


@pytest.mark.parametrize("indent", [None, 2])
def test_a_table_under_a_key_is_refused_with_its_name_and_columns(tmp_path, indent):
    data = json.dumps({"version": "1.0", "data": ROWS}, indent=indent)
    with pytest.raises(
        BadInput, match=r"version, data \('data' is a list of objects with a, b: save"
    ):
        read(tmp_path / "rows.json", data.encode())


def test_rows_of_turns_are_refused_with_what_makes_pairs_of_them(tmp_path):
    """The form of chats, as {"messages": [{"role": …, "content": …}, …]}."""
    turns = [
        {"role": "user", "content": "how are you ?"},
        {"role": "assistant", "content": "fine ."},
    ]
    with pytest.raises(BadInput) as refusal:
        read(tmp_path / "rows.jsonl", as_json([{"messages": turns}] * 2))
    assert str(refusal.value).endswith(
        ": messages ('messages' holds lists of objects with role, content; if these are turns: jq -c "
        "'{context: [.messages[:-1][].content], response: .messages[-1].content}')"
    )


def test_an_array_in_one_line_of_over_10_mib_is_a_table(tmp_path):
    many = [{"a": "x" * 100_000, "b": str(number)} for number in range(120)]
    rows, report = read(tmp_path / "rows.json", json.dumps(many).encode())
    assert [row["b"] for _, row in rows] == [row["b"] for row in many]
    assert not report.malformed.counts


def test_cells_of_excel_for_the_mac_hold_line_feeds_and_its_lines_end_in_carriage_returns(tmp_path):
    """All rows but the first were set aside."""
    rows, report = read(tmp_path / "x.csv", b'a,b\r"one\ntwo",1\rthree,"4\n5"\r')
    assert [row for _, row in rows] == [{"a": "one\ntwo", "b": "1"}, {"a": "three", "b": "4\n5"}]
    assert not report.malformed.counts


@pytest.mark.parametrize("name", ["ROWS.{}", "rows.txt"])
@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_known_by_its_name_or_without_one_by_its_contents(tmp_path, form, name):
    rows, report = read(tmp_path / name.format(form.upper()), FORMS[form])
    assert [row for _, row in rows] == ROWS
    assert [at for at, _ in rows] == ([2, 3] if form in ("csv", "tsv") else [1, 2])
    assert report.records == 2


def test_the_name_decides_where_the_contents_mislead(tmp_path):
    rows, _ = read(tmp_path / "rows.csv", b'"{a}\t",a,b\n1,2,3\n')
    assert rows == [(2, {"{a}\t": "1", "a": "2", "b": "3"})]
    rows, _ = read(tmp_path / "rows.tab", b"a\tb\n{\t,\n")
    assert rows == [(2, {"a": "{", "b": ","})]


@pytest.mark.parametrize("data", [b"", b"\n \n\n"])
def test_an_empty_file_has_no_rows(tmp_path, data):
    assert [read(tmp_path / name, data)[0] for name in ("x.csv", "x.jsonl", "x")] == [[], [], []]


# Rows

# Hypothesis also tries the texts that stand in the code, such as NULL, which is an empty cell.
_texts = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), max_size=8
).filter(lambda text: text not in tables._EMPTY_CELLS)


@given(st.lists(st.fixed_dictionaries({"a": _texts, "b": _texts}), min_size=1, max_size=8))
def test_any_texts_are_read_as_they_were_written(tmp_path_factory, rows):
    folder = tmp_path_factory.getbasetemp()
    columns = ["a", "b"]
    for name, data in (
        ("x.csv", as_csv(rows, columns)),
        ("x.tsv", as_csv(rows, columns, "\t")),
        ("x.jsonl", as_json(rows)),
        ("x.parquet", as_parquet(rows)),
    ):
        found, report = read(folder / name, data)
        assert [row for _, row in found] == rows
        assert report.records == len(rows)
        assert not report.malformed.counts


_pieces = ['"', ",", "\t", "\n", "\n", "{", "}", '"a"', ":1", "x", " ", "\r\n"]


@given(st.sampled_from(["csv", "tsv", "jsonl"]), st.lists(st.sampled_from(_pieces), max_size=40))
def test_any_lines_are_rows_or_counted(tmp_path_factory, form, pieces):
    head = b"" if form == "jsonl" else as_csv([], ["a", "b"], "\t" if form == "tsv" else ",")
    file = tmp_path_factory.getbasetemp() / f"any.{form}"
    data = head + b'{"a":1,"b":2}\n' * (form == "jsonl") + "".join(pieces).encode()
    rows, report = read(file, data)
    assert len(rows) + report.malformed.counts.total() == report.records
    lines = [at for at, _ in rows]
    assert lines == sorted(set(lines))


def test_fields_in_quotes_hold_line_breaks_and_rows_know_their_first_line(tmp_path):
    rows, _ = read(tmp_path / "x.csv", b'a,b\n"one\ntwo","\n"\n\nthree,"four ""five"""\n')
    assert rows == [
        (2, {"a": "one\ntwo", "b": "\n"}),
        (6, {"a": "three", "b": 'four "five"'}),
    ]


def test_quotes_may_be_text_like_any_other(tmp_path):
    data = b'a\tb\n"hm" he said\tI "see"\n"\t"\n'
    rows, report = read(tmp_path / "x.tsv", data, form=tables.TableFormat(quotes=False))
    assert [row for _, row in rows] == [{"a": '"hm" he said', "b": 'I "see"'}, {"a": '"', "b": '"'}]
    rows, report = read(tmp_path / "x.tsv", data)
    assert (len(rows), report.malformed.counts.total()) == (0, 2)
    rows, report = read(tmp_path / "x.csv", b'a,b\n1,5" and 6" pipes\n2,two\n3,a 6" pipe\n')
    assert [row["b"] for _, row in rows] == ['5" and 6" pipes', "two", 'a 6" pipe']
    assert not report.malformed.counts


@pytest.mark.parametrize(
    ("name", "line", "reason", "shown"),
    [
        ("x.csv", '"one"two,three', "not CSV: ',' expected after '\"'", "14 characters"),
        ("x.csv", "one,two,three", "more or fewer fields than columns", "3 fields, 2 columns"),
        ("x.csv", "\u00e9,\udcff two", "not UTF-8", "7 characters"),
        ("x.jsonl", '{"a" 1}', "not JSON", "Expecting ':' delimiter at character 6"),
        ("x.jsonl", "[" * 100_000, "not JSON", "maximum recursion depth exceeded"),
        ("x.jsonl", '{"a": ' + "1" * 5000 + "}", "not JSON", "Exceeds the limit"),
        ("x.jsonl", "[1, 2]", "not a JSON object", "list"),
    ],
)
def test_a_line_that_is_no_row_is_set_aside_and_shows_why_and_no_content(
    tmp_path, name, line, reason, shown
):
    head, row = ("a,b\n", "\u00e9,2\n") if name == "x.csv" else ("", '{"a": 1, "b": 2}\n')
    data = f"{head}{row}{line}\n{row}".encode(errors="surrogateescape")
    rows, report = read(tmp_path / name, data)
    assert (len(rows), report.records) == (2, 3)
    assert report.malformed.counts == {reason: 1}
    (sample,) = report.malformed.samples
    assert sample["line"] == (3 if head else 2)
    assert sample["text"].startswith(shown) and not sample["text"].count("11")


def test_a_quote_that_is_never_closed_costs_its_own_line(tmp_path):
    rows, report = read(tmp_path / "x.csv", b'a,b\n1,2\n3,"4\n5,6\n7,8\n')
    expected = [(2, {"a": "1", "b": "2"}), (4, {"a": "5", "b": "6"}), (5, {"a": "7", "b": "8"})]
    assert rows == expected
    assert report.malformed.counts == {"not CSV: unexpected end of data": 1}
    assert report.malformed.samples[0]["line"] == 3


@pytest.mark.parametrize(
    ("opened", "closed"),
    [('1,"inches,3', '7,8,9"'), ('"inches,2,3', '7,8",9'), ('1,2,"3', '7",8,9')],
)
def test_two_stray_quotes_in_different_columns_cost_the_line_of_the_first_one(
    tmp_path, opened, closed
):
    """Together they are a field of several lines, in a record with more or fewer fields than columns."""
    data = f"a,b,c\n{opened}\n4,5,6\n{closed}\n10,11,12\n".encode()
    rows, report = read(tmp_path / "x.csv", data)
    assert [(at, ",".join(row.values())) for at, row in rows] == [
        (3, "4,5,6"),
        (4, closed),
        (5, "10,11,12"),
    ]
    assert report.malformed.counts == {"more or fewer fields than columns": 1}
    assert (report.malformed.samples[0]["line"], report.records) == (2, 4)


def test_the_lines_of_a_text_are_no_rows_if_its_record_has_too_many_fields(tmp_path):
    text = "First, do this.\nThen, after that, do this.\nAnd this."
    data = f'a,b,c\n1,how,when,"{text}"\n4,5,6\n'.encode()
    rows, report = read(tmp_path / "x.csv", data)
    assert [(at, ",".join(row.values())) for at, row in rows] == [(5, "4,5,6")]
    assert report.malformed.counts == {"more or fewer fields than columns": 1}
    assert report.records == 2


def test_a_field_without_an_end_is_given_up_after_some_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(raw, "MAX_LINE_BYTES", 1000)
    data = b'a,b\n1,"2\n' + b"3,4\n" * 400
    rows, report = read(tmp_path / "x.csv", data)
    assert report.malformed.counts == {"not CSV: field larger than field limit (1000)": 1}
    assert rows == [(at, {"a": "3", "b": "4"}) for at in range(3, 403)]


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl"])
def test_a_line_over_10_mib_is_set_aside_unread(tmp_path, name):
    head, row = (b"a,b\n", b"1,2\n") if name == "x.csv" else (b"", b'{"a": 1, "b": 2}\n')
    rows, report = read(tmp_path / name, head + row + b"x," * (6 << 20) + b"\n" + row)
    assert len(rows) == 2
    assert report.malformed.counts == {"line too long": 1}


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_file_that_is_cut_off_is_refused_until_it_is_told_to_keep_its_lines(tmp_path, form):
    lines = FORMS[form].count(b"\n") - 1
    stream = zstandard.ZstdCompressor().compressobj()
    data = stream.compress(FORMS[form][:-3]) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    file = tmp_path / f"rows.{form}.zst"
    with pytest.raises(BadInput, match=f"cut off after {lines} whole lines"):
        read(file, data)
    report = ParseReport()
    kept = tables.read(str(file), WANTED, Reading(truncated="keep"), report)
    assert [row for _, row in kept] == ROWS[:1]
    assert len(report.notes) == 1


# Columns


@pytest.mark.parametrize("form", FORMS)
def test_a_column_that_is_not_there_is_refused_with_those_that_are(tmp_path, form):
    file = tmp_path / f"rows.{form}"
    file.write_bytes(FORMS[form])
    wanted = {**WANTED, "pairs.id_column": "key"}
    with pytest.raises(BadInput) as refusal:
        list(tables.read(str(file), wanted, Reading(), ParseReport()))
    assert str(refusal.value) == (
        f"pairs.id_column: 'key' is not allowed; allowed: the columns of {file}: a, b"
    )


def test_a_table_of_broken_rows_alone_is_refused_for_them(tmp_path):
    """Not for its columns' names, which were listed as what is allowed."""
    file = tmp_path / "rows.csv"
    file.write_bytes(b"question,answer,\nhow ?,so\nwhen ?,now\n")
    with pytest.raises(BadInput, match=r"no rows that can be read \(2 more or fewer fields than"):
        tables.first_columns([str(file)], Reading())


@pytest.mark.parametrize(("name", "text"), [("a.csv", "question,answer\n"), ("a.jsonl", "")])
def test_a_table_without_rows_is_refused_as_that(tmp_path, name, text):
    """Not for its columns, such as `context`, which it lacked."""
    (tmp_path / name).write_text(text)
    with pytest.raises(BadInput, match=f"^{tmp_path / name}: has no rows$"):
        pairs.with_guessed_columns([str(tmp_path / name)], pairs.Options(), Reading())


def test_another_delimiter_is_named_where_all_rows_have_commas_too(tmp_path):
    """Excel's CSV in most of Europe: the rows alone were named as the fault."""
    file = tmp_path / "rows.csv"
    file.write_bytes(b"question;answer\nhow, so ?;so, so\nwhen ?;now, or then\n")
    with pytest.raises(BadInput, match=r"no rows that .* \(the fields seem to be separated by ';'"):
        tables.first_columns([str(file)], Reading())


def test_of_many_or_long_names_of_columns_some_are_shown(tmp_path):
    """A refusal of 27 kB for a table of 4,000 columns, and passages for one without names."""
    names = ["passage " * 50, *(f"c{number}" for number in range(3999))]
    with pytest.raises(BadInput) as refusal:
        read(tmp_path / "rows.csv", ",".join(names).encode() + b"\n")
    assert "passage…, c0, c1" in str(refusal.value)
    assert "c48 and 3,950 more (which" in str(refusal.value) and len(str(refusal.value)) < 600


def test_a_column_of_json_lines_may_be_absent_from_some(tmp_path):
    data = as_json([{"a": 1}, {"a": 2, "b": 3}])
    assert [row for _, row in read(tmp_path / "x.jsonl", data)[0]] == [{"a": 1}, {"a": 2, "b": 3}]
    with pytest.raises(BadInput, match=r"pairs\.b_column: 'b' .*: a$"):
        read(tmp_path / "x.jsonl", as_json([{"a": 1}] * 1000 + [{"b": 1}]))


def test_a_wanted_column_that_stands_there_twice_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"pairs\.b_column: 'b' .*: a, b, b$"):
        read(tmp_path / "x.csv", b"a,b,b\n1,2,3\n")


# Parquet


def test_parquet_gives_the_columns_asked_for_and_no_others(tmp_path):
    data = as_parquet([{"b": 1, "a": ["x"], "a/0": 2.5, "other": b"y"}])
    rows, _ = read(tmp_path / "x", data, takes_column=lambda name: name.startswith("a/"))
    assert rows == [(1, {"b": 1, "a": ["x"], "a/0": 2.5})]


def test_texts_and_uuids_whose_writer_left_out_what_they_are_are_read_as_such(tmp_path):
    """As Hive and Impala write them: byte arrays."""
    name = UUID(int=7)
    written = {
        "a": [b"caf\xc3\xa9", b"two"],
        "b": [[b"hi", b"there"], None],
        "c": pa.array([name.bytes, None], pa.binary(16)),
        "d": [b"\xff\xfe", b"no text"],
    }
    pq.write_table(pa.table(written), tmp_path / "x.parquet", store_schema=False)
    rows, _ = read(tmp_path / "x.parquet", takes_column=lambda name: True)
    assert [list(row.values()) for _, row in rows] == [
        ["café", ["hi", "there"], name, b"\xff\xfe"],
        ["two", None, None, b"no text"],
    ]


@pytest.mark.parametrize("opening", ["", "["])
def test_a_row_that_names_a_column_twice_with_other_values_is_set_aside(tmp_path, opening):
    lines = ['{"a": "1", "b": "2", "a": "3"}', '{"a": "1", "b": "2", "c": 1, "c": 2, "a": "1"}']
    data = opening + (",\n" if opening else "\n").join(lines) + ("]" if opening else "")
    rows, report = read(tmp_path / "x.json", data.encode())
    assert [(number, row["a"]) for number, row in rows] == [(2, "1")]
    assert report.malformed.counts == {"a column twice": 1}
    assert report.malformed.samples[0]["text"] == "a"


def test_parquet_is_read_row_group_by_row_group(tmp_path):
    rows = [{"a": f"{n:06d}" * 20, "b": "x"} for n in range(4096)]
    data = as_parquet(rows, row_group_size=1024, compression="none", use_dictionary=False)
    broken = data.replace(b"003000" * 20, b"\xff" * 120)
    report = ParseReport()
    (tmp_path / "x.parquet").write_bytes(broken)
    found = tables.read(str(tmp_path / "x.parquet"), WANTED, Reading(), report)
    assert [row["a"] for _, row in (next(found) for _ in range(1024))][-1] == "001023" * 20
    with pytest.raises(BadInput, match=r"x\.parquet: broken Parquet after 2,048 rows"):
        list(found)


class FailingStream:
    """A stored file of which some reads fail, as an object store's do."""

    def __init__(self, stream, fails) -> None:
        self._stream, self._fails = stream, fails

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stream.close()

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def read_at(self, *arguments):
        if self._fails():
            raise OSError("Generic S3 error: error sending request")
        return self._stream.read_at(*arguments)


@pytest.fixture
def failing_reads(monkeypatch):
    """`failing_reads(fails)`: reads for which `fails()` is true fail."""

    def run(fails):
        opened = storage.open_input
        monkeypatch.setattr(storage, "open_input", lambda uri: FailingStream(opened(uri), fails))

    return run


def test_columns_that_nobody_reads_are_not_fetched(tmp_path, monkeypatch):
    """Such as vectors between the texts."""
    random, fetched = np.random.default_rng(0), list[int]()

    class Counting(FailingStream):
        def read_at(self, *arguments):
            data = super().read_at(*arguments)
            fetched.append(len(data))
            return data

    opened = storage.open_input
    monkeypatch.setattr(storage, "open_input", lambda uri: Counting(opened(uri), lambda: False))
    texts = [random.bytes(32).hex() for _ in range(3000)]
    vectors = [random.bytes(5000) for _ in texts]
    rows = [
        {"a": text, "vector": vector, "b": text}
        for text, vector in zip(texts, vectors, strict=True)
    ]
    data = as_parquet(rows, row_group_size=1000)
    found, _ = read(tmp_path / "x", data)
    assert [row for _, row in found] == [{"a": text, "b": text} for text in texts]
    assert 20 * sum(fetched) < len(data)


@pytest.mark.parametrize("reads_before", [0, 1])
def test_parquet_of_a_store_that_fails_is_not_broken(tmp_path, failing_reads, reads_before):
    reads = itertools.count()
    failing_reads(lambda: next(reads) >= reads_before)
    with pytest.raises(OSError, match="error sending request"):
        read(tmp_path / "x", as_parquet(ROWS))
    with pytest.raises(OSError, match="error sending request"):
        tables.row_groups(str(tmp_path / "x"), 1)


def test_parquet_that_is_cut_off_is_refused(tmp_path):
    data = as_parquet(ROWS)
    with pytest.raises(BadInput, match=r"x\.parquet: broken Parquet after 0 rows"):
        read(tmp_path / "x.parquet", data[: len(data) // 2])

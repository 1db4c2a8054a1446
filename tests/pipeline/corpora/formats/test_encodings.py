"""Tables in other encodings and with other delimiters: refused with a guess, read where they are named."""

from __future__ import annotations

import gzip

import pytest

from pipeline.classification.texts import ReadConfig
from pipeline.config import BadInput
from pipeline.corpora.file_tasks import ParseReport
from pipeline.corpora.formats import pairs, tables
from pipeline.corpora.formats.pairs import Options
from pipeline.corpora.raw import Reading
from pipeline.pools.settings import EmbedConfig
from tests import helpers

TEXT = "context,response\r\nwas kostet das café ?,drei euro fünfzig\r\nund der tee ?,zwei\r\n"
ROWS = [("was kostet das café ?", "drei euro fünfzig"), ("und der tee ?", "zwei")]


def read(file, data, **options):
    file.write_bytes(data)
    report = ParseReport()
    given = Options(**options)
    pairs.require_columns([str(file)], given, Reading())
    rows = list(pairs.parse(str(file), Reading(), report, given, f"{file.parent}/"))
    return [(row["context"][0], row["response"]) for row in rows], report


def refusal(file, data, **options):
    return helpers.refusal(read, file, data, **options)


@pytest.mark.parametrize(
    ("written", "guess", "line"),
    [
        ("cp1252", "cp1252", 2),
        ("utf-16", "utf-16", 1),
        ("utf-16-le", "utf-16-le", 1),
        ("utf-16-be", "utf-16-be", 1),
        ("utf-32", "utf-32", 1),
    ],
)
def test_a_file_that_is_not_utf8_is_refused_with_a_guess_that_reads_it(
    tmp_path, written, guess, line
):
    file, data = tmp_path / "x.csv", TEXT.encode(written)
    message = refusal(file, data)
    assert message.startswith(f"{file}, line {line}: not UTF-8; a guess is ")
    assert message.endswith(f"; --pairs.encoding {guess} reads it so")
    assert line == 1 or "'was kostet das café ?,drei euro" in message
    assert read(file, data, encoding=guess)[0] == ROWS
    packed = gzip.compress(data)
    assert f"--pairs.encoding {guess} " in refusal(tmp_path / "x.csv.gz", packed)
    assert read(tmp_path / "x.csv.gz", packed, encoding=guess)[0] == ROWS


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("x.jsonl", '{"context": "café", "response": "tee"}\n'),
        ("x.json", '[\n{"context": "café", "response": "tee"}\n]'),
    ],
)
def test_json_has_an_encoding_too(tmp_path, name, table):
    data = table.encode("cp1252")
    assert refusal(tmp_path / name, data).endswith("--pairs.encoding cp1252 reads it so")
    assert read(tmp_path / name, data, encoding="cp1252")[0] == [("café", "tee")]
    message = refusal(tmp_path / name, table.encode(), encoding="utf-16")
    assert "not in --pairs.encoding utf-16" in message


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_utf8_needs_no_option(tmp_path, encoding):
    rows, report = read(tmp_path / "x.csv", TEXT.encode(encoding))
    assert (rows, report.malformed.counts) == (ROWS, {})


def test_a_broken_line_of_a_utf8_file_is_damage_and_counted(tmp_path):
    head = "context,response\r\né ".encode() + b"\xff,so\r\n"  # the letter before it is whole
    rest = b'und der kaffee \xff ?,vier\r\n"zwei\nzeilen \xff",gut\r\nnoch ?,nein\r\n'
    rows, report = read(tmp_path / "x.csv", head + TEXT.encode().partition(b"\n")[2] + rest)
    assert rows == [*ROWS, ("noch ?", "nein")]
    assert report.malformed.counts == {"not UTF-8": 3} and report.records == 6


def test_a_broken_byte_that_no_guess_explains_is_refused(tmp_path):
    message = refusal(tmp_path / "x.csv", b"context,response\nhm \x81 ?,so\n")
    assert message.endswith(
        "line 2: not UTF-8; name its encoding by --pairs.encoding, such as gb18030 or cp1251"
    )


def test_another_encoding_than_the_named_one_is_refused(tmp_path):
    message = refusal(tmp_path / "x.csv", TEXT.encode("cp1252"), encoding="utf-16")
    assert "not in --pairs.encoding utf-16" in message


@pytest.mark.parametrize("encoding", ["cp1252", "cp1251", "latin-1"])
def test_a_file_in_utf8_is_not_read_in_the_named_encoding(tmp_path, encoding):
    """Every byte is a letter in cp1252: Ã¼ for ü."""
    message = refusal(tmp_path / "x.csv", TEXT.encode(), encoding=encoding)
    assert "x.csv: is UTF-8, where 'é' is a letter; allowed: leave out --pairs.encoding" in message


def test_another_delimiter_is_named_where_a_column_has_a_comma(tmp_path):
    message = refusal(tmp_path / "x.csv", b"Frage, lang;Antwort\na;b\n")
    assert message.endswith("separated by ';', which --pairs.delimiter ';' reads)")


def test_a_set_without_such_an_option_says_how_to_convert_it(tmp_path):
    (tmp_path / "x.csv").write_bytes(TEXT.encode("cp1252"))
    with pytest.raises(BadInput, match=r"convert it: iconv -f cp1252 -t utf-8$"):
        list(tables.read(str(tmp_path / "x.csv"), {}, Reading(), ParseReport()))


@pytest.mark.parametrize(("delimiter", "typed"), [(";", ";"), ("|", "|"), ("\t", "\\t")])
def test_another_delimiter_is_named_and_read(tmp_path, delimiter, typed):
    data = TEXT.replace(",", delimiter).encode()
    message = refusal(tmp_path / "x.csv", data)
    assert (
        f"(the fields seem to be separated by '{typed}', which --pairs.delimiter '{typed}' reads)"
        in message
    )
    assert read(tmp_path / "x.csv", data, delimiter=typed)[0] == ROWS


def test_a_column_that_is_not_there_gets_no_hint_at_delimiters(tmp_path):
    message = refusal(tmp_path / "x.csv", TEXT.encode(), response_column="answer")
    assert message.endswith("x.csv: context, response")


@pytest.mark.parametrize(
    ("kind", "group"), [(Options, "pairs"), (EmbedConfig, "embed"), (ReadConfig, "read")]
)
def test_what_can_be_no_encoding_or_delimiter_is_refused(kind, group):
    for name, value in (("encoding", "utf-9"), ("encoding", "base64"), ("delimiter", "::")):
        with pytest.raises(BadInput, match=f"^{group}.{name}: '{value}' is not allowed"):
            kind(**{name: value})

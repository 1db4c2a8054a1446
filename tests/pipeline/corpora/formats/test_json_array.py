from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import BadInput
from pipeline.corpora.file_tasks import ParseReport
from pipeline.corpora.formats.json_array import read_objects
from pipeline.corpora.raw import Reading


def read(file: Path, data: bytes, truncated: str = "stop") -> tuple[list[Any], ParseReport]:
    file.write_bytes(data)
    report = ParseReport()
    return list(read_objects(str(file), Reading(truncated=truncated), report)), report


_objects = st.dictionaries(st.text(max_size=5), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
), max_size=3)  # fmt: skip


@given(st.lists(_objects, max_size=6), st.sampled_from([None, 1, 4]), st.booleans())
def test_any_array_is_read_as_the_json_module_reads_it(
    tmp_path_factory, objects, indent, ascii_only
):
    file = tmp_path_factory.getbasetemp() / "any.json"
    data = json.dumps(objects, indent=indent, ensure_ascii=ascii_only)
    found, report = read(file, data.encode())
    assert found == list(enumerate(json.loads(data), start=1))
    assert report.records == len(objects)


def test_objects_that_lie_across_pieces_of_the_stream_are_whole(tmp_path):
    objects = [{"id": n, "text": "é" * (40_000 * (n % 9))} for n in range(60)]
    data = json.dumps(objects, ensure_ascii=False).encode()
    assert len(data) > 10 << 20
    for packed in (data, zstandard.compress(data)):
        found, _ = read(tmp_path / "large.json", packed)
        assert [value for _, value in found] == objects


@pytest.mark.parametrize(
    "data", [b'\xef\xbb\xbf[{"a": 1}]', b' \n[{"a": 1},]\n', b'[{"a": 1}]\n[]']
)
def test_marks_and_space_around_the_array_do_not_matter(tmp_path, data):
    found, report = read(tmp_path / "a.json", data)
    assert (found, report.records) == ([(1, {"a": 1})], 1)


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_in_another_encoding_is_refused_and_a_damaged_object_set_aside(tmp_path, indent):
    objects = [{"a": "plain"}, {"a": "café"}, {"a": "DAMAGE"}]
    data = json.dumps(objects, ensure_ascii=False, indent=indent)
    line = 6 if indent else 1
    with pytest.raises(BadInput, match=rf"a\.json, line {line}: not UTF-8; a guess is Latin-1"):
        read(tmp_path / "a.json", data.encode("cp1252"))
    with pytest.raises(BadInput, match="not UTF-8; a guess is UTF-16"):
        read(tmp_path / "a.json", data.encode("utf-16"))
    found, report = read(tmp_path / "a.json", data.encode().replace(b"DAMAGE", b"\xff \xc3"))
    assert found == [(1, {"a": "plain"}), (2, {"a": "café"})]
    assert (report.records, report.malformed.counts) == (3, {"not UTF-8": 1})


def test_what_is_no_object_is_set_aside_and_the_rest_read(tmp_path):
    found, report = read(tmp_path / "a.json", b'[1, {"a": 1}, "x", [{"a": 2}], null, {"a": 3}]')
    assert found == [(2, {"a": 1}), (6, {"a": 3})]
    assert report.records == 6
    assert report.malformed.counts == {"not a JSON object": 4}
    assert [sample["line"] for sample in report.malformed.samples] == [1, 3, 4, 5]


@pytest.mark.parametrize("border", ["", "\n", ",\n"])
def test_arrays_one_after_the_other_are_read_to_the_last_whatever_their_commas(tmp_path, border):
    found, _ = read(
        tmp_path / "a.json", border.join(['[{"a": 1}]', '[, {"a": 2} {"a": 3},,]', "[]"]).encode()
    )
    assert [value["a"] for _, value in found] == [1, 2, 3]


@pytest.mark.parametrize("data", [b'[{"a": 1}] rest', b'[{"a": 1}];', b'[{"a": 1}, {"a": 2,}]'])
def test_what_is_no_json_is_refused_with_its_fault(tmp_path, data):
    with pytest.raises(BadInput, match=r"broken \((Expecting|Illegal) .*\) after 1 whole objects"):
        read(tmp_path / "a.json", data)


@pytest.mark.parametrize("data", [b'{"a": [{"b": 1}]}', b"hello"])
def test_a_file_that_is_no_array_is_refused_with_its_beginning(tmp_path, data):
    beginning = re.escape(repr(data.decode()))
    with pytest.raises(BadInput, match=rf"a\.json, beginning: {beginning} .*allowed: a JSON array"):
        read(tmp_path / "a.json", data)


@pytest.mark.parametrize("data", [b" \n ", b"[ ]\n"])
def test_an_empty_file_or_array_holds_no_record(tmp_path, data):
    found, report = read(tmp_path / "a.json", data)
    assert (found, report.records, report.malformed.counts) == ([], 0, {})


@pytest.mark.parametrize(
    "rest", [b"", b", ", b', {"a": 3', b', {"a": nope}, {"a": 4}]', b", " + b"[" * 100_000]
)
def test_an_array_that_breaks_off_is_refused_with_its_whole_objects_until_told_to_keep_them(
    tmp_path, rest
):
    data = b'[{"a": 1}, {"a": 2}' + rest
    with pytest.raises(BadInput, match=r"a\.json: .* after 2 whole objects; --reading.truncated"):
        read(tmp_path / "a.json", data)
    found, report = read(tmp_path / "a.json", data, "keep")
    assert [value["a"] for _, value in found] == [1, 2]
    (note,) = report.notes
    assert note.endswith("its 2 whole objects are used")


def test_an_object_without_an_end_does_not_fill_the_memory(tmp_path):
    data = b'[{"a": 1}, {"a": "' + b"x" * (12 << 20) + b'"}]'
    with pytest.raises(BadInput, match="over 10 MiB after 1 whole objects"):
        read(tmp_path / "a.json", data)

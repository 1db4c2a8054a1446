from __future__ import annotations

import bz2
import functools
import gzip
import json
import lzma
import zlib
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import BadInput
from pipeline.corpora import raw
from pipeline.corpora.raw import Reading, Rejects, Truncated, line_blocks, read_lines
from pipeline.engine.records import TaskRecord


def zstd_of_dumps(data: bytes) -> bytes:
    """One frame that declares a 2 GiB window, its size unknown: what the public dumps are."""
    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(data) + compressor.flush()


def zstd_parallel(data: bytes) -> bytes:
    """What pzstd writes: a skippable frame before each frame."""
    frame = zstandard.compress(data)
    return b"\x50\x2a\x4d\x18\x04\x00\x00\x00" + len(frame).to_bytes(4, "little") + frame


FORMATS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": functools.partial(lzma.compress, preset=0),
    "zst": zstandard.compress,
    "zst, 2 GiB window": zstd_of_dumps,
    "zst of pzstd": zstd_parallel,
}
compressed = pytest.mark.parametrize("name", FORMATS)

LINES = [json.dumps({"id": n, "body": f"this is comment {n} of them"}) for n in range(5_000)]
DATA = "".join(line + "\n" for line in LINES).encode()


@pytest.fixture
def file(tmp_path: Path):
    def write(data: bytes) -> str:
        (tmp_path / "file").write_bytes(data)
        return str(tmp_path / "file")

    return write


def lines_of(uri: str, **reading: object) -> list[str]:
    return [text for _, text in read_lines(uri, Reading(**reading))]


# Formats


@compressed
def test_a_file_of_several_frames_is_read_to_its_end(file, name):
    """With zeros behind them, too: xz pads its streams, tapes fill their blocks."""
    parts = map(FORMATS[name], [DATA[:1000], DATA[1000:1001], DATA[1001:]])
    assert lines_of(file((b"\0" * 4).join(parts) + b"\0" * 300_000)) == LINES
    assert lines_of(file(FORMATS[name](DATA[:1000]) + FORMATS[name](DATA[1000:]))) == LINES


def test_skippable_frames_of_zstandard_are_passed_over(file):
    skippable = b"\x5f\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    frames = [zstandard.compress(DATA[:1000]), zstandard.compress(DATA[1000:])]
    assert lines_of(file(skippable + frames[0] + skippable + frames[1] + skippable)) == LINES


def test_zeros_that_fill_up_a_file_are_no_line(file):
    assert lines_of(file(DATA + b"\0" * 300_000)) == LINES
    assert lines_of(file(DATA[:-1] + b"\0" * 512)) == LINES


def test_carriage_returns_alone_end_lines(file):
    text = "a\rb\r\rc"
    assert lines_of(file(text.encode())) == ["a", "b", "", "c"]
    assert lines_of(file(b"a\r\nb\rc\r\n")) == ["a", "b\rc"]  # within a line it is text
    long = ["a", "x" * (1 << 20), "b"]  # in two pieces
    assert lines_of(file("\r".join(long).encode())) == long


@compressed
def test_a_stream_that_is_cut_off_is_refused_with_the_number_of_its_whole_lines(file, name):
    data = FORMATS[name](DATA)
    for cut in (7, len(data) * 2 // 3):
        uri = file(data[:cut])
        whole = lines_of(uri, truncated="keep")
        assert whole == LINES[: len(whole)]
        assert cut > 7 or not whole
        with pytest.raises(BadInput) as caught:
            lines_of(uri)
        assert f"{uri}: the compressed stream is" in str(caught.value)
        assert f"after {len(whole):,} whole lines; --reading.truncated keep" in str(caught.value)


@pytest.mark.parametrize("name", ["bz2", "zst, 2 GiB window"])
def test_most_of_a_stream_that_is_cut_off_near_its_end_can_be_kept(file, name):
    rng_free = [f"{n} {n * 2654435761 % 2**32:x} {n * 40503 % 2**16:x}" for n in range(120_000)]
    data = FORMATS[name]("\n".join(rng_free).encode())
    whole = lines_of(file(data[:-100]), truncated="keep")
    assert len(rng_free) // 2 < len(whole) < len(rng_free)
    assert whole == rng_free[: len(whole)]


@compressed
def test_rubbish_after_the_stream_is_refused(file, name):
    with pytest.raises(BadInput, match="broken"):
        lines_of(file(FORMATS[name](DATA) + b"rubbish"))


# Lines


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"\na\n\n", ["", "a", ""]),
        (b"a\r\nb\r\n", ["a", "b"]),
        ("a\u2028b\x0bc\x85d\n".encode(), ["a\u2028b\x0bc\x85d"]),
        (b"a\n\xef\xbb\xbfb\n", ["a", "b"]),  # two files in one
        (b"\xff\xfd\n", ["\ufffd\ufffd"]),
    ],
)
def test_lines_end_at_line_feeds_only_and_are_numbered_from_1(file, data, lines):
    assert list(read_lines(file(data), Reading(max_malformed_share=1))) == list(
        enumerate(lines, start=1)
    )


def test_lines_with_bytes_that_are_not_utf8_are_counted(file):
    notes, uri = [], file("caf\xe9\nna\xefve\n".encode("latin-1") + "café\n".encode())
    assert [text for _, text in read_lines(uri, Reading(max_malformed_share=1), notes)] == [
        "caf\ufffd",
        "na\ufffdve",
        "café",
    ]
    assert notes == [f"{uri}: U+FFFD for bytes that are not UTF-8 in 2 lines"]


@pytest.mark.parametrize(
    ("encoding", "guess"),
    [("cp1252", "Latin-1"), ("utf-16", "UTF-16"), ("utf-16-le", "UTF-16-LE"), ("utf-32", "UTF-32")],
)
def test_lines_of_another_encoding_are_refused_with_a_guess(file, encoding, guess):
    text = "plain\n" * 100 + "the café of the street\n" * 5
    with pytest.raises(BadInput, match=f"not UTF-8; a guess is {guess}.*iconv"):
        list(read_lines(file(text.encode(encoding)), Reading()))


@pytest.mark.parametrize("encoding", ["gb18030", "cp1251", "cp1256", "cp874"])
def test_lines_of_another_script_are_not_guessed_to_be_latin(file, encoding):
    """Chinese was said to be Latin-1: ÎÒµÄ¿¨, which the advice read so."""
    words = {"gb18030": "我的卡", "cp1251": "где карта", "cp1256": "بطاقتي", "cp874": "บัตร"}
    text = "plain\n" * 9 + f"{words[encoding]}\n" * 5
    with pytest.raises(BadInput, match=r"line 10: not UTF-8; convert it to UTF-8$"):
        list(read_lines(file(text.encode(encoding)), Reading()))


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"PK\x03\x04" + b"\0" * 40, "an Excel workbook, or another ZIP archive"),
        (b"lines.txt".ljust(257, b"\0") + b"ustar  \0", "a tar archive"),
        (gzip.compress(b"a line\n", mtime=0), "compressed twice"),
        (lzma.compress(b"a line\n", format=lzma.FORMAT_ALONE), "compressed in another way"),
        (b"\x04\x22\x4d\x18abcd", "compressed in another way"),
        (zlib.compress(b"a line\n", 9), "compressed in another way"),
        (b"PAR1" + b"\0" * 40, "Parquet"),
        (b"\xff\xff\xff\xff\x10\x02\0\0" + b"\x10\0\0\0" * 20, "an Arrow file .*to_parquet"),
        (b"PK\x05\x06" + b"\0" * 18, "another ZIP archive"),
        (b"SQLite format 3\0" + b"\x10\0" * 20, "binary data"),
        (b"%PDF-1.4\n1 0 obj\n", "a document"),
        (b"PARE" + b"\0\1" * 40, "encrypted Parquet"),
        (b"\x89LZO\0\r\n\x1a\n\x10\x40", "no text; it may be compressed in an unknown way"),
        (b"\x85\x01\x0c\x03\x9f\xa0\xe1", "no text; .* encrypted or binary data"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4665\n", "git lfs pull"),
        (b"\n <!DOCTYPE html>\n<html>\n<body>Sign in</body>\n", "a web page"),
    ],
)
def test_a_file_that_is_no_text_is_refused(file, data, kind):
    with pytest.raises(BadInput, match=kind):
        list(read_lines(file(zstandard.compress(data)), Reading()))


@given(st.lists(st.binary(max_size=40)), st.integers(1, 60), st.integers(1, 20))
def test_blocks_are_whole_lines_and_together_the_file(pieces, block_bytes, step):
    data = b"\n".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        chunks = [data[start : start + step] for start in range(0, len(data), step)]
        patch.setattr(raw, "read_decompressed", lambda uri: iter(chunks))
        blocks = list(line_blocks("uri", block_bytes))
    assert b"".join(blocks) == data.rstrip(b"\0")
    assert all(block.endswith(b"\n") for block in blocks[:-1])
    assert all(blocks)


def test_blocks_before_a_cut_hold_whole_lines(file):
    blocks = []
    with pytest.raises(Truncated):
        for block in line_blocks(file(gzip.compress(DATA)[:-5000]), 1000):
            blocks.append(block)  # those before the cut
    kept = b"".join(blocks)
    assert len(kept) > len(DATA) // 2
    assert kept.endswith(b"\n") and DATA.startswith(kept)


# Rejected lines


def test_of_each_reason_all_are_counted_and_the_first_are_kept(out):
    rejects = Rejects()
    for number in range(100):
        rejects.add("not JSON", "dump", number, "x" * 10_000)
    rejects.add("no field id", "dump", 100, "{}")
    rejects.save(out, "task")
    assert rejects.counts == {"not JSON": 100, "no field id": 1}
    text = Path(out.path("rejected", "task.jsonl")).read_text()
    saved = [json.loads(line) for line in text.splitlines()]
    assert [s["line"] for s in saved] == [*range(20), 100]
    assert saved[-1] == {"reason": "no field id", "file": "dump", "line": 100, "text": "{}"}
    assert len(saved[0]["text"]) == 2000
    Rejects().save(out, "nothing")
    assert not Path(out.path("rejected", "nothing.jsonl")).exists()


def records(total: int, **malformed: int) -> list[TaskRecord]:
    first = TaskRecord(counts={"records": total - 1}, malformed=malformed)
    return [first, TaskRecord(counts={"records": 1})]


def test_malformed_records_above_the_bound_are_refused_by_reason(out):
    raw.check_share(out, records(1000, bad=10), Reading())
    raw.check_share(out, records(1000, bad=1000), Reading(max_malformed_share=1))
    with pytest.raises(BadInput) as caught:
        raw.check_share(out, records(1000, worse=2, bad=9), Reading())
    for part in ("11 of 1,000", "1.1%", "9 bad, 2 worse", "max-malformed-share", "rejected"):
        assert part in str(caught.value)


def test_input_without_records_is_refused(out):
    with pytest.raises(BadInput, match="no records"):
        raw.check_share(out, [TaskRecord()], Reading(max_malformed_share=1))

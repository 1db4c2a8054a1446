from __future__ import annotations

import json
import re
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from jobs.sample_data import dump_generator
from jobs.sample_data.dump_generator import Options
from jobs.sample_data.dump_text import bodies, vocabulary
from pipeline.artifact import open_artifact
from pipeline.config import BadInput
from pipeline.corpora.raw import Reading, read_lines

COMMENTS = 15_000
FILES = 3

# Every field of the real dumps, and what else dumps of those years have; its JSON types.
TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(["archived", "score_hidden", "stickied"], (bool,)),
    **dict.fromkeys(["author", "body", "id", "link_id", "name", "parent_id"], (str,)),
    **dict.fromkeys(["permalink", "subreddit", "subreddit_id"], (str,)),
    **dict.fromkeys(["author_flair_css_class", "author_flair_text"], (str, type(None))),
    "distinguished": (str, type(None)),
    **dict.fromkeys(["controversiality", "created_utc", "downs", "gilded"], (int,)),
    **dict.fromkeys(["retrieved_on", "score", "ups"], (int,)),
    "edited": (bool, int, float),  # a float in the dumps of 2006
}


def write(folder: Path, **options: Any) -> list[Path]:
    """The files of a dump, written one after the other in this process."""
    dump = Options(**options)
    for month in range(dump.months):
        dump_generator.write_file(dump, str(folder), month)
    return sorted(folder.iterdir())


def comments_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for _, text in read_lines(str(file), Reading())]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[Path]:
    return write(tmp_path_factory.mktemp("dump"), comments=COMMENTS, files=FILES, seed=3)


@pytest.fixture(scope="module")
def months(files) -> list[list[dict[str, Any]]]:
    return [comments_of(file) for file in files]


@pytest.fixture(scope="module")
def comments(months) -> list[dict[str, Any]]:
    return [comment for month in months for comment in month]


# What is written


def test_the_files_hold_as_many_comments_as_asked_for(files, months, comments):
    assert [file.name for file in files] == [f"RC_2012-0{month}.zst" for month in (1, 2, 3)]
    assert len(comments) == COMMENTS
    assert all(abs(len(month) - COMMENTS / FILES) < 0.1 * COMMENTS / FILES for month in months)


def test_every_line_has_the_fields_of_a_dump_with_their_types(comments):
    for comment in comments:
        assert comment.keys() == TYPES.keys()
        for name, value in comment.items():
            assert type(value) in TYPES[name], (name, value)
    edited = {type(comment["edited"]) for comment in comments}
    assert edited == {bool, int}
    assert not any(comment["edited"] is True for comment in comments)


@pytest.mark.slow
@pytest.mark.shared
def test_every_field_of_the_real_dumps_is_there(shared):
    for month in ("2005-12.zst", "2006-03.bz2"):
        for comment in comments_of(shared / "data" / "reddit_dump" / f"RC_{month}"):
            assert comment.keys() <= TYPES.keys()
            assert all(type(value) in TYPES[name] for name, value in comment.items())


def test_comments_stand_in_the_order_of_time_in_the_month_of_their_file(months, comments):
    numbers = [int(comment["id"], 36) for comment in comments]
    assert numbers == sorted(set(numbers))
    times = [comment["created_utc"] for comment in comments]
    assert times == sorted(times)
    for month, of_month in enumerate(months, start=1):
        found = {datetime.fromtimestamp(c["created_utc"], UTC).timetuple()[:2] for c in of_month}
        assert found == {(2012, month)}


def test_a_parent_is_the_submission_or_an_earlier_comment_of_the_thread(months):
    seen: dict[str, str] = {}
    from_before = 0
    for of_month in months:
        earlier = set(seen)
        for comment in of_month:
            kind, _, parent = comment["parent_id"].partition("_")
            if kind == "t3":
                assert comment["parent_id"] == comment["link_id"]
            else:
                assert kind == "t1" and seen[parent] == comment["link_id"]
                from_before += parent in earlier
            seen[comment["id"]] = comment["link_id"]
    assert from_before > 10


def test_a_thread_is_in_one_subreddit_which_has_one_id(comments):
    subreddits = {(c["link_id"], c["subreddit"]) for c in comments}
    assert len(subreddits) == len({link for link, _ in subreddits})
    ids = {(c["subreddit"], c["subreddit_id"]) for c in comments}
    assert len(ids) == len({name for name, _ in ids}) == len({number for _, number in ids})


def test_three_threads_have_the_share_asked_for_and_run_through_all_files(tmp_path):
    written = write(tmp_path, comments=12_000, files=3, largest_thread_share=0.1)
    months = [[comment["link_id"] for comment in comments_of(file)] for file in written]
    sizes = Counter(link for links in months for link in links).most_common(3)
    assert [size for _, size in sizes] == [1_200] * 3
    assert all({link for link, _ in sizes} <= set(links) for links in months)


def test_most_threads_are_small_and_a_few_are_large(comments):
    sizes = np.array([*Counter(comment["link_id"] for comment in comments).values()])
    assert np.median(sizes) <= 3
    assert 6 < np.mean(sizes) < 14
    assert sizes.max() > 300


def test_some_threads_are_deep_and_most_are_not(comments):
    depth: dict[str, int] = {}
    for comment in comments:
        kind, _, parent = comment["parent_id"].partition("_")
        depth[comment["id"]] = 1 + (depth[parent] if kind == "t1" else 0)
    found = np.array([*depth.values()])
    assert np.median(found) <= 3
    assert found.max() >= 20


def test_bodies_are_as_long_as_those_of_the_real_world():
    texts = bodies(np.random.default_rng(0), 30_000).texts.to_pylist()
    lengths = [len(json.loads(f'"{text}"')) for text in texts]
    written = np.array([n for n in lengths if n != 9])  # not "[deleted]" or "[removed]"
    assert 80 < np.median(written) < 105
    assert 150 < np.mean(written) < 190
    assert 3_000 < written.max() <= 10_000


def test_one_body_in_15_is_deleted_or_removed_and_bots_are_among_the_authors(comments):
    gone = [c for c in comments if c["body"] in ("[deleted]", "[removed]")]
    assert 0.05 < len(gone) / COMMENTS < 0.08
    assert {c["author"] for c in gone if c["body"] == "[deleted]"} == {"[deleted]"}
    by_bots = [c["body"] for c in comments if c["author"] == "AutoModerator"]
    assert 0.003 < len(by_bots) / COMMENTS < 0.012
    assert all("I am a bot" in body for body in by_bots)


def test_bodies_hold_what_parsers_and_filters_stumble_over(comments):
    bodies_of_dump = [comment["body"] for comment in comments]
    for pattern in (
        r"\n\n", "^&gt; ", '"', r"\\", "[\U0001f300-\U0001faff]", "[à-ü]", "[一-鿿]", r"\bu/\w{3,}",
        r"\w@example\.org", r"\]\(http://", "\t",
    ):  # fmt: skip
        assert 5 < sum(bool(re.search(pattern, body)) for body in bodies_of_dump) < COMMENTS / 2, (
            pattern
        )


def test_text_that_is_not_ascii_is_written_in_both_ways(files):
    lines = b"".join(synthetic_bytes(file) for file in files).split(b"\n")
    raw = [line for line in lines if not line.isascii()]
    escaped = [line for line in lines if re.search(rb"\\u[0-9a-f]{4}", line)]
    assert 0.5 < len(raw) / len(escaped) < 2
    assert not set(raw) & set(escaped)


def synthetic_bytes(file: Path) -> bytes:
    return (
        zstandard.ZstdDecompressor(max_window_size=2**31)
        .decompressobj()
        .decompress(file.read_bytes())
    )


def test_words_are_distinct_and_fall_off_as_in_a_language(comments):
    assert len(vocabulary()) == 20_000
    assert len(set(vocabulary())) > 19_900  # among the odd ones a few come twice
    words = Counter(w for c in comments for w in re.findall(r"[a-z']+", c["body"].lower()))
    counts = np.array([count for _, count in words.most_common(5_000)])
    slope = np.polyfit(np.log(np.arange(10, 5_000)), np.log(counts[10:]), 1)[0]
    assert -1.3 < slope < -0.8


# The files


def test_frames_ask_for_the_window_of_the_public_dumps(files):
    for file in files:
        header = zstandard.get_frame_parameters(file.read_bytes()[:18])
        assert header.window_size == 2**31
        assert header.has_checksum
        with pytest.raises(zstandard.ZstdError, match="memory"):
            zstandard.ZstdDecompressor().decompressobj().decompress(file.read_bytes())


def test_a_window_that_every_reader_allows_may_be_asked_for(tmp_path):
    (file,) = write(tmp_path, comments=500, window_log=21)
    assert zstandard.get_frame_parameters(file.read_bytes()[:18]).window_size == 2**21
    lines = zstandard.ZstdDecompressor().decompressobj().decompress(file.read_bytes())
    assert lines.count(b"\n") == 500


def test_a_dump_is_compressed_about_as_well_as_the_public_ones(files):
    """The real month of July 2006 at this level: 4.1 times."""
    raw = sum(len(synthetic_bytes(file)) for file in files)
    assert 4 < raw / sum(file.stat().st_size for file in files) < 8
    assert 580 < raw / COMMENTS < 800


def test_the_same_options_give_the_same_bytes_and_another_seed_others(files, tmp_path):
    again = write(tmp_path / "again", comments=COMMENTS, files=FILES, seed=3)
    assert [file.read_bytes() for file in again] == [file.read_bytes() for file in files]
    dump_generator.write_file(
        Options(comments=COMMENTS, files=FILES, seed=4), str(tmp_path / "other"), 0
    )
    (other,) = (tmp_path / "other").iterdir()
    assert other.read_bytes() != files[0].read_bytes()


@pytest.mark.parametrize(("comments", "files"), [(1, 1), (200, 2), (1_201, 12)])
def test_small_dumps_have_every_comment_too(tmp_path, comments, files):
    written = write(tmp_path, comments=comments, files=files)
    assert len(written) == files
    found = [comment["id"] for file in written for comment in comments_of(file)]
    assert len(set(found)) == len(found) == comments


def test_by_default_a_file_has_two_million_comments():
    assert Options(comments=1).months == 1
    assert Options(comments=2_000_000).months == 1
    assert Options(comments=2_000_001).months == 2
    assert Options(comments=30_000_000).months == 15
    assert dump_generator.file_name(14) == "RC_2013-03.zst"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"comments": 0}, "comments"),
        ({"comments": 500, "files": 6}, "files"),
        ({"comments": 60_000_000, "files": 2}, "files"),
        ({"comments": 500, "seed": -1}, "seed"),
        ({"comments": 500, "largest_thread_share": 0.3}, "largest_thread_share"),
        ({"comments": 500, "window_log": 32}, "window_log"),
    ],
)
def test_an_option_outside_its_range_is_refused(options, field):
    with pytest.raises(BadInput, match=rf"^{field}: .* allowed: "):
        Options(**options)


# The job


def test_a_dump_of_the_job_becomes_a_corpus(run_job_here, tmp_path):
    dump = ("--comments", 3_000, "--files", 2, "--seed", 1, "--output", tmp_path / "dump")
    summary = run_job_here("generate_dump", *dump).summary
    assert summary["counts"] == {"comments": 3_000, "files": 2, "files.written": 2}
    first = {file.name: file.read_bytes() for file in (tmp_path / "dump").glob("RC_*")}

    corpus = run_job_here(
        "prepare_corpus", "--corpus", "reddit", "--input", tmp_path / "dump",
        "--output", tmp_path / "corpus"
    ).summary  # fmt: skip
    assert corpus["counts"]["records"] == 3_000
    assert corpus["counts"]["examples"] > 300
    assert corpus["counts"]["examples"] + sum(corpus["dropped"].values()) == 3_000
    assert open_artifact(str(tmp_path / "corpus"), "corpus").counts["files"] == 2

    (tmp_path / "dump" / "RC_2012-02.zst").unlink()  # as if it had been killed
    assert run_job_here("generate_dump", *dump).summary["counts"]["files.written"] == 1
    assert {file.name: file.read_bytes() for file in (tmp_path / "dump").glob("RC_*")} == first
    assert run_job_here("generate_dump", *dump).summary["already_done"]


def test_a_folder_with_anything_else_is_left_alone(run_job_here, tmp_path):
    assert "files.written" in run_job_here(
        "generate_dump", "--comments", 200, "--output", tmp_path / "dump"
    ).summary["counts"]  # fmt: skip
    other = run_job_here("generate_dump", "--comments", 300, "--output", tmp_path / "dump")
    assert "holds another generated dump ({'comments': 200, " in other.refusal
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "RC_2012-01.zst").write_bytes(b"mine")
    mine = run_job_here("generate_dump", "--comments", 200, "--output", tmp_path / "mine")
    assert "of no generated dump" in mine.refusal
    assert (tmp_path / "mine" / "RC_2012-01.zst").read_bytes() == b"mine"

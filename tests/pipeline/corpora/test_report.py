from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import storage
from pipeline.artifact import Artifact
from pipeline.corpora.report import page, survey, text
from pipeline.corpora.schema import schema_with
from pipeline.engine.draft import Draft, draft

SCRIPT = "<script>alert('x')</script> & \"quoted\""
Row = dict[str, Any]


@dataclass(frozen=True)
class NoConfig:
    """Of a job that there is not."""


def published(
    folder: Path,
    rows: Sequence[Row],
    rows_per_file: int = 1000,
    dropped: dict[str, int] | None = None,
    rejected: Sequence[Row] = (),
) -> Artifact:
    """A corpus of hand-made rows, 3 in a row group; what a row lacks is made up."""
    out = draft(str(folder), "corpus", NoConfig(), {})
    assert isinstance(out, Draft)
    schema = schema_with(
        ("subreddit", pa.string()), ("context_author", pa.string()), ("score", pa.int32())
    )
    made = [
        {"example_id": f"e{number}", "group_id": f"g{number}", "context": ["what was said"],
         "response": "what was answered", "source": "test", "split": "train",
         "subreddit": "here", "context_author": "an author's name", "score": 1, **row}
        for number, row in enumerate(rows)
    ]  # fmt: skip
    files = []
    for split in ("train", "valid", "test"):
        of_split = [row for row in made if row["split"] == split]
        for start in range(0, len(of_split), rows_per_file):
            table = pa.Table.from_pylist(of_split[start : start + rows_per_file], schema=schema)
            files.append(out.write_table(f"{split}/{start:05}.parquet", table, rows_per_group=3))
    lines = "".join(json.dumps(sample) + "\n" for sample in rejected)
    storage.write_bytes(out.path("rejected", "file-00000.jsonl"), lines.encode())
    counts = {"examples": len(made), "records": len(made) + sum((dropped or {}).values())}
    return out.publish(files, counts, dropped)


@pytest.fixture
def publish(tmp_path: Path) -> Callable[..., Artifact]:
    return functools.partial(published, tmp_path / "corpus")


def look(
    corpus: Artifact, sample_rows: int = 0, examples: int = 2, seed: int = 0
) -> survey.CorpusSurvey:
    return survey.survey_corpus(corpus, sample_rows, examples, seed)


TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)


# Numbers


def test_lengths_are_those_of_the_texts_as_a_model_sees_them(publish):
    rows = [
        {"context": ["one two", "drei", "vier  fünf\tsechs"], "response": "日本語 😂"},
        {"context": ["a"], "response": ""},
        {"context": ["", "b\nc"], "response": "  d  "},
    ]
    lengths = look(publish(rows)).lengths
    joined = ["\n".join(row["context"]) for row in rows]
    responses = [row["response"] for row in rows]
    assert lengths["context characters"].tolist() == [len(text) for text in joined]
    assert lengths["context words"].tolist() == [len(text.split()) for text in joined]
    assert lengths["turns per context"].tolist() == [3, 1, 2]
    assert lengths["response characters"].tolist() == [len(text) for text in responses] == [5, 0, 5]
    assert lengths["response words"].tolist() == [2, 0, 1]


@given(st.lists(st.integers(0, 5_000), min_size=1), st.integers(1, 60))
def test_a_histogram_counts_what_numpy_counts(values, bins):
    counts, edges = survey.histogram(np.array(values), bins)
    assert len(counts) == len(edges) - 1 <= bins
    assert edges[0] == 0 and len(set(np.diff(edges))) == 1
    expected = np.histogram(np.minimum(values, edges[-1] - 1), edges)[0]
    assert counts.tolist() == expected.tolist()
    assert sum(value >= edges[-1] for value in values) <= 0.01 * len(values)


def test_statistics_are_those_of_numpy():
    values = np.arange(1, 2001)
    assert dict(zip(text.STATISTICS, text.statistics(values), strict=True)) == {
        "min": "1", "median": "1,000", "mean": "1,000", "90 %": "1,800", "99 %": "1,980",
        "max": "2,000",
    }  # fmt: skip


def test_repeats_are_rows_whose_text_was_there_before(publish):
    rows = [
        {"context": ["x"], "response": "same"},
        {"context": ["y"], "response": "same"},
        {"context": ["x"], "response": "same"},
        {"context": ["x"], "response": "other"},
        {"context": ["same"], "response": "x"},
    ]
    repeats = look(publish(rows)).repeats
    assert repeats["responses"] == (5, 2)
    assert repeats["responses"].share == 0.4
    assert repeats["(context, response) pairs"] == (5, 1)


def test_the_most_frequent_responses_and_values_come_with_their_numbers(publish):
    said = ["b", "a", "b", "once", "a", "b", "z", "z"]
    rows = [
        {"response": response, "subreddit": None if response == "once" else response.upper()}
        for response in said
    ]
    found = look(publish(rows, rows_per_file=3))
    assert found.top_responses == [("b", 3), ("a", 2), ("z", 2)]
    assert found.top_values == {"subreddit": [("B", 3), ("A", 2), ("Z", 2), ("", 1)]}


@pytest.mark.slow
@settings(max_examples=6)
@given(
    st.lists(st.tuples(TEXTS, TEXTS, st.sampled_from("abc")), min_size=1, max_size=30),
    st.integers(1, 8),
)
def test_a_whole_corpus_in_small_files_counts_as_plain_python_counts(
    tmp_path_factory, pairs, rows_per_file
):
    corpus = published(
        tmp_path_factory.mktemp("whole") / "corpus",
        [{"context": [a], "response": b, "group_id": group} for a, b, group in pairs],
        rows_per_file=rows_per_file,
    )
    found = look(corpus, examples=1)
    responses = Counter(b for _, b, _ in pairs)
    assert found.repeats["responses"] == (len(pairs), len(pairs) - len(responses))
    assert found.repeats["(context, response) pairs"].repeated == len(pairs) - len(
        {(a, b) for a, b, _ in pairs}
    )
    frequent = [number for _, number in responses.most_common(15) if number > 1]
    assert [number for _, number in found.top_responses] == frequent
    assert all(responses[response] == number for response, number in found.top_responses)
    assert found.lengths["response characters"].tolist() == [len(b) for _, b, _ in pairs]
    groups = Counter(group for _, _, group in pairs)
    assert rows_per_file < len(pairs) or (
        sorted(found.lengths["examples per group"]) == sorted(groups.values())
    )
    assert sum(found.lengths["examples per group"]) == len(pairs)


# The sample


@given(st.lists(st.integers(1, 9_000), min_size=1, max_size=20), st.integers(0, 60_000))
def test_a_sample_is_of_distinct_rows_that_exist_and_no_more_than_asked_for(file_rows, wanted):
    blocks = survey.sample_blocks(file_rows, wanted)
    sampled = sum(block.rows for block in blocks)
    if wanted == 0 or wanted >= sum(file_rows):
        assert sampled == sum(file_rows)
    else:
        assert 0 < sampled <= wanted
    assert blocks == sorted(blocks)
    for block in blocks:
        assert 0 <= block.start < block.start + block.rows <= file_rows[block.file]
    for block, following in itertools.pairwise(blocks):
        assert block.file < following.file or block.start + block.rows <= following.start


@pytest.mark.parametrize("file_rows", [[250_000] * 40, [100] * 500 + [2_000_000]])
def test_a_sample_is_of_the_size_asked_for_and_spread_over_all_files(file_rows):
    blocks = survey.sample_blocks(file_rows, 100_000)
    rows = sum(block.rows for block in blocks)
    assert 80_000 < rows <= 100_000
    ends = np.cumsum(file_rows)
    places = [ends[block.file] - file_rows[block.file] + block.start for block in blocks]
    gaps = np.diff([0, *places, ends[-1]]) / ends[-1]
    assert gaps.max() < 3 / 48


def test_blocks_are_read_row_for_row_wherever_row_groups_end(publish, monkeypatch):
    monkeypatch.setattr(survey, "_BLOCK_ROWS", 4)
    rows = [{"response": "x" * number} for number in range(30)]
    corpus = publish(rows, rows_per_file=11)
    assert look(corpus).lengths["response characters"].tolist() == [*range(30)]
    some = look(corpus, sample_rows=9)
    assert some.sampled == len(some.lengths["response characters"]) <= 9
    assert len(set(some.lengths["response characters"])) == some.sampled
    assert some.rows == {"train": 30}
    assert "9 rows" in text.basis(some) and text.basis(look(corpus)) == "all rows"


def test_examples_are_drawn_from_their_split_and_by_the_seed(publish):
    rows = [
        {"split": split, "response": f"{split} {n}"}
        for split in ("test", "train")
        for n in range(50)
    ]
    corpus = publish(rows, rows_per_file=7)
    found = look(corpus, examples=5).examples
    assert [*found] == ["train", "test"]
    for split, examples in found.items():
        said = [row["response"] for row in examples]
        assert len(set(said)) == 5 and all(response.startswith(split) for response in said)
    assert look(corpus, examples=5).examples == found
    assert look(corpus, examples=5, seed=1).examples != found
    assert {row["response"] for row in look(corpus, examples=999).examples["test"]} == {
        f"test {n}" for n in range(50)
    }
    assert look(corpus, examples=0).examples == {"train": [], "test": []}


# What was left out


def test_every_reason_of_a_real_job_is_shown_with_a_few_samples(reddit_corpus):
    found = look(reddit_corpus)
    assert found.dropped == reddit_corpus.manifest["dropped"]
    assert found.rejected.keys() == found.dropped.keys()
    assert all(1 <= len(samples) <= 3 for samples in found.rejected.values())
    assert all(s["reason"] == reason for reason, of in found.rejected.items() for s in of)
    shown = "\n".join(text.lines(found))
    for reason, number in found.dropped.items():
        assert f"{number:,}" in shown and reason in shown


def test_rejected_samples_may_hold_line_ends_of_unicode(publish):
    sample = {"reason": "odd", "file": "x", "line": 1, "text": "one\u2028two\u0085three"}
    corpus = publish([{}], dropped={"odd": 1})
    written = Path(corpus.uri) / "rejected" / "x.jsonl"
    written.parent.mkdir(exist_ok=True)
    written.write_text(json.dumps(sample, ensure_ascii=False) + "\n")
    assert look(corpus).rejected == {"odd": [sample]}


# The page


class Page(HTMLParser):
    """What a browser sees: the tags, their attributes, the text; and that every tag is closed."""

    def __init__(self, page_text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page_text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs
        if tag not in ("meta", "link"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_texts_of_a_corpus_are_text_in_the_page_never_markup(publish):
    rejected = [
        {"reason": SCRIPT, "file": "<b>dump", "line": 7, "text": SCRIPT},
        {
            "reason": "copy",
            "file": "x",
            "example_id": "late",
            "same_as": "early",
            "text": "y" * 9_000,
        },
    ]
    row = {"context": [SCRIPT, "</bdi></div>"], "response": SCRIPT, "subreddit": SCRIPT,
           "example_id": SCRIPT, "candidates": [SCRIPT, "other"], "label": 0}  # fmt: skip
    rows = [row, {**row, "split": "test"}, row]
    html = page.page(look(publish(rows, dropped={SCRIPT: 2, "copy": 1}, rejected=rejected)))
    found = Page(html)
    assert "<script" not in html and "alert('x')" not in html
    assert not set(found.tags) & {"script", "img", "a", "iframe", "link", "object", "form"}
    assert not [name for name, _ in found.attributes if name.startswith("on") or name == "src"]
    # 2 examples of train and 1 of test: context, response, id; the top response, the top
    # subreddit; the reason twice and a sample's text.
    assert found.text.count(SCRIPT) == 3 * 3 + 2 + 3
    assert "<b>dump:7" in found.text
    assert "late, as early" in found.text  # the example that a dropped one repeats
    assert "y" * 3_000 + "…" in html and "y" * 3_001 not in html


def test_the_page_is_whole_and_loads_nothing(reddit_corpus):
    found = Page(page.page(look(reddit_corpus, examples=1)))
    assert found.tags["svg"] == 1
    links = [value for name, value in found.attributes if name.endswith("href")]
    assert links and all(value.startswith("#") for value in links)
    policy = dict(found.attributes)["content"]
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in found.attributes, policy
    for name in ("context characters", "examples per group", "subreddit", "Left out of"):
        assert name in found.text
    example = look(reddit_corpus, examples=1).examples["train"][0]
    assert example["response"] in found.text and example["context"][-1] in found.text


@given(st.text(st.characters(codec="utf-8")), st.integers(1, 50))
def test_what_is_printed_is_one_line_without_control_codes(value, most):
    shown = text.printable(value, most)
    assert shown.isprintable() or shown == ""
    assert len(shown) <= most


def test_a_corpus_cannot_move_the_cursor_of_who_looks_at_it(publish):
    context, response, subreddit = ["\x1b[2J\x07\r"], "\x9b31m\u202e red", "\x1b]0;title"
    row = {"context": context, "response": response, "subreddit": subreddit}
    lines = [*text.lines(look(publish([row, row])))]
    assert all(line.isprintable() for line in lines)

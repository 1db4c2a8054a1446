from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.corpora import fixed_candidates
from pipeline.corpora.privacy import Privacy
from pipeline.engine.draft import Draft, draft
from pipeline.pools.embed import EmbedConfig

PLAIN = Privacy(redact=False, authors="plain", salt="")


@dataclass(frozen=True)
class Config:
    output: str = ""


@pytest.fixture
def out(tmp_path: Path, actors_in_process: list[str]) -> Draft:
    """A draft whose tasks run in this process."""

    found = draft(str(tmp_path / "out"), "corpus", Config(), {})
    assert isinstance(found, Draft)
    return found


def write(out: Draft, name: str, rows: list[tuple[str, str]]) -> str:
    ids, texts = zip(*rows, strict=True) if rows else ((), ())
    columns = {"group_id": pa.array(ids, pa.string()), "response": pa.array(texts, pa.string())}
    out.write_table(name, pa.table(columns))
    return name


def choose_others(out: Draft, files: list[str], wanted: int, privacy: Privacy = PLAIN, **more: Any):
    (record,) = fixed_candidates.choose_others(
        out, fixed_candidates.articles_of_shards(files), wanted, privacy, **more
    )
    rows = [
        row for entry in record.files for row in pq.read_table(out.path(entry["path"])).to_pylist()
    ]
    return rows, record


def smallest(ids: set[str], wanted: int) -> list[str]:
    """What the choice should be, by sorting everything."""
    return sorted(ids, key=lambda n: hashlib.blake2b(n.encode(), digest_size=8).digest())[:wanted]


ARTICLES = [(str(n), f"text of {n}") for n in range(500)]


def test_the_others_are_the_articles_with_the_smallest_hashes(out):
    files = [write(out, f"train/{n}.parquet", ARTICLES[n::3]) for n in range(3)]
    rows, record = choose_others(out, files, 40)
    assert [row["id"] for row in rows] == smallest({name for name, _ in ARTICLES}, 40)
    assert all(row["text"] == f"text of {row['id']}" for row in rows)
    assert record.counts == {"others": 40}
    (entry,) = record.files
    assert (entry["path"], entry["rows"]) == ("others/part-00000.parquet", 40)
    assert choose_others(out, files[::-1], 40)[0] == rows


@given(
    st.lists(st.integers(0, 60).map(str), max_size=80),
    st.sets(st.integers(0, 60).map(str), max_size=20),
    st.integers(1, 70),
)
def test_each_article_is_chosen_once_and_none_that_is_held_out(ids, held, wanted):
    """Against a choice that sorts everything; the heap holds no more than what is wanted."""
    rows = [(name, f"{name} at {place}") for place, name in enumerate(ids)]
    with pytest.MonkeyPatch.context() as patch:
        files = {"train": rows, "held": [(name, "") for name in held]}
        patch.setattr(
            fixed_candidates, "_rows", lambda _, names, *columns: (
                row[: len(columns)] for name in names for row in files[name]
            )
        )  # fmt: skip
        written: list[pa.Table] = []
        fake = type(
            "Fake", (), {"write_table": lambda self, name, table: written.append(table) or {}}
        )
        patch.setattr(fixed_candidates, "run_tasks", lambda d, tasks, work, *_: [work(d, "t", 0)])
        (record,) = fixed_candidates.choose_others(
            fake(), fixed_candidates.articles_of_shards(["train"]), wanted, PLAIN, ["held"]
        )
    found = written[0].to_pylist() if written else []
    expected = smallest(set(ids) - held, wanted)
    assert [row["id"] for row in found] == expected
    assert [row["text"] for row in found] == [f"{n} at {ids.index(n)}" for n in expected]
    missing = wanted - len(expected)
    assert record.counts == {
        "others": len(expected),
        **({"others.missing": missing} if missing else {}),
    }


def test_where_there_are_too_few_the_counts_say_so(out):
    file = write(out, "train/0.parquet", ARTICLES[:7])
    rows, record = choose_others(out, [file], 10_000)
    assert len(rows) == 7
    assert record.counts == {"others": 7, "others.missing": 9993}


def test_of_no_article_all_are_missing(out):
    rows, record = choose_others(out, [], 10)
    assert (rows, record.files, record.counts) == (
        [],
        [],
        {"others": 0, "others.missing": 10},
    )


def test_held_out_articles_are_replaced_by_the_next(out):
    train = write(out, "train/0.parquet", ARTICLES)
    first = smallest({name for name, _ in ARTICLES}, 3)
    held = write(out, "test/0.parquet", [(name, "") for name in first])
    rows, _ = choose_others(out, [train], 10, held_out=[held])
    assert [row["id"] for row in rows] == smallest({name for name, _ in ARTICLES}, 13)[3:]


def test_texts_are_redacted(out):
    file = write(out, "train/0.parquet", [("1", "Write to a@example.org now.")])
    privacy = Privacy(redact=True, authors="hash", salt="")
    assert choose_others(out, [file], 1, privacy)[0][0]["text"] == "Write to <email> now."


def test_the_columns_are_those_that_pools_read_by_default():
    assert fixed_candidates.SCHEMA.names == [EmbedConfig().id_column, EmbedConfig().text_column]

from __future__ import annotations

import hashlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.corpora import fixed_candidates
from pipeline.corpora.privacy import Privacy
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord
from pipeline.pools.settings import EmbedConfig

pytestmark = pytest.mark.usefixtures("actors_in_process")  # tasks run in this process
PLAIN = Privacy(redact=False, authors="plain", salt="")


def write(out: Draft, name: str, rows: list[tuple[str, str]]) -> TaskRecord:
    ids, texts = zip(*rows, strict=True) if rows else ((), ())
    columns = {"group_id": pa.array(ids, pa.string()), "response": pa.array(texts, pa.string())}
    return TaskRecord(files=[out.write_table(name, pa.table(columns))])


def choose_others(out: Draft, examples: list[TaskRecord], wanted: int, privacy: Privacy = PLAIN):
    (record,) = fixed_candidates.choose_others(out, examples, wanted, privacy)
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


def test_each_article_is_chosen_once_and_none_that_is_held_out(out):
    held_out = smallest({name for name, _ in ARTICLES}, 3)
    again = [(name, "the same article again") for name, _ in ARTICLES]
    files = [write(out, f"train/{n}.parquet", rows) for n, rows in enumerate((ARTICLES, again))]
    held = write(out, "test/0.parquet", [(name, "") for name in held_out])
    rows, record = choose_others(out, [*files, held], 600)
    expected = smallest({name for name, _ in ARTICLES}, 500)[3:]
    assert [(row["id"], row["text"]) for row in rows] == [(n, f"text of {n}") for n in expected]
    assert record.counts == {"others": 497, "others.missing": 103}


def test_of_no_article_all_are_missing(out):
    rows, record = choose_others(out, [], 10)
    assert (rows, record.files) == ([], [])
    assert record.counts == {"others": 0, "others.missing": 10}


def test_texts_are_redacted(out):
    file = write(out, "train/0.parquet", [("1", "Write to a@example.org now.")])
    privacy = Privacy(redact=True, authors="hash", salt="")
    assert choose_others(out, [file], 1, privacy)[0][0]["text"] == "Write to <email> now."


def test_the_columns_are_those_that_pools_read_by_default():
    assert fixed_candidates.SCHEMA.names == [EmbedConfig().id_column, EmbedConfig().text_column]

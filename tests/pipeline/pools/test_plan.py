"""What a pool will hold, beside rows taken one by one and sets that remember them."""

from __future__ import annotations

import io
import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import storage
from pipeline.corpora.raw import Reading
from pipeline.engine import executors
from pipeline.engine.draft import Draft, draft
from pipeline.engine.records import from_json, to_json
from pipeline.pools import candidates, plan
from pipeline.pools.candidates import content_hash
from pipeline.pools.changes import Changes
from pipeline.pools.plan import NEW, Plan, PlanInput, TextQuery
from pipeline.pools.settings import EmbedConfig
from pipeline.pools.shard import ROWS

from .conftest import PRIVACY, stage_rows, write_version_before

ORIGINAL = content_hash
Rows = list[tuple[str, ...]]
"""(id, text, values to filter by)"""

few = st.tuples(st.sampled_from("123456"), st.sampled_from("abcdef"))
rows_lists = st.lists(few, min_size=1, max_size=14)


def before(folder: Path, rows: Rows, columns: tuple[str, ...] = ()) -> list[tuple[str, int]]:
    """The files of a version's rows, which have distinct ids and contents; two shards."""
    kept = one_by_one(rows)[0]
    if not kept:
        return []
    schema = pa.schema([*ROWS, *(pa.field(name, pa.string()) for name in columns)])
    records = [
        {
            "id": i,
            "text": t,
            "content_hash": content_hash(t, v),
            **dict(zip(columns, v, strict=True)),
        }
        for i, t, *v in kept
    ]
    shards = [pa.Table.from_pylist(part, schema=schema) for part in (records[:2], records[2:])]
    return write_version_before(folder, shards)


def one_by_one(rows: Rows) -> tuple[Rows, dict[str, int]]:
    """What is kept, and why the rest is dropped."""
    ids, contents, kept = set(), set(), []
    dropped = {"the same text again": 0, "the same id again": 0}
    for name, *content in rows:
        if tuple(content) in contents:
            dropped["the same text again"] += 1
        elif name in ids:
            dropped["the same id again"] += 1
        else:
            contents.add(tuple(content))
            kept.append((name, *content))
        ids.add(name)
    return kept, {reason: count for reason, count in dropped.items() if count}


class Maker:
    """Plans rows that come in parts of three."""

    def __init__(self, folder: Path) -> None:
        self._folders = (folder / str(number) for number in itertools.count())

    def new_folder(self) -> Path:
        folder = next(self._folders)
        folder.mkdir()
        return folder

    def stage(
        self, rows: Rows, columns: tuple[str, ...] = ()
    ) -> tuple[Draft, list[tuple[str, int]]]:
        return stage_rows(next(self._folders), rows, columns)

    def __call__(
        self,
        rows: Rows,
        previous: Rows = (),
        rows_per_shard=1000,
        texts=0,
        hashes=(),
        columns=(),
        **input,
    ) -> tuple[Plan, Rows, list[int]]:
        """(the plan, the rows of all its shards, their verdicts)"""
        out, parts = self.stage(rows, columns)
        sources = PlanInput(parts, before(Path(out.uri).parent, previous, columns), **input)
        with executors.in_this_process():
            made = plan.make(out, sources, rows_per_shard, TextQuery(texts, hashes))
        made = from_json(Plan, to_json(made))  # as a record keeps it
        kept, places = [], []
        for slices in made.shards.values():
            for part, start, end in slices:
                verdict = plan.read_verdicts(out, made.name, part)[0][start:end]
                table = candidates.read_rows(out, part).slice(start, end - start)
                table = table.filter(verdict >= NEW).drop_columns(["content_hash"])
                kept += zip(*(column.to_pylist() for column in table.columns), strict=True)
                places += verdict[verdict >= NEW].tolist()
        self.out = out
        return made, kept, places


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setattr(candidates, "_PART_ROWS", 3)
    patch.setattr(os, "fsync", lambda file: None)  # a plan has a hundred small files
    yield Maker(tmp_path_factory.mktemp("plans"))
    patch.undo()


@pytest.mark.slow
@settings(max_examples=20)  # each plans a pool, in 50 to 150 ms
@given(
    rows_lists,
    rows_lists,
    st.integers(1, 6),
    st.integers(1, 5),
    st.lists(st.sampled_from("abcdefgh")),
)
def test_a_plan_is_that_of_rows_that_come_one_by_one(make, rows, old, size, count, wanted):
    hashes = [content_hash(text)[:16] for text in wanted]
    made, kept, places_before = make(rows, old, rows_per_shard=size, texts=count, hashes=hashes)
    expected, dropped = one_by_one(rows)
    assert kept == expected
    assert (made.dropped, made.rows) == (dropped, len(expected))
    # Changes are those of ids, and known texts have their places.
    was = one_by_one(old)[0]
    texts_before, texts_now = dict(was), dict(kept)
    assert made.changes == Changes(
        new=sum(name not in texts_before for name in texts_now),
        changed=sum(texts_before.get(name, text) != text for name, text in kept),
        same=sum(row in was for row in kept),
        gone=sum(name not in texts_now for name in texts_before),
    )
    assert made.changes.none == (sorted(kept) == sorted(was))
    places = {text: place for place, (_, text) in enumerate(was)}
    assert places_before == [places.get(text, NEW) for _, text in kept]
    assert made.known == sum(place >= 0 for place in places_before)
    # Shards are full but for the last one.
    shards = [kept[start : start + size] for start in range(0, len(kept), size)]
    assert list(made.shards) == [f"part-{n:05d}" for n in range(len(shards))]
    for slices, shard in zip(made.shards.values(), shards, strict=True):
        found = [plan.read_verdicts(make.out, made.name, part)[0][a:b] for part, a, b in slices]
        assert int((np.concatenate(found) >= NEW).sum()) == len(shard)
    # Texts are chosen by their hashes, and looked for by them.
    texts = sorted((text for _, text in kept), key=content_hash)
    assert made.first == tuple(texts[:count])
    assert list(made.present) == [
        key for key, text in zip(hashes, wanted, strict=True) if text in texts
    ]


valued = st.tuples(st.sampled_from("123456"), st.sampled_from("abc"), st.sampled_from("xyz"))
valued_lists = st.lists(valued, min_size=1, max_size=14)


@pytest.mark.slow
@settings(max_examples=10)  # each plans a pool, in 50 to 150 ms
@given(valued_lists, valued_lists, st.booleans())
def test_values_part_candidates_and_changes_and_never_vectors(make, rows, old, same_columns):
    made, kept, places_before = make(
        rows, old, texts=9, columns=("kind",), same_columns=same_columns
    )
    was = one_by_one(old)[0]
    assert kept == one_by_one(rows)[0]
    places = {text: place for place, (_, text, _) in reversed(list(enumerate(was)))}
    assert places_before == [places.get(text, NEW) for _, text, _ in kept]
    compared = slice(1, 3 if same_columns else 2)
    before_by_id, now_by_id = ({row[0]: row[compared] for row in some} for some in (was, kept))
    ids = before_by_id.keys() & now_by_id.keys()
    same = sum(before_by_id[name] == now_by_id[name] for name in ids)
    assert (made.changes.same, made.changes.changed) == (same, len(ids) - same)
    assert list(made.first) == sorted({text for _, text, _ in kept}, key=content_hash)


def test_a_small_pool_is_cut_in_sixteen_or_by_512_rows(make, monkeypatch):
    monkeypatch.setattr(candidates, "_PART_ROWS", 1000)
    rows = [(str(n), f"text {n}") for n in range(1600)]
    assert len(make(rows[:512], rows_per_shard=10_000)[0].shards) == 1
    assert len(make(rows[:513], rows_per_shard=10_000)[0].shards) == 2
    monkeypatch.setattr(plan, "_LEAST_ROWS", 10)
    assert len(make(rows, rows_per_shard=10_000)[0].shards) == 16


def test_long_texts_make_shards_of_fewer_rows(make, monkeypatch):
    monkeypatch.setattr(plan, "_SHARD_BYTES", 100)
    rows = [(str(n), f"{n} " + "x" * size) for n, size in enumerate([10, 10, 90, 500, 40, 70, 1])]
    made, kept, _ = make(rows)
    assert kept == rows
    counts = [sum(end - start for _, start, end in slices) for slices in made.shards.values()]
    assert counts == [3, 1, 2, 1]


def test_known_contexts_count_in_the_bytes_of_a_shard(tmp_path):
    """Else 16,384 answers with 128 kB of questions each were a shard of over 2 GiB, which Arrow refuses."""
    out = draft(str(tmp_path / "out"), "pool", EmbedConfig(), {})
    rows = [{"text": "yes", "question": "is it?"}, {"text": "no", "question": "was it so?"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = EmbedConfig(id_column="", context_column="question")
    pieces = [(str(tmp_path / "rows.jsonl"), None)]
    record = candidates._stage_pieces(out, "file-00000", pieces, config, Reading(), PRIVACY)
    sizes = candidates.read_keys(out, record.parts[0][0])[:, candidates.KEYS.index("size")]
    assert sizes.tolist() == [len('yes[["is it?"]]'), len('no[["was it so?"]]')]


@pytest.mark.slow
def test_a_few_of_what_is_dropped_are_named(make):
    make([("1", "a"), ("1", "b"), *((str(n), "a") for n in range(50))])
    lines = Path(make.out.path("rejected", "plan.jsonl")).read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert [sample["reason"] for sample in samples].count("the same text again") == 20
    again = [sample["text"] for sample in samples if sample["reason"] == "the same id again"]
    assert again == ["id '1': 'b'"]


def test_texts_that_share_half_of_their_hash_are_told_apart_by_who_copies(make, monkeypatch):
    """64 bits decide on places; `embedder` compares all 128."""

    def alike(text: str, values: object = ()) -> str:
        return 16 * "7" + ORIGINAL(text)[16:]

    monkeypatch.setattr(candidates, "content_hash", alike)
    monkeypatch.setitem(globals(), "content_hash", alike)
    _, _, places = make([("1", "a")], [("1", "b")])
    assert places == [0]


def test_a_plan_of_nothing_but_changes_of_ids_embeds_nothing(make):
    made, _, places = make([("9", "b"), ("8", "a")], [("1", "a"), ("2", "b")])
    assert made.changes == Changes(new=2, changed=0, same=0, gone=2)
    assert places == [1, 0]
    assert replace(made.changes, new=0, gone=0).none


def test_of_the_version_before_ids_and_hashes_are_read_and_no_texts(tmp_path, monkeypatch):
    records = [
        {"id": f"{n}", "text": "long " * 200, "content_hash": content_hash(f"{n}")}
        for n in range(500)
    ]
    data = candidates.arrow_file(pa.Table.from_pylist(records, schema=ROWS)).to_pybytes()
    read = []

    class Counted(io.BytesIO):
        def read(self, size=-1):
            found = super().read(size)
            read.append(len(found))
            return found

    monkeypatch.setattr(storage, "open_input", lambda uri: pa.PythonFile(Counted(data), "r"))
    texts, contents, ids = candidates.read_published_keys("somewhere.arrow").T
    assert texts.tolist() == contents.tolist()
    assert texts.tolist() == [int(row["content_hash"][:16], 16) for row in records]
    assert ids.tolist() == [candidates.id_key(row["id"]) for row in records]
    assert sum(read) < len(data) / 10


def test_keys_of_texts_are_those_of_a_pool_without_columns_to_filter_by(tmp_path):
    texts = ["a", "a", "é"]
    plain = [{"id": t, "text": t, "content_hash": content_hash(t)} for t in texts]
    valued = [
        {"id": t, "text": t, "content_hash": content_hash(t, [str(n)]), "kind": str(n)}
        for n, t in enumerate(texts)
    ]
    schema = ROWS.append(pa.field("kind", pa.string()))
    tables = (pa.Table.from_pylist(plain, ROWS), pa.Table.from_pylist(valued, schema))
    files = write_version_before(tmp_path, tables)
    keys, keys_with_values = (candidates.read_published_keys(file) for file, _ in files)
    assert keys.shape == keys_with_values.shape == (3, 3)
    assert keys[:, ::2].tolist() == keys_with_values[:, ::2].tolist()  # of texts and ids
    assert len(set(keys_with_values[:, candidates.KEYS.index("content")].tolist())) == 3


ROWS_OF_TWO_ROUNDS = [("1", "a"), ("1", "b"), ("2", "b"), ("3", "c"), ("4", "a"), ("5", "d")]
BEFORE = [("2", "b"), ("3", "x"), ("9", "d")]


@pytest.mark.slow
@settings(max_examples=10)
@given(rows_lists, rows_lists)
def test_two_published_versions_are_compared_by_their_ids(make, rows, old):
    now, was = dict(one_by_one(rows)[0]), dict(one_by_one(old)[0])
    out, _ = make.stage(rows)
    folder = Path(out.uri).parent
    (folder / "old").mkdir()
    files, files_before = before(folder, rows), before(folder / "old", old)
    with executors.in_this_process():
        found = plan.compare(out, files, files_before)
    assert found == Changes(
        new=len(now.keys() - was.keys()),
        changed=sum(was.get(name, text) != text for name, text in now.items()),
        same=len(now.items() & was.items()),
        gone=len(was.keys() - now.keys()),
    )


def test_a_small_pool_is_planned_in_the_process_of_the_driver(make, monkeypatch):
    """Ray Data takes longer for one task than a small plan does."""

    def on_cluster(*_: object) -> None:
        raise AssertionError("a task went to the cluster")

    monkeypatch.setattr("pipeline.engine.run.run_on_cluster", on_cluster)
    out, parts = make.stage(ROWS_OF_TWO_ROUNDS)
    sources = PlanInput(parts, before(Path(out.uri).parent, BEFORE))
    assert plan.make(out, sources, 10, TextQuery()).rows == 4
    assert plan.is_small(sources.candidates, sources.before)


@pytest.mark.long  # 8 s on two slow cores; test_run.py has tasks of a cluster
def test_a_cluster_decides_as_this_process_does(make, local_ray, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "_SMALL_ROWS", 0)
    out, parts = make.stage(ROWS_OF_TWO_ROUNDS)
    sources = PlanInput(parts, before(Path(out.uri).parent, BEFORE))
    on_cluster = plan.make(out, sources, 10, TextQuery(3))
    expected, kept, places = make(ROWS_OF_TWO_ROUNDS, BEFORE, rows_per_shard=10, texts=3)
    on_cluster_read = from_json(Plan, to_json(on_cluster))
    assert on_cluster_read == replace(expected, name=on_cluster.name)  # of files elsewhere
    assert kept == [("1", "a"), ("2", "b"), ("3", "c"), ("5", "d")]
    found = [plan.read_verdicts(out, on_cluster.name, part)[0] for part, _ in parts]
    assert [place for place in np.concatenate(found).tolist() if place >= NEW] == places


def test_places_in_the_version_to_copy_from_stand_beside_the_verdicts(make):
    """Where that is not the version before."""
    out, parts = make.stage([(name, name) for name in "abcd"])
    files = [before(make.new_folder(), [(name, name) for name in names]) for names in ("ab", "xcb")]
    with executors.in_this_process():
        made = plan.make(out, PlanInput(parts, *files), 10, TextQuery())
    columns = zip(*(plan.read_verdicts(out, made.name, part) for part, _ in parts), strict=True)
    verdict, places = (np.concatenate(column).tolist() for column in columns)
    assert (verdict, places) == ([0, 1, NEW, NEW], [NEW, 2, 1, NEW])
    assert (made.known, made.salvaged) == (2, 2)


def test_a_plan_is_made_anew_where_the_version_before_has_changed(make, monkeypatch):
    """The marks of a plan that was killed are those of other rows before."""
    out, parts = make.stage([("1", "a"), ("2", "b")])
    folder = Path(out.uri).parent
    with executors.in_this_process() as here:
        plan.make(out, PlanInput(parts, before(folder, [("1", "a")])), 10, TextQuery())
        done = len(here.tasks)
        plan.make(out, PlanInput(parts, before(folder, [("1", "a")])), 10, TextQuery())
        assert len(here.tasks) == done  # as in a job that goes on
        (folder / "newer").mkdir()
        newer = PlanInput(parts, before(folder / "newer", [("2", "b")]))
        made = plan.make(out, newer, 10, TextQuery())
        assert made.first == ()
        asked = plan.make(out, newer, 10, TextQuery(1, [content_hash("a")[:16]]))
    assert made.known == asked.known == 1
    assert (len(asked.first), len(asked.present)) == (1, 1)
    assert plan.read_verdicts(out, made.name, parts[0][0])[0].tolist() == [NEW, 0]

"""Candidate texts to the rows and vectors of a pool. Actors run in this process."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipeline.artifact import Artifact
from pipeline.config import BadInput, Stopped
from pipeline.corpora.file_tasks import ParseReport
from pipeline.corpora.privacy import Privacy
from pipeline.corpora.raw import Reading
from pipeline.engine.actors import Actors
from pipeline.engine.draft import draft
from pipeline.engine.records import sum_counts
from pipeline.models import inference
from pipeline.models.precision import resolve_precision, use_bf16
from pipeline.models.ranker import load_ranker
from pipeline.models.sources import External
from pipeline.pools import build, candidates, embed, inputs
from pipeline.pools.gate import GateConfig
from pipeline.pools.pool import Pool
from pipeline.pools.settings import EmbedConfig

PRECISION = resolve_precision("auto", torch.device("cpu"))
RECORDS = [{"id": n, "text": f"text {n}"} for n in range(7)]


@pytest.fixture
def model(tiny_ranker) -> Path:
    return tiny_ranker("poly").local()


@pytest.fixture
def make(actors_in_process, model, tmp_path):
    """Embeds files, named in the order of their rows, and opens the pool that comes out."""

    def run(
        *files: Path,
        name: str = "v",
        model: Path = model,
        gate: GateConfig = GateConfig(),  # noqa: B008
        reading: Reading = Reading(),  # noqa: B008
        redact: bool = True,
        **config,
    ) -> Pool:
        settings = EmbedConfig(**config)
        privacy = Privacy(redact=redact, authors="hash", salt="")
        out = draft(str(tmp_path / "pools" / "p" / name), "pool", settings, {})
        if isinstance(out, Artifact):
            return Pool.open(out.uri)
        names = [str(file) for file in files]
        prepared = embed.prepare(
            out, names, settings, gate, reading, None, None, PRECISION, privacy
        )
        ranker = External(str(model), "")
        records = embed.embed(out, prepared, ranker, settings, gate, reading, Actors())
        records = [prepared, *records]
        counts = sum_counts(record.counts for record in records)
        dropped = sum_counts(record.dropped for record in records)
        entries = [entry for record in records[1:] for entry in record.files]
        checks = [asdict(record.check) for record in records[1:]]
        shards = zip(prepared.plan.shards, records[1:], strict=True)
        good = [name for name, record in shards if record.files]
        more, statistics = build.index(out, good, 16)
        facts = {
            "dimensions": 16,
            "precision": PRECISION,
            "dtype": settings.dtype,
            "statistics": statistics,
        }
        out.publish([*entries, *more], counts, dropped, checks=checks, **facts)
        return Pool.open(out.uri)

    return run


def parquet(path: Path, rows: list[dict]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    return path


def json_lines(path: Path, rows: list[dict]) -> Path:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


WRITERS = {"rows.parquet": parquet, "rows.jsonl.gz": json_lines}


def shards_made(tasks: list[str]) -> list[str]:
    return [task for task in tasks if task.startswith("part-")]


def rows_of(pool: Pool) -> list[tuple[str, str]]:
    return [tuple(pool.row(place)) for place in range(len(pool))]


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_rows_in_their_order(make, tmp_path, name):
    records = [*RECORDS, {"id": "é/1", "text": " A\r\nb\u2028c\t🙂 "}]
    pool = make(WRITERS[name](tmp_path / name, [{**row, "id": str(row["id"])} for row in records]))
    assert rows_of(pool) == [(str(row["id"]), row["text"]) for row in records]
    assert pool.artifact.counts == {"records": 8, "candidates": 8, "shards": 1}
    assert pool.artifact.manifest["dropped"] == {}


def test_shards_hold_rows_per_shard_and_the_vectors_of_their_rows(make, model, tmp_path):
    texts = [f"{'long ' * (n % 5)}text {n}" for n in range(7)]
    file = json_lines(tmp_path / "a.jsonl", [{"id": n, "text": t} for n, t in enumerate(texts)])
    pool = make(file, rows_per_shard=3, batch_tokens=40)
    assert [len(shard) for shard in pool.shards] == [3, 3, 1]
    assert [table.num_rows for table in pool.rows] == [3, 3, 1]
    assert pool.artifact.counts["shards"] == 3
    ranker = load_ranker(model)
    one_by_one = [inference.candidate_vectors(ranker, [text])[0].numpy() for text in texts]
    # Where the hardware multiplies in bf16, a batch's padding moves its last bits.
    exact = not use_bf16(torch.device("cpu"))
    tolerance = 1e-5 if exact else 0.03
    np.testing.assert_allclose(pool.vectors_at(np.arange(7)), one_by_one, atol=tolerance, rtol=0)
    apart = np.abs(np.diff(one_by_one, axis=0)).max(axis=1)
    assert apart.min() > 3 * tolerance  # a row in another's place would be noticed


def test_several_files_are_one_pool(make, tmp_path):
    first = json_lines(tmp_path / "b.jsonl", RECORDS[:3])
    pool = make(first, parquet(tmp_path / "a.parquet", RECORDS[2:]), rows_per_shard=4)
    assert [name for name, _ in rows_of(pool)] == [str(n) for n in range(7)]
    assert pool.artifact.manifest["dropped"] == {"the same text again": 1}


def test_other_columns_may_be_named(make, tmp_path):
    rows = [{"example_id": "e1", "response": "yes", "text": 5, "more": [1]}]
    pool = make(parquet(tmp_path / "a.parquet", rows), id_column="example_id",
                text_column="response")  # fmt: skip
    assert rows_of(pool) == [("e1", "yes")]


def test_without_an_id_column_the_texts_hash_is_the_id(make, tmp_path):
    pool = make(json_lines(tmp_path / "a.jsonl", [{"text": "é"}, {"text": "b"}]), id_column="")
    wanted = [hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for text in ("é", "b")]
    assert [name for name, _ in rows_of(pool)] == wanted
    assert [row["content_hash"] for row in pool.rows[0].to_pylist()] == wanted


BAD_RECORDS = [
    ({"id": "x", "text": "text 1"}, "the same text again"),
    ({"id": 1, "text": "other"}, "the same id again"),
    ({"id": "1", "text": "another"}, "the same id again"),  # 1 and "1" are the same id
    ({"id": "x", "text": ""}, "text is empty"),
    ({"id": "x", "text": " \n\t\u3000"}, "text is empty"),
    ({"id": "x", "text": None}, "text is empty"),
    ({"id": "x", "text": ["a"]}, "embed.text_column text: list; allowed: text, numbers, dates"),
    (
        {"id": "x", "text": "cut off \ud83d"},
        "embed.text_column text: broken text; allowed: text, numbers, dates",
    ),
    ({"id": None, "text": "other"}, "embed.id_column id: empty; allowed: text, numbers, dates"),
    ({"id": "", "text": "other"}, "embed.id_column id: empty; allowed: text, numbers, dates"),
    ({"id": [1], "text": "other"}, "embed.id_column id: list; allowed: text, numbers, dates"),
    (
        {"id": "\ud83d", "text": "other"},
        "embed.id_column id: broken text; allowed: text, numbers, dates",
    ),
]


def test_what_cannot_be_a_candidate_is_counted_once_by_reason(make, tmp_path):
    rows = [*RECORDS, *(row for row, _ in BAD_RECORDS), {"id": "y", "text": "good"}]
    tolerant = Reading(max_malformed_share=0.5)
    pool = make(json_lines(tmp_path / "a.jsonl", rows), repeated_ids="first", reading=tolerant)
    assert rows_of(pool) == [*((str(row["id"]), row["text"]) for row in RECORDS), ("y", "good")]
    reasons = [reason for _, reason in BAD_RECORDS]
    assert pool.artifact.manifest["dropped"] == {name: reasons.count(name) for name in reasons}
    assert pool.artifact.counts["records"] == len(rows)


def test_an_id_of_several_texts_is_refused(make, tmp_path):
    same = [*RECORDS, {"id": 3, "text": "text 3"}, {"id": 8, "text": "text 3"}]
    assert len(make(json_lines(tmp_path / "a.jsonl", same))) == 7  # the same row again is no fault
    # The first row of an id counts, also where another id has its text already.
    for name in (3, 8):
        file = json_lines(tmp_path / "b.jsonl", [*same, {"id": str(name), "text": "other"}])
        with pytest.raises(BadInput) as refused:
            make(file, name=f"w{name}")
        assert (
            f"embed.id_column id: '{name}' is the id of several rows with different texts or filter columns"
            in str(refused.value)
        )
        assert "--embed.repeated-ids first" in str(refused.value)


def test_texts_are_redacted_before_they_are_compared_and_hashed(make, tmp_path):
    rows = [
        {"id": 1, "text": "call 1-555-123-4567", "place": "a@b.io"},
        {"id": 2, "text": "call 555-765-4321", "place": "a@b.io"},
        {"id": 3, "text": "mail a@b.io", "place": "x"},
        {"id": 4, "text": "", "place": "mail c@d.io"},
        {"id": 5, "text": "plain", "place": "x"},
    ]
    file = json_lines(tmp_path / "a.jsonl", rows)
    pool = make(file, filter_columns=("place",))
    assert rows_of(pool) == [("1", "call <phone>"), ("3", "mail <email>"), ("5", "plain")]
    assert pool.rows[0]["place"][0].as_py() == "a@b.io"  # filters need what they compare with
    assert pool.rows[0]["content_hash"][1].as_py() == candidates.content_hash("mail <email>", ["x"])
    assert pool.artifact.counts["texts.redacted"] == 3
    rejected = "".join(path.read_text() for path in Path(pool.artifact.uri, "rejected").iterdir())
    assert "555" not in rejected and "<phone>" in rejected
    plain = make(file, name="plain", redact=False)
    assert [text for _, text in rows_of(plain)][:2] == ["call 1-555-123-4567", "call 555-765-4321"]
    assert "texts.redacted" not in plain.artifact.counts


def test_a_parquet_file_of_many_row_groups_is_read_by_several_tasks(make, tmp_path, monkeypatch):
    rows = [{"id": n, "text": f"text {n}"} for n in range(20)]
    rows[13]["text"] = None
    file = parquet(tmp_path / "a.parquet", rows)  # 3 rows in a group
    monkeypatch.setattr(candidates, "_LEAST_TASK_ROWS", 5)
    pool = make(file)
    assert rows_of(pool) == [(str(r["id"]), r["text"]) for r in rows if r["text"]]
    assert pool.artifact.counts["records"] == 20
    (rejected,) = Path(pool.artifact.uri, "rejected").iterdir()
    assert rejected.name == "file-00000-0002.jsonl"
    assert json.loads(rejected.read_text())["line"] == 14
    monkeypatch.setattr(candidates, "_LEAST_TASK_ROWS", 1000)
    assert make(file, name="whole").artifact.manifest["files"] == pool.artifact.manifest["files"]


def test_a_truncated_file_of_candidates_is_noted(actors_in_process, tmp_path):
    file = tmp_path / "a.jsonl.gz"
    lines = "".join(json.dumps({"id": n, "text": f"text {n}"}) + "\n" for n in range(20))
    file.write_bytes(gzip.compress(lines.encode())[:-4])
    out = draft(str(tmp_path / "out"), "pool", EmbedConfig(), {})
    keep, plain = Reading(truncated="keep"), Privacy(redact=False, authors="hash", salt="")
    prepared = embed.prepare(
        out, [str(file)], EmbedConfig(), GateConfig(), keep, None, None, PRECISION, plain
    )
    (note,) = prepared.notes
    assert note.endswith("its 20 whole lines are used")


def test_a_readme_beside_the_candidates_is_none(tmp_path):
    for name in ("a.csv", "README.md"):
        (tmp_path / name).write_text("id,text\n1,a\n")
    assert inputs._candidate_files([str(tmp_path)]) == ([str(tmp_path / "a.csv")], [])
    assert inputs._candidate_files([str(tmp_path / "README.md")])[0] == [
        str(tmp_path / "README.md")
    ]


@pytest.mark.parametrize("use", ["id_column", "filter_columns"])
def test_columns_of_a_data_frame_keep_their_meaning(make, tmp_path, use):
    """pandas makes 2015.0 of integers with a gap, and timestamps of dates."""
    values = {
        "year": (pd.Series([2015, 2016, None]), ["2015", "2016"]),
        "rating": (pd.Series([4.5, 4.0, None]), ["4.5", "4"]),
        "day": (pd.to_datetime(pd.Series(["2015-03-01", "2016-01-31", None])), ["2015-03-01", "2016-01-31"]),
        "made": (pd.to_datetime(pd.Series(["2015-03-01 12:30", None, None])), ["2015-03-01T12:30:00", None]),
        "nano": (pd.Series(pd.to_datetime([1, None, None])), ["1970-01-01T00:00:00.000000001", None]),
        "price": (pd.Series([Decimal("19.90"), Decimal("200.00"), None]), ["19.9", "200"]),
        "sold": (pd.Series([True, False, None], dtype="boolean"), ["true", "false"]),
    }  # fmt: skip
    frame = pd.DataFrame({name: series for name, (series, _) in values.items()})
    table = pa.Table.from_pandas(frame).append_column(
        "key", pa.array([UUID(int=1).bytes, UUID(int=2).bytes, None], pa.uuid())
    )
    texts = {name: [*written, None][:3] for name, (_, written) in values.items()}
    texts["key"] = [str(UUID(int=1)), str(UUID(int=2)), None]
    file = tmp_path / "a.parquet"
    pq.write_table(table.append_column("text", pa.array(["a", "b", "c"])), file)
    if use == "filter_columns":
        pool = make(file, id_column="", filter_columns=tuple(texts))
        assert pool.rows[0].select(list(texts)).to_pydict() == texts
        return
    tolerant = Reading(max_malformed_share=0.7)
    for column in ("year", "price", "key"):
        ids = texts[column]
        pool = make(file, id_column=column, name=column, reading=tolerant)
        assert [row_id for row_id, _ in rows_of(pool)] == [each for each in ids if each]
        reason = f"embed.id_column {column}: empty; allowed: text, numbers, dates"
        assert pool.artifact.manifest["dropped"] == {reason: ids.count(None)}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_numbers_are_texts_as_in_csv(make, tmp_path, kind):
    frame = pd.DataFrame({"id": list("abc"), "text": [1886, None, 0]})
    file = tmp_path / f"a.{kind}"
    if kind == "parquet":
        frame.to_parquet(file)
    else:
        frame.to_json(file, orient="records", lines=True)
    pool = make(file)
    assert rows_of(pool) == [("a", "1886"), ("c", "0")]
    assert candidates._turns({"q": 7.0}, "q") == ("7",)
    assert pool.artifact.manifest["dropped"] == {"text is empty": 1}


def test_values_of_csv_are_those_that_pandas_had(make, tmp_path):
    ids_and_texts = {"id": ["007", "7"], "text": ["a", "b"]}
    values = {"year": [2015, None], "sold": [True, False], "code": ["007.0", "1.10"]}
    frame = pd.DataFrame({**ids_and_texts, **values})
    frame.to_csv(tmp_path / "a.csv", index=False)
    pool = make(tmp_path / "a.csv", filter_columns=("year", "sold", "code"))
    assert rows_of(pool) == [("007", "a"), ("7", "b")]
    assert pool.rows[0].select(["year", "sold", "code"]).to_pydict() == {
        "year": ["2015", ""], "sold": ["true", "false"], "code": ["007.0", "1.10"],
    }  # fmt: skip


def test_short_floats_have_no_more_digits_than_their_writer_gave_them(make, tmp_path):
    table = pa.table({"id": [1], "text": ["a"], "share": pa.array([0.1], pa.float32())})
    pq.write_table(table, tmp_path / "a.parquet")
    pool = make(tmp_path / "a.parquet", filter_columns=("share",))
    assert pool.rows[0]["share"].to_pylist() == ["0.1"]


def test_a_column_of_lists_with_gaps_is_refused_by_its_name(make, tmp_path):
    """The rows with a gap alone would have been a pool of a third of the candidates."""
    rows = [{"id": n, "text": f"text {n}", "tags": ["x"] if n % 3 else None} for n in range(60)]
    with pytest.raises(BadInput, match=r"40 embed.filter_columns\[0\] tags: list; allowed: text"):
        make(parquet(tmp_path / "a.parquet", rows), filter_columns=("tags",))


def test_a_date_that_python_has_no_year_for_is_refused(make, tmp_path):
    days = pa.array([253402300800], pa.timestamp("s"))
    pq.write_table(pa.table({"id": [1], "text": ["a"], "day": days}), tmp_path / "a.parquet")
    with pytest.raises(BadInput, match=r"a.parquet: broken Parquet .*out of range"):
        make(tmp_path / "a.parquet", filter_columns=("day",))


def test_a_line_that_is_no_record_is_counted_and_set_aside(make, tmp_path):
    rows = [{"id": number, "text": f"text {number}"} for number in range(300)]
    file = json_lines(tmp_path / "a.jsonl", rows)
    file.write_bytes(file.read_bytes() + b'not JSON\n{"id": 300}\n')
    pool = make(file)
    assert len(pool) == 300
    assert pool.artifact.counts["records"] == 302
    dropped = pool.artifact.manifest["dropped"]
    assert dropped == {"no column text": 1, "not JSON": 1}
    (samples,) = Path(pool.artifact.uri, "rejected").iterdir()
    assert [json.loads(line)["line"] for line in samples.read_text().splitlines()] == [301, 302]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "a.csv",
            b"id,body\n1,a\n",
            "embed.text_column: 'text' is not allowed; allowed: the columns",
        ),
        ("a.jsonl", b'{"text": "a"}\n', "a.jsonl: text, or '': a hash of the text is the id"),
        ("a.jsonl", b'{"id": 1, "text": "a"}\nnot JSON\n', "1 of 2 records (50.0%) are malformed"),
        ("a.parquet", b"PAR1 but broken", "broken Parquet"),
        ("a.jsonl", b"", "no text to embed (no rows)"),
        ("a.jsonl", b'{"id": 1, "text": ""}\n', "no text to embed (1 text is empty)"),
    ],
)
def test_input_that_cannot_be_read_is_refused_naming_the_place(make, tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadInput) as refused:
        make(tmp_path / name)
    assert message in str(refused.value)
    assert message[:2] in ("no", "1 ") or str(tmp_path / name) in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_file_without_rows_among_others_is_noted(tmp_path):
    (tmp_path / "a.csv").write_text("id,text\n")
    report = ParseReport()
    rows = candidates._rows(str(tmp_path / "a.csv"), EmbedConfig(), Reading(), report, None)
    assert not list(rows)
    assert report.notes == [f"{tmp_path}/a.csv: holds no records"]


@pytest.mark.parametrize(
    "field",
    [{"rows_per_shard": 0}, {"batch_tokens": -1}, {"text_column": ""}, {"max_text_bytes": 0}],
)
def test_settings_out_of_range_are_refused(field):
    with pytest.raises(BadInput, match=rf"^embed\.{next(iter(field))}: "):
        EmbedConfig(**field)


def test_the_model_is_fetched_by_the_node_that_embeds(make, model, tmp_path, node, monkeypatch):
    run = embed.run_tasks_on_actors
    monkeypatch.setattr(embed, "run_tasks_on_actors", lambda *all: (node(), run(*all))[1])
    file = json_lines(tmp_path / "a.jsonl", RECORDS)
    vectors = make(file, name="there", model=f"local://{model}").vectors_at(np.arange(3))
    assert np.array_equal(vectors, make(file, name="here").vectors_at(np.arange(3)))


@pytest.mark.slow
def test_a_resumed_run_embeds_the_shards_that_are_missing_only(
    make, actors_in_process, model, tmp_path
):
    file = json_lines(tmp_path / "a.jsonl", RECORDS)
    whole = make(file, name="whole", rows_per_shard=2)
    assert shards_made(actors_in_process) == [f"part-0000{n}" for n in range(4)]
    out = draft(str(tmp_path / "pools" / "p" / "v"), "pool", EmbedConfig(rows_per_shard=2), {})
    settings = (EmbedConfig(rows_per_shard=2), GateConfig(), Reading())
    privacy = Privacy(redact=True, authors="hash", salt="")
    prepared = embed.prepare(out, [str(file)], *settings, None, None, PRECISION, privacy)
    actor = embed._embedder(model=External(str(model), ""), batch_tokens=0, source="", top_k=10, sample=8,
                            canaries=prepared.canaries, plan=prepared.plan.name,
                            gate_name=prepared.asked.name)  # fmt: skip
    for task in ("part-00000", "part-00002"):  # as a killed run leaves them
        out.mark(task, actor(out, task, prepared.plan.shards[task]))
    file.write_text("read no more")  # the plan is there

    actors_in_process.clear()
    resumed = make(file, rows_per_shard=2)
    assert shards_made(actors_in_process) == ["part-00001", "part-00003"]
    assert resumed.artifact.manifest["files"] == whole.artifact.manifest["files"]
    assert resumed.artifact.counts == whole.artifact.counts


def test_weights_that_are_not_numbers_embed_nothing(make, model, tmp_path):
    ranker = load_ranker(model)
    with torch.no_grad():
        next(ranker.dual.candidate_encoder.parameters()).fill_(torch.nan)
    ranker.save(tmp_path / "broken")
    file = json_lines(tmp_path / "a.jsonl", RECORDS)
    with pytest.raises(Stopped, match=r"FloatingPointError: part-00000: .* not finite"):
        make(file, model=tmp_path / "broken")
    assert not list((tmp_path / "pools").rglob("vectors"))
    assert not list((tmp_path / "pools").rglob("part-00000.json"))
    assert not (tmp_path / "pools" / "p" / "v").exists()


def test_a_cross_encoder_is_refused(make, tiny_ranker, tmp_path):
    with pytest.raises(BadInput, match="'cross' has no candidate vectors; allowed: bi, poly"):
        make(json_lines(tmp_path / "a.jsonl", RECORDS), model=tiny_ranker("cross").local())


@pytest.mark.slow
def test_vectors_are_computed_in_the_precision_of_the_plan(make, tmp_path, monkeypatch):
    """On whatever hardware the actors run."""
    file = json_lines(tmp_path / "a.jsonl", RECORDS)
    found = {}
    for precision in ("bf16", "fp32"):
        monkeypatch.setitem(globals(), "PRECISION", precision)
        found[precision] = make(file, name=precision).vectors_at(np.arange(7))
    assert not np.array_equal(found["bf16"], found["fp32"])
    np.testing.assert_allclose(found["bf16"], found["fp32"], rtol=0, atol=0.05)

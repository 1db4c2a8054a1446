from __future__ import annotations

import gzip
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import mlflow
import pyarrow.parquet as pq
import pytest
import zstandard

from jobs import prepare_corpus
from pipeline.artifact import open_artifact
from pipeline.corpora import schema
from pipeline.corpora.raw import Reading, read_lines
from tests.helpers import rejected, rows_of

PLAIN = ("--redact", "off", "--authors", "plain")
FIRST = {"id": "a", "link_id": "t3_t", "parent_id": "t3_t", "body": "what a day it was",
         "author": "Secret_Name", "subreddit": "u_Secret_Name", "score": 1}  # fmt: skip
PROFILE = (FIRST, {**FIRST, "id": "b", "parent_id": "t1_a", "body": "it was, and so is this one"})
"""A comment in somebody's profile, and a reply."""


@pytest.fixture(scope="session")
def dump(sample_files: Path) -> bytes:
    """The sample dump's first month, as JSON lines."""
    lines = read_lines(str(sample_files / "reddit_dump" / "RC_2011-01.zst"), Reading())
    return "".join(text + "\n" for _, text in lines).encode()


@pytest.fixture
def prepare(run_job_here, tmp_path: Path):
    """The job on files of the given contents, to `tmp_path / "out"`."""

    def run(files: dict[str, bytes], *options: object, corpus: str = "reddit"):
        (tmp_path / "in").mkdir(exist_ok=True)
        for name, data in files.items():
            (tmp_path / "in" / name).write_bytes(data)
        return run_job_here(
            "prepare_corpus", "--corpus", corpus, "--input", tmp_path / "in",
            "--output", tmp_path / "out", *options
        )  # fmt: skip

    return run


# What comes out


def test_input_that_changes_while_it_is_read_makes_no_corpus(prepare, tmp_path, monkeypatch):
    read = prepare_corpus.FORMATS["pairs"]

    def read_and_grow(*arguments):
        records = read(*arguments)
        with (tmp_path / "in" / "a.csv").open("a") as file:
            file.write("where is it,over there\n")
        return records

    files = {"a.csv": b"context,response\nhow are you,fine\n"}
    monkeypatch.setitem(prepare_corpus.FORMATS, "pairs", read_and_grow)
    done = prepare(files, corpus="pairs")
    changed = f"--input {tmp_path}/in/a.csv: has changed while it was read"
    assert (done.code, changed in done.stderr) == (1, True)
    assert not list(tmp_path.glob("out*"))
    monkeypatch.setitem(prepare_corpus.FORMATS, "pairs", read)
    assert prepare(files, corpus="pairs").summary["counts"]["examples"] == 1


@pytest.mark.parametrize("name", ["convai2_corpus", "reddit_corpus"])
def test_a_corpus_is_a_folder_per_split_of_shards_with_the_columns_of_the_contract(name, request):
    corpus = request.getfixturevalue(name)
    rows = rows_of(corpus)
    for file in corpus.files(suffix=".parquet"):
        found = pq.read_schema(file)
        assert found.names[: len(schema.EXAMPLE)] == schema.EXAMPLE.names
        assert found.field("context").type == schema.EXAMPLE.field("context").type
    assert len({row["example_id"] for row in rows}) == len(rows) == corpus.counts["examples"]
    groups = Counter(group for group, _ in {(row["group_id"], row["split"]) for row in rows})
    assert set(groups.values()) == {1}
    per_split = Counter(row["split"] for row in rows)
    assert per_split == {s: n for s in per_split if (n := corpus.counts[f"examples.{s}"])}


def test_every_record_is_an_example_or_counted_once(reddit_corpus, convai2_corpus):
    for corpus in (reddit_corpus, convai2_corpus):
        dropped = sum(corpus.manifest["dropped"].values())
        assert corpus.counts["records"] == corpus.counts["examples"] + dropped


def test_the_summary_and_the_run_say_what_the_manifest_says(prepare, dump, tmp_path):
    summary = prepare({"RC": dump}).summary
    corpus = open_artifact(str(tmp_path / "out"), "corpus")
    assert summary["job"] == "prepare_corpus"
    assert summary["output"] == corpus.uri
    assert summary["fingerprint"] == corpus.fingerprint
    assert summary["counts"] == corpus.counts
    assert summary["dropped"] == corpus.manifest["dropped"]
    run = mlflow.MlflowClient().get_run(corpus.manifest["run_id"])
    assert run.data.metrics["count.examples"] == corpus.counts["examples"]
    assert run.data.tags["output_fingerprint"] == corpus.fingerprint
    fingerprint = corpus.manifest["inputs"]["input"]["fingerprint"]
    assert run.data.tags["input.input.fingerprint"] == fingerprint


@pytest.mark.shared
@pytest.mark.parametrize(("month", "kind"), [("2006-01", "bz2"), ("2006-07", "zst")])
def test_real_dumps_give_the_published_code_s_examples(run_job_here, shared, tmp_path, month, kind):
    file = shared / "data" / "reddit_dump" / f"RC_{month}.{kind}"
    summary = run_job_here(
        "prepare_corpus", "--corpus", "reddit", "--input", file, "--output", tmp_path / "out",
        *PLAIN
    ).summary  # fmt: skip
    ours = Counter(
        (
            row["split"], row["group_id"], row["subreddit"], tuple(row["context"]),
            row["context_author"], row["response"], row["response_author"],
        )
        for row in rows_of(open_artifact(str(tmp_path / "out"), "corpus"))
    )  # fmt: skip
    with gzip.open(shared / "golden" / f"reddit_examples_RC_{month}.jsonl.gz", "rt") as stream:
        golden = [json.loads(line) for line in stream]
    theirs = Counter(
        (
            row["split"], row["thread_id"], row["subreddit"],
            (*(row[f"context/{n}"] for n in range(8, -1, -1) if f"context/{n}" in row),
             row["context"]),
            row["context_author"], row["response"], row["response_author"],
        )
        for row in golden
    )  # fmt: skip
    assert ours == theirs
    assert summary["counts"]["examples"] == {"2006-01": 150, "2006-07": 2664}[month]


# People


def test_no_name_or_address_is_in_a_corpus_unless_asked_for(reddit_corpus, dump):
    named = {json.loads(line)["author"] for line in dump.splitlines()} - {"[deleted]"}
    rows = rows_of(reddit_corpus)
    texts = [text for row in rows for text in (*row["context"], row["response"])]
    authors = {row[f"{who}_author"] for row in rows for who in ("context", "response")}
    assert not authors & named
    assert all(re.fullmatch(r"[0-9a-f]{16}|\[deleted\]", name) for name in authors)
    assert not any("@example.org" in text or re.search(r"\bu/\w", text) for text in texts)
    assert any("<email>" in text and "<user>" in text for text in texts)


def test_hashes_depend_on_the_salt_and_on_nothing_else(prepare, dump, tmp_path, monkeypatch):
    found = []
    for salt in ("one", "two"):
        monkeypatch.setenv("POLYRANK_AUTHOR_SALT", salt)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        prepare({"RC": dump})
        rows = rows_of(open_artifact(str(tmp_path / "out"), "corpus"))
        found.append({row["example_id"]: row["response_author"] for row in rows})
    assert set(found[0]) == set(found[1])
    assert not set(found[0].values()) & set(found[1].values())


@pytest.fixture
def stored(prepare, tmp_path):
    """`stored(data, …)`: the corpus, and what stands in the manifest, the run and an earlier draft that was
    refused."""

    def run(data: bytes, *options: object):
        refused = prepare({"RC": data + b"rubbish\n" * len(data.splitlines())}, *options)
        assert "malformed" in refused.refusal
        request = (tmp_path / "out.partial" / "_request.json").read_text()
        shutil.rmtree(tmp_path / "out.partial")
        assert not prepare({"RC": data}, *options).summary["already_done"]
        corpus = open_artifact(str(tmp_path / "out"), "corpus")
        params = mlflow.MlflowClient().get_run(corpus.manifest["run_id"]).data.params
        return corpus, [request, (tmp_path / "out" / "manifest.json").read_text(), str(params)]

    return run


def test_names_of_excluded_authors_are_hashed_wherever_stored(prepare, stored, dump):
    authors = Counter(json.loads(line)["author"] for line in dump.splitlines())
    (name, _) = next(row for row in authors.most_common() if row[0] != "[deleted]")
    options = ("--redact", "off", "--reddit.exclude-authors")
    corpus, texts = stored(dump, *options, name)
    assert corpus.manifest["dropped"]["response by an excluded author"]
    (key,) = corpus.manifest["config"]["reddit"]["exclude_authors"]
    assert re.fullmatch("[0-9a-f]{16}", key)
    assert all(key in text and name.lower() not in text.lower() for text in texts)
    again = prepare({"RC": dump}, *options, name.swapcase(), name)
    assert again.summary["already_done"] and again.summary["fingerprint"] == corpus.fingerprint
    other = prepare({"RC": dump}, *options, "somebody").refusal
    assert "another job" in other and name not in other and "somebody" not in other


@pytest.mark.parametrize("option", ["subreddits", "exclude_subreddits"])
def test_names_of_profiles_among_subreddits_are_hashed_wherever_stored(prepare, stored, option):
    others = [{**row, "link_id": "t3_o", "subreddit": "pics"} for row in PROFILE]
    data = "".join(json.dumps(row) + "\n" for row in (*PROFILE, *others)).encode()
    options = ("--redact", "off", f"--reddit.{option}")
    corpus, texts = stored(data, *options, "U_Secret_Name", "Other")
    key, other = corpus.manifest["config"]["reddit"][option]
    assert re.fullmatch("u_[0-9a-f]{16}", key) and other == "Other"
    assert all(key in text and "secret_name" not in text.lower() for text in texts)
    (row,) = rows_of(corpus)
    assert (row["subreddit"] == "pics") == (option == "exclude_subreddits")
    assert prepare({"RC": data}, *options, "u_secret_name", "Other").summary["already_done"]


def test_the_key_of_authors_is_random_and_its_owner_s(prepare, dump, tmp_path, monkeypatch):
    found = []
    for user in ("one", "one", "two"):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / user))
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        prepare({"RC": dump})
        rows = rows_of(open_artifact(str(tmp_path / "out"), "corpus"))
        found.append({row["response_author"] for row in rows})
        key = tmp_path / user / "polyrank" / "author_key"
        assert key.stat().st_mode & 0o777 == 0o600
        assert len(key.read_text()) == 64
    assert found[0] == found[1]
    assert not found[0] & found[2]


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_for_an_output_elsewhere_the_key_has_to_be_said(run_job_here, dump, tmp_path, more):
    (tmp_path / "RC").write_bytes(dump)
    refusal = run_job_here("prepare_corpus", "--corpus", "reddit", "--input", tmp_path / "RC",
                      "--output", "memory://bucket/out", *more).refusal  # fmt: skip
    assert "POLYRANK_AUTHOR_SALT is not set: authors of memory://bucket/out need" in refusal


def test_rejected_lines_and_profiles_name_no_author(prepare, tmp_path):
    first, reply = PROFILE
    rows = [first, reply, {**first, "body": None}]
    lines = [*map(json.dumps, rows), json.dumps(first)[:-40]]
    prepare({"RC": "\n".join(lines).encode()}, "--reading.max-malformed-share", "1")
    rows = rows_of(open_artifact(str(tmp_path / "out"), "corpus"))
    assert rows[0]["subreddit"] == f"u_{rows[0]['response_author']}"
    written = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert any(file.parent.name == "rejected" for file in written)
    assert not [file for file in written if b"Secret_Name" in file.read_bytes()]


# Bad input


@pytest.mark.parametrize("corpus", ["reddit", "convai2", "wikipedia"])
def test_a_file_without_records_is_refused(prepare, corpus):
    refusal = prepare({"RC": b"\n\n"}, corpus=corpus).refusal
    assert "empty" in refusal or "no records" in refusal


@pytest.mark.parametrize(("options", "parts"), [
    (["--reddit.max_characters", "0"], ["reddit.max_characters: 0", ">= 1"]),
    (["--redact", "maybe"], ["redact: 'maybe'", "bool, null"]),
])  # fmt: skip
def test_wrong_options_are_refused_before_any_work(prepare, dump, tmp_path, options, parts):
    refusal = prepare({"RC": dump}, *options).refusal
    assert [part for part in parts if part not in refusal] == []
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_line_that_is_no_comment_is_set_aside_and_the_job_goes_on(prepare, dump, tmp_path):
    lines, line = dump.splitlines(), b'{"id": "x", "body"'
    summary = prepare({"RC": b"\n".join([*lines[:500], line, *lines[500:]])}, *PLAIN).summary
    assert summary["dropped"]["not JSON"] == 1
    assert summary["counts"]["records"] == len(lines) + 1
    (sample,) = [s for s in rejected(tmp_path / "out" / "rejected") if s["line"]]
    assert (sample["reason"], sample["line"], sample["text"]) == ("not JSON", 501, line.decode())
    shutil.rmtree(tmp_path / "out")
    assert prepare({"RC": dump}, *PLAIN).summary["fingerprint"] == summary["fingerprint"]


def test_too_many_malformed_lines_stop_the_job_until_it_may_go_on(prepare, dump, tmp_path):
    lines = dump.splitlines()
    many = len(lines) // 50
    files = {"RC": b"\n".join([*lines, *[b"rubbish"] * many])}
    refusal = prepare(files).refusal
    for part in (f"{many:,} not JSON", f"of {len(lines) + many:,} records", "max-malformed-share"):
        assert part in refusal
    assert not (tmp_path / "out").exists()
    samples = rejected(tmp_path / "out.partial" / "rejected")
    assert {sample["text"] for sample in samples} == {"rubbish"}
    summary = prepare(files, "--reading.max-malformed-share", "0.1").summary
    assert summary["dropped"]["not JSON"] == many


def test_a_file_that_is_cut_off_is_refused_until_its_lines_are_kept(prepare, dump, tmp_path):
    whole = dump[: dump.index(b"\n", len(dump) // 3) + 1]
    half_a_line = dump[len(whole) : len(whole) + 20]
    stream = zstandard.ZstdCompressor().compressobj()
    data = stream.compress(whole + half_a_line) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    refusal = prepare({"train.zst": data}).refusal
    lines = whole.count(b"\n")
    assert f"cut off after {lines:,} whole lines; --reading.truncated keep" in refusal
    assert not (tmp_path / "out").exists()
    kept = prepare({"train.zst": data}, "--reading.truncated", "keep")
    assert kept.summary["counts"]["records"] == lines
    (note,) = open_artifact(str(tmp_path / "out"), "corpus").manifest["notes"]
    assert note.endswith(
        f"train.zst: the compressed stream is cut off; its {lines:,} whole lines are used"
    )
    assert note in kept.stderr


@pytest.mark.parametrize("corpus", ["convai2", "wikipedia"])
def test_files_of_another_format_are_refused(prepare, dump, corpus):
    assert "malformed" in prepare({"RC": dump}, corpus=corpus).refusal


@pytest.mark.parametrize("data", [b"", b"context,response\n"])
def test_a_table_without_rows_is_refused_and_leaves_nothing(prepare, tmp_path, data):
    for _ in range(2):
        refusal = prepare({"pairs.csv": data}, corpus="pairs").refusal
        assert refusal.endswith("pairs.csv: has no rows")
        assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_table_without_an_example_leaves_what_shows_why(prepare, tmp_path):
    refusal = prepare({"pairs.csv": b"context,response\nhi,\n"}, corpus="pairs").refusal
    rejected = tmp_path / "out.partial" / "rejected"
    assert refusal.endswith(f"1 records gave no example ({{'empty response': 1}}); see {rejected}")
    assert list(rejected.iterdir())


def test_foreign_and_empty_files_among_the_dumps_are_set_aside_and_named(prepare, dump):
    files = {"RC": dump, "README.md": b"# Dumps\nof 2011\n", "RC_empty": b"", "sums": bytes(range(256)),
             "RS": b'{"id": "x", "title": "A submission", "author": "a", "subreddit": "s"}\n'}  # fmt: skip
    done = prepare(files)
    counts = done.summary["counts"]
    assert (counts["files"], counts["files.set_aside"]) == (5, 4)
    assert counts["records"] == dump.count(b"\n")
    noted = {note.split(": ")[0].split("/")[-1] for note in done.summary["notes"]}
    assert noted == {"README.md", "RC_empty", "sums", "RS"}
    assert all(note in done.stderr for note in done.summary["notes"])


DIALOGUE = {"persona": ["i paint ."], "dialogue": [["how are you ?", "great , i am painting ."]]}


def test_a_document_beside_the_data_is_set_aside_and_noted(prepare):
    documents = {"README.md": b"# Files\nof 2011\n", "readme.txt": b"Files\n", "LICENSE": b"MIT\n",
                 "dataset_infos.json": b"{}"}  # fmt: skip
    files = {"train.json": json.dumps([DIALOGUE] * 200).encode(), **documents}
    summary = prepare(files, corpus="convai2").summary
    assert summary["counts"]["records"] == summary["counts"]["examples"] == 200
    noted = {note.split(": set aside")[0].split("/")[-1] for note in summary["notes"]}
    assert noted >= set(documents)


# Again


def test_the_same_command_again_finds_its_work_done(prepare, dump, tmp_path):
    first = prepare({"RC": dump}).summary
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    again = prepare({"RC": dump}).summary
    assert (first["already_done"], again["already_done"]) == (False, True)
    assert again["fingerprint"] == first["fingerprint"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


def test_another_command_does_not_write_over_a_corpus(prepare, dump):
    prepare({"RC": dump})
    assert "redact: True there, False here" in prepare({"RC": dump}, "--redact", "off").refusal
    assert "another job" in prepare({"RC": dump[: len(dump) // 2]}).refusal


PAIRS = b"context,response\n" + b"how are you,fine\n" * 3
HWU64 = {f"{part}/{name}": b"hi\n" for part in ("train", "valid") for name in ("seq.in", "label")}


@pytest.mark.parametrize(
    ("corpus", "files", "folder", "new_name"),
    [
        ("pairs", {"train/a.csv": PAIRS, "holdout/b.csv": PAIRS}, "in/holdout", "in/test"),
        ("pairs", {"x/a.csv": PAIRS, "y/b.csv": PAIRS}, "in/y", "in/z"),  # ids begin with folders
        ("hwu64", HWU64, "in/valid", "in/test"),
    ],
)
def test_a_folder_of_another_name_is_another_input_where_folders_decide_something(
    run_job_here, tmp_path, corpus, files, folder, new_name
):
    for name, data in files.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data)

    def prepare(folder: Path):
        options = ("--format", corpus, "--input", folder, "--output", tmp_path / "out")
        return run_job_here("prepare_corpus", *options)

    assert not prepare(tmp_path / "in").summary["already_done"]
    shutil.copytree(tmp_path / "in", tmp_path / "elsewhere")
    assert prepare(tmp_path / "elsewhere").summary["already_done"]
    (tmp_path / folder).rename(tmp_path / new_name)
    refusal = prepare(tmp_path / new_name.partition("/")[0]).refusal
    assert "holds the result of another job (--input has other contents than it had)" in refusal


@pytest.mark.parametrize(("options", "kept"), [((), True), (("--redact", "true"), False)])
def test_pairs_of_your_own_keep_their_addresses_unless_asked(prepare, options, kept):
    """A FAQ is asked for the very phone numbers that a public dump must not have."""
    rows = b"context,response\n" + b"how do i reach you ?,write to help@example.org\n" * 3
    done = prepare({"pairs.csv": rows}, *options, corpus="pairs")
    file, *_ = open_artifact(done.summary["output"], "corpus").files("", ".parquet")
    [text] = set(pq.read_table(file)["response"].to_pylist())
    assert text == f"write to {'help@example.org' if kept else '<email>'}"
    assert ("texts are kept as they are; --redact true" in done.stderr) == kept

"""`jobs.embed_pool`: versions, CURRENT, refusals, and what a kill leaves behind."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch

from pipeline.artifact import open_artifact
from pipeline.models import inference
from pipeline.models.ranker import load_ranker
from pipeline.pools import candidates
from pipeline.pools.pool import Pool
from serve.engine import Engine
from tests.jobs.nights import current, versions

ALL_MAY_CHANGE = ("--gate.max-removed-share", 1, "--gate.max-changed-share", 1)


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": n, "text": t}) + "\n" for n, t in enumerate(texts)))
    return path


@pytest.fixture
def texts(tmp_path) -> Path:
    return write(tmp_path / "texts.jsonl", [f"text {n}" for n in range(9)])


@pytest.fixture
def embed(run_job_here, tiny_ranker, tmp_path):
    """The job on a file, into pool "p" of `tmp_path / "pools"`."""

    def run(file: Path, *options: object, model: str = "", pools: str = ""):
        return run_job_here(
            "embed_pool", "--model", model or tiny_ranker("poly").uri, "--candidates", file,
            "--pools", pools or tmp_path / "pools", "--name", "p", *options
        )  # fmt: skip

    return run


def test_candidates_that_a_model_reads_not_to_their_end_are_counted(embed, texts, tiny_ranker):
    ranker = load_ranker(tiny_ranker("poly").local())
    most = ranker.config.max_candidate_tokens
    longest = " ".join("ab" * (2 * most))
    write(texts, ["a", " ".join("ab" * most), longest])
    tokens = len(ranker.tokenizer.ids([longest])[0]) + 2
    said = f"2 of 3 sampled candidates are longer than the {most} tokens that the model reads"
    assert f"pool p: {said} (the longest: {tokens})" in embed(texts).stdout
    write(texts, ["a", "b"])
    assert "are longer than" not in embed(texts, *ALL_MAY_CHANGE).stdout


def test_the_summary_the_run_and_the_pool_say_the_same(embed, texts, tiny_ranker, tmp_path):
    write(texts, ["a", "b", "a", ""])
    summary = embed(texts).summary
    pool = Pool.open(summary["pool"])
    assert summary["job"] == "embed_pool"
    assert summary["version"] == pool.version == current(tmp_path / "pools")
    assert summary["output"] == pool.artifact.uri == str(tmp_path / "pools" / "p" / pool.version)
    assert summary["current"] == str(tmp_path / "pools" / "p" / "CURRENT")
    assert summary["already_done"] is False
    assert summary["counts"] == {"records": 4, "candidates": 2, "shards": 1}
    assert summary["dropped"] == {"the same text again": 1, "text is empty": 1}
    assert [pool.row(place) for place in range(len(pool))] == [("0", "a"), ("1", "b")]
    pool.require_model(tiny_ranker("poly"))
    run = mlflow.MlflowClient().get_run(pool.artifact.manifest["run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["count.candidates"] == 2
    assert run.data.metrics["dropped.text is empty"] == 1
    assert run.data.tags["input.model.fingerprint"] == tiny_ranker("poly").fingerprint
    assert run.data.tags["output_fingerprint"] == summary["fingerprint"]


def test_the_same_texts_again_leave_nothing_to_do(embed, texts, actors_in_process, tmp_path):
    first = embed(texts).summary
    (tmp_path / "moved").mkdir()
    moved = texts.rename(tmp_path / "moved" / texts.name)
    actors_in_process.clear()
    again = embed(moved, pools=f"{tmp_path}/pools/").summary  # the same contents, elsewhere
    assert again == {**first, "already_done": True}
    assert actors_in_process == []
    assert versions(tmp_path / "pools") == [first["version"]]


def test_vectors_of_another_precision_are_not_copied(embed, texts, tmp_path, actors_in_process):
    """A pool is of one precision, as its manifest says."""
    for precision, more in (("fp32", "one"), ("bf16", "two"), ("bf16", "three")):
        lines = texts.read_text() + json.dumps({"id": more, "text": more}) + "\n"
        texts.write_text(lines)
        done = embed(texts, "--embed.precision", precision)
        pool = Pool.open(done.summary["pool"])
        assert pool.precision == pool.artifact.manifest["precision"] == precision
        rows = pool.artifact.manifest["embedded"]["rows"]
        assert rows == (1 if more == "three" else len(pool))
        assert ("computed in bf16, the version before in fp32" in done.stdout) == (more == "two")


def test_a_version_that_is_there_becomes_current_again(embed, texts, tmp_path):
    contents = texts.read_text()
    old = embed(texts).summary
    other = embed(write(texts, ["other"]), *ALL_MAY_CHANGE).summary
    texts.write_text(contents)
    refused = embed(texts)  # the gate looks at these two versions as at any
    assert refused.code == 1
    assert "1 of the 1 ids of " in refused.stderr and "have another text" in refused.stderr
    assert current(tmp_path / "pools") == other["version"]
    assert embed(texts, *ALL_MAY_CHANGE).summary["already_done"] is True
    assert current(tmp_path / "pools") == old["version"]


def test_a_table_without_a_text_is_read_by_its_only_column_with_a_usual_name(embed, tmp_path):
    table = tmp_path / "faq.csv"
    table.write_text("id,Question,Answer\n1,how ?,so\n2,when ?,now\n")
    done = embed(table)
    assert "texts are the column 'Answer'; --embed.text-column names another" in done.stderr
    made = done.summary
    assert {row.text for row in map(Pool.open(made["pool"]).row, range(2))} == {"so", "now"}
    assert embed(table, "--embed.text-column", "Answer").summary["version"] == made["version"]
    table.write_text("id,answer,reply\n1,so,no\n")
    assert "embed.text_column: 'text' is not allowed" in embed(table).refusal


# Refusals: exit code 2, one line, and nothing that looks like a pool


@pytest.mark.parametrize(("contents", "message"), [
    ("", "texts.jsonl: has no rows"),
    ('{"id": 1, "text": " "}\n', "no text to embed (1 text is empty)"),
    ('{"id": 1, "body": "a"}\n', "embed.text_column: 'text' is not allowed; allowed: the col"),
])  # fmt: skip
def test_texts_that_cannot_be_embedded_are_refused(embed, texts, tmp_path, contents, message):
    texts.write_text(contents)
    for _ in range(2):  # what the first run leaves does not change what the second says
        assert message in embed(texts).refusal
    assert not (tmp_path / "pools" / "p" / "CURRENT").exists()
    left = versions(tmp_path / "pools")
    assert not [name for name in left if not name.endswith(".partial")]
    if not contents:  # nothing that shows why
        assert left == []


@pytest.mark.parametrize(
    ("name", "fault"),
    [("1.jsonl", "has changed while it was read"), ("2.jsonl", "has come while the others were read")],
)  # fmt: skip
def test_an_export_that_is_still_being_written_makes_no_version(
    embed, texts, tmp_path, monkeypatch, name, fault
):
    """A file grows, or another one comes, after the job has named the export's contents."""
    export, stage = tmp_path / "export", candidates.stage
    export.mkdir()
    texts.rename(export / "1.jsonl")

    def stage_and_write(*arguments):
        with (export / name).open("a") as file:
            file.write('{"id": 9, "text": "text 9"}\n')
        return stage(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(candidates, "stage", stage_and_write)
        done = embed(export)
    assert done.code == 1
    assert f"--candidates {export / name}: {fault}" in done.stderr
    assert versions(tmp_path / "pools") == []
    assert embed(export).summary["counts"]["candidates"] == 10


def test_of_a_truncated_file_it_is_said_that_the_rest_is_missing(embed, tmp_path):
    file = tmp_path / "texts.jsonl.gz"
    lines = "".join(json.dumps({"id": n, "text": f"text {n}"}) + "\n" for n in range(9))
    file.write_bytes(gzip.compress(lines.encode(), compresslevel=0)[:-30])
    said = embed(file, "--reading.truncated", "keep", "--dry-run", "true").stdout
    assert f"pool p: {file}: the compressed stream is cut off; its 8 whole lines are used" in said


def test_redaction_is_part_of_what_a_version_is(embed, texts, tmp_path):
    write(texts, ["call 1-555-123-4567", "two"])
    plain = embed(texts).summary
    redacted = embed(texts, "--redact", "true").summary
    assert plain["version"] != redacted["version"] == current(tmp_path / "pools")
    assert "texts.redacted" not in plain["counts"]
    assert redacted["counts"]["texts.redacted"] == 1
    assert Pool.open(redacted["pool"]).row(0).text == "call <phone>"
    assert embed(texts, *ALL_MAY_CHANGE).summary["version"] == plain["version"]


@pytest.mark.parametrize(("options", "message"), [
    (("--gate.canaries", "nowhere.txt"), "gate.canaries: 'nowhere.txt' is not allowed"),
    (("--embed.id-column", "key"), "id, text, or '': a hash of the text is the id"),
    (("--embed.context-column", "q"), "needs one vector for each context; 'poly' has"),
    (("--model", "MODEL/cross"), "'cross' has no candidate vectors; allowed: bi, poly"),
    (("--model", "nowhere"), "folder); jobs.finetune, or jobs.convert_model of a published model, makes one"),
    (("--candidates", "nowhere.jsonl"), "--candidates nowhere.jsonl: no such file or folder"),
    (("--name", "a/b"), "name: 'a/b' is not allowed"),
])  # fmt: skip
def test_bad_usage_is_refused_and_leaves_nothing(
    embed, texts, tiny_ranker, tmp_path, options, message
):
    words = [tiny_ranker("cross").uri if word == "MODEL/cross" else word for word in options]
    assert message in embed(texts, *words).refusal
    assert not (tmp_path / "pools").exists()


# Failures and kills


def test_of_a_corpus_the_examples_are_embedded_and_nothing_else(embed, convai2_corpus):
    assert Path(convai2_corpus.uri, "rejected").is_dir()
    options = ("--embed.text-column", "response", "--embed.id-column", "example_id")
    summary = embed(Path(convai2_corpus.uri), *options).summary
    assert summary["counts"]["records"] == convai2_corpus.counts["examples"]
    pool = open_artifact(summary["output"], "pool")
    source = pool.manifest["inputs"]["candidates"]["inputs"]["corpus.0"]
    assert source["fingerprint"] == convai2_corpus.fingerprint
    run = mlflow.MlflowClient().get_run(pool.manifest["run_id"])
    assert convai2_corpus.fingerprint in run.data.tags["mlflow.note.content"]


def test_known_contexts_turn_their_candidate_toward_them(embed, tiny_ranker, tmp_path):
    rows = [("how do I pay ?", "by card"), ("", "at noon"), ("can I pay by card ?", "by card"),
            ("how do I pay ?", "by card"), (["hi !", "when is lunch ?"], "at noon"),
            (None, "no context")]  # fmt: skip
    files = [tmp_path / "tables" / "a.jsonl", tmp_path / "tables" / "b.jsonl"]
    files[0].parent.mkdir()
    lines = [json.dumps({"q": q, "a": a}) + "\n" for q, a in rows]
    options = ("--embed.text-column", "a", "--embed.context-column", "q", "--embed.id-column", "",
               "--embed.precision", "fp32")  # fmt: skip
    for file, part in zip(files, (lines[:2], lines[2:]), strict=True):
        file.write_text("".join(part))
    embedded = embed(tmp_path / "tables", *options, model=tiny_ranker("bi").uri).summary
    pool = Pool.open(embedded["pool"])
    known = {
        "by card": [["how do I pay ?"], ["can I pay by card ?"]],
        "at noon": [["hi !", "when is lunch ?"]],
        "no context": [],
    }
    assert [pool.row(place).text for place in range(len(pool))] == list(known)
    assert pool.filter_columns == [] and embedded["counts"]["candidates"] == 3

    def unit(x):
        return x / np.linalg.norm(x)

    ranker = load_ranker(tiny_ranker("bi").local())
    ranker = inference.prepare(ranker, torch.device("cpu"), "fp32")
    for canary, (text, contexts) in zip(pool.canaries(8), known.items(), strict=True):
        assert canary[1:3] == (text, contexts)
        vector_D = inference.candidate_vectors(ranker, [text])[0].double().numpy()
        if contexts:
            of_contexts, _ = inference.context_vectors(ranker, contexts)
            units = [unit(x[0]) for x in of_contexts.double().numpy()]
            mean = np.mean([unit(vector_D), unit(vector_D), *units], axis=0)
            vector_D = np.linalg.norm(vector_D) * mean / np.sqrt(np.linalg.norm(mean))
        np.testing.assert_allclose(canary.vector_D, vector_D, atol=1e-5)
    Engine(tiny_ranker("bi").uri, [embedded["pool"]], precision="fp32").close()  # checks them again

    # One more question changes its candidate, under the id that it had; the others are copied.
    another = json.dumps({"q": "do you take cards ?", "a": "by card"})
    files[0].write_text("".join([*lines[:2], another]))
    options = (*options, *ALL_MAY_CHANGE)
    again = embed(tmp_path / "tables", *options, model=tiny_ranker("bi").uri).summary
    assert again["plan"] == {"new": 0, "changed": 1, "same": 2, "gone": 0}
    after = Pool.open(again["pool"])
    assert after.artifact.manifest["embedded"]["rows"] == 1
    assert [after.row(n).id for n in range(3)] == [pool.row(n).id for n in range(3)]
    assert len(after.canaries(1)[0].known_contexts) == 3


def test_known_contexts_that_are_none_are_set_aside_and_those_that_are_personal_redacted(
    embed, tiny_ranker, tmp_path
):
    rows = [({"a": 1}, "one"), ("mail me at me@example.org", "two"), ("x" * 99, "three"), ("?", "four"),
            ("?", "é" * 46)]  # fmt: skip
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"q": q, "a": a}) + "\n" for q, a in rows))
    made = embed(
        file, "--embed.text-column", "a", "--embed.context-column", "q", "--embed.id-column", "",
        "--embed.max-text-bytes", 90, "--reading.max-malformed-share", 0.5, "--redact", "true",
        model=tiny_ranker("bi").uri,
    ).summary  # fmt: skip
    assert made["dropped"] == {
        "embed.context_column q: dict; allowed: text, list of texts": 1, "context is too long": 1,
        "text is too long": 1,
    }  # fmt: skip
    canaries = Pool.open(made["pool"]).canaries(8)
    expected = [("two", [["mail me at <email>"]]), ("four", [["?"]])]
    assert [canary[1:3] for canary in canaries] == expected

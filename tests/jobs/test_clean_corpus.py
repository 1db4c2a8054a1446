from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import mlflow
import pyarrow.parquet as pq
import pytest

from jobs import clean_corpus, prepare_corpus
from pipeline.artifact import Artifact, open_artifact
from pipeline.corpora.dedup import near
from pipeline.engine import executors
from tests.helpers import rejected, rows_of


def rows_by_id(corpus: Artifact) -> dict[str, dict[str, Any]]:
    rows = {row["example_id"]: row for row in rows_of(corpus)}
    assert len(rows) == corpus.counts["examples"]
    return rows


def words_of(row: dict[str, Any]) -> tuple[str, ...]:
    """Right for text in ASCII."""
    turns = [*row["context"], "\n", row["response"]]
    return tuple(re.split(r"[^a-z0-9$+<=>^`|~]+", " ".join(turns).lower()))


@pytest.fixture(scope="session")
def doubled_corpus(
    tracking_uri: str, sample_files: Path, tmp_path_factory: pytest.TempPathFactory
) -> Artifact:
    """The sample dialogues, each of train three times, among them as new dialogues of valid."""
    folder = tmp_path_factory.mktemp("doubled")
    source = sample_files / "convai2"
    train = (source / "train_self_original.sample_no_cands.txt").read_text()
    valid = next(iter(source.glob("valid*"))).read_text()
    start = train.index("\n1 ", len(train) // 2) + 1
    (folder / "train_1.txt").write_text(train)
    (folder / "train_2.txt").write_text(train.replace(" the ", " the , "))
    (folder / "valid_1.txt").write_text(valid)
    (folder / "valid_2.txt").write_text(train[start : train.index("\n1 ", start) + 1])
    output = str(folder / "corpus")
    config = prepare_corpus.Config(format="convai2", input=(str(folder),), output=output)
    with executors.in_this_process():
        prepare_corpus.run(config)
    return open_artifact(output, "corpus")


@pytest.fixture(scope="module")
def made(doubled_corpus, tmp_path_factory) -> dict[str, Any]:
    """What the job says of that corpus, once."""
    output = str(tmp_path_factory.mktemp("cleaned") / "out")
    with executors.in_this_process():
        return clean_corpus.run(clean_corpus.Config(corpus=doubled_corpus.uri, output=output))


def test_a_cleaned_corpus_is_a_corpus_without_its_duplicates(made, doubled_corpus):
    cleaned = open_artifact(made["output"], "corpus")
    before, after = rows_by_id(doubled_corpus), rows_by_id(cleaned)
    assert {name: before[name] for name in after} == after
    per_text = Counter(map(words_of, after.values()))
    assert max(per_text.values()) == 1
    assert {words_of(row) for row in before.values() if row["split"] == "valid"} <= set(per_text)

    dropped = cleaned.manifest["dropped"]
    assert {"13 words of valid", "duplicate"} <= set(dropped)
    assert len(before) == len(after) + sum(dropped.values())
    for split in ("train", "valid"):
        for name, rows in (("records", before), ("examples", after)):
            expected = sum(row["split"] == split for row in rows.values())
            assert cleaned.counts[f"{name}.{split}"] == expected
    assert (made["counts"], made["dropped"]) == (cleaned.counts, dropped)

    samples = rejected(Path(made["output"]) / "rejected")
    for sample in samples:
        assert sample["example_id"] in before and sample["example_id"] not in after
        assert sample["same_as"] in after
    assert {sample["reason"] for sample in samples} == set(dropped)


def test_the_same_command_again_finds_its_work_done(run_job_here, made, doubled_corpus):
    command = ("clean_corpus", "--corpus", doubled_corpus.uri, "--output", made["output"])
    again = run_job_here(*command).summary
    assert (made["already_done"], again["already_done"]) == (False, True)
    assert again["fingerprint"] == made["fingerprint"]
    refusal = run_job_here(*command, "--dedup.shingle", "5").refusal
    assert "dedup.shingle: 3 there, 5 here" in refusal


def test_the_manifest_and_the_run_tell_the_whole_ancestry(run_job_here, reddit_corpus, tmp_path):
    (tmp_path / "set.txt").write_text("these are eight words that no comment has")
    run_job_here(
        "clean_corpus", "--corpus", reddit_corpus.uri, "--output", tmp_path / "out",
        "--evaluation", tmp_path / "set.txt", reddit_corpus.uri, "--dedup.near", "off"
    )  # fmt: skip
    cleaned = open_artifact(str(tmp_path / "out"), "corpus")
    inputs = cleaned.manifest["inputs"]
    assert inputs["corpus"] == reddit_corpus.reference()
    assert inputs["corpus"]["inputs"]["input"]["kind"] == "raw"
    assert inputs["evaluation.0"]["kind"] == "raw"
    assert inputs["evaluation.1"]["fingerprint"] == reddit_corpus.fingerprint
    run = mlflow.MlflowClient().get_run(cleaned.manifest["run_id"])
    assert run.data.tags["job"] == "clean_corpus"
    assert run.data.tags["input.corpus.fingerprint"] == reddit_corpus.fingerprint
    assert run.data.metrics["count.examples"] == cleaned.counts["examples"]
    before, after = (pq.read_schema(one.files("train/")[0]) for one in (reddit_corpus, cleaned))
    assert before == after and "subreddit" in before.names


def test_a_job_that_ends_halfway_goes_on_where_it_was(
    run_job_here, made, doubled_corpus, tmp_path, monkeypatch
):
    command = ("clean_corpus", "--corpus", doubled_corpus.uri, "--output", tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(near, "_join", None)  # the last stage but one cannot run
        with pytest.raises(TypeError):
            run_job_here(*command)
    assert not (tmp_path / "out").exists()
    tasks = tmp_path / "out.partial" / "_tasks"
    marks = {path.name: path.stat().st_mtime_ns for path in tasks.iterdir()}
    stages = {name.rpartition("-")[0] for name in marks}
    assert stages >= {"evaluation-index", "suspects", "match", "hash", "exact", "near-check"}

    seen = {}
    with monkeypatch.context() as patch:  # publishing removes the marks
        patch.setattr(
            "pipeline.engine.draft._tidy",
            lambda uri: seen.update(
                {p.name: p.stat().st_mtime_ns for p in (Path(uri) / "_tasks").iterdir()}
            ),
        )
        resumed = run_job_here(*command).summary
    assert {name: seen[name] for name in marks} == marks  # nothing was done again
    assert resumed["fingerprint"] == made["fingerprint"]


# Refused


def test_nothing_left_to_train_on_is_refused(run_job_here, convai2_corpus, tmp_path):
    command = ("clean_corpus", "--corpus", convai2_corpus.uri, "--output", tmp_path / "out")
    evaluation = ("--evaluation", f"{convai2_corpus.uri}/train")
    refusal = run_job_here(*command, *evaluation, "--decontaminate.min-words", "14").refusal
    assert "decontaminate.min_words: 14" in refusal and "ngram_words" in refusal
    refusal = run_job_here(*command, *evaluation, "--decontaminate.min-words", "1").refusal
    assert "no example of train is left" in refusal and "words of train" in refusal
    assert not (tmp_path / "out").exists()


# Real data


@pytest.mark.long  # 26 s on two slow cores; test_duplicates.py compares all pairs of fewer texts
@pytest.mark.shared
def test_real_dialogues(run_job_here, shared, real_data, tmp_path):
    """Counts that a plain script (`words_of`, all pairs) made too."""
    files = [
        real_data / "convai2" / "derived" / "train_self_original_no_cands.txt",
        shared / "data/convai2/original/valid_self_original_no_cands.first500.txt",
    ]
    made, cleaned = tmp_path / "in", tmp_path / "out"
    run_job_here("prepare_corpus", "--corpus", "convai2", "--input", *files, "--output", made)
    summary = run_job_here("clean_corpus", "--corpus", made, "--output", cleaned).summary
    assert summary["counts"]["records"] == 11_223
    assert summary["dropped"] == {"13 words of valid": 24, "near duplicate": 7}


def test_the_fixed_others_of_an_article_search_come_along(run_job_here, sample_files, tmp_path):
    run_job_here("prepare_corpus", "--corpus", "wikipedia", "--input", sample_files / "wikipedia",
            "--wikipedia.task", "search", "--wikipedia.others", 20,
            "--output", tmp_path / "articles")  # fmt: skip
    run_job_here("inspect", "--corpus", tmp_path / "articles", "--html", tmp_path / "page.html")
    made, cleaned = tmp_path / "articles", tmp_path / "clean"
    done = run_job_here("clean_corpus", "--corpus", made, "--output", cleaned)
    before, after = (open_artifact(str(uri), "corpus") for uri in (made, cleaned))
    assert done.summary["counts"]["records"] == before.counts["examples"]
    (others,) = before.files("others/")
    assert [pq.read_table(file) for file in after.files("others/")] == [pq.read_table(others)]

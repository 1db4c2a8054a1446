"""jobs.score_candidates: the teacher's scores beside their candidates, and a student's training."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline import storage
from pipeline.artifact import folder_entries, open_artifact
from pipeline.config import BadInput
from pipeline.engine.draft import draft
from pipeline.models import inference
from pipeline.models.ranker import load_ranker
from pipeline.training import teaching
from pipeline.training.data import right_answers
from pipeline.training.teaching import TeachingConfig
from tests.helpers import rows_of


@pytest.fixture(autouse=True)
def float32(monkeypatch):
    monkeypatch.setenv("POLYRANK_PROCESSOR", "avx2")


def scores_alone(ranker, context, candidates):
    if ranker.config.architecture == "cross":
        return inference.pair_scores(ranker, [context], [candidates])[0].tolist()
    vectors, mask = inference.context_vectors(ranker, [context])
    (scores,) = ranker.dual.scores(vectors, mask, inference.candidate_vectors(ranker, candidates))
    return scores.tolist()


def arguments(corpus, teachers, output, candidates=3):
    return ("--corpus", corpus, "--teacher", *teachers, "--output", output,
            "--teaching.random-candidates", candidates)  # fmt: skip


def test_every_row_is_there_and_every_candidate_of_train_has_its_score(
    run_job_here, actors_in_process, convai2_corpus, tiny_ranker, tmp_path
):
    teachers = [tiny_ranker(architecture) for architecture in ("cross", "poly", "bi")]
    argv = arguments(convai2_corpus.uri, [one.uri for one in teachers], tmp_path / "out")
    summary = run_job_here("score_candidates", *argv).summary
    scored = open_artifact(str(tmp_path / "out"), "corpus")
    added = {"candidates", "label", "teacher_scores"}
    for split in ("train", "valid"):
        before, after = rows_of(convai2_corpus, split), rows_of(scored, split)
        kept = [{k: v for k, v in row.items() if k not in added} for row in after]
        assert kept == [{k: v for k, v in row.items() if k not in added} for row in before]
    assert all(row["teacher_scores"] is None for row in rows_of(scored, "valid"))
    train = rows_of(scored, "train")
    assert summary["counts"]["scored"] == summary["counts"]["examples.train"] == len(train)
    assert len({row["label"] for row in train}) > 1
    rankers = [load_ranker(one.local()) for one in teachers]
    for row in train[:20]:
        assert row["candidates"][row["label"]] == row["response"]
        assert len(set(row["candidates"])) == len(row["candidates"]) in (3, 4)
        each = [scores_alone(ranker, row["context"], row["candidates"]) for ranker in rankers]
        assert row["teacher_scores"] == pytest.approx(np.mean(each, axis=0).tolist(), abs=1e-4)
    again = run_job_here("score_candidates", *argv).summary
    assert again["already_done"] and again["fingerprint"] == scored.fingerprint


@pytest.mark.parametrize("limits", [{"margin": 0.3}, {"max_share": 0.9}])
def test_the_hardest_of_many_are_what_a_dual_teacher_scores_highest_below_the_limit(
    run_job_here, actors_in_process, convai2_corpus, tiny_ranker, tmp_path, monkeypatch, limits
):
    """What it scores nearly as high as the response, or higher, may be right, too."""
    monkeypatch.setattr(teaching, "_ROWS_AT_ONCE", 16)
    corpus = in_files(convai2_corpus, tmp_path / "corpus", 50)
    texts = {row["response"] for row in rows_of(corpus, "train")}
    cross, poly = tiny_ranker("cross"), tiny_ranker("poly")
    argv = arguments(corpus.uri, [cross.uri, poly.uri], tmp_path / "out")
    options = [f"--teaching.{name.replace('_', '-')}={value}" for name, value in limits.items()]
    run_job_here("score_candidates", *argv, "--teaching.hardest-of", len(texts), *options)
    rankers = [load_ranker(teacher.local()) for teacher in (cross, poly)]
    labels, counts = set(), set()
    for row in rows_of(open_artifact(str(tmp_path / "out"), "corpus"), "train")[:20]:
        everything = sorted(texts)
        scores = scores_alone(rankers[1], row["context"], everything)
        of = dict(zip(everything, scores, strict=True))
        right = of.pop(row["response"])
        most = right - limits.get("margin", 0.0)
        if right > 0:
            most = min(most, right * limits.get("max_share", 0.95))
        wanted = sorted((score for score in of.values() if score <= most), reverse=True)[:3]
        wrong = [text for text in row["candidates"] if text != row["response"]]
        assert sorted((of[text] for text in wrong), reverse=True) == pytest.approx(wanted, abs=1e-4)
        assert len(set(wrong)) == len(wrong) and row["candidates"][row["label"]] == row["response"]
        each = [scores_alone(ranker, row["context"], row["candidates"]) for ranker in rankers]
        assert row["teacher_scores"] == pytest.approx(np.mean(each, axis=0).tolist(), abs=1e-4)
        labels.add(row["label"])
        counts.add(len(wrong))
    assert len(labels) > 1 and max(counts) == 3


def test_random_candidates_are_no_other_replies_to_the_context():
    """Nor of the same group where that is asked for; a row that has none left keeps its response."""
    rows = [{"context": ["hi"], "response": f"r{n}", "group_id": f"g{n % 2}", "candidates": None}
            for n in range(3)]  # fmt: skip
    rows.append({"context": ["bye"], "response": "r3", "group_id": "g0", "candidates": None})
    for same_group_negatives, others in ((True, {"r0", "r1", "r2"}), (False, {"r1"})):
        config = TeachingConfig(random_candidates=3, same_group_negatives=same_group_negatives)
        drawn = [dict(row) for row in rows]
        answers = right_answers(drawn, same_group_negatives)
        pairs = list(zip(drawn, answers, strict=True))
        texts = ["r0", "r1", "r2", "r3"]
        teaching._add_candidates(pairs, texts, [], config, np.random.default_rng(0))
        assert set(drawn[3]["candidates"]) == {"r3"} | others
        assert [set(row["candidates"]) - {row["response"]} for row in drawn[:3]] == (
            [{"r3"}] * 3 if same_group_negatives else [set(), {"r3"}, set()]
        )


def test_a_train_split_of_one_response_has_none_to_draw(
    run_job_here, actors_in_process, convai2_corpus, tiny_ranker, tmp_path
):
    corpus = in_files(convai2_corpus, tmp_path / "corpus", 1)
    argv = arguments(corpus.uri, [tiny_ranker("bi").uri], tmp_path / "out")
    refused = run_job_here("score_candidates", *argv).refusal
    assert refused.endswith("no example of train has candidates; each file has only one response")


@pytest.mark.parametrize(("settings", "name"), [
    ({"margin": 0.1}, "margin"), ({"max_share": 0.9}, "max_share"),
    ({"same_group_negatives": False}, "same_group_negatives"),
    ({"hardest_of": 9, "random_candidates": 3, "max_share": 1.5}, "max_share"),
])  # fmt: skip
def test_limits_that_nothing_reads_or_out_of_range_are_refused(settings, name):
    with pytest.raises(BadInput, match=rf"teaching\.{name}: .* is not allowed; allowed: "):
        TeachingConfig(**settings)


def in_files(corpus, folder, *sizes):
    """The first rows of the corpus' train split, in files `a`, `b`, … of these sizes."""
    out = draft(str(folder), "corpus", TeachingConfig(), {})
    (table,) = [pq.read_table(uri, partitioning=None) for uri in corpus.files("train/", ".parquet")]
    files, start = [], 0
    for letter, size in zip("ab", sizes, strict=False):
        files.append(out.write_table(f"train/{letter}.parquet", table.slice(start, size)))
        start += size
    return out.publish(files, {})


def without(ranker, folder, corpus, *held_out):
    """The ranker as one that was trained without these files of the corpus."""
    out = draft(str(folder), "ranker", TeachingConfig(), {"corpus": corpus})
    storage.upload(ranker.local(), out.staging)
    files = [entry for entry in folder_entries(ranker.local()) if entry["path"] != "manifest.json"]
    return out.publish(files, {}, held_out=list(held_out))


def test_held_out_shards_are_scored_by_those_that_never_saw_them(
    run_job_here, actors_in_process, convai2_corpus, tiny_ranker, tmp_path
):
    corpus = in_files(convai2_corpus, tmp_path / "corpus", 30, 20)
    one = without(tiny_ranker("cross"), tmp_path / "one", corpus, "train/a.parquet")
    other = without(tiny_ranker("poly"), tmp_path / "other", corpus, "train/b.parquet")
    third = without(tiny_ranker("bi"), tmp_path / "third", corpus, "train/b.parquet")
    fields = [teacher.uri for teacher in (one, other, third)]
    argv = arguments(corpus.uri, fields, tmp_path / "out")
    run_job_here("score_candidates", *argv, "--teaching.held-out", "true")
    rows = rows_of(open_artifact(str(tmp_path / "out"), "corpus"), "train")
    for part, teachers in ((rows[:30], [one]), (rows[30:], [other, third])):
        rankers = [load_ranker(teacher.local()) for teacher in teachers]
        for row in part[:10]:
            each = [scores_alone(ranker, row["context"], row["candidates"]) for ranker in rankers]
            assert row["teacher_scores"] == pytest.approx(np.mean(each, axis=0), abs=1e-4)
    stranger = without(tiny_ranker("bi"), tmp_path / "stranger", convai2_corpus, "train/b.parquet")
    for teachers, reason in (
        ([one], "no teacher held out train/b.parquet (finetune.folds, finetune.held_out)"),
        ([one, stranger], f"{stranger.uri} was trained on another corpus' files"),
    ):
        argv = arguments(corpus.uri, [teacher.uri for teacher in teachers], tmp_path / "more")
        refusal = run_job_here("score_candidates", *argv, "--teaching.held-out", "true").refusal
        assert reason in refusal
    assert not (tmp_path / "more.partial").exists()


@pytest.mark.long  # it trains twice
def test_a_student_learns_from_scores(run_job, run_job_here, convai2_corpus, tiny_ranker, tmp_path):
    """Scored by an actor as a user has it; it leaves out a file, as one that will teach does."""
    corpus = in_files(convai2_corpus, tmp_path / "corpus", 30, 20)
    argv = arguments(corpus.uri, [tiny_ranker("cross").uri], tmp_path / "scored")
    run_job("score_candidates", *argv, "--resources.actors", 1, "--resources.cpus-per-actor", 1)
    done = run_job_here(
        "finetune", "--corpus", tmp_path / "scored", "--output", tmp_path / "student",
        "--encoder", tiny_ranker("bi").local() / "context_encoder",
        "--ranker.max-context-tokens", 48, "--ranker.max-candidate-tokens", 32,
        "--ranker.m", 3, "--finetune.batch-examples", 8, "--finetune.max-steps", 2,
        "--finetune.negatives-from", "both", "--finetune.negatives", 3,
        "--finetune.distill.loss", "margin_mse", "--finetune.chunk-examples", 4,
        "--loop.precision", "fp32", "--resources.cpus-per-worker", 1,
        "--finetune.folds", 2, "--finetune.held-out", 1,
    )  # fmt: skip
    assert done.summary["metrics"]["distill_loss"] > 0
    student = open_artifact(str(tmp_path / "student"), "ranker")
    assert student.manifest["held_out"] == ["train/b.parquet"]
    # It learnt from what was made of the corpus, and can teach what is made of that.
    teachers = [student, without(tiny_ranker("bi"), tmp_path / "other", corpus, "train/a.parquet")]
    found = teaching.teachers_of(corpus, teachers, TeachingConfig(held_out=True))
    assert found == {"train/a.parquet": [1], "train/b.parquet": [0]}


def test_a_student_learns_from_a_teachers_vectors(
    run_job_here, actors_in_process, convai2_corpus, tiny_ranker, tmp_path
):
    """Their products are the teacher's scores of any context and any response, to the 11 bits of float16."""
    teacher = tiny_ranker("bi")
    argv = ("--corpus", convai2_corpus.uri, "--teacher", teacher.uri, "--teaching.over", "batch")
    summary = run_job_here("score_candidates", *argv, "--output", tmp_path / "taught").summary
    taught = open_artifact(str(tmp_path / "taught"), "corpus")
    added = ("teacher_context", "teacher_response")
    for split in ("train", "valid"):
        rows = [dict(row) for row in rows_of(taught, split)]
        vectors = [[row.pop(name) for name in added] for row in rows]
        assert rows == rows_of(convai2_corpus, split)
        assert all((vector is None) == (split == "valid") for pair in vectors for vector in pair)
    train = rows_of(taught, "train")
    assert summary["counts"] == {
        "examples.train": len(train), "examples.valid": len(rows), "scored": len(train)
    }  # fmt: skip
    contexts_BE, responses_BE = (
        np.stack([np.frombuffer(row[name], "<f2") for row in train[:30]]).astype(float)
        for name in added
    )
    ranker, texts = load_ranker(teacher.local()), [row["response"] for row in train[:30]]
    expected = [scores_alone(ranker, row["context"], texts) for row in train[:30]]
    np.testing.assert_allclose(contexts_BE @ responses_BE.T, expected, rtol=5e-3, atol=5e-3)
    done = run_job_here(
        "finetune", "--corpus", taught.uri, "--output", tmp_path / "student",
        "--encoder", teacher.local() / "context_encoder", "--ranker.architecture", "bi",
        "--ranker.max-context-tokens", 48, "--ranker.max-candidate-tokens", 32,
        "--finetune.batch-examples", 8, "--finetune.max-steps", 2, "--loop.precision", "fp32",
        "--finetune.distill.loss", "kl", "--finetune.distill.over", "batch",
        "--resources.cpus-per-worker", 1,
    )  # fmt: skip
    assert done.summary["metrics"]["distill_loss"] > 0


@pytest.mark.parametrize(("architectures", "options", "reason"), [
    (["cross"], [], "whose contexts have 0 vectors; 1 is needed, as of a bi-encoder"),
    (["bi", "cross"], [], "teacher: 2 is not allowed; allowed: one, with teaching.over 'batch'"),
    (["bi"], ["--teaching.random-candidates", 3], "0 with teaching.over 'batch'"),
])  # fmt: skip
def test_vectors_of_what_has_not_one_for_a_context_are_refused(
    run_job_here, convai2_corpus, tiny_ranker, tmp_path, architectures, options, reason
):
    teachers = [tiny_ranker(architecture).uri for architecture in architectures]
    argv = ("--corpus", convai2_corpus.uri, "--teacher", *teachers, "--output", tmp_path / "out")
    refusal = run_job_here("score_candidates", *argv, "--teaching.over", "batch", *options).refusal
    assert reason in refusal and not list(tmp_path.glob("out*"))


def test_what_cannot_teach_or_be_taught_is_refused(
    run_job_here, actors_in_process, convai2_corpus, tiny_ranker, tmp_path
):
    output, cross = tmp_path / "out", tiny_ranker("cross").uri
    for teachers, candidates, said in (
        ([convai2_corpus.uri], 3, "needed here: ranker"),
        ([cross, cross], 3, "each ranker once"),
        ([], 3, "teacher: 'none' is not allowed; allowed: one ranker or more"),
        ([cross], -1, "teaching.random_candidates: -1"),
        ([cross], 0, "teaching.random_candidates: 0 is not allowed; allowed: 1 or more"),
    ):
        argv = arguments(convai2_corpus.uri, teachers, output, candidates)
        assert said in run_job_here("score_candidates", *argv).refusal
    more = tmp_path / "more"
    argv = (*arguments(convai2_corpus.uri, [cross], more), "--teaching.hardest-of")
    for value, allowed in (
        (3, "0, or more than teaching.random_candidates, 3, above 0"),
        (9, "0, as no teacher of train/"),
    ):
        refusal = run_job_here("score_candidates", *argv, value).refusal
        assert f"teaching.hardest_of: {value} is not allowed; allowed: {allowed}" in refusal
    assert not (tmp_path / "more.partial").exists()

"""`jobs.evaluate`: the table, and the same numbers made by hand."""

from __future__ import annotations

import json

import mlflow
import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.models import inference
from pipeline.models.ranker import load_ranker

METRICS = ["R@1/20", "R@2/20", "R@5/20", "R@10/20", "MRR"]


@pytest.fixture
def evaluate(run_job, tiny_ranker, convai2_corpus):
    """The job on a corpus whose valid split gives 20 candidates and whose train split gives none."""

    def run(*options: object, models=("poly",), corpus: str = convai2_corpus.uri):
        uris = [tiny_ranker(*([m] if isinstance(m, str) else m)).uri for m in models]
        return run_job("evaluate", "--model", *uris, "--corpus", corpus, *options)

    return run


def own_metrics(rows, ranker) -> dict[str, float]:
    """float64, one context at a time, with the formula of the paper written out."""
    vectors_NMD, _ = inference.context_vectors(ranker, [row["context"] for row in rows])
    ranks = []
    for row, vectors_MD in zip(rows, vectors_NMD.double().numpy(), strict=True):
        candidates_CD = inference.candidate_vectors(ranker, row["candidates"]).double().numpy()
        logits_CM = candidates_CD @ vectors_MD.T
        weights_CM = np.exp(logits_CM - logits_CM.max(axis=1, keepdims=True))
        weights_CM /= weights_CM.sum(axis=1, keepdims=True)
        scores_C = ((weights_CM @ vectors_MD) * candidates_CD).sum(axis=1)
        ranks.append((scores_C >= scores_C[row["label"]]).sum())
    ranks = np.array(ranks)
    recalls = {f"R@{k}/20": (ranks <= k).mean() for k in (1, 2, 5, 10)}
    return {**recalls, "MRR": (1 / ranks).mean()}


@pytest.mark.parametrize("architecture", ["bi", "poly"])
def test_the_numbers_are_those_made_by_hand(evaluate, convai2_corpus, tiny_ranker, architecture):
    summary = evaluate("--baselines", "false", models=[architecture]).summary
    files = convai2_corpus.files("valid/", ".parquet")
    rows = [row for file in files for row in pq.read_table(file, partitioning=None).to_pylist()]
    wanted = own_metrics(rows, load_ranker(tiny_ranker(architecture).local()))
    assert summary["examples"] == len(rows) == convai2_corpus.counts["examples.valid"]
    assert list(summary["table"]) == [architecture]
    # bf16 hardware rounds a text as its batch is padded: a few of the candidates change places.
    assert summary["table"][architecture] == pytest.approx(wanted, abs=0.01)
    assert wanted["R@10/20"] > wanted["R@1/20"] > 0


def test_the_table_has_chance_tf_idf_and_a_row_for_every_model(evaluate, tiny_ranker):
    models = ["poly", "bi", "cross", ("poly", 1)]
    done = evaluate("--max-examples", 100, models=models)
    summary = done.summary
    second = f"poly {tiny_ranker('poly', 1).fingerprint[:8]}"
    assert list(summary["table"]) == ["chance", "tf-idf", "poly", "bi", "cross", second]
    for row in summary["table"].values():
        assert list(row) == METRICS
        recalls = [row[name] for name in METRICS[:-1]]
        assert recalls == sorted(recalls)
        assert all(0 <= share <= 1 for share in row.values())
    assert summary["table"]["poly"] != summary["table"][second]
    assert abs(summary["table"]["chance"]["R@10/20"] - 0.5) < 0.25  # five standard deviations
    assert summary["examples"] == 100
    shown = [line for line in done.stdout.splitlines() if line.startswith("| tf-idf |")]
    numbers = " | ".join(f"{value:.3f}" for value in summary["table"]["tf-idf"].values())
    assert shown == [f"| tf-idf | {numbers} |"]


def test_the_table_is_written_to_a_file_and_is_the_same_every_time(evaluate, tmp_path):
    options = ("--source", "sampled", "--max-examples", 50, "--json", tmp_path / "t" / "table.json")
    summary = evaluate(*options).summary
    assert evaluate(*options).summary == summary
    assert summary.pop("job") == "evaluate"
    assert json.loads((tmp_path / "t" / "table.json").read_text()) == summary


def test_the_run_has_the_models_metrics_and_ancestry(evaluate, tiny_ranker, convai2_corpus):
    table = evaluate("--max-examples", 50, "--seed", 3).summary["table"]
    found = mlflow.search_runs(
        experiment_names=["polyrank"], filter_string="tags.job = 'evaluate'", max_results=1,
        output_format="list",
    )[0]  # fmt: skip
    assert found.data.metrics == {
        name.replace("@", "_at_"): pytest.approx(value) for name, value in table["poly"].items()
    }
    assert found.data.params["seed"] == "3"
    assert found.data.tags["input.model.fingerprint"] == tiny_ranker("poly").fingerprint
    assert found.data.tags["input.corpus.fingerprint"] == convai2_corpus.fingerprint
    assert mlflow.artifacts.load_dict(f"{found.info.artifact_uri}/table.json") == table


def test_candidates_are_sampled_where_the_corpus_gives_none(evaluate):
    options = ("--split", "train", "--source", "sampled", "--candidates", 5, "--max-examples", 200)
    summary = evaluate(*options, "--recall-at", 1, 4, 5).summary
    assert list(summary["table"]["poly"]) == ["R@1/5", "R@4/5", "MRR"]
    assert abs(summary["table"]["chance"]["R@1/5"] - 0.2) < 0.15
    assert (summary["split"], summary["examples"]) == ("train", 200)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--split", "train"),
         "no candidates; allowed: a corpus that gives them, or --source sampled"),
        (("--candidates", "10"), "20 candidates; allowed: --candidates 10"),
        (("--candidates", "1"), "candidates: 1 is not allowed; allowed: >= 2"),
        (("--source", "sampled", "--candidates", "100000"), "different responses in valid/"),
        (("--split", "test"), "the corpus has no examples in test/"),
        (("--recall-at", "0"), "recall_at: (0,) is not allowed"),
        (("--max-examples", "0"), "max_examples: 0 is not allowed"),
        (("--source", "guessed"), "guessed"),
        (("--corpus", "nowhere"), "nowhere: not a corpus"),
        (("--model", "CORPUS"), "kind is 'corpus'; needed here: ranker"),
        (("--corpus", "MODEL"), "kind is 'ranker'; needed here: corpus"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused_in_one_line(
    evaluate, convai2_corpus, tiny_ranker, tmp_path, options, message
):
    real = {"CORPUS": convai2_corpus.uri, "MODEL": tiny_ranker("poly").uri}
    done = evaluate("--json", tmp_path / "t.json", *(real.get(name, name) for name in options))
    assert message in done.refusal
    assert done.stdout == ""
    assert not (tmp_path / "t.json").exists()

"""`jobs.evaluate_search`: a collection with several right documents, two models and a second stage."""

from __future__ import annotations

import json
from pathlib import Path

import mlflow
import pytest

from pipeline import Ranker
from pipeline.evaluation import retrieval

DOCUMENTS = {f"d{number}": text for number, text in enumerate((
    "hello there", "i paint in the garden", "the garden is green", "a nurse at the hospital", "rain again",
    "my boat lies in the harbour", "tea or coffee ?", "i drink tea", "the hospital is large", "i drink tea",
))}  # fmt: skip
QUERIES = {"q1": "who works at a hospital ?", "q2": "what do you drink ?", "d2": DOCUMENTS["d2"],
           "d5": "a boat"}  # fmt: skip
GRADES = {
    "q1": {"d3": 2, "d8": 1},
    "q2": {"d6": 1, "d7": 1, "d9": 2},
    "d2": {"d1": 1},
    "d5": {"d5": 1},
}


@pytest.fixture
def data(tmp_path) -> str:
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", DOCUMENTS), ("queries", QUERIES)):
        rows = [{"_id": key, "title": "", "text": text} for key, text in texts.items()]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    lines = [
        f"{query}\t{document}\t{grade}"
        for query, right in GRADES.items()
        for document, grade in right.items()
    ]
    (folder / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]))
    return str(folder)


def test_models_and_second_stages_have_their_numbers(run_job_here, data, tiny_ranker, tmp_path):
    """Those of `Ranker.rank` over all documents. A query is no answer to itself, unless it is right."""
    scales = {"bi": 1, "poly": 1, "convert": 4}  # in the mean with a second stage, as in the loss
    models = {name: tiny_ranker(name) for name in (*scales, "cross")}
    options = ("--model", *(models[name].uri for name in scales), "--second-stage", models["cross"].uri,
               "--second-stage-documents", 4, "--together", True, "--precision", "fp32",
               "--work", tmp_path / "work")  # fmt: skip
    done = run_job_here("evaluate_search", "--data", data, *options, "--json", tmp_path / "t.json")
    table = done.summary["table"]
    ways = ("", " + cross", " + cross, together")
    assert list(table) == ["bm25", *(name + way for name in scales for way in ways)]
    rankers = {name: Ranker.load(model.uri, "fp32") for name, model in models.items()}

    def found(query: str, name: str, way: str) -> list[str]:
        first = {r.id: r.score for r in rankers[name].rank(QUERIES[query], DOCUMENTS, top_k=11)}
        ids = list(first)
        if way:
            texts = {key: DOCUMENTS[key] for key in ids[:4]}
            again = {r.id: r.score for r in rankers["cross"].rank(QUERIES[query], texts, top_k=4)}
            if "together" in way:
                again = {key: score + scales[name] * first[key] for key, score in again.items()}
            ids = [*sorted(again, key=lambda key: -again[key]), *ids[4:]]
        return [each for each in ids if each != query or each in GRADES[query]]

    for name in scales:
        for row, way in ((name + way, way) for way in ways):
            wanted = retrieval.metrics({q: found(q, name, way) for q in QUERIES}, GRADES)
            for metric, values in wanted.items():
                assert table[row]["metrics"][metric] == pytest.approx(values.mean()), (row, metric)
                low, high = table[row]["intervals"][metric]
                assert low <= values.mean() <= high
    assert table["bm25"]["metrics"]["R@1"] >= 1 / 3
    assert json.loads((tmp_path / "t.json").read_text())["queries"] == 4
    assert "| bi + cross |" in done.stdout and "4 queries of test, 10 documents" in done.stdout
    (run,) = mlflow.search_runs(
        search_all_experiments=True, output_format="list",
        filter_string=f"tags.job = 'evaluate_search' and tags.`input.model.uri` = '{models['bi'].uri}'",
        order_by=["start_time DESC"], max_results=1,
    )  # fmt: skip
    logged = run.data.metrics
    assert logged["nDCG_10"] == pytest.approx(table["bi"]["metrics"]["nDCG@10"])
    both = table["bi + cross"]["metrics"]["MAP@100"]
    assert logged["bi _ cross/MAP_100"] == pytest.approx(both)


def test_a_second_run_embeds_nothing_again(run_job_here, data, tiny_ranker, tmp_path):
    options = ("--model", tiny_ranker("bi").uri, "--data", data, "--work", tmp_path / "work")
    first = run_job_here("evaluate_search", *options).summary["table"]
    versions = sorted(path.name for path in (tmp_path / "work").glob("by-*/v-*"))
    second = run_job_here("evaluate_search", *options, "--max-queries", 2).summary
    assert sorted(path.name for path in (tmp_path / "work").glob("by-*/v-*")) == versions
    assert (second["queries"], list(second["table"])) == (2, list(first))
    corpus = Path(data, "corpus.jsonl")
    corpus.write_text(corpus.read_text().replace('"text": "', '"text": "other '))
    assert run_job_here("evaluate_search", *options).summary["documents"] == 10  # the same ids


@pytest.mark.parametrize(("options", "message"), [
    (("--model", "cross"), "architecture: 'cross' has no candidate vectors"),
    (("--model", "bi", "--second-stage", "poly"), "architecture: 'poly' scores no pairs"),
    (("--model", "bi", "--split", "dev"), "--split names a file of qrels/"),
    (("--model", "bi", "--together", "true"), "together: True is not allowed"),
])  # fmt: skip
def test_what_cannot_be_asked_is_refused_in_one_line(
    run_job_here, data, tiny_ranker, tmp_path, options, message
):
    words = [tiny_ranker(word).uri if word in ("bi", "poly", "cross") else word for word in options]
    refusal = run_job_here(
        "evaluate_search", *words, "--data", data, "--work", tmp_path / "w"
    ).refusal
    assert message in refusal and "\n" not in refusal.strip()

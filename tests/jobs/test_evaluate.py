"""`jobs.evaluate`: the table, and the same numbers made by hand."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mlflow
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from jobs import evaluate as evaluate_job
from jobs import prepare_corpus
from pipeline.artifact import open_artifact
from pipeline.corpora.formats import wikipedia
from pipeline.engine import executors
from pipeline.evaluation import protocols
from pipeline.evaluation.baselines import BM25, TfIdf, known_texts
from pipeline.evaluation.metrics import recall_at
from pipeline.evaluation.questions import questions
from pipeline.evaluation.ranking import rank
from pipeline.models import inference, interop, sources
from pipeline.models.encoder import Encoder
from pipeline.models.ranker import load_ranker
from pipeline.models.truncation import truncation
from pipeline.pools.pool import Pool

METRICS = ["R@1/20", "R@2/20", "R@5/20", "R@10/20", "MRR"]
ONE_WORKER = (
    "--resources.workers", 1, "--resources.gpu", "false", "--resources.cpus-per-worker", 1,
    "--loop.precision", "fp32",
)  # fmt: skip
QUICK = ("--latency-queries", 0, "--baselines", "false")


@pytest.fixture
def evaluate(run_job_here, tiny_ranker, convai2_corpus):
    """The job on a corpus whose valid split gives 20 candidates and whose train split gives none."""

    def run(*options: object, models=("poly",), corpus: str = convai2_corpus.uri, job=run_job_here):
        uris = [tiny_ranker(*([m] if isinstance(m, str) else m)).uri for m in models]
        return job("evaluate", "--model", *uris, "--corpus", corpus, *options)

    return run


@pytest.fixture
def prepared(actors_in_process, tmp_path):
    """`prepared("pairs", {"valid.csv": text, …})`: the URI of a corpus of files with these texts."""

    def run(name: str, files: dict[str, str]) -> str:
        (tmp_path / "in").mkdir()
        for file, text in files.items():
            (tmp_path / "in" / file).write_text(text)
        output = str(tmp_path / "corpus")
        config = prepare_corpus.Config(format=name, input=(str(tmp_path / "in"),), output=output)
        return prepare_corpus.run(config)["output"]

    return run


def table_of(pairs: list[tuple[str, str]]) -> str:
    return "context,response\n" + "".join(f"{turn},{response}\n" for turn, response in pairs)


def own_metrics(rows, ranker) -> dict[str, float]:
    """float64, one context at a time, with the formula of the paper written out."""
    vectors_NMD, _ = inference.context_vectors(ranker, [row["context"] for row in rows])
    texts = sorted({text for row in rows for text in row["candidates"]})
    vectors = inference.candidate_vectors(ranker, texts).double().numpy()
    place = {text: number for number, text in enumerate(texts)}
    ranks = []
    for row, vectors_MD in zip(rows, vectors_NMD.double().numpy(), strict=True):
        candidates_CD = vectors[[place[text] for text in row["candidates"]]]
        logits_CM = candidates_CD @ vectors_MD.T
        weights_CM = np.exp(logits_CM - logits_CM.max(axis=1, keepdims=True))
        weights_CM /= weights_CM.sum(axis=1, keepdims=True)
        scores_C = ((weights_CM @ vectors_MD) * candidates_CD).sum(axis=1)
        ranks.append((scores_C >= scores_C[row["label"]]).sum())
    ranks = np.array(ranks)
    recalls = {f"R@{k}/20": (ranks <= k).mean() for k in (1, 2, 5, 10)}
    return {**recalls, "MRR": (1 / ranks).mean()}


def test_the_numbers_are_those_made_by_hand(evaluate, convai2_corpus, tiny_ranker):
    done = evaluate(*QUICK, "--precision", "fp32")
    summary = done.summary
    files = convai2_corpus.files("valid/", ".parquet")
    rows = [row for file in files for row in pq.read_table(file, partitioning=None).to_pylist()]
    ranker = load_ranker(tiny_ranker("poly").local())
    wanted = own_metrics(rows, inference.place(ranker, torch.device("cpu"), "fp32"))
    assert summary["examples"] == len(rows) == convai2_corpus.counts["examples.valid"]
    assert summary["table"]["poly"] == pytest.approx(wanted)
    assert wanted["R@10/20"] > wanted["R@1/20"] > 0
    assert "poly: " in done.stdout.partition(" are longer than the 48 tokens")[0]


def test_the_table_has_the_baselines_and_a_row_for_every_model(evaluate, tiny_ranker):
    models = ["poly", "bi", "cross", ("poly", 1)]
    done = evaluate("--max-examples", 60, "--latency-queries", 2, models=models)
    summary = done.summary
    # All four folders are called "ranker".
    first, second = (f"poly {tiny_ranker('poly', seed).fingerprint[:8]}" for seed in (0, 1))
    names = ["chance", "tf-idf", "bm25", first, "bi", "cross", second]
    assert list(summary["table"]) == list(summary["intervals"]) == names
    for name, row in summary["table"].items():
        assert list(row) == list(summary["intervals"][name]) == METRICS
        recalls = [row[name] for name in METRICS[:-1]]
        assert recalls == sorted(recalls)
        for metric, value in row.items():
            low, high = summary["intervals"][name][metric]
            assert 0 <= low <= value <= high <= 1
    assert summary["table"][first] != summary["table"][second]
    assert abs(summary["table"]["chance"]["R@10/20"] - 0.5) < 0.32  # five standard deviations
    assert summary["examples"] == 60
    assert list(summary["latency_ms"]) == names[1:]
    assert all(0 < row["median"] <= row["p95"] for row in summary["latency_ms"].values())
    assert len(summary["comparisons"]) == 6
    shown = [line for line in done.stdout.splitlines() if line.startswith("| tf-idf |")]
    numbers = [f"{value:.3f}" for value in summary["table"]["tf-idf"].values()]
    assert [shown[0].split(" | ")[n] for n in (1, 3, 4, 5, 6)] == numbers


def test_models_are_named_by_folder_where_their_architecture_is_not_enough(tiny_ranker, tmp_path):
    copies = [tmp_path / "poly-64", tmp_path / "poly-360"]
    for seed, copy in enumerate(copies):
        shutil.copytree(tiny_ranker("poly", seed).uri, copy)
    models = [*(open_artifact(str(copy), "ranker") for copy in copies), tiny_ranker("bi")]
    assert list(evaluate_job.models_by_name(models)) == ["poly-64", "poly-360", "bi"]
    assert list(evaluate_job.models_by_name(models[1:])) == ["poly", "bi"]


def test_every_model_is_loaded_once(evaluate, tiny_ranker, monkeypatch):
    """For its name, its rows and its mean with others, the latency, and the lengths of its texts."""
    load, loaded = Encoder.load.__func__, list[str]()

    def count(cls: type[Encoder], folder: Path) -> Encoder:
        loaded.append(str(folder))
        return load(cls, folder)

    monkeypatch.setattr(Encoder, "load", classmethod(count))
    options = ("--max-examples", 10, "--together", "true", "--latency-queries", 2)
    done = evaluate(*options, "--baselines", "false", models=["bi", "cross"])
    assert list(done.summary["table"]) == ["bi", "cross", "bi + cross"]
    towers = [tiny_ranker("bi").uri] * 2 + [tiny_ranker("cross").uri]
    assert sorted(str(Path(folder).parent) for folder in loaded) == sorted(towers)


def test_plot_and_errors_go_where_they_are_wanted(evaluate, tmp_path, convai2_corpus):
    plot, errors = tmp_path / "p.png", tmp_path / "e.jsonl"
    done = evaluate("--baselines", "false", "--latency-queries", 1, "--plot", plot,
                    "--errors", errors, models=["bi", "poly"])  # fmt: skip
    assert plot.read_bytes().startswith(b"\x89PNG")
    records = [json.loads(line) for line in errors.read_text().splitlines()]
    assert [record["scorer"] for record in records] == ["bi"] * 100 + ["poly"] * 100
    ranks = [record["rank"] for record in records[:100]]
    assert ranks == sorted(ranks, reverse=True)
    assert all(len(record["top"]) == 5 for record in records)
    rows = pq.read_table(convai2_corpus.files("valid/", ".parquet")[0], partitioning=None)
    by_id = {row["example_id"]: row for row in rows.to_pylist()}
    for record in records[:3]:
        assert by_id[record["example_id"]]["response"] == record["response"]
        assert f"bi: {record['example_id']}, the right one at {record['rank']} of 20" in done.stdout
    assert done.stdout.count("the right one at") == 6


def test_models_together_have_their_mean_score(evaluate, tiny_ranker, convai2_corpus, tmp_path):
    options = (*QUICK, "--max-examples", 30, "--errors", tmp_path / "e.jsonl")
    done = evaluate(*options, "--together", "true", models=["bi", "cross"])
    assert list(done.summary["table"]) == ["bi", "cross", "bi + cross"]
    pairs = [(pair["first"], pair["second"]) for pair in done.summary["comparisons"]]
    assert pairs == [("bi", "cross"), ("bi", "bi + cross"), ("cross", "bi + cross")]
    (file,) = convai2_corpus.files("valid/", ".parquet")
    rows = {row["example_id"]: row for row in pq.read_table(file, partitioning=None).to_pylist()}
    bi, cross = (load_ranker(tiny_ranker(name).local()) for name in ("bi", "cross"))
    records = [json.loads(line) for line in (tmp_path / "e.jsonl").read_text().splitlines()]
    found = [record for record in records if record["scorer"] == "bi + cross"]
    assert len(found) > 10  # tiny rankers know nothing
    for record in found:
        row = rows[record["example_id"]]
        asked = [row["context"]], [row["candidates"]]
        vectors = inference.context_vectors(bi, asked[0])
        first = bi.dual.scores(*vectors, inference.candidate_vectors(bi, row["candidates"]))
        each = [first[0].detach(), inference.pair_scores(cross, *asked)[0]]
        mean_C = sum(scores.double().numpy() for scores in each) / 2
        assert record["score"] == pytest.approx(mean_C[row["label"]], rel=0.01, abs=0.01)
        best = [one["score"] for one in record["top"]]
        assert best == pytest.approx(sorted(mean_C)[:-6:-1], rel=0.01, abs=0.01)


def test_the_run_and_the_file_have_the_same_numbers_every_time(
    evaluate, tiny_ranker, convai2_corpus, tmp_path
):
    """The run has the ancestry, too."""
    file = tmp_path / "t" / "table.json"
    options = ("--source", "sampled", "--max-examples", 50, "--seed", 3, "--json", file)
    before = evaluate(*options, "--latency-queries", 0).summary
    summary = evaluate(*options, "--latency-queries", 2).summary
    assert sorted(path.name for path in file.parent.iterdir()) == ["table.json", "table.png"]
    assert json.loads(file.read_text()) | {"job": "evaluate"} == summary
    assert before == {**summary, "latency_ms": {}}
    table, intervals = summary["table"]["poly"], summary["intervals"]["poly"]
    found = mlflow.search_runs(
        experiment_names=["polyrank"], filter_string="tags.job = 'evaluate'", max_results=1,
        output_format="list",
    )[0]  # fmt: skip
    metrics = found.data.metrics
    for name, value in table.items():
        name, (low, high) = name.replace("@", "_at_"), intervals[name]
        assert metrics.pop(name) == pytest.approx(value)
        assert metrics.pop(f"{name}.low") == pytest.approx(low)
        assert metrics.pop(f"{name}.high") == pytest.approx(high)
    for scorer in ("chance", "tf-idf", "bm25"):
        for name, value in summary["table"][scorer].items():
            logged = metrics.pop(f"{scorer}/{name.replace('@', '_at_')}")
            assert logged == pytest.approx(value)
    assert {name for name in metrics if "/" not in name} == {"ms.median", "ms.p95"}
    assert found.data.params["seed"] == "3"
    assert found.data.tags["input.model.fingerprint"] == tiny_ranker("poly").fingerprint
    assert found.data.tags["input.corpus.fingerprint"] == convai2_corpus.fingerprint
    uri = found.info.artifact_uri
    assert mlflow.artifacts.load_dict(f"{uri}/table.json")["table"] == summary["table"]
    assert mlflow.artifacts.load_text(f"{uri}/table.md").startswith("| scorer | R@1/20 |")
    assert mlflow.artifacts.load_image(f"{uri}/table.png").width > 500
    files = {file.path for file in mlflow.MlflowClient().list_artifacts(found.info.run_id)}
    assert files == {"table.json", "table.md", "table.png"}


def test_a_protocol_sets_what_is_not_set_by_hand(convai2_corpus):
    rules = {"convai2": ("given", 20, [1, 2, 5, 10]), "dstc7": ("given", 100, [1, 10, 50]),
             "ubuntu": ("given", 10, [1, 2, 5]), "wikipedia": ("others", 10_001, [1, 10, 100]),
             "polyai": ("blocks", 100, [1]), "labels": ("sampled", protocols.ALL, [1]),
             "pairs": ("corpus", protocols.ALL, [1, 3])}  # fmt: skip
    required = {"model": ("m",), "corpus": "c"}
    for name, wanted in rules.items():
        source, candidates, recall_at = wanted
        found = evaluate_job.Config(protocol=name, **required).rules(convai2_corpus)
        assert (found.source, found.candidates, list(found.recall_at)) == (
            source, candidates, recall_at
        )  # fmt: skip
    by_hand = {"source": "sampled", "candidates_per_question": 7, "recall_at": (3,)}
    found = evaluate_job.Config(protocol="dstc7", **by_hand, **required).rules(convai2_corpus)
    assert (found.source, found.candidates, found.recall_at) == tuple(by_hand.values())


def test_a_faq_is_asked_among_all_answers_and_says_which_were_trained_on(evaluate, prepared):
    """By default, as a pool has all answers: those of train and of valid, each once."""
    train = [(f"how do i open {n} ?", f"turn key {n} .") for n in range(30)]
    valid = [(f"please open {n}", f"turn key {n} .") for n in range(2)]
    valid += [("and the door ?", "there is none ."), ("a window ?", "push it .")]
    files = {"train.csv": table_of(train), "valid.csv": table_of(valid)}
    done = evaluate(*QUICK, corpus=prepared("pairs", files))
    assert (done.summary["examples"], done.summary["candidates"]) == (4, 32)
    assert list(done.summary["table"]["poly"]) == ["R@1/32", "R@3/32", "MRR"]
    assert "2 of the 4 right answers also stand in train/" in done.stdout
    assert "fewer than 100 questions say little" in done.stdout


def test_known_contexts_count_as_in_a_pool(evaluate, tiny_ranker, run_job_here, prepared, tmp_path):
    """The ranks are those of the vectors that `embed_pool --embed.context-column` writes of train/."""
    known = [(f"how do i open door {n % 9} {n} ?", f"turn key {n % 9} .") for n in range(27)]
    asked = [(f"please open door {n}", f"turn key {n} .") for n in range(9)] + [("why ?", "so .")]
    corpus = prepared("pairs", {"train.csv": table_of(known), "valid.csv": table_of(asked)})
    fp32 = ("--known-contexts", "true", "--precision", "fp32")
    done = evaluate(*QUICK, *fp32, models=["bi"], corpus=corpus)

    (tmp_path / "pool.csv").write_text(table_of(known) + ",so .\n")
    embedded = run_job_here(
        "embed_pool", "--model", tiny_ranker("bi").uri, "--candidates", tmp_path / "pool.csv",
        "--pools", tmp_path / "pools", "--name", "p", "--embed.text-column", "response",
        "--embed.context-column", "context", "--embed.id-column", "", "--embed.precision", "fp32",
    ).summary  # fmt: skip
    pool = Pool.open(embedded["pool"])
    candidates_CD = pool.vectors_at(np.arange(len(pool))).astype(np.float64)
    place = {pool.row(number).text: number for number in range(len(pool))}
    ranker = inference.prepare(load_ranker(tiny_ranker("bi").local()), torch.device("cpu"), "fp32")
    contexts_NMD, _ = inference.context_vectors(ranker, [[context] for context, _ in asked])
    scores_NC = contexts_NMD[:, 0].double().numpy() @ candidates_CD.T
    right_N = scores_NC[np.arange(10), [place[response] for _, response in asked]]
    ranks_N = (scores_NC >= right_N[:, None]).sum(axis=1)
    assert "9 of 10 candidates are found by their contexts in train/, too" in done.stdout
    assert ("bm25 read their texts alone" in done.stdout) == ("bm25" in done.summary["table"])
    found = done.summary["table"]["bi"]
    assert found["R@1/10"] == pytest.approx((ranks_N == 1).mean())
    assert found["MRR"] == pytest.approx((1 / ranks_N).mean())
    without = evaluate(*QUICK, "--precision", "fp32", models=["bi"], corpus=corpus)
    assert found != without.summary["table"]["bi"]


def test_an_encoder_whose_vectors_are_none_of_ours_is_left_out_of_the_table(
    run_job_here, tiny_ranker, tmp_path
):
    """Its ranker was trained on the transformer alone, and is evaluated as any other."""
    run_job_here("convert_model", "--model", tiny_ranker("bi").uri, "--output", tmp_path / "published",
                 "--to", "sentence-transformers")  # fmt: skip
    folder = tmp_path / "published" / "context"
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "max"}))
    _, reference = sources.open_encoder(str(folder))
    ranker = SimpleNamespace(manifest={"inputs": {"encoder": reference}})
    config = evaluate_job.Config(model=("m",), corpus="c")
    assert evaluate_job._untrained_baselines([ranker], None, config, {}) == []


@pytest.mark.parametrize(("models", "options", "said"), [
    (["poly"], (), "known_contexts: needs one vector for each context; 'poly' has"),
    (["bi"], ("--split", "train"), "valid or test with --known-contexts"),
    (["bi", "convert"], ("--together", "true"), "false with --known-contexts"),
])  # fmt: skip
def test_known_contexts_are_refused_where_they_mean_nothing(evaluate, models, options, said):
    done = evaluate(*QUICK, "--known-contexts", "true", *options, models=models)
    assert said in done.refusal


def test_a_faq_shows_what_training_has_gained_over_the_published_encoder(
    run_job_here, tiny_ranker, actors_in_process, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    rows = [f"how do i open {n} ?,turn key {n} ." for n in range(60)]
    (tmp_path / "faq.csv").write_text("\n".join(["context,response", *rows]))
    for verb, *options in (
        ("prepare_corpus", "--format", "pairs", "--input", tmp_path / "faq.csv", "--output", "corpus"),
        ("convert_model", "--model", tiny_ranker("bi").uri, "--to", "sentence-transformers",
         "--output", "published"),
        ("finetune", "--encoder", "published/context", "--corpus", "corpus", "--output", "ranker",
         "--ranker.architecture", "bi", "--finetune.epochs", 0, "--finetune.batch-examples", 8,
         "--ranker.max-context-tokens", 48, "--ranker.max-candidate-tokens", 32, *ONE_WORKER),
    ):  # fmt: skip
        assert run_job_here(verb, *options).code == 0
    job = ("--model", "ranker", "--corpus", "corpus", "--split", "train", "--latency-queries", 0)
    done = run_job_here("evaluate", *job)
    table = done.summary["table"]
    assert list(table) == ["chance", "tf-idf", "bm25", "untrained context", "bi"]
    (least,) = done.summary["least_scores"].values()
    assert least["right"] <= 0.05
    assert f"bi: to show no answer below a score of {least['score']:.4g} hides" in done.stdout
    assert "\nbi was trained on examples of train/: new questions get fewer right" in done.stdout

    published = interop.load(tmp_path / "published" / "context", 0, 0)
    corpus = open_artifact("corpus", "corpus")
    asked = questions(corpus, "train", "corpus", protocols.ALL, 100, 0, True)
    texts = [turns[-1] for turns in asked.contexts] + list(asked.texts)
    vectors = inference.candidate_vectors(published, texts).double().numpy()
    scores = vectors[: len(asked)] @ vectors[len(asked) :].T
    right = scores[np.arange(len(scores)), list(asked.right_places())]
    ranks = (scores >= right[:, None]).sum(axis=1)
    assert table["untrained context"]["R@1/60"] == pytest.approx((ranks <= 1).mean(), abs=0.05)

    (tmp_path / "published").rename(tmp_path / "moved")
    moved = [open_artifact("ranker", "ranker")], None, evaluate_job.Config(model=("m",), corpus="c")
    assert evaluate_job._untrained_baselines(*moved, {}) == []


def test_texts_that_are_longer_than_a_model_reads_are_counted(tiny_ranker):
    """By whole words: a tiny tokenizer makes no more tokens of a text than it has characters."""
    ranker = load_ranker(tiny_ranker("poly").local())
    most = ranker.config.max_candidate_tokens
    texts = ["a b", " ".join("ab" * most), " ".join("ab" * (most + 5))]
    lengths = [len(ids) + 2 for ids in ranker.tokenizer.ids(texts)]
    longer = sum(length > most for length in lengths)
    said = f"{longer} of 3 candidates are longer than the {most} tokens that the model reads"
    assert truncation(ranker, [["a"]], texts) == f"{said} (the longest: {max(lengths)})"
    assert longer == 2 and truncation(ranker, [["a"]], ["a"]) == ""
    ranker.config = replace(ranker.config, candidate_prompt="ab " * most)
    assert truncation(ranker, [["a"]], ["a"]).startswith("1 of 1 candidates are longer")
    convert = load_ranker(tiny_ranker("convert").local())  # reads 48 of either text
    assert truncation(convert, [["a" * 30, "a" * 30]], ["a"]) == ""
    said = truncation(convert, [["a" * 30, "a" * 30], ["a" * 50, "a"]], ["a"])
    assert said.startswith("1 of 2 contexts are longer than the 48 tokens")


def test_questions_that_nobody_can_answer_are_counted(evaluate, prepared):
    lines = ["1 your persona: i am .", *(f"{n} hi\tyes\t\tyes|no|yes" for n in range(2, 5))]
    corpus = prepared("convai2", {"valid_self_original.txt": "\n".join(lines) + "\n"})
    done = evaluate("--candidates", 3, "--recall-at", 1, *QUICK, corpus=corpus)
    assert done.summary["unanswerable"] == 3
    assert done.summary["table"]["poly"]["R@1/3"] == 0
    assert "3 of 3 questions have a wrong candidate with the right one's text" in done.stdout


def test_the_precision_is_chosen_and_said(evaluate, monkeypatch):
    monkeypatch.setattr("pipeline.models.precision.use_bf16", lambda device: True)
    options = (*QUICK, "--max-examples", 20)
    for chosen, resolved in (("auto", "bf16"), ("fp32", "fp32")):
        done = evaluate(*options, "--precision", chosen)
        assert done.summary["precision"] == resolved
        assert f"models compute in {resolved}\n" in done.stdout
    runs = mlflow.search_runs(
        experiment_names=["polyrank"], filter_string="tags.job = 'evaluate'", max_results=2,
        output_format="list",
    )  # fmt: skip
    assert [run.data.params["precision"] for run in runs] == ["fp32", "bf16"]


def test_classification_ranks_all_labels(evaluate, prepared):
    labels = ["card lost", "card broken", "top up", "refund", "exchange rate"]
    rows = [(f"text {n} of {labels[n % 5]} ?", labels[n % 5]) for n in range(40)]
    corpus = prepared("pairs", {"valid.csv": table_of(rows)})
    done = evaluate(
        "--protocol", "labels", "--precision", "fp32", "--latency-queries", 0, corpus=corpus
    )
    assert list(done.summary["table"]["poly"]) == ["R@1/5", "MRR"]
    assert done.summary["table"]["tf-idf"]["R@1/5"] == 1  # each text has its label's words
    assert done.summary["candidates"] == 5 and "not 1,000,000,000" not in done.stdout


def test_questions_with_several_right_answers_are_counted(evaluate, prepared):
    rows = [(f"how {n // 2} ?", f"so {n}") for n in range(8)] + [
        ("when ?", "now"),
        ("when ?", "now"),
    ]
    done = evaluate(*QUICK, corpus=prepared("pairs", {"valid.csv": table_of(rows)}))
    assert "\n8 questions have several right answers, of which each counts alone" in done.stdout


def test_a_small_split_is_asked_among_all_that_it_has(evaluate, prepared):
    """88 pairs of somebody's own, by the protocol that the page recommends for them."""
    lines = ["1 your persona: i am .", *(f"{n} hi{n}\tyes{n}\t\tyes{n}|no" for n in range(2, 90))]
    corpus = prepared("convai2", {"valid_self_original.txt": "\n".join(lines) + "\n"})
    done = evaluate("--protocol", "polyai", *QUICK, corpus=corpus)
    assert done.summary["examples"] == done.summary["candidates"] == 88
    assert done.summary["left_out"] == {}
    assert list(done.summary["table"]["poly"]) == ["R@1/88", "MRR"]
    assert "88 of the 88 examples of valid/ are asked\n" in done.stdout
    assert "88 candidates each, not 100: valid/ has no more" in done.stdout
    wanted = evaluate("--protocol", "polyai", "--candidates", 100, *QUICK, corpus=corpus)
    assert "--candidates 100: 88 examples" in wanted.refusal


@pytest.fixture(scope="module")
def articles(tracking_uri, sample_files, tmp_path_factory):
    """Article search on the sample articles: queries of valid, fixed others of train."""
    output = str(tmp_path_factory.mktemp("articles") / "articles")
    options = wikipedia.Options(task="search", others=30, queries=8)
    files = (str(sample_files / "wikipedia"),)
    job = {"format": "wikipedia", "input": files, "output": output, "wikipedia": options}
    with executors.in_this_process():
        prepare_corpus.run(prepare_corpus.Config(**job))
    return open_artifact(output, "corpus")


def test_the_own_article_among_fixed_others(evaluate, articles, monkeypatch):
    monkeypatch.setattr(evaluate_job, "_MAX_CROSS_CANDIDATES", 30)
    options = ("--protocol", "wikipedia", "--candidates", 31, "--recall-at", 1, 5)
    options = (*options, "--latency-queries", 0)
    split = max(("valid", "test"), key=lambda name: articles.rows(f"{name}/"))
    done = evaluate(*options, "--split", split, models=["bi", "cross"], corpus=articles.uri)
    summary = done.summary
    assert list(summary["table"]) == ["chance", "tf-idf", "bm25", "bi"]
    assert "cross: skipped: a cross-encoder reads 31 pairs for each question" in done.stdout
    assert list(summary["skipped"]) == ["cross"]
    assert summary["table"]["bm25"]["R@1/31"] > 3 / 31  # three times what chance has
    both = evaluate(*options, "--split", split, "--baselines", "false", "--together", "true",
                    models=["bi", "cross"], corpus=articles.uri)  # fmt: skip
    assert "together: True is not allowed; allowed: false: cross: a cross-enc" in both.refusal
    slow = evaluate(*options, "--slow", "true", "--split", split, "--baselines", "false",
                    models=["cross"], corpus=articles.uri)  # fmt: skip
    assert list(slow.summary["table"]) == ["cross"]
    alone = evaluate(*options, "--split", split, models=["cross"], corpus=articles.uri)
    assert "--model cross: a cross-encoder reads 31 pairs" in alone.refusal
    train = evaluate(*options, "--split", "train", corpus=articles.uri)
    assert "its article is among others/" in train.refusal


def test_an_example_with_several_right_answers_is_ranked_among_fewer(evaluate, prepared, tmp_path):
    rows = [dstc7_example(number, "dev") | {"scenario": 1} for number in (0, 2)]
    rows[1]["options-for-correct-answers"] = rows[1]["options-for-next"][2:5]
    corpus = prepared("dstc7", {"ubuntu_dev_subtask_1.json": json.dumps(rows)})
    options = ("--protocol", "dstc7", "--latency-queries", 0, "--errors", tmp_path / "errors.jsonl")
    done = evaluate(*options, models=["poly", "cross"], corpus=corpus)
    assert (done.summary["candidates"], done.summary["shorter"]) == (100, 1)
    assert "questions with fewer than 100 candidates: 1" in done.stdout
    assert done.summary["table"]["tf-idf"]["R@1/100"] == 1
    assert all(metrics["R@50/100"] >= 0 for metrics in done.summary["table"].values())
    config = evaluate_job.Config(model=("m",), corpus=corpus, protocol="dstc7")
    asked = evaluate_job.measurement(config, open_artifact(corpus, "corpus")).questions
    counts = {name[-1]: len(asked.places(n)) for n, name in enumerate(asked.ids)}
    assert counts == {"1": 100, "2": 98}
    errors = [json.loads(line) for line in (tmp_path / "errors.jsonl").read_text().splitlines()]
    assert errors
    assert {row["example_id"][-1]: row["candidates"] for row in errors} == {"1": 100, "2": 98}


def dstc7_example(number: int, split: str) -> dict:
    """The right answer repeats the question; in every second example it is absent."""
    options = [{"candidate-id": f"{number} {k}", "utterance": f"other{number}x{k} words"}
               for k in range(100)]  # fmt: skip
    absent = number % 2
    if not absent:
        options[number]["utterance"] = f"about topic{number} then"
    turn = {"speaker": "participant_1", "utterance": f"tell me about topic{number}"}
    return {
        "data-split": split, "example-id": number, "scenario": 4, "messages-so-far": [turn],
        "options-for-correct-answers": [] if absent else [options[number]],
        "options-for-next": options,
    }  # fmt: skip


@pytest.mark.parametrize(("options", "message"), [
    (("--split", "train"), "no candidates; allowed: a corpus that gives them, or --protocol polyai"),
    (("--candidates", "1"), "candidates_per_question: 1 is not allowed; allowed: >= 2"),
    (("--recall-at", "0"), "recall_at: (0,) is not allowed"),
    (("--latency-queries", "0", "--plot", "x.png"), "latency_queries: 0 is not allowed"),
    (("--seed", "-1"), "seed: -1 is not allowed; allowed: >= 0"),
    (("--together", "true"), "together: True is not allowed; allowed: false for one model"),
    (("--model", "MODEL", "MODEL"), "each model once"),
    (("--model", "CORPUS"), "kind is 'corpus'; needed here: ranker"),
])  # fmt: skip
def test_what_cannot_be_asked_is_refused_in_one_line(
    evaluate, convai2_corpus, tiny_ranker, tmp_path, options, message
):
    real = {"CORPUS": convai2_corpus.uri, "MODEL": tiny_ranker("poly").uri}
    done = evaluate("--json", tmp_path / "t.json", *(real.get(name, name) for name in options))
    assert message in done.refusal
    assert json.loads(done.stdout)["exit_code"] == 2
    assert not (tmp_path / "t.json").exists()


@pytest.mark.shared
def test_baselines_find_what_polyais_found_on_reddit(shared, actors_in_process, tmp_path):
    """Published, 1-of-100, comments of 2015 to 2018: TF-IDF 26.4 %, BM25 27.5 %. These are of 2006."""
    files = tuple(map(str, sorted((shared / "data" / "reddit_dump").glob("RC_*"))))
    output = str(tmp_path / "corpus")
    prepare_corpus.run(prepare_corpus.Config(format="reddit", input=files, output=output))
    corpus = open_artifact(output, "corpus")
    asked = questions(corpus, "train", "blocks", 100, 50_000, seed=0)
    assert len(asked) == corpus.rows("train/")
    known = known_texts(corpus)
    for scorer in (TfIdf.fit(known), BM25.fit(known)):
        ranks = rank(scorer.prepare(asked), asked).ranks_N
        assert 0.24 < recall_at(ranks, 1) < 0.30

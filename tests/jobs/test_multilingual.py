"""A table in Russian, German and Chinese, from a published multilingual encoder to a pool and its R@1."""

from __future__ import annotations

import csv
import json
from types import SimpleNamespace

import pytest
import torch

from pipeline import Pool, Ranker
from pipeline.artifact import open_artifact
from tests.helpers import rows_of
from tests.multilingual import PAIRS, PROMPTS, mean_vectors, save_encoder

ANSWERS = list(dict.fromkeys(answer for _, answer in PAIRS))
FP32 = ("--embed.precision", "fp32", "--embed.dtype", "float32", "--resources.actors", 1)


@pytest.fixture
def made(run_job_here, tmp_path) -> SimpleNamespace:
    """The folder of all artifacts, and what each job said."""
    with (tmp_path / "faq.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("question", "answer"), *PAIRS])
    encoder = save_encoder(tmp_path / "encoder")
    corpus, model, pools = (tmp_path / name for name in ("corpus", "ranker", "pools"))
    columns = ("--pairs.context-column", "question", "--pairs.response-column", "answer")
    commands = (
        ("prepare_corpus", "--format", "pairs", "--input", tmp_path / "faq.csv", *columns,
         "--pairs.shares", 0.75, 0.25, 0, "--output", corpus),
        ("finetune", "--config", "jobs/configs/finetune/pairs.yaml", "--corpus", corpus,
         "--encoder", encoder, "--output", model, "--ranker.max-context-tokens", 24,
         "--ranker.max-candidate-tokens", 40, "--finetune.batch-examples", 16, "--loop.precision", "fp32",
         "--loop.learning-rate", 0.003, "--resources.cpus-per-worker", 1),
        ("embed_pool", "--model", model, "--candidates", tmp_path / "faq.csv",
         "--embed.text-column", "answer", "--embed.id-column", "", "--pools", pools, "--name", "answers",
         *FP32),
        ("evaluate", "--model", model, "--corpus", corpus, "--latency-queries", 0, "--precision", "fp32",
         "--split", "train"),
    )  # fmt: skip
    said = {command[0]: run_job_here(*command) for command in commands}
    return SimpleNamespace(corpus=corpus, model=model, pools=pools, said=said)


def test_a_table_in_three_languages_becomes_a_ranker_and_a_pool(made):
    """Pool, table and ranking have the numbers of `transformers` on the trained encoder."""
    finetuned = made.said["finetune"]
    assert "'query: ' before contexts, 'passage: ' before candidates" in finetuned.stdout
    assert (
        "training examples: 10 epochs, by their number; --finetune.epochs sets" in finetuned.stdout
    )
    assert json.loads((made.model / "ranker.json").read_text())["candidate_prompt"] == "passage: "
    metrics = finetuned.summary["metrics"]
    assert metrics["loss"] < 2.0  # the logarithm of 16 is 2.8

    encoder = made.model / "context_encoder"
    answers_ND = 4.5 * mean_vectors(encoder, [PROMPTS["passage"] + text for text in ANSWERS])
    pool = Pool.open(made.pools / "answers")
    assert len(pool) == len(ANSWERS)

    rows = rows_of(open_artifact(str(made.corpus), "corpus"), "train")
    questions = ["\n".join(row["context"]) for row in rows]
    asked_ND = 4.5 * mean_vectors(encoder, [PROMPTS["query"] + text for text in questions])
    scores_NC = asked_ND @ answers_ND.T
    right_N = torch.tensor([ANSWERS.index(row["response"]) for row in rows])
    best = scores_NC.topk(2, dim=1)
    assert (best.values[:, 0] - best.values[:, 1]).min() > 1e-4
    wanted = (best.indices[:, 0] == right_N).float().mean().item()
    *_, row = made.said["evaluate"].summary["table"].values()
    assert row[f"R@1/{len(ANSWERS)}"] == pytest.approx(wanted)
    assert wanted > 0.2  # of 18: the trained questions

    ranker = Ranker.load(made.model, precision="fp32")
    for number in range(0, len(questions), 5):
        for ranking in (ranker.rank(questions[number], ANSWERS, top_k=2),
                        ranker.search(pool, questions[number], top_k=2)):  # fmt: skip
            texts = [ANSWERS[place] for place in best.indices[number]]
            assert [result.text for result in ranking] == texts
            scores = best.values[number].tolist()
            assert [result.score for result in ranking] == pytest.approx(scores, abs=1e-3)

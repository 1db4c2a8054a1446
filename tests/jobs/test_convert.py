"""ConveRT from a corpus to answers, by the commands of its page."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.artifact import open_artifact
from pipeline.models import inference
from pipeline.models.convert.tokenizer import load_vocabulary
from pipeline.models.ranker import load_ranker
from pipeline.retrieval.pools.pool import Pool
from serve.engine import Engine

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "pipeline" / "models" / "convert" / "README.md"
# What a test can wait for, in place of the page's sizes.
SMALL = {
    "train_tokenizer": ["--tokenizer.vocabulary", 300],
    "finetune": [
        "--ranker.width", 16, "--ranker.windows", "[2, 4]", "--ranker.intermediate", 32,
        "--ranker.hidden", "[16]", "--ranker.encoding-width", 16, "--finetune.batch-examples", 16,
        "--finetune.max-steps", 12, "--finetune.valid-examples", 20, "--loop.log-every-steps", 2,
        "--loop.precision", "fp32", "--resources.cpus-per-worker", 1,
    ],
    "evaluate": ["--precision", "fp32"],
    "embed_pool": ["--embed.precision", "fp32"],
    "search": ["--precision", "fp32"],
    "convert_model": [],
}  # fmt: skip


def commands() -> list[list[str]]:
    """The jobs that the page says to run, in its order."""
    text = PAGE.read_text().replace("\\\n", " ")
    lines = re.findall(r"^    (python -m jobs\..*)$", text, re.M)
    return [shlex.split(line)[2:] for line in lines]


@pytest.mark.long
def test_every_command_of_the_page_runs(
    run_job_here, convai2_corpus, actors_in_process, tmp_path, monkeypatch
):
    """Vocabulary, single-context, multi-context, evaluation, pool, search; then an engine of the service
    answers from the pool."""
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    (tmp_path / "corpora").mkdir()
    (tmp_path / "corpora" / "reddit").symlink_to(convai2_corpus.uri)
    monkeypatch.chdir(tmp_path)
    replies = [{"id": f"r{n}", "text": f"reply {n}"} for n in range(6)]
    (tmp_path / "replies.jsonl").write_text("".join(json.dumps(row) + "\n" for row in replies))
    summaries = {}
    for module, *arguments in commands():
        verb = module.removeprefix("jobs.")
        if "onnx" in arguments and not importlib.util.find_spec("onnx"):
            continue  # an extra
        summaries[verb] = run_job_here(verb, *arguments, *SMALL[verb]).summary
    assert set(summaries) == set(SMALL)
    vocabulary = open_artifact("tokenizers/subwords", "tokenizer").local()
    assert len(load_vocabulary(vocabulary)) <= 300
    single = load_ranker(open_artifact("rankers/convert", "ranker").local())
    multi = load_ranker(open_artifact("rankers/convert-multi", "ranker").local())
    assert (single.config.earlier_turns, multi.config.earlier_turns) == (0, 10)
    pool = Pool.open("pools/replies")
    assert len(pool) == 6
    context = ["hello there", "how are you?"]
    results = summaries["search"]["results"]
    inference.place(multi, torch.device("cpu"), "fp32")
    vectors, _ = inference.context_vectors(multi, [context])
    scores = pool.vectors_at(np.arange(6)).astype(np.float64) @ vectors[0, 0].numpy()
    assert [row["id"] for row in results] == [f"r{n}" for n in np.argsort(-scores)[: len(results)]]
    assert [row["score"] for row in results] == pytest.approx(np.sort(scores)[::-1][: len(results)])
    engine = Engine("rankers/convert-multi", ["pools/replies"], precision="fp32")
    try:
        assert engine.info()["model"]["architecture"] == "convert"
    finally:
        engine.close()

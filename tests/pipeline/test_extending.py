"""What CONTRIBUTING.md says of additions: one of some kinds is made here, where a new file would name it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from jobs import prepare_corpus
from pipeline.artifact import open_artifact
from pipeline.corpora import file_tasks, raw
from pipeline.corpora.schema import EXAMPLE, split_by_name_or_group
from pipeline.models import inference, losses, ranker, settings
from pipeline.models.heads import BiEncoder
from pipeline.models.ranker import load_ranker
from pipeline.pools.pool import Pool
from pipeline.search import exact, search
from pipeline.training.objectives import PairModule
from pipeline.training.settings import Distillation, FinetuneConfig

ROOT = Path(__file__).parents[2]


def test_the_files_that_contributing_names_are_there_and_three_at_most():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = re.findall(r"^\| (an? [a-z ]+) \| (.*) \|$", text, re.MULTILINE)
    assert [name for name, _ in table] == [
        "a corpus format", "an architecture", "a loss", "a search method", "a route", "a benchmark row",
    ]  # fmt: skip
    for name, row in table:
        files = re.findall(r"`((?:pipeline|jobs|serve)/[\w/.]*)`", row)
        assert 2 <= len(files) <= 3, name
        assert all((ROOT / file).exists() for file in files), name


def test_a_corpus_format(tmp_path, monkeypatch, actors_in_process):
    """Lines `question = answer`."""

    def rows(uri, reading, report):
        for at, line in raw.read_lines(uri, reading):
            report.records += 1
            question, equals, answer = line.partition(" = ")
            if not equals:
                report.malformed.add("no equals sign", uri, at, line)
                continue
            yield {
                "example_id": f"line-{at}", "group_id": question, "context": [question],
                "response": answer, "candidates": None, "label": None, "source": "equations",
                "split": split_by_name_or_group("all", question),
            }  # fmt: skip

    def prepare(draft, files, options, reading, privacy):
        return file_tasks.prepare(draft, files, rows, EXAMPLE, reading, privacy, "equations")

    monkeypatch.setitem(prepare_corpus.FORMATS, "equations", prepare)
    lines = [f"what is {n} ? = {n}" for n in range(300)]
    (tmp_path / "sums.txt").write_text("\n".join([*lines, "what ?"]) + "\n")
    done = prepare_corpus.run(
        prepare_corpus.Config(
            format="equations", input=(str(tmp_path / "sums.txt"),), output=str(tmp_path / "out")
        )  # type: ignore[arg-type]
    )
    corpus = open_artifact(done["output"], "corpus")
    assert corpus.counts["examples"] == 300 and corpus.rows("train/") > 200
    assert done["dropped"] == {"no equals sign": 1}
    table = pa.concat_tables(
        pq.read_table(file, partitioning=None) for file in corpus.files(suffix=".parquet")
    )
    found = {(row["context"][0], row["response"]) for row in table.to_pylist()}
    assert found == {tuple(line.split(" = ")) for line in lines}


def test_an_architecture(tiny, tmp_path, monkeypatch):
    """A bi-encoder whose contexts are the sum of their token outputs."""

    @dataclass(frozen=True, kw_only=True)
    class SumConfig(settings.DualConfig):
        architecture: Literal["sum"] = "sum"

        @property
        def vectors_per_context(self) -> int:
            return 1

    class SumEncoder(BiEncoder):
        def context_vectors(self, hidden_BTD, mask_BT):
            summed_BD = (hidden_BTD * mask_BT[:, :, None]).sum(dim=1)
            return summed_BD[:, None], mask_BT.new_ones(len(mask_BT), 1)

    monkeypatch.setitem(settings._KINDS.kinds, "sum", SumConfig)
    monkeypatch.setitem(ranker.NETWORKS, SumConfig, SumEncoder)
    made, mean = tiny.ranker(architecture="sum"), tiny.ranker(architecture="bi", reduction="mean")
    made.save(tmp_path / "model")
    loaded = load_ranker(tmp_path / "model")
    assert loaded.config == SumConfig(max_context_tokens=24, max_candidate_tokens=12)
    contexts, texts = [["w1 w2 w3"], ["w4"]], ["w5 w6", "w7"]
    vectors_BMD, mask_BM = inference.context_vectors(loaded, contexts)
    mean_BMD, _ = inference.context_vectors(mean, contexts)
    tokens_B = torch.tensor([len(row) for row in mean.context_rows(contexts)])
    torch.testing.assert_close(vectors_BMD, mean_BMD * tokens_B[:, None, None])
    scores_BC = loaded.dual.scores(vectors_BMD, mask_BM, inference.candidate_vectors(loaded, texts))
    assert scores_BC.shape == (2, 2)


def test_a_loss(tiny, monkeypatch):
    """The mean absolute difference of the scores."""

    def absolute(student_BC, teacher_BC, temperature):
        return (student_BC - teacher_BC).abs().mean() / temperature

    monkeypatch.setitem(losses.TEACHING, "absolute", absolute)
    network = tiny.ranker(architecture="cross").cross
    distill = Distillation(loss="absolute", weight=0.5, temperature=2.0)  # type: ignore[arg-type]
    plain, taught = (
        PairModule(network),
        PairModule(network, FinetuneConfig(distill=distill)),
    )

    @dataclass
    class Batch:
        key_BC = torch.tensor([[1, 2, 3]])
        teacher_BC = torch.tensor([[3.0, 1.0, 0.0]])
        guide = None

    scores_BC = torch.tensor([[2.0, 1.0, 0.5]], requires_grad=True)
    loss, shown = taught.loss((scores_BC,), Batch())
    assert shown["distill_loss"].item() == pytest.approx(0.5 * (1 + 0 + 0.5) / 3 / 2)
    without, _ = plain.loss((scores_BC,), Batch())
    assert (loss - without).item() == pytest.approx(shown["distill_loss"].item())
    loss.backward()
    assert scores_BC.grad is not None


def test_a_search_method(tmp_path, publish_pool, monkeypatch):
    """The rows whose ids come first: seldom the best, which a certified search puts right."""
    rng = np.random.default_rng(0)
    vectors_ND = rng.standard_normal((300, 8)).astype(np.float32)
    ids = [f"{n:03}" for n in range(300)]
    pool = Pool.open(publish_pool(tmp_path / "p" / "v-1", ids, vectors_ND).uri)

    monkeypatch.setitem(exact.PREFILTERS, "first", lambda pool, vectors_MD, top_k: np.arange(20))
    query_MD = rng.standard_normal((1, 8)).astype(np.float32)
    products_N = vectors_ND @ query_MD[0]
    found = search(pool, query_MD, 3, method="first")  # type: ignore[arg-type]
    assert found.ids == [ids[at] for at in np.argsort(-products_N[:20])[:3]]
    assert not found.certified
    proved = search(pool, query_MD, 3, method="first", certify=True)  # type: ignore[arg-type]
    assert proved.ids == [ids[at] for at in np.argsort(-products_N)[:3]] and proved.certified

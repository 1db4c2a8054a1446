"""`jobs.benchmark embed --only length`: the time of a text by its length, without articles or peers."""

from __future__ import annotations

import json

import pytest
import torch

from jobs.benchmarks import pictures, sequence_length
from pipeline.models import inference
from pipeline.models.shape import Shape
from pipeline.models.tokens import Tokenizer
from pipeline.models.transformer import Encoder


@pytest.fixture
def encoder(tiny_ranker, tmp_path):
    """`encoder(positions)`: as narrow as it can be."""
    tokenizer = Tokenizer.load(tiny_ranker("bi").local() / "context_encoder")
    places = {"pad": tokenizer.pad, "cls": tokenizer.cls, "sep": tokenizer.sep}

    def make(positions):
        shape = Shape(layers=1, width=8, heads=1, positions=positions)
        Encoder.new(shape, len(tokenizer), places).save(tmp_path / "encoder")
        tokenizer.save(tmp_path / "encoder")
        return tmp_path / "encoder"

    return make


@pytest.fixture
def measure(run_job_here, tmp_path, monkeypatch):
    """`measure(encoder)`: the job on the CPU with 1,024 tokens of each length."""
    monkeypatch.setattr(sequence_length, "_TOKENS_PER_THREAD", {"small": 1024})
    monkeypatch.setattr(sequence_length, "best_device", lambda: torch.device("cpu"))

    def run(encoder):
        return run_job_here(
            "benchmark", "embed", "--only", "length", "--encoder", encoder, "--work", tmp_path / "work",
            "--data", tmp_path / "no-articles", "--json", tmp_path / "rows.json",
        )  # fmt: skip

    return run


def test_every_length_has_the_same_tokens_and_no_padding(measure, encoder, tmp_path, monkeypatch):
    encoded = []
    forward = Encoder.forward

    def watched(self, tokens):
        encoded.append(tokens)
        return forward(self, tokens)

    monkeypatch.setattr(Encoder, "forward", watched)
    done = measure(encoder(512))
    assert done.code == 0, done.stderr
    [row] = json.loads((tmp_path / "rows.json").read_text())
    assert row["row"] == "embed.by_length"
    points = row["detail"]["curve"]["points"]
    assert [length for length, _ in points] == [32, 64, 128, 256, 512]
    assert row["ours"] == points[-1][1] > 0
    assert all(
        row["detail"]["tokens/s"][str(n)] == pytest.approx(1e3 * n / ms, abs=1) for n, ms in points
    )
    tokens_by_length = dict.fromkeys([32, 64, 128, 256, 512], 0)
    for tokens in encoded:
        assert tokens.mask_BT.all()
        tokens_by_length[tokens.ids_BT.shape[1]] += tokens.ids_BT.numel()
        special = tokens.ids_BT < 5  # the tiny tokenizer's first five
        assert special.sum(1).tolist() == [2] * len(tokens.ids_BT)  # [CLS] and [SEP]
        assert special[:, [0, -1]].all()
    passes = 3  # the first, and two that count
    assert set(tokens_by_length.values()) == {passes * 1024 * torch.get_num_threads()}


def test_the_fastest_round_counts(measure, encoder, tmp_path, monkeypatch):
    """On a clock that each pass moves: a text of T tokens takes T² µs, in the second round twice that."""
    clock, passes = [0.0], []

    def row_vectors(ranker, rows):
        passes.append(len(rows[0]))
        slower = 2 if passes.count(len(rows[0])) == 3 else 1
        clock[0] += slower * 1e-6 * sum(len(row) ** 2 for row in rows)
        return torch.zeros(len(rows), 8)

    monkeypatch.setattr(inference, "row_vectors", row_vectors)
    monkeypatch.setattr("torch.utils.benchmark.timer", lambda: clock[0])
    assert measure(encoder(300)).code == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    [curve] = pictures.curves(rows)
    assert [n for n, _ in curve.points] == [32, 64, 128, 256]  # as far as the positions go
    assert [ms for _, ms in curve.points] == pytest.approx([n**2 / 1e3 for n, _ in curve.points])
    assert curve.slope == pytest.approx(2)
    assert rows[0]["unit"] == "ms a text of 256 tokens"
    assert passes == [32, 64, 128, 256] * 3  # in turn


def test_an_encoder_for_one_length_is_refused(measure, encoder):
    assert "allowed: one of 64 positions or more" in measure(encoder(63)).refusal


def test_a_part_that_there_is_not_is_refused(run_job_here, tmp_path):
    done = run_job_here("benchmark", "embed", "--only", "lengths", "--work", tmp_path)
    assert "only: 'lengths' is not allowed; allowed: rate, night, length, plan" in done.refusal

"""What people read: the table, the plot, the errors."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from PIL import Image

from pipeline.evaluation import report
from pipeline.evaluation.questions import Question, Questions
from pipeline.evaluation.ranking import Latency, rank
from pipeline.evaluation.results import ScorerResult
from pipeline.evaluation.significance import Comparison


def result(name="poly", value=0.5, ranking=None, latency=None) -> ScorerResult:
    metrics = {"R@1/20": value, "MRR": value + 0.1}
    intervals = {metric: (n - 0.02, n + 0.01) for metric, n in metrics.items()}
    return ScorerResult(name, ranking, metrics, intervals, latency)


ROWS = [
    result("chance", 0.05),
    result("bi", 0.6, latency=Latency(12.345, 1234.5, 50, "CPU, 2 threads")),
    result("poly", 0.62, latency=Latency(0.5, 99.96, 50, "NVIDIA H200")),
]
PAIR = Comparison("poly", "bi", 0.02, (-0.001, 0.041), 0.0123)


def test_the_table_has_a_row_for_each_scorer_and_for_every_pair():
    assert report.markdown(ROWS, [PAIR]).splitlines() == [
        "| scorer | R@1/20 | 95 % of R@1/20 | MRR | ms (p95) |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| chance | 0.050 | 0.030 to 0.060 | 0.150 |  |",
        "| bi | 0.600 | 0.580 to 0.610 | 0.700 | 12.3 (1,234) |",
        "| poly | 0.620 | 0.600 to 0.630 | 0.720 | 0.5 (100) |",
        "",
        "| R@1: first - second | difference | 95 % | p |",
        "| --- | ---: | ---: | ---: |",
        "| poly - bi | +0.020 | -0.001 to +0.041 | 0.012 |",
        "",
        "ms: one question alone, median (95th percentile), on CPU, 2 threads (bi); NVIDIA H200 (poly); "
        "all but cross-encoders have their candidates' vectors ready",
    ]


def test_without_times_there_is_no_column_for_them():
    assert "ms" not in report.markdown(ROWS[:1], [])
    assert report.markdown(ROWS[:1], []).count("\n") == 2


def test_json_holds_all_of_it():
    found = json.loads(json.dumps(report.as_json(ROWS, [PAIR])))
    assert found["table"]["bi"] == {"R@1/20": 0.6, "MRR": 0.7}
    assert found["intervals"]["bi"]["R@1/20"] == [0.58, 0.61]
    assert found["latency_ms"]["poly"] == {
        "median": 0.5, "p95": 99.96, "queries": 50, "device": "NVIDIA H200"
    }  # fmt: skip
    assert set(found["latency_ms"]) == {"bi", "poly"}
    assert found["comparisons"] == [
        {
            "first": "poly",
            "second": "bi",
            "difference": 0.02,
            "interval": [-0.001, 0.041],
            "p": 0.0123,
        }
    ]


def test_the_plot_is_a_picture_with_something_in_it():
    """The scorers are points of colour; chance, whose time nobody measured, is none."""
    with Image.open(io.BytesIO(report.plot(ROWS))) as image:
        assert image.format == "PNG"
        assert min(image.size) > 500
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
    with Image.open(io.BytesIO(report.plot(ROWS[:1]))) as image:
        without = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
    coloured = {max(c) - min(c) > 100 for c in without}
    assert coloured == {False}
    assert {(31, 119, 180), (255, 127, 14)} <= colours


# Errors


@pytest.fixture
def ranked(fixed):
    asked = Questions.of(
        [
            Question("fine", ["hi"], ["good", "bad"], 0),
            Question("worse", ["who\nis there?", "x" * 500], ["r1", "w1"], 0),
            Question("worst", [f"turn {n}" for n in range(9)], ["w2", "y " * 400], 1),
        ],
        [f"shared {n}" for n in range(6)],
    )
    scores = {
        "fine": [9, 8, 7, 6, 5, 4, 3, 2],
        "worse": [4, 5, 0, 1, 2, 3, 6, 7],
        "worst": [7, 0, 1, 2, 3, 4, 5, 6],
    }
    return asked, result("bi", ranking=rank(fixed(scores), asked))


def test_the_worst_ranked_come_first_with_what_stood_before_them(ranked):
    asked, found = ranked
    worst, worse = report.worst_answers(found, asked, 10)
    assert (worst["scorer"], worst["example_id"], worst["rank"]) == ("bi", "worst", 8)
    assert [best["text"] for best in worst["top"]] == [
        "w2", "shared 5", "shared 4", "shared 3", "shared 2"
    ]  # fmt: skip
    assert [best["score"] for best in worst["top"]] == [7, 6, 5, 4, 3]
    assert (worst["score"], worst["candidates"]) == (0, 8)
    assert worst["context"] == ["…", *(f"turn {n}" for n in range(3, 9))]
    assert (worse["example_id"], worse["rank"]) == ("worse", 4)
    assert [best["right"] for best in worse["top"]] == [False, False, False, True, False]
    assert [r["example_id"] for r in report.worst_answers(found, asked, 1)] == ["worst"]


def test_texts_are_cut_for_reading_and_lines_are_json(ranked):
    asked, found = ranked
    records = report.worst_answers(found, asked, 10)
    assert len(records[0]["response"]) == 300
    assert records[0]["response"].endswith("…")
    assert records[1]["context"][0] == "who is there?"
    assert len(records[1]["context"][1]) == 300
    lines = report.json_lines([records, records[:1]]).decode().splitlines()
    assert [json.loads(line) for line in lines] == [*records, records[0]]


def test_a_record_can_be_read(ranked):
    asked, found = ranked
    worst, worse = map(report.answer_text, report.worst_answers(found, asked, 10))
    assert worst.splitlines()[0] == "bi: worst, the right one at 8 of 8"
    assert worst.splitlines()[-1].startswith("  *    0.000  y y y")
    assert worse.count("*") == 1
    assert "  *    4.000  r1" in worse.splitlines()
    assert max(map(len, [*worst.splitlines(), *worse.splitlines()])) < 120
    assert np.all([ord(c) != 10 for line in worst.splitlines() for c in line])

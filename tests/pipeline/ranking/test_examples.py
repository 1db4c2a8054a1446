"""The examples of the docstrings and of `pipeline/API.md`, run as they stand."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from pipeline.ranking import ranker

PAGE = Path(ranker.__file__).parents[1] / "API.md"
# `module=False`: the decorator of some calls is of another module.
_FOUND = doctest.DocTestFinder().find(
    ranker.Ranker, f"{ranker.__name__}.Ranker", module=False, globs=vars(ranker)
)
DOCSTRINGS = [test for test in _FOUND if test.examples]


def failures(test: doctest.DocTest) -> str:
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.REPORT_ONLY_FIRST_FAILURE)
    runner.run(test, out=said.append)
    return "".join(said)


@pytest.mark.parametrize("test", DOCSTRINGS, ids=lambda test: test.name.rpartition("ranking.")[2])
def test_docstrings(home: Path, test: doctest.DocTest):
    assert failures(test) == ""


def test_every_call_has_an_example():
    calls = ["load", "rank", "score", "encode_contexts", "encode_candidates", "explain", "search"]
    wanted = {f"pipeline.ranking.ranker.Ranker.{name}" for name in calls}
    assert wanted <= {test.name for test in DOCSTRINGS}


def test_page(home: Path):
    test = doctest.DocTestParser().get_doctest(PAGE.read_text(), {}, PAGE.name, str(PAGE), 0)
    assert len(test.examples) > 10
    assert failures(test) == ""

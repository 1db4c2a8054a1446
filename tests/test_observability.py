"""The dashboard and the alerts ask for numbers that the code counts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
CODE = [ROOT / "serve" / "metrics.py", ROOT / "pipeline" / "engine" / "report.py"]
COUNTED = {name for file in CODE for name in re.findall(r'"(polyrank_\w+)"', file.read_text())}
DASHBOARD = json.loads((ROOT / "kuberay" / "grafana.json").read_text())
ALERTS = yaml.safe_load((ROOT / "kuberay" / "alerts.yaml").read_text())
RULES = [rule for group in ALERTS["spec"]["groups"] for rule in group["rules"]]
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def asked(query: str) -> set[str]:
    return {name.removesuffix("_bucket") for name in re.findall(r"ray_(polyrank_\w+)", query)}


@pytest.mark.parametrize("query", [*QUERIES, *(rule["expr"] for rule in RULES)])
def test_a_query_names_what_is_counted(query):
    assert asked(query) and asked(query) <= COUNTED
    assert query.count("(") == query.count(")")


def test_every_number_but_the_sizes_of_batches_is_on_the_dashboard():
    shown = set().union(*map(asked, QUERIES))
    sizes = {"polyrank_batch_rows", "polyrank_units_total", "polyrank_candidates_total"}
    assert COUNTED - shown == sizes


def test_a_service_is_silent_only_if_none_of_its_routes_computes():
    """`answers_total` counts /rank alone."""
    (query,) = (rule["expr"] for rule in RULES if rule["alert"] == "PolyrankServiceIsSilent")
    assert asked(query) == {"polyrank_units_total"}
    # Without a replica nobody sends the number: the comparison with 0 would have no value, and be no alert.
    assert query.startswith("(sum(rate(ray_polyrank_units_total[10m])) or vector(0)) == 0 and ")


def test_every_alert_says_what_to_do():
    for rule in RULES:
        assert rule["annotations"]["summary"] and rule["annotations"]["action"], rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
    panels = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert len({(place["x"], place["y"]) for place in panels}) == len(panels)

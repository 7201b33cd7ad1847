"""The dashboard shows the metrics there are: each of them, and no others."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

from pipeline.monitoring import metrics

DASHBOARD = json.loads((Path(__file__).parents[2] / "infra/grafana/skipdecode.json").read_text())
WIDTH = 24  # columns of the grid
PROMETHEUS_TAGS = {"instance"}  # that it gives to all it scrapes: of two nodes' replicas the numbers may be the same
EXPORTED = {f"ray_{metric.name}": metric for metric in metrics.ALL}


def targets() -> list[tuple[str, str]]:
    """(expression, legend) of every curve."""
    panels: list[dict[str, Any]] = DASHBOARD["panels"]
    return [(target["expr"], target["legendFormat"]) for panel in panels for target in panel["targets"]]


def test_every_metric_is_shown_and_every_query_names_one_that_exists() -> None:
    named = {name for expression, _ in targets() for name in re.findall(r"ray_\w+", expression)}
    assert named == set(EXPORTED)
    for variable in DASHBOARD["templating"]["list"]:
        assert set(re.findall(r"ray_\w+", json.dumps(variable["query"]))) <= set(EXPORTED)


def test_rates_are_taken_of_counters_alone() -> None:
    for expression, _ in targets():
        assert all(name.endswith("_total") for name in re.findall(r"rate\((ray_\w+)", expression))


def test_curves_are_chosen_by_run_and_labelled_by_tags_that_the_metric_has() -> None:
    for expression, legend in targets():
        names = re.findall(r"ray_\w+", expression)
        assert expression.count('{run=~"$run"}') == len(names)
        assert expression.count("(") == expression.count(")")
        for tag in re.findall(r"\{\{(\w+)\}\}", legend):
            assert tag in PROMETHEUS_TAGS or all(tag in EXPORTED[name].tags for name in names)


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] + place["w"] <= WIDTH for place in places)
    for a, b in combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        below = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or below, (a, b)

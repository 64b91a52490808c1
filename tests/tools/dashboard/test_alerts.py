"""Laws of the documented alerts, Grafana board and scrape configurations."""

import json
import re
from typing import Any

import pytest
import yaml

from common.repository import ROOT
from tests.syntax_trees import text_of
from tools.dashboard.prometheus import METRICS, STEP_PREFIX, step_name

DAEMONS = ROOT / "docs" / "daemons"
METRIC = re.compile(r"\b((?:longstride|envhub)_\w+)(?:\{([^}]*)\})?")
HUB_LABELS = {"address", "reason", "env", "cause", "process"}


def _load(name: str) -> Any:
    return yaml.safe_load((DAEMONS / name).read_text(encoding="utf-8"))


RULES = [rule for group in _load("prometheus-alerts.yaml")["groups"] for rule in group["rules"]]
BOARD = json.loads((DAEMONS / "grafana-dashboard.json").read_text(encoding="utf-8"))


def _step_names() -> set[str]:
    """Return the exported names of the metrics that the learner's sources name."""
    texts = [text_of(path) for path in (ROOT / "learner").rglob("*.py")]
    keys = {key for text in texts for key in re.findall(r'"([a-z_]+/[a-z0-9_]+)"', text)}
    return {step_name(key) for key in keys}


def _exists(name: str) -> bool:
    if name.startswith("envhub_"):
        counted = name.removesuffix("_total")
        return f'"{counted}"' in text_of(ROOT / "envhub" / "http" / "routes.py")
    return name in METRICS or (name.startswith(STEP_PREFIX) and name in _step_names())


def _check(expression: str) -> list[str]:
    """Return the names of the metrics in an expression after a check of names and labels."""
    used = METRIC.findall(expression)
    assert used
    for name, selectors in used:
        assert _exists(name), name
        declared = METRICS.get(name)
        labels = {"run", "key", *(declared.labels if declared else HUB_LABELS)}
        assert {*re.findall(r"(\w+)\s*=", selectors)} <= labels
    return [name for name, _ in used]


def _labels_of(names: list[str]) -> set[str]:
    return {label for name in names if name in METRICS for label in METRICS[name].labels}


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_alert_uses_metrics_and_labels_that_exist(rule: dict[str, Any]) -> None:
    names = _check(rule["expr"])
    shown = {*re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])}
    assert shown <= {"run", "instance", *_labels_of(names), *HUB_LABELS}


@pytest.mark.parametrize(
    "panel", BOARD["panels"], ids=[panel["title"] for panel in BOARD["panels"]]
)
def test_panel_uses_metrics_and_labels_that_exist(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        names = _check(target["expr"])
        shown = {*re.findall(r"{{(\w+)}}", target["legendFormat"])}
        assert shown <= {"run", *_labels_of(names)}


def test_board_lists_the_runs_of_a_metric_that_exists() -> None:
    queries = [item["definition"] for item in BOARD["templating"]["list"] if "definition" in item]
    assert all(_check(query) for query in queries)
    corners = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in BOARD["panels"]]
    assert len({*corners}) == len(corners)


def test_unknown_metric_is_found() -> None:
    assert not _exists("longstride_run_ups")
    assert not _exists("longstride_step_offpolicy_lag_means")
    assert not _exists("envhub_nothing_total")


def test_scrape_configurations_read_the_token_file() -> None:
    collector = _load("otel-collector.yaml")["receivers"]["prometheus"]["config"]
    for scrapes in (_load("prometheus.yaml")["scrape_configs"], collector["scrape_configs"]):
        files = [each["authorization"]["credentials_file"] for each in scrapes]
        assert files[0].endswith("/keys/metrics_token")

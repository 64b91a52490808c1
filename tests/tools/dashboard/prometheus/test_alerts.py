"""Laws of the documented alerts and scrape configurations."""

import re
from typing import Any

import pytest
import yaml

from common.repository import ROOT
from tests.syntax_trees import text_of
from tools.dashboard.prometheus.table import METRICS, STEP_PREFIX, step_name

DAEMONS = ROOT / "docs" / "daemons"
METRIC = re.compile(r"\b((?:longstride|envhub)_\w+)(?:\{([^}]*)\})?")
HUB_LABELS = {"address", "reason", "env", "cause", "process"}


def _load(name: str) -> Any:
    return yaml.safe_load((DAEMONS / name).read_text(encoding="utf-8"))


RULES = [rule for group in _load("prometheus-alerts.yaml")["groups"] for rule in group["rules"]]


def _step_names() -> set[str]:
    """Return the exported names of the metrics that the learner's sources name."""
    texts = [text_of(path) for path in (ROOT / "learner").rglob("*.py")]
    keys = {key for text in texts for key in re.findall(r'"([a-z_]+/[a-z0-9_]+)"', text)}
    return {step_name(key) for key in keys}


def _exists(name: str) -> bool:
    if name.startswith("envhub_"):
        counted = name.removesuffix("_total")
        return f'"{counted}"' in text_of(ROOT / "envhub" / "http" / "metrics.py")
    return name in METRICS or (name.startswith(STEP_PREFIX) and name in _step_names())


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_alert_uses_metrics_and_labels_that_exist(rule: dict[str, Any]) -> None:
    used = METRIC.findall(rule["expr"])
    assert used
    for name, selectors in used:
        assert _exists(name), name
        declared = METRICS.get(name)
        labels = {"run", "key", *(declared.labels if declared else HUB_LABELS)}
        assert {*re.findall(r"(\w+)\s*=", selectors)} <= labels
    shown = {*re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])}
    metrics = [METRICS[name] for name, _ in used if name in METRICS]
    known = {"run", "instance", *(each for m in metrics for each in m.labels), *HUB_LABELS}
    assert shown <= known


def test_unknown_metric_is_found() -> None:
    assert not _exists("longstride_run_ups")
    assert not _exists("longstride_step_offpolicy_lag_means")
    assert not _exists("envhub_nothing_total")


def test_scrape_configurations_read_the_token_file() -> None:
    collector = _load("otel-collector.yaml")["receivers"]["prometheus"]["config"]
    for scrapes in (_load("prometheus.yaml")["scrape_configs"], collector["scrape_configs"]):
        files = [each["authorization"]["credentials_file"] for each in scrapes]
        assert files[0].endswith("/keys/metrics_token")

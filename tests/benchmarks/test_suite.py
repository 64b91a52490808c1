"""Laws of a suite: rounds, bounds, errors of checks, the last line, and the JSON."""

import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.suite import Suite
from common.errors import WeightSyncError


def make_suite() -> Suite:
    return Suite(out=io.StringIO())


def written(suite: Suite) -> str:
    assert isinstance(suite.out, io.StringIO)
    return suite.out.getvalue()


@pytest.mark.parametrize(
    ("write", "code", "said"),
    [
        (lambda suite: suite.figure("a", 1.0, "s"), 0, "measured, nothing was promised"),
        (lambda suite: suite.at_most("a", 2.0, "s", 2.0), 0, "every promise kept"),
        (lambda suite: suite.at_most("a", 2.1, "s", 2.0), 1, "NOT KEPT: a"),
        (lambda suite: suite.at_least("a", 2.0, "s", 2.0), 0, "every promise kept"),
        (lambda suite: suite.at_least("a", 1.9, "s", 2.0), 1, "NOT KEPT: a"),
        (lambda suite: suite.at_most("a", math.nan, "s", 2.0), 1, "NOT KEPT: a"),
        (lambda suite: suite.at_least("a", math.nan, "s", 2.0), 1, "NOT KEPT: a"),
        (lambda suite: suite.fail("a", "not measured"), 1, "NOT KEPT: a"),
        (
            lambda suite: suite.note("a", "no device"),
            0,
            "measured, nothing was promised; 1 not measured",
        ),
    ],
)
def test_last_line_summarises_the_measured_promises(
    write: Callable[[Suite], None], code: int, said: str
) -> None:
    suite = make_suite()
    write(suite)
    assert suite.finish() == code
    assert written(suite).splitlines()[-1] == said


def test_figure_with_a_reference_is_judged_by_their_ratio() -> None:
    suite = make_suite()
    suite.compare("weights", 0.9, 1.0, "GB/s", against="raw collective", at_least=0.8)
    suite.compare("weights late", 0.7, 1.0, "GB/s", against="raw collective", at_least=0.8)
    suite.compare("pause", 0.5, 1.0, "s", against="transfer", at_most=0.35)
    suite.compare("idle", 0.5, 0.0, "s", against="nothing", at_most=1.0)
    suite.compare("two bounds", 3.0, 1.0, "s", against="other", at_least=0.5, at_most=2.0)
    assert [row.ratio for row in suite.rows[:3]] == [0.9, 0.7, 0.5]
    assert suite.failed == ["weights late", "pause", "idle", "two bounds"]
    assert "0.9 x raw collective (1 GB/s)" in written(suite).splitlines()[0]


def test_figures_are_saved_with_their_machine(tmp_path: Path) -> None:
    suite = make_suite()
    suite.compare("weights", 0.9, 1.0, "GB/s", against="raw collective", at_least=0.8)
    suite.figure("nothing", math.nan, "s")
    suite.note("engine", "vllm is not installed")
    suite.finish()
    path = tmp_path / "new" / "figures.json"
    suite.save(path, name="weights", product="longstride 1.0")
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert saved["rows"][0] == {
        **{"name": "weights", "value": 0.9, "unit": "GB/s", "note": ""},
        **{"against": "raw collective", "limit": 1.0, "ratio": 0.9},
        **{"bound": "at least 0.8", "kept": True},
    }
    assert saved["rows"][1]["value"] is None
    assert saved["notes"] == [{"name": "engine", "text": "vllm is not installed"}]
    assert (saved["suite"], saved["seed"], saved["failed"]) == ("weights", 0, [])
    assert saved["versions"]["product"] == "longstride 1.0"
    assert saved["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert saved["machine"]["cores"] >= 1
    assert saved["machine"]["memory_bytes"] > 0


def test_suite_continues_after_check_that_raises() -> None:
    suite = make_suite()
    with suite.check("weights") as folder:
        (folder / "log").touch()
        raise WeightSyncError("nobody\nanswers")
    assert not folder.exists()
    with suite.check("speed"):
        suite.at_least("speed", 3.0, "GB/s", 2.0)
    assert suite.finish() == 1
    text = written(suite)
    assert "FAIL  weights: WeightSyncError: nobody answers\n" in text
    assert "kept  speed" in text

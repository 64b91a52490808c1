"""Laws of a table of figures: bounds, the last line, and the JSON."""

import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.table import BenchTable
from common.errors import WeightSyncError


def make_table() -> BenchTable:
    return BenchTable(out=io.StringIO())


def written(table: BenchTable) -> str:
    assert isinstance(table.out, io.StringIO)
    return table.out.getvalue()


@pytest.mark.parametrize(
    ("write", "code", "said"),
    [
        (lambda table: table.figure("a", 1.0, "s"), 0, "measured, nothing was promised"),
        (lambda table: table.at_most("a", 2.0, "s", 2.0), 0, "every promise kept"),
        (lambda table: table.at_most("a", 2.1, "s", 2.0), 1, "NOT KEPT: a"),
        (lambda table: table.at_least("a", 2.0, "s", 2.0), 0, "every promise kept"),
        (lambda table: table.at_least("a", 1.9, "s", 2.0), 1, "NOT KEPT: a"),
        (lambda table: table.at_most("a", math.nan, "s", 2.0), 1, "NOT KEPT: a"),
        (lambda table: table.at_least("a", math.nan, "s", 2.0), 1, "NOT KEPT: a"),
        (lambda table: table.fail("a", "not measured"), 1, "NOT KEPT: a"),
    ],
)
def test_last_line_summarises_the_measured_promises(
    write: Callable[[BenchTable], None], code: int, said: str
) -> None:
    table = make_table()
    write(table)
    assert table.finish() == code
    assert written(table).splitlines()[-1] == said


def test_figure_with_a_reference_is_judged_by_their_ratio() -> None:
    table = make_table()
    table.compare("weights", 0.9, 1.0, "GB/s", against="raw collective", at_least=0.8)
    table.compare("weights late", 0.7, 1.0, "GB/s", against="raw collective", at_least=0.8)
    table.compare("pause", 0.5, 1.0, "s", against="transfer", at_most=0.35)
    table.compare("idle", 0.5, 0.0, "s", against="nothing", at_most=1.0)
    table.compare("two bounds", 3.0, 1.0, "s", against="other", at_least=0.5, at_most=2.0)
    assert [row.ratio for row in table.rows[:3]] == [0.9, 0.7, 0.5]
    assert table.failed == ["weights late", "pause", "idle", "two bounds"]
    assert "0.9 x raw collective (1 GB/s)" in written(table).splitlines()[0]


def test_figures_are_saved_with_their_machine(tmp_path: Path) -> None:
    table = make_table()
    table.compare("weights", 0.9, 1.0, "GB/s", against="raw collective", at_least=0.8)
    table.figure("nothing", math.nan, "s")
    table.note("engine", "vllm is not installed")
    table.finish()
    path = tmp_path / "new" / "figures.json"
    table.save(path, suite="weights", product="longstride 1.0")
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


def test_table_continues_after_check_that_raises() -> None:
    table = make_table()

    def broken() -> None:
        raise WeightSyncError("nobody\nanswers")

    table.attempt("weights", broken)
    table.attempt("speed", lambda: table.at_least("speed", 3.0, "GB/s", 2.0))
    assert table.finish() == 1
    text = written(table)
    assert "FAIL  weights: WeightSyncError: nobody answers\n" in text
    assert "kept  speed" in text

"""The suite of the long tail: rates by hand, and the promise in the simulator."""

import io
import json
from pathlib import Path

import pytest

from benchmarks.learner.tail import (
    BASE,
    GROUP_SIZE,
    SLOW_ENV,
    add_simulated,
    predict,
    trained_per_h,
)
from benchmarks.table import BenchTable
from common.config.load import load_config
from common.config.run_config import TrainMode


def test_rate_leaves_the_first_steps_out(tmp_path: Path) -> None:
    """Two steps of 100 s, then three of 10 s with 8, 8 and 5 groups: 21 groups in 30 s."""
    seconds, groups = [100.0, 200.0, 210.0, 220.0, 230.0], [8, 8, 8, 8, 5]
    lines = [
        {"step": i + 1, "time_s": at, "wait/batch_s": 1.0, "groups/trained": num}
        for i, (at, num) in enumerate(zip(seconds, groups, strict=True))
    ]
    lines.insert(3, {"step": 2, "eval/success": 0.5})
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    assert trained_per_h(tmp_path) == pytest.approx(3600.0 * GROUP_SIZE * 21 / 30.0)


def test_suite_runs_are_valid_and_use_the_slow_environment(repository: Path) -> None:
    cfg = load_config("quickstart", [*BASE, *SLOW_ENV], root=repository)
    assert cfg.envhub.envs == ["benchmarks.envhub.slow:make_spec"]
    assert cfg.envs.plugins["tail_factor"] == "10"
    assert [task.env for task in cfg.tasks] == ["slow"]


@pytest.mark.slow
@pytest.mark.long
def test_async_is_twice_as_fast_in_the_simulated_tail() -> None:
    out = io.StringIO()
    table = BenchTable(out=out)
    add_simulated(table)
    assert table.failed == []
    assert predict(TrainMode.ASYNC) == predict(TrainMode.ASYNC)

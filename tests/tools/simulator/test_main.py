"""The command writes a table and simulation.json, and refuses nonsense."""

import io
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from common.errors import ConfigError
from common.wire.messages import EndReason
from learner.journal.journal import JournalWriter
from tests.learner.builders import make_trajectory
from tests.tools.simulator.builders import make_simulated
from tools.simulator.config import SimulatorSection
from tools.simulator.main import Compared, advise, run
from tools.simulator.workload import SampledWorkload


def test_command_writes_table_ratio_and_json(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "simulation.json"
    cfg = make_simulated(mode="both", output=str(path), search=False)
    out = io.StringIO()
    assert run(cfg, out) == 0
    assert "steps per hour" in out.getvalue()
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [each["mode"] for each in found["predictions"]] == ["async", "sync"]
    assert f"async trains {found['async_over_sync']:.2f} x" in out.getvalue()
    assert found["settings"]["num_actors"] == 2


def test_command_is_repeatable_with_its_advice(tmp_path: Path) -> None:
    texts = []
    for _ in range(2):
        path = tmp_path / "simulation.json"
        out = io.StringIO()
        assert run(make_simulated(output=str(path)), out) == 0
        texts.append((out.getvalue(), path.read_text(encoding="utf-8")))
    assert texts[0] == texts[1]
    assert "recommended" in texts[0][0]


def test_command_without_tasks_is_refused() -> None:
    with pytest.raises(ConfigError, match="tasks"):
        run(replace(make_simulated(), tasks=[]), io.StringIO())


def _write_run(folder: Path, num_groups: int) -> None:
    """Groups of four of which half succeed, an episode 2 s; a step every 6 s, 2 s of it waiting."""
    journal = JournalWriter(folder / "journal")
    for number in range(num_groups):
        for member in range(4):
            each = make_trajectory([1, 2, 3], [0, 1, 1], group_id=f"g{number}", member=member)
            journal.append(replace(each, wall_s=2.0, reward=float(member % 2)))
    journal.close()
    lines = [
        {
            "step": step,
            "time_s": 6.0 * step,
            "wait/batch_s": 2.0,
            "offpolicy/lag_mean": 1.0,
            "train/num_tokens": 24.0,
            "train/num_sampled_tokens": 16.0,
        }
        for step in range(1, 13)
    ]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )


def test_run_is_drawn_from_and_compared_with(tmp_path: Path) -> None:
    """Steps of 4 s without waiting; episodes are quick, so the simulator does not wait."""
    _write_run(tmp_path, 24)
    path = tmp_path / "simulation.json"
    cfg = make_simulated(
        output=str(path), search=False, from_run=str(tmp_path), compare=str(tmp_path)
    )
    out = io.StringIO()
    assert run(cfg, out) == 0
    rate, lag, wait = json.loads(path.read_text(encoding="utf-8"))["comparison"]
    assert rate["measured"] == pytest.approx(600.0)
    assert rate["predicted"] == pytest.approx(900.0, rel=0.01)
    assert rate["relative_error"] == pytest.approx(0.5, abs=0.02)
    assert (lag["name"], wait["name"]) == ("lag_mean", "learner_wait_frac")
    assert wait["predicted"] == pytest.approx(0.0, abs=0.01)
    assert "error" in out.getvalue()


def test_run_without_training_episodes_is_refused(tmp_path: Path) -> None:
    _write_run(tmp_path, 0)
    with pytest.raises(ConfigError, match="no training episode"):
        run(make_simulated(from_run=str(tmp_path)), io.StringIO())


def test_advice_limits_actors_to_learners_speed() -> None:
    cfg = make_simulated(num_actors=16, turn_s=0.1, env_s=0.0, step_s=20.0, tail_frac=0.0)
    advice = advise(cfg, SampledWorkload(cfg.simulator))
    assert advice.num_actors == 1
    assert advice.max_ahead_steps == 1
    assert advice.group_size == 4
    assert advice.groups_per_step == 2


@pytest.mark.long
def test_advice_increases_steps_in_flight_for_long_episodes() -> None:
    cfg = make_simulated(num_actors=16, turn_s=5.0, step_s=1.0)
    advice = advise(cfg, SampledWorkload(cfg.simulator))
    assert advice.max_ahead_steps >= 4
    assert advice.max_lag_steps >= 4


def test_sampled_episodes_have_the_configured_tail_and_cut() -> None:
    cfg = SimulatorSection(turn_sigma=0.0, num_turns_sigma=0.0, tail_frac=0.02, env_s=0.0)
    workload, rng = SampledWorkload(cfg), Random(0)
    plays = workload.group(rng, horizon=20, stage=0, version=0, size=20_000)
    slow = sum(play.wall_s > 100 for play in plays)
    assert {round(play.wall_s) for play in plays} == {24, 240}
    assert slow / len(plays) == pytest.approx(0.02, abs=0.004)
    cut = workload.group(rng, horizon=5, stage=0, version=0, size=8)
    assert all(play.end_reason is EndReason.HORIZON and not play.is_success for play in cut)
    assert {play.num_turns for play in cut} == {5}


def test_relative_error_is_positive_above_reality() -> None:
    assert Compared(name="x", predicted=12.0, measured=10.0).relative_error == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("key", "value"),
    [("mode", "fast"), ("hours", -1.0), ("tail_frac", 1.0), ("success", 0.0), ("num_turns", 0.5)],
)
def test_bad_setting_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"simulator.{key}="):
        make_simulated(**{key: value})

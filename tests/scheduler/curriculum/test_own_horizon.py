"""Laws of a horizon that a function of the user chooses."""

import json
from pathlib import Path

import pytest

from common.config.horizon import HorizonSection
from common.config.load import load_config
from common.errors import ConfigError
from scheduler.curriculum.curriculum import UserHorizon
from scheduler.curriculum.success import StepSeen
from scheduler.curriculum.user_functions import HorizonFunction, check_user_functions
from scheduler.state import restore, save
from tests.in_process import carry_out

OWN = """
import numpy as np

def grow(progress, cfg):
    "One more after each solved step."
    progress.state["num"] = progress.state.get("num", 0) + 1
    solved = sum(step.num_solved == step.num_episodes for step in progress.steps)
    return min(progress.stages[0] + solved, progress.stages[-1])

def of_numpy(progress, cfg): return np.int64(progress.stages[-1])
def calls(progress, cfg): return progress.stages[0] + progress.state.setdefault("a", [1])[0]
def two_arguments_more(progress, cfg, a, b): return 4
def text(progress, cfg): return "4"
def half(progress, cfg): return 4.0
def flag(progress, cfg): return True
def far(progress, cfg): return 99
def later(progress, cfg): return 99 if progress.version else 4
def broken(progress, cfg): return progress.episodes
def unsaved(progress, cfg):
    progress.state["set"] = {1}
    return 4
def number_key(progress, cfg): return progress.state.setdefault(1, 4)
calls_so_far = []
def counting(progress, cfg):
    calls_so_far.append(1)
    return min(progress.stages[0] + len(calls_so_far) // 4, progress.stages[-1])
def pair(progress, cfg): return progress.state.setdefault("pair", (4, 5))[0]
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    """The path of a file with the user's functions."""
    path = tmp_path / "own_horizons.py"
    path.write_text(OWN, encoding="utf-8")
    return str(path)


def horizon_of(reference: str) -> UserHorizon:
    section = HorizonSection(kind=reference, stages=[4, 6])
    return UserHorizon(section.policy("maze"), "maze", function=HorizonFunction(reference, section))


def seen(version: int, num_solved: int) -> StepSeen:
    return StepSeen(
        version=version,
        num_episodes=4,
        num_solved=num_solved,
        num_truncated=0,
        entropy=1.0,
        ess_frac=1.0,
    )


def test_function_chooses_after_each_step(own: str) -> None:
    horizon = horizon_of(f"{own}:grow")
    assert horizon.stamp.horizon == 4
    stamps: list[tuple[int, int]] = []
    for version, num_solved in ((1, 3), (2, 4), (3, 4), (4, 4)):
        horizon.step(seen(version, num_solved))
        stamps.append((horizon.stamp.horizon, horizon.stamp.stage))
    assert stamps == [(4, 0), (5, 0), (6, 1), (6, 1)]


def test_whole_number_of_numpy_is_a_horizon(own: str) -> None:
    horizon = horizon_of(f"{own}:of_numpy").stamp.horizon
    assert (horizon, type(horizon)) == (6, int)


def test_resumed_horizon_equals_one_that_never_stopped(own: str) -> None:
    whole = horizon_of(f"{own}:grow")
    first = horizon_of(f"{own}:grow")
    steps = [seen(1, 4), seen(2, 1), seen(3, 4)]
    first.step(steps[0])
    resumed = horizon_of(f"{own}:grow")
    restore(resumed, json.loads(json.dumps(save(first))))
    assert resumed.stamp == first.stamp
    for step in steps[1:]:
        resumed.step(step)
    for step in steps:
        whole.step(step)
    assert (resumed.stamp, save(resumed)) == (whole.stamp, save(whole))
    assert json.loads(save(resumed)["function"]["state"]) == {"num": 4}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("two_arguments_more", r"is called with \(progress, cfg\)"),
        ("text", "returned '4' after step 0; expected a whole number from 4 to 6"),
        ("half", "returned 4.0 after step 0"),
        ("flag", "returned True"),
        ("far", "returned 99 after step 0"),
        ("later", "returned 99 after step 3"),
        ("broken", "AttributeError.*own_horizons.py, line 1"),
        ("unsaved", "cannot be saved as JSON"),
        ("number_key", "cannot be saved as JSON: .*a key that is no text"),
        ("pair", "cannot be saved as JSON: a tuple"),
        ("counting", "two calls with equal arguments returned "),
        ("missing", "has no function 'missing'; it has grow"),
    ],
)
def test_check_names_key_function_and_fault(own: str, name: str, text: str) -> None:
    cfg = load_config("smoke", [f"horizon.kind={own}:{name}", "horizon.stages=[4,6]"])
    with pytest.raises(ConfigError, match=text) as raised:
        check_user_functions(cfg)
    assert f"horizon.kind={own}:{name}" in str(raised.value)


@pytest.mark.parametrize("reference", ["no_such_module:f", "missing.py:f"])
def test_missing_module_is_named(reference: str) -> None:
    cfg = load_config("smoke", [f"horizon.kind={reference}", "horizon.stages=[4,6]"])
    with pytest.raises(ConfigError, match=reference.partition(":")[0]):
        check_user_functions(cfg)


def test_function_without_room_to_grow_is_refused(own: str) -> None:
    with pytest.raises(ConfigError, match="needs two or more stages"):
        load_config("smoke", [f"horizon.kind={own}:grow", "horizon.stages=[4]"])


@pytest.mark.slow
def test_dry_run_prints_the_function(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"horizon.kind={own}:grow", "horizon.stages=[4,6]"]
    done = carry_out(["--config", "smoke", *words, "--dry-run"], capsys)
    assert done.returncode == 0, done.stderr
    line = f"# objective: horizon.kind={own}:grow: One more after each solved step. (sha256 "
    assert line in done.stdout
    refused = carry_out(
        ["--config", "smoke", f"horizon.kind={own}:far", "horizon.stages=[4,6]", "--dry-run"],
        capsys,
    )
    assert refused.returncode == 2
    assert "returned 99" in refused.stderr

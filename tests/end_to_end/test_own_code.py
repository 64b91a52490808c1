"""Laws of a whole run whose horizon, items, filter, algorithm and trackers are the user's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import longstride
from tests.end_to_end.runs import REPOSITORY, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

OWN = """
def grow(progress, cfg):
    "One more turn after each step."
    return min(progress.stages[0] + progress.version, progress.stages[-1])


def sevens(draw, cfg):
    "Items whose number is a multiple of seven."
    task = draw.tasks[0]
    return task.name, 7 * draw.random.randrange(task.num_items // 7)


def even(members, cfg):
    "Groups of an item with an even number."
    return int(members[0].item_id.rpartition("-")[2]) % 2 == 0


def centred(rewards, members, cfg):
    "The reward minus the mean, or a constant without signal."
    return rewards - rewards.mean() + 0.01


def linear(inputs, cfg):
    "The ratio times the advantage."
    return -inputs.log_ratios.exp() * inputs.advantages


class Lines:
    "Writes the steps."

    def __init__(self, run_dir, config):
        self.path = run_dir / "lines.txt"

    def send(self, step, values):
        with self.path.open("a") as file:
            file.write(f"{step}\\n")

    def close(self):
        pass


class Broken(Lines):
    "Fails at the second step."

    def send(self, step, values):
        if step == 2:
            raise ConnectionError("the server went away")
"""
KEYS = {
    "horizon.kind": "grow",
    "curriculum.kind": "sevens",
    "groups.filter": "even",
    "algorithm.advantage": "centred",
    "algorithm.policy_loss": "linear",
}
SETTINGS = ("algorithm.filter_zero_variance=false", "horizon.stages=[2,4]", "train.mode=sync")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the user."""
    path = tmp_path_factory.mktemp("code") / "own.py"
    path.write_text(OWN, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def overrides(own: Path) -> list[str]:
    """The settings of the run."""
    named = [f"{key}={own}:{name}" for key, name in KEYS.items()]
    trackers = f"log.to=[wandb,{own}:Broken,{own}:Lines]"
    return [*named, trackers, *SETTINGS, "eval.before=false", "eval.after=false"]


@pytest.fixture(scope="module")
def finished(overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of three steps."""
    with Run(tmp_path_factory.mktemp("run"), *overrides) as run:
        assert run.wait() == 0, run.output[-3000:]
    return run


@pytest.fixture(scope="module")
def resumed(finished: Run, own: Path, overrides: list[str]) -> Run:
    """The same run with one step more, after a change of the file."""
    own.write_text(f"{OWN}\n# Another version.\n", encoding="utf-8")
    with Run(finished.root.parent, *overrides, "train.num_steps=4") as run:
        assert run.wait() == 0, run.output[-3000:]
    return run


def test_objective_names_each_function(own: Path, overrides: list[str]) -> None:
    command = [sys.executable, "run.py", "--config", "smoke", *overrides, "--dry-run"]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, encoding="utf-8", timeout=300
    )
    assert done.returncode == 0, done.stderr
    named = {**KEYS, "log.to": "Lines"}
    for key, name in named.items():
        assert re.search(rf"# .*{re.escape(f'{key}={own}:{name}')}: .*\(sha256 ", done.stdout), key


def test_log_of_each_role_names_its_functions(finished: Run, own: Path) -> None:
    logs = "".join(path.read_text(encoding="utf-8") for path in finished.root.glob("logs/*.log"))
    for key, name in {**KEYS, "log.to": "Lines"}.items():
        assert re.search(rf"{re.escape(f'{key}={own}:{name}')}: .*\(sha256 ", logs), key


def test_functions_choose_horizons_items_and_groups(finished: Run) -> None:
    episodes = longstride.Run(finished.root).episodes(kind="train")
    assert {episode.horizon for episode in episodes} == {2, 3, 4}
    items: dict[str, set[int]] = {"trained": set(), "filtered": set()}
    for episode in episodes:
        items.get(episode.outcome, set()).add(int(episode.item.rpartition("-")[2]))
    assert {index % 14 for index in items["trained"]} == {0}
    assert {index % 14 for index in items["filtered"]} == {7}


def test_failing_tracker_leaves_the_run_and_other_trackers(finished: Run) -> None:
    log = (finished.root / "logs" / "learner.log").read_text(encoding="utf-8")
    assert log.count("own.py:Broken failed, the run continues without it at=step 2") == 1
    assert (finished.root / "lines.txt").read_text(encoding="utf-8").split() == ["1", "2", "3"]
    assert [line["step"] for line in finished.metrics()] == [1, 2, 3]


def test_changed_file_is_a_warning_of_the_resumed_run(resumed: Run, own: Path) -> None:
    logs = {
        role: (resumed.root / "logs" / f"{role}.log").read_text(encoding="utf-8")
        for role in ("scheduler", "learner")
    }
    for key, name in {**KEYS, "log.to": "Lines"}.items():
        role = "scheduler" if key in ("horizon.kind", "curriculum.kind") else "learner"
        assert logs[role].count(f"{key}={own}:{name}: its file has changed: sha256 was ") == 1
    assert [line["step"] for line in resumed.metrics()] == [1, 2, 3, 4]

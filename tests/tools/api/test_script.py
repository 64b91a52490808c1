"""Laws of the Python interface: scripts of a user that train, read, evaluate and chat."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from common.repository import ROOT
from learner.journal.metrics import MetricsLine
from longstride import ConfigError, Episode, Policy, Run, Training, evaluate, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GAME = """
from docs.examples.sort import SUBSETS, Sort
from envhub.env import EnvSpec, Reward, Style


class Game(Sort):
    pass


def make_spec():
    texts = dict.fromkeys(Style, "Name the smallest number.")
    return EnvSpec(name="game", subsets=SUBSETS, instruction=texts, make=Game, reward=Reward.LAST)


def mean(rewards, members, cfg):
    "The reward minus the mean."
    return rewards - rewards.mean()


def order(group):
    "The number of the member."
    return [member["member"] / 4 for member in group]
"""
END_S = 120.0
Trained = tuple[Training, list[MetricsLine]]


def processes_of(folder: Path) -> list[int]:
    """Return the live processes whose command line names a folder."""
    pids: list[int] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes():
                pids.append(int(path.parent.name))
        except OSError:
            continue
    return pids


def wait_until_gone(folder: Path) -> list[int]:
    """Wait until no process names the folder; return those that remain."""
    deadline = time.monotonic() + END_S
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A finished run of an environment and an advantage that are objects, and its metrics."""
    home = tmp_path_factory.mktemp("code")
    (home / "own_game.py").write_text(GAME, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(home)
        own_game = __import__("own_game")
        overrides = {
            "run.dir": folder,
            "run.name": "game",
            "tasks": [{"env": own_game.Game, "subset": "four"}],
            "algorithm.advantage": own_game.mean,
            "algorithm.filter_zero_variance": False,
            "groups.reward": own_game.order,
            "groups.environment_weight": 0,
        }
        with train("smoke", overrides) as training:
            return training, list(training)


def test_metrics_come_once_for_each_step(trained: Trained) -> None:
    training, metrics = trained
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert training.run.metrics == metrics
    assert not training.is_running
    assert training.run.is_finished
    assert wait_until_gone(training.path.parent) == []


def test_objects_reach_the_roles(trained: Trained) -> None:
    training, _ = trained
    assert training.run.config["algorithm"]["advantage"].endswith("own_game.py:mean")
    assert {episode.env for episode in training.run.episodes()} == {"game"}


def test_episodes_are_chosen_by_step_and_success(trained: Trained) -> None:
    run = trained[0].run
    episodes: list[Episode] = run.episodes(kind="train")
    by_step = {step: run.episodes(step=step) for step in (1, 2, 3)}
    assert all(len(each) >= 2 * 2 for each in by_step.values())  # Groups x smallest group.
    assert {e.id for e in episodes if e.step == 2} == {e.id for e in by_step[2]}
    unsolved = run.episodes(step=1, solved=False)
    assert {e.id for e in unsolved} == {e.id for e in by_step[1] if not e.solved}
    messages = by_step[1][0].messages()
    assert messages[0]["role"] == "user"
    assert "left:" in messages[0]["content"]
    assert messages[1]["role"] == "assistant"


def test_episodes_have_the_rewards_of_their_groups(trained: Trained) -> None:
    run = trained[0].run
    members = run.episodes(outcome="trained")
    assert len(members) >= 3 * 2 * 2
    assert all(episode.group_reward == episode.member / 4 for episode in members)
    assert {episode.group_reward for episode in run.episodes(kind="eval")} == {None}
    with pytest.raises(ConfigError, match="outcome=solved: expects one of trained, filtered,"):
        run.episodes(outcome="solved")
    with pytest.raises(ConfigError, match="kind=validation: expects one of train, eval"):
        run.episodes(kind="validation")


def test_final_policy_answers_and_is_evaluated(trained: Trained) -> None:
    training, _ = trained
    assert [each.step for each in training.run.checkpoints][-1] == 3
    with training.policy as policy:
        assert policy.path == training.run.checkpoints[-1].path
        first = policy.chat("left: 1 2", max_tokens=4, seed=1)
        again = policy.chat([{"role": "user", "content": "left: 1 2"}], max_tokens=4, seed=1)
    assert first.text == again.text
    assert 1 <= first.sampled_tokens <= 4
    result = evaluate(training.run, overrides={"eval.num_items": 4})
    assert (result.num_items, result.num_episodes, result.num_failed) == (4, 4, 0)
    assert result.success_by_env == {"game": result.success}


def test_stopped_run_ends_all_roles_and_resumes(folder: Path) -> None:
    overrides = {"run.dir": folder, "run.name": "stopped", "train.num_steps": 12}
    training = train("smoke", overrides)
    first = next(iter(training))
    assert processes_of(folder) != []
    training.stop()
    assert first["step"] == 1
    assert wait_until_gone(folder) == []
    training.wait()  # A stopped run has no error.
    assert not training.run.is_finished
    with train("smoke", overrides) as again:
        assert [line["step"] for line in again] == [*range(1, 13)]
    assert again.run.is_finished


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_script_ends_all_roles(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from longstride import train\n"
        f"overrides = {{'run.dir': {str(tmp_path)!r}, 'run.name': 'a', 'train.num_steps': 500}}\n"
        "for metrics in train('smoke', overrides):\n"
        "    print('step', metrics['step'], flush=True)\n",
        encoding="utf-8",
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
        # A shell's background ignores SIGINT.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    with process, process.stdout:
        assert process.stdout.readline() == "step 1\n"
        assert processes_of(tmp_path) != []
        process.send_signal(number)
        process.wait()
    assert wait_until_gone(tmp_path) == []


def test_failed_start_raises_the_error_of_the_command(folder: Path) -> None:
    overrides = {"run.dir": folder, "run.name": "bad", "model.path": folder / "missing"}
    with train("smoke", overrides) as training, pytest.raises(ConfigError, match=r"model\.path"):
        list(training)
    with pytest.raises(ConfigError, match="no run of this name"):
        Run(folder / "none")
    with pytest.raises(ConfigError, match="no run of this name"):
        Policy(folder / "none")
    with pytest.raises(ConfigError, match=r"neither a model's folder, which has config\.json"):
        Policy(folder)

"""Laws of AgentEvol: played items, kept episodes and the next iteration's policy."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from common.config.learner import LearnerSection, Precision
from common.config.model import ModelSection
from common.config.tasks import TaskSection
from common.errors import ConfigError, LongstrideError
from common.wire.messages import EndReason
from learner.journal.journal import JournalWriter
from scheduler.curriculum.catalogue import parse_catalogue
from tests.learner.builders import make_trajectory
from tests.tools.offline.builders import TINY
from tools.offline import evolve
from tools.offline.config import EvolveConfig, EvolveSection
from tools.offline.scratch import make_policy, make_tokenizer, save_policy

CATALOGUE = parse_catalogue(
    {
        "toy": {
            "subsets": {
                "a": {"num_train": 6, "num_test": 1, "max_turns": 3},
                "b": {"num_train": 100, "num_test": 1, "max_turns": 5},
            },
            "instruction": {},
        }
    }
)


@pytest.fixture
def cfg(tmp_path: Path) -> EvolveConfig:
    tokenizer = make_tokenizer(["you see", "go"] * 4, vocab_size=300)
    save_policy(tmp_path / "base", make_policy(TINY, tokenizer, seed=0), tokenizer)
    return EvolveConfig(
        model=ModelSection(path=str(tmp_path / "base")),
        tasks=[TaskSection(env="toy", subset="a"), TaskSection(env="toy", subset="b", weight=2.0)],
        sft=TINY,
        learner=LearnerSection(device="cpu", precision=Precision.FP32),
        evolve=EvolveSection(
            output=str(tmp_path / "out"),
            num_iterations=2,
            items_per_iteration=9,
            samples_per_item=2,
        ),
    )


class Player:
    """Writes one success and one failure per iteration; records its policies."""

    def __init__(self, *, success: float = 1.0, is_solved: bool = True) -> None:
        self.calls: list[tuple[str, int]] = []
        self._success, self._is_solved = success, is_solved

    def __call__(self, cfg: EvolveConfig, iteration: int, folder: Path) -> None:
        self.calls.append((cfg.model.path, iteration))
        writer = JournalWriter(folder)
        for member, reward in enumerate([self._success, 0.0]):
            trajectory = make_trajectory([5, 6, 7], [0, 1, 1], group_id=f"i{iteration}")
            told = {"reward": reward, "is_success": reward > 0 and self._is_solved}
            writer.append(replace(trajectory, episode_id=f"{iteration}/{member}", **told))
        writer.close()


def test_items_follow_weights_without_early_repetition(cfg: EvolveConfig) -> None:
    played = [evolve.plan_episodes(cfg, CATALOGUE, i) for i in range(2)]
    assert [len(each) for each in played] == [18, 18]
    for each in played:
        assert Counter(t.item_id.split("-")[0] for t in each) == {"a": 6, "b": 12}
    both = [*played[0], *played[1]]
    assert set(Counter(t.item_id for t in both).values()) == {2}  # samples, no second visit
    assert len({t.episode_id for t in both}) == 36
    assert {t.horizon for t in both if t.item_id.startswith("b")} == {5}
    assert played[0] == evolve.plan_episodes(cfg, CATALOGUE, 0)


@pytest.mark.slow
def test_every_iteration_plays_with_the_newest_policy(cfg: EvolveConfig, tmp_path: Path) -> None:
    player = Player()
    output = evolve.run(cfg, tmp_path / "run", play=player)
    first = str(tmp_path / "run" / "iteration-0" / "policy")
    assert player.calls == [(cfg.model.path, 0), (first, 1)]
    assert (output / "model.safetensors").exists()
    assert (output / "tokenizer.json").exists()


@pytest.mark.slow
def test_interrupted_run_does_not_replay_episodes(cfg: EvolveConfig, tmp_path: Path) -> None:
    first = Player()
    short = replace(cfg, evolve=replace(cfg.evolve, num_iterations=1))
    evolve.run(short, tmp_path / "run", play=first)
    again = Player()
    evolve.run(cfg, tmp_path / "run", play=again)
    assert [iteration for _, iteration in again.calls] == [1]


@pytest.mark.slow
def test_policy_whose_writing_was_interrupted_is_trained_again(
    cfg: EvolveConfig, tmp_path: Path
) -> None:
    policy = tmp_path / "run" / "iteration-0" / "policy"
    policy.mkdir(parents=True)
    (policy / "config.json").write_bytes((tmp_path / "base" / "config.json").read_bytes())
    short = replace(cfg, evolve=replace(cfg.evolve, num_iterations=1))
    evolve.run(short, tmp_path / "run", play=Player())
    assert (policy / "model.safetensors").exists()
    written = (policy / "model.safetensors").stat().st_mtime_ns
    evolve.run(short, tmp_path / "run", play=Player())
    assert (policy / "model.safetensors").stat().st_mtime_ns == written


def _write(folder: Path, numbers: list[int], *, num_failed: int = 0) -> None:
    """Add episodes to a journal, the even ones with success, and failed episodes."""
    writer = JournalWriter(folder)
    failure = replace(make_trajectory([], [], group_id="i"), end_reason=EndReason.ENV_ERROR)
    for number in numbers:
        trajectory = make_trajectory([5, 6, 7], [0, 1, 1], group_id="i")
        is_success = number % 2 == 0
        results = {"reward": float(is_success), "is_success": is_success}
        writer.append(replace(trajectory, episode_id=f"e{number}", **results))
    for number in range(num_failed):
        writer.append(replace(failure, episode_id=f"f{number}"))
    writer.close()


@pytest.mark.slow
def test_interrupted_iteration_trains_each_episode_once(cfg: EvolveConfig, tmp_path: Path) -> None:
    def interrupted(_: EvolveConfig, iteration: int, folder: Path) -> None:
        _write(folder, [0, 1, 2])
        raise KeyboardInterrupt

    short = replace(cfg, evolve=replace(cfg.evolve, num_iterations=1))
    with pytest.raises(KeyboardInterrupt):
        evolve.run(short, tmp_path / "run", play=interrupted)
    logs: list[dict[str, float]] = []

    def again(_: EvolveConfig, iteration: int, folder: Path) -> None:
        _write(folder, [0, 1, 2, 3, 4])

    evolve.run(short, tmp_path / "run", play=again, log=logs.append)
    assert (logs[0]["kept"], logs[0]["solved_frac"]) == (3, 0.6)


@pytest.mark.slow
def test_failures_are_counted_beside_the_success(cfg: EvolveConfig, tmp_path: Path) -> None:
    def play(_: EvolveConfig, iteration: int, folder: Path) -> None:
        _write(folder, [*range(8)], num_failed=2)

    low = replace(cfg, evolve=replace(cfg.evolve, num_iterations=1, min_reward=0.0))
    logs: list[dict[str, float]] = []
    evolve.run(low, tmp_path / "run", play=play, log=logs.append)
    shares = {name: logs[0][name] for name in ("kept", "solved_frac", "failed")}
    assert shares == {"kept": 8, "solved_frac": 0.5, "failed": 2}
    summary = json.loads((tmp_path / "run/iteration-0/played.json").read_text(encoding="utf-8"))
    assert summary == {"episodes": 8, "successes": 4, "failed": 2}


def test_iteration_with_many_failures_is_refused(cfg: EvolveConfig, tmp_path: Path) -> None:
    def play(_: EvolveConfig, iteration: int, folder: Path) -> None:
        _write(folder, [0, 1], num_failed=1)

    with pytest.raises(LongstrideError, match=r"max_failed_frac=0\.2: 1 of 3 episodes had"):
        evolve.run(cfg, tmp_path / "run", play=play)
    assert not (tmp_path / "run" / "iteration-0" / "played.json").exists()


def test_resumed_iteration_plays_incomplete_episodes_only(
    cfg: EvolveConfig, tmp_path: Path
) -> None:
    plans = evolve.plan_episodes(cfg, CATALOGUE, 0)
    writer = JournalWriter(tmp_path / "journal")
    complete = make_trajectory([5, 6, 7], [0, 1, 1], group_id="i")
    writer.append(replace(complete, episode_id=plans[0].episode_id))
    failed = replace(complete, end_reason=EndReason.ENV_ERROR)
    writer.append(replace(failed, episode_id=plans[1].episode_id))
    writer.close()
    job = evolve.job_of(cfg, plans, url="http://hub", token="", journal=tmp_path / "journal")
    assert job.plans == plans[1:]
    assert (job.max_attempts, job.max_failed) == (3, 3)  # 20 % of 18 episodes


def test_other_settings_of_a_run_are_refused_by_name(cfg: EvolveConfig, tmp_path: Path) -> None:
    failing = Player(success=0.5, is_solved=False)
    with pytest.raises(ConfigError, match="no episode of iteration 0"):
        evolve.run(cfg, tmp_path / "run", play=failing)
    other = replace(cfg, sft=replace(cfg.sft, lr=0.5))
    with pytest.raises(ConfigError, match=r"run\.name=run: .*\(sft\.lr: was .*, now 0\.5\)"):
        evolve.run(other, tmp_path / "run", play=failing)
    longer = replace(cfg, evolve=replace(cfg.evolve, num_iterations=3))
    with pytest.raises(ConfigError, match="no episode of iteration 0"):
        evolve.run(longer, tmp_path / "run", play=failing)


def test_iteration_without_success_names_the_setting(cfg: EvolveConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"evolve\.min_reward=1: no episode of iteration 0"):
        evolve.run(cfg, tmp_path / "run", play=Player(success=0.5, is_solved=False))


@pytest.mark.slow
def test_solved_episode_with_a_low_reward_is_kept(cfg: EvolveConfig, tmp_path: Path) -> None:
    short = replace(cfg, evolve=replace(cfg.evolve, num_iterations=1))
    output = evolve.run(short, tmp_path / "run", play=Player(success=0.5))
    assert (output / "model.safetensors").exists()

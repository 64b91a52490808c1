"""Laws of AgentEvol: played items, kept episodes and the next iteration's policy."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from common.config.learner import LearnerSection, Precision
from common.config.model import ModelSection
from common.config.tasks import TaskSection
from common.errors import ConfigError
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


def test_iteration_without_success_names_the_setting(cfg: EvolveConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"evolve\.min_reward=1: no episode of iteration 0"):
        evolve.run(cfg, tmp_path / "run", play=Player(success=0.5, is_solved=False))


@pytest.mark.slow
def test_solved_episode_with_a_low_reward_is_kept(cfg: EvolveConfig, tmp_path: Path) -> None:
    short = replace(cfg, evolve=replace(cfg.evolve, num_iterations=1))
    output = evolve.run(short, tmp_path / "run", play=Player(success=0.5))
    assert (output / "model.safetensors").exists()

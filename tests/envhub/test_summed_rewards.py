"""Laws of environments with per-step rewards: the hub returns their running sum."""

from pathlib import Path
from typing import cast

import pytest

from common.repository import ROOT
from envhub.catalogue.registry import Registry
from envhub.env import Env, EnvSpec, Reward, StepResult, Style, SubsetSpec
from envhub.summed_rewards import with_summed_rewards

SORT = ROOT / "docs" / "examples" / "sort.py"
SUBSETS = {"any": SubsetSpec(num_train=1, num_test=1, max_turns=20)}


class Shares:
    """Pays a tenth for each of ten steps; reports no success."""

    def __init__(self, _: Style) -> None:
        self.left = 10

    def reset(self, item_id: str, seed: int) -> str:
        return "begin"

    def step(self, action: str) -> StepResult:
        self.left -= 1
        done = self.left == 0
        told = None if action == "say nothing" else False
        return StepResult(observation="on", reward=0.1, done=done, is_valid=True, is_success=told)


class LateShares(Shares):
    """The same with coroutines."""

    async def step(self, action: str) -> StepResult:  # type: ignore[override]
        return super().step(action)


def spec(make: object, reward: Reward = Reward.SUM) -> EnvSpec:
    return with_summed_rewards(
        EnvSpec(name="shares", subsets=SUBSETS, instruction={}, make=make, reward=reward)  # type: ignore[arg-type]
    )


def test_ten_tenths_sum_to_one_and_count_as_solved():
    env = cast(Env, spec(Shares).make(Style.COMPACT))
    env.reset("any-train-0", 0)
    results = [env.step("say nothing") for _ in range(10)]
    assert [result.reward for result in results] == [round(0.1 * (i + 1), 9) for i in range(10)]
    assert [result.is_success for result in results] == [False] * 9 + [True]


def test_explicit_success_overrides_the_sum():
    env = cast(Env, spec(Shares).make(Style.COMPACT))
    env.reset("any-train-0", 0)
    results = [env.step("go") for _ in range(10)]
    assert (results[-1].reward, results[-1].is_success) == (1.0, False)


def test_sum_begins_anew_with_a_reset():
    env = cast(Env, spec(Shares).make(Style.COMPACT))
    env.reset("any-train-0", 0)
    env.step("go")
    env.reset("any-train-0", 0)
    assert env.step("go").reward == 0.1


async def _step(env: object) -> float:
    return (await env.step("go")).reward  # type: ignore[attr-defined]


def test_coroutines_are_summed_as_well():
    import asyncio

    env = spec(LateShares).make(Style.COMPACT)
    env.reset("any-train-0", 0)
    assert [asyncio.run(_step(env)) for _ in range(2)] == [0.1, 0.2]


def test_last_reward_is_left_alone():
    env = cast(Env, spec(Shares, Reward.LAST).make(Style.COMPACT))
    assert [env.step("go").reward for _ in range(2)] == [0.1, 0.1]


@pytest.mark.slow
def test_hub_sums_rewards_of_outside_environment(serve_hubs, tmp_path: Path):
    text = SORT.read_text(encoding="utf-8").replace("Reward.LAST", "Reward.SUM")
    path = tmp_path / "shares.py"
    path.write_text(
        text.replace("reward=float(done),", "reward=0.25 * (len(self.left) < was),").replace(
            "word = action_text(action)", "was, word = len(self.left), action_text(action)"
        ),
        encoding="utf-8",
    )
    hub = serve_hubs(f"{path}:make_spec")
    session = hub.open("sort", "four-train-0")
    told = []
    for seq in range(1, 5):
        action = hub.client.get(f"{session}/hint").json()["expert_action"]
        told.append(hub.step(session, action, seq).json())
    assert [each["reward"] for each in told] == [0.25, 0.5, 0.75, 1.0]
    assert told[-1]["is_success"]


def test_outside_environment_is_summed_once(tmp_path: Path):
    path = tmp_path / "once.py"
    path.write_text(
        SORT.read_text(encoding="utf-8").replace("Reward.LAST", "Reward.SUM"), encoding="utf-8"
    )
    env = cast(Env, Registry([f"{path}:make_spec"]).spec("sort").make(Style.COMPACT))
    env.reset("four-train-0", 0)
    rewards = [env.step(env.expert_action() or "").reward for _ in range(4)]
    assert rewards == [0.0, 0.0, 0.0, 1.0]

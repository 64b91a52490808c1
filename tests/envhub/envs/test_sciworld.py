"""ScienceWorld in its JVMs."""

import gc
import os
import signal
import time
from collections.abc import Iterator

import pytest

from common.config.envs import SciworldOptions
from envhub.env import EnvFailure, Style
from envhub.envs.sciworld.env import Machines, SciWorldEnv
from tests.bounds import at_most
from tests.envhub.envs.playing import elsewhere
from tests.marks import long_for

pytest.importorskip("scienceworld")
pytestmark = pytest.mark.slow  # a JVM starts

SOLVED = ["Measure-test-5", "Find-test-8", "ChemMix-train-18", "TestCond-test-3", "Lifespan-test-0"]


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    machines = Machines(SciworldOptions())
    yield machines
    machines.simulators.close()
    machines.gold.rest()


@pytest.fixture
def env(machines: Machines) -> Iterator[SciWorldEnv]:
    env = SciWorldEnv(Style.COMPACT, machines)
    yield env
    env.close()


def jvm_of(env: SciWorldEnv) -> int:
    assert env._simulator is not None
    return env._simulator.pid


def transcript(item_id: str, machines: Machines) -> list[str]:
    """Return the observations of an episode on the expert's path and beside it."""
    env = SciWorldEnv(Style.AGENTGYM, machines)
    said = [env.reset(item_id, 0), *env.valid_actions()[:50]]
    for action in ("open door", "0", "objects", "wait1", "look around", "banana"):
        said.append(env.step(action).observation)
    env.reset(item_id, 0)
    while (action := env.expert_action()) is not None:
        result = env.step(action)
        said.append(result.observation)
        if result.done:
            break
    env.close()
    return said


@pytest.mark.parametrize("first_action", long_for(["task", "help", "objects"], ["help", "objects"]))
def test_first_action_ignores_the_previous_episodes_score(machines, first_action):
    for item_id in ("Find-test-8", "ChemMix-train-18"):
        env = SciWorldEnv(Style.AGENTGYM, machines)
        env.reset(item_id, 0)
        result = env.step(first_action)
        assert not result.done
        assert result.reward < 0.1  # the agent may begin where a goal is half met
        while not result.done:
            result = env.step(env.expert_action() or "")
        assert result.reward == 1.0
        env.close()


def test_agentgym_style_keeps_the_simulators_text(machines):
    env = SciWorldEnv(Style.AGENTGYM, machines)
    env.reset("Find-test-8", 0)
    assert env.step("open door").observation.endswith("\n")
    assert env.step("9999").observation.endswith(" ")
    env.close()


@pytest.mark.parametrize(
    ("style", "item_id"),
    [
        *((Style.COMPACT, item_id) for item_id in SOLVED[:3]),
        *(pytest.param(Style.COMPACT, item_id, marks=pytest.mark.long) for item_id in SOLVED[3:]),
        (Style.AGENTGYM, SOLVED[0]),
        *(pytest.param(Style.AGENTGYM, item_id, marks=pytest.mark.long) for item_id in SOLVED[1:]),
    ],
)
def test_gold_path_reaches_reward_one(machines, item_id, style):
    env = SciWorldEnv(style, machines)
    env.reset(item_id, 0)
    done, rewards = False, [0.0]
    while not done:
        result = env.step(env.expert_action() or "")
        assert result.is_valid
        assert 0 <= result.reward <= 1
        rewards.append(result.reward)
        done = result.done
    env.close()
    assert not result.is_truncated
    assert rewards[-1] == 1.0
    assert max(rewards[:-1]) < 1.0


@pytest.mark.long
def test_expert_skips_gold_steps_that_the_simulator_rejects(machines):
    env = SciWorldEnv(Style.COMPACT, machines)
    env.reset("TestCond-test-150", 0)  # its gold path names terminals that a wood block lacks
    seen = [env.step(action) for _ in range(60) if (action := env.expert_action()) is not None]
    env.close()
    assert not all(result.is_valid for result in seen)
    assert seen[-1].reward == 1.0


def test_first_observation_shows_task_and_room(env, machines):
    task, room = env.reset("Lifespan-test-0", 0).split("\n")
    assert task.startswith("Your task is to find the animal with the longest life span.")
    assert room.startswith("greenhouse: bee hive.")
    told = SciWorldEnv(Style.AGENTGYM, machines)
    first, second = told.reset("Lifespan-test-0", 0).split("\n")[:2]
    told.close()
    assert first == task
    assert second.startswith("This room is called the greenhouse. In it, you see:")


def test_wrong_focus_ends_with_no_reward(env):
    env.reset("Find-test-8", 0)
    result = env.step("focus on agent")
    assert (result.reward, result.done, result.is_truncated) == (0.0, True, False)
    assert env.valid_actions() == []
    assert env.expert_action() is None
    with pytest.raises(RuntimeError, match="ended"):
        env.step("look around")


def test_compact_action_follows_an_unanswered_question(env):
    env.reset("Find-test-8", 0)
    asked = env.step("open door")
    assert asked.observation.startswith("which number? 0: ")
    assert asked.is_valid
    assert env.valid_actions()[:2] == ["0", "1"]
    assert env.step("inventory").observation.startswith("you hold:")
    env.step("open door")
    assert env.step("1").observation == "The door is now open"


def test_agentgym_question_rejects_non_numeric_answers(machines):
    env = SciWorldEnv(Style.AGENTGYM, machines)
    env.reset("Find-test-8", 0)
    assert env.step("open door").observation.startswith("Ambiguous request: Please enter")
    swallowed = env.step("inventory")
    assert swallowed.observation.startswith("Unknown action.")
    assert not swallowed.is_valid
    assert env.step("inventory").is_valid
    env.close()


@pytest.mark.parametrize(
    "action", ["", "banana", "\0\n\ud800", "9" * 400, "x" * 60_000, "load", "reset task; exit"]
)
def test_any_text_is_answered(env, action):
    env.reset("Find-test-8", 0)
    result = env.step(action)
    assert not result.done
    assert result.reward < 1
    assert env.step("Action: Look around.").is_valid


def test_every_kind_of_valid_action_is_understood(env):
    env.reset("ChemMix-train-18", 0)
    for action in ("open door to kitchen", "go to kitchen"):
        assert action in env.valid_actions()
        assert env.step(action).is_valid


@pytest.mark.long
def test_expert_ignores_free_actions_but_stops_off_its_path(env):
    env.reset("Lifespan-test-0", 0)
    first = env.expert_action()
    env.step("look around")
    env.step("banana")
    assert env.expert_action() == first
    env.step("wait")
    assert env.expert_action() is None


def test_episode_ends_at_its_turn_limit(env):
    env.reset("Lifespan-test-0", 0)
    results = [env.step("look around") for _ in range(20)]
    assert [result.done for result in results] == [False] * 19 + [True]
    assert (results[-1].reward, results[-1].is_success) == (0.0, False)
    assert results[-1].is_truncated  # The task would have continued.


def test_jvm_is_reused_and_remembers_nothing(machines):
    env = SciWorldEnv(Style.COMPACT, machines)
    first = env.reset("Find-test-8", 0)
    pid = jvm_of(env)
    env.step("open door to kitchen")
    env.step("open door")
    env.close()
    again = SciWorldEnv(Style.COMPACT, machines)
    assert again.reset("Find-test-8", 9) == first
    assert jvm_of(again) == pid
    assert again.step("inventory").is_valid
    again.close()


def test_dead_jvm_fails_one_episode_and_is_replaced(machines):
    env = SciWorldEnv(Style.COMPACT, machines)
    first = env.reset("Find-test-8", 0)
    pid = jvm_of(env)
    os.kill(pid, signal.SIGKILL)
    began_s = time.monotonic()
    with pytest.raises(EnvFailure, match="JVM failed in step"):
        env.step("look around")
    with pytest.raises(EnvFailure, match="already been closed"):
        env.step("look around")
    assert time.monotonic() - began_s < at_most(10.0)  # Less than the limit of an answer.
    env.close()
    again = SciWorldEnv(Style.COMPACT, machines)
    assert again.reset("Find-test-8", 0) == first
    assert jvm_of(again) != pid
    again.close()


def test_freed_objects_of_an_ended_jvm_reach_no_server(caplog):
    simulator = Machines(SciworldOptions()).simulators.take()
    simulator.act("look around")
    simulator.close()
    caplog.clear()
    del simulator
    gc.collect()
    assert caplog.records == []


def test_missing_java_is_named_in_failure(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    env = SciWorldEnv(Style.COMPACT, Machines(SciworldOptions()))
    with pytest.raises(EnvFailure, match="java is not on the PATH"):
        env.reset("Find-test-8", 0)
    env.close()


@pytest.mark.long
def test_episodes_read_the_same_in_every_process(machines):
    there = "transcript('ChemMix-train-18', Machines(SciworldOptions()))"
    told = elsewhere(__name__, there, hash_seed=7)
    assert told == transcript("ChemMix-train-18", machines)


@pytest.mark.long
def test_agentgym_rules_limit_moves_and_return_raw_scores(machines: Machines):
    env = SciWorldEnv(Style.AGENTGYM, machines, has_rules=True)
    env.reset("all-train-0")  # boiling water
    ends = [env.step("wait1").done for _ in range(51)]  # two moves each
    assert ends == [False] * 50 + [True]
    env.reset("all-train-0")
    assert [env.step("look around").done for _ in range(110)] == [False] * 110
    lost = env.step("focus on agent")
    assert (lost.score, lost.reward, lost.done, lost.is_success) == (-100, 0.0, True, False)
    assert env.detail("score") == -100
    env.close()
    plain = SciWorldEnv(Style.AGENTGYM, machines)
    plain.reset("all-train-0")
    assert not any(plain.step("wait1").done for _ in range(60))
    fatal = plain.step("focus on agent")
    assert (fatal.score, fatal.reward, fatal.done) == (None, 0.0, True)
    plain.close()

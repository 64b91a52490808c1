"""Laws of TextWorld's games: texts, refused commands, and play with the real package."""

import os
import subprocess
from pathlib import Path

import pytest

from common.config.envs import EnvsSection, TextworldOptions
from common.repository import ROOT
from envhub.catalogue.distances import measured
from envhub.catalogue.registry import missing_requirements
from envhub.envs.textworld import REFUSED, cleaned, make_spec, subsets_of, why_refused
from tests.venvs import python_with

PLAYED = r"""
import sys

sys.path.insert(0, "ROOT")
from common.config.envs import EnvsSection, TextworldOptions
from envhub.catalogue.registry import Registry, missing_requirements
from envhub.env import Style

assert missing_requirements(["textworld"]) == []
options = EnvsSection(textworld=TextworldOptions(level=3))
spec = Registry(["textworld"], options).spec("textworld")
assert [*spec.subsets] == ["coin_collector", "custom", "treasure_hunter"]
firsts = {}
for item in ("coin_collector-train-0", "coin_collector-test-0", "coin_collector-validation-0"):
    env = spec.make(Style.COMPACT)
    firsts[item] = env.reset(item, 0), env.fingerprint()
    assert env.reset(item, 0) == firsts[item][0]
    assert not env.step("Action: fly to the moon").is_valid
    assert not env.step("save").is_valid and not env.step("look then quit").is_valid
    first = env.expert_action()
    assert not env.step(f"{first}. look").is_valid and env.expert_action() == first
    look = env.step("Action: look")
    assert look.is_valid and "-= " in look.observation and ">" not in look.observation
    assert {"look", "inventory"} <= {*env.valid_actions()}
    results = []
    while (action := env.expert_action()) is not None:
        results.append(env.step(action))
        assert results[-1].is_valid, action
    assert results[-1].is_success and results[-1].reward == 1.0, results[-1]
    assert not any(each.reward for each in results[:-1])
    assert "The End" in results[-1].observation and "RESTART" not in results[-1].observation
    env.close()
assert len({*firsts.values()}) == 3
listing = EnvsSection(textworld=TextworldOptions(level=3, lists_commands=True))
env = Registry(["textworld"], listing).spec("textworld").make(Style.COMPACT)
shown = [env.reset("coin_collector-train-0", 0)]
for command in ("fly to the moon", "save", "look"):
    assert shown[-1].endswith("\n\nCommands: " + ", ".join(env.valid_actions()))
    shown.append(env.step(command).observation)
while (action := env.expert_action()) is not None:
    shown.append(env.step(action).observation)
assert "Commands: " not in shown[-1]
mixed = EnvsSection(textworld=TextworldOptions(rooms=2, quest_length=3, min_quest_length=2))
spec = Registry(["textworld"], mixed).spec("textworld")
env = spec.make(Style.COMPACT)
for index in (0, 1):
    env.reset(f"custom-train-{index}", 0)
    turns = 0
    while (action := env.expert_action()) is not None:
        turns += 1
        assert env.step(action).is_valid
    assert turns == spec.expert_turns["custom"](index) == 2 + index
env.close()
print("equal")
"""


TOGETHER = r"""
import os
import sys
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, "ROOT")
from common.config.envs import EnvsSection, TextworldOptions
from envhub.catalogue.registry import Registry
from envhub.env import Style

options = EnvsSection(textworld=TextworldOptions(rooms=2, objects=3, quest_length=2))
spec = Registry(["textworld"], options).spec("textworld")


def solve(index):
    env = spec.make(Style.COMPACT)
    env.reset(f"custom-train-{index}", 0)
    game = env.fingerprint()
    while (action := env.expert_action()) is not None:
        result = env.step(action)
    assert result.is_success, (index, result)
    env.close()
    return game


with ThreadPoolExecutor(int(os.environ["THREADS"])) as threads:
    print(*threads.map(solve, range(32)))
"""


def run_with_textworld(script: str, cache: Path, **more: str) -> str:
    python = python_with("textworld==1.7.0", sees_ours=True)
    done = subprocess.run(
        [python, "-c", script.replace("ROOT", str(ROOT))],
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), **more},
        capture_output=True,
        encoding="utf-8",
        timeout=290,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_games_made_at_once_are_the_games_made_alone(tmp_path: Path) -> None:
    at_once, alone = (
        run_with_textworld(TOGETHER, tmp_path / threads, THREADS=threads).split()
        for threads in ("16", "1")
    )
    assert at_once == alone
    assert len({*alone}) > 16


@pytest.mark.long
@pytest.mark.slow
def test_generated_game_is_solved_by_its_own_solution(tmp_path: Path) -> None:
    assert run_with_textworld(PLAYED, tmp_path) == "equal\n"
    games = sorted(each.name for each in tmp_path.rglob("game.z8"))
    assert len(games) == 5


def test_text_of_a_turn_lacks_prompt_and_menu() -> None:
    status = "You see a key.\n\n> " + 99 * " " + "-= Vault =-0/2"
    assert cleaned(status) == "You see a key."
    end = "Taken.\n\n\n      *** The End ***\n\nYou scored 1.\n\nWould you like to RESTART?"
    assert cleaned(end) == "Taken.\n\nThe End"


@pytest.mark.parametrize(
    "command", ["save", "look. quit", "take key then restart", "q", "tw-print", "x" * 201, "", "é"]
)
def test_command_of_the_interpreter_is_refused(command: str) -> None:
    assert why_refused(command)


@pytest.mark.parametrize(
    "command", ["go north. go south", "take key then open box", "take key, look", "take a and b"]
)
def test_several_commands_of_a_turn_are_refused(command: str) -> None:
    assert why_refused(command) == "Only one command is played at a time."


@pytest.mark.parametrize(
    "command", ["open box.", "take key from box", "examine rest area", "open test tube"]
)
def test_command_of_the_game_is_played(command: str) -> None:
    assert why_refused(command) == ""


def test_reply_to_an_impossible_command_counts_as_invalid() -> None:
    assert REFUSED.match("That's not a verb I recognise.")
    assert REFUSED.match("You can't go that way.")
    assert not REFUSED.match("You open the box, revealing a hat.")


@pytest.mark.parametrize(
    ("level", "names"),
    [
        (30, ["coin_collector", "custom", "treasure_hunter"]),
        (100, ["coin_collector", "custom"]),
        (150, ["coin_collector", "custom"]),
        (151, ["custom"]),
    ],
)
def test_subset_without_games_of_the_level_is_left_out(level: int, names: list[str]) -> None:
    assert [*subsets_of(TextworldOptions(level=level))] == names


def test_distances_of_custom_games_are_the_lengths_of_their_quests() -> None:
    options = TextworldOptions(
        quest_length=4, min_quest_length=2, num_train=7, num_validation=0, num_test=2
    )
    section = EnvsSection(textworld=options)
    turns = measured(make_spec(section), "custom", section)
    assert turns == {"train": [2, 3, 4, 2, 3, 4, 2], "test": [2, 3]}
    assert measured(make_spec(section), "coin_collector", section) == {}


@pytest.mark.parametrize(
    ("env", "remedy"),
    [
        ("textworld", "pip install textworld==1.7.0 (the extra `textworld`)"),
        ("bfcl", "pip install --no-deps bfcl-eval==2026.3.23"),
    ],
)
def test_missing_package_of_an_environment_names_its_remedy(env: str, remedy: str) -> None:
    (line,) = missing_requirements([env])
    assert line.startswith(f"{env} needs the Python package ")
    assert line.endswith(f": {remedy}")

"""Laws of BFCL's multi-turn tasks, with the real package."""

import os
import subprocess

import pytest

from common.repository import ROOT
from envhub.envs.bfcl import as_action, as_python
from envhub.interop.texts import BadAction
from tests.venvs import python_with

PLAYED = r"""
import json
import sys

sys.path.insert(0, "ROOT")
from common.config.envs import EnvsSection
from envhub.catalogue.registry import Registry, missing_requirements
from envhub.env import SPLITS, Style
from envhub.envs.bfcl import load_scenarios, split_numbers
from bfcl_eval.utils import load_dataset_entry
import bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils as utils

assert missing_requirements(["bfcl"]) == []
spec = Registry(["bfcl"]).spec("bfcl")
sizes = {(s.num_train, s.num_validation, s.num_test) for s in spec.subsets.values()}
assert sizes == {(120, 30, 50)} and len(spec.subsets) == 4
numbers = split_numbers()
assert sorted(n for split in SPLITS for n in numbers[split]) == [*range(200)]
states = {
    split: {json.dumps(load_scenarios("base")[n].entry["initial_config"]) for n in numbers[split]}
    for split in SPLITS
}
assert not states["train"] & states["test"] and not states["train"] & states["validation"]


def begun(item):
    env = spec.make(Style.COMPACT)
    env.reset(item, 0)
    return env


def finished(env):
    while not env._is_done:
        result = env.step(env.expert_action())
    return result


for subset in ("base", "miss_func", "miss_param"):
    right = [finished(begun(f"{subset}-test-{i}")).is_success for i in range(50)]
    assert sum(right) >= 49, (subset, right)  # miss_func 49 lists a call of an excluded tool.
# An episode without a call is wrong, and has the reward 0.
env = begun("base-train-0")
for _ in load_scenarios("base")[numbers["train"][0]].answers:
    result = env.step("I cannot help.")
assert result.done and result.reward == 0.0 and not result.is_success
# A needless change of a state is found by the checker.
item = numbers["train"].index(next(n for n in numbers["train"] if n == 2))
env = begun(f"base-train-{item}")
env.step('Action: {"tool": "mkdir", "arguments": {"dir_name": "more"}}')
wrong = finished(env)
assert wrong.reward == 0.0 and wrong.metrics["bfcl_turns_right"] == 0.0
# BFCL's evaluation accepts a call without an effect in a turn that lacks a value.
scenarios = load_scenarios("miss_param")
number = next(
    n
    for n in numbers["train"]
    if [] in scenarios[n].answers and "GorillaFileSystem" in scenarios[n].entry["involved_classes"]
)
env = begun(f"miss_param-train-{numbers['train'].index(number)}")
while env._turn < scenarios[number].answers.index([]):
    env.step(env.expert_action())
assert env.step('{"tool": "pwd", "arguments": {}}').is_valid
assert finished(env).reward == 1.0
# The first turn offers the tools that BFCL's own loader offers.
for number, entry in enumerate(load_dataset_entry("multi_turn_miss_func")):
    split = next(each for each in SPLITS if number in numbers[each])
    if number < 20:
        env = begun(f"miss_func-{split}-{numbers[split].index(number)}")
        offered = [each["name"] for each in env.item_tools()]
        assert offered == [each["name"] for each in entry["function"]], number
        env.close()
# Two episodes of one item do not share their files.
one, two = begun(f"base-train-{item}"), begun(f"base-train-{item}")
one.step('{"tool": "mkdir", "arguments": {"dir_name": "mine"}}')
assert "mine" in one.step('{"tool": "ls", "arguments": {}}').observation
assert "mine" not in two.step('{"tool": "ls", "arguments": {}}').observation
# Text of an argument is never evaluated.
text = "'); open('/tmp/evaluated', 'w'); ('"
shown = two.step(json.dumps({"tool": "echo", "arguments": {"content": text}})).observation
assert text in json.loads(shown)["terminal_output"], shown
bad = two.step('{"tool": "__import__", "arguments": {"name": "os"}}')
assert not bad.is_valid and "No tool '__import__'" in bad.observation
assert not two.step('{"tool": "ls", "arguments": {"a=1)": 1}}').is_valid
# An answer with braces ends the user's turn; an empty action does not.
begun_turn = two._turn
assert not two.step("").is_valid and two._turn == begun_turn
assert two.step("I need the value {zip}.").is_valid and two._turn == begun_turn + 1
# Tools that are missing at first arrive with their turn.
late = next(s for s in load_scenarios("miss_func") if "0" not in s.entry["missed_function"])
turn, names = next(iter(late.entry["missed_function"].items()))
number = int(late.entry["id"].rsplit("_", 1)[1])
split = next(each for each in SPLITS if number in numbers[each])
env = begun(f"miss_func-{split}-{numbers[split].index(number)}")
assert not {*names} & {each["name"] for each in env.item_tools()}
for _ in range(int(turn)):
    seen = env.step("Next.").observation
assert names[0] in seen and names[0] in env._offered()
env.close()
# Too many calls end the episode.
env = begun("base-train-0")
for _ in range(21):
    result = env.step('{"tool": "none"}')
assert result.done and not result.is_success
for each in (one, two, env):
    each.close()
assert not [name for name in vars(utils) if name.startswith("episode")]
print("equal")
"""


@pytest.mark.long
@pytest.mark.slow
def test_reference_calls_pass_the_checker_of_the_package() -> None:
    python = python_with("--no-deps", "bfcl-eval==2026.3.23", sees_ours=True)
    code = PLAYED.replace("ROOT", str(ROOT))
    done = subprocess.run(
        [python, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8", timeout=280
    )
    assert done.stdout.endswith("equal\n"), done.stderr[-3000:]


TOGETHER = r"""
import os
import sys
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, "ROOT")
from envhub.catalogue.registry import Registry
from envhub.env import Style

spec = Registry(["bfcl"]).spec("bfcl")
sys.setswitchinterval(1e-6)


def solve(index):
    env = spec.make(Style.COMPACT)
    texts = [env.reset(f"{[*spec.subsets][index % 3]}-train-{index % 120}", 0)]
    while (action := env.expert_action()) is not None:
        result = env.step(action)
        texts.append((action, result.observation))
    env.close()
    return hash((*texts, result.reward))


with ThreadPoolExecutor(int(os.environ["THREADS"])) as threads:
    print(*threads.map(solve, range(160)))
"""


@pytest.mark.long
@pytest.mark.slow
def test_scenarios_played_at_once_are_the_scenarios_played_alone() -> None:
    python = python_with("--no-deps", "bfcl-eval==2026.3.23", sees_ours=True)
    played: list[list[str]] = []
    for threads in ("16", "1"):
        done = subprocess.run(
            [python, "-c", TOGETHER.replace("ROOT", str(ROOT))],
            cwd=ROOT,
            env={**os.environ, "THREADS": threads, "PYTHONHASHSEED": "0"},
            capture_output=True,
            encoding="utf-8",
            timeout=140,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        played.append(done.stdout.split())
    assert played[0] == played[1]
    assert len({*played[1]}) > 100


LS = {"properties": {"a": {"type": "boolean"}, "path": {"type": "string"}}}


def test_call_becomes_python_text_of_literals() -> None:
    arguments = {"a": True, "path": 'it\'s "here"\n'}
    text = as_python("ls", arguments, LS)
    assert eval(text, {"ls": lambda **given: given}) == arguments


def test_argument_that_a_tool_lacks_is_refused() -> None:
    with pytest.raises(BadAction, match="ls has no argument 'b'; it has a, path"):
        as_python("ls", {"b": 1}, LS)


def test_reference_call_becomes_an_action() -> None:
    action = as_action("ls(True, path='.')", {"ls": {"parameters": LS}})
    assert action == '{"tool": "ls", "arguments": {"a": true, "path": "."}}'

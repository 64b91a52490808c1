"""Small datasets and functions for the tests of the dataset environment."""

import asyncio
import json
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from common.config.envs import DatasetOptions, EnvsSection
from envhub.env import StepResult, Style
from envhub.envs.dataset.env import DatasetEnv, make_spec

GSM8K = [
    {"question": "Tom has 3 pens and buys 4. How many?", "answer": "3+4=<<3+4=7>>7\n#### 7"},
    {"question": "A box holds 1,200 nails. Two boxes?", "answer": "2*1200=2400\n#### 2,400"},
    {"question": "Half of 5?", "answer": "5/2=2.5\n#### 2.5"},
]
DAPO = [
    {
        "data_source": "math_dapo",
        "prompt": [
            {"role": "user", "content": f"What is {n} squared? End with Answer: \\boxed{{}}."}
        ],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(n * n), "style": "rule"},
        "extra_info": {"index": str(n)},
    }
    for n in (3, 4, 5)
]
CODE = """
import asyncio
import time


def right(completion, ground_truth):
    return completion == ground_truth


async def half(prompt, messages, completion, record, state):
    await asyncio.sleep(0)
    return 0.5


def trl(prompts, completions, answer, **columns):
    return [float(a in c) for a, c in zip(answer, completions)]


def trl_ids(completion_ids, **kwargs):
    return [len(ids) / 100 for ids in completion_ids]


def trl_logs(completions, answer, log_extra, log_metric, **kwargs):
    log_extra("answer", answer)
    log_metric("share of a", completions[0].count("a") / 10)
    return [1.0]


def trl_without_logs(completions, answer):
    return [float(a in c) for a, c in zip(answer, completions)]


def ranks(group):
    return [1.0 for _ in group]


def trl_of_others(completions, **kwargs):
    return [None]


def verl(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0 if solution_str.endswith(ground_truth) and data_source == "math_dapo" else 0.0


def verl_scores(solution_str, ground_truth):
    return {"score": float(solution_str == ground_truth), "acc": True, "pred": solution_str}


def pair(completion):
    return 0.5, {"length": len(completion)}


def rating_of_others(completions, **kwargs):
    return [None if completions[0].isdigit() else 3.0]


def breaks(completion):
    raise KeyError("lost")


def hangs(completion):
    while True:
        time.sleep(0.01)


async def waits(completion):
    await asyncio.Event().wait()


def returns_none(completion):
    return None


def returns_nan(completion):
    return float("nan")


def returns_two(completion):
    return 2


def needs_more(completion, judge):
    return 1


calls = []


def second_try(completion):
    calls.append(completion)
    if len(calls) % 2:
        raise ConnectionError("not yet")
    return True


def step(completion, state):
    return f"turn {state['num_turns']}", completion == "stop"


def tool_step(call):
    if call["tool"] != "add":
        return "no such tool", False
    return str(call["arguments"]["a"] + call["arguments"]["b"]), False


def called(call, answer):
    return float(call is not None and call["tool"] == answer)


NUMBER = 3
"""


def write_lines(path: Path, records: Sequence[Any]) -> Path:
    """Write records as JSON lines."""
    path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return path


def make(folder: Path, records: Sequence[Any] = GSM8K, **options: Any) -> EnvsSection:
    """Return the options of a dataset of these records; `CODE` is in user.py beside it."""
    (folder / "user.py").write_text(CODE, encoding="utf-8")
    train = write_lines(folder / "train.jsonl", records)
    given = {"reward": "exact_number", "eval_size": 0, **options}
    if isinstance(given["reward"], str) and given["reward"].startswith("user:"):
        given["reward"] = f"{folder}/user.py:{given['reward'].removeprefix('user:')}"
    if given.get("step"):
        given["step"] = f"{folder}/user.py:{given['step']}"
    return EnvsSection(dataset=DatasetOptions(train=str(train), **given))


def options_of(data: Path, **options: Any) -> EnvsSection:
    """Return the options of a file or folder that is loaded by its path alone."""
    return EnvsSection(dataset=DatasetOptions(train=str(data), reward="exact_number", **options))


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine."""
    return asyncio.run(work)


async def play(options: EnvsSection, *actions: str, item: int = 0) -> StepResult:
    """Return the result of the last action of an episode."""
    env = make_spec(options).make(Style.COMPACT)
    assert isinstance(env, DatasetEnv)
    await env.reset(f"data-train-{item}", 0)
    for action in actions[:-1]:
        await env.step(action)
    return await env.step(actions[-1])


def played(options: EnvsSection, *actions: str, item: int = 0) -> StepResult:
    """Return the result of the last action of an episode."""
    return run(play(options, *actions, item=item))

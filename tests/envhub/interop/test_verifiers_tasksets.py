"""Laws of tasksets of verifiers as environments, with its own package in an environment apart."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.errors import ConfigError
from envhub.catalogue.registry import Registry
from envhub.env import EnvFailure, EnvSpec, StepResult, Style, SubsetSpec
from envhub.interop.texts import BadAction, RewardRule
from envhub.interop.verifiers_taskset import Shared, TasksetOptions, VerifiersEpisode
from tests.end_to_end.runs import Run, balances
from tests.envhub.interop.test_verifiers_package import VERIFIERS
from tests.venvs import python_with

pytestmark = pytest.mark.timeout(900)  # an environment is made, an engine starts

WORDS = """
from collections.abc import Iterator
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str = ""

class Words(vf.Task[Data]):
    @vf.reward
    async def length(self, task, trace) -> float:
        if task.answer == "7":
            raise ValueError("the judge is away")
        return min(len(trace.last_reply) / 60, 1.0)

    @vf.metric
    async def right(self, task, trace) -> float:
        return float(task.answer in trace.last_reply)

class Config(vf.TasksetConfig):
    first: int = 0

class WordsTaskset(vf.Taskset[Words, Config]):
    def load(self) -> Iterator[Words]:
        for n in range(self.config.first, self.config.first + 20):
            data = Data(prompt=f"Say {n}.", system_prompt="Be short.", answer=str(n))
            yield Words(data, self.config.task)

__all__ = ["WordsTaskset"]
"""
TALK = """
import asyncio
import os
from collections.abc import Iterator
import verifiers.v1 as vf

class Talk(vf.Task):
    pass

class TalkConfig(vf.EnvConfig):
    pupil: vf.AgentConfig = vf.AgentConfig()

class TalkEnv(vf.Env[TalkConfig]):
    async def run(self, task, agents):
        async with agents.pupil.interaction(task) as interaction:
            said = [(await interaction.turn()).last_reply]
            said.append((await interaction.turn("And after that?")).last_reply)
            if said[0] == "die":
                os._exit(9)
            if said[0] == "stop":
                raise asyncio.CancelledError
        interaction.trace.record_reward("both", 2.0 * (said == ["one", "two"]))

class Tools(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    async def ring(self, times: int) -> str:
        "Ring the bell."
        return "ding " * times

class TalkTaskset(vf.Taskset[Talk, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Tools(vf.SharedToolsetConfig())]

    def load(self) -> Iterator[Talk]:
        for n in range(4):
            yield Talk(vf.TaskData(prompt="What is first?"), self.config.task)

__all__ = ["TalkTaskset", "TalkEnv"]

if __name__ == "__main__":
    Tools.run()
"""
PAIR = """
import asyncio
from collections.abc import Iterator
import verifiers.v1 as vf

class Pair(vf.Task):
    @vf.reward
    async def said(self, task, trace) -> float:
        return float(trace.last_reply == trace.agent.name)

class PairConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()
    max_concurrent_agents: int | None = 2
    is_first_again: bool = False

class PairEnv(vf.Env[PairConfig]):
    async def run(self, task, agents):
        second = agents.first if self.config.is_first_again else agents.second
        await asyncio.gather(agents.first.run(task), second.run(task))

class PairTaskset(vf.Taskset[Pair, vf.TasksetConfig]):
    def load(self) -> Iterator[Pair]:
        yield Pair(vf.TaskData(prompt="Who are you?"), self.config.task)

__all__ = ["PairTaskset", "PairEnv"]
"""


def described(folder: Path, taskset: str, *, first: int = 0, **options: object) -> str:
    """Return the reference of a taskset, written to a folder with its options."""
    (folder / "tiny_words.py").write_text(WORDS, encoding="utf-8")
    (folder / "tiny_talk.py").write_text(TALK, encoding="utf-8")
    (folder / "tiny_pair.py").write_text(PAIR, encoding="utf-8")
    own = {"python": python_with(VERIFIERS), "path": ".", "start_timeout_s": 250.0}
    described = {
        **own,
        **options,
        "taskset": {"id": taskset, "first": first} if first else {"id": taskset},
    }
    (folder / "tasks.yaml").write_text(yaml.safe_dump(described), encoding="utf-8")
    return f"verifiers:{folder / 'tasks.yaml'}"


def play(spec: EnvSpec, episodes: dict[str, list[str]]) -> dict[str, list[Any]]:
    """Return each item's observations in order; an error ends them."""

    async def all_of() -> dict[str, list[Any]]:
        answers: dict[str, list[Any]] = {}
        for item, actions in episodes.items():
            env: Any = spec.make(Style.COMPACT)
            answers[item] = []
            try:
                answers[item].append(await env.reset(item, 0))
                for action in actions:
                    answers[item].append(await env.step(action))
            except EnvFailure as error:
                answers[item].append(str(error))
            await env.close()
        assert spec.stop is not None
        await spec.stop()
        return answers

    return asyncio.run(all_of())


def make_episode(*, max_chars: int = 8_000) -> VerifiersEpisode:
    return VerifiersEpisode(
        Shared(
            options=TasksetOptions(max_chars=max_chars),
            folder=Path(),
            subset=SubsetSpec(num_train=1, num_test=1, max_turns=1),
            rule=RewardRule(),
        )
    )


def test_tools_of_a_later_request_replace_the_earlier_ones() -> None:
    episode = make_episode()

    def asked(*names: str) -> str:
        tools = [{"function": {"name": name, "parameters": {}}} for name in names]
        return episode._request_text(
            {"ask": [{"role": "user", "content": "Go on."}], "tools": tools}
        )

    assert "- ring: " in asked("ring")
    assert "Tools:" not in asked("ring")
    assert "- sing: " in asked("sing")
    assert "tool_calls" in episode._message('{"tool": "sing"}')
    with pytest.raises(BadAction, match="there are: sing"):
        episode._message('{"tool": "ring"}')
    assert "no tools" in asked()
    assert "tool_calls" not in episode._message('{"tool": "sing"}')


def test_cut_of_a_rewritten_history_keeps_its_end() -> None:
    episode = make_episode(max_chars=20)
    messages = [{"role": "user", "content": text} for text in ("a" * 30, "b" * 8 + "c" * 8, "now?")]
    text = episode._request_text({"ask": messages, "tools": []})
    assert text == f"[32 earlier characters] {'b' * 8}{'c' * 8}\n\nnow?"
    longest = [*messages[:1], {"role": "user", "content": "d" * 25}]
    text = episode._request_text({"ask": longest, "tools": []})
    assert text == f"[30 earlier characters] \n\n{'d' * 20} [5 more characters]"


def test_answer_with_braces_is_text_and_an_empty_one_is_invalid() -> None:
    episode = make_episode()
    with pytest.raises(BadAction, match="is empty"):
        episode._message("")
    episode._tools = ["ring"]
    text = r"The answer is \boxed{42}."
    assert episode._message(text) == {"role": "assistant", "content": text}
    for label in ("", "Action: "):
        message = episode._message(
            f'{label}{{"tool": "ring", "arguments": {{"a": "b. Action: c"}}}}'
        )
        assert message["tool_calls"][0]["function"]["arguments"] == '{"a": "b. Action: c"}'


def figures(result: StepResult) -> tuple[float, bool, bool, bool | None]:
    return result.reward, result.done, result.is_valid, result.is_success


# The parts of verifiers that the player needs, with an episode that fails in the library itself.
BROKEN = """
from types import SimpleNamespace

class Broken:
    taskset = range(4)

    def serving(self):
        return self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def run_episode(self, task, context):
        if task:
            return SimpleNamespace(errors=[], ok=True, traces=None)
        raise KeyError("no such trace")

def load_environment(config):
    return Broken()

def __getattr__(name):
    return lambda *args, **fields: SimpleNamespace(model_fields={}, **fields)
"""


def test_error_of_the_player_ends_the_episode_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers/__init__.py").touch()
    (tmp_path / "verifiers/v1.py").write_text(BROKEN, encoding="utf-8")
    options = {"python": sys.executable, "path": ".", "taskset": {"id": "broken"}, "timeout_s": 20}
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump(options), encoding="utf-8")
    spec = Registry([f"verifiers:{tmp_path / 'tasks.yaml'}"]).spec("tasks")
    answers = play(spec, {"all-train-0": [], "all-train-1": []})
    (library,), (ours,) = answers.values()
    assert library == "verifiers taskset 'broken': KeyError: 'no such trace'"
    assert ours.startswith("verifiers taskset 'broken': TypeError: 'NoneType' object")


@pytest.mark.long
@pytest.mark.slow
def test_task_scores_itself_and_its_failure_is_no_reward(tmp_path: Path) -> None:
    reference = described(tmp_path, "tiny_words", success="right", test={"first": 40})
    spec = Registry([reference]).spec("tasks")
    assert (spec.subsets["all"].num_train, spec.subsets["all"].num_test) == (20, 20)
    said = ["Thought: easy.\nAction: I say 3, of course", "x" * 60]
    answers = play(
        spec,
        {
            "all-train-3": said[:1],
            "all-test-3": said[1:],
            "all-train-7": said[:1],
            "all-train-4": ["\ud800", said[0]],
        },
    )
    assert answers["all-train-3"][0] == "Be short.\n\nSay 3."
    assert answers["all-test-3"][0] == "Be short.\n\nSay 43."
    assert figures(answers["all-train-3"][1]) == (pytest.approx(18 / 60), True, True, True)
    assert figures(answers["all-test-3"][1]) == (1.0, True, True, False)
    assert answers["all-train-7"][1].startswith("verifiers taskset 'tiny_words': TaskError")
    assert "the judge is away" in answers["all-train-7"][1]
    assert figures(answers["all-train-4"][1]) == (0.0, False, False, False)
    assert answers["all-train-4"][2].done


@pytest.mark.long
@pytest.mark.slow
def test_taskset_environment_has_turns_tools_and_its_own_process(tmp_path: Path) -> None:
    reference = described(tmp_path, "tiny_talk", num_test=1, max_reward=2.0)
    spec = Registry([reference]).spec("tasks")
    assert (spec.subsets["all"].num_train, spec.subsets["all"].num_test) == (3, 1)
    ring = f"Action: {json.dumps({'tool': 'ring', 'arguments': {'times': 2}})}"
    answers = play(
        spec,
        {
            "all-train-0": [ring, '{"tool": "sing"}', "Action: one", "Action: two"],
            "all-train-1": ["die", "two"],
            "all-train-2": ["stop", "two"],
            "all-test-0": ["one", "three"],
        },
    )
    first, rung, sung, then, end = answers["all-train-0"]
    assert "- ring: Ring the bell." in first
    assert first.endswith("What is first?")
    assert rung.observation.strip() == "ding ding"
    assert not sung.is_valid
    assert then.observation == "And after that?"
    assert figures(end) == (1.0, True, True, True)
    assert "its process has ended with exit code 9" in answers["all-train-1"][2]
    assert "the episode was cancelled by its taskset" in answers["all-train-2"][2]
    # This episode runs in another process.
    assert figures(answers["all-test-0"][2]) == (0.0, True, True, False)


@pytest.mark.long
@pytest.mark.slow
def test_parallel_requests_of_an_episode_become_successive_turns(tmp_path: Path) -> None:
    spec = Registry([described(tmp_path, "tiny_pair", num_test=0, seat="first")]).spec("tasks")
    (answers,) = play(spec, {"all-train-0": ["first", "second"]}).values()
    first, second, end = answers
    assert (first, second.observation, second.done) == ("Who are you?", "Who are you?", False)
    assert end.done


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "the seats of the policy are first, second; set `seat` to one of them"),
        ({"seat": "third"}, "the episode has no trace of the policy with the seat third"),
        (
            {"env": {"is_first_again": True}},
            "the seat first has 2 traces; an episode of the policy has one",
        ),
    ],
)
def test_episode_without_exactly_one_trace_fails_with_its_reason(
    options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    spec = Registry([described(tmp_path, "tiny_pair", num_test=0, **options)]).spec("tasks")
    (answers,) = play(spec, {"all-train-0": ["first", "second"]}).values()
    assert answers[-1] == f"verifiers taskset 'tiny_pair': {why}"


@pytest.mark.long
@pytest.mark.slow
def test_episode_at_taskset_limit_has_a_final_score(tmp_path: Path) -> None:
    limit = {"env": {"pupil": {"max_turns": 2}}, "min_reward": -2.0, "max_reward": 2.0}
    spec = Registry([described(tmp_path, "tiny_talk", **limit)]).spec("tasks")
    ring = json.dumps({"tool": "ring", "arguments": {"times": 1}})
    answers = play(spec, {"all-train-0": [ring, ring], "all-train-1": ["one", "two"]})
    (_, on, cut), (_, _, end) = answers.values()
    assert (spec.start_score, on.reward) == (0.5, 0.5)
    assert (cut.done, cut.is_truncated, cut.reward) == (True, False, 0.5)
    assert [each.metrics for each in (cut, end)] == [{"at_limit": 1.0}, {"at_limit": 0.0}]
    assert (end.done, end.is_truncated, end.reward, end.is_success) == (True, False, 1.0, True)


@pytest.mark.slow
@pytest.mark.long
def test_its_taskset_is_trained_and_evaluated_here(tmp_path: Path) -> None:
    reference = described(tmp_path, "tiny_words")
    where = [f"envhub.envs=[{reference}]", "tasks=[{env: tasks, subset: all}]"]
    sizes = ["train.num_steps=2", "eval.num_items=2"]
    with Run(tmp_path, *where, *sizes) as run:
        assert run.wait() == 0, run.output
        assert run.left_over() == []
    ledger = run.read("ledger.json")
    assert balances(ledger)
    assert ledger["version"] == 2
    assert ledger["trained"] >= 8
    assert any(line["reward/mean"] > 0 for line in run.metrics())
    report = run.read("report.json")
    assert [report[name]["n"] for name in ("before", "after")] == [2, 2]


@pytest.mark.long
@pytest.mark.slow
def test_check_env_fails_a_taskset_only_for_action_validity(
    tmp_path: Path, repository: Path
) -> None:

    reference = described(tmp_path, "tiny_words", first=40)
    done = subprocess.run(
        [sys.executable, "run.py", "check-env", reference],
        cwd=repository,
        capture_output=True,
        encoding="utf-8",
        timeout=280,
    )
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert failed == ["FAIL actions     the action 'no such action' counts as valid"], done.stdout


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("python: /no/such/python\ntaskset: {id: x}", "/no/such/python: No such file"),
        ("python: python3\ntaskset: {first: 3}", "taskset.id must name a taskset"),
        ("python: 'false'\ntaskset: {id: x}", "its process has ended with exit code 1"),
        ("taskset: {id: x}\nseats: a", "seats"),
    ],
)
def test_impossible_taskset_is_refused_by_name(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=why):
        Registry([f"verifiers:{tmp_path / 'tasks.yaml'}"])

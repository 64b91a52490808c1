"""Laws of dataset episodes: turns, tools, and play at a real hub by an actor's session."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actor.formats.tools import make_renderer
from actor.rollout.env_client import Environments, HubClient, HubSession
from actor.rollout.episode import Turn, run_episode
from common.config.actor import AgentFormat, AgentOptions
from common.config.algorithm import Advantage, AlgorithmSection
from common.config.env import RemoteOptions
from common.config.envhub import EnvhubSection
from common.config.envs import EnvsSection
from common.config.learner import CriticSection
from common.wire.codec import pack_record, unpack_record
from common.wire.messages import EndReason
from envhub import main
from envhub.env import EnvFailure, Style, UnknownItem
from envhub.envs.dataset.env import DatasetEnv, check, make_spec
from envhub.hosting.saved import state_text
from learner.algorithms.critic import with_advantages
from learner.batch.batching import Sample
from tests.actor.formats.trl_templates import tokenizer_of
from tests.actor.rollout.playing import LEASE, Letters
from tests.envhub.envs.dataset.made import GSM8K, make, play, played, run

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
]


def test_episode_without_step_function_has_one_turn(tmp_path: Path) -> None:
    options = make(tmp_path)
    assert make_spec(options).subsets["data"].max_turns == 1
    result = played(options, "It is 7.")
    assert (result.done, result.reward, result.is_success) == (True, 1.0, True)


def test_step_function_answers_until_it_ends(tmp_path: Path) -> None:
    options = make(tmp_path, [{"prompt": "?", "answer": "stop"}], reward="exact_text", step="step")
    first = played(options, "wait")
    assert (first.observation, first.done, first.reward) == ("turn 1", False, 0.0)
    last = played(options, "wait", "stop")
    assert (last.observation, last.done, last.reward) == ("turn 2", True, 1.0)
    assert not last.is_truncated


def test_turn_limit_scores_and_is_no_truncation(tmp_path: Path) -> None:
    options = make(tmp_path, step="step", max_turns=2)
    last = played(options, "wait", "7")
    assert (last.done, last.is_truncated, last.reward) == (True, False, 1.0)
    assert last.metrics is not None
    assert last.metrics["at_limit"] == 1.0


@pytest.mark.parametrize(("value", "words"), [("3", "returned 3, not (text, is_done)")])
def test_wrong_value_of_a_step_function_is_a_failure(
    tmp_path: Path, value: str, words: str
) -> None:
    options = make(tmp_path)
    (tmp_path / "own.py").write_text(f"def step(completion): return {value}\n", encoding="utf-8")
    changed = make(tmp_path, step="")
    object.__setattr__(changed.dataset, "step", f"{tmp_path}/own.py:step")
    with pytest.raises(EnvFailure) as caught:
        played(changed, "7")
    assert words in str(caught.value)
    assert "data.step" in str(caught.value)
    assert "record 1 of" in str(caught.value)
    assert check(options) == []


def test_tool_calls_reach_the_step_function(tmp_path: Path) -> None:
    records = [{**each, "tools": TOOLS} for each in GSM8K]
    options = make(tmp_path, records, tools="tools", step="tool_step")
    spec = make_spec(options)
    assert [each["name"] for each in spec.tools] == ["add", "submit"]
    call = json.dumps({"tool": "add", "arguments": {"a": 3, "b": 4}})
    assert played(options, call).observation == "7"
    submitted = json.dumps({"tool": "submit", "arguments": {"answer": "7"}})
    assert played(options, call, submitted).reward == 1.0
    assert played(options, call, "I say 7").reward == 1.0  # A text that is no call is the answer.


ADD = json.dumps({"tool": "add", "arguments": {"a": 3, "b": 4}})


@pytest.mark.parametrize(
    "action",
    [
        "",
        '{"tool": "add", "arguments": [3, 4]}',
        '{"tool": "add", "arguments": {"a": 7',
        f"{ADD}\n{ADD}",
        f"Action: {ADD}\nObservation: 9\nAction: {ADD}",
        f"Action: both.\nAction: {ADD}\nAction: {ADD}",
    ],
)
def test_faulty_call_is_refused_and_the_episode_continues(tmp_path: Path, action: str) -> None:
    records = [{**each, "tools": TOOLS} for each in GSM8K]
    options = make(tmp_path, records, tools="tools", step="tool_step")
    refused = played(options, action)
    assert (refused.done, refused.is_valid) == (False, False)
    assert played(options, action, "I say 7").reward == 1.0
    options = make(tmp_path, records, tools="tools")
    ended = played(options, action)
    assert (ended.done, ended.is_valid) == (True, False)


def test_call_is_read_with_a_label_or_json_text_in_its_arguments(tmp_path: Path) -> None:
    records = [{**each, "tools": TOOLS} for each in GSM8K]
    options = make(tmp_path, records, tools="tools", step="tool_step")
    noted = json.dumps({"tool": "note", "arguments": {"text": "Next. Action: add"}})
    assert played(options, noted).observation == "no such tool"
    assert played(options, f"Action: {noted}").observation == "no such tool"
    added = json.dumps({"tool": "add", "arguments": json.dumps({"a": 3, "b": 4})})
    assert played(options, added).observation == "7"


@pytest.mark.parametrize(
    ("tools", "step", "words"),
    [
        (TOOLS * 2, "", "data.tools=tools: has the tool 'add' twice"),
        ([{"name": 3}], "tool_step", "a tool needs a name"),
        ("[", "tool_step", "data.tools=tools: not JSON"),
        ([], "tool_step", "expects a list of tools"),
    ],
)
def test_wrong_tools_are_refused(tmp_path: Path, tools: Any, step: str, words: str) -> None:
    records = [{**each, "tools": tools} for each in GSM8K]
    (line,) = check(make(tmp_path, records, tools="tools", step=step))
    assert words in line


def tool(name: str) -> dict[str, Any]:
    return {"name": name, "parameters": {"city": {"type": "string"}}}


def test_records_have_tools_of_their_own(tmp_path: Path) -> None:
    tools: list[Any] = [TOOLS, json.dumps([tool("look")]), None]
    records = [{**each, "tools": own} for each, own in zip(GSM8K, tools, strict=True)]
    spec = make_spec(make(tmp_path, records, tools="tools", step="tool_step"))
    assert spec.tools == ()

    async def tools_of(item: int) -> list[dict[str, Any]]:
        env = spec.make(Style.COMPACT)
        assert isinstance(env, DatasetEnv)
        await env.reset(f"data-train-{item}", 0)
        return env.item_tools()

    names = [[each["name"] for each in run(tools_of(item))] for item in range(3)]
    assert names == [["add", "submit"], ["look", "submit"], []]
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    assert run(tools_of(1))[0]["parameters"] == schema
    call = json.dumps({"tool": "add", "arguments": {"a": 3, "b": 4}})
    options = make(tmp_path, records, tools="tools", step="tool_step")
    assert played(options, call).observation == "7"


def test_held_out_records_have_tools_of_their_own(tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({**GSM8K[0], "tools": [tool("look")]}), encoding="utf-8")
    records = [{**each, "tools": TOOLS} for each in GSM8K]
    options = make(tmp_path, records, tools="tools", step="tool_step", eval=str(held_out))
    spec = make_spec(options)
    assert spec.tools == ()

    async def tools_of(item_id: str) -> list[str]:
        env = spec.make(Style.COMPACT)
        assert isinstance(env, DatasetEnv)
        await env.reset(item_id, 0)
        return [each["name"] for each in env.item_tools()]

    assert run(tools_of("data-train-0")) == ["add", "submit"]
    assert run(tools_of("data-test-0")) == ["look", "submit"]


def test_call_of_a_tool_may_be_the_answer(tmp_path: Path) -> None:
    records = [{**each, "tools": TOOLS, "answer": "add"} for each in GSM8K]
    options = make(tmp_path, records, tools="tools", reward="user:called")
    assert [each["name"] for each in make_spec(options).tools] == ["add"]
    assert played(options, '{"tool": "add", "arguments": {"a": 1}}').reward == 1.0
    assert played(options, "7").reward == 0.0


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([{"name": 3}], "record 2 of train.jsonl: a tool needs a name"),
        ("[", "record 2 of train.jsonl: not JSON"),
        ([{"name": "a", "parameters": "x"}], "record 2 of train.jsonl: parameters of a: not JSON"),
    ],
)
def test_wrong_tools_of_a_record_are_named(tmp_path: Path, tools: Any, words: str) -> None:
    records = [{**each, "tools": TOOLS if i != 1 else tools} for i, each in enumerate(GSM8K)]
    (line,) = check(make(tmp_path, records, tools="tools", step="tool_step"))
    assert words in line


CALLS = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}]
SHOWN_CALLS = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}}]


@pytest.mark.parametrize("content", [None, "", "I look."])
def test_calls_of_a_prompt_reach_the_agent(tmp_path: Path, content: str | None) -> None:
    prompt = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": content, "tool_calls": CALLS, "refusal": None},
        {"role": "tool", "tool_call_id": "c", "content": "a key"},
        {"role": "user", "content": "so?"},
    ]

    async def opened() -> list[Any]:
        env = make_spec(make(tmp_path, [{"prompt": prompt, "answer": "4"}])).make(Style.COMPACT)
        assert isinstance(env, DatasetEnv)
        await env.reset("data-train-0", 0)
        return env.first_messages()

    assert run(opened()) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": content or "", "tool_calls": SHOWN_CALLS},
        {"role": "tool", "content": "a key", "tool_call_id": "c"},
    ]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"content": None}, "has the content None, which is not text"),
        ({"function_call": {"name": "look"}}, "has 'function_call', which cannot be shown"),
        ({"tool_calls": {"name": "look"}}, "which is not a list"),
        ({"tool_calls": [{"function": {}}]}, "which has no name of a function"),
        ({"tool_calls": [{"name": "a", "arguments": "{"}]}, "a call of 'a' whose arguments are no"),
    ],
)
def test_message_that_cannot_be_shown_is_named(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    message = {"role": "assistant", "content": "", **fields}
    prompt = [{"role": "user", "content": "a"}, message, {"role": "user", "content": "b"}]
    (line,) = check(make(tmp_path, [{"prompt": prompt, "answer": "4"}]))
    assert "record 1 of train.jsonl: message 2 of the prompt" in line
    assert words in line


def test_unknown_item_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownItem, match="the last is 'data-train-2'"):
        run(play(make(tmp_path), "7", item=3))


@contextmanager
def serving(options: EnvsSection, *envs: str) -> Iterator[str]:
    """Yield the address of a hub that serves the dataset, or these environments."""
    app, sessions = main.build(
        [*(envs or ["dataset"])],
        EnvhubSection(),
        token=None,
        options=options,
        remote=RemoteOptions(),
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = main.uvicorn.Config(app, log_config=None, access_log=False)
        server = main.DrainingServer(config, sessions)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


class Conversation(Letters):
    """Renders messages as letters, each after its role."""

    def opened(self, messages: list[dict[str, str]], text: str) -> list[int]:
        shown = [*messages, {"role": "user", "content": text}]
        return [ord(c) for m in shown for c in f"[{m['role']}]{m['content']}"]


async def _episodes(url: str, *answers: str) -> list[Any]:
    """Return the episodes of an actor that gives these answers to the first item."""
    played: list[Any] = []
    async with HubClient(url, token=None, timeout_s=60.0) as hub:
        environments = await Environments.of(hub, style="compact")
        for answer in answers:
            ids = [ord(c) for c in answer] + [0]

            async def act(_: list[int], __: object, ids: list[int] = ids) -> Turn:
                return Turn(ids, [0.0] * len(ids), [0] * len(ids))

            async def opened() -> HubSession:
                return await environments.open("dataset", "data-train-0", seed=0)

            episode = await run_episode(
                replace(LEASE, deadline_s=60.0, horizon=9),
                open_session=opened,
                act=act,
                render=Conversation(),
                instruction=environments.instruction("dataset"),
                max_tokens=500,
                turn_tokens=50,
                actor="actor-0",
            )
            played.append(unpack_record(pack_record(episode)))
    return played


@pytest.mark.slow
def test_actor_plays_a_dataset_at_a_real_hub(tmp_path: Path) -> None:
    file = f"{tmp_path}/user.py"
    reward = {"right": f"{file}:right", "style": {"function": f"{file}:half", "weight": 0.5}}
    options = make(tmp_path, reward=reward, system="Be short.")
    with serving(options) as url:
        right, wrong = asyncio.run(_episodes(url, "7", "8"))
    text = "".join(map(chr, right.token_ids[~right.loss_mask]))
    assert text == f"[system]Be short.[user]{GSM8K[0]['question']}"
    assert (right.end_reason, right.num_turns) == (EndReason.DONE, 1)
    assert right.reward == pytest.approx(1.25 / 1.5)
    assert wrong.reward == pytest.approx(0.25 / 1.5)
    assert {k: v for k, v in right.metrics.items() if k != "reward_s"} == {
        "reward_right": 1.0,
        "reward_style": 0.5,
    }
    assert np.isfinite(right.metrics["reward_s"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AgentFormat.FUNCTION_CALL, AgentFormat.REACT])
def test_actor_calls_the_tools_of_the_item(tmp_path: Path, kind: AgentFormat) -> None:
    tokenizer = tokenizer_of("qwen2_5")
    records = [{**each, "tools": [tool(name)]} for each, name in zip(GSM8K, "abc", strict=True)]
    options = make(tmp_path, [{**r, "answer": "b"} for r in records], tools="tools")
    object.__setattr__(options.dataset, "reward", f"{tmp_path}/user.py:called")
    call = '<tool_call>\n{"name": "b", "arguments": {"city": "x"}}\n</tool_call>'
    if kind is AgentFormat.REACT:
        call = 'Thought: Look.\nAction: {"tool": "b", "arguments": {"city": "x"}}'
    ids = tokenizer.encode(f"{call}<|im_end|>", add_special_tokens=False)

    async def played_item(url: str, item: int) -> Any:
        async with HubClient(url, token=None, timeout_s=60.0) as hub:
            environments = await Environments.of(hub, style="compact")

            async def act(_: list[int], __: object) -> Turn:
                return Turn(ids, [0.0] * len(ids), [0] * len(ids))

            return await run_episode(
                replace(LEASE, deadline_s=60.0, horizon=9, env="dataset"),
                open_session=lambda: environments.open("dataset", f"data-train-{item}", seed=0),
                act=act,
                render=make_renderer(tokenizer, kind).of("dataset"),
                instruction=environments.instruction("dataset"),
                max_tokens=4000,
                turn_tokens=100,
                actor="actor-0",
                options=AgentOptions(format=kind),
            )

    with serving(options) as url:
        other, own = (asyncio.run(played_item(url, item)) for item in (0, 1))
    prompt = tokenizer.decode(own.token_ids[~own.loss_mask])
    assert '"b"' in prompt or "- b:" in prompt
    assert '"a"' not in prompt
    assert "- a:" not in prompt
    assert (own.reward, own.end_reason) == (1.0, EndReason.DONE)
    # The environment gets a call of any tool, and its reward compares the name.
    assert other.reward == 1.0


@pytest.mark.slow
def test_failing_reward_ends_only_its_episode(tmp_path: Path) -> None:
    options = make(tmp_path, reward="user:breaks")
    with serving(options) as url:
        (failed,) = asyncio.run(_episodes(url, "7"))
    assert failed.end_reason is EndReason.ENV_ERROR
    assert failed.end_reason.is_infrastructure_failure
    assert "reward breaks failed on record 1 of train.jsonl: KeyError: " in failed.error
    assert (failed.reward, failed.metrics) == (0.0, {})


@pytest.mark.slow
def test_score_at_the_turn_limit_is_the_value_target(tmp_path: Path) -> None:
    """Reward .5 at the last turn and V(end) .7: the reward is final, so the target is .5."""
    reward = f"{tmp_path}/user.py:half"
    with serving(make(tmp_path, reward=reward, step="step", max_turns=2)) as url:
        (played,) = asyncio.run(_episodes(url, "wait"))
    assert (played.end_reason, played.num_turns, played.reward) == (EndReason.DONE, 2, 0.5)
    num_tokens = int(played.loss_mask.sum())
    got = with_advantages(
        Sample(trajectory=played, advantage=0.0),
        values=np.zeros(num_tokens, dtype=np.float32),
        bootstrap=0.7,
        log_ratios=np.zeros(num_tokens),
        algorithm=AlgorithmSection(advantage=Advantage.PPO),
        critic=CriticSection(gae_lambda=1.0),
    )
    assert got.value_targets is not None
    assert got.value_targets.tolist() == pytest.approx([0.5] * num_tokens)


def test_saved_conversation_continues_in_another_episode(tmp_path: Path) -> None:
    records = [{"prompt": "?", "answer": "stop"}]
    spec = make_spec(make(tmp_path, records, reward="exact_text", step="step", max_turns=9))

    async def law() -> None:
        first, second = spec.make(Style.COMPACT), spec.make(Style.COMPACT)
        assert isinstance(first, DatasetEnv)
        assert isinstance(second, DatasetEnv)
        await first.reset("data-train-0", 0)
        await first.step("wait")
        await second.reset("data-train-0", 0)
        second.load(json.loads(state_text(first.save())))
        assert await second.render() == await first.render()
        results = [(await env.step("wait")).as_dict() for env in (first, second)]
        assert results[0] == results[1]
        assert results[1]["observation"] == "turn 2"
        ends = [await env.step("stop") for env in (first, second)]
        assert [(end.done, end.reward) for end in ends] == [(True, 1.0)] * 2

    run(law())

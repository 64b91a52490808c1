"""Laws of token capture: an agent that acts as the built-in loop yields the same trajectory."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from actor.formats.renderer import Renderer
from actor.formats.tools import ToolRenderer
from actor.rollout.context import Turn
from actor.rollout.episode import EnvSession, run_episode, trajectory_of
from common.config.actor import AgentFormat, AgentOptions
from common.formats.answers import worded
from common.wire.messages import Trajectory
from tests.actor.agents.endpoint import (
    MAX_TOKENS,
    TURN_TOKENS,
    ByHeart,
    Endpoint,
    endpoint,
    new_episode,
)
from tests.actor.agents.programs import told
from tests.actor.agents.test_tool_calls import LOOK, TOKENIZER, TOOL
from tests.actor.formats.trl_templates import tokenizer_of
from tests.actor.rollout.playing import LEASE, Count, go_on

LEASE_3 = replace(LEASE, horizon=3, deadline_s=120.0)
TASK = "Find it."


@dataclass(slots=True)
class Numbered(ByHeart):
    """A policy by heart whose logprobs and versions differ between tokens."""

    def turn(self, ids: list[int]) -> Turn:
        turn = ByHeart.turn(self, ids)
        number = len(self.given)
        turn.logprobs[:] = [-number - i / 64 for i in range(len(turn.token_ids))]
        turn.versions[:] = [number + i // 3 for i in range(len(turn.token_ids))]
        return turn


@dataclass(frozen=True, kw_only=True)
class Case:
    """A policy's answers, and how both loops read them."""

    texts: Sequence[str]
    native: Renderer
    agent: Renderer
    format: AgentFormat = AgentFormat.PLAIN
    tools: Sequence[dict[str, Any]] = ()


def _calling() -> Case:
    native = ToolRenderer(TOKENIZER, env="toy").of("house", [TOOL["function"]])
    texts = [f"I look.\n{LOOK}", LOOK.replace("up", "down"), LOOK]
    return Case(
        texts=texts,
        native=native,
        agent=native.without_tools(),
        format=AgentFormat.FUNCTION_CALL,
        tools=[TOOL],
    )


def _plain() -> Case:
    renderer = Renderer(TOKENIZER)
    return Case(texts=["go left", "go right", "stop"], native=renderer, agent=renderer)


def _thinking() -> Case:
    thinker = Renderer(tokenizer_of("qwen3_5_think"))
    texts = ["Why a?\n</think>\n\na", "</think>\n\nb", "Why c?\n</think>\n\nc"]
    return Case(texts=texts, native=thinker, agent=thinker)


CASES = {"plain": _plain, "tools": _calling, "thoughts": _thinking}


def session() -> Count:
    return Count([go_on(reward=0.25), go_on(is_valid=False), go_on(reward=1.0)])


def by_built_in_loop(case: Case) -> Trajectory:
    async def opened() -> EnvSession:
        return session()

    return asyncio.run(
        run_episode(
            LEASE_3,
            open_session=opened,
            act=Numbered(case.texts, renderer=case.native).act,
            render=case.native,
            instruction=TASK,
            max_tokens=MAX_TOKENS,
            turn_tokens=TURN_TOKENS,
            actor="actor-0",
            options=AgentOptions(format=case.format),
        )
    )


def message_of(answer: Any) -> dict[str, Any]:
    """Return the message of an answer, which may be a stream."""
    if not isinstance(answer, str):
        return answer["choices"][0]["message"]
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for line in answer.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    own = [{k: v for k, v in each.items() if k != "index"} for each in value]
                    message.setdefault(name, []).extend(own)
                elif name != "role":
                    message[name] = (message.get(name) or "") + value
    return message


def action_of(message: dict[str, Any]) -> str:
    """Return the action as the built-in loop sends it."""
    if not message.get("tool_calls"):
        return message["content"]
    function = message["tool_calls"][0]["function"]
    return json.dumps({"tool": function["name"], "arguments": json.loads(function["arguments"])})


def reply_of(message: dict[str, Any], observation: str) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return {"role": "user", "content": observation}
    number = message["tool_calls"][0]["id"]
    return {"role": "tool", "tool_call_id": number, "content": observation}


async def play(at: Endpoint, case: Case, *, is_streamed: bool, keeps_thoughts: bool) -> None:
    messages = at.episode.first()["messages"]
    assert isinstance(messages, list)
    while True:
        body = {"messages": messages, "stream": is_streamed, "tools": list(case.tools)}
        status, answer = await at.post("/v1/chat/completions", body)
        assert status == 200, answer
        message = message_of(answer)
        _, result = await at.post("/env/step", {"action": action_of(message)})
        if result["done"] or result["truncated"]:
            return
        if not keeps_thoughts:
            message.pop("reasoning_content", None)
        messages = [*messages, message, reply_of(message, result["observation"])]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("keeps_thoughts", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_endpoint_captures_the_same_as_the_built_in_loop(
    name: str, is_streamed: bool, keeps_thoughts: bool
) -> None:
    case = CASES[name]()

    async def run() -> Trajectory:
        policy = Numbered(case.texts, renderer=case.agent)
        task = (worded(case.format, TASK), "")  # The built-in loop explains calls of tools.
        how: dict[str, Any] = {"session": session(), "lease": LEASE_3, "task": task}
        async with endpoint(policy, **how) as at:
            await play(at, case, is_streamed=is_streamed, keeps_thoughts=keeps_thoughts)
            at.episode.leave()
            return trajectory_of(LEASE_3, at.play, actor="actor-0", wall_s=0.0)

    captured = asyncio.run(run())
    assert told(captured) == told(by_built_in_loop(case))
    assert captured.num_turns == 3
    assert sorted(set(captured.versions.tolist()))[-1] > 3


def test_task_of_an_agent_lists_the_tools_of_the_item() -> None:
    session = Count([go_on()])
    session.tools = [{"name": "look", "description": "Looks there.", "parameters": {}}]

    async def task() -> dict[str, object]:
        episode, _ = new_episode(ByHeart([""]), session=session, task=(TASK, ""))
        return episode.first()

    shown = asyncio.run(task())
    assert "- look: Looks there. arguments: {}" in str(shown["instruction"])
    assert str(shown["messages"]).count("Looks there.") == 1
    assert str(shown["instruction"]).endswith(TASK)

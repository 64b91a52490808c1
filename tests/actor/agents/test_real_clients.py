"""Laws of the agents' endpoint with the real packages: whichever asks, the same is captured."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actor.agents.agents import Agents
from actor.rollout.episode import EnvSession
from common.config.actor import ActorSection
from common.wire.messages import EndReason, Trajectory
from tests.actor.agents.endpoint import MAX_TOKENS, RENDERER, TURN_TOKENS, ByHeart
from tests.actor.agents.programs import told
from tests.actor.agents.test_tool_calls import LOOK
from tests.actor.rollout.test_episode import LEASE, Count, go_on
from tests.venvs import CLIENTS, python_with

TEXTS = (f"I look.\n{LOOK}", "go <left>")
PROGRAM = '''
import json, os, sys
from urllib.request import Request, urlopen
IS_GPT = not sys.argv[1].startswith("messages")
if IS_GPT:
    import openai
else:
    import anthropic

ENV, KEY = os.environ["LONGSTRIDE_ENV"], os.environ["OPENAI_API_KEY"]
PARAMETERS = {"type": "object", "properties": {"where": {"type": "string"}}}
TOOL = {"name": "look", "description": "Look there."}
FUNCTION = {**TOOL, "parameters": PARAMETERS}
SYSTEM, USER = "Be brief.", {"role": "user", "content": "find it"}
HOW = {"model": "policy"}
client = openai.OpenAI() if IS_GPT else anthropic.Anthropic()

def step(action):
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    urlopen(Request(ENV + "/step", json.dumps({"action": action}).encode(), headers)).close()

def chat(is_streamed):
    def ask():
        told = {**HOW, "messages": messages, "tools": [{"type": "function", "function": FUNCTION}]}
        if not is_streamed:
            return client.chat.completions.create(**told).choices[0].message
        told["stream_options"] = {"include_usage": True}
        with client.chat.completions.stream(**told) as stream:
            kinds = [event.type for event in stream]
            assert "content.delta" in kinds, kinds
            final = stream.get_final_completion()
        assert final.usage.completion_tokens > 0
        return final.choices[0].message
    messages = [{"role": "system", "content": SYSTEM}, USER]
    said = ask()
    (call,) = said.tool_calls
    messages += [said, {"role": "tool", "tool_call_id": call.id, "content": "a key"}]
    return said.content, call.function.name, json.loads(call.function.arguments), ask().content

def responses(is_streamed, by_id=False):
    def ask(**more):
        told = {**HOW, "instructions": SYSTEM, "tools": [{"type": "function", **FUNCTION}], **more}
        if not is_streamed:
            return client.responses.create(**told)
        with client.responses.stream(**told) as stream:
            deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
            final = stream.get_final_response()
        assert "".join(deltas) == final.output_text
        return final
    first = ask(input="find it")
    said, call = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "a key"}
    if by_id:
        last = ask(input=[result], previous_response_id=first.id)
    else:
        last = ask(input=[USER, *first.output, result])
    assert (first.status, last.status) == ("completed", "completed")
    told = json.loads(call.arguments)
    return first.output_text, call.name, told, last.output_text

def messages(is_streamed):
    def ask():
        tools = [{**TOOL, "input_schema": PARAMETERS}]
        told = {**HOW, "max_tokens": 200, "system": SYSTEM, "messages": asked, "tools": tools}
        if not is_streamed:
            return client.messages.create(**told)
        with client.messages.stream(**told) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == final.content[0].text
        assert final.usage.output_tokens > 0
        return final
    asked = [USER]
    first = ask()
    said, call = first.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "a key"}
    asked += [{"role": "assistant", "content": first.content}]
    asked += [{"role": "user", "content": [result]}]
    last = ask()
    assert (first.stop_reason, last.stop_reason) == ("tool_use", "end_turn")
    return said.text, call.name, call.input, last.content[0].text

def refused():
    """The package reads the errors as its own."""
    if IS_GPT:
        package, ask = openai, lambda client, **more: client.responses.create(
            model="m", input="x", **more)
        wrong, other = openai.OpenAI(api_key="wrong"), {"background": True}
    else:
        package, ask = anthropic, lambda client, **more: client.messages.create(
            model="m", max_tokens=9, messages=[USER], **more)
        wrong, other = anthropic.Anthropic(api_key="wrong"), {"tool_choice": {"type": "any"}}
    far = [{"role": "user", "content": "far " * 4000}]
    if IS_GPT:
        long = {"input": far}
        assert client.responses.input_tokens.count(model="m", input="x").input_tokens > 0
        words = "Your input exceeds the context window"
    else:
        long = {"messages": far}
        counted = client.messages.count_tokens(model="m", messages=[USER])
        assert counted.input_tokens > 0, counted
        words = "prompt is too long: "
    assert [model.id for model in client.models.list()] == ["policy"]
    try:
        client.responses.create(model="m", **long) if IS_GPT else client.messages.create(
            model="m", max_tokens=9, **long)
    except package.BadRequestError as told:
        assert words in str(told), told
    else:
        raise AssertionError("a long prompt was answered")
    for error, who, more in [
        (package.BadRequestError, client, other),
        (package.BadRequestError, client, {"extra_body": {"frobnicate": 1}}),
        (package.AuthenticationError, wrong, {}),
    ]:
        try:
            ask(who, **more)
        except error as told:
            assert told.body, told
        else:
            raise AssertionError(f"{error} was not raised")

got = eval(sys.argv[1])
assert got == ("I look.", "look", {"where": "up"}, "go <left>"), got
refused()
step(got[3])
'''
STREAMED = ("chat(True)", "responses(True)", "messages(True)")
WHOLE = ("chat(False)", "responses(False)", "messages(False)")
BY_ID = "responses(False, by_id=True)"


async def _played(python: str, program: Path, how: str) -> Trajectory:
    async def session() -> EnvSession:
        return Count([go_on(reward=1.0, done=True)])

    cfg = ActorSection(
        endpoint=True,
        agent=[python, str(program), how],
        max_model_len=MAX_TOKENS,
        max_turn_tokens=TURN_TOKENS,
    )
    agents = Agents(cfg, actor="actor-0", renderer=RENDERER)
    try:
        return await agents.play(
            replace(LEASE, deadline_s=280.0),
            open_session=session,
            act=ByHeart(TEXTS).act,
            task=("", ""),
            may_repeat=False,
        )
    finally:
        await agents.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "speaks",
    [
        pytest.param((*STREAMED, BY_ID), id="streamed"),
        pytest.param((STREAMED[0], *WHOLE), id="whole", marks=pytest.mark.long),
    ],
)
def test_real_client_packages_yield_identical_captures(
    speaks: tuple[str, ...], tmp_path: Path
) -> None:
    python, program = python_with(*CLIENTS), tmp_path / "agent.py"
    program.write_text(PROGRAM, encoding="utf-8")
    captured: dict[str, Any] = {}
    for how in speaks:
        got = asyncio.run(_played(python, program, how))
        assert (got.end_reason, got.reward) == (EndReason.DONE, 1.0), (how, got.error)
        captured[how] = told(got)
    assert all(each == captured[speaks[0]] for each in captured.values())

"""Laws of the agents' endpoint with 64 agents of the official clients in another process."""

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from actor.agents import streams
from actor.agents.server import AgentServer
from actor.rollout.context import Turn
from actor.rollout.episode import EnvSession, OnTokens, trajectory_of
from common.wire.messages import Trajectory
from tests.actor.agents.endpoint import RENDERER, ByHeart, new_episode, part_of
from tests.actor.agents.test_lineages import LONG, of_engine, trained
from tests.venvs import CLIENTS, python_with

NUM_AGENTS = 64
ENGINE_S = 3.0  # Seconds of a slow answer. Its client sends the request again after one second.
NUM_LEFT = 4  # Tokens of a stream whose client then leaves.
PROGRAM = """
import asyncio, json, sys
import anthropic, openai

TOOL = {"type": "function", "function": {"name": "look", "description": "Look there.",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}}}}

def asked(text):
    return {"model": "policy", "messages": [{"role": "user", "content": text}]}

async def play(agent):
    gpt = openai.AsyncOpenAI(base_url=agent["url"] + "/v1", api_key=agent["key"])
    claude = anthropic.AsyncAnthropic(base_url=agent["url"], api_key=agent["key"])
    chat = gpt.chat.completions.create

    async def chat_stream(word):
        stream = await chat(**asked(word), stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    async def responses(word):
        async with gpt.responses.stream(model="policy", input=word) as stream:
            return (await stream.get_final_response()).output_text

    async def messages(word):
        async with claude.messages.stream(**asked(word), max_tokens=150) as stream:
            return await stream.get_final_text()

    async def slow(word):
        impatient = gpt.with_options(timeout=1.0, max_retries=60)
        return (await impatient.chat.completions.create(**asked(word))).choices[0].message.content

    async def slow_claude(word):
        impatient = claude.with_options(timeout=1.0, max_retries=60)
        return (await impatient.messages.create(**asked(word), max_tokens=150)).content[0].text

    async def several(word):
        answer = await chat(**asked(word), n=2, logprobs=True)
        for choice in answer.choices:
            tokens = "".join(entry.token for entry in choice.logprobs.content)
            assert tokens == choice.message.content + "<|im_end|>", tokens
        return [choice.message.content for choice in answer.choices]

    async def calls(word):
        how = asked(word)
        first = (await chat(**how, tools=[TOOL])).choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "a key"}
                   for call in first.tool_calls]
        how["messages"] += [first.model_dump(exclude_none=True), *results]
        last = await chat(**how, tools=[TOOL])
        wheres = [json.loads(call.function.arguments)["where"] for call in first.tool_calls]
        return [f"{wheres[0]}|{wheres[1]}", last.choices[0].message.content]

    async def left(word):
        stream = await chat(**asked(word), stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        return []

    kinds = (chat_stream, responses, messages, slow, slow_claude, several, calls, left)
    got = await asyncio.gather(*(kind(kind.__name__) for kind in kinds))
    again = await chat_stream("left")  # The aborted answer is not repeated.
    await asyncio.gather(gpt.close(), claude.close())
    return [*got, again]

async def main():
    agents = json.load(sys.stdin)
    print(json.dumps(await asyncio.gather(*map(play, agents))))

asyncio.run(main())
"""


@dataclass(slots=True)
class Numbered(ByHeart):
    """A policy whose answers have numbers. It records the tokens that its caller has received."""

    delivered: list[tuple[list[int], Turn]] = field(default_factory=list[tuple[list[int], Turn]])
    texts_of: list[str] = field(default_factory=list[str])  # Those of complete answers.
    num: int = 0
    num_left: int = 0

    async def act(
        self, ids: list[int], session: EnvSession, /, on_tokens: OnTokens | None = None
    ) -> Turn:
        prompt = RENDERER.shown(ids)
        number = self.num
        self.num += 1
        text = f"answer {number}"
        if "calls" in prompt and "tool_response" not in prompt:
            each = '<tool_call>\n{"name": "look", "arguments": {"where": "%s"}}\n</tool_call>'
            wheres = [f"{number}a", f"{number}b"]
            text = "\n".join(each % where for where in wheres)
            shown = "|".join(wheres)
        else:
            shown = text
        said = [*RENDERER.completion(text), RENDERER.end_of_turn_ids[0]]
        logprobs = [-number - i / 1024 for i in range(len(said))]
        turn = Turn(said, logprobs, [3] * len(said), num_prompt=len(ids))
        if "slow" in prompt:
            await asyncio.sleep(ENGINE_S)
        num_given = 0
        is_first = "left" in prompt and not self.num_left
        self.num_left += is_first
        try:
            for at in range(len(said) - 1) if on_tokens is not None else ():
                await asyncio.sleep(0)
                if is_first and at == NUM_LEFT:
                    await asyncio.get_running_loop().create_future()  # Until it is aborted.
                num_given = at + 1
                assert on_tokens is not None
                on_tokens(part_of(turn, at, at + 1))
            num_given = len(said)
            self.texts_of.append(shown)
            return turn
        finally:
            self.delivered.append((list(ids), part_of(turn, 0, num_given)))


def flat(answers: list[Any]) -> list[str]:
    return [text for each in answers for text in ([each] if isinstance(each, str) else each)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_official_clients_at_once_have_each_answer_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams in three APIs, retries, `n`, logprobs, parallel calls and left streams."""
    monkeypatch.setattr(streams, "RECONNECT_S", 0.2)
    program = tmp_path / "clients.py"
    program.write_text(PROGRAM, encoding="utf-8")
    policies = [Numbered(()) for _ in range(NUM_AGENTS)]

    async def run() -> tuple[list[Any], list[Trajectory]]:
        server = AgentServer()
        await server.start()
        async with AsyncExitStack() as stack:
            agents: list[dict[str, object]] = []
            episodes: list[Any] = []
            for number, policy in enumerate(policies):
                lease = replace(LONG, episode_id=f"g/{number}")
                episode, play = new_episode(policy, lease=lease)
                stack.enter_context(server.serving(episode))
                where = server.describe(episode)
                agents.append({"url": where["anthropic_url"], "key": episode.key})
                episodes.append((episode, play, lease))
            client = await asyncio.create_subprocess_exec(
                *(python_with(*CLIENTS), f"{program}"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            output, _ = await client.communicate(json.dumps(agents).encode())
            assert client.returncode == 0
            trajectories: list[Trajectory] = []
            for episode, play, lease in episodes:
                episode.leave()
                trajectories.append(trajectory_of(lease, play, actor="actor-0", wall_s=0.0))
                episode.failed.cancel()
        assert not server.refused
        await server.close()
        return json.loads(output), trajectories

    answered, trajectories = asyncio.run(run())
    for policy, answers, trajectory in zip(policies, answered, trajectories, strict=True):
        texts = flat(answers)
        assert sorted(texts) == sorted(policy.texts_of)
        assert len(texts) == len(policy.delivered) - 1 == 10
        assert trained(trajectory) == of_engine(policy.delivered)
        assert set(trained(trajectory).values()) == {1}

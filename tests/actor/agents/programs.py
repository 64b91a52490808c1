"""Agents that are short programs, played as a run would, and the same by our own loop."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from actor.agents.agents import Agents
from actor.formats.renderer import Renderer
from actor.rollout.env_client import HubStepResult
from actor.rollout.episode import EnvSession, OnTokens, Turn, run_episode
from common.config.actor import ActorSection
from common.wire.messages import Lease, Trajectory
from learner.ingest.intake import refusal
from tests.actor.formats.test_renderer import TOKENIZERS
from tests.actor.rollout.playing import LEASE, Count, go_on

TOKENIZER = TOKENIZERS["chatml"]
RENDERER = Renderer(TOKENIZER)
MAX_TOKENS, TURN_TOKENS = 400, 12
LOOP = """
import json, os, sys
from urllib.request import Request, urlopen
from urllib.error import HTTPError
base, key, env = (os.environ[n] for n in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "LONGSTRIDE_ENV"))
def call(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, {"Authorization": "Bearer " + key})) as answer:
        return json.load(answer)
def ask(messages, **more):
    reply = call(base + "/chat/completions", {"messages": messages, "model": "policy", **more})
    return reply["choices"][0]["message"]["content"]
def step(action):
    return call(env + "/step", {"action": action})
messages = call(env)["messages"]
"""
NATIVE = """
while True:
    said = ask(messages)
    result = step(said)
    if result["done"] or result["truncated"]:
        break
    messages += [{"role": "assistant", "content": said}]
    messages += [{"role": "user", "content": result["observation"]}]
"""
FORGETFUL = """
while True:
    result = step(ask(messages))
    if result["done"] or result["truncated"]:
        break
    messages = [{"role": "system", "content": "Be brief."},
                {"role": "user", "content": result["observation"]}]
"""


async def act(ids: list[int], _: EnvSession, /, on_tokens: OnTokens | None = None) -> Turn:
    """Sample an answer from the whole prompt, sometimes without an end of turn."""
    number = sum(i * each for i, each in enumerate(ids)) % 97
    said = TOKENIZER.encode(f"go north {number}", add_special_tokens=False)[: TURN_TOKENS - 1]
    is_stopped = number % 3 > 0
    said = [*said, RENDERER.end_of_turn_ids[0]] if is_stopped else said
    logprobs = [-0.01 * (number + i) for i in range(len(said))]
    return Turn(
        said, logprobs, [number % 5] * len(said), is_stopped=is_stopped, num_prompt=len(ids)
    )


async def open_session() -> EnvSession:
    going: list[HubStepResult | Exception | float] = [
        go_on(reward=0.1 * n, is_valid=n != 2) for n in range(3)
    ]
    return Count([*going, go_on(reward=1.0, done=True)])


def settings(*command: str, **changes: Any) -> ActorSection:
    how = {"max_model_len": MAX_TOKENS, "max_turn_tokens": TURN_TOKENS, **changes}
    return ActorSection(endpoint=True, agent=list(command), **how)


def played(
    program: str,
    *,
    lease: Lease = LEASE,
    session: Callable[[], Awaitable[EnvSession]] = open_session,
    policy: Any = act,
    task: tuple[str, str] = ("Find it.", ""),
    **changes: Any,
) -> Trajectory:
    async def run() -> Trajectory:
        cfg = settings(sys.executable, "-c", LOOP + program, **changes)
        agents = Agents(cfg, actor="actor-0", renderer=RENDERER)
        try:
            return await agents.play(
                lease, open_session=session, act=policy, task=task, may_repeat=False
            )
        finally:
            await agents.close()

    return asyncio.run(run())


def own_loop(lease: Lease, task: tuple[str, str], *, max_tokens: int = MAX_TOKENS) -> Trajectory:
    how: dict[str, Any] = {"max_tokens": max_tokens, "turn_tokens": TURN_TOKENS, "actor": "actor-0"}
    told = {"instruction": task[0], "acknowledgement": task[1]}
    return asyncio.run(
        run_episode(lease, open_session=open_session, act=act, render=RENDERER, **told, **how)
    )


def refused(trajectory: Trajectory) -> str:
    how: dict[str, Any] = {"learner_version": 4, "max_group_size": 2, "max_tokens": MAX_TOKENS}
    return refusal(trajectory, vocab_size=len(TOKENIZER), **how)


def told(trajectory: Trajectory) -> dict[str, Any]:
    """Return all that does not depend on clocks."""
    names = trajectory.__dataclass_fields__
    found = {name: getattr(trajectory, name) for name in names if not name.endswith("_s")}
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in found.items()}

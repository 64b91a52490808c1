"""Laws of agents that run their own loop: training uses exactly the sampled answers."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from actor.agents.agents import Agents
from actor.agents.episode import AgentEpisode
from actor.agents.server import AgentServer
from actor.rollout.context import History, Room
from actor.rollout.episode import EnvSession, EpisodeState, Turn
from common.config.actor import ActorSection, AgentLifetime, ContextKind
from common.config.algorithm import AlgorithmSection, PolicyLoss
from common.config.horizon import HorizonUnit
from common.config.run_config import RunConfig
from common.errors import ConfigError, EngineError, EnvError, LongstrideError
from common.segments import as_rows
from common.wire.messages import EndReason, Lease, Trajectory
from tests.actor.agents.programs import (
    FORGETFUL,
    MAX_TOKENS,
    NATIVE,
    RENDERER,
    TURN_TOKENS,
    act,
    open_session,
    own_loop,
    played,
    refused,
    settings,
    told,
)
from tests.actor.rollout.playing import LEASE, Count, go_on
from tests.processes import is_gone
from tests.venvs import CLIENTS, python_with


@pytest.mark.parametrize("task", [("Find it.", ""), ("Find it.", "OK."), ("", "")])
@pytest.mark.parametrize(
    "lease",
    [
        replace(LEASE, horizon=3),
        replace(LEASE, horizon=9),
        replace(LEASE, horizon=60, horizon_unit=HorizonUnit.TOKENS, max_turns=9),
    ],
)
def test_agent_trajectory_equals_the_built_in_loop(lease: Lease, task: tuple[str, str]) -> None:
    captured = played(NATIVE, lease=lease, task=task)
    assert told(captured) == told(own_loop(lease, task))
    assert captured.num_turns > 1
    assert refused(captured) == ""


def test_agent_history_beyond_context_ends_context_full() -> None:
    lease, task = replace(LEASE, horizon=9), ("Find it.", "")
    captured = played(NATIVE, lease=lease, task=task, max_model_len=75)
    assert told(captured) == told(own_loop(lease, task, max_tokens=75))
    assert captured.end_reason is EndReason.CONTEXT_FULL


def test_rewritten_history_becomes_one_segment_per_prompt() -> None:
    given: list[list[int]] = []

    async def noted(ids: list[int], session: EnvSession) -> Turn:
        given.append(list(ids))
        return await act(ids, session)

    got = played(FORGETFUL, lease=replace(LEASE, horizon=9), policy=noted)
    rows = as_rows(got)
    assert [row.token_ids[: row.loss_mask.argmax()].tolist() for row in rows] == given
    assert [row.loss_mask.sum() > 0 for row in rows] == [True] * 4
    assert (got.end_reason, got.num_turns, got.reward) == (EndReason.DONE, 4, 1.0)
    assert refused(got) == ""


def test_early_agent_exit_ends_the_episode() -> None:
    got = played("step(ask(messages)); ask(messages)", lease=replace(LEASE, horizon=9))
    assert (got.end_reason, got.num_turns, got.reward) == (EndReason.DONE, 1, 0.0)
    assert refused(got) == ""  # what it asked after its last step belongs to that
    never = played("ask(messages)")
    assert (never.num_turns, never.num_invalid_actions) == (1, 1)
    assert refused(never) == ""


def test_environment_limit_reaches_the_agent_as_truncation() -> None:
    async def open_limited() -> EnvSession:
        return Count([go_on(), go_on(reward=0.5, done=True, is_truncated=True)])

    last = "\nassert result['truncated'] and not result['done'], result"
    got = played(NATIVE + last, lease=replace(LEASE, horizon=9), session=open_limited)
    assert (got.end_reason, got.num_turns, got.reward) == (EndReason.TRUNCATED, 2, 0.5)
    assert refused(got) == ""


def test_answers_without_step_count_toward_token_horizon() -> None:
    lease = replace(LEASE, horizon_unit=HorizonUnit.TOKENS, max_turns=9, horizon=3 * TURN_TOKENS)
    got = played("step(ask(messages))\nwhile True: ask(messages)", lease=lease)
    assert (got.end_reason, got.num_turns) == (EndReason.HORIZON, 1)
    assert 2 * TURN_TOKENS < got.loss_mask.sum() <= 3 * TURN_TOKENS
    assert refused(got) == ""


@pytest.mark.parametrize(
    ("program", "end", "words"),
    [
        ("ask(messages); print('no such door'); sys.exit(3)", EndReason.ABORTED, "no such door"),
        ("pass", EndReason.ABORTED, "without a request"),
        ("ask(messages); import time; time.sleep(60)", EndReason.DEADLINE, "within 1 s"),
    ],
)
def test_failing_agent_earns_no_reward(program: str, end: EndReason, words: str) -> None:
    got = played(program, lease=replace(LEASE, deadline_s=1.0 if "sleep" in program else 60.0))
    assert (got.end_reason, got.reward) == (end, 0.0)
    assert words in got.error
    assert refused(got) == ""


DAEMON = """
import subprocess, sys
step(ask(messages))
left = [sys.executable, "-c", "import time; time.sleep(60)"]
print(subprocess.Popen(left, start_new_session=True).pid, flush=True)
"""


def test_agent_daemon_does_not_delay_episode_end() -> None:
    """It holds what the agent printed to open, in a process group of its own."""
    began = time.monotonic()
    got = played(DAEMON, lease=replace(LEASE, horizon=9, deadline_s=120.0))
    assert time.monotonic() - began < 50.0  # The daemon lives for a minute.
    assert (got.end_reason, got.num_turns) == (EndReason.DONE, 1)
    assert refused(got) == ""


SLEEPER = """
import os, time
with open(PATH + ".part", "w") as file: file.write(str(os.getpid()))
os.rename(PATH + ".part", PATH)
time.sleep(600)
"""
PLAYER = """
import asyncio, sys
from dataclasses import replace
from actor.agents.agents import Agents
from common.config.actor import AgentLifetime
from tests.actor.agents.programs import RENDERER, act, open_session, settings
from tests.actor.rollout.playing import LEASE
async def play(lifetime):
    program = f"PATH = {sys.argv[2] + lifetime!r}" + sys.argv[1]
    cfg = settings(sys.executable, "-c", program, agent_lifetime=AgentLifetime(lifetime))
    agents, lease = Agents(cfg, actor="a", renderer=RENDERER), replace(LEASE, deadline_s=600.0)
    how = {"open_session": open_session, "act": act, "task": ("", ""), "may_repeat": False}
    await agents.play(lease, **how)
async def play_all():
    await asyncio.gather(*map(play, AgentLifetime))
asyncio.run(play_all())
"""


@pytest.mark.long
@pytest.mark.slow
def test_killed_actor_terminates_its_agents(tmp_path: Path, repository: Path) -> None:
    """One agent lives as long as its episode, the other one as long as the run."""
    command = [sys.executable, "-c", PLAYER, SLEEPER, str(tmp_path / "pid-")]
    paths = [tmp_path / f"pid-{lifetime}" for lifetime in AgentLifetime]
    player = subprocess.Popen(command, cwd=repository)
    try:
        until(lambda: all(path.exists() for path in paths) or player.poll() is not None)
        agents = [int(path.read_text(encoding="utf-8")) for path in paths]
    finally:
        player.kill()
        player.wait(timeout=60)
    for agent in agents:
        until(lambda agent=agent: is_gone(agent))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200.0
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


UNHEARD = """
import threading, time
step(ask(messages))
other = [{"role": "user", "content": "Another beginning."}]
threading.Thread(target=lambda: ask(other), daemon=True).start()
while not os.path.exists(PATH): time.sleep(0.01)
"""


def test_answer_to_disconnected_client_is_not_recorded(tmp_path: Path) -> None:
    num_asked, is_asked = 0, tmp_path / "is-asked"

    async def slow(ids: list[int], session: EnvSession) -> Turn:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 2:
            is_asked.touch()
            await asyncio.sleep(50.0)  # The client disconnects.
        return await act(ids, session)

    program = f"PATH = {str(is_asked)!r}" + UNHEARD
    got = played(program, lease=replace(LEASE, horizon=9), policy=slow)
    assert num_asked == 2
    assert (got.end_reason, got.num_turns, len(got.segment_starts)) == (EndReason.DONE, 1, 0)
    assert refused(got) == ""


def test_oversized_first_message_ends_as_context_full() -> None:
    """The server refuses the agent's request, and the agent exits: this is not a failure."""
    got = played("ask([{'role': 'user', 'content': 'far ' * 2000}])")
    assert got.end_reason is EndReason.CONTEXT_FULL
    assert "without a request" not in got.error
    assert "request exceeds the context: The prompt has" in got.error


def test_environment_failure_ends_episode_as_env_error(tmp_path: Path) -> None:
    async def failing() -> EnvSession:
        return Count([EnvError("worker died")])

    got = played(NATIVE, session=failing)
    assert got.end_reason is EndReason.ENV_ERROR
    assert "worker died" in got.error


def test_engine_failure_ends_the_actor() -> None:
    async def dead(_: list[int], __: EnvSession) -> Turn:
        raise EngineError("engine died")

    with pytest.raises(LongstrideError, match="engine died"):
        played(NATIVE, policy=dead)


def test_swallowed_internal_error_still_fails_the_episode() -> None:
    async def broken(_: list[int], __: EnvSession) -> Turn:
        raise KeyError("slot 7")

    got = played("try:\n    ask(messages)\nexcept HTTPError:\n    step('left')", policy=broken)
    assert (got.end_reason, got.reward) == (EndReason.ABORTED, 0.0)
    assert "KeyError: 'slot 7'" in got.error
    assert refused(got) == ""


def test_error_names_the_missing_agent_command() -> None:
    async def run() -> Trajectory:
        agents = Agents(settings("/no/such/agent"), actor="a", renderer=RENDERER)
        try:
            how: dict[str, Any] = {"task": ("", ""), "may_repeat": False}
            return await agents.play(LEASE, open_session=open_session, act=act, **how)
        finally:
            await agents.close()

    got = asyncio.run(run())
    assert got.end_reason is EndReason.ABORTED
    assert "/no/such/agent" in got.error


USER = {"messages": [{"role": "user", "content": "x"}]}
BAD: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("/v1/chat/completions", {**USER, "n": 0}, 400, "n"),
    ("/v1/chat/completions", {"messages": [], "model": "m"}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, 400, "tools"),
    ("/v1/chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, 400, "messages"),
    ("/v1/chat/completions", {**USER, "stream": 2}, 400, "stream"),
    ("/v1/chat/completions", {**USER, "tools": [{"type": "function"}]}, 400, "tools"),
    ("/v1/chat/completions", {**USER, "max_tokens": 0}, 400, "max_tokens"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x " * 900}]},
        400,
        "messages",
    ),
    ("/v1/completions", {"prompt": [5, 10**6]}, 400, "prompt"),
    ("/v1/completions", {"prompt": ["a", "b"]}, 400, "prompt"),
    ("/env/step", {"action": 5}, 400, "action"),
    ("/v1/embeddings", {}, 404, None),
]


def test_bad_requests_get_counted_api_errors() -> None:
    async def run() -> None:
        server = AgentServer()
        await server.start()
        room = Room(max_tokens=MAX_TOKENS, turn_tokens=TURN_TOKENS)
        play = EpisodeState(keeps_last=False, history=History(RENDERER, room))
        episode = AgentEpisode(
            LEASE,
            session=await open_session(),
            act=act,
            play=play,
            renderer=RENDERER,
            room=(MAX_TOKENS, TURN_TOKENS),
            task=("", ""),
        )

        async def post(path: str, body: Any, key: str) -> tuple[int, dict[str, Any]]:
            headers = {"Authorization": f"Bearer {key}"}
            async with http.post(server.url + path, data=body, headers=headers) as reply:
                return reply.status, await reply.json()

        good = json.dumps({**USER, "max_tokens": 3})
        chat = "/v1/chat/completions"
        async with aiohttp.ClientSession() as http:
            with server.serving(episode):
                for path, body, status, param in BAD:
                    got, told = await post(path, json.dumps(body), episode.key)
                    assert (got, told["error"]["param"]) == (status, param), (body, told)
                    assert all(told["error"][name] for name in ("message", "code", "type"))
                assert (await post(chat, b"{", episode.key))[0] == 400
                assert (await post(chat, good, "wrong"))[1]["error"]["code"] == "invalid_api_key"
                assert not episode.tape().token_ids  # none of them has left a trace
                status, answer = await post(chat, good, episode.key)
                assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
                assert sum(episode.tape().loss_mask) == 3
                assert answer["choices"][0]["finish_reason"] == "length"
                status, answer = await post("/v1/completions", '{"prompt": "go"}', episode.key)
                assert (status, answer["object"]) == (200, "text_completion")
            status, told = await post(chat, good, episode.key)
            assert (status, told["error"]["code"]) == (401, "episode_ended")
        await server.close()
        assert server.refused.total() == len(BAD) + 3
        assert episode.refused.total() == len(BAD) + 1  # the others were of no episode
        assert server.refused["context_length_exceeded"] == 1

    asyncio.run(run())


def test_concurrent_questions_are_answered_sequentially() -> None:
    program = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    list(pool.map(lambda n: ask([{"role": "user", "content": f"part {n}"}]), range(8)))
step("done")
"""
    got = played(program)
    assert len(as_rows(got)) == 8
    assert refused(got) == ""


@pytest.mark.parametrize(
    ("actor", "algorithm", "named"),
    [
        ({"endpoint": True}, {}, "actor.agent"),
        ({"agent": ["x"]}, {}, "actor.agent"),
        ({"endpoint": True, "agent": ["x"], "context": ContextKind.WINDOW}, {}, "actor.context"),
        ({"endpoint": True, "agent": ["x"]}, {"policy_loss": PolicyLoss.GSPO}, "policy_loss"),
    ],
)
def test_contradictions_are_refused(
    actor: dict[str, Any], algorithm: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        RunConfig(actor=ActorSection(**actor), algorithm=AlgorithmSection(**algorithm))


@pytest.mark.slow
def test_documented_openai_agent_equals_built_in_loop() -> None:
    """Run docs/examples/agent.py under an interpreter of its own."""
    program = str(Path(__file__).parents[3] / "docs" / "examples" / "agent.py")
    lease = replace(LEASE, horizon=3, deadline_s=240.0)
    command = [python_with(*CLIENTS), program]

    async def run() -> Trajectory:
        agents = Agents(settings(*command), actor="actor-0", renderer=RENDERER)
        how: dict[str, Any] = {"task": ("Find it.", ""), "may_repeat": False}
        try:
            return await agents.play(lease, open_session=open_session, act=act, **how)
        finally:
            await agents.close()

    assert told(asyncio.run(run())) == told(own_loop(lease, ("Find it.", "")))

"""Laws of agents that play many episodes, each a real process."""

import asyncio
import shutil
import sys
from dataclasses import replace
from typing import Any

import pytest

from actor.agents.agents import Agents
from actor.rollout.episode import EnvSession
from common.config.actor import AgentLifetime
from common.repository import ROOT
from common.wire.messages import EndReason, Lease, Trajectory
from tests.actor.agents.programs import (
    RENDERER,
    act,
    open_session,
    own_loop,
    refused,
    settings,
    told,
)
from tests.actor.rollout.playing import LEASE

TASK = ("Find it.", "")
SERVE = """
import json, os, sys
from urllib.request import Request, urlopen
def call(url, key="", body=None):
    data = json.dumps(body or {}).encode()
    with urlopen(Request(url, data, {"Authorization": "Bearer " + key})) as answer:
        return json.loads(answer.read() or b"null")
def take():
    while True:
        if task := call(os.environ["LONGSTRIDE_EPISODES"]):
            return task
def ask(task):
    body = {"messages": task["messages"], "model": "policy"}
    reply = call(task["base_url"] + "/chat/completions", task["api_key"], body)
    return reply["choices"][0]["message"]["content"]
def step(task, action):
    return call(task["env_url"] + "/step", task["api_key"], {"action": action})
def play(task):
    while True:
        said = ask(task)
        result = step(task, said)
        if result["done"] or result["truncated"]:
            return
        task["messages"] += [{"role": "assistant", "content": said}]
        task["messages"] += [{"role": "user", "content": result["observation"]}]
"""
ONE_BY_ONE = """
while True:
    play(take())
"""
AT_ONCE = """
from threading import Thread
def forever():
    while True:
        play(take())
for _ in range(3):
    Thread(target=forever).start()
"""


def leases(num: int, **changes: Any) -> list[Lease]:
    how: dict[str, Any] = {"horizon": 9, "deadline_s": 120.0, **changes}
    return [replace(LEASE, episode_id=f"e{i}", **how) for i in range(num)]


async def playing(agents: Agents, lease: Lease, **changes: Any) -> Trajectory:
    how: dict[str, Any] = {"open_session": open_session, "act": act, "task": TASK, **changes}
    return await agents.play(lease, may_repeat=False, **how)


def played(program: str, given: list[Lease], **changes: Any) -> list[Trajectory]:
    async def run() -> list[Trajectory]:
        command = (sys.executable, "-c", SERVE + program)
        cfg = settings(*command, agent_lifetime=AgentLifetime.RUN, **changes)
        agents = Agents(cfg, actor="actor-0", renderer=RENDERER)
        try:
            return list(await asyncio.gather(*(playing(agents, each) for each in given)))
        finally:
            await agents.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("program", "num_agents"), [(ONE_BY_ONE, 1), (ONE_BY_ONE, 2), (AT_ONCE, 1)]
)
def test_persistent_agents_equal_the_built_in_loop(program: str, num_agents: int) -> None:
    given = leases(7)
    captured = played(program, given, num_agents=num_agents)
    assert [told(each) for each in captured] == [told(own_loop(each, TASK)) for each in given]
    assert {refused(each) for each in captured} == {""}


@pytest.mark.slow
def test_exited_agent_fails_only_its_own_episodes() -> None:
    program = """
task = take()
if task["episode"] == "e1":
    print("no such door", flush=True)
    ask(task)
    sys.exit(3)
play(task)  # and exits, with 0
"""
    captured = played(program, leases(4))
    ends = [each.end_reason for each in captured]
    assert ends == [EndReason.DONE, EndReason.ABORTED, EndReason.DONE, EndReason.DONE]
    assert "exited with code 3: no such door" in captured[1].error
    assert {each.reward for each in captured} == {0.0, 1.0}


@pytest.mark.slow
def test_agent_start_failure_fails_waiting_episodes() -> None:
    captured = played("sys.exit('no such file')", leases(2))
    assert [each.end_reason for each in captured] == [EndReason.ABORTED] * 2
    assert "exited with code 1: no such file" in captured[0].error


def test_agent_ends_episode_voluntarily_or_with_error() -> None:
    program = """
for complaint in ("", "lost my way"):
    task = take()
    step(task, ask(task))
    call(task["env_url"] + "/end", task["api_key"], {"error": complaint} if complaint else None)
play(take())
"""
    will, lost, done = played(program, leases(3))
    assert (will.end_reason, will.num_turns, refused(will)) == (EndReason.DONE, 1, "")
    assert (lost.end_reason, lost.reward) == (EndReason.ABORTED, 0.0)
    assert "reported an error: lost my way" in lost.error
    assert (done.end_reason, done.num_turns) == (EndReason.DONE, 4)


@pytest.mark.slow
def test_agent_continues_after_an_expired_episode() -> None:
    program = """
from urllib.error import HTTPError
import time
play(take())
task = take()
time.sleep(4.5)  # Longer than its lease; the agent gets no notice of the end.
try:
    ask(task)
except HTTPError as error:
    assert json.load(error)["error"]["code"] == "episode_ended"
else:
    sys.exit(9)
play(take())
"""

    first, second, third = leases(3)

    async def run() -> list[Trajectory]:
        command = (sys.executable, "-c", SERVE + program)
        cfg = settings(*command, agent_lifetime=AgentLifetime.RUN)
        agents = Agents(cfg, actor="actor-0", renderer=RENDERER)
        try:
            begun = await playing(agents, first)  # The start of the process is not in the deadline.
            late = await playing(agents, replace(second, deadline_s=4.0))
            return [begun, late, await playing(agents, third)]
        finally:
            await agents.close()

    ends = [each.end_reason for each in asyncio.run(run())]
    assert ends == [EndReason.DONE, EndReason.DEADLINE, EndReason.DONE]


@pytest.mark.slow
def test_idle_agent_is_reported_and_restarted(caplog: pytest.LogCaptureFixture) -> None:
    how: dict[str, Any] = {"episode_timeout_s": 3.0, "turn_timeout_s": 3.0}
    (got,) = played("import time; time.sleep(60)", leases(1, deadline_s=6.0), **how)
    assert got.end_reason is EndReason.DEADLINE
    assert "no agent process requested the episode" in got.error
    assert caplog.text.count("request no episodes") >= 1
    assert "restarting idle agent process" in caplog.text


def test_engine_failure_propagates_through_persistent_agents() -> None:
    async def dead(_: list[int], __: EnvSession) -> Any:
        raise TimeoutError("engine hangs")

    async def run() -> None:
        command = (sys.executable, "-c", SERVE + ONE_BY_ONE)
        cfg = settings(*command, agent_lifetime=AgentLifetime.RUN)
        agents = Agents(cfg, actor="actor-0", renderer=RENDERER)
        try:
            with pytest.raises(TimeoutError, match="engine hangs"):
                await playing(agents, leases(1)[0], act=dead)
        finally:
            await agents.close()

    asyncio.run(run())


EXAMPLES = ROOT / "docs" / "examples"


def examples(*command: str, lifetime: AgentLifetime, num: int) -> list[Trajectory]:
    async def run() -> list[Trajectory]:
        cfg = settings(*command, agent_lifetime=lifetime)
        agents = Agents(cfg, actor="actor-0", renderer=RENDERER)
        try:
            return list(await asyncio.gather(*(playing(agents, each) for each in leases(num))))
        finally:
            await agents.close()

    return asyncio.run(run())


def test_persistent_example_equals_the_built_in_loop() -> None:
    command = (sys.executable, str(EXAMPLES / "agent_many.py"), "3")
    captured = examples(*command, lifetime=AgentLifetime.RUN, num=7)
    assert [told(each) for each in captured] == [told(own_loop(each, TASK)) for each in leases(7)]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("jq") or not shutil.which("curl"), reason="wants curl and jq")
def test_shell_example_plays_one_segment_per_turn() -> None:
    command = ("sh", str(EXAMPLES / "agent.sh"))
    (got,) = examples(*command, lifetime=AgentLifetime.EPISODE, num=1)
    assert (got.end_reason, got.num_turns, got.reward) == (EndReason.DONE, 4, 1.0)
    assert (len(got.segment_starts), refused(got)) == (4, "")

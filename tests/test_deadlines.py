"""Every wait for another process has a deadline, or an exemption with a reason."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from common.repository import ROOT
from tests.syntax_trees import tree_of

PACKAGES = ("actor", "common", "envhub", "learner", "scheduler", "tools", "benchmarks")
WAITS = {
    *("wait", "wait_for", "join", "acquire", "get", "result", "barrier", "communicate"),
    *("recv", "recv_bytes", "recv_multipart", "drained"),
}
SPAWNS = {"run", "check_output", "check_call"}  # of subprocess
BOUNDS = {"timeout", "timeout_at", "_bounded"}  # an `async with` of these is a deadline
ALLOWED = {  # file:function -> why no deadline of its own is needed
    "common/formats/chat_template.py:run": "a daemon thread that waits for renderings to watch",
    "actor/agents/": "the episode has a deadline",
    "benchmarks/actor/": "a benchmark has the time limit of its command",
    "benchmarks/engines/": "a benchmark has the time limit of its command",
    "benchmarks/long_episodes.py:": "a benchmark has the time limit of its command",
    "benchmarks/actor/bare.py:": "the task of the bare engine is done",
    "actor/api/chat.py:sample": "the tasks are done",
    "actor/api/chat.py:_stream": "the engine limits each turn, and the task always sends its end",
    "actor/engine/engine.py:generate": "the engine rests during a step; a revoked lease ends it",
    "actor/engine/start.py:": "the event of the thread is set before",
    "actor/weights/receive.py:": "the task is done, or rests until there is work",
    "actor/delivery.py:drained": "the caller has the deadline",
    "actor/loops.py:work": "the run or a signal ends it; the tasks are done",
    "actor/rollout/pool.py:_play_to_end": "the stall rule or a revoked lease ends it",
    "tools/evaluate/own_process.py:": "a command waits for its only child",
    "actor/seats/": "each move of the other seat has a deadline",
    "tools/install.py:main": "an installation shows its progress; the user ends it",
    "tools/serve.py:_end": "it serves until a signal",
    "benchmarks/conformance/": "the time limit of a family ends all its processes",
    "common/join/enrol.py:": "polled before with a deadline",
    "learner/training/rank_processes.py:_exchange": "polled before with a deadline",
    "common/wire/sockets.py:": "polled before with a deadline; a send that is done",
    "tools/copies/store.py:each": "a process of its own; the status shows its delay",
    "learner/journal/upkeep.py:_next": "rest until there is work; its own thread",
    "common/weights/transport.py:": "Broadcast.wait has the deadline of its group",
    "common/weights/rendezvous.py:_exchange": "the socket has its own, RCVTIMEO",
    "common/weights/buckets.py:": "a channel's transfers have the deadline of their group",
    "envhub/agentgym/remote.py:": "the caller's request has a deadline",
    "envhub/interop/mcp_server.py:": "a task of the connection; each request has a deadline",
    "common/functions/calls.py:_watched": "the reply is done",
    "common/functions/process.py:": "the caller has a deadline and ends the process",
    "envhub/sandbox/interface.py:run_apart": "each caller's coroutine has its own deadline",
    "actor/rollout/pool.py:_wait_for_trunk": "the end of the trunk or of the pool wakes it",
    "actor/rollout/lockstep.py:begun": "the end of an episode or of the pool wakes it",
    "envhub/sandbox/network.py:_sockets_of": "the process was killed",
    "benchmarks/gpu/expert_checks.py:": "the process group has a deadline",
    "envhub/sandbox/containers.py:run": "the output has ended, or a task with a deadline reads it",
    "envhub/hosting/session.py:__aenter__": "the session's step has a deadline",
    "benchmarks/learner/suite.py:": "a checkpoint has the time limit of its wait",
    "benchmarks/hostile/": "its sockets have the time limit of an answer",
    "benchmarks/transport.py": "a benchmark has the time limit of its command",
    "learner/ingest/buffer.py:_note_scores": "the future is done",
    "learner/ingest/buffer.py:_note_rewards": "the future is done",
    "learner/ingest/group_rewards.py:run": "it rests until the stop; each call has a deadline",
    "learner/journal/metrics.py:close": "each sink closes within a limit of its own",
    "learner/trackers.py:run": "rest until there is work; its own thread, which no step awaits",
    "learner/ingest/intake.py:_next": "rest until there is work; its own thread",
    "tools/api/": "a script waits for its command, as a terminal does",
    "learner/node.py:_ask": "polled before, without waiting",
    "learner/node.py:work": "polled before with a deadline",
    "learner/main.py:": "Checkpoints.wait has the deadline",
    "tools/recompute/command.py:save": "Checkpoints.wait has the deadline",
    "learner/teacher/scorer.py:": "it waits for the teacher or the stop; the run's status shows it",
    "learner/training/checkpoint.py:": "Checkpoints.wait has the deadline of the writer's thread",
    "learner/training/rank_processes.py:_await_loaded": "its pipe was found ready",
    "learner/training/rank_processes.py:_serve_": "rests while rank 0 lives; its pipe closes then",
    "benchmarks/weights/": "a benchmark has the time limit of its command",
    "learner/weights/source.py:": "work of a process group, which has a deadline",
}


def _is_wait(call: ast.Call) -> bool:
    """Return whether a call may wait for another one for ever."""
    if not isinstance(call.func, ast.Attribute):
        return False
    name, keywords = call.func.attr, [k.arg or "" for k in call.keywords]
    if any("timeout" in key or key == "block" for key in keywords):
        return False
    if name in SPAWNS:
        return isinstance(call.func.value, ast.Name) and call.func.value.id == "subprocess"
    if name == "get" and (call.args or keywords):
        return False
    return name in WAITS and len(call.args) == (1 if name == "wait_for" else 0)


def _waits_in(node: ast.AST, function: str = "", *, is_bound: bool = False) -> Iterator[str]:
    """Yield "function:line: text" of every wait that stands in no deadline."""
    for child in ast.iter_child_nodes(node):
        inner, bound = function, is_bound
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            inner, bound = child.name, False
        if isinstance(child, ast.AsyncWith):
            calls = [item.context_expr for item in child.items]
            names = {getattr(c.func, "attr", "") for c in calls if isinstance(c, ast.Call)}
            bound = bound or bool(names & BOUNDS)
        if isinstance(child, ast.Call) and not bound and _is_wait(child):
            yield f"{inner}:{child.lineno}: {ast.unparse(child)[:80]}"
        yield from _waits_in(child, inner, is_bound=bound)


@cache
def _waits_of(path: Path) -> list[str]:
    name = path.relative_to(ROOT).as_posix()
    return [f"{name}:{each}" for each in _waits_in(tree_of(path))]


def _unbound(path: Path) -> list[str]:
    return [each for each in _waits_of(path) if not each.startswith(tuple(ALLOWED))]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_wait_has_a_deadline_or_reason(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert [each for path in files for each in _unbound(path)] == []


def test_only_waits_without_a_deadline_are_found() -> None:
    source = """
async def f(event, queue, thread, process):
    await event.wait()
    thread.join()
    async with asyncio.timeout(3.0):
        await queue.get()
    process.wait(5.0)
    changed.wait_for(lambda: done)
    changed.wait_for(lambda: done, timeout=1.0)
    subprocess.run(["true"])
    names.get("x")
"""
    found = [each.partition(": ")[2] for each in _waits_in(ast.parse(source))]
    assert found == [
        "event.wait()",
        "thread.join()",
        "changed.wait_for(lambda: done)",
        "subprocess.run(['true'])",
    ]


def test_every_deadline_exemption_is_needed() -> None:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = [each for path in paths for each in _waits_of(path)]
    assert [key for key in ALLOWED if not any(each.startswith(key) for each in found)] == []

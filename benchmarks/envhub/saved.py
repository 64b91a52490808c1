"""The suite `saved-states`: the costs of a fork, and of an episode that continues after a loss.

A session saves its state after each step. A new session is opened. It loads a saved state, or
repeats the actions of the earlier turns.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from benchmarks.suite import Suite
from common.errors import ConfigError
from envhub.catalogue.registry import Registry, missing_requirements
from envhub.errors import StateUnsaved
from envhub.hosting.sessions import Sessions

# Environment -> its subset with the longest episodes, and the turn after which a session continues.
CASES = {
    "rooms": ("March", (10, 50)),
    "recall": ("Halls", (10,)),
    "maze": ("DoubleT", (10, 50)),
    "nim": ("Piles", (2,)),
    "wordle": ("Common", (3,)),
    "textcraft": ("depth3", (10,)),
    "babyai": ("BossLevel", (10, 50)),
    "searchqa": ("musique", (5,)),
    "sciworld": ("Measure", (10, 50)),
    "textworld": ("treasure_hunter", (10,)),
}
NUM_EPISODES = 20
IDLE_S = 600.0
STEP_TIMEOUT_S = 120.0
CAPACITY = 4

T = TypeVar("T")


@dataclass(slots=True)
class Costs:
    """Milliseconds of all episodes, by the name of the operation, and the sizes of their states."""

    ms: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    num_bytes: list[int] = field(default_factory=list[int])

    async def timed(self, name: str, work: Awaitable[T]) -> T:
        """Return the result of an operation, and add its time."""
        began_s = time.perf_counter()
        result = await work
        self.add(name, time.perf_counter() - began_s)
        return result

    def add(self, name: str, seconds: float) -> None:
        self.ms.setdefault(name, []).append(1e3 * seconds)


def run_suite(suite: Suite, only: Sequence[str] = ()) -> None:
    """Measure the environments that this machine can serve, at a hub in this process.

    Args:
        only: names of environments; (): all of `CASES`.

    Raises: ConfigError: there is no such environment.
    """
    for name in only:
        if name not in CASES:
            raise ConfigError(f"--only={name}: one of {', '.join(CASES)}")
    suite.title(f"medians of {NUM_EPISODES} episodes of valid actions, in ms")
    for env in only or CASES:
        subset, turns = CASES[env]
        if lacking := missing_requirements([env]):
            suite.note(env, "not measured: " + "; ".join(map(str, lacking)))
            continue
        with suite.check(env):
            for turn, costs in asyncio.run(_measure(env, subset, turns)).items():
                for name, values in costs.ms.items():
                    note = f"{len(values)} times"
                    suite.figure(f"{env}, turn {turn}: {name}", median(values), "ms", note)
                if costs.num_bytes:
                    note = f"largest {max(costs.num_bytes)}"
                    size = median(costs.num_bytes)
                    suite.figure(f"{env}, turn {turn}: size of a state", size, "bytes", note)


async def _measure(env: str, subset: str, turns: tuple[int, ...]) -> dict[int, Costs]:
    """Return the costs by the turn after which a session continues."""
    registry = Registry([env])
    sessions = Sessions(
        registry,
        idle_s=IDLE_S,
        capacity=CAPACITY,
        step_timeout_s=STEP_TIMEOUT_S,
        inline_step_s=STEP_TIMEOUT_S,
    )
    costs = {turn: Costs() for turn in turns}
    try:
        await _continue(sessions, env, f"{subset}-train-0", 0, min(turns), Costs())  # Warm up.
        for number in range(NUM_EPISODES):
            for turn in turns:
                item = f"{subset}-train-{1 + number}"
                await _continue(sessions, env, item, number, turn, costs[turn])
    finally:
        await sessions.stop()
    return costs


async def _continue(
    sessions: Sessions, env: str, item: str, seed: int, turn: int, costs: Costs
) -> None:
    """Play an episode to a turn, and continue it in two other sessions.

    An episode that ends before has no cost of this turn.
    """
    draw = random.Random(f"{item} {turn}")
    actions: list[str] = []
    steps_s: list[float] = []
    saves_s: list[float] = []
    states: list[str] = []
    first, _ = await sessions.create(env, item, seed=seed)
    while len(actions) < turn:
        valid, expert = await sessions.hint(first)
        actions.append(draw.choice(valid) if valid else expert or "look around")
        began_s = time.perf_counter()
        result = await sessions.step(first, actions[-1])
        steps_s.append(time.perf_counter() - began_s)
        if result.done:
            await sessions.delete(first)
            return
        began_s = time.perf_counter()
        with contextlib.suppress(StateUnsaved):
            states.append(await sessions.save(first))
            saves_s.append(time.perf_counter() - began_s)
    await sessions.delete(first)
    for seconds in steps_s:
        costs.add("step", seconds)
    if states:
        for seconds in saves_s:
            costs.add("save", seconds)
        costs.add("save after each turn, sum", sum(saves_s))
        costs.num_bytes += [len(state.encode()) for state in states]
        second, _ = await costs.timed("open", sessions.create(env, item, seed=seed))
        await costs.timed("load", sessions.load(second, states[-1]))
        await sessions.delete(second)
    third, _ = await costs.timed("open", sessions.create(env, item, seed=seed))
    await costs.timed("repeat the actions", _repeat(sessions, third, actions))
    await sessions.delete(third)


async def _repeat(sessions: Sessions, session_id: str, actions: list[str]) -> None:
    for action in actions:
        await sessions.step(session_id, action)

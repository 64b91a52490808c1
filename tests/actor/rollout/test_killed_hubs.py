"""Laws of episodes whose hub process or actor is killed: they continue, token for token."""

import asyncio
import importlib.util
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actor.rollout.hubs import Hubs
from actor.rollout.pool import EpisodePool
from actor.rollout.recording import Recordings
from benchmarks.envhub.hub import ServiceProcess, hub_process
from common.config.actor import ActorSection
from common.wire.messages import HubPlace, Trajectory
from tests.actor.rollout.test_recording import (
    ITEMS,
    WORDS,
    Box,
    PlainLetters,
    SeededEngine,
    compared,
    lease_of,
    options_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KILLED_AT = 5  # The turn before which the hub is killed.
PLAY_S = 300.0
DATASET = (
    "data.train=docs/examples/dataset/questions.jsonl",
    "data.eval_size=2",
    "data.step=docs/examples/dataset/grade.py:hint",
    "data.max_turns=9",
    "reward=docs/examples/dataset/grade.py:is_right",
)
PACKAGES = {"textworld": "textworld", "bfcl": "bfcl_eval"}  # Optional packages of environments.
INSTALLED = [env for env, name in PACKAGES.items() if importlib.util.find_spec(name) is not None]
# Environments in worker processes, whose sessions end with their hub.
ENVS = ("searchqa", "sciworld", "dataset", "minisites", "miniwob", *INSTALLED)
ITEMS |= {
    "searchqa": "nq-train-3",
    "sciworld": "Find-train-3",
    "dataset": "data-train-3",
    "minisites": "Shopping-train-3",
    "miniwob": "choose_date-train-3",
    "textworld": "coin_collector-train-3",
    "bfcl": "base-train-25",  # Some of its tools draw random numbers.
}
WORDS |= {
    "searchqa": [f"<search>the founder of {name}</search>" for name in ("Avel", "Brun", "Cor")],
    "sciworld": ["look around", "inventory", "open door to kitchen", "go to kitchen", "wait1"],
    "dataset": ["no idea", "perhaps Rome or not", "a guess"],
    "minisites": [
        "click [10]",
        "click [13]",
        "click [28]",
        "click [55]",
        "scroll [down]",
        "go_back",
    ],
    "miniwob": ["click [0]", "click [1]", "type [1] [hit] [0]", "type [1] [12/05/2016] [0]"],
    "textworld": ["look", "inventory", "go north", "go south", "go east", "go west"],
    "bfcl": [
        '{"tool": "get_current_speed", "arguments": {}}',
        '{"tool": "get_outside_temperature_from_google", "arguments": {}}',
        '{"tool": "fillFuelTank", "arguments": {"fuelAmount": 1}}',
        '{"tool": "displayCarStatus", "arguments": {"option": "fuel"}}',
    ],
}


async def play(
    places: list[HubPlace],
    engine: SeededEngine,
    env: str,
    *,
    folder: Path | None = None,
    attempt: int = 0,
    until: asyncio.Event | None = None,
) -> Trajectory | None:
    """Play an episode at the hubs that `places` has at the time.

    Args:
        folder: the records of episodes, None for the actor's memory.
        until: stops the actor, which returns None.
    """
    room = {**options_of("full"), "max_model_len": 60_000}  # Pages of a browser are long.
    cfg = ActorSection(env_timeout_s=120.0, **room)
    hubs = Hubs(lambda: list(places), cfg, style="compact")
    await hubs.start()
    box = Box()
    parts: dict[str, Any] = {"engine": engine, "renderer": PlainLetters(), "delivery": box}
    episodes = EpisodePool(
        cfg, actor="a", environments=hubs, rounds=None, recordings=Recordings(folder), **parts
    )
    episodes.start([replace(lease_of(env), deadline_s=PLAY_S, attempt=attempt)])
    try:
        async with asyncio.timeout(PLAY_S):
            while episodes.running_ids and not (until and until.is_set()):
                if episodes.failed.done():
                    break
                await asyncio.sleep(0.01)
        if episodes.failed.done():
            raise episodes.failed.exception() or AssertionError
    finally:
        await episodes.cancel_all()
        await hubs.close()
    for played in box.taken:
        played.metrics.pop("reward_s", None)  # A time.
    return box.taken[0] if box.taken else None


def place_of(hub: ServiceProcess, envs: Sequence[str]) -> HubPlace:
    return HubPlace(url=hub.target.url, token=hub.target.token or "", envs=list(envs))


@pytest.fixture(scope="module")
def survivor() -> Iterator[ServiceProcess]:
    """A hub that lives as long as the tests."""
    with hub_process(ENVS, overrides=DATASET) as hub:
        yield hub


@pytest.mark.parametrize("env", ENVS)
def test_episode_of_a_killed_hub_continues_at_another_one(
    survivor: ServiceProcess, env: str
) -> None:
    sampled, engine = SeededEngine(env), SeededEngine(env)
    other = place_of(survivor, ENVS)
    whole = asyncio.run(play([other], sampled, env))
    with hub_process([env], overrides=DATASET if env == "dataset" else ()) as hub:
        places = [place_of(hub, [env])]

        def kill(turn: int) -> None:
            if turn == KILLED_AT:
                os.kill(hub.process.pid, signal.SIGKILL)
                places[:] = [other]

        engine.before_turn = kill
        again = asyncio.run(play(places, engine, env))
    assert compared(again) == compared(whole)
    assert whole is not None
    assert whole.num_turns > KILLED_AT
    assert whole.error == ""
    assert engine.num_turns == sampled.num_turns  # No turn is sampled twice.


@pytest.mark.parametrize("env", ENVS)
def test_episode_of_a_killed_actor_continues_at_another_one(
    survivor: ServiceProcess, tmp_path: Path, env: str
) -> None:
    sampled, first, second = SeededEngine(env), SeededEngine(env), SeededEngine(env)
    places = [place_of(survivor, ENVS)]
    whole = asyncio.run(play(places, sampled, env))

    async def stopped() -> Trajectory | None:
        stop = asyncio.Event()
        first.before_turn = lambda turn: stop.set() if turn == KILLED_AT else None
        return await play(places, first, env, folder=tmp_path, until=stop)

    assert asyncio.run(stopped()) is None
    again = asyncio.run(play(places, second, env, folder=tmp_path, attempt=1))
    assert compared(again) == compared(whole)
    assert whole is not None
    assert whole.num_turns > KILLED_AT
    assert second.num_turns < sampled.num_turns  # Recorded turns are not sampled again.

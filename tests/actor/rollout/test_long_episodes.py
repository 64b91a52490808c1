"""Laws of episodes of 1,000 turns and 100,000 tokens, at a real hub, with a seeded engine."""

import asyncio
import random
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actor.rollout.context import Turn
from actor.rollout.hubs import Hubs
from actor.rollout.pool import EpisodePool
from actor.rollout.recording import TURNS, Recordings
from common.config.actor import ActorSection, ContextKind
from common.wire.messages import HubPlace, Lease, Trajectory
from envhub.catalogue.registry import Registry
from envhub.hosting.sessions import Sessions
from envhub.http.routes import make_app
from tests.actor.rollout.playing import LEASE
from tests.actor.rollout.test_recording import Box, compared
from tests.actor.toy_servers import serve

NUM_TURNS = 1_000
MAX_TOKENS = 1_500  # Context of the policy.
MAX_BYTES = 800  # Bytes of a turn of 100 tokens that is over.
MAX_GROWTH = 1.6  # Work that grows with the turns would grow by a factor of three.
COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
CONTEXTS = {
    "window": {"context": ContextKind.WINDOW, "context_turns": 4},
    "summary": {"context": ContextKind.SUMMARY},
}


class Words:
    """Renders each word as one token; a turn ends with 0."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {"": 0}
        self._words: list[str] = [""]

    def of(self, env: str, tools: Sequence[Any] = ()) -> "Words":
        return self

    def ids(self, text: str) -> list[int]:
        words = text.split()
        for word in words:
            if word not in self._ids:
                self._ids[word] = len(self._words)
                self._words.append(word)
        return [self._ids[word] for word in words]

    def first_prompt(self, text: str, *, before: tuple[str, str] | None = None) -> list[int]:
        return self.ids(text)

    def after_action(
        self, observation: str, *, is_stopped: bool, end: int | None = None
    ) -> list[int]:
        return self.after_turn(observation, is_stopped=is_stopped)

    def after_turn(self, text: str, *, is_stopped: bool, end: int | None = None) -> list[int]:
        return ([] if is_stopped else [0]) + self.ids(text)

    def action_text(self, token_ids: list[int]) -> str:
        return " ".join(self._words[i] for i in token_ids if i)


class Walker:
    """Goes to a door by the seed. Counts its turns and the longest prompt."""

    frozen_s = 0.0
    version = 1

    def __init__(self, words: Words) -> None:
        self._words = words
        self.num_turns = self.longest = 0
        self.worked_s: list[float] = []  # CPU time of the actor's thread before each turn.
        self.allocated: list[int] = []  # Traced bytes before each turn.
        self.stop_at = 0
        self.stopped = asyncio.Event()

    async def generate(self, ids: Sequence[int], *, seed: int, **_: Any) -> Turn:
        self.num_turns += 1
        self.worked_s.append(time.thread_time())
        self.allocated.append(tracemalloc.get_traced_memory()[0])
        if self.num_turns == self.stop_at:
            self.stopped.set()
        self.longest = max(self.longest, len(ids))
        draw = random.Random(seed)
        text = f"go to {draw.choice(COLOURS)} closed door 1"
        tokens = [*self._words.ids(text), 0]
        return Turn(tokens, [-draw.random() for _ in tokens], [1] * len(tokens))


def lease_of(number: int, *, attempt: int = 0) -> Lease:
    """Return the lease of an item with 500 rooms."""
    return replace(
        LEASE,
        env="rooms",
        item_id=f"March-train-{4 * NUM_TURNS * number + 3}",
        episode_id=f"g/{number}",
        member=number,
        seed=number,
        horizon=NUM_TURNS,
        attempt=attempt,
        deadline_s=3_600.0,
    )


async def play(
    url: str, walker: Walker, words: Words, leases: list[Lease], folder: Path, context: str
) -> list[Trajectory]:
    """Play episodes to their end, or until the actor is killed."""
    cfg = ActorSection(
        env_timeout_s=60.0,
        max_concurrent=256,
        max_model_len=MAX_TOKENS,
        max_turn_tokens=16,
        **CONTEXTS[context],
    )
    hubs = Hubs(lambda: [HubPlace(url=url, token="", envs=["rooms"])], cfg, style="compact")
    await hubs.start()
    box = Box()
    parts: dict[str, Any] = {"engine": walker, "renderer": words, "delivery": box}
    episodes = EpisodePool(
        cfg, actor="a", environments=hubs, rounds=None, recordings=Recordings(folder), **parts
    )
    episodes.start(leases)
    while episodes.running_ids and not walker.stopped.is_set():
        await asyncio.sleep(0.01)
    await episodes.cancel_all()
    await hubs.close()
    assert not episodes.failed.done()
    return box.taken


@pytest.fixture(scope="module")
def url():
    registry = Registry(["rooms"])
    sessions = Sessions(registry, idle_s=600.0, capacity=300, step_timeout_s=60.0)
    app = make_app(sessions, registry, token=None, step_timeout_s=60.0)
    with serve(app, has_lifespan=True) as served:
        yield served


@pytest.mark.slow
@pytest.mark.parametrize("context", CONTEXTS)
def test_late_turn_takes_no_more_work_than_an_early_one(
    url: str, tmp_path: Path, context: str
) -> None:
    words = Words()
    walker = Walker(words)
    asyncio.run(play(url, walker, words, [lease_of(0)], tmp_path, context))
    per_twenty = np.diff(walker.worked_s[::20])  # [49] seconds; least of 15, since others compute.
    assert per_twenty[-15:].min() <= MAX_GROWTH * per_twenty[:15].min()


@pytest.mark.slow
@pytest.mark.parametrize("context", CONTEXTS)
def test_memory_does_not_grow_with_the_turns(url: str, tmp_path: Path, context: str) -> None:
    words = Words()
    walker = Walker(words)
    tracemalloc.start()
    try:
        asyncio.run(play(url, walker, words, [lease_of(0)], tmp_path, context))
    finally:
        tracemalloc.stop()
    early, late = walker.allocated[200], walker.allocated[900]  # A new segment began before.
    assert late - early <= 700 * MAX_BYTES


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("context", CONTEXTS)
def test_actor_killed_at_turn_900_continues(url: str, tmp_path: Path, context: str) -> None:
    words = Words()
    whole = Walker(words)
    (expected,) = asyncio.run(play(url, whole, words, [lease_of(0)], tmp_path / "a", context))
    killed, after = Walker(words), Walker(words)
    killed.stop_at = 900
    assert asyncio.run(play(url, killed, words, [lease_of(0)], tmp_path / "b", context)) == []
    (path,) = (tmp_path / "b").glob(f"*{TURNS}")
    assert path.stat().st_size < 2_000_000
    lease = lease_of(0, attempt=1)
    (played,) = asyncio.run(play(url, after, words, [lease], tmp_path / "b", context))
    assert compared(played) == compared(expected)
    assert expected.num_turns == NUM_TURNS
    assert len(expected.token_ids) > 100_000
    assert whole.longest <= MAX_TOKENS - 16
    assert after.num_turns <= whole.num_turns - 899 + 5  # Turns after its last step come again.

"""Laws of forks: a fork has its trunk's tokens, and each sampled token is trained once."""

import asyncio
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
from common.config.actor import ActorSection
from common.config.groups import GroupsSection
from common.errors import ConfigError
from common.segments import as_rows, asides_of, shared_digest
from common.wire.messages import HubPlace, Lease, Trajectory
from learner.ingest.intake import refusal
from tests.actor.rollout.test_recording import (
    CASES,
    Box,
    PlainLetters,
    SeededEngine,
    Served,
    compared,
    hub,
    lease_of,
    options_of,
)

__all__ = ["hub"]  # A fixture.
GROUPS = GroupsSection(size=4, forks=3, fork_turns=[3, 5])  # Forks after 3, 5 and 3 turns.
TURNS_OF = {1: 3, 2: 5, 3: 3}


def member(env: str, number: int, **changes: Any) -> Lease:
    return replace(
        lease_of(env), episode_id=f"g/{number}", member=number, seed=100 + number, **changes
    )


async def play(
    hub: Served,
    engine: SeededEngine,
    leases: list[Lease],
    recordings: Recordings,
    *,
    kind: str = "full",
    slots: int = 16,
    until: asyncio.Event | None = None,
) -> dict[int, Trajectory]:
    """Play episodes; those that `until` interrupts are absent."""
    cfg = ActorSection(env_timeout_s=20.0, max_concurrent=slots, **options_of(kind))
    names = list(hub.sessions.env_names)
    hubs = Hubs(lambda: [HubPlace(url=hub.url, token="", envs=names)], cfg, style="compact")
    await hubs.start()
    box = Box()
    parts: dict[str, Any] = {"engine": engine, "renderer": PlainLetters(), "delivery": box}
    episodes = EpisodePool(
        cfg, actor="a", environments=hubs, rounds=None, recordings=recordings, **parts
    )
    episodes.start(leases)
    try:
        async with asyncio.timeout(50.0):
            while episodes.running_ids and not (until and until.is_set()):
                await asyncio.sleep(0.001)
                if episodes.failed.done():
                    raise episodes.failed.exception() or AssertionError
    finally:
        await episodes.cancel_all()
        await hubs.close()
    return {played.member: played for played in box.taken}


class CountingEngine(SeededEngine):
    """Counts its tokens, and the turns that it samples at once."""

    def __init__(self, env: str) -> None:
        super().__init__(env)
        self.num_tokens = self.num_running = self.most_running = 0

    async def generate(self, ids: Sequence[int], *, seed: int, **how: Any) -> Turn:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(0.001)
        taken = await super().generate(ids, seed=seed, **how)
        self.num_running -= 1
        self.num_tokens += len(taken.token_ids)
        return taken


def grown(
    hub: Served, env: str, kind: str = "full", slots: int = 16
) -> tuple[dict[int, Trajectory], CountingEngine]:
    engine = CountingEngine(env)
    leases = [member(env, number) for number in range(4)]
    recordings = Recordings(None, groups=GROUPS)
    played = asyncio.run(play(hub, engine, leases, recordings, kind=kind, slots=slots))
    return played, engine


def sampled(trajectory: Trajectory, turn: int) -> list[int]:
    """Return the sampled tokens of a turn."""
    chosen = trajectory.loss_mask & (trajectory.turn_ids == turn)
    return trajectory.token_ids[chosen].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("env", "kind"), CASES)
def test_fork_continues_its_trunk(hub: Served, env: str, kind: str) -> None:
    played, engine = grown(hub, env, kind)
    trunk = played[0]
    assert not trunk.num_shared_turns
    num_sampled = int(trunk.loss_mask.sum())
    for number, num in TURNS_OF.items():
        fork = played[number]
        assert (fork.trunk, fork.num_shared_turns) == (0, num)
        assert fork.shared_digest == shared_digest(trunk, num)
        np.testing.assert_array_equal(fork.turn_states[: num + 1], trunk.turn_states[: num + 1])
        np.testing.assert_array_equal(fork.turn_actions[:num], trunk.turn_actions[:num])
        np.testing.assert_array_equal(fork.turn_scores[:num], trunk.turn_scores[:num])
        assert all(not sampled(fork, turn) for turn in range(num))
        assert sampled(fork, num)
        assert refusal(fork, learner_version=9, max_group_size=4, vocab_size=2**17) == ""
        num_sampled += int(fork.loss_mask.sum())
    # No shared turn is sampled again, and each sampled token is in the loss of one row.
    unlearnt = sum(
        end - first
        for each in played.values()
        for first, end, _ in asides_of(each)
        if not each.loss_mask[first] and each.turn_ids[first] >= each.num_shared_turns
    )
    assert num_sampled + unlearnt == engine.num_tokens


def test_shared_tokens_equal_those_of_the_trunk(hub: Served) -> None:
    played, _ = grown(hub, "rooms")
    trunk = played[0]
    for number, num in TURNS_OF.items():
        fork = played[number]
        length = int((trunk.turn_ids < num).sum())
        np.testing.assert_array_equal(fork.token_ids[:length], trunk.token_ids[:length])
        assert not fork.loss_mask[:length].any()
        assert (fork.versions[:length] == -1).all()
        assert sampled(trunk, num - 1)


class PlacingEngine(SeededEngine):
    """Records the place of each token as its expert."""

    async def generate(self, ids: Sequence[int], *, seed: int, **how: Any) -> Turn:
        taken = await super().generate(ids, seed=seed, **how)
        places = np.arange(len(ids) + len(taken.token_ids) - 1, dtype=np.int16)
        return replace(taken, experts=places[:, None, None])


def test_shared_tokens_have_the_experts_of_the_trunk(hub: Served) -> None:
    leases = [member("rooms", number) for number in range(4)]
    recordings = Recordings(None, groups=GROUPS)
    played = asyncio.run(play(hub, PlacingEngine("rooms"), leases, recordings))
    for number in range(4):
        assert played[number].num_shared_turns == TURNS_OF.get(number, 0)
        places = np.flatnonzero(played[number].expert_mask)
        np.testing.assert_array_equal(played[number].expert_ids[places, 0, 0], places)
        assert len(places) >= played[number].loss_mask.nonzero()[0][-1]


def test_forks_differ_after_their_turn(hub: Served) -> None:
    played, _ = grown(hub, "rooms")
    ends = {tuple(played[number].turn_actions[3:].tolist()) for number in (0, 1, 3)}
    assert len(ends) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "kind"), [("rooms", "full"), ("stubborn", "full"), ("recall", "window")]
)
def test_killed_tree_equals_one_that_was_not(
    hub: Served, tmp_path: Path, env: str, kind: str
) -> None:
    whole, _ = grown(hub, env, kind)
    left = set(range(4))
    again: dict[int, Trajectory] = {}
    for attempt in range(40):
        engine, stop = SeededEngine(env), asyncio.Event()
        engine.before_turn = lambda n, s=stop: s.set() if n == 5 else None
        leases = [member(env, number, attempt=attempt) for number in sorted(left)]
        recordings = Recordings(tmp_path, groups=GROUPS)
        for number, played in asyncio.run(
            play(hub, engine, leases, recordings, kind=kind, until=stop)
        ).items():
            again[number] = played
            left.discard(number)
            recordings.drop(f"g/{number}")
        if not left:
            break
    assert list(tmp_path.iterdir()) == []
    assert {n: compared(t) for n, t in again.items()} == {n: compared(t) for n, t in whole.items()}


@pytest.mark.slow
@pytest.mark.parametrize("env", ["rooms", "stubborn"])
def test_tree_with_lost_hubs_equals_one_without(hub: Served, env: str) -> None:
    whole, _ = grown(hub, env)
    engine = SeededEngine(env)
    engine.before_turn = lambda n: hub.lose_all() if n % 4 == 0 else None
    leases = [member(env, number) for number in range(4)]
    again = asyncio.run(play(hub, engine, leases, Recordings(None, groups=GROUPS)))
    assert {n: compared(t) for n, t in again.items()} == {n: compared(t) for n, t in whole.items()}


def test_fork_on_another_actor_begins_with_the_file(hub: Served, tmp_path: Path) -> None:
    whole, _ = grown(hub, "rooms")
    folder = Recordings(tmp_path, groups=GROUPS)
    asyncio.run(play(hub, SeededEngine("rooms"), [member("rooms", 0)], folder))
    other = Recordings(tmp_path, groups=GROUPS)
    forks = asyncio.run(play(hub, SeededEngine("rooms"), [member("rooms", 2)], other))
    assert compared(forks[2]) == compared(whole[2])


def test_fork_without_trunk_plays_from_its_first_turn(hub: Served) -> None:
    engine = SeededEngine("rooms")
    played = asyncio.run(play(hub, engine, [member("rooms", 2)], Recordings(None, groups=GROUPS)))
    assert played[2].num_shared_turns == 0
    assert sampled(played[2], 0)


def test_fork_of_a_short_trunk_plays_from_its_first_turn(hub: Served) -> None:
    engine = SeededEngine("rooms")
    leases = [member("rooms", number, horizon=3) for number in range(4)]
    leases = [replace(each, horizon=3) for each in leases]
    played = asyncio.run(play(hub, engine, leases, Recordings(None, groups=GROUPS)))
    assert [played[number].num_shared_turns for number in range(4)] == [0, 0, 0, 0]


def test_damaged_state_of_a_fork_plays_from_its_first_turn(hub: Served, tmp_path: Path) -> None:
    folder = Recordings(tmp_path, groups=GROUPS)
    asyncio.run(play(hub, SeededEngine("rooms"), [member("rooms", 0)], folder))
    for path in tmp_path.glob("g%2F2.-1.state"):
        path.write_text("5 damaged", encoding="utf-8")
    other = Recordings(tmp_path, groups=GROUPS)
    forks = asyncio.run(play(hub, SeededEngine("rooms"), [member("rooms", 2)], other))
    assert forks[2].num_shared_turns == 0
    assert not list(tmp_path.glob(f"g%2F2.-1{TURNS}"))


def test_waiting_forks_use_no_slot_and_running_ones_do(hub: Served) -> None:
    played, engine = grown(hub, "rooms", slots=2)
    assert len(played) == 4
    assert engine.most_running == 2


def test_environment_that_can_do_neither_is_refused_by_name(hub: Served) -> None:
    with pytest.raises(ConfigError, match=r"groups\.forks=3: the environment .* can neither save"):
        asyncio.run(
            play(hub, SeededEngine("wild"), [member("wild", 0)], Recordings(None, groups=GROUPS))
        )


def test_rows_of_a_fork_have_tokens_of_its_own(hub: Served) -> None:
    played, _ = grown(hub, "recall", "window")
    for number in TURNS_OF:
        assert all(row.loss_mask.any() for row in as_rows(played[number]))

"""Engines of unlike speed and size, and nodes that join and leave, on the scheduler's real code."""

from collections import defaultdict
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from tests.configs import edited
from tests.tools.simulator.builders import make_play, make_simulated
from tools.simulator.config import SimulatorConfig
from tools.simulator.fleet import Arrival, SimActor
from tools.simulator.workload import SimulatedEpisode
from tools.simulator.world import SimulatedRun

WALL_S = 10.0
SLOTS = 12
WARM_UP_S = 60.0
MINUTE_S = 60.0


class Uneven:
    """Episodes take half to one and a half of `wall_s` on an engine of speed 1."""

    def __init__(self, wall_s: float = WALL_S) -> None:
        self.wall_s = wall_s

    def group(self, rng: Random, *, size: int, **_: Any) -> list[SimulatedEpisode]:
        walls = [self.wall_s * rng.uniform(0.5, 1.5) for _ in range(size)]
        return [make_play(wall_s=wall_s, worth=i % 2) for i, wall_s in enumerate(walls)]

    def step_s(self, rng: Random, num_tokens: int, **_: Any) -> float:
        return 0.1


def unlimited(num_actors: int) -> SimulatorConfig:
    """A run whose learner and gate, by the default margin, have room for all engines."""
    cfg = make_simulated(num_steps=100_000, num_actors=num_actors, max_ahead_steps=8)
    more = {"groups.per_step": 8, "learner.max_lag_steps": 16}
    return edited(cfg, {"actor.max_concurrent": SLOTS, **more})


@dataclass
class Watched:
    """A simulated run, and the episodes that its engines delivered."""

    world: SimulatedRun
    arrivals: list[Arrival] = field(default_factory=list)

    def __post_init__(self) -> None:
        deliver = self.world._fleet._deliver

        def note(arrival: Arrival) -> None:
            self.arrivals.append(arrival)
            deliver(arrival)

        self.world._fleet._deliver = note

    @property
    def actors(self) -> list[SimActor]:
        return self.world._fleet.actors

    def run(self, end_s: float) -> None:
        self.world._events.run_until(end_s, is_over=lambda: False)

    def pace(self, begin_s: float, end_s: float, *, actor: str = "") -> float:
        """Delivered episodes per second, of one engine or of all."""
        ended = [
            arrival
            for arrival in self.arrivals
            if begin_s <= arrival.ended_s < end_s and arrival.actor.startswith(actor)
        ]
        return len(ended) / (end_s - begin_s)

    def check_nothing_lost(self) -> None:
        lifecycle = self.world._core.lifecycle
        lifecycle.assert_balanced()
        assert lifecycle.ledger_report()["failed"] == 0


def pace_of(actor: SimActor, wall_s: float = WALL_S) -> float:
    """Episodes per second of an engine that always has work, by Little's law."""
    return actor.num_slots / (actor.slowness * wall_s)


def unlike(watched: Watched) -> None:
    """A fast engine, one of half its speed, one with a quarter of the concurrency."""
    watched.actors[1].slowness = 2.0
    watched.actors[2].num_slots = SLOTS // 4


def test_throughput_of_unlike_engines_is_their_sum() -> None:
    watched = Watched(SimulatedRun(unlimited(3), Uneven()))
    unlike(watched)
    end_s = WARM_UP_S + 900.0
    watched.run(end_s)
    seen = [watched.pace(WARM_UP_S, end_s, actor=each.name) for each in watched.actors]
    assert [pace_of(each) for each in watched.actors] == pytest.approx([1.2, 0.6, 0.3])
    assert seen == pytest.approx([1.2, 0.6, 0.3], rel=0.05)
    assert sum(seen) == pytest.approx(2.1, rel=0.05)
    watched.check_nothing_lost()


def test_group_of_one_item_goes_to_one_engine() -> None:
    watched = Watched(SimulatedRun(unlimited(3), Uneven()))
    unlike(watched)
    watched.run(WARM_UP_S + 300.0)
    players = defaultdict(set)
    for arrival in watched.arrivals:
        players[arrival.lease.group_id].add(arrival.actor)
    whole = [len(names) == 1 for names in players.values()]
    assert len(whole) > 150
    assert sum(whole) >= 0.95 * len(whole)


@pytest.mark.slow
@pytest.mark.parametrize("is_announced", [True, False])
def test_nodes_that_come_and_go_cost_little_pace(is_announced: bool) -> None:
    """Each minute one of eight nodes leaves and another one joins, for ten minutes."""
    wall_s = 2 * WALL_S
    watched = Watched(SimulatedRun(unlimited(8), Uneven(wall_s)))
    world = watched.world
    minutes = [WARM_UP_S + i * MINUTE_S for i in range(10)]
    for number, at_s in enumerate(minutes):
        slowness = (1.0, 2.0)[number % 2]
        node = SimActor(name=f"late-{number}", slowness=slowness, num_slots=SLOTS)
        leaving = watched.actors[number % 8] if number < 8 else None
        world._events.at(at_s, exchange, watched, leaving, node, is_announced)
    end_s = WARM_UP_S + 10 * MINUTE_S
    expected = 0.0
    for begin_s in minutes:
        watched.run(begin_s + 1e-3)
        living = [each for each in watched.actors if each.is_alive]
        expected += MINUTE_S * sum(pace_of(each, wall_s) for each in living)
    watched.run(end_s)
    expected /= end_s - WARM_UP_S
    assert watched.pace(WARM_UP_S, end_s) == pytest.approx(expected, rel=0.1)
    watched.run(end_s + MINUTE_S)
    watched.check_nothing_lost()
    assert set(world._core.members.by_name) >= {f"late-{i}" for i in range(10)}


def exchange(
    watched: Watched, leaving: SimActor | None, node: SimActor, is_announced: bool
) -> None:
    """Let one node leave, by default the oldest of the late ones, and another one join."""
    fleet = watched.world._fleet
    gone = leaving or next(a for a in fleet.actors if a.is_alive and a.name.startswith("late"))
    fleet.leave(gone, is_announced=is_announced)
    fleet.add(node)

"""Laws of continued episodes: lost and continued equals never lost, token for token."""

import asyncio
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from actor.rollout.context import Turn
from actor.rollout.env_client import HubStepResult
from actor.rollout.hubs import Hubs
from actor.rollout.pool import EpisodePool
from actor.rollout.recording import (
    STATE,
    TURNS,
    EpisodeEvents,
    LagRule,
    RecordedTurn,
    RecordFile,
    Recordings,
    records_here,
)
from common.config.actor import ActorSection, ContextKind
from common.config.horizon import HorizonUnit
from common.wire.messages import EndReason, EpisodeKind, HubPlace, Lease, Trajectory
from envhub.catalogue.registry import Registry
from envhub.hosting.sessions import Sessions
from envhub.http.routes import make_app
from tests.actor.rollout.playing import LEASE, Letters
from tests.actor.toy_servers import serve

ENVS = (
    "rooms",
    "recall",
    "textcraft",
    "babyai",
    "wordle",
    "maze",
    "tests.actor.rollout.stubborn:make_spec",
)
ITEMS = {
    "rooms": "Carry-train-6",
    "recall": "Halls-train-2",
    "textcraft": "depth2-train-4",
    "babyai": "GoToObjMazeS7-train-3",
    "wordle": "Common-train-3",
    "maze": "DoubleT-train-3",
    "stubborn": "any-train-1",
    "changing": "any-train-1",
    "wild": "any-train-1",
}
HORIZON = 9
COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
WORDS = {
    "rooms": [f"go to {colour} closed door 1" for colour in COLOURS],
    "recall": ["turn left", "turn right", "move forward"],
    "textcraft": [
        "inventory",
        "get 1 oak log",
        "get 2 stick",
        "craft 4 oak planks using 1 oak log",
    ],
    "babyai": ["turn left", "turn right", "move forward", "go to red ball 1"],
    "wordle": ["c r a n e", "s l a t e", "w o r d s", "nothing"],
    "maze": ["move up", "move down", "move left", "move right"],
    "stubborn": ["a", "b"],
    "changing": ["a", "b"],
    "wild": ["a", "b"],
}
RULE = LagRule(needs_one_version=False, max_lag_steps=4, max_stretch=2.0, max_ahead_steps=1)
TIMES = ("generate_s", "env_s", "wall_s")


class SeededEngine:
    """Samples a text by the prompt and the seed alone, as an engine at one version does."""

    frozen_s = 0.0

    def __init__(self, env: str) -> None:
        self.version = 3
        self.texts = WORDS[env]
        self.num_turns = 0
        self.before_turn: Callable[[int], None] = lambda _: None

    async def generate(self, ids: Sequence[int], *, seed: int, **_: Any) -> Turn:
        self.num_turns += 1
        self.before_turn(self.num_turns)
        await asyncio.sleep(0)
        draw = random.Random(f"{list(ids)} {seed}")
        text = draw.choice(self.texts)
        if draw.random() < 0.2:
            text = draw.choice(["<branch>look</branch>", "<return>seen</return>", "?"])
        tokens = [*map(ord, text), 0]
        logprobs = [-draw.random() for _ in tokens]
        return Turn(tokens, logprobs, [self.version] * len(tokens), num_prompt=len(ids))


class PlainLetters(Letters):
    def of(self, env: str, tools: Sequence[Any] = ()) -> "PlainLetters":
        return self


class ClockedLetters(PlainLetters):
    """Records the iteration of the event loop in which each turn is read."""

    def __init__(self) -> None:
        self._iteration = 0
        self.seen: list[int] = []
        self._next()

    def _next(self) -> None:
        self._iteration += 1
        asyncio.get_running_loop().call_soon(self._next)

    def action_text(self, token_ids: list[int]) -> str:
        if not self.seen or self.seen[-1] != self._iteration:
            self.seen.append(self._iteration)
        return super().action_text(token_ids)


@dataclass
class Box:
    """A delivery that keeps the trajectories."""

    taken: list[Trajectory] = field(default_factory=list[Trajectory])

    async def put(self, trajectory: Trajectory) -> None:
        self.taken.append(trajectory)


@dataclass
class Served:
    """A served hub. All its sessions may be lost, as by a restart."""

    url: str
    sessions: Sessions

    def lose_all(self) -> None:
        self.sessions._live.pop_expired()
        for session in list(self.sessions._live):
            self.sessions._live.pop(session.session_id)
            self.sessions._release(session.env_name)


@pytest.fixture(scope="module")
def hub() -> Iterator[Served]:
    unlike = [f"tests.actor.rollout.stubborn:make_{name}" for name in ("changing", "wild")]
    registry = Registry([*ENVS, *unlike])
    sessions = Sessions(registry, idle_s=600.0, capacity=100, step_timeout_s=10.0)
    app = make_app(sessions, registry, token=None, step_timeout_s=10.0)
    with serve(app, has_lifespan=True) as url:
        yield Served(url, sessions)


def lease_of(env: str, **changes: Any) -> Lease:
    return replace(
        LEASE, env=env, item_id=ITEMS[env], horizon=HORIZON, attempt=0, deadline_s=60.0, **changes
    )


def options_of(kind: str) -> dict[str, Any]:
    room = {"max_model_len": 4_000, "max_turn_tokens": 60}
    if kind == "plan":
        return {**room, "plan": True, "reflect_every": 2}
    if kind in ("fold", "subagent"):
        return {**room, "context": ContextKind(kind), "branch_turns": 3}
    lengths = {"window": 700, "summary": 1_400}
    return {"context": ContextKind(kind), **room, "max_model_len": lengths.get(kind, 4_000)}


async def play(
    hub: Served,
    engine: SeededEngine,
    lease: Lease,
    recordings: Recordings | None,
    *,
    kind: str = "full",
    until: asyncio.Event | None = None,
    renderer: PlainLetters | None = None,
) -> Trajectory | None:
    """Play an episode; None: `until` stopped the actor before."""
    cfg = ActorSection(env_timeout_s=20.0, **options_of(kind))
    names = list(hub.sessions.env_names)
    hubs = Hubs(lambda: [HubPlace(url=hub.url, token="", envs=names)], cfg, style="compact")
    await hubs.start()
    box = Box()
    parts: dict[str, Any] = {"engine": engine, "renderer": renderer or PlainLetters()}
    episodes = EpisodePool(
        cfg,
        actor="a",
        environments=hubs,
        rounds=None,
        recordings=recordings,
        delivery=cast(Any, box),
        **parts,
    )
    episodes.start([lease])
    try:
        async with asyncio.timeout(50.0):
            while episodes.running_ids and not (until and until.is_set()):
                await asyncio.sleep(0.001)
        if episodes.failed.done():
            raise episodes.failed.exception() or AssertionError
    finally:
        await episodes.cancel_all()
        await hubs.close()
    return box.taken[0] if box.taken else None


def compared(trajectory: Trajectory | None) -> dict[str, Any]:
    """Return all of a trajectory but times and the attempt, with arrays as lists."""
    assert trajectory is not None
    names = set(Trajectory.__dataclass_fields__) - {*TIMES, "attempt"}
    values = {name: getattr(trajectory, name) for name in names}
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}


KINDS = ["full", "window", "summary", "fold", "subagent", "plan"]
CASES = [("recall", kind) for kind in KINDS] + [
    (env, "full") for env in ("rooms", "textcraft", "babyai", "wordle", "maze", "stubborn")
]


@pytest.mark.slow
@pytest.mark.parametrize(("env", "kind"), CASES)
def test_hub_lost_at_every_turn_changes_nothing(
    hub: Served, tmp_path: Path, env: str, kind: str
) -> None:
    sampled, engine = SeededEngine(env), SeededEngine(env)
    whole = asyncio.run(play(hub, sampled, lease_of(env), None, kind=kind))
    engine.before_turn = lambda _: hub.lose_all()
    counts = hub.sessions.counts
    created = counts["created"]
    again = asyncio.run(play(hub, engine, lease_of(env), Recordings(tmp_path), kind=kind))
    assert compared(again) == compared(whole)
    assert whole is not None
    assert whole.num_turns >= 6
    assert counts["created"] - created >= whole.num_turns
    assert engine.num_turns == sampled.num_turns  # No turn is sampled twice.


@pytest.mark.slow
@pytest.mark.parametrize(("env", "kind"), CASES)
def test_actor_killed_at_every_turn_changes_nothing(
    hub: Served, tmp_path: Path, env: str, kind: str
) -> None:
    sampled = SeededEngine(env)
    whole = asyncio.run(play(hub, sampled, lease_of(env), None, kind=kind))

    async def killed() -> tuple[Trajectory | None, int]:
        num_turns = attempt = 0
        while True:
            engine, stop = SeededEngine(env), asyncio.Event()
            engine.before_turn = lambda n, s=stop: s.set() if n == 5 else None
            lease = replace(lease_of(env), attempt=attempt)
            played = await play(hub, engine, lease, Recordings(tmp_path), kind=kind, until=stop)
            num_turns += engine.num_turns
            attempt += 1
            if played is not None:
                return played, num_turns
            assert len(list(tmp_path.glob(f"*{TURNS}"))) == 1

    again, num_turns = asyncio.run(killed())
    assert compared(again) == compared(whole)
    assert num_turns < 4 * sampled.num_turns  # Turns after the last step are sampled again.


def lost_once(hub: Served, env: str, engine: SeededEngine, recordings: Recordings) -> Trajectory:
    """Play an episode whose hub is lost before the fifth turn."""
    engine.before_turn = lambda n: hub.lose_all() if n == 5 else None
    played = asyncio.run(play(hub, engine, lease_of(env), recordings))
    assert played is not None
    return played


def test_other_tasks_run_between_two_turns_of_a_replay(hub: Served, tmp_path: Path) -> None:
    stop_after(hub, tmp_path, HORIZON)

    async def again() -> int:
        letters = ClockedLetters()
        lease = replace(lease_of("rooms"), attempt=1)
        await play(hub, SeededEngine("rooms"), lease, Recordings(tmp_path), renderer=letters)
        return len(letters.seen)

    assert asyncio.run(again()) == HORIZON


def test_versions_stay_as_sampled(hub: Served) -> None:
    engine = SeededEngine("rooms")

    def update(number: int) -> None:
        engine.version = 3 + number
        if number == 5:
            hub.lose_all()

    engine.before_turn = update
    played = asyncio.run(play(hub, engine, lease_of("rooms"), Recordings(None)))
    assert played is not None
    versions = [set(played.versions[played.turn_ids == turn]) - {-1} for turn in range(9)]
    assert versions[:4] == [{4}, {5}, {6}, {7}]
    assert played.num_turns == engine.num_turns == HORIZON


def test_old_record_begins_anew(hub: Served, caplog: pytest.LogCaptureFixture) -> None:
    recordings = Recordings(None, why_not=lambda _, versions: f"too old: {versions}")
    engine = SeededEngine("rooms")
    played = lost_once(hub, "rooms", engine, recordings)
    assert engine.num_turns == 5 + HORIZON
    assert played.num_turns == HORIZON
    assert "beginning anew episode=g/1 steps=4 reason=too old: {3}" in caplog.text


def test_environment_that_does_not_repeat_begins_anew(
    hub: Served, caplog: pytest.LogCaptureFixture
) -> None:
    engine = SeededEngine("changing")
    played = lost_once(hub, "changing", engine, Recordings(None))
    assert engine.num_turns == 5 + HORIZON
    assert played.end_reason.value == "horizon"
    assert "reason=observation differs when step 0 is repeated" in caplog.text


@pytest.mark.parametrize(
    ("damage", "num_turns", "words"),
    [
        (lambda text: text[:-30], HORIZON - 1, ""),  # A torn last line: its step is lost.
        (lambda text: b"", HORIZON, ""),
        (lambda text: b"\0" + text[1:], HORIZON, ""),
        (lambda text: text.replace(b'"env"', b'"enw"', 1), HORIZON, ""),
    ],
)
def test_damaged_record_is_used_up_to_the_damage(
    hub: Served,
    tmp_path: Path,
    caplog,
    damage: Callable[[bytes], bytes],
    num_turns: int,
    words: str,
) -> None:
    whole = asyncio.run(play(hub, SeededEngine("rooms"), lease_of("rooms"), None))
    stop_after(hub, tmp_path, 3)
    (path,) = tmp_path.glob(f"*{TURNS}")
    path.write_bytes(damage(path.read_bytes()))
    engine = SeededEngine("rooms")
    lease = replace(lease_of("rooms"), attempt=1)
    again = asyncio.run(play(hub, engine, lease, Recordings(tmp_path)))
    assert compared(again) == compared(whole)
    assert engine.num_turns == num_turns


def stop_after(hub: Served, folder: Path, num_turns: int, **changes: Any) -> None:
    """Play an episode in an actor that is killed before a turn."""

    async def run() -> None:
        stop = asyncio.Event()
        engine = SeededEngine("rooms")
        generate = engine.generate

        async def generate_until(ids: Sequence[int], *, seed: int, **options: Any) -> Turn:
            if engine.num_turns + 1 == num_turns:
                stop.set()
                await asyncio.Event().wait()  # The turn never ends: the actor is killed.
            return await generate(ids, seed=seed, **options)

        engine.generate = generate_until
        lease = lease_of("rooms", **changes)
        assert await play(hub, engine, lease, Recordings(folder), until=stop) is None

    asyncio.run(run())


@pytest.mark.parametrize("saved", ["2 damaged", "2 00000000 {}"])
def test_damaged_state_begins_anew(hub: Served, tmp_path: Path, caplog, saved: str) -> None:
    whole = asyncio.run(play(hub, SeededEngine("rooms"), lease_of("rooms"), None))
    stop_after(hub, tmp_path, 3)
    (path,) = tmp_path.glob(f"*{STATE}")
    path.write_text(saved, encoding="utf-8")
    engine = SeededEngine("rooms")
    lease = replace(lease_of("rooms"), attempt=1)
    again = asyncio.run(play(hub, engine, lease, Recordings(tmp_path)))
    assert compared(again) == compared(whole)
    assert engine.num_turns == HORIZON
    assert "is damaged: its checksum differs" in caplog.text


@pytest.mark.parametrize(
    "changes", [{"seed": 8}, {"horizon_stage": 2}, {"item_id": "Carry-test-1"}]
)
def test_record_of_another_episode_is_ignored(
    hub: Served, tmp_path: Path, changes: dict[str, Any]
) -> None:
    stop_after(hub, tmp_path, 3)
    engine = SeededEngine("rooms")
    lease = replace(lease_of("rooms"), attempt=1, **changes)
    asyncio.run(play(hub, engine, lease, Recordings(tmp_path)))
    assert engine.num_turns > HORIZON - 3


def test_other_temperature_begins_anew(hub: Served, tmp_path: Path) -> None:
    stop_after(hub, tmp_path, 3)
    engine = SeededEngine("rooms")
    lease = replace(lease_of("rooms"), attempt=1)
    asyncio.run(play(hub, engine, lease, Recordings(tmp_path, temperature=0.5)))
    assert engine.num_turns == HORIZON


def test_horizon_in_seconds_counts_the_recorded_time(hub: Served, tmp_path: Path) -> None:
    """Turns of 0.3 s and a horizon of 1 s: a continued episode ends as early as a whole one."""
    changes: dict[str, Any] = {"horizon_unit": HorizonUnit.SECONDS, "max_turns": 90}
    lease = replace(lease_of("rooms", **changes), horizon=1)

    class Slow(SeededEngine):
        async def generate(self, ids: Sequence[int], *, seed: int, **how: Any) -> Turn:
            await asyncio.sleep(0.3)
            return await super().generate(ids, seed=seed, **how)

    engine = Slow("rooms")
    engine.before_turn = lambda n: hub.lose_all() if n in (2, 3) else None
    played = asyncio.run(play(hub, engine, lease, Recordings(tmp_path)))
    assert played is not None
    assert played.end_reason is EndReason.HORIZON
    assert played.num_turns <= 4  # Three on an idle machine.
    assert played.wall_s >= max(1.0, played.generate_s)


def test_files_end_with_the_acknowledgement(hub: Served, tmp_path: Path) -> None:
    recordings = Recordings(tmp_path)
    asyncio.run(play(hub, SeededEngine("rooms"), lease_of("rooms"), recordings))
    assert sorted(each.suffix for each in tmp_path.iterdir()) == [STATE, TURNS]
    recordings.drop("g/1")
    assert list(tmp_path.iterdir()) == []


def test_abandoned_attempt_leaves_the_files_of_the_next(hub: Served, tmp_path: Path) -> None:
    """Actor a is taken for dead, and b continues. Then a hears that its lease was revoked."""
    a, b = Recordings(tmp_path), Recordings(tmp_path)
    lease = lease_of("rooms")
    asyncio.run(play(hub, SeededEngine("rooms"), lease, a))
    record = b.begin(replace(lease, attempt=1))
    assert record.events.num_steps == HORIZON
    a.abandon("g/1")
    assert [each.name for each in tmp_path.glob(f"*{TURNS}")] == [f"g%2F1.1{TURNS}"]
    again = Recordings(tmp_path).begin(replace(lease, attempt=2))
    assert again.events.num_steps == HORIZON


def test_full_disk_ends_the_record_and_not_the_episode(hub: Served, tmp_path: Path, caplog) -> None:
    folder = tmp_path / "file"
    folder.write_text("no folder", encoding="utf-8")
    engine = SeededEngine("rooms")
    played = lost_once(hub, "rooms", engine, Recordings(folder))
    assert played.num_turns == HORIZON
    assert engine.num_turns == HORIZON  # It continues from memory.
    assert caplog.text.count("episode is not recorded") == 1


def test_events_after_a_full_disk_follow_those_of_the_file(tmp_path: Path) -> None:
    events = EpisodeEvents(head={})
    file = RecordFile(tmp_path / f"a{TURNS}", events)
    result = HubStepResult(
        observation="seen", reward=0.0, done=False, is_valid=True, is_success=False
    )
    for number in range(5):
        events.add_turn(RecordedTurn.of("", Turn([number], [-0.5], [3])))
        events.add_step(str(number), result)
        if number == 3:
            file.close()  # A failed write closes it, too.
        file.append(events)
    assert len(events.steps) == len(events.turns) == 2
    assert file.restore(events)
    assert [(step.action, step.num_turns) for step in events.steps] == [
        (str(number), number + 1) for number in range(5)
    ]
    assert [turn.bare.token_ids for turn in events.turns] == [[number] for number in range(5)]
    assert events.num_steps == events.num_turns == 5


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_lost_record_begins_anew(
    hub: Served, tmp_path: Path, caplog, damage: Callable[[Path], object]
) -> None:
    engine = SeededEngine("rooms")

    def lose(number: int) -> None:
        if number == 5:
            damage(next(tmp_path.glob(f"*{TURNS}")))
            hub.lose_all()

    engine.before_turn = lose
    played = asyncio.run(play(hub, engine, lease_of("rooms"), Recordings(tmp_path)))
    assert played is not None
    assert played.num_turns == HORIZON
    assert engine.num_turns == 5 + HORIZON
    assert "reason=its record is damaged or was removed" in caplog.text


@pytest.mark.parametrize(
    ("versions", "version", "words"),
    [
        ({3}, 3, ""),
        ({3}, 7, ""),  # The configured bound is 4 steps.
        ({3}, 8, "its oldest token has a lag of 5 steps, not 4"),
        (set(range(3, 8)), 8, ""),  # It took 4 steps so far, and may wait one more.
        (set(range(3, 8)), 9, "lag of 6 steps, not 5"),
        (set(range(3, 40)), 40, "lag of 37 steps, not 8"),  # At most twice the bound.
    ],
)
def test_episode_continues_while_it_can_be_trained(
    versions: set[int], version: int, words: str
) -> None:
    reason = RULE.why_not(lease_of("rooms"), versions, version=version)
    assert words in reason
    assert bool(words) == bool(reason)


def test_episode_that_is_trained_by_turns_continues_at_any_lag() -> None:
    rule = replace(RULE, is_by_turn=True)
    assert rule.why_not(lease_of("rooms"), set(range(3, 40)), version=60) == ""
    evaluated = lease_of("rooms", kind=EpisodeKind.EVAL)
    assert rule.why_not(evaluated, {3}, version=4)


def test_lag_of_a_continued_episode_counts_versions_that_are_held_back() -> None:
    rule = replace(RULE, max_lag_steps=16, max_stretch=1.0, hold_back_steps=16)
    assert rule.why_not(lease_of("rooms"), {3}, version=3) == ""
    assert "lag of 17 steps, not 16" in rule.why_not(lease_of("rooms"), {3}, version=4)


def test_evaluation_continues_only_at_the_same_version() -> None:
    lease = lease_of("rooms", kind=EpisodeKind.EVAL)
    assert RULE.why_not(lease, {3}, version=3) == ""
    assert "need the version 4" in RULE.why_not(lease, {3}, version=4)
    assert "need the version 4" in RULE.why_not(lease, {3, 4}, version=4)


def test_joined_actors_of_a_run_and_machine_share_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = records_here("key")
    assert folder is not None
    assert folder == records_here("key")
    other = records_here("another key")
    assert folder != other
    assert folder.stat().st_mode & 0o077 == 0
    assert other is not None
    os.utime(other, (0.0, 0.0))
    assert records_here("key") == folder
    assert not other.exists()  # No run has used it for a week.
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert records_here("key") is None
    assert "stay in memory" in caplog.text

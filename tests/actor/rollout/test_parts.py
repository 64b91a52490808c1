"""Laws of the parts of an episode that an actor sends while the episode runs."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from actor.rollout.context import Turn
from actor.rollout.episode import EnvSession
from actor.rollout.pool import PartSender
from common.config.actor import AgentOptions, ContextKind
from common.segments import part_of
from common.wire.messages import EndReason, Lease, Trajectory
from learner.ingest.intake import refusal
from learner.recovery.step_log import PartName
from tests.actor.rollout.playing import LEASE, Count, episode, go_on

LONG = replace(LEASE, horizon=8)
COLUMNS = ("token_ids", "loss_mask", "logprobs", "versions")


class Engine:
    """Samples two tokens for each turn; its version rises after every second turn."""

    version = 4
    num_turns = 0

    async def act(self, ids: list[int], _: EnvSession) -> Turn:
        version = self.version
        self.num_turns += 1
        self.version = 4 + self.num_turns // 2
        return Turn([120, 0], [-0.5, -0.25], [version, version])


class Box:
    """Keeps the parts that an actor sends."""

    def __init__(self) -> None:
        self.parts: list[Trajectory] = []

    def send_part(self, part: Trajectory) -> None:
        self.parts.append(part)


def play(
    *, bound: int | Callable[[int], int], num_turns: int = 0, lease: Lease = LONG, **how: Any
) -> tuple[Trajectory, list[Trajectory]]:
    """Play an episode to its horizon; return it with its parts.

    Args:
        bound: the bound, or a function from the version to it.
    """
    engine: Any = Engine()
    box: Any = Box()
    sender = PartSender(
        lease,
        engine,
        box,
        actor="actor-0",
        max_lag_steps=lambda: bound if isinstance(bound, int) else bound(engine.version),
        num_turns=num_turns,
    )
    on_turn: Callable[[Any], None] = sender.on_turn
    whole = asyncio.run(
        episode(Count([go_on()]), engine.act, lease=lease, on_turn=on_turn, keeps_last=True, **how)
    )
    return whole, box.parts


def test_turns_are_sent_before_they_are_stale() -> None:
    whole, parts = play(bound=3)
    # Versions of the turns: 4 4 5 5 6 6 7 7. The engine has version 6 after four turns.
    assert [part.num_turns for part in parts] == [4]
    for part in parts:
        num = len(part.token_ids)
        for column in COLUMNS:
            assert getattr(part, column).tolist() == getattr(whole, column)[:num].tolist()
        assert part.end_reason is EndReason.UNFINISHED
        assert not part.loss_mask[-1]  # The prompt of the next turn.
        assert refusal(part, learner_version=8, max_group_size=2) == ""


@pytest.mark.parametrize(("bound", "expected"), [(0, []), (1, [1, 2, 3, 4, 5, 6, 7]), (9, [])])
def test_bound_decides_which_turns_are_sent(bound: int, expected: list[int]) -> None:
    assert [part.num_turns for part in play(bound=bound)[1]] == expected


def test_running_episode_follows_another_bound() -> None:
    assert [part.num_turns for part in play(bound=lambda at: 9 if at < 6 else 1)[1]] == [4, 5, 6, 7]


def test_replayed_turns_are_not_sent_again() -> None:
    assert [part.num_turns for part in play(bound=1, num_turns=5)[1]] == [6, 7]


def test_parts_of_a_window_are_rows_of_the_episode() -> None:
    options = AgentOptions(context=ContextKind.WINDOW, context_turns=1)
    lease = replace(LEASE, horizon=30)
    whole, parts = play(bound=2, lease=lease, options=options, max_tokens=100)
    assert len(whole.segment_starts) == 2
    assert max(len(part.segment_starts) for part in parts) > 1
    for part in parts:
        num = int(part.loss_mask.sum())
        assert (
            part.versions[part.loss_mask].tolist() == whole.versions[whole.loss_mask].tolist()[:num]
        )
        assert refusal(part, learner_version=20, max_group_size=2) == ""


@pytest.mark.parametrize(
    ("options", "room"),
    [
        (AgentOptions(reflect_every=1), 2_000),
        (AgentOptions(context=ContextKind.SUMMARY, context_turns=1, summary_request="s"), 60),
    ],
)
def test_turns_of_a_part_are_those_of_the_episode(options: AgentOptions, room: int) -> None:
    lease = replace(LEASE, horizon=30)
    whole, parts = play(bound=1, lease=lease, options=options, max_tokens=room)
    assert len(whole.asides)
    assert len(parts) > 10
    sent = 0  # First turn of the part.
    for part in parts:
        assert PartName.of(part_of(part, sent), is_early=True).is_in(whole)
        assert refusal(part, learner_version=40, max_group_size=2) == ""
        sent = part.num_turns

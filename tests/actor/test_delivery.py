"""Laws of delivery, against a real learner's socket."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actor.delivery import Delivery
from common.errors import LongstrideError
from common.wire.messages import Ack, EndReason, Hello, Rejected, Trajectory
from common.wire.sockets import Received
from tests.actor import toy_peer
from tests.actor.toy_peer import Law, Peer
from tests.learner.builders import make_episode, make_trajectory, so_far


def episode(number: int) -> Trajectory:
    return make_trajectory([1, 2], [0, 1], member=number)


def acknowledge(learner: Peer, received: Received) -> None:
    learner.answer(
        received, Ack(episode_id=received.message.episode_id, is_accepted=True, reason="")
    )


def check(tmp_path: Path, law: Law[Delivery], *, window: int = 2) -> None:
    def connect(peer: Peer, context: Any) -> Delivery:
        return Delivery(peer.run_dir, peer.keys, window=window, context=context)

    toy_peer.check(tmp_path, "learner", connect, law)


def ids(received: list[Received]) -> list[str]:
    return [r.message.episode_id for r in received]


def test_acknowledged_episode_is_removed_from_the_window(tmp_path: Path) -> None:
    async def law(learner: Peer, delivery: Delivery, _: asyncio.Task[None]) -> None:
        await delivery.put(episode(0))
        assert delivery.pending_ids == ["g0/0"]
        (received,) = await learner.receive(1)
        assert received.message.token_ids.tolist() == [1, 2]
        acknowledge(learner, received)
        async with asyncio.timeout(60.0):
            await delivery.drained()
        assert delivery.pending_ids == []

    check(tmp_path, law)


def test_full_window_blocks_until_an_acknowledgement(tmp_path: Path) -> None:
    async def law(learner: Peer, delivery: Delivery, _: asyncio.Task[None]) -> None:
        await delivery.put(episode(0))
        await delivery.put(episode(1))
        third = asyncio.create_task(delivery.put(episode(2)))
        first, _second = await learner.receive(2)
        assert not third.done()
        assert delivery.waiting_for == "learner: acknowledgements of 2 episodes"
        assert delivery.pending_ids == ["g0/0", "g0/1"]
        acknowledge(learner, first)
        async with asyncio.timeout(60.0):
            await third
        assert ids(await learner.receive(1)) == ["g0/2"]
        assert delivery.pending_ids == ["g0/1", "g0/2"]

    check(tmp_path, law)


def test_one_message_acknowledges_several_episodes(tmp_path: Path) -> None:
    async def law(learner: Peer, delivery: Delivery, _: asyncio.Task[None]) -> None:
        for number in range(3):
            await delivery.put(episode(number))
        received = await learner.receive(3)
        others = ["g0/2", "g0/9"]  # one that it has not, as after a restart
        answer = Ack(episode_id="g0/0", is_accepted=True, reason="", others=others)
        learner.answer(received[0], answer)
        async with asyncio.timeout(60.0):
            while len(delivery.pending_ids) > 1:
                await asyncio.sleep(0.01)
            await delivery.put(episode(3))
            await delivery.put(episode(4))
        assert delivery.pending_ids == ["g0/1", "g0/3", "g0/4"]

    check(tmp_path, law, window=3)


def test_part_uses_no_slot_and_waits_for_no_acknowledgement(tmp_path: Path) -> None:
    async def law(learner: Peer, delivery: Delivery, _: asyncio.Task[None]) -> None:
        whole = make_episode([3, 4])
        delivery.send_part(so_far(whole, 1))
        await delivery.put(whole)
        part, ended = await learner.receive(2)
        assert part.message.end_reason is EndReason.UNFINISHED
        assert part.message.num_turns == 1
        assert ended.message.end_reason is EndReason.DONE
        assert delivery.pending_ids == [whole.episode_id]

    check(tmp_path, law, window=1)


def test_part_beyond_the_limits_of_the_wire_is_not_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def law(learner: Peer, delivery: Delivery, _: asyncio.Task[None]) -> None:
        part = so_far(make_episode([3, 4]), 1)
        delivery.send_part(replace(part, reward=float("nan")))
        delivery.send_part(part)
        (received,) = await learner.receive(1)
        assert received.message.reward == part.reward

    with caplog.at_level(logging.WARNING):
        check(tmp_path, law)
    assert "part not sent episode=g0000000/0" in caplog.text


def test_duplicate_delivery_occupies_one_slot(tmp_path: Path) -> None:
    async def law(learner: Peer, delivery: Delivery, _: asyncio.Task[None]) -> None:
        await delivery.put(episode(0))
        await delivery.put(episode(0))
        acknowledge(learner, (await learner.receive(1))[0])
        async with asyncio.timeout(60.0):
            await delivery.drained()
            await delivery.put(episode(1))
            await delivery.put(episode(2))

    check(tmp_path, law)


@pytest.mark.slow
def test_unacknowledged_episodes_follow_a_moved_learner(tmp_path: Path) -> None:
    async def law(learner: Peer, delivery: Delivery, _: asyncio.Task[None]) -> None:
        await delivery.put(episode(0))
        await delivery.put(episode(1))
        acknowledge(learner, (await learner.receive(2))[0])
        while len(delivery.pending_ids) > 1:
            await asyncio.sleep(0.01)
        learner.restart()
        (again,) = await learner.receive(1)
        assert again.message.episode_id == "g0/1"
        acknowledge(learner, again)
        async with asyncio.timeout(60.0):
            await delivery.drained()

    check(tmp_path, law)


def test_refusal_is_logged_and_frees_its_slot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def law(learner: Peer, delivery: Delivery, _: asyncio.Task[None]) -> None:
        await delivery.put(episode(0))
        (received,) = await learner.receive(1)
        refusal = Ack(episode_id="g0/0", is_accepted=False, reason="no finite logprob")
        learner.answer(received, refusal)
        async with asyncio.timeout(60.0):
            await delivery.drained()
            await delivery.put(episode(1))

    with caplog.at_level(logging.ERROR, logger="actor.delivery"):
        check(tmp_path, law, window=1)
    assert [r.getMessage() for r in caplog.records] == [
        "learner refused trajectory episode=g0/0 reason=no finite logprob"
    ]


@pytest.mark.parametrize(
    "answer",
    [
        Rejected(reason="schema version 2"),
        Hello(role="learner", name="l", incarnation="i", version=0),
    ],
)
def test_unexpected_answer_ends_the_delivery_loop(tmp_path: Path, answer: Any) -> None:
    async def law(learner: Peer, delivery: Delivery, loop: asyncio.Task[None]) -> None:
        await delivery.put(episode(0))
        learner.answer((await learner.receive(1))[0], answer)
        async with asyncio.timeout(60.0):
            with pytest.raises(LongstrideError, match=r"schema version 2|unexpected .* Hello"):
                await loop
        assert delivery.pending_ids == ["g0/0"]

    check(tmp_path, law)


def test_acknowledged_episode_is_reported_once(tmp_path: Path) -> None:
    acknowledged: list[str] = []

    def connect(peer: Peer, context: Any) -> Delivery:
        return Delivery(
            peer.run_dir, peer.keys, window=2, context=context, on_acknowledged=acknowledged.append
        )

    async def law(learner: Peer, delivery: Delivery, _: asyncio.Task[None]) -> None:
        await delivery.put(episode(0))
        (received,) = await learner.receive(1)
        assert acknowledged == []
        acknowledge(learner, received)
        acknowledge(learner, received)
        async with asyncio.timeout(60.0):
            await delivery.drained()
        assert acknowledged == ["g0/0"]

    toy_peer.check(tmp_path, "learner", connect, law)

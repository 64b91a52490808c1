"""Laws of delivery, against a real learner's socket."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from actor.links.delivery import Delivery
from common.errors import LongstrideError
from common.store.run_dir import RunDir
from common.wire.messages import Ack, Hello, Rejected, Trajectory
from common.wire.security import create_keys
from common.wire.sockets import Received, Router
from tests.learner.builders import make_trajectory

HOST = "127.0.0.1"


def episode(number: int) -> Trajectory:
    return make_trajectory([1, 2], [0, 1], member=number)


class Learner:
    """A learner's ear that answers only when told to."""

    def __init__(self, root: Path) -> None:
        self._run_dir = RunDir(root=root)
        self._keys = create_keys(root / "keys")
        self._router: Router | None = None
        self.restart()

    def restart(self) -> None:
        """Come back at a new address, knowing nothing."""
        self.stop()
        self._router = Router(self._keys, host=HOST, port=0)
        self._run_dir.publish_address("learner", f"tcp://{HOST}:{self._router.port}")

    def stop(self) -> None:
        if self._router is not None:
            self._router.close()

    async def make_delivery(self, context: zmq.asyncio.Context, *, window: int) -> Delivery:
        delivery = Delivery(self._run_dir, self._keys, window=window, context=context)
        await delivery.connect(timeout_s=5.0)
        return delivery

    async def receive(self, num: int) -> list[Received]:
        """The next messages, at most 5 s for all."""
        assert self._router is not None
        received: list[Received] = []
        async with asyncio.timeout(5.0):
            while len(received) < num:
                received += await asyncio.to_thread(self._router.receive_all, timeout_s=0.05)
        return received

    def answer(self, received: Received, answer: Any = None) -> None:
        assert self._router is not None
        ack = Ack(
            episode_id=getattr(received.message, "episode_id", ""), is_accepted=True, reason=""
        )
        assert self._router.send(received.sender, answer or ack)


Law = Callable[[Learner, Delivery, asyncio.Task[None]], Awaitable[None]]


def check(tmp_path: Path, law: Law, *, window: int = 2) -> None:
    """Run a law with a learner and a delivery whose loop runs."""

    async def run() -> None:
        learner = Learner(tmp_path)
        context = zmq.asyncio.Context()
        delivery = await learner.make_delivery(context, window=window)
        loop = asyncio.create_task(delivery.run())
        try:
            await law(learner, delivery, loop)
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
            delivery.close()
            context.destroy(linger=0)
            learner.stop()

    asyncio.run(run())


def ids(received: list[Received]) -> list[str]:
    return [r.message.episode_id for r in received]


def test_an_acknowledged_episode_is_done_with(tmp_path: Path) -> None:
    async def law(learner: Learner, delivery: Delivery, _: asyncio.Task[None]) -> None:
        await delivery.put(episode(0))
        assert delivery.pending_ids == ["g0/0"]
        (received,) = await learner.receive(1)
        assert received.message.token_ids.tolist() == [1, 2]
        learner.answer(received)
        async with asyncio.timeout(5.0):
            await delivery.drained()
        assert delivery.pending_ids == []

    check(tmp_path, law)


def test_a_full_window_blocks_until_an_acknowledgement(tmp_path: Path) -> None:
    async def law(learner: Learner, delivery: Delivery, _: asyncio.Task[None]) -> None:
        await delivery.put(episode(0))
        await delivery.put(episode(1))
        third = asyncio.create_task(delivery.put(episode(2)))
        first, _second = await learner.receive(2)
        assert not third.done()
        assert delivery.pending_ids == ["g0/0", "g0/1"]
        learner.answer(first)
        async with asyncio.timeout(5.0):
            await third
        assert ids(await learner.receive(1)) == ["g0/2"]
        assert delivery.pending_ids == ["g0/1", "g0/2"]

    check(tmp_path, law)


def test_one_that_is_delivered_twice_takes_one_place(tmp_path: Path) -> None:
    async def law(learner: Learner, delivery: Delivery, _: asyncio.Task[None]) -> None:
        await delivery.put(episode(0))
        await delivery.put(episode(0))
        learner.answer((await learner.receive(1))[0])
        async with asyncio.timeout(5.0):
            await delivery.drained()
            await delivery.put(episode(1))
            await delivery.put(episode(2))

    check(tmp_path, law)


@pytest.mark.slow
def test_everything_unacknowledged_follows_a_learner_that_moves(tmp_path: Path) -> None:
    async def law(learner: Learner, delivery: Delivery, _: asyncio.Task[None]) -> None:
        await delivery.put(episode(0))
        await delivery.put(episode(1))
        learner.answer((await learner.receive(2))[0])
        while len(delivery.pending_ids) > 1:
            await asyncio.sleep(0.01)
        learner.restart()
        (again,) = await learner.receive(1)
        assert again.message.episode_id == "g0/1"
        learner.answer(again)
        async with asyncio.timeout(5.0):
            await delivery.drained()

    check(tmp_path, law)


def test_a_refusal_is_logged_and_frees_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def law(learner: Learner, delivery: Delivery, _: asyncio.Task[None]) -> None:
        await delivery.put(episode(0))
        (received,) = await learner.receive(1)
        refusal = Ack(episode_id="g0/0", is_accepted=False, reason="no finite logprob")
        learner.answer(received, refusal)
        async with asyncio.timeout(5.0):
            await delivery.drained()
            await delivery.put(episode(1))

    with caplog.at_level(logging.ERROR, logger="actor.links.delivery"):
        check(tmp_path, law, window=1)
    assert [r.getMessage() for r in caplog.records] == [
        "refused episode=g0/0 reason=no finite logprob"
    ]


@pytest.mark.parametrize(
    "answer",
    [
        Rejected(reason="schema version 2"),
        Hello(role="learner", name="l", incarnation="i", version=0),
    ],
)
def test_an_answer_that_is_no_acknowledgement_ends_the_loop(tmp_path: Path, answer: Any) -> None:
    async def law(learner: Learner, delivery: Delivery, loop: asyncio.Task[None]) -> None:
        await delivery.put(episode(0))
        learner.answer((await learner.receive(1))[0], answer)
        async with asyncio.timeout(5.0):
            with pytest.raises(LongstrideError, match=r"schema version 2|unexpected Hello"):
                await loop
        assert delivery.pending_ids == ["g0/0"]

    check(tmp_path, law)

"""Laws of the actor's line to the scheduler."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from actor.links.scheduler_client import SchedulerClient
from common.errors import LongstrideError
from common.store.run_dir import RunDir
from common.wire.messages import (
    Goodbye,
    Heartbeat,
    Hello,
    LeaseGrant,
    LeaseRequest,
    Progress,
    Rejected,
    Welcome,
)
from common.wire.security import create_keys
from common.wire.sockets import Received, Router

HOST = "127.0.0.1"
HELLO = Hello(role="actor", name="actor-0", incarnation="i", version=-1)
BEAT = Heartbeat(
    role="actor",
    name="actor-0",
    version=0,
    running=["g/0"],
    num_slots=0,
    tokens_per_s=0.0,
    waiting_for="",
    rss_bytes=0,
)
EMPTY = LeaseGrant(leases=[], retry_after_s=0.5, reason="nothing to do")


def progress(*, epoch: str = "e", revoked: tuple[str, ...] = (), is_finished: bool = False) -> Any:
    return Progress(
        run_epoch=epoch,
        revoked=list(revoked),
        is_finished=is_finished,
    )


class Scheduler:
    """A scheduler's socket that answers only when told to."""

    def __init__(self, root: Path) -> None:
        self.run_dir = RunDir(root=root)
        self.keys = create_keys(root / "keys")
        self._router: Router | None = None
        self.restart()

    def restart(self) -> None:
        self.stop()
        self._router = Router(self.keys, host=HOST, port=0)
        self.run_dir.publish_address("scheduler", f"tcp://{HOST}:{self._router.port}")

    def stop(self) -> None:
        if self._router is not None:
            self._router.close()

    async def next(self, kind: type) -> Received:
        """The next message of a kind; others are passed over."""
        assert self._router is not None
        async with asyncio.timeout(5.0):
            while True:
                received = await asyncio.to_thread(
                    self._router.receive_all, timeout_s=0.05, limit=1
                )
                if received and isinstance(received[0].message, kind):
                    return received[0]

    def answer(self, received: Received, answer: Any) -> None:
        assert self._router is not None
        assert self._router.send(received.sender, answer)

    async def welcome(self, control: SchedulerClient) -> Received:
        hello = await self.next(Hello)
        self.answer(hello, Welcome(run_epoch="e"))
        async with asyncio.timeout(5.0):
            assert (await control.welcome).run_epoch == "e"
        return hello


Law = Callable[[Scheduler, SchedulerClient, asyncio.Task[None]], Awaitable[None]]


def check(tmp_path: Path, law: Law, *, silence_s: float = 30.0) -> None:
    async def run() -> None:
        scheduler = Scheduler(tmp_path)
        context = zmq.asyncio.Context()
        control = SchedulerClient(
            scheduler.run_dir, scheduler.keys, hello=HELLO, context=context, silence_s=silence_s
        )
        await control.connect(timeout_s=5.0)
        loop = asyncio.create_task(control.run())
        try:
            await law(scheduler, control, loop)
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
            control.close()
            context.destroy(linger=0)
            scheduler.stop()

    asyncio.run(run())


def test_hello_is_answered_by_welcome_and_a_request_by_a_grant(tmp_path: Path) -> None:
    async def law(scheduler: Scheduler, control: SchedulerClient, _: asyncio.Task[None]) -> None:
        hello = await scheduler.welcome(control)
        assert hello.message == HELLO
        assert control.run_epoch == "e"
        asked = asyncio.create_task(control.request_leases(num_free_slots=2, version=0))
        request = await scheduler.next(LeaseRequest)
        assert request.message == LeaseRequest(actor="actor-0", num_free_slots=2, version=0)
        scheduler.answer(request, EMPTY)
        async with asyncio.timeout(5.0):
            assert await asked == EMPTY

    check(tmp_path, law)


def test_progress_revokes_and_ends_the_run(tmp_path: Path) -> None:
    async def law(scheduler: Scheduler, control: SchedulerClient, _: asyncio.Task[None]) -> None:
        revoked: list[str] = []
        control.on_revoked = revoked.extend
        await scheduler.welcome(control)
        control.beat(BEAT)
        beat = await scheduler.next(Heartbeat)
        assert beat.message == BEAT
        scheduler.answer(beat, progress(revoked=("g/0",)))
        scheduler.answer(beat, progress(is_finished=True))
        async with asyncio.timeout(5.0):
            await control.is_finished.wait()
        assert revoked == ["g/0"]

    check(tmp_path, law)


def test_a_scheduler_of_another_epoch_is_greeted_again(tmp_path: Path) -> None:
    async def law(scheduler: Scheduler, control: SchedulerClient, _: asyncio.Task[None]) -> None:
        await scheduler.welcome(control)
        control.beat(BEAT)
        scheduler.answer(await scheduler.next(Heartbeat), progress(epoch="e2"))
        assert (await scheduler.next(Hello)).message == HELLO

    check(tmp_path, law)


def test_a_scheduler_that_moves_is_followed(tmp_path: Path) -> None:
    async def law(scheduler: Scheduler, control: SchedulerClient, loop: asyncio.Task[None]) -> None:
        await scheduler.welcome(control)
        scheduler.restart()
        control.beat(BEAT)
        hello = await scheduler.next(Hello)
        scheduler.answer(hello, progress(is_finished=True))
        async with asyncio.timeout(5.0):
            await control.is_finished.wait()
        assert not loop.done()

    check(tmp_path, law)


def test_an_actor_that_leaves_says_goodbye(tmp_path: Path) -> None:
    async def law(scheduler: Scheduler, control: SchedulerClient, loop: asyncio.Task[None]) -> None:
        await scheduler.welcome(control)
        loop.cancel()
        control.close()
        goodbye = await scheduler.next(Goodbye)
        assert goodbye.message == Goodbye(role="actor", name="actor-0", incarnation="i")

    check(tmp_path, law)


def test_a_silent_scheduler_ends_the_actor(tmp_path: Path) -> None:
    async def law(scheduler: Scheduler, control: SchedulerClient, _: asyncio.Task[None]) -> None:
        await asyncio.sleep(0.02)
        with pytest.raises(LongstrideError, match="scheduler silent"):
            control.beat(BEAT)

    check(tmp_path, law, silence_s=0.01)


def test_a_refusal_of_the_scheduler_ends_the_loop(tmp_path: Path) -> None:
    async def law(scheduler: Scheduler, control: SchedulerClient, loop: asyncio.Task[None]) -> None:
        scheduler.answer(await scheduler.next(Hello), Rejected(reason="schema"))
        async with asyncio.timeout(5.0):
            with pytest.raises(LongstrideError, match="refused a message: schema"):
                await loop

    check(tmp_path, law)

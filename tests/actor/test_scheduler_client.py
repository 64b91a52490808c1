"""Laws of the actor's line to the scheduler."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actor.scheduler_client import SchedulerClient
from common.errors import LongstrideError
from common.wire.addresses import AddressBook
from common.wire.messages import (
    Directory,
    Goodbye,
    Heartbeat,
    Hello,
    HubPlace,
    LeaseGrant,
    LeaseRequest,
    LiveConfig,
    Progress,
    Rejected,
    Welcome,
)
from common.wire.sockets import Received
from tests.actor import toy_peer
from tests.actor.toy_peer import Law, Peer

NODE = socket.gethostname()  # the scheduler's, too
HELLO = Hello(role="actor", name="actor-0", incarnation="i", version=-1, node=NODE)
GREETING = replace(HELLO, directory=0, config=0)  # No directory was received yet.
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
    return Progress(run_epoch=epoch, revoked=list(revoked), is_finished=is_finished)


def directory(number: int, learner: str) -> Directory:
    hubs = [HubPlace(url="http://127.0.0.1:80", token="t", envs=["a"])]
    return Directory(number=number, learner=learner, weights=learner, hubs=hubs)


async def welcome(scheduler: Peer, control: SchedulerClient) -> Received:
    hello = await scheduler.next(Hello)
    scheduler.answer(hello, Welcome(run_epoch="e"))
    async with asyncio.timeout(60.0):
        while control.run_epoch != "e":
            await asyncio.sleep(0.001)
    return hello


def check(tmp_path: Path, law: Law[SchedulerClient], *, silence_s: float = 30.0) -> None:
    def connect(peer: Peer, context: Any) -> SchedulerClient:
        return SchedulerClient(
            AddressBook(lambda: peer.run_dir.find_address("scheduler")),
            peer.keys,
            hello=HELLO,
            context=context,
            silence_s=silence_s,
        )

    toy_peer.check(tmp_path, "scheduler", connect, law)


def test_hello_gets_welcome_and_request_gets_grant(tmp_path: Path) -> None:
    async def law(scheduler: Peer, control: SchedulerClient, _: asyncio.Task[None]) -> None:
        hello = await welcome(scheduler, control)
        assert hello.message == GREETING
        assert control.run_epoch == "e"
        asked = asyncio.create_task(control.request_leases(num_free_slots=2, version=0))
        request = await scheduler.next(LeaseRequest)
        assert request.message == LeaseRequest(actor="actor-0", num_free_slots=2, version=0)
        scheduler.answer(request, EMPTY)
        async with asyncio.timeout(60.0):
            assert await asked == EMPTY

    check(tmp_path, law)


def test_progress_revokes_and_ends_the_run(tmp_path: Path) -> None:
    async def law(scheduler: Peer, control: SchedulerClient, loop: asyncio.Task[None]) -> None:
        revoked: list[str] = []
        loop.cancel()
        running = asyncio.create_task(control.run(revoked.extend))
        await welcome(scheduler, control)
        control.beat(BEAT)
        beat = await scheduler.next(Heartbeat)
        assert beat.message == replace(BEAT, directory=0, config=0)
        scheduler.answer(beat, progress(revoked=("g/0",)))
        scheduler.answer(beat, progress(is_finished=True))
        async with asyncio.timeout(60.0):
            await control.is_finished.wait()
        assert revoked == ["g/0"]
        running.cancel()

    check(tmp_path, law)


def test_scheduler_of_new_epoch_is_greeted_again(tmp_path: Path) -> None:
    async def law(scheduler: Peer, control: SchedulerClient, _: asyncio.Task[None]) -> None:
        await welcome(scheduler, control)
        control.beat(BEAT)
        scheduler.answer(await scheduler.next(Heartbeat), progress(epoch="e2"))
        assert (await scheduler.next(Hello)).message == GREETING

    check(tmp_path, law)


def test_actor_follows_a_moved_scheduler(tmp_path: Path) -> None:
    async def law(scheduler: Peer, control: SchedulerClient, loop: asyncio.Task[None]) -> None:
        await welcome(scheduler, control)
        scheduler.restart()
        control.beat(BEAT)
        hello = await scheduler.next(Hello)
        scheduler.answer(hello, progress(is_finished=True))
        async with asyncio.timeout(60.0):
            await control.is_finished.wait()
        assert not loop.done()

    check(tmp_path, law)


def test_actor_requests_addresses_from_a_new_scheduler(tmp_path: Path) -> None:
    async def law(scheduler: Peer, control: SchedulerClient, loop: asyncio.Task[None]) -> None:
        loop.cancel()
        learning = asyncio.create_task(control.learn_addresses(timeout_s=60.0))
        hello = await scheduler.next(Hello)
        for number, learner in enumerate(("", "tcp://127.0.0.1:5"), start=1):
            assert not learning.done()
            scheduler.answer(hello, directory(number, learner))
        await learning
        assert control.book.find_address("weights") == "tcp://127.0.0.1:5"
        again = asyncio.create_task(control.run())
        control.beat(BEAT)
        beat = await scheduler.next(Heartbeat)
        assert beat.message.directory == 2
        scheduler.answer(beat, progress(epoch="other"))
        assert (await scheduler.next(Hello)).message.directory == 0
        again.cancel()

    check(tmp_path, law)


def test_new_scheduler_with_equal_number_is_greeted(tmp_path: Path) -> None:
    """The actor survives a stop of the run; all other roles have new addresses afterwards."""

    async def law(scheduler: Peer, control: SchedulerClient, _: asyncio.Task[None]) -> None:
        hello = await welcome(scheduler, control)
        scheduler.answer(hello, directory(3, "tcp://127.0.0.1:1"))
        async with asyncio.timeout(60.0):
            while control.book.number != 3:
                await asyncio.sleep(0.001)
        scheduler.restart()
        again = await scheduler.next(Hello)
        assert again.message == replace(HELLO, directory=3, config=0)
        scheduler.answer(again, Welcome(run_epoch="e2"))
        assert (await scheduler.next(Hello)).message == GREETING

    check(tmp_path, law)


def test_actor_without_a_learner_address_gives_up(tmp_path: Path) -> None:
    async def law(_: Peer, control: SchedulerClient, loop: asyncio.Task[None]) -> None:
        loop.cancel()
        with pytest.raises(
            LongstrideError, match=r"no learner registered with .* tcp://\S+ within 0\.1 s"
        ):
            await control.learn_addresses(timeout_s=0.1)

    check(tmp_path, law)


def test_leaving_actor_sends_goodbye(tmp_path: Path) -> None:
    async def law(scheduler: Peer, control: SchedulerClient, loop: asyncio.Task[None]) -> None:
        await welcome(scheduler, control)
        loop.cancel()
        control.close()
        goodbye = await scheduler.next(Goodbye)
        assert goodbye.message == Goodbye(role="actor", name="actor-0", incarnation="i")

    check(tmp_path, law)


def test_silent_scheduler_ends_the_actor(tmp_path: Path) -> None:
    async def law(scheduler: Peer, control: SchedulerClient, _: asyncio.Task[None]) -> None:
        await asyncio.sleep(0.02)
        with pytest.raises(LongstrideError, match="no message from the scheduler"):
            control.beat(BEAT)

    check(tmp_path, law, silence_s=0.01)


def test_scheduler_refusal_ends_the_loop(tmp_path: Path) -> None:
    async def law(scheduler: Peer, control: SchedulerClient, loop: asyncio.Task[None]) -> None:
        scheduler.answer(await scheduler.next(Hello), Rejected(reason="schema"))
        async with asyncio.timeout(60.0):
            with pytest.raises(LongstrideError, match="refused a message: schema"):
                await loop

    check(tmp_path, law)


def test_heartbeat_names_the_live_values_that_the_actor_has(tmp_path: Path) -> None:
    async def law(scheduler: Peer, control: SchedulerClient, _: asyncio.Task[None]) -> None:
        hello = await welcome(scheduler, control)
        assert control.live_config is None
        live = LiveConfig(number=3, values={"actor.max_concurrent": "8"})
        scheduler.answer(hello, live)
        async with asyncio.timeout(60.0):
            while control.live_config != live:
                await asyncio.sleep(0.001)
        control.beat(BEAT)
        assert (await scheduler.next(Heartbeat)).message.config == 3

    check(tmp_path, law)

"""A role that an actor is linked to, and a law that is tried on the link."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import zmq.asyncio

from common.store.run_dir import RunDir
from common.weights.messages import WeightsJoin
from common.wire.security import create_keys
from common.wire.sockets import Received, Router

if TYPE_CHECKING:  # importing the engine takes seconds
    from actor.weights.receive import WeightLink

HOST = "127.0.0.1"
WAIT_S = 60.0


class Link(Protocol):
    async def connect(self, *, timeout_s: float) -> None: ...
    async def run(self) -> None: ...
    def close(self) -> None: ...


class Peer:
    """The socket of a role, which answers only on request of the test."""

    def __init__(self, root: Path, role: str) -> None:
        self.run_dir = RunDir(root=root)
        self.keys = create_keys(root / "keys")
        self._role = role
        self._router: Router | None = None
        self.restart()

    def restart(self) -> None:
        """Come back at a new address, knowing nothing."""
        self.stop()
        self._router = Router(self.keys, host=HOST, port=0)
        self.run_dir.publish_address(self._role, f"tcp://{HOST}:{self._router.port}")

    def stop(self) -> None:
        if self._router is not None:
            self._router.close()

    async def receive(
        self, num: int = 1, *, kind: type = object, timeout_s: float = WAIT_S
    ) -> list[Received]:
        """The next messages of a kind, at most `timeout_s` for all; others are passed over."""
        assert self._router is not None
        received: list[Received] = []
        async with asyncio.timeout(timeout_s):
            while len(received) < num:
                more = await asyncio.to_thread(self._router.receive_all, timeout_s=0.05, limit=1)
                received += [each for each in more if isinstance(each.message, kind)]
        return received

    async def next(self, kind: type = object) -> Received:
        return (await self.receive(kind=kind))[0]

    def answer(self, received: Received, answer: Any) -> None:
        assert self._router is not None
        assert self._router.send(received.sender, answer)


AnyLink = TypeVar("AnyLink", bound=Link)
Law = Callable[[Peer, AnyLink, asyncio.Task[None]], Awaitable[None]]


def check(
    root: Path, role: str, make_link: Callable[[Peer, Any], AnyLink], law: Law[AnyLink]
) -> None:
    """Run a law with a peer and a link to it, whose loop runs."""

    async def run() -> None:
        peer = Peer(root, role)
        context = zmq.asyncio.Context()
        link = make_link(peer, context)
        await link.connect(timeout_s=WAIT_S)
        loop = asyncio.create_task(link.run())
        try:
            await law(peer, link, loop)
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
            link.close()
            context.destroy(linger=0)
            peer.stop()

    asyncio.run(run())


def make_weight_link(peer: Any, context: Any, *, engine: Any, num_workers: int = 1) -> "WeightLink":
    """Return an actor's link to whom the run directory of `peer` names."""
    from actor.weights.receive import WeightLink

    return WeightLink(
        peer.run_dir,
        peer.keys,
        engine,
        hello=WeightsJoin(actor="a", incarnation="i", devices=[""] * num_workers, version=-1),
        exclusive=asyncio.Lock(),
        context=context,
    )

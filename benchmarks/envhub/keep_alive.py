"""Steps on AgentGym's routes over raw kept-alive connections, so that the client is no bottleneck.

One process holds all connections: `python -m benchmarks.envhub.keep_alive` with a load on stdin.
The bytes of all requests are prepared in advance. Of a response only the length and the success are
checked.
"""

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import cast

import uvloop

from benchmarks.envhub.client import Client, ServiceTarget
from benchmarks.envhub.load import ACTIONS, LoadResult, in_process

MODULE = "benchmarks.envhub.keep_alive"
LENGTH = b"content-length: "
END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Connections that step TextCraft without pause, one instance each."""

    target: ServiceTarget
    base: str  # Path before /create, /reset and /step.
    # Key of the item in a reset request; "": a create request starts an episode.
    reset_key: str = ""
    num_clients: int = 128
    warmup_s: float = 0.4  # Time before the measurement.
    duration_s: float = 1.5  # Time of the measurement.


def measure_load(load: Load) -> LoadResult:
    """Return the measurements of a separate client process. Raises: RuntimeError: it failed."""
    return LoadResult(**in_process(MODULE, asdict(load)))


def request_bytes(load: Load, path: str, content: object) -> bytes:
    """Return the bytes of a complete request."""
    body = json.dumps(content).encode()
    token = f"authorization: Bearer {load.target.token}\r\n" if load.target.token else ""
    head = f"POST {load.base}{path} HTTP/1.1\r\nhost: {load.target.address[0]}\r\n{token}"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Stepper(asyncio.Protocol):
    """One connection. It sends the next request when the last one is answered."""

    def __init__(self, requests: list[bytes], load: Load, latencies_ms: list[float]) -> None:
        self._requests = cycle(requests)
        self._latencies_ms = latencies_ms
        self._begin_s = time.perf_counter() + load.warmup_s
        self._end_s = self._begin_s + load.duration_s
        self._received = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"connection lost: {exc!r}"))

    def _send(self) -> None:
        self._sent_s = time.perf_counter()
        self._transport.write(next(self._requests))

    def data_received(self, data: bytes) -> None:
        received = self._received = self._received + data if self._received else data
        if not _is_whole(received):
            return
        self._received = b""
        is_sound = received.startswith(b"HTTP/1.1 200") and b'"reward"' in received
        if not is_sound:
            self.done.set_exception(RuntimeError(received[:500].decode(errors="replace")))
            return
        now_s = time.perf_counter()
        if self._begin_s <= now_s < self._end_s:
            self._latencies_ms.append((now_s - self._sent_s) * 1e3)
        if now_s < self._end_s:
            self._send()
        elif not self.done.done():
            self.done.set_result(None)


def _is_whole(response: bytes) -> bool:
    end = response.find(END)
    at = response.find(LENGTH)
    if end < 0 or not 0 <= at < end:
        return False
    num_bytes = int(response[at + len(LENGTH) : response.find(b"\r", at)])
    return len(response) >= end + len(END) + num_bytes


async def run_load(load: Load) -> LoadResult:
    """Return the number of answered steps, and the latency of each."""
    latencies_ms: list[float] = []
    async with Client(load.target) as client:
        numbers = [await _instance(client, load, i) for i in range(load.num_clients)]
    loop, steppers = asyncio.get_running_loop(), list[Stepper]()
    for number in numbers:
        actions = [f"Action: {action}" for action in ACTIONS["textcraft"]]
        requests = [request_bytes(load, "/step", {"id": number, "action": a}) for a in actions]
        stepper = Stepper(requests, load, latencies_ms)
        steppers.append(stepper)
        await loop.create_connection(lambda s=stepper: s, *load.target.address)
    await asyncio.gather(*(each.done for each in steppers))
    return LoadResult(
        num_done=len(latencies_ms), duration_s=load.duration_s, latencies_ms=latencies_ms
    )


async def _instance(client: Client, load: Load, index: int) -> int:
    """Return the number of an instance with a started episode."""
    made = await client.want(200, "POST", f"{load.base}/create", {})
    if load.reset_key:
        item = f"depth2-train-{index % 100}"
        await client.want(
            200, "POST", f"{load.base}/reset", {"id": made["id"], load.reset_key: item}
        )
    return made["id"]


def main() -> None:
    """Run the load given on stdin and write its measurements to stdout."""
    asked = json.load(sys.stdin)
    load = Load(**{**asked, "target": ServiceTarget(**asked["target"])})
    json.dump(asdict(uvloop.run(run_load(load))), sys.stdout)


if __name__ == "__main__":
    main()

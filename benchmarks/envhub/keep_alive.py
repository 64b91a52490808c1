"""Steps on AgentGym's routes over raw kept-alive connections, so that the client is no bottleneck.

The bytes of all requests are prepared in advance. Of a response only the length and the success are
checked.
"""

import asyncio
import json
import time
from itertools import cycle
from typing import cast

from benchmarks.envhub.client import Client
from benchmarks.envhub.job import ACTIONS, Job, Measured, Recorder

LENGTH = b"content-length: "
END = b"\r\n\r\n"


def request_bytes(job: Job, path: str, content: object) -> bytes:
    """Return the bytes of a complete request."""
    body = json.dumps(content).encode()
    token = f"authorization: Bearer {job.target.token}\r\n" if job.target.token else ""
    head = f"POST {job.base}{path} HTTP/1.1\r\nhost: {job.target.address[0]}\r\n{token}"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Stepper(asyncio.Protocol):
    """One connection. It sends the next request when the last one is answered."""

    def __init__(self, requests: list[bytes], recorder: Recorder) -> None:
        self._requests = cycle(requests)
        self._recorder = recorder
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
        elif self._recorder.add(self._sent_s):
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


async def run_raw(job: Job) -> Measured:
    """Return the number of answered steps, and the latency of each."""
    async with Client(job.target) as client:
        numbers = [await _instance(client, job, i) for i in range(job.num_clients)]
    loop = asyncio.get_running_loop()
    recorder = Recorder(job)
    steppers: list[Stepper] = []
    for number in numbers:
        actions = [f"Action: {action}" for action in ACTIONS[job.env]]
        requests = [request_bytes(job, "/step", {"id": number, "action": a}) for a in actions]
        stepper = Stepper(requests, recorder)
        steppers.append(stepper)
        await loop.create_connection(lambda s=stepper: s, *job.target.address)
    await asyncio.gather(*(each.done for each in steppers))
    return recorder.measured()


async def _instance(client: Client, job: Job, index: int) -> int:
    """Return the number of an instance with a started episode."""
    made = await client.want(200, "POST", f"{job.base}/create", {})
    if job.reset_key:
        content = {"id": made["id"], job.reset_key: f"depth2-train-{index % 100}"}
        await client.want(200, "POST", f"{job.base}/reset", content)
    return made["id"]

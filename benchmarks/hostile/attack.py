"""Invalid and malicious messages to a listener, with or without a valid key.

Each attack is a process: `-m ... '{"...": ...}'`.
"""

import asyncio
import contextlib
import json
import random
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import zmq

from common.store.run_dir import write_json
from common.wire.access.connections import raise_file_limit
from common.wire.access.peers import MAX_REFUSALS
from common.wire.codec import encode
from common.wire.messages import Goodbye, Heartbeat, Hello, LeaseRequest, Outcomes
from common.wire.security import RunKeys
from common.wire.sockets import connect_dealer

# Frames on each connection without a key; every ninth connection sends none.
FRAMES_PER_STRANGER = 6
# With a key. After 100 refused messages a listener mutes a connection for some time.
FRAMES_PER_CONNECTION = 200
MAX_OPEN = 1_000  # Number of open connections without a key; the oldest are closed first.
NUM_SLOW = 20  # Connections that slowly send single bytes during the attack.
# Fraction of the frames with a key that one connection sends before it reads any answer.
DEAF_FRAC = 0.1
LINGER_S = 30  # Time to transmit the remaining messages.
NUM_SOCKETS = 64
ANSWER_S = 30.0
SLOW_EVERY_S = 0.5
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE".ljust(22, b"\0") + bytes(33)
AXES = b"\x93\x03\xaaTrajectory\x81\xa9token_ids\x93\x01\xa5int32\xdc\x4e\x20" + b"\x01" * 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """The arguments of one process."""

    address: str  # Address of a ROUTER socket, or URL of a hub.
    result: str  # File for the counters.
    num_frames: int  # Half of them are sent with a key; for a hub: number of requests.
    num_connections: int = 0  # Connections without a key.
    keys: RunKeys | None = None  # Keys of an actor; None: the target is a hub.
    name: str = ""  # Name of that actor.
    token: str = ""  # Token of a hub.
    seed: int = 0


@dataclass(slots=True)
class Done:
    """The counters of an attack."""

    num_with_key: int = 0  # Messages with a key, all of which must be refused.
    num_strangers: int = 0  # Connections without a key.
    num_stranger_frames: int = 0
    answers: dict[str, int] = field(default_factory=dict[str, int])  # Answers of a hub, by status.


def hostile_messages(chance: random.Random, name: str) -> Iterator[list[bytes]]:
    """Yield an endless series of messages that no actor may send to any listener."""
    hello = encode(Hello(role="actor", name=name, incarnation="i", version=0))
    beat = Heartbeat(role="actor", name=name, version=0, running=[], unchanged_s=float("nan"))
    fixed = [
        [b"\xc1 rubbish"],
        [hello[0][: len(hello[0]) // 2]],
        [b"\x93\x03\xc6\xff\xff\xff\xff"],
        [b"\x91" * 5_000],
        [AXES],
        [b""] * 63,
        [b"\xdb\x00\x0f\x42\x40" + bytes(1_000_000)],
        encode(Hello(role="learner", name=name, incarnation="i", version=10**9)),
        encode(Hello(role="actor", name="honest", incarnation="i", version=0)),
        encode(Goodbye(role="actor", name="honest", incarnation="i")),
        encode(LeaseRequest(actor="9" * 5_000, num_free_slots=1, version=0)),
        encode(LeaseRequest(actor="honest", num_free_slots=1, version=0)),
        encode(Outcomes(num_duplicates=5)),
        encode(beat),
    ]
    while True:
        yield from fixed
        yield [chance.randbytes(chance.choice((1, 40, 3_000)))]


def attack_with_key(order: Attack, done: Done) -> None:
    """Send half of the frames with an actor's key, over a series of connections."""
    assert order.keys is not None
    context = zmq.Context()
    num = order.num_frames // 2
    messages = hostile_messages(random.Random(order.seed), order.name)
    num_deaf = int(DEAF_FRAC * num)
    deaf = connect_dealer(context, order.keys, address=order.address, timeout_s=LINGER_S)
    try:
        while done.num_with_key < num - num_deaf:
            peer = connect_dealer(context, order.keys, address=order.address, timeout_s=LINGER_S)
            num_now = min(FRAMES_PER_CONNECTION, num - num_deaf - done.num_with_key)
            for _ in range(num_now):
                peer.send_multipart(next(messages))
            # Closing with unread answers would make TCP discard sent data.
            for _ in range(min(num_now, MAX_REFUSALS)):
                peer.recv_multipart()
            done.num_with_key += num_now
            peer.close(linger=LINGER_S * 1_000)
        for _ in range(num_deaf):
            deaf.send_multipart(next(messages))
            done.num_with_key += 1
        # The answers are read last, because closing earlier discards sent frames.
        for _ in range(min(num_deaf, MAX_REFUSALS)):
            deaf.recv_multipart()
    finally:
        deaf.close(linger=LINGER_S * 1_000)
        context.term()


def attack_as_strangers(order: Attack, done: Done) -> None:
    """Connect repeatedly without a key, and send data that is invalid before a handshake."""
    where = urlsplit(order.address)
    chance = random.Random(order.seed)
    place = where.hostname or "", where.port or 0
    still_open = deque[socket.socket]()
    slow = [_connected(place, b"") for _ in range(NUM_SLOW)]
    slow_at = 0.0
    for number in range(order.num_connections - NUM_SLOW):
        frames = [_stranger_frame(chance) for _ in range(FRAMES_PER_STRANGER)]
        opening = b"" if number % 8 == 0 else GREETING
        connection = _connected(place, opening + b"".join(frames) * (number % 9 != 0))
        if connection is None:
            continue
        still_open.append(connection)
        done.num_stranger_frames += FRAMES_PER_STRANGER * (number % 9 != 0)
        if len(still_open) > MAX_OPEN:
            still_open.popleft().close()
        if time.monotonic() > slow_at:
            slow_at = time.monotonic() + SLOW_EVERY_S
            for connection in filter(None, slow):
                with contextlib.suppress(OSError):
                    connection.send(GREETING[:1])
    done.num_strangers = order.num_connections
    for connection in (*still_open, *filter(None, slow)):
        connection.close()


def _stranger_frame(chance: random.Random) -> bytes:
    body = chance.randbytes(chance.choice((0, 5, 200)))
    return chance.choice(
        (
            b"\x04" + bytes([len(body)]) + body,  # A command.
            b"\x00" + bytes([len(body)]) + body,  # A message.
            b"\x06" + (1 << 40).to_bytes(8, "big") + body,  # A command with a length of a terabyte.
            b"\x04\xc8\x05HELLO\x01\x00" + bytes(192),  # A CURVE hello without content.
            b"GET / HTTP/1.1\r\n\r\n" + body,
        )
    )


def _connected(place: tuple[str, int], content: bytes) -> socket.socket | None:
    """Return a connection after sending some content; None: the peer has closed it."""
    connection = socket.create_connection(place, timeout=ANSWER_S)
    try:
        connection.sendall(content)
    except OSError:
        connection.close()
        return None
    return connection


def hostile_requests(order: Attack) -> Iterator[tuple[bytes, bool]]:
    """Yield an endless series of requests to a hub, each with a flag: the request is complete."""
    chance = random.Random(order.seed)
    while True:
        for path in ("/v1/sessions", "/v1/sessions/none/step", "/v1/sessions/batch"):
            yield _request(path, b"{}", "no"), True
            yield _request(path, b'{"action":"\xf0\x9f', order.token), True
            yield _request(path, b'{"env":"\\ud83d","item_id":"\\udc00"}', order.token), True
            yield _request(path, b'{"env":[1],"item_id":{"a":1e999},"seq":"x"}', order.token), True
            yield _request(path, b"[" * 60_000, order.token), True
            yield _request(path, b"x" * 70_000, order.token), True
            yield _request(path, b"{}", order.token, extra=b"x: " + b"y" * 70_000 + b"\r\n"), True
            yield b"POST " + chance.randbytes(60) + b" HTTP/9.9\r\n\r\n", True
            yield _request(path, b"{}", order.token)[: chance.randint(1, 90)], False


def _request(path: str, body: bytes, token: str, *, extra: bytes = b"") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: hub\r\nauthorization: Bearer {token}\r\n".encode()
    length = b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    return head + extra + length + body


async def attack_hub(order: Attack, done: Done) -> None:
    """Send all requests on separate connections. Incomplete ones stay open for some time."""
    statuses, still_open = Counter[str](), deque[asyncio.StreamWriter]()
    requests, where = hostile_requests(order), urlsplit(order.address)

    async def work(num: int) -> None:
        for _ in range(num):
            blob, is_whole = next(requests)
            reader, writer = await asyncio.open_connection(where.hostname, where.port)
            done.num_with_key += 1
            with contextlib.suppress(OSError):
                writer.write(blob)
                if not is_whole:
                    still_open.append(writer)
                    if len(still_open) > MAX_OPEN:
                        still_open.popleft().close()
                    continue
                answer = await asyncio.wait_for(reader.read(), ANSWER_S)
                statuses[answer[9:12].decode(errors="replace") or "none"] += 1
            writer.close()

    await asyncio.gather(*(work(-(-order.num_frames // NUM_SOCKETS)) for _ in range(NUM_SOCKETS)))
    for writer in still_open:
        writer.close()
    done.answers = dict(statuses)


def main(text: str) -> None:
    """Attack, and write the counters."""
    plain = json.loads(text)
    keys = plain.pop("keys")
    order = Attack(**plain, keys=RunKeys(**keys) if keys else None)
    done = Done()
    raise_file_limit()
    if order.keys is None:
        asyncio.run(attack_hub(order, done))
    else:
        attack_with_key(order, done)
        attack_as_strangers(order, done)
    write_json(Path(order.result), asdict(done))


if __name__ == "__main__":
    main(sys.argv[1])

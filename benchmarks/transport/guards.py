"""The cost of the intake's checks of sender, lease, bounds and record.

Each check is timed separately on the suite's own trajectories. The total cost of the intake per
trajectory, with its checks, is measured in the same run.
"""

import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import xxhash
import zmq

from benchmarks.table import BenchTable
from benchmarks.transport.ends import trajectory
from common.wire.access.bounds import AtMost, Between, bounds_of
from common.wire.access.lease_mac import is_leased, lease_key, lease_mac
from common.wire.access.peers import Peers
from common.wire.codec import encode
from common.wire.messages import Trajectory
from common.wire.security import create_keys

# Calls and rounds of each check; its cost is that of the fastest round.
NUM_CALLS = 1_000
NUM_ROUNDS = 9
MAX_FRAC = 0.05


def add_guards(table: BenchTable, intake_cpu_s: float) -> None:
    """Write the fraction of the intake's processor seconds per trajectory that its checks need."""
    costs = guards_s()
    told = ", ".join(f"{name} {1e6 * cost:.1f}" for name, cost in costs.items())
    table.compare(
        "checks of sender, lease, bounds and record",
        1e6 * sum(costs.values()),
        1e6 * intake_cpu_s,
        "us of processor",
        against="all that the intake does for a trajectory",
        at_most=MAX_FRAC,
        note=f"{told} us",
    )


def guards_s() -> dict[str, float]:
    """Return the processor seconds of each check for one trajectory."""
    with tempfile.TemporaryDirectory(prefix="longstride-guards-") as folder:
        keys = create_keys(Path(folder))
        key = lease_key(keys)
        plain = trajectory(1, 0)
        leased = replace(plain, lease_mac=lease_mac(plain, plain.actor, key))
        frames = encode(leased)
        frame = _FirstFrame(keys.client_public)
        peers = Peers(keys.known())
        heard = set[int]()
        checks: dict[str, Callable[[], bool]] = {
            "sender": partial(_is_heard, peers, frame, leased, heard),
            "lease": partial(is_leased, leased, key),
            "bounds": _bounds_check(leased),
            "record": partial(_has_checksums, frames),
        }
        assert all(check() for check in checks.values())
        return {name: _seconds(check) for name, check in checks.items()}


class _FirstFrame:
    """The metadata of libzmq for a message: sender, connection, and key of the sender."""

    bytes = b"\0peer"

    def __init__(self, public: str) -> None:
        self._told = {"User-Id": public, zmq.SRCFD: 1}

    def get(self, what: str | int) -> Any:
        return self._told[what]


def _is_heard(peers: Peers, frame: _FirstFrame, message: Trajectory, heard: set[int]) -> bool:
    """Repeat the work of `Router.receive_all` for the sender of each message."""
    sender = peers.meet(frame.bytes, frame)
    heard.add(sender.descriptor)
    return peers.is_heard(sender) and not sender.identity.why_not(message)


def _bounds_check(message: Trajectory) -> Callable[[], bool]:
    """Return the bounds check of decoding, for a message within its bounds."""
    bounds = bounds_of(type(message)).items()
    ranges = [(name, b.low, b.high) for name, b in bounds if isinstance(b, Between)]
    sizes = [(name, b.num) for name, b in bounds if isinstance(b, AtMost)]
    fields = {name: getattr(message, name) for name, _ in bounds}

    def check() -> bool:
        for name, low, high in ranges:
            if not low <= fields[name] <= high:
                return False
        return all(len(fields[name]) <= most for name, most in sizes)

    return check


def _has_checksums(frames: list[bytes]) -> bool:
    """Repeat the work of the journal for the checksums of a record."""
    digest = xxhash.xxh3_64()
    for frame in frames:
        digest.update(frame)
    return zlib.crc32(digest.digest()) >= 0


def _seconds(check: Callable[[], object]) -> float:
    """Return this thread's processor seconds of a call, in the fastest of some rounds."""
    rounds: list[float] = []
    for _ in range(NUM_ROUNDS):
        started = time.thread_time()
        for _ in range(NUM_CALLS):
            check()
        rounds.append((time.thread_time() - started) / NUM_CALLS)
    return min(rounds)

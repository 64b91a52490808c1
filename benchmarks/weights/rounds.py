"""Versions sent to separate processes, as to engines: duration and memory of the transfers."""

import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import psutil
import torch
from torch import Tensor

from benchmarks.real_run import await_success, child
from benchmarks.weights.receiver import HOST, TIMEOUT_S, Receiver, TransferPeer, meet
from common.errors import LongstrideError, WeightSyncError
from common.host.child_process import ChildProcess
from common.memory import descendants, trim_heap
from common.weights.buckets import CPU, NUM_SLOTS, BucketLayout, send_buckets, write_buckets
from common.weights.node_copy import NodeCopy
from common.weights.rendezvous import StoreServer
from learner.weights.source import WeightSource

STOP_WATCH_S = 5.0  # Time limit for the memory sampling thread to end.
SAMPLE_S = 0.005  # Interval between two samples of memory.
ALLOWANCE_BYTES = 500_000  # Allowance for thread stacks and small temporary objects.


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSetup:
    """The transport and the devices of a transfer."""

    transport: str = "gloo"  # The name of the transport in an offer.
    device: str = "cpu"  # Device of the sender.
    peer_device: str = "cpu"
    num_receivers: int = 1
    timeout_s: float = TIMEOUT_S


@dataclass(slots=True)
class Sent:
    """Seconds of the rounds by kind, and this process's memory growth in rounds of kind "ours"."""

    took_s: dict[str, list[float]] = field(default_factory=lambda: {"raw": [], "ours": []})
    # CPU seconds of all sides.
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: {"raw": [], "ours": []})
    peak_bytes: int = 0


@contextmanager
def receivers(
    plan: list[str], *, cut: BucketLayout, route: TransferSetup
) -> Iterator[TransferPeer]:
    """Yield the sender's side of a group of processes that receive the plan's rounds.

    Raises: WeightSyncError: a receiver failed, or a bucket was damaged; holds the end of its log.
    """
    server = StoreServer(HOST)
    with tempfile.TemporaryDirectory(prefix="longstride-buckets-") as folder, ExitStack() as stack:
        stack.callback(server.close)
        receiver = Receiver(
            port=server.port,
            public=server.place.public,
            secret=server.place.secret,
            group=server.open_group(),
            rank=0,
            world_size=1 + route.num_receivers,
            num_bytes=cut.total_bytes,
            bucket_bytes=cut.bucket_bytes,
            plan=plan,
            transport=route.transport,
            device=route.device,
            timeout_s=route.timeout_s,
        )
        log = Path(folder) / "receivers.log"
        processes: list[ChildProcess] = []
        for rank in range(1, receiver.world_size):
            own = replace(receiver, device=route.peer_device, rank=rank)
            argv = ["-m", "benchmarks.weights.receiver", json.dumps(asdict(own))]
            processes.append(
                stack.enter_context(child(f"receiver-{rank}", argv, log=log, stop_s=0.0))
            )
        try:
            side = TransferPeer(meet(receiver), receiver)
            yield side
            for process in processes:
                await_success(process, timeout_s=route.timeout_s)
            side.close()
        except LongstrideError as error:
            last = log.read_text(encoding="utf-8")[-500:] if log.exists() else ""
            raise WeightSyncError(f"{error}; receiver: {last}") from error


def send_rounds(
    source: WeightSource,
    cut: BucketLayout,
    plan: list[str],
    *,
    route: TransferSetup,
    watches_memory: bool = False,
) -> Sent:
    """Send a verified version, or the same bytes by one broadcast, as the plan says.

    The first round of each kind allocates the memory. `watches_memory` returns free memory to the
    system before each round, which makes the rounds slower.

    Raises: WeightSyncError: the data was damaged or did not arrive.
    """
    sent = Sent()
    slots: list[Tensor] = []
    with receivers(plan, cut=cut, route=route) as side:
        raw = torch.zeros(cut.total_bytes if "raw" in plan else 0, dtype=torch.uint8)
        raw = raw.to(side.carrier.device)
        memory = NodeCopy(cut.total_bytes) if route.transport == "memory" else None
        for number, kind in enumerate(plan):
            channel = side.channel(number)
            side.meeting.barrier()
            with _Peak() if watches_memory else nullcontext() as peak:
                cpu_before_s = _cpu_s()
                started = time.perf_counter()
                if kind == "raw":
                    side.carrier.broadcast(raw)
                elif memory is not None:
                    side.offer_copy(number, _write(memory, number, cut, source))
                else:
                    slots = slots or make_slots(cut, channel.device, source=source.device)
                    send_buckets(channel, cut, slots, source.read, check=source.check)
            side.meeting.barrier()  # All receivers have verified the data.
            sent.took_s[kind].append(time.perf_counter() - started)
            sent.cpu_s[kind].append(_cpu_s() - cpu_before_s)
            if peak is not None and kind == "ours":
                sent.peak_bytes = max(sent.peak_bytes, peak.grown_bytes)
    return sent


def _write(memory: NodeCopy, version: int, cut: BucketLayout, source: WeightSource) -> str:
    """Write a version to memory as a run does; return its place."""
    assert memory.claim(), "the receivers have read the version before"
    memory.version = -1
    slots = make_slots(cut, CPU, source=source.device) if source.device.type == "cuda" else []
    digest = write_buckets(memory.buffer, cut, slots, source.read, check=source.check)
    memory.version = version
    return memory.show(digest)


def _cpu_s() -> float:
    """Return the CPU seconds of this process and its children so far."""
    own = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (own, *descendants(own)))


def make_slots(
    cut: BucketLayout, device: torch.device, *, source: torch.device = CPU
) -> list[Tensor]:
    """Return the sender's buckets, in pinned memory if the weights come from a GPU, as in a run."""
    is_pinned = source.type == "cuda" and device.type == "cpu"
    make = {"dtype": torch.uint8, "device": device, "pin_memory": is_pinned}
    return [torch.zeros(cut.slot_bytes, **make) for _ in range(NUM_SLOTS)]


class _Peak:
    """The peak memory growth of this process during a block."""

    def __enter__(self) -> "_Peak":
        trim_heap()  # Memory that was freed before must not be available for reuse.
        self._process = psutil.Process()
        self._is_over = threading.Event()
        self._before = self._own_bytes()
        self.grown_bytes = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()  # The thread starts last, because it may sample at once.
        return self

    def _own_bytes(self) -> int:
        """Return the process's memory without pages of files, which hold code."""
        now = self._process.memory_info()
        return now.rss - now.shared

    def _watch(self) -> None:
        """Sample the memory at regular intervals."""
        while not self._is_over.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        """Measure the memory, and keep the largest growth."""
        self.grown_bytes = max(self.grown_bytes, self._own_bytes() - self._before)

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(STOP_WATCH_S)
        # A sample at the end, when the buckets are still allocated, even if the thread rarely ran.
        self._sample()

"""The suite `transport`: the intake, compared with encrypted sockets and with the disk."""

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.table import BenchTable
from benchmarks.transport.ends import NUM_TOKENS, trajectory
from benchmarks.transport.guards import add_guards
from benchmarks.transport.scaling import add_scaling
from common.launch.process import ChildProcess
from common.repository import ROOT
from common.store.run_dir import RunDir
from common.wire.codec import encode
from common.wire.security import create_keys

ENDS = "benchmarks.transport.ends"
SCHEDULER = "benchmarks.scheduler.floor"  # It answers the intake's hello and heartbeats.
NUM_SENDERS = 2
NUM_ROUNDS = 3
WARM_UP_S = 1.0
MEASURED_S = 4.0
MAX_PER_S = 5_000  # Limit of one sender, which encodes as many in advance.
START_S = 60.0
STOP_S = 15.0
MIN_PER_S = 2_000.0
MIN_FRAC = 0.6
BATCH = 64  # Number of trajectories per sync when the disk alone is measured.
LEGEND = (
    f"{NUM_SENDERS} senders in processes of their own to the learner's intake: encryption,\n"
    "validation, journal synced before each acknowledgement, groups, reports. In turn with it, in\n"
    "one run: the same messages to a socket that only answers, and the same bytes to the disk.\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The rate of one end."""

    per_s: float
    cpu_s: float  # Processor seconds of the receiving process for one trajectory.


def run_suite(table: BenchTable) -> None:
    """Measure in about a minute."""
    table.title(LEGEND.rstrip())
    table.attempt("trajectories", lambda: add_trajectories(table, num_rounds=NUM_ROUNDS))
    table.attempt("scaling", lambda: add_scaling(table))


def add_trajectories(table: BenchTable, *, num_rounds: int, measured_s: float = MEASURED_S) -> None:
    """Measure the intake and its limits in turn, and write the medians."""
    num_bytes = sum(map(len, encode(trajectory(1, 0))))
    flows: dict[str, list[Flow]] = {"intake": [], "raw": []}
    disk: list[float] = []
    for _ in range(num_rounds):
        for end, done in flows.items():
            with tempfile.TemporaryDirectory(prefix="longstride-transport-") as folder:
                done.append(measure(end, Path(folder), measured_s=measured_s))
        with tempfile.TemporaryDirectory(prefix="longstride-transport-") as folder:
            disk.append(disk_bytes_per_s(Path(folder), num_bytes, seconds=measured_s / 4))
    ours, raw = (_median(flows[end]) for end in ("intake", "raw"))
    mb = num_bytes / 1e6
    name = f"trajectories of {NUM_TOKENS:,} tokens, journalled"
    cpu = f"{ours.cpu_s * 1e6:.0f} us of processor each, raw {raw.cpu_s * 1e6:.0f}"
    table.at_least(name, ours.per_s, "per s", MIN_PER_S, cpu)
    against = "raw encrypted ZeroMQ"
    table.compare(name, ours.per_s * mb, raw.per_s * mb, "MB/s", against=against, at_least=MIN_FRAC)
    add_guards(table, ours.cpu_s)
    against = f"the disk alone, synced every {BATCH}"
    table.compare(name, ours.per_s * mb, statistics.median(disk) / 1e6, "MB/s", against=against)


def _median(flows: list[Flow]) -> Flow:
    return sorted(flows, key=lambda flow: flow.per_s)[len(flows) // 2]


def measure(end: str, folder: Path, *, measured_s: float) -> Flow:
    """Start the senders for one receiver; count the acknowledgements after a warm-up."""
    create_keys(folder / "keys")
    with contextlib.ExitStack() as children:
        if end == "intake":
            port_file = folder / "scheduler-port"
            floor = (SCHEDULER, str(folder / "keys"), str(port_file))
            scheduler = children.enter_context(_module(folder, *floor))
            scheduler.wait_until(port_file.exists, timeout_s=START_S)
            RunDir(root=folder).publish_address("scheduler", port_file.read_text(encoding="utf-8"))
        receiver = children.enter_context(_module(folder, ENDS, end, str(folder)))
        receiver.wait_until((folder / "address").exists, timeout_s=START_S)
        num = int(MAX_PER_S * (WARM_UP_S + measured_s))
        asked = {"address": (folder / "address").read_text(encoding="utf-8"), "num": num}
        (folder / "ask.json").write_text(json.dumps(asked), encoding="utf-8")
        senders = [
            children.enter_context(_module(folder, ENDS, "sender", str(folder), str(i)))
            for i in range(NUM_SENDERS)
        ]
        for i, sender in enumerate(senders):
            sender.wait_until((folder / f"ready-{i}").exists, timeout_s=START_S)
        (folder / "go").touch()
        time.sleep(WARM_UP_S)
        process = psutil.Process(receiver.pid)
        begin = time.monotonic()
        cpu_before = _cpu_s(process)
        time.sleep(measured_s)
        finish = time.monotonic()
        cpu_s = _cpu_s(process) - cpu_before
        (folder / "stop").touch()
        acked: list[float] = []
        for i, sender in enumerate(senders):
            written = folder / f"sent-{i}.json"
            sender.wait_until(written.exists, timeout_s=STOP_S)
            acked += json.loads(written.read_text(encoding="utf-8"))
    num_acked = sum(begin <= at < finish for at in acked)
    return Flow(per_s=num_acked / (finish - begin), cpu_s=cpu_s / max(1, num_acked))


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@contextlib.contextmanager
def _module(folder: Path, module: str, *arguments: str) -> Generator[ChildProcess]:
    """Yield a module in a separate process, and stop it at the end of the block."""
    name = "-".join([module.rpartition(".")[2], *arguments[:1], *arguments[2:]]).replace("/", "_")
    argv = [sys.executable, "-m", module, *arguments]
    child = ChildProcess(name, argv, log_path=folder / f"{name}.txt", cwd=ROOT)
    try:
        yield child
    finally:
        child.stop(timeout_s=STOP_S)


def disk_bytes_per_s(folder: Path, num_bytes: int, *, seconds: float) -> float:
    """Return the disk's rate for records of this size, synced every BATCH of them."""
    record = os.urandom(num_bytes)
    num_written = 0
    descriptor = os.open(folder / "disk", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        started = time.monotonic()
        while time.monotonic() - started < seconds:
            for _ in range(BATCH):
                num_written += os.write(descriptor, record)
            os.fsync(descriptor)
        return num_written / (time.monotonic() - started)
    finally:
        os.close(descriptor)

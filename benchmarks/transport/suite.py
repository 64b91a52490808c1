"""The suite `transport`: the intake, compared with encrypted sockets that only answer."""

import json
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from benchmarks.runs.real_run import child
from benchmarks.suite import Suite
from benchmarks.transport.ends import NUM_TOKENS, trajectory
from common.host.child_process import ChildProcess
from common.store.run_dir import RunDir
from common.wire.codec import encode
from common.wire.security import create_keys

ENDS = "benchmarks.transport.ends"
NUM_SENDERS = 2
NUM_ROUNDS = 3
WARM_UP_S = 1.0
MEASURED_S = 4.0
MAX_PER_S = 5_000  # Limit of one sender, which encodes as many in advance.
START_S = 60.0
STOP_S = 15.0
MIN_PER_S = 2_000.0
MIN_FRAC = 0.6
LEGEND = (
    f"{NUM_SENDERS} senders in processes of their own to the learner's intake: encryption,\n"
    "validation, journal synced before each acknowledgement, groups, reports. In turn with it, in\n"
    "one run: the same messages to a socket that only answers."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The rate of one end."""

    per_s: float
    cpu_s: float  # Processor seconds of the receiving process for one trajectory.


def run_suite(suite: Suite) -> None:
    """Measure the intake and bare sockets in turn for half a minute, and write the medians."""
    suite.title(LEGEND)
    with suite.check("trajectories") as folder:
        flows = suite.in_turn(
            {end: partial(measure, end, folder) for end in ("intake", "raw")}, num_rounds=NUM_ROUNDS
        )
        # The flow with the median rate.
        ours, raw = (
            sorted(rounds, key=lambda flow: flow.per_s)[NUM_ROUNDS // 2]
            for rounds in flows.values()
        )
        mb = sum(map(len, encode(trajectory(1, 0)))) / 1e6
        name = f"trajectories of {NUM_TOKENS:,} tokens, journalled"
        cpu = f"{ours.cpu_s * 1e6:.0f} us of processor each, raw {raw.cpu_s * 1e6:.0f}"
        suite.at_least(name, ours.per_s, "per s", MIN_PER_S, cpu)
        suite.compare(
            name,
            ours.per_s * mb,
            raw.per_s * mb,
            "MB/s",
            against="raw encrypted ZeroMQ",
            at_least=MIN_FRAC,
        )


def measure(end: str, work: Path, *, measured_s: float = MEASURED_S) -> Flow:
    """Start the senders for one receiver; count the acknowledgements after a warm-up.

    Args:
        work: gets a new folder for the files of all processes.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{end}-", dir=work))
    create_keys(folder / "keys")
    with ExitStack() as children:

        def start(name: str, *argv: str) -> ChildProcess:
            """Start one end of a connection as a process."""
            log = folder / f"{name}.txt"
            return children.enter_context(child(name, ["-m", *argv], log=log))

        if end == "intake":
            start("scheduler", ENDS, "scheduler", str(folder))
            RunDir(root=folder).wait_for_address("scheduler", timeout_s=START_S)
        receiver = start(end, ENDS, end, str(folder))
        receiver.wait_until((folder / "address").exists, timeout_s=START_S)
        num = int(MAX_PER_S * (WARM_UP_S + measured_s))
        asked = {"address": (folder / "address").read_text(encoding="utf-8"), "num": num}
        (folder / "ask.json").write_text(json.dumps(asked), encoding="utf-8")
        senders = [
            start(f"sender-{i}", ENDS, "sender", str(folder), str(i)) for i in range(NUM_SENDERS)
        ]
        for i, sender in enumerate(senders):
            sender.wait_until((folder / f"ready-{i}").exists, timeout_s=START_S)
        (folder / "go").touch()
        time.sleep(WARM_UP_S)
        process = psutil.Process(receiver.pid)
        begin = time.monotonic()
        cpu_before = sum(process.cpu_times()[:2])
        time.sleep(measured_s)
        finish = time.monotonic()
        cpu_s = sum(process.cpu_times()[:2]) - cpu_before
        (folder / "stop").touch()
        acked: list[float] = []
        for i, sender in enumerate(senders):
            written = folder / f"sent-{i}.json"
            sender.wait_until(written.exists, timeout_s=STOP_S)
            acked += json.loads(written.read_text(encoding="utf-8"))
    num_acked = sum(begin <= at < finish for at in acked)
    return Flow(per_s=num_acked / (finish - begin), cpu_s=cpu_s / max(1, num_acked))

"""The suite `transport`: the intake, compared with encrypted sockets that only answer.

Each end is a process, `python -m benchmarks.transport intake|raw|scheduler|sender FOLDER [NUMBER]`:
the learner's intake as in a run, a receiver that only answers, a scheduler that only answers, or a
sender of trajectories that are encoded in advance.
"""

import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zmq

# This is imported early, because an interrupt during a later import would be lost.
from numpy.random import default_rng

from benchmarks.real_run import child
from benchmarks.suite import Suite
from common.config.load import load_config
from common.errors import LongstrideError
from common.host.child_process import ChildProcess
from common.store.run_dir import RunDir, write_atomically
from common.wire.codec import decode, encode
from common.wire.messages import (
    Ack,
    EpisodeOutcome,
    Heartbeat,
    Hello,
    Outcome,
    Progress,
    Trajectory,
    Welcome,
)
from common.wire.security import create_keys, load_keys
from common.wire.sockets import Router, connect_dealer
from learner.ingest.buffer import GroupAssembly, TrajectoryBuffer
from learner.ingest.intake import Admission, Intake
from learner.ingest.journal_index import JournalIndex
from learner.ingest.reports import ReportClient, ReportLog
from learner.journal.journal import JournalWriter
from learner.objective.advantages import group_has_signal
from tools.simulator.workload import synthetic_trajectory

HOST = "127.0.0.1"
EPOCH = "0123456789abcdef"
NUM_TOKENS = 2_000
WINDOW = 128  # Unacknowledged trajectories of a sender, as of an actor.
GROUP_SIZE = 8
VOCAB_SIZE = 32_000
ARRIVED = "arrived.json"  # File with the number of trajectories that the intake has received.
ARRIVED_EVERY_S = 0.2
GROUPS_PER_SENDER = 1_000_000
NEVER_S = 1e9
POLL_MS = 100
ENDS = "benchmarks.transport"
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


def trajectory(number: int, member: int) -> Trajectory:
    """Return an episode of eight turns, each of 50 observed tokens and 200 sampled ones."""
    places = np.arange(NUM_TOKENS)
    mask = places % 250 >= 50
    num_turns = NUM_TOKENS // 250
    return synthetic_trajectory(
        default_rng(number).integers(0, VOCAB_SIZE, NUM_TOKENS, dtype=np.int32),
        mask,
        group_id=f"g{number:07d}",
        member=member,
        env="textcraft",
        item_id="depth2-train-17",
        seed=number,
        horizon=16,
        reward=float(member % 2),
        is_success=member % 2 == 1,
        num_turns=num_turns,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        turn_ids=(places // 250).astype(np.int32),
        invalid_turns=np.zeros(num_turns, dtype=np.bool_),
        turn_scores=np.zeros(num_turns, dtype=np.float32),
    )


def encoded(first_group: int, num: int) -> Iterator[list[bytes]]:
    """Yield the frames of `num` trajectories in whole groups, which share one set of arrays."""
    like = trajectory(first_group, 0)
    arrays = encode(like)[1:]
    for i in range(num):
        number = first_group + i // GROUP_SIZE
        member = i % GROUP_SIZE
        ids = {"episode_id": f"g{number:07d}/{member}", "group_id": f"g{number:07d}"}
        own = replace(like, **ids, member=member, reward=float(member % 2))
        yield [encode(own)[0], *arrays]


def send(folder: Path, number: int) -> None:
    """Send with a window until `folder/stop` exists; write the times of the acknowledgements.

    The trajectories are encoded first. Then the sender waits for `folder/go`.

    Raises: LongstrideError: a trajectory is refused.
    """
    asked = json.loads((folder / "ask.json").read_text(encoding="utf-8"))
    keys = load_keys(folder / "keys")
    with zmq.Context() as context:
        socket = connect_dealer(context, keys, address=asked["address"])
        queue = list(encoded(1 + number * GROUPS_PER_SENDER, asked["num"]))
        (folder / f"ready-{number}").touch()
        while not (folder / "go").exists():
            time.sleep(0.005)
        try:
            acked = _send_all(socket, queue, stop=folder / "stop")
        finally:
            socket.close(linger=0)
    write_atomically(folder / f"sent-{number}.json", json.dumps(acked))


def _send_all(socket: Any, queue: list[list[bytes]], *, stop: Path) -> list[float]:
    """Return the times of the acknowledgements, in seconds on the machine's monotonic clock."""
    acked: list[float] = []
    num_sent = 0
    while not stop.exists() and len(acked) < len(queue):
        while num_sent < len(queue) and num_sent - len(acked) < WINDOW:
            socket.send_multipart(queue[num_sent])
            num_sent += 1
        if socket.poll(POLL_MS):
            while socket.poll(0):
                answer = decode(socket.recv_multipart())
                if not isinstance(answer, Ack) or not answer.is_accepted:
                    raise LongstrideError(f"a trajectory is refused: {answer.reason}")
                acked += [time.monotonic()] * (1 + len(answer.others))
    return acked


def receive_raw(folder: Path) -> None:
    """Answer every message as the intake does, without any other processing."""
    router = Router(load_keys(folder / "keys"), host=HOST, port=0)
    answer = encode(Ack(episode_id="g0000001/0", is_accepted=True, reason=""))
    write_atomically(folder / "address", f"tcp://{HOST}:{router.port}")
    while not (folder / "stop").exists():
        for sender, *_ in router.receive_frames(timeout_s=POLL_MS / 1e3):
            router.send_frames(sender, answer)
    router.close()


def answer_reports(folder: Path) -> None:
    """Answer hellos and heartbeats of the intake, as a scheduler does."""
    router = Router(load_keys(folder / "keys"), host=HOST, port=0)
    RunDir(root=folder).publish_address("scheduler", f"tcp://{HOST}:{router.port}")
    welcome = encode(Welcome(run_epoch=EPOCH))
    progress = encode(Progress(run_epoch=EPOCH, revoked=[], is_finished=False))
    while not (folder / "stop").exists():
        for sender, *frames in router.receive_frames(timeout_s=POLL_MS / 1e3):
            match decode(frames):
                case Hello():
                    router.send_frames(sender, welcome)
                case Heartbeat():
                    router.send_frames(sender, progress)
                case _:
                    pass
    router.close()


def take_in(folder: Path) -> None:
    """Run the learner's intake, with a main thread that takes batches and ends steps."""
    run_dir, keys = RunDir(root=folder), load_keys(folder / "keys")
    is_run = run_dir.config.exists()  # Otherwise only senders are connected.
    cfg = load_config(str(run_dir.config) if is_run else "quickstart", [])
    groups_cfg = replace(cfg.groups, size=GROUP_SIZE)
    journal = JournalWriter(run_dir.journal)
    index, reports = JournalIndex(end=journal.position), ReportLog()
    groups = GroupAssembly(
        groups_cfg,
        cfg.algorithm,
        has_signal=lambda members: group_has_signal(members, cfg.algorithm),
    )
    buffer = TrajectoryBuffer(groups, index, reports, version=0)
    host = cfg.learner.host if is_run else HOST
    router = Router(keys, host=host, port=0)
    address = f"tcp://{host}:{router.port}"
    hello = Hello(
        role="learner",
        name="learner-0",
        incarnation="life-1",
        version=0,
        # No actor connects to the weights address.
        addresses={"learner": address, "weights": address},
    )
    intake = Intake(
        router,
        journal,
        Admission(index, group_size=GROUP_SIZE, vocab_size=VOCAB_SIZE),
        buffer,
        ReportClient(
            run_dir, keys, reports, hello=hello, silence_s=NEVER_S, on_progress=lambda _: None
        ),
        heartbeat_s=cfg.scheduler.heartbeat_s,
    )
    intake.start()
    write_atomically(folder / "address", address)
    num_arrived = version = 0
    # The disk is needed for the journal, so this file is written as rarely as metrics.
    write_at = 0.0
    ahead = cfg.scheduler.max_ahead_steps
    while not (folder / "stop").exists():
        num_arrived += int(buffer.drain_stats()["episodes/arrived"])
        if time.monotonic() >= write_at:
            write_atomically(folder / ARRIVED, str(num_arrived))
            write_at = time.monotonic() + ARRIVED_EVERY_S
        try:
            batch, _ = buffer.next_batch(
                version, max_lag_steps=1 << 30, in_order=False, timeout_s=0.1
            )
        except TimeoutError:
            continue
        ids = [member.episode_id for group in batch for member in group.members]
        trained = Outcome.TRAINED
        buffer.report([EpisodeOutcome(episode_id=i, outcome=trained, cause="") for i in ids])
        version += 1
        buffer.step_done(version, is_last=False, max_ahead_steps=ahead, signals={})
    intake.stop()
    journal.close()


def main(end: str, folder: str, number: str = "0") -> None:
    """Run one end."""
    gc.set_threshold(10_000)  # `run.py` sets the same threshold for every role.
    match end:
        case "sender":
            send(Path(folder), int(number))
        case "raw":
            receive_raw(Path(folder))
        case "scheduler":
            answer_reports(Path(folder))
        case _:
            take_in(Path(folder))


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


if __name__ == "__main__":
    main(*sys.argv[1:])

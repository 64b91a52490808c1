"""Rank 0's handles of the learner's other ranks, which make the same updates."""

import json
import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
import zmq

from common.config.learner import LearnerSection
from common.config.run_config import RunConfig
from common.errors import ConfigError, LongstrideError
from common.host.loopback import loopback
from common.quick_exit import leave
from common.store.run_dir import RunDir
from common.weights.rendezvous import StoreServer
from common.wire.addresses import WILDCARDS, advertised, bracketed, own_host_towards
from common.wire.messages import (
    FileOp,
    NodeState,
    RankBeat,
    RankChannel,
    RankFile,
    RankFileAnswer,
    RankOrder,
    RankSeat,
    RanksPlace,
    Rejected,
)
from common.wire.security import load_keys, rank_node
from common.wire.sockets import FollowingDealer, Received, Router
from learner.policy.model import pick_device
from learner.policy.timing import settled
from learner.training.build import is_sharded
from learner.training.rank_processes import LOAD_S, Meeting, RankProcesses, RankWorker, meet
from learner.training.ranks import RankOperation, Ranks
from learner.training.shards import TENSORS
from learner.training.storage import convert_pickled_index


class FileServer:
    """Reads and writes files of the run's models and checkpoints for the ranks of other nodes."""

    def __init__(self, cfg: RunConfig, run_dir: RunDir) -> None:
        """Serve the models of `cfg`, and the checkpoints of the run, which may be written."""
        models = (cfg.model.path, cfg.algorithm.reference_path, cfg.learner.critic.path)
        self._written = run_dir.checkpoints.resolve()
        self._read = [self._written, *(Path(path).resolve() for path in models if path)]

    def answer(self, request: RankFile) -> RankFileAnswer:
        """Return the answer to a request; its error names a forbidden or a failed operation."""
        number = request.number
        path = Path(request.path).resolve()
        roots = [self._written] if request.op is FileOp.WRITE else self._read
        if not any(path.is_relative_to(root) for root in roots):
            text = f"{request.op} is not allowed outside of the run's models and checkpoints"
            return RankFileAnswer(number=number, error=text)
        try:
            match request.op:
                case FileOp.LIST:
                    files = (each for each in path.rglob("*") if each.is_file())
                    names = sorted(str(each.relative_to(path)) for each in files)
                    return RankFileAnswer(number=number, names=names)
                case FileOp.READ:
                    with path.open("rb", buffering=0) as file:
                        file.seek(request.offset_bytes)
                        content = file.read(request.num_bytes)
                    return RankFileAnswer(number=number, content=content)
                case FileOp.WRITE:
                    mode = "r+b" if request.offset_bytes else "wb"
                    with path.open(mode, buffering=0) as file:
                        file.seek(request.offset_bytes)
                        file.write(request.content)
                    return RankFileAnswer(number=number)
        except OSError as error:
            return RankFileAnswer(number=number, error=f"{error}")


POLL_S = 0.25  # Maximum seconds of one poll. A message or an order ends it at once.
BEAT_S = 1.0  # Seconds between two registrations at the scheduler.
ASLEEP_S = 5.0  # A longer gap between two rounds means that this process was suspended.
LOG_S = 30.0  # Seconds between two log lines of a wait for nodes.
ROLE = "ranks"  # Name of the file of the run directory that other nodes look for.


@dataclass(slots=True)
class _Node:
    """A node that has joined."""

    sender: bytes
    beat: RankBeat
    heard_at: float


class NodeServer(threading.Thread):
    """A thread that serves the other nodes of the learner.

    Consumes: beats and file requests of nodes, orders of the main thread and of the publisher.
    Waits for: those, `POLL_S` at most.
    Unblocked by: `send`, `close`.

    Example (2 nodes): rank 0 registers its address with the scheduler. Node 1 finds it there and
    sends beats. It receives the rendezvous, starts its ranks, and reports that they have loaded.
    Each order goes to all nodes. Node 1 falls silent -> `check` raises, the learner ends, and its
    supervisor restarts it. If the main thread hangs in a collective, this thread ends the process.
    """

    def __init__(
        self,
        cfg: RunConfig,
        run_dir: RunDir,
        checkpoint: Path | None,
        *,
        end_process: Callable[[], object] = lambda: leave(1),
    ) -> None:
        """Listen on `learner.host`; `end_process` is called if the main thread hangs."""
        super().__init__(name="learner-nodes", daemon=True)
        self._cfg = cfg.learner
        self._run_dir = run_dir
        self._silence_s = cfg.scheduler.dead_after_s
        self._end_process = end_process
        self._keys = load_keys(run_dir.keys)
        self._router = Router(self._keys, host=self._cfg.host, port=0)
        self.port = self._router.port
        self._store = StoreServer(self._cfg.host)
        self._files = FileServer(cfg, run_dir)
        self.incarnation = secrets.token_hex(8)
        run_dir.publish_address(ROLE, self.incarnation)
        self.group = self._store.open_group()
        self._seat = RankSeat(
            incarnation=self.incarnation,
            store_port=self._store.port,
            store_public=self._store.place.public,
            store_secret=self._store.place.secret,
            group_key=self.group,
            checkpoint=str(checkpoint.resolve()) if checkpoint is not None else "",
            probe=str((run_dir.addresses / ROLE).resolve()),
        )
        self._nodes: dict[int, _Node] = {}
        self._orders: deque[RankOrder] = deque()
        self._closing = threading.Event()
        self._changed = threading.Event()  # Set when the state of a node changes.
        self._began_at = self._round_at = time.monotonic()
        self._beat_at = 0.0
        self._error = ""  # The loss that ends the learner.
        self._error_at = 0.0
        self._disconnected_at = 0.0  # Time of the first loss of a connection between nodes.
        self._is_ending = False  # The main thread has begun to end the learner.
        self.start()

    @property
    def meeting(self) -> Meeting:
        """The rendezvous for the ranks of this node."""
        host = self._cfg.host
        place = replace(self._store.place, host=loopback() if host in WILDCARDS else host)
        return Meeting(place=place, group=self.group)

    @property
    def host(self) -> str:
        """The address of this node for the other nodes."""
        return own_host_towards(self._cfg.host, [each.beat.host for each in self._nodes.values()])

    def wait_loaded(self, check: Callable[[], object]) -> None:
        """Wait until all nodes have joined and loaded; `check` may end the wait by an exception.

        Raises: LongstrideError: names the nodes that are missing, late or lost.
        """
        log_at = time.monotonic() + LOG_S
        while unready := self._unready():
            check()
            self.check()
            waited_s = time.monotonic() - self._began_at
            absent = [number for number in unready if number not in self._nodes]
            limit_s = self._cfg.join_timeout_s + (0.0 if absent else LOAD_S)
            if waited_s > limit_s:
                raise LongstrideError(self._missing(absent, unready, limit_s))
            if time.monotonic() > log_at:
                log_at += LOG_S
                logger.info("waiting for learner nodes=%s absent=%s", unready, absent)
            self._changed.wait(POLL_S)
            self._changed.clear()

    def _unready(self) -> list[int]:
        """Return the nodes whose ranks have not loaded."""
        return [
            number
            for number in range(1, self._cfg.num_nodes)
            if number not in self._nodes or self._nodes[number].beat.state is not NodeState.LOADED
        ]

    def _missing(self, absent: list[int], unready: list[int], limit_s: float) -> str:
        """Return the error for nodes that did not join or load in time."""
        nodes = f"learner.num_nodes={self._cfg.num_nodes}: "
        if not absent:
            names = ", ".join(self._described(number) for number in unready)
            return f"{nodes}{names} did not load the model within {limit_s:g} s"
        names = ", ".join(f"node {number}" for number in absent)
        keys = ", ".join(f"keys/{rank_node(number)}.key" for number in absent)
        return (
            f"{nodes}{names} did not join within learner.join_timeout_s={limit_s:g}. Start `run.py"
            f" learner --join HOST:PORT --key FILE` there, each with its own file of {keys}"
        )

    def send(self, channel: RankChannel, content: bytes = b"") -> None:
        """Send an order to all nodes. For any thread. Raises: LongstrideError: as `check`."""
        self.check()
        self._orders.append(RankOrder(channel=channel, content=content))
        self._router.wake()

    def check(self) -> None:
        """Check that all nodes are alive. Raises: LongstrideError: names the node that is lost."""
        if self._error:
            raise LongstrideError(self._error)
        if not self.is_alive() and not self._closing.is_set():
            raise LongstrideError("the thread of the learner's nodes ended; the log has the cause")

    def explain(self) -> str:
        """Return which node is lost, after the main thread has lost a connection; "" if unknown.

        The loss of a node is certain only after its silence, so the call may wait.
        """
        self._is_ending = True
        deadline = time.monotonic() + self._silence_s + 2 * BEAT_S
        while not self._error and time.monotonic() < deadline and self.is_alive():
            self._changed.wait(POLL_S)
            self._changed.clear()
        return self._error

    def close(self, channel: RankChannel) -> None:
        """Send a last order to all nodes, and end the thread."""
        self._is_ending = True
        self._orders.append(RankOrder(channel=channel))
        self._closing.set()
        self._router.wake()
        self.join(timeout=5.0)

    def run(self) -> None:
        """Serve until closed."""
        context = zmq.Context()
        line = FollowingDealer(self._run_dir, "scheduler", self._keys, context=context)
        try:
            while not self._closing.is_set():
                self._register(line)
                self._check_silence()
                for received in self._router.receive_all(timeout_s=POLL_S):
                    self._process(received)
                self._send_orders()
            self._send_orders()
        finally:
            line.close(linger_s=0.0)
            context.term()
            self._router.close()
            self._store.close()

    def _register(self, line: FollowingDealer) -> None:
        """Send the address of this listener to the scheduler, which may have restarted."""
        if time.monotonic() < self._beat_at:
            return
        self._beat_at = time.monotonic() + BEAT_S
        line.follow()
        if not line.address:
            return
        line.take_all()
        host = self._cfg.advertise or self._cfg.host
        address = f"tcp://{bracketed(host)}:{self.port}"
        place = RanksPlace(
            address=advertised(address, towards=line.address), incarnation=self.incarnation
        )
        line.send(place)

    def _check_silence(self) -> None:
        """Record the loss of a node that has sent nothing for too long."""
        now = time.monotonic()
        if now - self._round_at > ASLEEP_S:
            for node in self._nodes.values():
                node.heard_at = now
        self._round_at = now
        for number, node in self._nodes.items():
            silent_s = now - node.heard_at
            if silent_s > self._silence_s:
                self._fail(
                    f"{self._described(number)} is lost: it sent nothing for {silent_s:.0f} s"
                )
        if self._disconnected_at and now - self._disconnected_at > self._silence_s + 2 * BEAT_S:
            self._fail("the nodes of the learner lost a connection, and all of them are alive")
        if self._error and not self._is_ending and now - self._error_at > ABORT_S:
            logger.error("ending this process, which waits for other ranks: %s", self._error)
            self._end_process()

    def _fail(self, text: str) -> None:
        """Record the first error; the main thread raises it."""
        if not self._error:
            logger.error("%s", text)
            self._error_at = time.monotonic()
            self._error = text
        self._changed.set()

    def _described(self, number: int) -> str:
        """Return a node as text, with its ranks."""
        first = number * self._cfg.local_ranks
        ranks = f"ranks {first} to {first + self._cfg.local_ranks - 1}"
        return f"learner node {number} ({self._nodes[number].beat.node}, {ranks})"

    def _process(self, received: Received) -> None:
        """Process one message of a node."""
        message = received.message
        peer = self._router.peer(received.sender)
        if peer.role != "learner":
            self._router.send(received.sender, Rejected(reason="only nodes of the learner connect"))
            return
        number = int(peer.name.rpartition("-")[2])
        if number in self._nodes:
            self._nodes[number].heard_at = time.monotonic()
        match message:
            case RankFile():
                self._router.send(received.sender, self._files.answer(message))
            case RankBeat():
                if message.incarnation == self.incarnation:
                    self._router.send(received.sender, self._seat)
                    self._process_heartbeat(number, received.sender, message)
            case _:
                name = type(message).__name__
                self._router.send(received.sender, Rejected(reason=f"no {name} is expected here"))

    def _process_heartbeat(self, number: int, sender: bytes, beat: RankBeat) -> None:
        """Record the state of a node; a restarted process or a failure is an error."""
        if not 0 < number < self._cfg.num_nodes:
            return
        before = self._nodes.get(number)
        self._nodes[number] = _Node(sender, beat, time.monotonic())
        if before is None:
            logger.info("joined learner node=%d name=%s", number, beat.node)
        elif before.beat.process != beat.process:
            self._fail(f"{self._described(number)} is lost: its process has restarted")
        if beat.state is NodeState.FAILED:
            self._fail(f"{self._described(number)}: {beat.error}")
        if beat.state is NodeState.DISCONNECTED and not self._disconnected_at:
            self._disconnected_at = time.monotonic()
        if before is None or before.beat.state is not beat.state:
            self._changed.set()

    def _send_orders(self) -> None:
        """Send the queued orders to all nodes."""
        while self._orders:
            order = self._orders.popleft()
            for number, node in self._nodes.items():
                if not self._router.send(node.sender, order) and not self._closing.is_set():
                    self._fail(f"{self._described(number)} is lost: its connection is closed")


logger = logging.getLogger(__name__)

ABORT_S = 30.0  # Seconds for the main thread to end after a loss. It may wait in a collective.


class LossWatch(threading.Thread):
    """A thread that ends this process if it still waits for a rank that has ended.

    Not every broken connection ends a collective: NCCL, and gloo at times, wait for their timeout.

    Waits for: the end of a rank, then `ABORT_S`.
    Unblocked by: `stop`.
    """

    def __init__(
        self,
        sentinels: Sequence[int],
        *,
        abort_s: float = ABORT_S,
        end_process: Callable[[], object] = lambda: leave(1),
    ) -> None:
        """Watch the processes with these sentinels."""
        super().__init__(name="learner-ranks", daemon=True)
        self._sentinels = sentinels
        self._abort_s = abort_s
        self._end_process = end_process
        self._reader, self._writer = os.pipe()
        self.start()

    def run(self) -> None:
        """Watch until stopped."""
        ready = wait([*self._sentinels, self._reader])
        if self._reader not in ready and not wait([self._reader], self._abort_s):
            logger.error("ending this process, which waits for a rank that has ended")
            self._end_process()

    def stop(self) -> None:
        """End the watch. A second call has no effect."""
        if self._writer >= 0:
            os.close(self._writer)  # The other end of the pipe becomes readable.
            self._writer = -1
            self.join(self._abort_s)
            os.close(self._reader)


class RankWorkers:
    """Rank 0's handles of ranks 1 and up; empty if `learner.num_ranks` is 1.

    Example (3 ranks): both processes load the model and send `READY` on their pipes. They receive
    the settled compute settings and join rank 0 in a process group. `announce` sends an order on
    every pipe and broadcasts its payload, such as a batch. All three ranks then make the same
    updates: each computes its share of the samples and updates its third of the weights.

    With `learner.num_nodes` above 1 each further node starts its own ranks, and passes the orders
    of rank 0 to them (`learner/node.py`).

    Between orders a process waits on its pipe, which closes when rank 0 ends for any reason. If a
    process or a node ends, `check` or rank 0's next sum raises. The learner then ends, and the
    supervisor restarts it with new ranks from the checkpoint.
    """

    def __init__(
        self,
        cfg: RunConfig,
        checkpoint: Path | None,
        *,
        run_dir: RunDir | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Start the processes of this node. They load `checkpoint` or `model.path`, like rank 0.

        Args:
            run_dir: needed for several nodes, which find rank 0 by the run's scheduler.
            check: may end the wait for the other nodes by an exception.
        """
        self._cfg = cfg
        self._check_start = check
        self._ranks = Ranks()
        self._device = pick_device(cfg.learner.device)
        self._folder: Path | None = None
        self._server: NodeServer | None = None
        self._watch: LossWatch | None = None
        self._processes = RankProcesses(cfg, [], checkpoint, Meeting())
        self.is_over = False  # True: the run ends with this process, and so do the other nodes.
        if not is_sharded(cfg.learner):
            return
        self._check_devices()
        if cfg.learner.num_nodes > 1:
            assert run_dir is not None
            if checkpoint is not None:
                convert_pickled_index(checkpoint / TENSORS)
            self._server = NodeServer(cfg, run_dir, checkpoint)
            self._meeting = self._server.meeting
        else:
            self._folder = Path(tempfile.mkdtemp(prefix="learner-ranks-"))  # Private to this host.
            self._meeting = Meeting(folder=str(self._folder))
        ours = range(1, cfg.learner.local_ranks)
        self._processes = RankProcesses(cfg, ours, checkpoint, self._meeting)
        self._watch = LossWatch([each.process.sentinel for each in self._workers])

    def _check_devices(self) -> None:
        """Check that each rank here has a GPU of its own. Raises: ConfigError."""
        learner = self._cfg.learner
        needed = (self._device.index or 0) + learner.local_ranks
        if self._device.type == "cuda" and torch.cuda.device_count() < needed:
            has = torch.cuda.device_count()
            raise ConfigError(
                f"learner.num_ranks={learner.num_ranks} from learner.device={learner.device}:"
                f" {needed} CUDA devices are needed, but {has} are visible"
            )

    @property
    def _workers(self) -> list[RankWorker]:
        return self._processes.workers

    def wait_loaded(self) -> None:
        """Wait until all ranks have loaded. Raises: LongstrideError: a rank ended or timed out."""
        self._processes.wait_loaded()
        if self._server is not None:
            self._server.wait_loaded(self._check_loading)

    def _check_loading(self) -> None:
        self._check_start()
        self._processes.check()

    def join(self, learner: LearnerSection) -> Ranks:
        """Return the ranks with this process as rank 0; all use its settled compute settings."""
        if not is_sharded(self._cfg.learner):
            return self._ranks
        host = self._server.host if self._server is not None else ""
        start = json.dumps([settled(learner), host]).encode()
        self._send_to_all(start)
        self._ranks = meet(self._cfg, 0, replace(self._meeting, host=host), self._device)
        self._ranks.explain = self._lost_text
        logger.info("ranks=%d pids=%s", self._ranks.size, self._processes.pids)
        return self._ranks

    def announce(self, order: RankOperation) -> None:
        """Send an order to the other ranks. Raises: LongstrideError: a rank ended."""
        self.check()
        header = json.dumps([*order[:-1], len(order.payload)])
        self._send_to_all(header.encode())
        if order.payload:
            with self._ranks.in_touch("the broadcast of an order"):
                self._ranks.send(order.payload)

    def _send_to_all(self, message: bytes) -> None:
        """Send a message to the ranks of this node and of the other nodes."""
        self._processes.tell(message)
        if self._server is not None:
            self._server.send(RankChannel.TRAINING, message)

    def ask_for_part(self, request: bytes) -> None:
        """Request a part of the weights from the other ranks. For the publisher's thread.

        Raises: LongstrideError: a rank ended.
        """
        self._processes.ask(request)
        if self._server is not None:
            self._server.send(RankChannel.WEIGHTS, request)

    def check(self) -> None:
        """Check that all ranks are alive. Raises: LongstrideError: names the rank or the node."""
        self._processes.check()
        if self._server is not None:
            self._server.check()

    def _lost_text(self) -> str:
        """Return which rank or node is lost after a lost connection; "" if unknown."""
        lost = self._processes.lost_text()
        return lost or (self._server.explain() if self._server is not None else "")

    def stop(self) -> None:
        """End all ranks: close their pipes, and kill each process that does not exit in time."""
        if self._watch is not None:
            self._watch.stop()
        if self._server is not None:
            self._server.close(RankChannel.FINISH if self.is_over else RankChannel.STOP)
        self._processes.stop()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

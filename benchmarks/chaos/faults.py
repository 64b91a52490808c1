"""The fault schedule; it injects faults into a run, and ends those that are temporary."""

import ctypes
import itertools
import logging
import os
import random
import resource
import signal
import struct
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil
import zmq

from benchmarks.chaos import machine
from benchmarks.chaos.clock import JumpingClock
from benchmarks.real_run import Role, roles_below
from common.store.run_dir import RunDir
from common.wire.codec import encode
from common.wire.security import load_keys
from common.wire.sockets import connect_dealer
from learner.journal.journal import read_journal

logger = logging.getLogger(__name__)

FAULT_S = 5.0  # Duration of a temporary fault.
NUM_KILLED_AGAIN = 3
START_S = 30.0  # Time limit for the restart of a role.
POLL_S = 0.05
NUM_CORRUPT = 200
NUM_AGAIN = 20  # Number of repeated trajectories.
ROOM_BYTES = 16 << 20  # Address space that a process without memory may still allocate.
AHEAD_S = 3_600  # Size of a clock jump.
PIDFD_GETFD = 438  # The number is the same on all architectures.
# A struct sockaddr with AF_UNSPEC. Connecting to it dissolves a connection.
UNSPECIFIED = struct.pack("H14x", 0)


class FaultType(StrEnum):
    """The type of a fault."""

    KILL = "kill -9"
    STOP = "stopped"  # SIGSTOP, then SIGCONT, as on a machine that swaps or migrates.
    RESET = "connections reset"
    NO_MEMORY = "no memory"  # Allocations fail for some time.
    KILL_AGAIN = "killed at each start"
    CORRUPT = "corrupt messages"
    DUPLICATE = "messages again"
    SLOW_NETWORK = "slow, lossy network"
    DROPPED = "packets dropped"
    DISK_FULL = "disk full"
    CLOCK = "clock jumps"  # An hour ahead, and back.


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault and its target."""

    kind: FaultType
    role: Role | None = None  # None: the fault affects the machine.

    @property
    def name(self) -> str:
        return f"{self.kind.value}: {self.role.value}" if self.role else self.kind.value


CONNECTED = (Role.SCHEDULER, Role.LEARNER, Role.RANK, Role.ACTOR, Role.HUB)
ALL_FAULTS = (
    *(Fault(FaultType.KILL, role) for role in Role),
    *(Fault(FaultType.STOP, role) for role in Role),
    *(Fault(FaultType.RESET, role) for role in CONNECTED),
    *(Fault(FaultType.NO_MEMORY, role) for role in (Role.LEARNER, Role.ENGINE, Role.HUB)),
    *(Fault(FaultType.KILL_AGAIN, role) for role in (Role.SCHEDULER, Role.HUB)),
    *(Fault(FaultType.CORRUPT, role) for role in (Role.SCHEDULER, Role.LEARNER)),
    Fault(FaultType.DUPLICATE, Role.LEARNER),
    Fault(FaultType.SLOW_NETWORK),
    Fault(FaultType.DROPPED),
    Fault(FaultType.DISK_FULL),
    Fault(FaultType.CLOCK),
)


def deal(faults: tuple[Fault, ...], *, seed: int) -> Iterator[Fault]:
    """Yield an endless series: each fault once in random order, then all again in a new order."""
    draw = random.Random(seed)
    for _ in itertools.count():
        deck = list(faults)
        draw.shuffle(deck)
        yield from deck


def reset_connections(process: psutil.Process) -> int:
    """Reset the established TCP connections of a process. Both ends get an error at once.

    Returns: the number of reset connections.

    Raises: OSError: the system or its ptrace policy does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    num_reset = 0
    with ExitStack() as stack:
        watched = os.pidfd_open(process.pid)
        stack.callback(os.close, watched)
        for connection in process.net_connections(kind="tcp"):
            if connection.status != psutil.CONN_ESTABLISHED or connection.fd < 0:
                continue
            fd = libc.syscall(PIDFD_GETFD, watched, connection.fd, 0)
            if fd < 0:
                raise OSError(ctypes.get_errno(), f"pidfd_getfd of process {process.pid}")
            stack.callback(os.close, fd)
            num_reset += libc.connect(fd, UNSPECIFIED, len(UNSPECIFIED)) == 0
    return num_reset


NETWORK = {FaultType.SLOW_NETWORK: machine.slow_network, FaultType.DROPPED: machine.drop_packets}


class NotPossible(Exception):
    """The fault was not injected: the machine does not support it, or its target is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyRun:
    """The run that faults are injected into."""

    supervisor_pid: int
    run_dir: RunDir
    disk: Path | None  # A folder on the run's own disk; None: the run uses the machine's disk.
    clock: JumpingClock | None = None  # The run's own clock; None: it uses the machine's clock.
    lasts_s: float = FAULT_S

    def strike(self, fault: Fault) -> None:
        """Inject a fault; return once it has ended. The run may still be recovering.

        Raises: NotPossible.
        """
        match fault.kind, fault.role:
            case FaultType.KILL, Role() as role:
                self._newest_process(role).kill()
            case FaultType.KILL_AGAIN, Role() as role:
                self._kill_again(role)
            case FaultType.RESET, Role() as role:
                _reset_connections(self._newest_process(role))
            case FaultType.CORRUPT, Role() as role:
                self._send_corrupt(role)
            case FaultType.DUPLICATE, _:
                self._send_again()
            case _:
                with ExitStack() as undo:
                    self._begin(fault, undo)
                    self.elapse()

    def elapse(self) -> None:
        """Wait for the end of a temporary fault."""
        time.sleep(self.lasts_s)

    def _begin(self, fault: Fault, undo: ExitStack) -> None:
        """Begin a temporary fault. It ends with the stack."""
        match fault.kind, fault.role:
            case FaultType.STOP, Role() as role:
                victim = self._newest_process(role)
                victim.send_signal(signal.SIGSTOP)
                undo.enter_context(suppress(psutil.NoSuchProcess))
                undo.callback(victim.send_signal, signal.SIGCONT)
            case FaultType.NO_MEMORY, Role() as role:
                _take_memory(self._newest_process(role), undo)
            case FaultType.CLOCK, _:
                if self.clock is None:
                    raise NotPossible("no C compiler to make a clock of the run's own with")
                undo.callback(self.clock.set_ahead, 0)
                self.clock.set_ahead(AHEAD_S)
            case kind, _:
                if self.disk is None:
                    raise NotPossible("the run has no machine of its own: not an administrator")
                self._trouble_machine(kind, self.disk / "filler", undo)

    def _trouble_machine(self, kind: FaultType, filler: Path, undo: ExitStack) -> None:
        """Inject a fault of the disk, the network or the clock."""
        if kind is FaultType.DISK_FULL:
            undo.callback(filler.unlink, missing_ok=True)
            machine.fill_disk(filler)
            return
        undo.callback(machine.heal_network)
        if not NETWORK[kind]():
            raise NotPossible("this kernel shapes no traffic")

    def _processes(self, role: Role) -> list[psutil.Process]:
        """Return the processes of a role."""
        return roles_below(self.supervisor_pid).get(role, [])

    def _newest_process(self, role: Role) -> psutil.Process:
        """Return the newest process of a role. Raises: NotPossible: there is none."""
        processes = self._processes(role)
        if not processes:
            raise NotPossible(f"no {role} runs at the moment")
        return processes[-1]

    def _kill_again(self, role: Role) -> None:
        """Kill a role, and repeatedly kill its restarted process."""
        for _ in range(NUM_KILLED_AGAIN):
            deadline = time.monotonic() + START_S
            while not (victims := self._processes(role)):
                if time.monotonic() > deadline:
                    return
                time.sleep(POLL_S)
            for victim in victims:
                with suppress(psutil.NoSuchProcess):
                    victim.kill()
                    victim.wait(START_S)

    def _send_corrupt(self, role: Role) -> None:
        """Send invalid messages with an actor's key to every port of a role."""
        with self._dealers(role) as dealers:
            for dealer in dealers:
                for number in range(NUM_CORRUPT):
                    frames = [os.urandom(1 + number % 97) for _ in range(1 + number % 5)]
                    dealer.send_multipart(frames)

    def _send_again(self) -> None:
        """Send trajectories that the journal already contains, as after a lost acknowledgement."""
        last = [trajectory for _, trajectory in read_journal(self.run_dir.journal)][-NUM_AGAIN:]
        if not last:
            raise NotPossible("the journal is empty")
        with self._dealers(Role.LEARNER) as dealers:
            for dealer in dealers:
                for trajectory in last:
                    dealer.send_multipart(encode(trajectory))
            answers = [dealer.poll(int(1e3 * self.lasts_s)) for dealer in dealers]
        if not any(answers):
            raise NotPossible("the learner does not answer at the moment")

    @contextmanager
    def _dealers(self, role: Role) -> Generator[list[zmq.Socket[bytes]]]:
        """Yield sockets with the key of the run's actors, connected to every port of a role."""
        keys = load_keys(self.run_dir.keys)
        connections = self._newest_process(role).net_connections(kind="tcp")
        ports = [end.laddr.port for end in connections if end.status == psutil.CONN_LISTEN]
        if not ports:
            raise NotPossible(f"{role} does not listen at the moment")
        with zmq.Context() as context, ExitStack() as stack:
            dealers: list[zmq.Socket[bytes]] = []
            for port in ports:
                address = f"tcp://127.0.0.1:{port}"
                dealer = connect_dealer(context, keys, address=address, timeout_s=self.lasts_s)
                stack.callback(dealer.close, linger=1_000)
                dealers.append(dealer)
            yield dealers


def _reset_connections(process: psutil.Process) -> None:
    """Reset the connections of a process. Raises: NotPossible."""
    try:
        num_reset = reset_connections(process)
    except OSError as error:
        raise NotPossible(f"no connection of another process can be reset: {error}") from error
    logger.info("reset connections=%d pid=%d", num_reset, process.pid)


def _take_memory(process: psutil.Process, undo: ExitStack) -> None:
    """Limit the address space of a process to slightly more than it uses now."""
    before = resource.prlimit(process.pid, resource.RLIMIT_AS)
    room = process.memory_info().vms + ROOM_BYTES
    resource.prlimit(process.pid, resource.RLIMIT_AS, (room, before[1]))
    undo.enter_context(suppress(ProcessLookupError))
    undo.callback(resource.prlimit, process.pid, resource.RLIMIT_AS, before)

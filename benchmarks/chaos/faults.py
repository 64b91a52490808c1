"""Injects faults into a run, and ends those that are temporary."""

import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import zmq

from benchmarks.chaos import machine
from benchmarks.chaos.clock import JumpingClock
from benchmarks.chaos.connections import reset_connections
from benchmarks.chaos.plan import Fault, Kind
from benchmarks.chaos.victims import Role, find_victims
from common.store.journal import read_journal
from common.store.run_dir import RunDir
from common.wire.codec import encode
from common.wire.security import load_keys
from common.wire.sockets import connect_dealer

logger = logging.getLogger(__name__)

LASTS_S = 5.0  # Duration of a temporary fault.
NUM_KILLED_AGAIN = 3
START_S = 30.0  # Time limit for the restart of a role.
POLL_S = 0.05
NUM_CORRUPT = 200
NUM_AGAIN = 20  # Number of repeated trajectories.
ROOM_BYTES = 16 << 20  # Address space that a process without memory may still allocate.
AHEAD_S = 3_600  # Size of a clock jump.
NETWORK = {Kind.SLOW_NETWORK: machine.slow_network, Kind.DROPPED: machine.drop_packets}


class NotPossible(Exception):
    """The fault was not injected: the machine does not support it, or its target is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The run that faults are injected into."""

    supervisor_pid: int
    run_dir: RunDir
    disk: Path | None  # A folder on the run's own disk; None: the run uses the machine's disk.
    clock: JumpingClock | None = None  # The run's own clock; None: it uses the machine's clock.
    halves: Path | None = None  # While this file exists, observations end with half a character.
    lasts_s: float = LASTS_S

    def strike(self, fault: Fault) -> None:
        """Inject a fault; return once it has ended. The run may still be recovering.

        Raises: NotPossible.
        """
        passing: dict[Kind, Callable[[Role], object]] = {
            Kind.KILL: lambda role: self._victim(role).kill(),
            Kind.KILL_AGAIN: self._kill_again,
            Kind.RESET: lambda role: _reset(self._victim(role)),
            Kind.CORRUPT: self._send_corrupt,
            Kind.DUPLICATE: lambda _: self._send_again(),
        }
        with ExitStack() as stack:
            if fault.role is None:
                stack.enter_context(self._trouble(fault.kind))
            elif fault.kind in (Kind.STOP, Kind.NO_MEMORY):
                victim = self._victim(fault.role)
                stack.enter_context(
                    _stopped(victim) if fault.kind is Kind.STOP else _without_memory(victim)
                )
            else:
                passing[fault.kind](fault.role)
                return
            time.sleep(self.lasts_s)

    def _victim(self, role: Role) -> psutil.Process:
        found = find_victims(self.supervisor_pid, role)
        if not found:
            raise NotPossible(f"no {role} runs at the moment")
        return found[-1]

    def _kill_again(self, role: Role) -> None:
        """Kill a role, and repeatedly kill its restarted process."""
        for _ in range(NUM_KILLED_AGAIN):
            deadline = time.monotonic() + START_S
            while not (found := find_victims(self.supervisor_pid, role)):
                if time.monotonic() > deadline:
                    return
                time.sleep(POLL_S)
            for victim in found:
                with suppress(psutil.NoSuchProcess):
                    victim.kill()
                    victim.wait(START_S)

    @contextmanager
    def _trouble(self, kind: Kind) -> Generator[None]:
        """Inject a fault of the machine until the end of the block."""
        if kind is Kind.CLOCK:
            with _jumped(self.clock):
                yield
        elif kind is Kind.HALVES:
            with _present(self.halves):
                yield
        elif self.disk is None:
            raise NotPossible("the run has no machine of its own: not an administrator")
        elif kind in NETWORK:
            try:
                if not NETWORK[kind]():
                    raise NotPossible("this kernel shapes no traffic")
                yield
            finally:
                machine.heal_network()
        else:
            filler = self.disk / "filler"
            try:
                machine.fill_disk(filler)
                yield
            finally:
                filler.unlink(missing_ok=True)

    def _send_corrupt(self, role: Role) -> None:
        """Send invalid messages with an actor's key to every port of a role."""
        with self._dealers(role) as dealers:
            for dealer in dealers:
                for number in range(NUM_CORRUPT):
                    frames = [os.urandom(1 + number % 97) for _ in range(1 + number % 5)]
                    dealer.send_multipart(frames)

    def _send_again(self) -> None:
        """Send trajectories that the journal already contains, as after a lost acknowledgement."""
        last = [each for _, each in read_journal(self.run_dir.journal)][-NUM_AGAIN:]
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
        found = self._victim(role).net_connections(kind="tcp")
        ports = [each.laddr.port for each in found if each.status == psutil.CONN_LISTEN]
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


def _reset(process: psutil.Process) -> None:
    try:
        num_reset = reset_connections(process)
    except OSError as error:
        raise NotPossible(f"no connection of another process can be reset: {error}") from error
    logger.info("reset connections=%d pid=%d", num_reset, process.pid)


@contextmanager
def _jumped(clock: JumpingClock | None) -> Generator[None]:
    if clock is None:
        raise NotPossible("no C compiler to make a clock of the run's own with")
    clock.set_ahead(AHEAD_S)
    try:
        yield
    finally:
        clock.set_ahead(0)


@contextmanager
def _present(path: Path | None) -> Generator[None]:
    if path is None:
        raise NotPossible("the run's environments were not asked to")
    path.touch()
    try:
        yield
    finally:
        path.unlink()


@contextmanager
def _stopped(process: psutil.Process) -> Generator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


@contextmanager
def _without_memory(process: psutil.Process) -> Generator[None]:
    """Limit the address space of a process to slightly more than it uses now."""
    before = resource.prlimit(process.pid, resource.RLIMIT_AS)
    room = process.memory_info().vms + ROOM_BYTES
    resource.prlimit(process.pid, resource.RLIMIT_AS, (room, before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_AS, before)

"""The fault schedule: a seeded shuffle of all faults, repeated in a new order."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.real_run import Role


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

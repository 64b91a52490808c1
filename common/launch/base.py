"""What a launcher is given and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_NOT_STARTED = 70  # of a role: it failed by itself before it began to work
EXIT_CONFIG_ERROR = 2  # of a role: what the user asked for is wrong, trying again cannot help


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """One role as a process: what to start, and what to do when it ends."""

    name: str  # "actor-0"; also in messages and log lines
    argv: tuple[str, ...]
    log_path: Path  # stdout and stderr are appended here
    env: dict[str, str] = field(default_factory=lambda: {})  # on top of the launcher's own
    ends_run: bool = False  # exit code 0 means that the run is finished
    saves_at_stop: bool = False  # gets the whole stop deadline, as what it does not save is lost
    is_restartable: bool = True
    max_restarts: int = 20  # within ten minutes and without progress; one more fails the run
    quiet_exit_grace_s: float = 0.0  # after exit code 0, before it is started again
    stop_rank: int = 0  # at a stop all of one rank are ended before the next rank is told


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended."""

    exit_code: int  # 0 finished, 130 or 143 interrupted, 1 failed, 2 wrong configuration
    reason: str  # for people; several lines if a role failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to do about roles that hang, or a run that stands still."""

    report: str  # one line
    restart: list[str] = field(default_factory=list[str])  # names of roles
    is_stop: bool = False  # end the run


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchState:
    """What the launcher knows and the scheduler does not."""

    began_at: float  # Unix time at which the run was started
    started_at: dict[str, float]  # role -> Unix time of its last start, of those that run now
    stop_deadline: float | None = None  # Unix time; None while nobody is being stopped
    waiting: dict[str, str] = field(default_factory=lambda: {})  # role without a node -> for what
    usual_s: dict[str, float] = field(default_factory=lambda: {})  # role -> what its start takes
    phase: str = ""  # of the scheduler, and since when it was seen, with so many episodes done
    phase_began_at: float = 0.0  # Unix time
    phase_done: int = 0


class RoleProcess(Protocol):
    """A role that was started, wherever it runs."""

    @property
    def started_at(self) -> float | None:
        """Unix time of the start; None while it waits for a node to run on."""
        ...

    @property
    def waits_for(self) -> str:
        """What it needs to start, such as "a node with 1 GPU"; "" once it has started."""
        ...

    def poll(self) -> int | None:
        """Return the exit code (negative: minus the signal), None before the end."""
        ...

    def terminate(self) -> None:
        """Ask the role itself, not what it started, to end."""
        ...

    def clear_away(self) -> None:
        """Kill at once whatever is left of it."""
        ...

    def log_tail(self, *, max_lines: int) -> list[str]:
        """Return the last lines of its log since this start."""
        ...


class Watch(Protocol):
    """Looks at roles that live: whether they get anywhere."""

    def look(self, processes: Mapping[str, RoleProcess]) -> Verdict | None:
        """Return what to do about a stall, None if there is none."""
        ...

    def progress(self, role: str) -> object:
        """Return something that changes as the role's part gets done."""
        ...

    def is_over(self) -> bool:
        """Return whether the run has nothing left to do but its end."""
        ...


class RoleStarter(Protocol):
    """Starts roles on one machine or on many."""

    @property
    def host(self) -> str:
        """Address of this machine for roles on others; a loopback address if there are none."""
        ...

    def start(self, spec: RoleSpec) -> RoleProcess:
        """Start a role, or have it started as soon as there is a node for it."""
        ...

    def memory_bytes(self) -> int:
        """Return what roles take that are no descendants of this process."""
        ...

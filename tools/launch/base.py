"""Types at the interface of the launcher: role specs, processes, starters, endings."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from common.config.ray import RaySection

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_NOT_STARTED = 70  # A role failed by its own fault before it began to work.
EXIT_CONFIG_ERROR = 2  # The user's request is wrong, and a restart cannot help.


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """One role as a process: its command, and the policy for its end."""

    name: str  # Name in messages and log lines, such as "actor-0".
    argv: tuple[str, ...]
    log_path: Path  # File to which stdout and stderr are appended.
    env: dict[str, str] = field(default_factory=lambda: {})  # Additional variables.
    ends_run: bool = False  # Exit code 0 means that the run is finished.
    saves_at_stop: bool = False  # Gets the whole stop deadline, to save its work.
    is_restartable: bool = True
    max_restarts: int = 20  # Budget for ten minutes without progress; one more fails the run.
    quiet_exit_grace_s: float = 0.0  # Delay before a restart after exit code 0.
    stop_rank: int = 0  # All roles of a rank end before the next rank is stopped.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Exit code and reason of a run's end."""

    exit_code: int  # 0 finished, 130 or 143 interrupted, 1 failed, 2 wrong configuration.
    reason: str  # Human-readable text; several lines if a role failed.


@dataclass(frozen=True, slots=True, kw_only=True)
class StallVerdict:
    """The action against hanging roles, or against a run without progress."""

    report: str  # One line.
    restart: list[str] = field(default_factory=list[str])  # Names of roles.
    is_stop: bool = False  # Whether to end the run.


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchState:
    """The part of a run's state that only the launcher holds."""

    began_at: float  # Unix time of the run's start.
    started_at: dict[str, float]  # Running role -> Unix time of its last start.
    stop_deadline: float | None = None  # Unix time; None while no role is being stopped.
    waiting: dict[str, str] = field(default_factory=lambda: {})  # Role without a node -> its needs.
    usual_s: dict[str, float] = field(default_factory=lambda: {})  # Role -> usual start time.
    phase: str = ""  # Phase of the scheduler.
    phase_began_at: float = 0.0  # Unix time at which the phase was first observed.
    phase_done: int = 0  # Finished episodes at that time.


class RoleProcess(Protocol):
    """A started role, local or on another node."""

    @property
    def started_at(self) -> float | None:
        """Unix time of the start; None while the role waits for a node."""
        ...

    @property
    def waits_for(self) -> str:
        """The resource that the start waits for, such as "a node with 1 GPU"; "" after it."""
        ...

    def poll(self) -> int | None:
        """Return the exit code (negative: minus the signal); None while it runs."""
        ...

    def terminate(self) -> None:
        """Send SIGTERM to the role itself, not to its child processes."""
        ...

    def clear_away(self) -> None:
        """Kill the remaining processes of the role at once."""
        ...

    def log_tail(self, *, max_lines: int) -> list[str]:
        """Return the last lines of its log since this start."""
        ...


class StallDetector(Protocol):
    """Observes the progress of running roles."""

    def poll(self, processes: Mapping[str, RoleProcess]) -> StallVerdict | None:
        """Return the action against a stall; None without a stall."""
        ...

    def progress(self, role: str) -> object:
        """Return a value that changes as the role makes progress."""
        ...

    def has_worked(self, role: str) -> bool:
        """Return whether a role has had a result since the launcher began."""
        ...

    def is_over(self) -> bool:
        """Return whether all work of the run is done."""
        ...


class RoleStarter(Protocol):
    """Starts roles on one machine or on several."""

    @property
    def host(self) -> str:
        """This machine's address for roles on other nodes; loopback if there are none."""
        ...

    def start(self, spec: RoleSpec) -> RoleProcess:
        """Start a role, at once or as soon as a node has room for it."""
        ...

    def memory_bytes(self) -> int:
        """Return the memory of the roles that are not descendants of this process."""
        ...


def cluster_address(section: RaySection) -> str:
    """Return the address of the cluster to join; "" if the run starts its own cluster."""
    return section.address or os.environ.get("RAY_ADDRESS", "")

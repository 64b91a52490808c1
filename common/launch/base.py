"""What a launcher is given and what it answers."""

from dataclasses import dataclass, field
from pathlib import Path

EXIT_FINISHED = 0
EXIT_FAILED = 1
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
    max_restarts: int = 20  # within ten minutes; one more fails the run
    quiet_exit_grace_s: float = 0.0  # after exit code 0, before it is started again
    stop_rank: int = 0  # at a stop all of one rank are ended before the next rank is told


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended."""

    exit_code: int  # 0 finished, 130 or 143 interrupted, 1 failed, 2 wrong configuration
    reason: str  # for people; several lines if a role failed


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchState:
    """What the launcher knows and the scheduler does not."""

    began_at: float  # Unix time at which the run was started
    started_at: dict[str, float]  # role -> Unix time of its last start, of those that run now
    stop_deadline: float | None = None  # Unix time; None while nobody is being stopped

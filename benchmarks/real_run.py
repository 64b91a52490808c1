"""Child processes of measurements, training runs that are started as by a user, and their roles."""

import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from common.errors import LongstrideError
from common.host.child_process import ChildProcess, describe_exit
from common.repository import ROOT

_ROLE = re.compile(r"run\.py (\w+)")
ENGINE_TITLE = "EngineCore"
RANK_CODE = "multiprocessing.spawn"  # A part of the command line of a rank, not of its helpers.
STOP_S = 60.0  # Limit for a run to save and stop.
TAIL_LINES = 5
TRAINING_ALONE = (
    "eval.before=false",
    "eval.after=false",
    "eval.baselines=false",
    "log.live=false",
    "log.wandb=disabled",
)


class Role(StrEnum):
    """A role of a run. An engine is a process below its actor, a rank one below its learner."""

    SCHEDULER = "scheduler"
    LEARNER = "learner"
    RANK = "rank"
    ACTOR = "actor"
    ENGINE = "engine"
    HUB = "envhub"


def roles_below(supervisor_pid: int) -> dict[Role, list[psutil.Process]]:
    """Return the processes of each role below the supervisor, oldest first."""
    by_role: defaultdict[Role, list[psutil.Process]] = defaultdict(list)
    with suppress(psutil.NoSuchProcess):
        processes = psutil.Process(supervisor_pid).children(recursive=True)
        for process in sorted(processes, key=lambda process: process.pid):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if role := _role_of(process):
                    by_role[role].append(process)
    return dict(by_role)


def _role_of(process: psutil.Process) -> Role | None:
    """Return the role of a process in a run; None for auxiliary processes."""
    words = process.cmdline()
    if ENGINE_TITLE in " ".join(words):
        return Role.ENGINE
    parent = process.parent()
    named = _ROLE.search(" ".join(words))
    if named is None and RANK_CODE in " ".join(words) and parent is not None:
        above = _ROLE.search(" ".join(parent.cmdline()))
        return Role.RANK if above is not None and above[1] == Role.LEARNER else None
    # The process is a fork of its parent.
    if named is None or (parent is not None and parent.cmdline() == words):
        return None
    return Role(named[1]) if named[1] in set(Role) else None


@contextmanager
def child(
    name: str,
    argv: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    stop_s: float = 15.0,
) -> Generator[ChildProcess]:
    """Yield a process of this Python with these arguments; stop it at the end of the block."""
    command = [sys.executable, *argv]
    process = ChildProcess(name, command, log_path=log, env=env, cwd=ROOT)
    try:
        yield process
    finally:
        process.stop(timeout_s=stop_s)


@contextmanager
def running(
    name: str,
    overrides: Sequence[str],
    *,
    folder: Path,
    config: str = "quickstart",
    env: Mapping[str, str] | None = None,
) -> Generator[ChildProcess]:
    """Start `train` below `folder`; stop it at the end of the block if it still runs."""
    place = (f"run.dir={folder}", f"run.name={name}")
    argv = ["run.py", "train", "--config", config, *place, *overrides]
    with child(name, argv, log=folder / f"{name}.log", env=env, stop_s=STOP_S) as process:
        yield process


def train(
    name: str,
    overrides: Sequence[str],
    *,
    folder: Path,
    timeout_s: float,
    config: str = "quickstart",
) -> None:
    """Run `train` below `folder` in a separate process until it has ended.

    Raises: LongstrideError: it failed, or was not in time; holds the end of its log, names the log.
    """
    with running(name, overrides, folder=folder, config=config) as process:
        await_success(process, timeout_s=timeout_s)


def await_success(process: ChildProcess, *, timeout_s: float) -> None:
    """Wait for the end of a process. Raises: LongstrideError: it failed, or was not in time."""
    if not process.has_ended_by(time.monotonic() + timeout_s):
        raise LongstrideError(
            f"{process.name} has not ended within {timeout_s:g}s, see {process.log_path}"
        )
    check_end(process)


def check_end(process: ChildProcess) -> None:
    """Raise LongstrideError, with its last log lines, if a process has ended with an error."""
    if code := process.poll():
        last = " / ".join(process.log_tail(max_lines=TAIL_LINES))
        ended = f"{process.name} ended with {describe_exit(code)}"
        raise LongstrideError(f"{ended}, see {process.log_path}: {last}")


def cpu_seconds(pid: int) -> dict[str, float]:
    """Return the processor seconds of each role below a process; engines are separate roles.

    Processes without a role in their command line, such as the workers of a hub, are left out.
    """
    used: dict[str, float] = {}
    for role, processes in roles_below(pid).items():
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                used[role.value] = used.get(role.value, 0.0) + sum(process.cpu_times()[:2])
    return used


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one JSON object per line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

"""Child processes of measurements, and training runs that are started as by a user."""

import json
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.runs.roles import roles_below
from common.errors import LongstrideError
from common.host.child_process import ChildProcess, describe_exit
from common.repository import ROOT

STOP_S = 60.0  # Limit for a run to save and stop.
TAIL_LINES = 5
TRAINING_ALONE = (
    "eval.before=false",
    "eval.after=false",
    "eval.baselines=false",
    "log.live=false",
    "log.wandb=disabled",
)


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
    own = (f"run.dir={folder}", f"run.name={name}")
    argv = ["run.py", "train", "--config", config, *own, *overrides]
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

"""File locks: one launcher per run directory, one process per unique role."""

import contextlib
import fcntl
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import TextIO

from common.errors import ConfigError

GONE_S = 1.0  # Time for a killed process to disappear.
# Polling interval, longer than `is_held` holds the lock. A blocking wait could last a whole run.
POLL_S = 0.05


@contextlib.contextmanager
def hold_run(root: Path, *, name: str) -> Generator[None]:
    """Lock a run directory for this launcher. The kernel releases the lock at the process's end.

    Raises: ConfigError: another launcher holds the lock; the message names its process id.
    """
    path = root.parent / f".{root.name}.lock"  # The folder itself may be renamed.
    with _locked(path, what=f"run.name={name}: this run is already running", wait_s=POLL_S):
        yield


@contextlib.contextmanager
def hold_role(root: Path, role: str) -> Generator[None]:
    """Lock a role that a run has only one process of, such as its scheduler.

    Raises: ConfigError: another process runs the role; the message names its process id.
    """
    what = f"{root}: this run already has a {role}"
    with _locked(root / f".{role}.lock", what=what, wait_s=GONE_S):
        yield


@contextlib.contextmanager
def _locked(path: Path, *, what: str, wait_s: float) -> Generator[None]:
    """Hold the lock of a file. Raises: ConfigError: another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        try:
            _lock(file, wait_s)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise ConfigError(f"{what} (process {holder}); stop that process first") from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _lock(file: TextIO, wait_s: float) -> None:
    """Acquire the lock. The current holder, or a check by `is_held`, has `wait_s` to release it."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(POLL_S)
        else:
            return


def is_held(root: Path) -> bool:
    """Return whether a launcher of this run is alive."""
    try:
        with (root.parent / f".{root.name}.lock").open("r", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False

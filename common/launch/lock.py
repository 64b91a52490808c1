"""One launcher per run directory."""

import contextlib
import fcntl
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import TextIO

from common.errors import ConfigError

LOOK_S = 0.05  # longer than `is_held` holds the lock; a wait for it could last a whole run


@contextlib.contextmanager
def hold_run(root: Path, *, name: str) -> Generator[None]:
    """Keep other launchers out of a run directory; the lock goes with the process, however it ends.

    Raises: ConfigError: another launcher holds it; names its process id.
    """
    root.parent.mkdir(parents=True, exist_ok=True)
    with (root.parent / f".{root.name}.lock").open("a+") as file:  # the folder itself may move
        try:
            _lock(file)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise ConfigError(
                f"run.name={name}: this run is going on (process {holder}); stop that first"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _lock(file: TextIO) -> None:
    """Take the lock, at the second try if somebody just looks whether it is held."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(LOOK_S)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_held(root: Path) -> bool:
    """Return whether a launcher of this run is alive."""
    try:
        with (root.parent / f".{root.name}.lock").open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False

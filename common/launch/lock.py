"""One launcher per run directory."""

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path

from common.errors import ConfigError


@contextlib.contextmanager
def hold_run(root: Path, *, name: str) -> Generator[None]:
    """Keep other launchers out of a run directory; the lock goes with the process, however it ends.

    Raises:
        ConfigError: another launcher holds it; names its process id.
    """
    root.parent.mkdir(parents=True, exist_ok=True)
    with (root.parent / f".{root.name}.lock").open("a+") as file:  # the folder itself may move
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise ConfigError(
                f"run.name={name}: this run is going on (process {holder}); stop that first"
            ) from e
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield

"""Stack requests: a signal makes a process write its stacks to its own file."""

import contextlib
import faulthandler
import os
import signal
from pathlib import Path
from typing import TextIO

STACKS_SIGNAL = signal.SIGUSR1
STACKS = "LONGSTRIDE_STACKS"  # Environment variable "<the role's process id>:<path prefix>".
MAX_STACKS_BYTES = 1 << 20  # Size limit of a process's file. A report empties a larger file.
STDERR = 2  # The file descriptor.
_helpers: list[TextIO] = []  # These files stay open for the lifetime of this process.


def tell_stacks() -> None:
    """Enable stack requests for this process, which is a helper of a role.

    The stacks go to its own file, or to the log if the role has no folder (on another node).
    """
    owner, _, prefix = os.environ.get(STACKS, "").partition(":")
    if owner in ("", str(os.getpid())):
        return
    if not prefix:
        faulthandler.register(STACKS_SIGNAL, file=STDERR, all_threads=True)
        return
    with contextlib.suppress(OSError):  # Other code reports a full disk.
        file = open(f"{prefix}.{os.getpid()}.stacks", "a", encoding="utf-8")  # noqa: SIM115 - see `_helpers`
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
        _helpers.append(file)


def helpers_of(folder: Path, role: str) -> dict[Path, int]:
    """Return the stack files of a role's helpers with process ids. Some may have ended."""
    process_ids = {path: path.name.split(".")[-2] for path in folder.glob(f"{role}.*.stacks")}
    return {path: int(pid) for path, pid in process_ids.items() if pid.isdigit()}


def ask(pid: int) -> bool:
    """Request a process's stacks; False if it does not run or does not handle the signal yet."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        if caught & 1 << STACKS_SIGNAL - 1 == 0:  # The signal would end the process.
            return False
        os.kill(pid, STACKS_SIGNAL)
    except (OSError, IndexError):
        return False
    return True

"""How a process is asked for its stacks: with a signal, which writes them to a file of its own."""

import contextlib
import faulthandler
import os
import signal
from pathlib import Path
from typing import TextIO

STACKS_SIGNAL = signal.SIGUSR1
STACKS = "LONGSTRIDE_STACKS"  # environment variable: a role's process id and where its stacks go
MAX_STACKS_BYTES = 1 << 20  # of a process; once they are in a report they may go
STDERR = 2  # the file descriptor
_helpers: list[TextIO] = []  # stays open as long as this process


def tell_stacks() -> None:
    """Let the supervisor ask this process, which helps a role, for its stacks as well.

    They go to a file of its own, or to the log where the role has none (on another node).
    """
    owner, _, prefix = os.environ.get(STACKS, "").partition(":")
    if owner in ("", str(os.getpid())):
        return
    if not prefix:
        faulthandler.register(STACKS_SIGNAL, file=STDERR, all_threads=True)
        return
    with contextlib.suppress(OSError):  # of a full disk somebody else tells
        file = open(f"{prefix}.{os.getpid()}.stacks", "a", encoding="utf-8")  # noqa: SIM115 - see `_helpers`
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
        _helpers.append(file)


def helpers_of(folder: Path, role: str) -> dict[Path, int]:
    """Return the files of a role's helpers, each with its process id; some may be gone."""
    found = {path: path.name.split(".")[-2] for path in folder.glob(f"{role}.*.stacks")}
    return {path: int(pid) for path, pid in found.items() if pid.isdigit()}


def ask(pid: int) -> bool:
    """Ask a process for its stacks; False if it is not there, or cannot tell them yet."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        if caught & 1 << STACKS_SIGNAL - 1 == 0:  # it would end by that
            return False
        os.kill(pid, STACKS_SIGNAL)
    except (OSError, IndexError):
        return False
    return True

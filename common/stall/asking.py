"""Asks all processes of a role for their stacks, wherever it runs, and reads the answers."""

import contextlib
import os
from pathlib import Path
from typing import Protocol, runtime_checkable

import psutil

from common.launch.base import RoleProcess
from common.launch.process import ChildProcess
from common.stall.report import Told
from common.stall.stacks import MAX_STACKS_BYTES, ask, helpers_of

MAX_BYTES = 60_000  # of one process in a report
STACKS_SUFFIX = ".stacks"


def ask_role(
    folder: Path, name: str, told: Told | None, process: RoleProcess
) -> dict[str, tuple[Path, int]]:
    """Ask a role and its helpers for their stacks; return who gets to write what from where on.

    A role that runs elsewhere is asked by the one that started it there, and answers in its log.
    """
    if told is None:
        if not isinstance(process, RemoteRole):
            return {}
        offset = _size(process.log_path)
        process.ask_stacks()
        return {f"{name}, in its log": (process.log_path, offset)}
    if isinstance(process, ChildProcess):
        is_it = process.pid == told.pid
    else:  # what a process id of another node is here is anybody's guess
        is_it = "run.py" in " ".join(_command_of(told.pid))
    if not is_it:
        return {}
    path = folder / f"{name}.stacks"
    asked = {name: (path, _size(path))}
    ask(told.pid)
    for helper, pid in helpers_of(folder, name).items():
        offset = _size(helper)
        if told.pid in _ancestors(pid) and ask(pid):
            asked[f"{name}, its process {pid} {' '.join(_command_of(pid))[:60]}"] = (helper, offset)
    return asked


@runtime_checkable
class RemoteRole(Protocol):
    """A role whose starter can be told to ask it."""

    @property
    def log_path(self) -> Path:
        """What it says arrives here."""
        ...

    def ask_stacks(self) -> None:
        """Have it write its stacks to its log."""
        ...


def stacks_since(path: Path, offset: int) -> str:
    """Return what was written to a file behind `offset`, "" if nothing."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""


def cut_stacks(path: Path) -> None:
    """Empty a file of stacks that has grown long; its writers append."""
    if path.suffix == STACKS_SUFFIX and _size(path) > MAX_STACKS_BYTES:
        with contextlib.suppress(OSError):
            os.truncate(path, 0)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _command_of(pid: int) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).cmdline()
    return []


def _ancestors(pid: int) -> list[int]:
    with contextlib.suppress(psutil.Error):
        return [each.pid for each in psutil.Process(pid).parents()]
    return []

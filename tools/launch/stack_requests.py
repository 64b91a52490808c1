"""Requests the stacks of all processes of a role, local or remote, and reads the answers."""

import contextlib
import os
from pathlib import Path
from typing import Protocol, runtime_checkable

import psutil

from common.host.child_process import ChildProcess
from common.stall.report import RoleActivity
from common.stall.stacks import MAX_STACKS_BYTES, ask, helpers_of
from tools.launch.base import RoleProcess

MAX_BYTES = 60_000  # Maximum bytes of one process's stacks in a report.
STACKS_SUFFIX = ".stacks"


def request_role_stacks(
    folder: Path, name: str, activity: RoleActivity | None, process: RoleProcess
) -> dict[str, tuple[Path, int]]:
    """Request stacks from a role and its helpers; return each one's file and start offset.

    A remote role gets the request through its starter, and its stacks appear in its log.
    """
    if activity is None:
        if not isinstance(process, RemoteRole):
            return {}
        offset = _size(process.log_path)
        process.request_stacks()
        return {f"{name}, in its log": (process.log_path, offset)}
    if isinstance(process, ChildProcess):
        is_it = process.pid == activity.pid
    else:  # A process id of another node may belong to any process here.
        is_it = "run.py" in " ".join(_command_of(activity.pid))
    if not is_it:
        return {}
    path = folder / f"{name}.stacks"
    asked = {name: (path, _size(path))}
    ask(activity.pid)
    for helper, pid in helpers_of(folder, name).items():
        offset = _size(helper)
        if activity.pid in _ancestors(pid) and ask(pid):
            asked[f"{name}, process {pid} {' '.join(_command_of(pid))[:60]}"] = (helper, offset)
    return asked


@runtime_checkable
class RemoteRole(Protocol):
    """A role whose starter can forward a request for stacks."""

    @property
    def log_path(self) -> Path:
        """File that receives the role's output."""
        ...

    def request_stacks(self) -> None:
        """Make the role write its stacks to its log."""
        ...


def stacks_since(path: Path, offset: int) -> str:
    """Return the text of a file from `offset` on; "" if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""


def cut_stacks(path: Path) -> None:
    """Empty a file of stacks above the size limit. Its writers append."""
    if path.suffix == STACKS_SUFFIX and _size(path) > MAX_STACKS_BYTES:
        with contextlib.suppress(OSError):
            os.truncate(path, 0)


def _size(path: Path) -> int:
    """Return the size of a file in bytes; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _command_of(pid: int) -> list[str]:
    """Return the command line of a process; [] if it has ended."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).cmdline()
    return []


def _ancestors(pid: int) -> list[int]:
    """Return the ids of a process's parent, its parent, and so on."""
    with contextlib.suppress(psutil.Error):
        return [each.pid for each in psutil.Process(pid).parents()]
    return []

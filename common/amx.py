"""Permission to use AMX tiles. Linux grants it to a process on request.

Without the permission, the first tile instruction of an AMX kernel ends the process with SIGILL. A
forked process inherits the permission; `exec` drops it.
"""

import ctypes
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

SYS_ARCH_PRCTL = 158  # x86-64 only.
ARCH_REQ_XCOMP_PERM = 0x1023
XFEATURE_XTILEDATA = 18
CPUINFO = Path("/proc/cpuinfo")


class TilePermission(StrEnum):
    """Outcome of the permission request."""

    NOT_NEEDED = "not_needed"  # The CPU has no AMX tiles.
    GRANTED = "granted"
    REFUSED = "refused"  # The kernel is too old, or its configuration forbids tiles.


def cpu_flags(cpuinfo: Path = CPUINFO) -> set[str]:
    """Return the CPU features that the kernel lists; an empty set without /proc."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # The system is not Linux.
        return set()
    listed = (line for line in lines if line.startswith(("flags", "Features")))  # x86, ARM.
    return set(next(listed, "").partition(":")[2].split())


def _arch_prctl(code: int, argument: int) -> int:
    """Return 0, or -1 if the kernel refuses the request."""
    return ctypes.CDLL(None).syscall(SYS_ARCH_PRCTL, code, argument)


def request_tiles(
    cpuinfo: Path = CPUINFO, arch_prctl: Callable[[int, int], int] = _arch_prctl
) -> TilePermission:
    """Request AMX tiles for this process, all its threads and its forks."""
    if "amx_tile" not in cpu_flags(cpuinfo):
        return TilePermission.NOT_NEEDED
    is_granted = arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0
    return TilePermission.GRANTED if is_granted else TilePermission.REFUSED

"""Permission to use AMX tiles, which Linux grants to a process that asks.

Without it the first tile instruction of an AMX kernel ends the process with SIGILL. A fork inherits
the permission, an exec loses it.
"""

import ctypes
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

SYS_ARCH_PRCTL = 158  # x86-64
ARCH_REQ_XCOMP_PERM = 0x1023
XFEATURE_XTILEDATA = 18
CPUINFO = Path("/proc/cpuinfo")


class TilePermission(StrEnum):
    """What became of the request."""

    NOT_NEEDED = "not_needed"  # this CPU has no tiles
    GRANTED = "granted"
    REFUSED = "refused"  # by the kernel: too old, or its configuration forbids it


def cpu_flags(cpuinfo: Path = CPUINFO) -> set[str]:
    """Return the features of this CPU that the kernel lists; none on a system without /proc."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # no Linux
        return set()
    listed = (line for line in lines if line.startswith(("flags", "Features")))  # x86, ARM
    return set(next(listed, "").partition(":")[2].split())


def _arch_prctl(code: int, argument: int) -> int:
    """Return 0, or -1 if the kernel refuses."""
    return ctypes.CDLL(None).syscall(SYS_ARCH_PRCTL, code, argument)


def request_tiles(
    cpuinfo: Path = CPUINFO, arch_prctl: Callable[[int, int], int] = _arch_prctl
) -> TilePermission:
    """Ask the kernel to let this process, all its threads and its forks use AMX tiles."""
    if "amx_tile" not in cpu_flags(cpuinfo):
        return TilePermission.NOT_NEEDED
    is_granted = arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0
    return TilePermission.GRANTED if is_granted else TilePermission.REFUSED

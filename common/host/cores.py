"""How many processor cores this process may use."""

import os
from pathlib import Path

from common.host.cgroups import PROC, cpu_quotas


def cores_here(proc: Path = PROC) -> float:
    """Return the cores that this process may use: by its affinity, and by its container's quota."""
    num = float(len(os.sched_getaffinity(0)))
    return min((num, *(quota for _, quota in cpu_quotas(proc))))


def num_cores(proc: Path = PROC) -> int:
    """Return the whole cores that this process may use, one at least: the threads that fit."""
    return max(1, int(cores_here(proc)))

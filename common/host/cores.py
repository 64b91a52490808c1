"""The number of processor cores that this process may use."""

import os
from pathlib import Path

from common.host.cgroups import PROC, cpu_quotas


def cores_here(proc: Path = PROC) -> float:
    """Return the usable cores: the smaller of the CPU affinity and the container's quota."""
    num = float(len(os.sched_getaffinity(0)))
    return min((num, *(quota for _, quota in cpu_quotas(proc))))


def num_cores(proc: Path = PROC) -> int:
    """Return the usable whole cores, at least 1. It is the number of threads to start."""
    return max(1, int(cores_here(proc)))

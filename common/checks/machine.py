"""What this machine has: GPUs, memory, the CPU's matrix units, a C++ compiler."""

import os
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

from common.amx import cpu_flags
from common.checks.gpu_list import Gpu, shown_gpus
from common.errors import ConfigError
from common.host.cgroups import PROC, memory_limit

GIB = 1 << 30
COMPILER_PACKAGES = "g++ and Python's headers (Debian, Ubuntu: apt-get install g++ python3-dev)"
_TIMEOUT_S = 20.0
MEMINFO = Path("/proc/meminfo")
_UNITS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")  # the last two: ARM
_BF16_UNITS = ("avx512_bf16", "amx_bf16", "bf16")


@cache
def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that answer on this machine and that CUDA_VISIBLE_DEVICES, if set, shows.

    Raises: ConfigError: CUDA_VISIBLE_DEVICES has numbers whose meaning is not known.
    """
    if shutil.which("nvidia-smi") is None:
        return ()
    lines = _smi("--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits")
    if not lines:
        return ()
    order = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return shown_gpus([*lines, *_smi("-L")], os.environ.get("CUDA_VISIBLE_DEVICES"), order)


def _smi(*words: str) -> list[str]:
    """Return the lines that nvidia-smi prints; none if it fails or does not answer in time."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *words],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def has_cuda() -> bool:
    """Return whether an NVIDIA GPU answers on this machine."""
    return bool(gpus())


def memory_bytes(proc: Path = PROC, meminfo: Path = MEMINFO) -> tuple[int, int]:
    """Return the bytes of memory in all and those available now; zeros if neither is known.

    A container's limit counts if it is smaller than the machine's memory.

    Args:
        proc: the folder of this process; tests give another one.
        meminfo: the file with the machine's memory.
    """
    if not meminfo.exists():
        return memory_limit(proc) or (0, 0)
    lines = meminfo.read_text(encoding="utf-8").splitlines()
    values = dict(line.split(":", 1) for line in lines)
    total, available = (int(values[key].split()[0]) << 10 for key in ("MemTotal", "MemAvailable"))
    if (limit := memory_limit(proc)) is None:
        return total, available
    return min(total, limit[0]), min(available, limit[1])


def cpu_units() -> list[str]:
    """Return the names of the CPU's vector and matrix units that matter here."""
    flags = cpu_flags()
    return [unit for unit in _UNITS if unit in flags]


def has_bf16_units() -> bool:
    """Return whether the CPU multiplies bf16 numbers itself; elsewhere fp32 is faster."""
    return any(unit in _BF16_UNITS for unit in cpu_units())


@cache
def compiler_problem() -> str:
    """Return why the CPU engine's first sample could not be compiled; "" if it can.

    Torch compiles vLLM's sampling kernels on a CPU with $CXX or g++, against Python's own headers.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler {compiler!r}"
    headers = sysconfig.get_path("include")
    source = "#include <cmath>\n#include <vector>\n#include <Python.h>\n"
    command = [compiler, "-fsyntax-only", "-x", "c++", "-I", headers, "-"]
    try:
        done = subprocess.run(
            command,
            input=source,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # A compiler may report in another encoding.
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler} does not answer: {error}"
    fatal = [line for line in done.stderr.splitlines() if "error" in line]
    return "" if done.returncode == 0 else (fatal or [f"{compiler} fails"])[0].strip()


def check_compiler(what: str) -> None:
    """Return if `what` can be compiled here. Raises: ConfigError: it cannot, and the remedy."""
    if problem := compiler_problem():
        raise ConfigError(f"{what} compiles: {problem}; {COMPILER_PACKAGES}")

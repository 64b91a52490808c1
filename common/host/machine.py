"""Hardware and tools of this machine: GPUs, memory, the CPU's matrix units, a C++ compiler."""

import ctypes
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from pathlib import Path

from common.errors import ConfigError
from common.host.cgroups import PROC, memory_limit
from common.host.gpu_list import Gpu, shown_gpus

GIB = 1 << 30
COMPILER_PACKAGES = "g++ and Python's headers (Debian, Ubuntu: apt-get install g++ python3-dev)"
_TIMEOUT_S = 20.0
_COMPILER_TIMEOUT_S = 60.0  # A busy machine needs ten seconds and more.
MEMINFO = Path("/proc/meminfo")
CPUINFO = Path("/proc/cpuinfo")
_UNITS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")  # The last two are ARM's.
_BF16_UNITS = ("avx512_bf16", "amx_bf16", "bf16")
SYS_ARCH_PRCTL = 158  # x86-64 only.
ARCH_REQ_XCOMP_PERM = 0x1023
XFEATURE_XTILEDATA = 18


class TilePermission(StrEnum):
    """Outcome of the permission request."""

    NOT_NEEDED = "not_needed"  # The CPU has no AMX tiles.
    GRANTED = "granted"
    REFUSED = "refused"  # The kernel is too old, or its configuration forbids tiles.


@cache
def gpus() -> tuple[Gpu, ...]:
    """Return the responding GPUs of this machine that CUDA_VISIBLE_DEVICES does not hide.

    Raises: ConfigError: CUDA_VISIBLE_DEVICES contains ambiguous numbers.
    """
    if shutil.which("nvidia-smi") is None:
        return ()
    lines = _smi("--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits")
    if not lines:
        return ()
    order = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return shown_gpus([*lines, *_smi("-L")], os.environ.get("CUDA_VISIBLE_DEVICES"), order)


def _smi(*words: str) -> list[str]:
    """Return the lines that nvidia-smi prints; none if it fails or times out."""
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
    """Return whether an NVIDIA GPU responds on this machine."""
    return bool(gpus())


def memory_bytes(proc: Path = PROC, meminfo: Path = MEMINFO) -> tuple[int, int]:
    """Return total and available memory in bytes; zeros if neither is known.

    A container's limit is used if it is smaller than the machine's memory.

    Args:
        proc: the folder of this process; replaced in tests.
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


def cpu_flags(cpuinfo: Path = CPUINFO) -> set[str]:
    """Return the CPU features that the kernel lists; an empty set without /proc."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # The system is not Linux.
        return set()
    listed = (line for line in lines if line.startswith(("flags", "Features")))  # x86, ARM.
    return set(next(listed, "").partition(":")[2].split())


def cpu_units() -> list[str]:
    """Return the names of the CPU's vector and matrix units that affect the precision."""
    flags = cpu_flags()
    return [unit for unit in _UNITS if unit in flags]


def has_bf16_units() -> bool:
    """Return whether the CPU multiplies bf16 in hardware; without that, fp32 is faster."""
    return any(unit in _BF16_UNITS for unit in cpu_units())


def _arch_prctl(code: int, argument: int) -> int:
    """Return 0, or -1 if the kernel refuses the request."""
    return ctypes.CDLL(None).syscall(SYS_ARCH_PRCTL, code, argument)


def request_tiles(
    cpuinfo: Path = CPUINFO, arch_prctl: Callable[[int, int], int] = _arch_prctl
) -> TilePermission:
    """Request AMX tiles for this process, all its threads and its forks. `exec` drops them.

    Without the permission, the first tile instruction of an AMX kernel ends the process with
    SIGILL.
    """
    if "amx_tile" not in cpu_flags(cpuinfo):
        return TilePermission.NOT_NEEDED
    is_granted = arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0
    return TilePermission.GRANTED if is_granted else TilePermission.REFUSED


def compiler_problem() -> str:
    """Return why this machine cannot compile the CPU engine's kernels; "" if it can.

    At the first sample on a CPU, torch compiles vLLM's sampling kernels with $CXX or g++ and
    Python's own headers.
    """
    compiler = os.environ.get("CXX", "g++")
    if (program := shutil.which(compiler)) is None:
        return f"the C++ compiler {compiler!r} is not installed"
    return _problem_of(compiler, program)


@cache
def _problem_of(compiler: str, program: str) -> str:
    """Return why the compiler at the path `program` compiles nothing; "" if it does."""
    headers = sysconfig.get_path("include")
    source = "#include <cmath>\n#include <vector>\n#include <Python.h>\n"
    command = [program, "-fsyntax-only", "-x", "c++", "-I", headers, "-"]
    try:
        done = subprocess.run(
            command,
            input=source,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # A compiler may print another encoding.
            timeout=_COMPILER_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler} did not run: {error}"
    fatal = [line for line in done.stderr.splitlines() if "error" in line]
    return "" if done.returncode == 0 else (fatal or [f"{compiler} fails"])[0].strip()


def check_compiler(what: str) -> None:
    """Check that `what` can be compiled. Raises: ConfigError: it cannot; contains the remedy."""
    if problem := compiler_problem():
        raise ConfigError(f"{what} needs a compiler: {problem}. Install {COMPILER_PACKAGES}")

"""What this machine has: GPUs, memory, the CPU's matrix units, a C++ compiler."""

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from common.amx import cpu_flags
from common.errors import ConfigError

GIB = 1 << 30
COMPILER_PACKAGES = "g++ and Python's headers (Debian, Ubuntu: apt-get install g++ python3-dev)"
_TIMEOUT_S = 20.0
_UNITS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")  # the last two: ARM
_BF16_UNITS = ("avx512_bf16", "amx_bf16", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU."""

    name: str
    memory_bytes: int
    uuid: str = ""  # "GPU-...", which CUDA_VISIBLE_DEVICES takes


@cache
def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that answer on this machine and that CUDA_VISIBLE_DEVICES, if set, shows."""
    if shutil.which("nvidia-smi") is None:
        return ()
    query = ["nvidia-smi", "--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return ()
    listed = done.stdout.splitlines() if done.returncode == 0 else []
    return shown_gpus(listed, os.environ.get("CUDA_VISIBLE_DEVICES"))


def shown_gpus(lines: Sequence[str], visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs in lines of "uuid, name, MiB" that CUDA would show, in its order.

    Args:
        visible: positions or beginnings of uuids with commas between; None shows all. Like CUDA,
            nothing after an entry that names no GPU counts.
    """
    gpus: list[Gpu] = []
    for line in lines:
        uuid, _, rest = line.partition(",")
        name, _, mib = (part.strip() for part in rest.rpartition(","))
        size = int(mib) << 20 if mib.isdigit() else 0
        gpus.append(Gpu(name=name, memory_bytes=size, uuid=uuid.strip()))
    if visible is None:
        return tuple(gpus)
    shown: list[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        named = [
            gpu
            for i, gpu in enumerate(gpus)
            if entry == str(i) or (entry.startswith("GPU-") and gpu.uuid.startswith(entry))
        ]
        if len(named) != 1:
            break
        shown += named
    return tuple(shown)


def has_cuda() -> bool:
    """Return whether an NVIDIA GPU answers on this machine."""
    return bool(gpus())


def memory_bytes() -> tuple[int, int]:
    """Return the bytes of memory in all and those available now; zeros where nobody tells."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 0, 0
    values = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    total, available = (int(values[key].split()[0]) << 10 for key in ("MemTotal", "MemAvailable"))
    return total, available


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
            command, input=source, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler} does not answer: {error}"
    fatal = [line for line in done.stderr.splitlines() if "error" in line]
    return "" if done.returncode == 0 else (fatal or [f"{compiler} fails"])[0].strip()


def check_compiler(what: str) -> None:
    """Return if `what` can be compiled here. Raises: ConfigError: it cannot, and the remedy."""
    if problem := compiler_problem():
        raise ConfigError(f"{what} compiles: {problem}; {COMPILER_PACKAGES}")

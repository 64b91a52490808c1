"""Hardware and tools of this machine: GPUs, memory, the CPU's matrix units, a C++ compiler."""

# NVIDIA's bindings have no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

import ctypes
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Thread
from typing import Any

import pynvml

from common.errors import ConfigError
from common.host.cgroups import PROC, memory_limit

GIB = 1 << 30
COMPILER_PACKAGES = "g++ and Python's headers (Debian, Ubuntu: apt-get install g++ python3-dev)"
NUMA = "libnuma.so.1"  # vLLM's kernels for the CPU are linked to it.
NUMA_PACKAGE = "libnuma (Debian, Ubuntu: apt-get install libnuma1)"
FOREIGN_TORCHVISION = (
    "torchvision is of another build than torch, and no run needs it; remove it: python -m pip"
    " uninstall torchvision torchaudio torchcodec (uv: uv pip uninstall, then uv run --no-sync)"
)
_TIMEOUT_S = 20.0
_COMPILER_TIMEOUT_S = 60.0  # A busy machine needs ten seconds and more.
MEMINFO = Path("/proc/meminfo")
CPUINFO = Path("/proc/cpuinfo")
_UNITS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")  # The last two are ARM's.
_OLD_SLICE = re.compile(r"MIG-(GPU-[^/]+)/(\d+)/(\d+)")
_BF16_UNITS = ("avx512_bf16", "amx_bf16", "bf16")
SYS_ARCH_PRCTL = 158  # x86-64 only.
ARCH_REQ_XCOMP_PERM = 0x1023
XFEATURE_XTILEDATA = 18


class TilePermission(StrEnum):
    """Outcome of the permission request."""

    NOT_NEEDED = "not_needed"  # The CPU has no AMX tiles.
    GRANTED = "granted"
    REFUSED = "refused"  # The kernel is too old, or its configuration forbids tiles.


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU, or one slice of it."""

    name: str
    memory_bytes: int  # 0 if unknown.
    uuid: str = ""  # "GPU-..." or "MIG-...", an entry for CUDA_VISIBLE_DEVICES.

    @property
    def is_slice(self) -> bool:
        """Whether it is a part of a GPU. CUDA shows at most one slice to a process."""
        return self.uuid.startswith("MIG-")


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeGpu:
    """A whole GPU and its slices."""

    gpu: Gpu
    slices: Sequence[Gpu] = ()

    @property
    def shown(self) -> Sequence[Gpu]:
        """The usable GPUs: the slices, or the whole GPU if it is not divided."""
        return self.slices or [self.gpu]


@cache
def gpus() -> tuple[Gpu, ...]:
    """Return the responding GPUs of this machine that CUDA_VISIBLE_DEVICES does not hide.

    Raises: ConfigError: CUDA_VISIBLE_DEVICES contains ambiguous numbers.
    """
    order = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return shown_gpus(driver_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"), order)


def driver_gpus(timeout_s: float = _TIMEOUT_S) -> list[WholeGpu]:
    """Return the GPUs of the driver in the order of the bus; [] if it fails or times out."""
    answers: list[list[WholeGpu]] = []
    # A driver may block a call forever. A daemon thread does not delay the end of the process.
    thread = Thread(target=lambda: answers.append(_ask_driver()), daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else []


def _ask_driver() -> list[WholeGpu]:
    try:
        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        wholes = [WholeGpu(gpu=_gpu(handle), slices=_slices(handle)) for handle in handles]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return []
    return wholes


def _slices(whole: Any) -> list[Gpu]:
    """Return the slices of a GPU that this process may use."""
    slices: list[Gpu] = []
    with suppress(pynvml.NVMLError):  # Drivers and GPUs without slices.
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(whole)):
            with suppress(pynvml.NVMLError):  # The number is not in use.
                slices.append(_gpu(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, index)))
    return slices


def _gpu(handle: Any) -> Gpu:
    """Return the GPU or slice of a handle of the driver. Raises: NVMLError."""
    num_bytes = 0
    with suppress(pynvml.NVMLError):  # Not every GPU has a memory of its own.
        num_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
    return Gpu(name=name, memory_bytes=num_bytes, uuid=uuid)


def shown_gpus(
    listed: Sequence[WholeGpu], visible: str | None, order: str = "PCI_BUS_ID"
) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA would show, in its order.

    Args:
        listed: the GPUs in the order of the bus.
        visible: comma-separated numbers, uuid prefixes or slice names; None shows all GPUs. As in
            CUDA, entries after an invalid entry are ignored.
        order: the value of CUDA_DEVICE_ORDER, which defines CUDA's numbers.

    Raises: ConfigError: `visible` contains numbers, and different GPUs are ordered by speed.
    """
    if visible is None:
        return tuple(gpu for whole in listed for gpu in whole.shown)
    entries = [part.strip() for part in visible.split(",")]
    _check_order(listed, entries, order)
    shown: list[Gpu] = []
    for entry in entries:
        named = _named(entry, listed)
        if named is None:
            break
        shown.append(named)
    return tuple(shown)


def _check_order(listed: Sequence[WholeGpu], entries: Sequence[str], order: str) -> None:
    """Check that GPU numbers are unambiguous. Raises: ConfigError."""
    kinds = {whole.gpu.name for whole in listed}
    numbers = [entry for entry in entries if entry.isdigit() and int(entry) < len(listed)]
    if order == "FASTEST_FIRST" and len(kinds) > 1 and numbers:
        raise ConfigError(
            f"CUDA_DEVICE_ORDER=FASTEST_FIRST: the GPUs differ ({', '.join(sorted(kinds))}), so the"
            f" numbers in CUDA_VISIBLE_DEVICES={','.join(entries)} are ambiguous. Unset"
            " CUDA_DEVICE_ORDER to use the numbers of nvidia-smi, or give the uuids of the GPUs"
        )


def _named(entry: str, listed: Sequence[WholeGpu]) -> Gpu | None:
    """Return the GPU of one entry of CUDA_VISIBLE_DEVICES; None for an invalid entry."""
    if entry.isdigit():
        number = int(entry)
        return listed[number].shown[0] if number < len(listed) else None
    if entry.startswith("MIG-"):
        return _named_slice(entry, listed)
    if not entry.startswith("GPU-"):
        return None
    matching = [whole.shown[0] for whole in listed if whole.gpu.uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _named_slice(entry: str, listed: Sequence[WholeGpu]) -> Gpu | None:
    """Return the slice with a name. Its size is 0 if the driver does not list the slice."""
    slices = [gpu for whole in listed for gpu in whole.slices]
    matching = [gpu for gpu in slices if gpu.uuid.startswith(entry)]
    if matching:
        return matching[0] if len(matching) == 1 else None
    old = _OLD_SLICE.fullmatch(entry)
    if old is None:  # A container may list one slice without the others.
        return None if slices else Gpu(name="slice of a GPU", memory_bytes=0, uuid=entry)
    wholes = [whole for whole in listed if whole.gpu.uuid.startswith(old[1])]
    if len(wholes) != 1:
        return None
    sizes = {gpu.memory_bytes for gpu in wholes[0].slices}
    size = sizes.pop() if len(sizes) == 1 else 0
    return Gpu(name=f"slice of {wholes[0].gpu.name}", memory_bytes=size, uuid=entry)


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


def library_problem(name: str = NUMA) -> str:
    """Return why this machine cannot load a shared library; "" if it can."""
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return str(error)
    return ""


def torchvision_problem() -> str:
    """Return why the installed torchvision does not fit torch's build for CPUs; "" if it does.

    transformers imports torchvision, which fails without the operators of its own build.
    """
    torch = version("torch")
    try:
        torchvision = version("torchvision")
    except PackageNotFoundError:
        return ""
    if not torch.endswith("+cpu") or torchvision.endswith("+cpu"):
        return ""
    return f"torch {torch} with torchvision {torchvision}"


def check_compiler(what: str) -> None:
    """Check that `what` can be compiled. Raises: ConfigError: it cannot; contains the remedy."""
    if problem := compiler_problem():
        raise ConfigError(f"{what} needs a compiler: {problem}. Install {COMPILER_PACKAGES}")

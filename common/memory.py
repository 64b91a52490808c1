"""Resident memory of processes, and the return of freed heap memory to the system."""

import ctypes
import logging
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

# Whether the kernel lists the children of a thread: Linux does, if configured so.
_LISTS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()
EXACT_PINNED = "pinned_max_round_threshold_mb:1"


def trim_heap() -> bool:
    """Return freed heap pages to the system; False if the C library has no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(0)
    return True


def take_pinned_memory_exactly() -> None:
    """Let torch allocate pinned memory of more than 1 MB in the exact requested size.

    By default torch rounds sizes up to powers of two. Checkpoint copies and offloaded tensors would
    then take up to twice the planned memory. A user's own setting is kept. Child processes inherit
    the setting. A torch without it keeps its default: torch 2.11 would fail at its first use of
    CUDA.
    """
    if {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        return
    if _allocator_accepts(EXACT_PINNED):
        os.environ["PYTORCH_ALLOC_CONF"] = EXACT_PINNED


def _allocator_accepts(setting: str) -> bool:
    """Apply a setting to torch's allocator; return False if this torch does not have it."""
    import torch

    apply: Callable[[str], object] | None = getattr(
        torch._C,  # pyright: ignore[reportPrivateUsage]
        "_accelerator_setAllocatorSettings",
        None,
    )
    if apply is None:
        return False
    try:
        apply(setting)
    except (RuntimeError, ValueError) as error:
        logger.warning(
            "pinned memory may take up to twice its size: torch %s refuses %s: %s",
            torch.__version__,
            setting,
            error,
        )
        apply("")
        return False
    return True


def resident_bytes(roots: Iterable[int]) -> dict[int, int]:
    """Return the resident memory of each process and its descendants, by process id."""
    sizes: dict[int, int] = {}
    for root in roots:
        try:
            first = psutil.Process(root)
            sizes[root] = first.memory_info().rss
        except psutil.NoSuchProcess:
            continue
        for process in descendants(first):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                sizes[root] += process.memory_info().rss
    return sizes


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """Return the children of a process, their children, and so on.

    On Linux each process lists its children. psutil would read every process of the system, which
    costs a busy role 20 ms each time.
    """
    if not _LISTS_CHILDREN:
        return process.children(recursive=True)
    processes: list[psutil.Process] = []
    waiting = _children(process.pid)
    while waiting:
        pid = waiting.pop()
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
        waiting += _children(pid)
    return processes


def _children(pid: int) -> list[int]:
    """Return the ids of a process's children; [] if it has just ended."""
    process_ids: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(FileNotFoundError, ProcessLookupError):
                text = Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="utf-8")
                process_ids += map(int, text.split())
    return process_ids


def family_bytes() -> int:
    """Return the memory of this process and its descendants in bytes.

    The proportional set size is used if the system reports it: a page that three processes share
    counts a third in each. The fallback is the resident size, which counts such a page three times.
    """
    process = psutil.Process()
    return sum(_size_bytes(each) for each in (process, *descendants(process)))


def _size_bytes(process: psutil.Process) -> int:
    """Return the size of one process in bytes; 0 if it has just ended."""
    try:
        full = process.memory_full_info()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
    return int(getattr(full, "pss", 0) or full.rss)


def use_system_allocator() -> None:
    """Start this program again with the C library's allocator for Python's objects.

    Python's own allocator returns memory only in whole megabytes that hold no live object. After
    10,000 sessions, resident memory has grown by 27 % with it, and by 2 % with the C library's.
    The function returns if that allocator is in use already. Process id and arguments are kept.
    """
    if "PYTHONMALLOC" not in os.environ:
        environ = os.environ | {"PYTHONMALLOC": "malloc"}
        os.execve(sys.executable, [sys.executable, *sys.argv], environ)

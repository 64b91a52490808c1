"""A machine within the machine: network and disk that only one run and what is asked here see.

Needs the rights of an administrator; without them a run shares the real network and disk, and the
faults of those are left out.
"""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

NEW_MOUNTS, NEW_NETWORK = 0x00020000, 0x40000000  # CLONE_NEWNS, CLONE_NEWNET of Linux
DISK_BYTES = 17 << 27  # a run wants two gigabytes to start with
SLOW = ("rate", "16mbit", "burst", "16k", "limit", "32k")  # what does not fit the queue is dropped
FILL_BYTES = 1 << 20


def isolate(folder: Path) -> str:
    """Give this thread and what it starts a network and, below `folder`, a disk of their own.

    Returns: "" or why not; this process stays as it was then, or has both for the rest of its life.
    """
    if missing := [tool for tool in ("ip", "tc", "mount") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not installed"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_MOUNTS | NEW_NETWORK) != 0:
        return f"no namespaces: {os.strerror(ctypes.get_errno())}"
    for command in (
        ("mount", "--make-rprivate", "/"),
        ("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "none", str(folder)),
        ("ip", "link", "set", "lo", "up"),
    ):
        subprocess.run(command, check=True, capture_output=True, timeout=10)
    return ""


def release(folder: Path) -> None:
    """Give the disk back, with what is on it."""
    subprocess.run(("umount", "--lazy", str(folder)), check=True, capture_output=True, timeout=10)


def slow_network() -> bool:
    """Let few bytes through and drop what does not fit a short queue; False if not possible."""
    command = ("tc", "qdisc", "replace", "dev", "lo", "root", "tbf", *SLOW)
    return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0


def heal_network() -> None:
    """Undo `slow_network`."""
    subprocess.run(
        ("tc", "qdisc", "del", "dev", "lo", "root"), check=True, capture_output=True, timeout=10
    )


def fill_disk(path: Path) -> None:
    """Write a file until its disk is full; remove it to have the room again."""
    chunk = bytes(FILL_BYTES)
    with path.open("ab", buffering=0) as handle:
        try:
            while handle.write(chunk):
                pass
        except OSError:  # full: what was wanted
            return

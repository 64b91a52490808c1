"""A separate network and disk for one run, so that their faults do not affect other programs.

This needs the rights of an administrator. Without them a run uses the real network and disk, and
their faults are left out.
"""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

# The flags CLONE_NEWNS and CLONE_NEWNET of Linux.
NEW_MOUNTS = 0x00020000
NEW_NETWORK = 0x40000000
DISK_BYTES = 17 << 27  # A run needs two gigabytes to start.
SLOW = ("rate", "16mbit", "burst", "16k", "limit", "32k")  # Packets beyond the queue are dropped.
FILL_BYTES = 1 << 20
DROPPED_FRAC = 0.05  # Fraction of all packets, in either direction.
# Opcodes of classic BPF.
_LOAD = 0x20
_AT_LEAST = 0x35
_RETURN = 0x06
_RANDOM = 0xFFFFF038  # Address of the word with a random number (SKF_AD_RANDOM).
# The values TC_ACT_OK and TC_ACT_SHOT.
_PASS = 0
_DROP = 2


def isolate(folder: Path) -> str:
    """Give this thread and its children their own network and, below `folder`, their own disk.

    Returns: "" on success, for the rest of the process's life. Otherwise the reason; then nothing
        has changed.
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
    """Release the disk and its content."""
    subprocess.run(("umount", "--lazy", str(folder)), check=True, capture_output=True, timeout=10)


def slow_network() -> bool:
    """Limit the bandwidth and drop packets beyond a short queue; return False if not possible."""
    command = ("tc", "qdisc", "replace", "dev", "lo", "root", "tbf", *SLOW)
    return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0


def drop_packets() -> bool:
    """Drop random packets; return False if not possible."""
    program = (
        (_LOAD, 0, 0, _RANDOM),
        (_AT_LEAST, 1, 0, round(DROPPED_FRAC * 2**32)),
        (_RETURN, 0, 0, _DROP),
        (_RETURN, 0, 0, _PASS),
    )
    code = ",".join((str(len(program)), *(" ".join(map(str, each)) for each in program)))
    arrival = ("tc", "filter", "add", "dev", "lo", "ingress")
    commands = (
        ("tc", "qdisc", "replace", "dev", "lo", "clsact"),
        (*arrival, "bpf", "direct-action", "bytecode", code),
    )
    tried = (subprocess.run(each, capture_output=True, timeout=10) for each in commands)
    return all(each.returncode == 0 for each in tried)


def heal_network() -> None:
    """Undo `slow_network` and `drop_packets`."""
    for which in ("root", "clsact"):
        command = ("tc", "qdisc", "del", "dev", "lo", which)
        # One of the two does not exist.
        subprocess.run(command, check=False, capture_output=True, timeout=10)


def fill_disk(path: Path) -> None:
    """Write a file until its disk is full. Deleting it frees the room again."""
    chunk = bytes(FILL_BYTES)
    with path.open("ab", buffering=0) as handle:
        try:
            while handle.write(chunk):
                pass
        except OSError:  # The disk is full, as intended.
            return

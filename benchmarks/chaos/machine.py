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
DROPPED_FRAC = 0.05  # of all packets, in either direction
_LOAD, _AT_LEAST, _RETURN = 0x20, 0x35, 0x06  # of classic BPF
_RANDOM = 0xFFFFF038  # address of the word that is a random number (SKF_AD_RANDOM)
_PASS, _DROP = 0, 2  # TC_ACT_OK, TC_ACT_SHOT


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


def drop_packets() -> bool:
    """Let some packets vanish on their way, by chance; False if not possible."""
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
        subprocess.run(command, check=False, capture_output=True, timeout=10)  # one is not there


def fill_disk(path: Path) -> None:
    """Write a file until its disk is full; remove it to have the room again."""
    chunk = bytes(FILL_BYTES)
    with path.open("ab", buffering=0) as handle:
        try:
            while handle.write(chunk):
                pass
        except OSError:  # full: what was wanted
            return

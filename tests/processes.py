"""The state of a process that a test watches."""

import psutil


def is_gone(pid: int) -> bool:
    """True for an ended process, also one that its parent has not reaped yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

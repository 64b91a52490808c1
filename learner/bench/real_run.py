"""A training run as a user starts it, for measurements that need the whole machine."""

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from common.errors import LongstrideError
from common.launch.process import ChildProcess, describe_exit, wait_until_ended
from common.repository import ROOT

logger = logging.getLogger(__name__)

STOP_S = 60.0  # for a run that takes too long to save and leave
TAIL_LINES = 5


def train(name: str, overrides: Sequence[str], *, folder: Path, timeout_s: float) -> None:
    """Run `train` on quickstart below `folder`, in a process of its own, until it has ended.

    Raises: LongstrideError: it failed, or was not in time; holds its last words, names its log.
    """
    log = folder / f"{name}.log"
    logger.info("run name=%s log=%s", name, log)
    own = (f"run.dir={folder}", f"run.name={name}")
    argv = [sys.executable, "run.py", "train", "--config", "quickstart", *own, *overrides]
    child = ChildProcess(name, argv, log_path=log, cwd=ROOT)
    try:
        deadline = time.monotonic() + timeout_s
        if not wait_until_ended([child], deadline=deadline):
            raise LongstrideError(f"run {name} has not ended within {timeout_s:g}s, see {log}")
        if code := child.poll():
            last = " / ".join(child.log_tail(max_lines=TAIL_LINES))
            raise LongstrideError(f"run {name} ended with {describe_exit(code)}, see {log}: {last}")
    finally:
        child.stop(timeout_s=STOP_S)

"""A training run started as by a user, for measurements that need the whole machine."""

import logging
import re
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from common.errors import LongstrideError
from common.launch.guardian import Guardian
from common.launch.process import ChildProcess, describe_exit, wait_until_ended
from common.repository import ROOT

logger = logging.getLogger(__name__)

STOP_S = 60.0  # Limit for a run to save and stop.
TAIL_LINES = 5
TRAINING_ALONE = (
    "eval.before=false",
    "eval.after=false",
    "eval.baselines=false",
    "log.live=false",
    "log.wandb=disabled",
)
_ROLE = re.compile(r"run\.py (\w+)|EngineCore")


def train(
    name: str,
    overrides: Sequence[str],
    *,
    folder: Path,
    timeout_s: float,
    config: str = "quickstart",
) -> None:
    """Run `train` below `folder` in a separate process until it has ended.

    Raises: LongstrideError: it failed, or was not in time; holds the end of its log, names the log.
    """
    with running(name, overrides, folder=folder, config=config) as child:
        if not wait_until_ended([child], deadline=time.monotonic() + timeout_s):
            raise LongstrideError(
                f"run {name} has not ended within {timeout_s:g}s, see {child.log_path}"
            )
        check_end(child)


@contextmanager
def running(
    name: str,
    overrides: Sequence[str],
    *,
    folder: Path,
    config: str = "quickstart",
    env: Mapping[str, str] | None = None,
    guardian: Guardian | None = None,
) -> Generator[ChildProcess]:
    """Start `train` below `folder`; stop it at the end of the block if it still runs.

    Args:
        env: variables in addition to this process's own.
        guardian: ends the run if this process is killed.
    """
    log = folder / f"{name}.log"
    logger.info("run name=%s log=%s", name, log)
    own = (f"run.dir={folder}", f"run.name={name}")
    argv = [sys.executable, "run.py", "train", "--config", config, *own, *overrides]
    child = ChildProcess(name, argv, log_path=log, cwd=ROOT, env=env, guardian=guardian)
    try:
        yield child
    finally:
        child.stop(timeout_s=STOP_S)


def check_end(child: ChildProcess) -> None:
    """Raise LongstrideError, with its last log lines, if a run has ended with an error."""
    if code := child.poll():
        last = " / ".join(child.log_tail(max_lines=TAIL_LINES))
        ended = f"run {child.name} ended with {describe_exit(code)}"
        raise LongstrideError(f"{ended}, see {child.log_path}: {last}")


def cpu_seconds(pid: int) -> dict[str, float]:
    """Return the processor seconds of each role below a process; engines are separate roles.

    Processes without a role in their command line, such as the workers of a hub, are left out.
    """
    used: dict[str, float] = {}
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if named := _ROLE.search(" ".join(process.cmdline())):
                role = named[1] or "engine"
                used[role] = used.get(role, 0.0) + sum(process.cpu_times()[:2])
    return used

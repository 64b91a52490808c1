"""Supervision of a training run's roles, with a display and samples of memory and CPU."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from common.config.run_config import RunConfig
from common.cpu import CpuWatch
from common.log import kept_in, rotate_logs
from common.memory import family_bytes, resident_bytes
from common.store.disk import if_room
from common.store.run_dir import RunDir, write_json
from learner.journal.metrics import tail_metrics
from tools.dashboard.terminal import TerminalObserver
from tools.launch.base import Ending, LaunchState, RoleSpec, RoleStarter
from tools.launch.launcher import RoleSupervisor
from tools.launch.stall_watch import StallWatch

MIN_STOP_S = 10.0
STOP_MARGIN_S = 5.0
STOP_FACTOR = 3.0  # Multiple of the measured time, since disks and cores are busy at a stop.
UNMEASURED_S = 10.0  # Assumed seconds of a step or a checkpoint without a measurement.
RECENT_STEPS = 100
ALIVE_EVERY_S = 5.0
LOGS_S = 30.0  # Seconds between two checks of the log sizes.
SAMPLE_S = 5.0  # Seconds between two samples of the memory.
GROWTH = 1.01  # The memory is measured exactly when its resident size has grown by this factor.


def supervise(
    cfg: RunConfig,
    run_dir: RunDir,
    specs: Sequence[RoleSpec],
    starter: RoleStarter,
    *,
    observer: TerminalObserver,
) -> tuple[Ending, int]:
    """Run until the end; return the ending and the peak memory of all roles in bytes.

    During the run, launch.json holds the launcher's state for displays and `status`.
    """
    memory = MemoryWatch(elsewhere=starter.memory_bytes)
    cpu = CpuWatch(run_dir)
    written: LaunchState | None = None
    logs_at = 0.0  # Time of the next check of the logs.

    def on_poll(state: LaunchState) -> None:
        """Shorten long logs, write launch.json, and refresh the displays."""
        nonlocal written, logs_at
        if time.monotonic() >= logs_at:
            logs_at = time.monotonic() + LOGS_S
            max_bytes = cfg.log.max_mb * 10**6
            if_room(lambda: rotate_logs(run_dir.logs, max_bytes=max_bytes), run_dir.logs)
        state = observer.annotate(state)
        if state != written and if_room(
            lambda: write_json(run_dir.launch, asdict(state)), run_dir.launch
        ):
            written = state
        touch_alive_file(run_dir.launch)
        observer.refresh()
        memory.sample()
        cpu.sample()

    wanted_s = cfg.run.stop_timeout_s
    stop_s = partial(stop_timeout_s, run_dir, wanted_s=wanted_s)
    watch = StallWatch(
        run_dir, cfg.run, turn_s=cfg.actor.turn_timeout_s, episode_s=cfg.actor.episode_timeout_s
    )
    launcher = RoleSupervisor(starter, stop_timeout_s=stop_s, watch=watch)
    observer.start()
    try:
        # This log keeps the reasons of restarts for displays, also after the end of the run.
        with (
            kept_in(run_dir.logs / "launcher.log", "tools.launch", "common.stall"),
            observer.page(),
        ):
            ending = launcher.run(specs, on_poll=on_poll)
    finally:
        observer.stop()
        run_dir.launch.unlink(missing_ok=True)
    return ending, memory.peak_bytes


def touch_alive_file(path: Path) -> None:
    """Update a file's time. `status --probe live` detects a hanging launcher by an old time."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > ALIVE_EVERY_S:
            os.utime(path)


def stop_timeout_s(run_dir: RunDir, *, wanted_s: float) -> float:
    """Return the seconds after which a stopping learner is killed.

    This is `wanted_s` if it is not 0. Otherwise it is derived from the durations of recent steps
    and checkpoints (metrics.jsonl).
    """
    if wanted_s > 0:
        return wanted_s
    lines = tail_metrics(run_dir.metrics, num_steps=RECENT_STEPS)
    needed_s = 0.0
    for name in ("train/step_s", "train/checkpoint_s"):
        measured = [value for line in lines if isinstance(value := line.get(name), int | float)]
        needed_s += max(measured, default=UNMEASURED_S)
    return max(MIN_STOP_S, STOP_FACTOR * needed_s + STOP_MARGIN_S)


class MemoryWatch:
    """Samples the memory of this process and its descendants. Frequent `sample` calls are cheap.

    For an exact size the kernel visits each page of a process, and delays its page faults. So the
    exact size is measured only while the resident size grows, which costs nothing to read.
    """

    def __init__(self, *, elsewhere: Callable[[], int] = lambda: 0) -> None:
        """Take no sample yet; `elsewhere` returns the bytes of roles that are not descendants."""
        self._elsewhere = elsewhere
        self._next = 0.0
        self._highest = 0  # Resident bytes at the last measurement.
        self._family_bytes = 0
        self.peak_bytes = 0

    def sample(self) -> None:
        """Take a sample if the last one is old enough."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + SAMPLE_S
        resident = sum(resident_bytes([os.getpid()]).values())
        if resident > self._highest * GROWTH:
            self._highest = resident
            self._family_bytes = family_bytes()
        self.peak_bytes = max(self.peak_bytes, self._family_bytes + self._elsewhere())

"""Starts all roles of a training run, and supervises them until its end."""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from common.config.live import with_changes
from common.config.run_config import Launcher, RunConfig
from common.cpu import CpuWatch
from common.host.lock import hold_run
from common.host.machine import gpus
from common.log import kept_in, rotate_logs
from common.memory import family_bytes, resident_bytes
from common.store.disk import if_room
from common.store.run_dir import RunDir, write_json
from common.store.run_start import dated, keep_tokenizer, prepare, save_config
from common.wire.addresses import is_loopback
from common.wire.security import create_keys
from learner.journal.metrics import tail_metrics
from tools.checks.preflight import check_devices
from tools.checks.served_engines import served_engines
from tools.dashboard.terminal import TerminalObserver
from tools.launch.base import Ending, LaunchState, RoleSpec, RoleStarter
from tools.launch.launcher import RoleSupervisor
from tools.launch.local import start_here
from tools.launch.roles import make_role_specs
from tools.launch.served import make_engine_specs, with_engines
from tools.launch.stall_watch import StallWatch

logger = logging.getLogger(__name__)


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


def train(cfg: RunConfig, run_dir: RunDir) -> int:
    """Start all roles and wait for the end of the run; return the exit code."""
    observer = TerminalObserver(cfg, run_dir)
    is_here = cfg.launcher is Launcher.LOCAL
    assignment = check_devices(cfg) if is_here else None
    devices = gpus() if is_here else ()
    served = served_engines(cfg, assignment=assignment, num_gpus=len(devices))
    engines = make_engine_specs(cfg, run_dir, served, devices=devices)
    started = time.monotonic()
    with hold_run(run_dir.root, name=cfg.run.name), _start_roles(cfg, run_dir) as starter:
        cfg = reachable_at(cfg, starter.host)
        prepare(cfg, run_dir)
        cfg = with_changes(cfg, run_dir, now_s=time.time())
        cfg = dated(cfg, run_dir, is_kept=True)
        for role in ("envhub", "scheduler", *(each.name for each in engines)):
            run_dir.forget_address(role)
        create_keys(run_dir.keys)
        save_config(cfg, run_dir.config)
        keep_tokenizer(cfg, run_dir)
        _link_latest(run_dir)
        specs = make_role_specs(
            cfg.run,
            run_dir,
            num_actors=cfg.actor.num_processes,
            has_hub=cfg.envhub.is_started and not cfg.envhub.url,
            num_rank_nodes=0 if is_here else cfg.learner.num_nodes - 1,
            assignment=assignment,
            devices=devices,
        )
        specs = with_engines(specs, engines, run_dir)
        ending, peak_bytes = supervise(cfg, run_dir, specs, starter, observer=observer)
    if 0 < ending.exit_code <= 128:  # No signal ended the run.
        print(f"error: {ending.reason}", file=sys.stderr)
    wall_s = time.monotonic() - started
    observer.conclude(ending, wall_s=wall_s, peak_memory_bytes=peak_bytes)
    return ending.exit_code


def _start_roles(cfg: RunConfig, run_dir: RunDir) -> AbstractContextManager[RoleStarter]:
    """Return the launcher of a run; it starts roles inside the context."""
    if cfg.launcher is Launcher.RAY:
        from tools.launch.ray.cluster import start_on_ray  # Ray takes a second to import.

        return start_on_ray(cfg, run_dir)
    return start_here(run_dir)


def reachable_at(cfg: RunConfig, host: str) -> RunConfig:
    """Return a config whose roles listen at `host`, except for explicitly set addresses."""
    if is_loopback(host):
        return cfg
    sections = {
        name: replace(section, host=host)
        for name in ("scheduler", "learner", "envhub")
        if is_loopback((section := getattr(cfg, name)).host)
    }
    return replace(cfg, **sections)


def _link_latest(run_dir: RunDir) -> None:
    """Make `latest` beside the run a link to it."""
    latest = run_dir.root.parent / "latest"
    if latest.is_symlink() or not latest.exists():
        latest.unlink(missing_ok=True)
        latest.symlink_to(run_dir.root.name)

"""Starts all roles of a training run, and supervises them until its end."""

import sys
import time
from contextlib import AbstractContextManager
from dataclasses import replace

from common.config.live import with_changes
from common.config.run_config import Launcher, RunConfig
from common.host.lock import hold_run
from common.host.machine import gpus
from common.store.run_dir import RunDir
from common.store.run_start import dated, keep_tokenizer, prepare, save_config
from common.wire.addresses import is_loopback
from common.wire.security import create_keys
from tools.checks.preflight import check_devices
from tools.checks.served_engines import served_engines
from tools.dashboard.terminal import TerminalObserver
from tools.launch.base import RoleStarter
from tools.launch.local import start_here
from tools.launch.roles import make_role_specs
from tools.launch.served import make_engine_specs, with_engines
from tools.launch.supervise import supervise


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

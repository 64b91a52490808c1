"""Runs the roles of a training run under a launcher, with a display and a watch on memory."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from common.config.run_config import RunConfig
from common.dashboard.live import LiveDisplay
from common.dashboard.run_view import view_run
from common.launch.base import Ending, LaunchState, RoleSpec
from common.launch.local import LocalLauncher
from common.launch.memory import MemoryWatch
from common.launch.stop import stop_timeout_s
from common.store.run_dir import RunDir, write_json


def supervise(cfg: RunConfig, run_dir: RunDir, specs: Sequence[RoleSpec]) -> tuple[Ending, int]:
    """Stay until the run has ended; return how, and the peak memory of all roles in bytes.

    What the launcher knows is in launch.json meanwhile, for displays and `status`.
    """
    display = LiveDisplay(
        partial(view_run, run_dir, cfg.train, cfg.horizon),
        title=f"longstride · {cfg.run.name}",
        subtitle=f"{cfg.train.mode} · seed {cfg.run.seed} · {run_dir.root}",
        is_wanted=cfg.log.live,
    )
    memory = MemoryWatch()
    written: LaunchState | None = None

    def on_poll(state: LaunchState) -> None:
        nonlocal written
        if state != written:
            write_json(run_dir.launch, asdict(state))
            written = state
        display.refresh()
        memory.sample()

    wanted_s = cfg.run.stop_timeout_s
    launcher = LocalLauncher(stop_timeout_s=lambda: stop_timeout_s(run_dir, wanted_s=wanted_s))
    display.start()
    try:
        ending = launcher.run(specs, on_poll=on_poll)
    finally:
        display.stop()
        run_dir.launch.unlink(missing_ok=True)
    return ending, memory.peak_bytes

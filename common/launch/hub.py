"""An environment hub for as long as a command needs one."""

import contextlib
import time
from collections.abc import Generator
from pathlib import Path

from common.config.run_config import RunConfig
from common.errors import EnvError
from common.launch.guardian import Guardian
from common.launch.process import RoleProcess, wait_until_ended
from common.launch.roles import make_role_specs
from common.store.run_dir import RunDir

STOP_TIMEOUT_S = 5.0


@contextlib.contextmanager
def serve_hub(cfg: RunConfig, run_dir: RunDir, *, root: Path) -> Generator[str]:
    """Yield the address of a hub that is started here, or of the one that the config names.

    Raises:
        EnvError: the hub ended while starting; holds its last words.
        ConfigError: it published no address in time.
    """
    if cfg.envhub.url:
        yield cfg.envhub.url
        return
    run_dir.forget_address("envhub")
    spec = make_role_specs(cfg, run_dir, root=root, has_cuda=False)[0]
    guardian = Guardian()
    hub = RoleProcess(spec)
    guardian.add(hub.pid)
    try:
        deadline = time.monotonic() + cfg.actor.start_timeout_s
        while not (run_dir.addresses / "envhub").exists() and time.monotonic() < deadline:
            if hub.poll() is not None:
                last = " ".join(hub.log_tail(max_lines=1))
                raise EnvError(f"the hub ended while starting: {last} (log: {spec.log_path})")
            time.sleep(0.05)
        yield run_dir.wait_for_address("envhub", timeout_s=0.0)
    finally:
        hub.terminate()
        wait_until_ended([hub], deadline=time.monotonic() + STOP_TIMEOUT_S, poll_s=0.02)
        hub.clear_away()
        guardian.remove(hub.pid)
        guardian.close()

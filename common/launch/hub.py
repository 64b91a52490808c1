"""An environment hub for the duration of a command."""

import contextlib
import logging
from collections.abc import Generator
from pathlib import Path

from common.config.run_config import RunConfig
from common.errors import ConfigError, EnvError
from common.launch.base import EXIT_CONFIG_ERROR
from common.launch.guardian import Guardian
from common.launch.process import ChildFailed, ChildProcess
from common.launch.roles import make_role_specs
from common.store.run_dir import RunDir
from common.store.run_start import save_config
from common.wire.security import create_keys

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0


@contextlib.contextmanager
def serve_hub(cfg: RunConfig, run_dir: RunDir, *, root: Path) -> Generator[tuple[str, str]]:
    """Yield (address, token) of a hub: the configured hub, or one that is started here.

    The hub's keys and configuration are written to `run_dir`.

    Raises:
        ConfigError: the hub rejects its configuration.
        EnvError: the hub ended or published no address in time; holds its last log lines.
    """
    token = create_keys(run_dir.keys).hub_token
    save_config(cfg, run_dir.config)
    if cfg.envhub.url:
        yield cfg.envhub.url, cfg.envhub.token or token
        return
    logger.info("starting the environment hub")
    run_dir.forget_address("envhub")
    spec = make_role_specs(cfg.run, run_dir, root=root, num_actors=0, has_hub=True)[0]
    guardian = Guardian()
    hub = ChildProcess("hub", spec.argv, log_path=spec.log_path, env=spec.env, guardian=guardian)
    try:
        is_there = run_dir.find_address
        timeout_s = cfg.actor.start_timeout_s
        try:
            hub.wait_until(lambda: is_there("envhub") is not None, timeout_s=timeout_s)
        except ChildFailed as error:
            if hub.poll() == EXIT_CONFIG_ERROR:
                raise ConfigError(f"envhub: {hub.last_error()}") from error
            raise EnvError(f"the hub did not start: {error}") from error
        yield run_dir.find_address("envhub") or "", token
    finally:
        hub.stop(timeout_s=STOP_TIMEOUT_S)
        guardian.close()

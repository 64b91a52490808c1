"""An environment hub for the duration of a command."""

import contextlib
import logging
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial

from common.config.run_config import Config, RunConfig
from common.errors import ConfigError, EnvError
from common.host.child_process import ChildFailed, ChildProcess
from common.host.guardian import Guardian
from common.host.machine import gpus
from common.store.run_dir import RunDir
from common.store.run_start import save_config
from common.wire.security import create_keys
from tools.checks.served_engines import judge_engines, own_judges
from tools.launch.base import EXIT_CONFIG_ERROR, RoleSpec
from tools.launch.roles import make_role_specs
from tools.launch.served import make_engine_specs, with_engines

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0


def command_part(cfg: Config, run_dir: RunDir, command: str) -> tuple[Config, RunDir]:
    """Return the config and the folder `runs/NAME/COMMAND` of a command beside a run.

    Its hub, configuration, metrics and episodes are there, so that a run of the same name can
    train, or start later with other settings.
    """
    run = replace(cfg.run, dir=f"{cfg.run.dir}/{cfg.run.name}", name=command)
    return replace(cfg, run=run), RunDir(root=run_dir.root / command)


@contextlib.contextmanager
def serve_hub(cfg: RunConfig, run_dir: RunDir) -> Generator[tuple[str, str]]:
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
    devices = gpus() if own_judges(cfg) else ()
    used = range(cfg.actor.tensor_parallel_size)
    judges = judge_engines(cfg, used=used, num_gpus=len(devices))
    engines = make_engine_specs(cfg, run_dir, judges, devices=devices)
    hub = make_role_specs(cfg.run, run_dir, num_actors=0, has_hub=True)[0]
    roles = with_engines([hub], engines, run_dir)
    with serve_roles(roles, run_dir, timeout_s=cfg.actor.start_timeout_s):
        yield run_dir.find_address("envhub") or "", token


@contextlib.contextmanager
def serve_roles(specs: Sequence[RoleSpec], run_dir: RunDir, *, timeout_s: float) -> Generator[None]:
    """Start roles one after another, each once its predecessor listens; stop them at the end.

    Raises: ConfigError, EnvError: as `serve_hub`.
    """
    guardian = Guardian()
    with contextlib.ExitStack() as stack:
        stack.callback(guardian.close)
        for spec in specs:
            logger.info("starting role=%s", spec.name)
            run_dir.forget_address(spec.name)
            child = ChildProcess(
                spec.name, spec.argv, log_path=spec.log_path, env=spec.env, guardian=guardian
            )
            stack.callback(partial(child.stop, timeout_s=STOP_TIMEOUT_S))
            _wait_for(child, run_dir, timeout_s=timeout_s)
        yield


def _wait_for(child: ChildProcess, run_dir: RunDir, *, timeout_s: float) -> None:
    """Wait until a role has published its address. Raises: ConfigError, EnvError."""
    role = child.name
    try:
        child.wait_until(lambda: run_dir.find_address(role) is not None, timeout_s=timeout_s)
    except ChildFailed as error:
        if child.poll() == EXIT_CONFIG_ERROR:
            raise ConfigError(f"{role}: {child.last_error()}") from error
        name = "the hub" if role == "envhub" else role
        raise EnvError(f"{name} did not start: {error}") from error

"""Engines of opponents for the duration of an evaluation."""

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

from common.config.run_config import RunConfig
from common.host.machine import gpus
from common.store.run_dir import RunDir
from tools.checks.preflight import check_model
from tools.checks.served.opponents import opponent_engines
from tools.launch.hub import serve_roles
from tools.launch.served import make_engine_specs, shared_variables


@contextlib.contextmanager
def serve_opponents(cfg: RunConfig, run_dir: RunDir, *, root: Path) -> Generator[None]:
    """Serve the opponents of an evaluation inside the context.

    This process and its children find the engines by environment variables.

    Raises: ConfigError, EnvError: an engine did not start.
    """
    if not cfg.actor.seats.folders(in_training=False):
        yield
        return
    found = gpus()
    for path in cfg.actor.seats.folders(in_training=False):
        check_model(path, root, key="actor.seats.eval_opponents")
    used = range(cfg.actor.tensor_parallel_size) if not cfg.policy.url else ()
    engines = opponent_engines(cfg, root=root, used=used, num_gpus=len(found), in_training=False)
    roles = make_engine_specs(cfg, run_dir, engines, root=root, found=found)
    shared = shared_variables(roles, run_dir)
    os.environ.update(shared)
    try:
        with serve_roles(roles, run_dir, timeout_s=cfg.actor.start_timeout_s):
            yield
    finally:
        for name in shared:
            del os.environ[name]

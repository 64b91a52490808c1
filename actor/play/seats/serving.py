"""Engines of opponents for the duration of an evaluation."""

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

from common.checks.gpu_placement import GpuAssignment
from common.checks.machine import gpus
from common.config.run_config import RunConfig
from common.config.seats.engines import KEY_VARIABLE, RUN_VARIABLE
from common.launch.hub import serve_roles
from common.launch.judges.opponents import make_opponent_specs, with_opponents
from common.store.run_dir import RunDir


@contextlib.contextmanager
def serve_opponents(cfg: RunConfig, run_dir: RunDir, *, root: Path) -> Generator[None]:
    """Serve the opponents of an evaluation inside the context.

    This process and its children find the engines by environment variables.

    Raises: ConfigError, EnvError: an engine did not start.
    """
    if not cfg.actor.seats.folders(in_training=False):
        yield
        return
    own = tuple(range(cfg.actor.tensor_parallel_size)) if not cfg.policy.url else ()
    specs = make_opponent_specs(
        cfg,
        run_dir,
        root=root,
        in_training=False,
        assignment=GpuAssignment(learner=(), actors=(own,)),
        found=gpus(),
    )
    roles = with_opponents([], specs, run_dir)
    shared = {name: roles[0].env[name] for name in (KEY_VARIABLE, RUN_VARIABLE)}
    os.environ.update(shared)
    try:
        with serve_roles(roles, run_dir, timeout_s=cfg.actor.start_timeout_s):
            yield
    finally:
        for name in shared:
            del os.environ[name]

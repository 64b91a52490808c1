"""Which processes a run consists of on one machine."""

import sys
from pathlib import Path

from common.config.run_config import RunConfig
from common.launch.base import RoleSpec
from common.store.run_dir import RunDir

FIRST_TO_STOP, SECOND_TO_STOP, LAST_TO_STOP = 0, 1, 2


def make_role_specs(
    cfg: RunConfig, run_dir: RunDir, *, root: Path, has_cuda: bool
) -> list[RoleSpec]:
    """Return the roles of a training run in the order of starting.

    Args:
        cfg: the run; an `envhub.url` means that no hub is started.
        run_dir: holds the config that the roles load, and gets their logs.
        root: where `run.py` lies.
        has_cuda: False keeps the threads of the roles from fighting over the cores.
    """
    env = {} if has_cuda else {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

    def spec(role: str, name: str, *overrides: str, **policy: object) -> RoleSpec:
        where = (f"run.dir={cfg.run.dir}", f"run.name={cfg.run.name}")
        argv = (sys.executable, str(root / "run.py"), role, *where, *overrides)
        log_path = run_dir.logs / f"{name}.log"
        return RoleSpec(name=name, argv=argv, env=env, log_path=log_path, **policy)  # type: ignore[arg-type]

    specs = [] if cfg.envhub.url else [spec("envhub", "envhub", stop_rank=LAST_TO_STOP)]
    specs.append(
        spec(
            "scheduler",
            "scheduler",
            stop_rank=SECOND_TO_STOP,
            max_restarts=5,
            quiet_exit_grace_s=10.0,
        )
    )
    specs.append(spec("learner", "learner", ends_run=True, saves_at_stop=True, max_restarts=5))
    for i in range(cfg.actor.num_actors):
        name = f"actor-{i}"
        specs.append(spec("actor", name, f"actor.name={name}", quiet_exit_grace_s=30.0))
    return specs

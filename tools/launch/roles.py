"""The processes of a run on one machine."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from common.config.run import RunSection
from common.host.machine import Gpu
from common.host.process_settings import ONE_THREAD
from common.ids import actor_name
from common.repository import CODE
from common.store.run_dir import RunDir
from common.wire.security import rank_node
from tools.checks.gpu_placement import GpuAssignment, visible_to
from tools.launch.base import RoleSpec

logger = logging.getLogger(__name__)

# Roles that may start from another checkout. Scheduler and learner change with the launcher.
MOVABLE = ("envhub", "actor")
# The learner and the actors stop first.
SECOND_TO_STOP = 1
LAST_TO_STOP = 2


def make_role_specs(
    run: RunSection,
    run_dir: RunDir,
    *,
    num_actors: int,
    has_hub: bool,
    num_rank_nodes: int = 0,
    assignment: GpuAssignment | None = None,
    devices: Sequence[Gpu] = (),
) -> list[RoleSpec]:
    """Return the roles of a training run in the order of starting.

    Args:
        run_dir: holds the roles' config and receives their logs.
        has_hub: whether the run starts its own hub, as the first role.
        num_rank_nodes: further nodes of the learner that the launcher starts. They stop after it,
            since its last checkpoint needs all ranks.
        assignment: roles of the GPUs in `devices`. Without GPUs each role gets one thread, so that
            the roles do not compete for the cores.
    """
    shared = {} if devices else ONE_THREAD

    def spec(role: str, name: str, *overrides: str) -> RoleSpec:
        """Return the spec of one role, with the GPUs that are assigned to it."""
        number = int(name.partition("-")[2] or 0)
        env = shared | (
            visible_to(role, number, assignment, devices) if assignment is not None else {}
        )
        where = (f"run.dir={run.dir}", f"run.name={run.name}")
        argv = (sys.executable, str(CODE / "run.py"), role, *where, *overrides)
        log_path = run_dir.logs / f"{name}.log"
        return RoleSpec(name=name, argv=argv, env=env, log_path=log_path)

    actors = [actor_name(i) for i in range(num_actors)]
    nodes = [rank_node(number) for number in range(1, num_rank_nodes + 1)]
    return [
        *([replace(spec("envhub", "envhub"), stop_rank=LAST_TO_STOP)] if has_hub else []),
        replace(
            spec("scheduler", "scheduler"),
            stop_rank=SECOND_TO_STOP,
            max_restarts=5,
            quiet_exit_grace_s=10.0,
        ),
        replace(spec("learner", "learner"), ends_run=True, saves_at_stop=True, max_restarts=5),
        *(
            replace(spec("learner", name), stop_rank=SECOND_TO_STOP, quiet_exit_grace_s=30.0)
            for name in nodes
        ),
        *(
            replace(spec("actor", name, f"actor.name={name}"), quiet_exit_grace_s=30.0)
            for name in actors
        ),
    ]


def other_checkout(run_dir: RunDir, name: str) -> tuple[str, str] | None:
    """Return the interpreter and the run.py with which a role starts; None: the launcher's own.

    The file `code` of the run directory has the path of the checkout. Its own environment in
    `.venv` is used if there is one.
    """
    if name.partition("-")[0] not in MOVABLE or not run_dir.code.is_file():
        return None
    root = Path(run_dir.code.read_text(encoding="utf-8").strip())
    if not (root.is_absolute() and (root / "run.py").is_file()):
        logger.error(
            "%s: %r is no absolute path of a checkout, so role=%s starts from this one",
            run_dir.code,
            str(root),
            name,
        )
        return None
    python = root / ".venv" / "bin" / "python"
    return str(python) if python.exists() else sys.executable, str(root / "run.py")


def command_of(argv: Sequence[str], run_dir: RunDir, name: str) -> tuple[str, ...]:
    """Return a role's command, from another checkout if the run directory names one."""
    program = other_checkout(run_dir, name)
    if program is None:
        return tuple(argv)
    logger.info("role=%s starts from %s", name, program[1])
    return (*program, *absolute_dir(argv[2:], run_dir))


def absolute_dir(words: Sequence[str], run_dir: RunDir) -> list[str]:
    """Return arguments with an absolute `run.dir`: a relative one is below the checkout."""
    setting = f"run.dir={run_dir.root.absolute().parent}"
    return [setting if word.startswith("run.dir=") else word for word in words]

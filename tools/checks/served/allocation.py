"""All engines that a run starts beside its actors, in the order in which they get GPUs."""

from functools import partial

from common.config.run_config import RunConfig
from tools.checks.gpu_placement import GpuAssignment, used_gpus
from tools.checks.served.engine import ServedEngine
from tools.checks.served.judges import judge_engines
from tools.checks.served.opponents import opponent_engines
from tools.checks.served.teacher import teacher_engines


def served_engines(
    cfg: RunConfig, *, assignment: GpuAssignment | None = None, num_gpus: int = 0
) -> list[ServedEngine]:
    """Return the engines of judges, of the teacher and of opponents, each with its GPUs.

    Args:
        assignment: GPUs of learner and actors.
        num_gpus: number of this machine's GPUs; 0 runs the engines on its CPU.

    Raises: ConfigError: a key is wrong, no GPU is free, or the launcher cannot start engines.
    """
    used = used_gpus(assignment)
    engines: list[ServedEngine] = []
    finders = (judge_engines, partial(teacher_engines), partial(opponent_engines))
    for find in finders:
        found = find(cfg, used=used, num_gpus=num_gpus)
        engines += found
        used |= {gpu for each in found for gpu in each.gpus}
    return engines

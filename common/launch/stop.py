"""How long a run may take to stop: as long as its learner needs to finish a step and save."""

from common.store.metrics import tail_metrics
from common.store.run_dir import RunDir

MIN_S = 10.0
MARGIN_S = 5.0
FACTOR = 3.0  # times what was measured: a stop meets disks and cores that are busy
UNMEASURED_S = 10.0  # taken for a step or a checkpoint while none has been measured
RECENT_STEPS = 100


def stop_timeout_s(run_dir: RunDir, *, wanted_s: float) -> float:
    """Return the seconds after which a learner that is told to stop is killed.

    Args:
        run_dir: whose metrics.jsonl tells how long recent steps and checkpoints took.
        wanted_s: `run.stop_timeout_s`; 0: follow what was measured.
    """
    if wanted_s > 0:
        return wanted_s
    lines = tail_metrics(run_dir.metrics, num_steps=RECENT_STEPS)
    needed_s = 0.0
    for name in ("train/step_s", "train/checkpoint_s"):
        measured = [value for line in lines if isinstance(value := line.get(name), int | float)]
        needed_s += max(measured, default=UNMEASURED_S)
    return max(MIN_S, FACTOR * needed_s + MARGIN_S)

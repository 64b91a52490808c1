"""The state of a run's copy in a store, from the file that the copying process writes."""

import time
from dataclasses import dataclass

from common.store.run_dir import RunDir
from common.store.status.json_files import json_object


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyState:
    """How far the copy of a run is behind the run."""

    lag_bytes: float  # Acknowledged bytes of the journal that the copy lacks.
    age_s: float  # Seconds since the newest whole copy, or since the first attempt.
    failing_s: float = 0.0  # Seconds since the store began to fail; 0: it works.
    checkpoint: float = -1.0  # Newest version of a checkpoint in the copy; -1: none.


def copy_state(run_dir: RunDir, *, now: float | None = None) -> CopyState | None:
    """Return the state of a run's copy; None if the run makes none now. `now` is the Unix time."""
    found = json_object(run_dir.root / "copies.json")
    numbers = {key: value for key, value in found.items() if isinstance(value, int | float)}
    if "copied_at" not in numbers or found.get("is_running") is False:
        return None
    now = time.time() if now is None else now
    failing_since = numbers.get("failing_since", 0.0)
    return CopyState(
        lag_bytes=numbers.get("lag_bytes", 0.0),
        age_s=max(0.0, now - numbers["copied_at"]),
        failing_s=max(0.0, now - failing_since) if failing_since else 0.0,
        checkpoint=numbers.get("checkpoint", -1.0),
    )


def copy_metrics(run_dir: RunDir) -> dict[str, float]:
    """Return the metrics of a step about the run's copy; {} if the run makes none."""
    state = copy_state(run_dir)
    if state is None:
        return {}
    return {
        "copy/lag_bytes": state.lag_bytes,
        "copy/age_s": state.age_s,
        "copy/failing_s": state.failing_s,
        "copy/checkpoint_version": state.checkpoint,
    }

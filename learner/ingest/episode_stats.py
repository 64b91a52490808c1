"""Running sums over the training episodes that arrived since the last step."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from common.wire.ids import subset_of
from common.wire.messages import EndReason, Trajectory


class EpisodeStats:
    """Means over all episodes, also the filtered ones: the honest learning curve."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._subsets: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self._tasks: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])

    def add(self, trajectory: Trajectory) -> None:
        sums = self._sums
        if trajectory.end_reason.is_infrastructure_failure:
            sums["failed"] += 1
            return
        sums["episodes"] += 1
        sums["reward"] += trajectory.reward
        sums["success"] += trajectory.is_success
        sums["turns"] += trajectory.num_turns
        sums["truncated"] += trajectory.end_reason is EndReason.HORIZON
        sums["context_full"] += trajectory.end_reason is EndReason.CONTEXT_FULL
        sums["invalid"] += trajectory.num_invalid_actions
        sums["tokens"] += len(trajectory.token_ids)
        sums["sampled"] += int(trajectory.loss_mask.sum())
        sums["generate_s"] += trajectory.generate_s
        sums["env_s"] += trajectory.env_s
        sums["wall_s"] += trajectory.wall_s
        cell = self._subsets[subset_of(trajectory.item_id)]
        cell[0] += trajectory.is_success
        cell[1] += 1
        for task in (trajectory.env, f"{trajectory.env}/{subset_of(trajectory.item_id)}"):
            tally = self._tasks[task]
            tally[0] += 1
            tally[1] += trajectory.is_success
            tally[2] += trajectory.end_reason is EndReason.HORIZON

    def drain(self, elapsed_s: float) -> dict[str, float]:
        """Return the metrics of the window of `elapsed_s` seconds and start a new one."""
        sums, subsets, tasks = self._sums, self._subsets, self._tasks
        self._sums = defaultdict(float)
        self._subsets = defaultdict(lambda: [0, 0])
        self._tasks = defaultdict(lambda: [0, 0, 0])
        num = max(sums["episodes"], 1.0)
        metrics = {
            "episodes/arrived": sums["episodes"],
            "episodes/failed": sums["failed"],
            "actor/episodes_per_s": sums["episodes"] / max(elapsed_s, 1e-6),
            "actor/tokens_per_s": sums["sampled"] / max(elapsed_s, 1e-6),
        }
        if not sums["episodes"]:
            return metrics
        metrics |= {
            "reward/mean": sums["reward"] / num,
            "reward/success": sums["success"] / num,
            "episodes/turns_mean": sums["turns"] / num,
            "episodes/truncated_frac": sums["truncated"] / num,
            "episodes/context_full_frac": sums["context_full"] / num,
            "episodes/invalid_frac": sums["invalid"] / max(sums["turns"], 1.0),
            "episodes/tokens_mean": sums["tokens"] / num,
            "episodes/generate_s_mean": sums["generate_s"] / num,
            "episodes/env_s_mean": sums["env_s"] / num,
            "episodes/wall_s_mean": sums["wall_s"] / num,
        }
        for subset, (solved, total) in sorted(subsets.items()):
            metrics[f"reward/success/{subset}"] = solved / total
        for task, (total, solved, cut) in sorted(tasks.items()):
            metrics[f"tasks/episodes/{task}"] = float(total)
            metrics[f"tasks/success/{task}"] = solved / total
            metrics[f"tasks/truncated_frac/{task}"] = cut / total
        return metrics


def horizon_mix(members: Sequence[Trajectory]) -> dict[str, float]:
    """Return the horizons of a batch: the longest, the mean, each one's share, and by environment.

    Groups opened before a change of stage are trained after it, so a batch may hold several.
    """
    horizons = [t.horizon for t in members]
    metrics = {
        "horizon/value": float(max(horizons)),
        "horizon/mean": sum(horizons) / len(horizons),
        "horizon/stage": float(max(t.horizon_stage for t in members)),
    }
    for turns, num in sorted(Counter(horizons).items()):
        metrics[f"horizon/share/{turns}"] = num / len(horizons)
    for env in sorted({t.env for t in members}):
        own = [t for t in members if t.env == env]
        metrics[f"horizon/value/{env}"] = float(max(t.horizon for t in own))
        metrics[f"horizon/stage/{env}"] = float(max(t.horizon_stage for t in own))
    return metrics

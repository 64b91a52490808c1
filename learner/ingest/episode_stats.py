"""Metrics of the training episodes that arrived since the last step."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from common.ids import subset_of
from common.segments import num_rows
from common.wire.messages import EndReason, Trajectory


class EpisodeStats:
    """Means over all episodes, including filtered ones, so that the learning curve is unbiased."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = defaultdict(int)
        # Sums by the name of the metric that uses them.
        self._sums: dict[str, float] = defaultdict(float)
        self._tasks: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        # Number and sum of the metrics that environments report.
        self._own: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(self, trajectory: Trajectory) -> None:
        """Count an episode; an infrastructure failure counts as failed only."""
        if trajectory.end_reason.is_infrastructure_failure:
            self._counts["failed"] += 1
            return
        is_cut = trajectory.end_reason in (EndReason.HORIZON, EndReason.TRUNCATED)
        self._counts["episodes"] += 1
        self._counts["turns"] += trajectory.num_turns
        self._counts["sampled"] += int(np.count_nonzero(trajectory.loss_mask))
        self._counts["prompt"] += trajectory.num_prompt_tokens
        self._counts["cached"] += trajectory.num_cached_tokens
        parts = {
            "reward/mean": trajectory.reward,
            "reward/success": trajectory.is_success,
            "episodes/turns_mean": trajectory.num_turns,
            "episodes/truncated_frac": is_cut,
            "episodes/context_full_frac": trajectory.end_reason is EndReason.CONTEXT_FULL,
            "episodes/cut_observations_mean": trajectory.num_cut_observations,
            "episodes/repaired_texts_mean": trajectory.num_repaired_texts,
            "episodes/invalid_frac": trajectory.num_invalid_actions,
            "episodes/tokens_mean": len(trajectory.token_ids),
            "episodes/segments_mean": num_rows(trajectory),
            "episodes/forks_frac": trajectory.num_shared_turns > 0,
            "episodes/shared_turns_mean": trajectory.num_shared_turns,
            "episodes/generate_s_mean": trajectory.generate_s,
            "episodes/env_s_mean": trajectory.env_s,
            "episodes/wall_s_mean": trajectory.wall_s,
        }
        for name, value in parts.items():
            self._sums[name] += value
        for name, value in trajectory.metrics.items():
            totals = self._own[f"episodes/{name}_mean"]
            totals[0] += 1
            totals[1] += value
        env = trajectory.env
        subset = subset_of(trajectory.item_id)
        for tally in (self._tasks[env], self._tasks[f"{env}/{subset}"]):
            tally[0] += 1
            tally[1] += trajectory.is_success
            tally[2] += is_cut

    def metrics(self, elapsed_s: float) -> dict[str, float]:
        """Return the metrics of the episodes, which arrived within `elapsed_s` seconds."""
        counts = self._counts
        metrics = {
            "episodes/arrived": float(counts["episodes"]),
            "episodes/failed": float(counts["failed"]),
            "actor/episodes_per_s": counts["episodes"] / max(elapsed_s, 1e-6),
            "actor/tokens_per_s": counts["sampled"] / max(elapsed_s, 1e-6),
        }
        if counts["prompt"]:
            metrics["actor/prefix_hit_frac"] = counts["cached"] / counts["prompt"]
        for name, total in self._sums.items():
            is_of_turns = name == "episodes/invalid_frac"
            metrics[name] = total / max(counts["turns" if is_of_turns else "episodes"], 1)
        metrics |= {name: total / num for name, (num, total) in sorted(self._own.items())}
        for task, (total, solved, cut) in sorted(self._tasks.items()):
            metrics[f"tasks/episodes/{task}"] = float(total)
            metrics[f"tasks/success/{task}"] = solved / total
            metrics[f"tasks/truncated_frac/{task}"] = cut / total
        return metrics


def horizon_mix(members: Sequence[Trajectory]) -> dict[str, float]:
    """Return the horizons of a batch: longest, mean, share of each, and values by environment.

    Groups opened before a change of stage may be trained after it, so a batch may mix horizons.
    """
    horizons = [t.horizon for t in members]
    metrics = {
        "horizon/value": float(max(horizons)),
        "horizon/mean": sum(horizons) / len(horizons),
        "horizon/stage": float(max(t.horizon_stage for t in members)),
    }
    if any(t.distance for t in members):
        metrics["distance/value"] = float(max(t.distance for t in members))
        metrics["distance/mean"] = sum(t.distance for t in members) / len(members)
        metrics["distance/stage"] = float(max(t.distance_stage for t in members))
    for turns, num in sorted(Counter(horizons).items()):
        metrics[f"horizon/share/{turns}"] = num / len(horizons)
    for env in sorted({t.env for t in members}):
        of_env = [t for t in members if t.env == env]
        metrics[f"horizon/value/{env}"] = float(max(t.horizon for t in of_env))
        metrics[f"horizon/stage/{env}"] = float(max(t.horizon_stage for t in of_env))
    return metrics

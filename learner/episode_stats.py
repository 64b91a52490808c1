"""Running sums over the training episodes that arrived since the last step."""

from collections import defaultdict

from common.messages import EndReason, Trajectory


def subset_of(item_id: str) -> str:
    """Return the subset of an item id: "GoToLocal" of "GoToLocal-train-17"."""
    return item_id.rsplit("-", 2)[0]


class EpisodeStats:
    """Means over all episodes, also the filtered ones: the honest learning curve."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._subsets: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def add(self, trajectory: Trajectory) -> None:
        """Count one training episode."""
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

    def drain(self, elapsed_s: float) -> dict[str, float]:
        """Return the metrics of the window of `elapsed_s` seconds and start a new one."""
        sums, subsets = self._sums, self._subsets
        self._sums = defaultdict(float)
        self._subsets = defaultdict(lambda: [0, 0])
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
        return metrics

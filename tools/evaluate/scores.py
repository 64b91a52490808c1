"""Scores of an evaluation: success, score, avg@k and pass@k with intervals, without failures."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.wire.messages import Trajectory
from tools.evaluate.intervals import clustered_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredEpisode:
    """One episode without an infrastructure failure."""

    is_success: bool
    score: float  # The last reward, in [0, 1].
    num_turns: int
    end: str  # Value of the EndReason.


@dataclass(slots=True, kw_only=True)
class ItemPlays:
    """Results of the k samples of one item."""

    env: str
    subset: str
    item_id: str
    samples: list[ScoredEpisode] = field(default_factory=list[ScoredEpisode])
    failures: list[str] = field(default_factory=list[str])  # End reasons of failed episodes.
    num_missing: int = 0  # Number of samples that were not played yet.

    def add(self, trajectory: Trajectory) -> None:
        """Add an episode to the samples or the failures."""
        end = trajectory.end_reason
        if end.is_infrastructure_failure:
            self.failures.append(end.value)
            return
        is_success = trajectory.is_success
        num_turns = trajectory.num_turns
        score = trajectory.reward
        self.samples.append(
            ScoredEpisode(is_success=is_success, score=score, num_turns=num_turns, end=end.value)
        )

    @property
    def num_solved(self) -> int:
        """Number of samples that solved the item."""
        return sum(sample.is_success for sample in self.samples)


def pass_at(k: int, *, num_samples: int, num_solved: int) -> float:
    """Return the chance that k samples, drawn without replacement, contain a solved one.

    `num_samples` must be k or more.

    Source: Chen et al., arXiv 2107.03374, equation 1; unbiased for 1 - (1 - p)^k.
    """
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def scores(items: Iterable[ItemPlays], *, k: int) -> dict[str, Any]:
    """Return all scores of some items as JSON. A mean over no values is null.

    Returns:
        num_items, num_episodes, num_failed, num_missing, failures (by reason);
        success: share of solved episodes among those without a failure. Its interval is clustered
            by item, because samples of one item are correlated;
        avg_at_k, score: means over items, with intervals clustered by item;
        pass_at: for k and each power of two up to k, the mean over items with enough samples.
    """
    items = list(items)
    played = [item for item in items if item.samples]
    samples = [sample for item in played for sample in item.samples]
    num_solved = sum(sample.is_success for sample in samples)
    powers = {1 << i for i in range(k.bit_length())}
    failures = Counter(reason for item in items for reason in item.failures)
    return {
        "num_items": len(items),
        "num_episodes": len(samples),
        "num_failed": failures.total(),
        "num_missing": sum(item.num_missing for item in items),
        "failures": dict(sorted(failures.items())),
        "success": {
            "mean": num_solved / len(samples) if samples else None,
            "ci95": _success_interval(played) if played else None,
            "num_episodes": len(samples),
        },
        "avg_at_k": {"k": k, **_mean([i.num_solved / len(i.samples) for i in played])},
        "score": _mean([sum(s.score for s in i.samples) / len(i.samples) for i in played]),
        "pass_at": {str(each): _pass(played, each) for each in sorted(powers | {k})},
        "num_turns": _plain_mean([float(sample.num_turns) for sample in samples]),
        "ends": dict(sorted(Counter(sample.end for sample in samples).items())),
    }


def all_scores(items: Sequence[ItemPlays], *, k: int) -> dict[str, Any]:
    """Return `scores` of all items, of each environment, and of each subset in it."""
    by_subset: dict[tuple[str, str], list[ItemPlays]] = defaultdict(list)
    by_env: dict[str, list[ItemPlays]] = defaultdict(list)
    for item in items:
        by_subset[item.env, item.subset].append(item)
        by_env[item.env].append(item)
    subsets: dict[str, dict[str, Any]] = defaultdict(dict)
    for (env, subset), some in by_subset.items():
        subsets[env][subset] = scores(some, k=k)
    envs: Mapping[str, Any] = {
        env: {**scores(some, k=k), "by_subset": subsets[env]} for env, some in by_env.items()
    }
    return {"overall": scores(items, k=k), "by_env": envs}


def _pass(played: list[ItemPlays], k: int) -> dict[str, Any]:
    """Return the mean pass@k of the items with at least k samples."""
    enough = [item for item in played if len(item.samples) >= k]
    return _mean([pass_at(k, num_samples=len(i.samples), num_solved=i.num_solved) for i in enough])


def _success_interval(played: list[ItemPlays]) -> list[float]:
    """Return the interval of success, clustered by item."""
    counts = [len(item.samples) for item in played]
    shares = [item.num_solved / num for item, num in zip(played, counts, strict=True)]
    return list(clustered_interval(shares, counts))


def _mean(values: list[float]) -> dict[str, Any]:
    """Return a mean over items with its interval."""
    return {
        "mean": _plain_mean(values),
        "ci95": list(clustered_interval(values)) if values else None,
        "num_items": len(values),
    }


def _plain_mean(values: list[float]) -> float | None:
    """Return the mean; None without values."""
    return sum(values) / len(values) if values else None

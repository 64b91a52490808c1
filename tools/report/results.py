"""A run's results as numbers: evaluations with intervals, the paired gain, sums over steps."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from common.ids import last_after, split_episode_id, subset_of
from common.wire.messages import EpisodeKind
from learner.journal.journal import read_journal
from learner.journal.metrics import MetricsLine
from tools.evaluate.intervals import gain_interval, wilson_interval
from tools.report.model import Gain, Score, SubsetScore

BEFORE = ("eval-before-model", "eval-before-random_valid", "eval-before-expert")
MAX_LAG_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutEpisode:
    """One held-out episode without an infrastructure failure."""

    item: tuple[str, str]  # Environment and item id.
    subset: str
    is_success: bool


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """The episodes of one evaluation."""

    plays: dict[str, HeldOutEpisode] = field(
        default_factory=dict[str, HeldOutEpisode]
    )  # Episodes by id.
    # Episodes with an infrastructure failure; they are not in `plays`.
    failed: set[str] = field(default_factory=set[str])


@dataclass(slots=True, kw_only=True)
class JournalTotals:
    """The data that a report takes from the journal."""

    evaluations: dict[str, Evaluation] = field(default_factory=lambda: defaultdict(Evaluation))
    train_episodes: set[str] = field(default_factory=set[str])
    train_items: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    test_items: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])


def read_totals(folder: Path) -> JournalTotals:
    """Return the totals of a journal; a repeated episode counts once.

    Of several evaluations after training, "after-model" is the last one.
    """
    totals = JournalTotals()
    groups: defaultdict[str, Evaluation] = defaultdict(Evaluation)
    for _, trajectory in read_journal(folder):
        item = (trajectory.env, trajectory.item_id)
        episode_id = trajectory.episode_id
        if trajectory.kind is EpisodeKind.TRAIN:
            totals.train_episodes.add(episode_id)
            totals.train_items.add(item)
            continue
        totals.test_items.add(item)
        group_id, _ = split_episode_id(episode_id)
        if group_id not in BEFORE and last_after([group_id]) is None:
            continue
        evaluation = groups[group_id]
        if trajectory.end_reason.is_infrastructure_failure:
            evaluation.failed |= {episode_id} - evaluation.plays.keys()
            continue
        evaluation.failed.discard(episode_id)
        subset = subset_of(trajectory.item_id)
        is_success = trajectory.is_success
        play = HeldOutEpisode(item=item, subset=subset, is_success=is_success)
        evaluation.plays.setdefault(episode_id, play)
    for group_id in BEFORE:
        if group_id in groups:
            totals.evaluations[group_id.removeprefix("eval-")] = groups[group_id]
    if (after := last_after(groups)) is not None:
        totals.evaluations["after-model"] = groups[after]
    return totals


def score(plays: Sequence[HeldOutEpisode]) -> Score:
    """Return success with its interval, overall and by subset. Needs at least one play."""
    by_subset: dict[str, list[bool]] = defaultdict(list)
    for play in plays:
        by_subset[play.subset].append(play.is_success)
    num_solved = sum(play.is_success for play in plays)
    num = len(plays)
    return Score(
        success=num_solved / num,
        n=num,
        ci95=wilson_interval(num_solved, num),
        by_subset={
            subset: SubsetScore(success=sum(some) / len(some), n=len(some))
            for subset, some in sorted(by_subset.items())
        },
    )


def paired_gain(before: Iterable[HeldOutEpisode], after: Iterable[HeldOutEpisode]) -> Gain | None:
    """Return the mean gain over items played in both; None if there is no such item.

    The interval is that of the mean of the items' differences.
    """
    old = _success_by_item(before)
    new = _success_by_item(after)
    gains = [new[item] - old[item] for item in sorted(old.keys() & new.keys())]
    if not gains:
        return None
    interval = gain_interval(gains) if len(gains) > 1 else None
    return Gain(success=fmean(gains), ci95=interval, num_pairs=len(gains))


def lag_histogram(lines: list[MetricsLine]) -> dict[str, int]:
    """Return trained tokens by lag in versions; the last bin holds all larger lags."""
    names = {str(k): f"offpolicy/lag_{k}_tokens" for k in range(MAX_LAG_SHOWN + 1)}
    return {k: int(total(lines, name)) for k, name in names.items() if has(lines, name)}


def has(lines: list[MetricsLine], name: str) -> bool:
    """Return whether any step has a value of this name."""
    return bool(_values(lines, name))


def total(lines: list[MetricsLine], name: str) -> float:
    """Return the sum over the steps that have a value."""
    return sum(_values(lines, name))


def mean(lines: list[MetricsLine], name: str) -> float | None:
    """Return the mean over the steps that have a value; None if none has."""
    values = _values(lines, name)
    return sum(values) / len(values) if values else None


def peak(lines: list[MetricsLine], name: str) -> float | None:
    """Return the largest value of any step; None if no step has one."""
    return max(_values(lines, name), default=None)


def _values(lines: list[MetricsLine], name: str) -> list[float]:
    """Return the values of a metric in all steps that have it."""
    return [value for line in lines if (value := line.get(name)) is not None]


def _success_by_item(plays: Iterable[HeldOutEpisode]) -> dict[tuple[str, str], float]:
    """Return the mean success of each item."""
    by_item: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for play in plays:
        by_item[play.item].append(play.is_success)
    return {item: fmean(some) for item, some in by_item.items()}

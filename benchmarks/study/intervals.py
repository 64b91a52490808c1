"""Means over seeds with their intervals.

Intervals are percentiles of a bootstrap over the seeds of each arm, of the interquartile mean.
Source: Agarwal et al., Deep RL at the Edge of the Statistical Precipice, arXiv 2108.13264. Their
strata are tasks; here each arm's runs are one stratum.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from benchmarks.study.outcome import SeedResult

NUM_DRAWS = 2000


def by_arm(outcomes: Sequence[SeedResult]) -> dict[str, list[SeedResult]]:
    """Return the runs of each arm, in the order of the study."""
    arms: defaultdict[str, list[SeedResult]] = defaultdict(list)
    for each in outcomes:
        arms[each.arm].append(each)
    return dict(arms)


def iqm(values: np.ndarray) -> np.ndarray:
    """Return the mean over the last axis [..., runs] without its lowest and highest quarter."""
    num = values.shape[-1]
    cut = num // 4
    return np.sort(values, axis=-1)[..., cut : num - cut].mean(axis=-1)


def over_seeds(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (interquartile mean, low, high) of [..., runs], 95 % by a bootstrap over runs.

    For a single run low and high are its value.
    """
    rng = np.random.default_rng(0)
    draws = rng.integers(0, values.shape[-1], size=(NUM_DRAWS, values.shape[-1]))
    means = iqm(np.moveaxis(values[..., draws], -2, 0))  # [draws, ...]
    low, high = np.percentile(means, [2.5, 97.5], axis=0)
    return iqm(values), low, high


def over_runs(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the interquartile mean of the runs of an arm and its interval."""
    mean, low, high = map(float, over_seeds(np.array(values)))
    return mean, (low, high)


def gap(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return ours minus theirs, as interquartile means over runs, and the interval.

    Runs of two arms are resampled independently. Equal seeds draw equal items, but their runs soon
    differ, so they are not paired.
    """
    rng = np.random.default_rng(0)
    draws = [
        iqm(np.array(each)[rng.integers(0, len(each), size=(NUM_DRAWS, len(each)))])
        for each in (ours, theirs)
    ]
    low, high = np.percentile(draws[0] - draws[1], [2.5, 97.5])
    return float(iqm(np.array(ours)) - iqm(np.array(theirs))), (float(low), float(high))

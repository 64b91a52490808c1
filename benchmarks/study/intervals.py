"""Means over seeds with their intervals.

Intervals are percentiles of a bootstrap over the seeds of each arm, of the interquartile mean.
Source: Agarwal et al., Deep RL at the Edge of the Statistical Precipice, arXiv 2108.13264. Their
strata are tasks; here each arm's runs are one stratum.
"""

from collections.abc import Callable, Sequence

import numpy as np
from scipy.stats import bootstrap, trim_mean

NUM_DRAWS = 2000
Ends = tuple[float, float]


def iqm(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """Return the mean over the runs without their lowest and highest quarter."""
    return np.asarray(trim_mean(values, 0.25, axis=axis))


def over_runs(values: Sequence[float]) -> tuple[float, Ends]:
    """Return the interquartile mean of the runs of an arm, and its interval at 95 %.

    The ends of a single run are its value.
    """
    return _bootstrapped(iqm, np.array(values))


def gap(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, Ends]:
    """Return ours minus theirs, as interquartile means over runs, and the interval.

    Runs of two arms are resampled independently. Equal seeds draw equal items, but their runs soon
    differ, so they are not paired.
    """
    return _bootstrapped(_difference, np.array(ours), np.array(theirs))


def _difference(ours: np.ndarray, theirs: np.ndarray, axis: int = -1) -> np.ndarray:
    """Return the difference of the interquartile means."""
    return iqm(ours, axis) - iqm(theirs, axis)


def _bootstrapped(statistic: Callable[..., np.ndarray], *samples: np.ndarray) -> tuple[float, Ends]:
    """Return a statistic with its bootstrap interval."""
    mean = float(statistic(*samples))
    if any(each.size == 1 for each in samples) or np.isnan(mean):
        return mean, (mean, mean)
    found = bootstrap(
        samples, statistic, n_resamples=NUM_DRAWS, method="percentile", rng=np.random.default_rng(0)
    )
    ends = found.confidence_interval
    return mean, (float(ends.low), float(ends.high))

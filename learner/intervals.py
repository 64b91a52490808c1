"""95 % confidence intervals of means over plays, items or seeds. Pure functions."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

Interval = tuple[float, float]
Z975 = 1.959964  # 97.5 % quantile of the normal distribution.
# Quantiles of Student's t distribution for 1, 2, ... degrees of freedom.
T975 = (12.70620, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814)


def student_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution, within 1e-5.

    Args:
        degrees: number of degrees of freedom, 1 or more.

    Source: Abramowitz, Stegun (1964), 26.7.5, for more than ten degrees of freedom.
    """
    if degrees <= len(T975):
        return T975[degrees - 1]
    z = Z975
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    inverse = 1 / degrees
    return z + inverse * (first + inverse * (second + inverse * (third + inverse * fourth)))


def wilson_interval(num_solved: int, num_plays: int) -> Interval:
    """Return the 95% score interval of the share of solved plays. `num_plays` is 1 or more.

    Source: Wilson (1927), J. Am. Stat. Assoc. 22:209, without continuity correction.
    """
    return score_interval(num_solved / num_plays, num_plays)


def score_interval(mean: float, trials: float, quantile: float = Z975) -> Interval:
    """Return Wilson's interval around the mean of independent `trials` in [0, 1]."""
    z2 = quantile**2
    centre = mean + z2 / (2 * trials)
    spread = quantile * math.sqrt((mean * (1 - mean) + z2 / (4 * trials)) / trials)
    scale = 1 + z2 / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def clustered_interval(values: Sequence[float], weights: Sequence[float] | None = None) -> Interval:
    """Return the 95% interval of the mean over one or more items, each with a value in [0, 1].

    The items must be independent. The samples of one item need not be, since only their mean
    counts. The interval is the score interval with two changes. The number of trials n is replaced
    by the effective number m(1-m)/v, where v is the variance of the mean m. The quantile is
    Student's with n-1 degrees of freedom. A few items with equal values would underestimate v. So
    v is estimated with one additional item of the largest possible squared deviation, m(1-m).

    If every value is 0 or 1, the mean determines the variance, and the interval is Wilson's. One
    sample of success per item is such a case. The interval is inside [0, 1] and never empty.

    Args:
        values: [item].
        weights: [item] > 0, for example the number of samples of each item; None: equal weights.

    Source: Korn, Graubard (1998), Survey Methodology 24:193, for the effective number and the
    degrees of freedom. Difference: the score interval replaces the exact one.
    """
    num = len(values)
    shares = [each * num / sum(weights) for each in weights] if weights else [1.0] * num
    mean = fmean(share * value for share, value in zip(shares, values, strict=True))
    if num == 1 or all(value in (0.0, 1.0) for value in values):
        return score_interval(mean, num**2 / sum(share**2 for share in shares))
    deviations = [
        (share * (value - mean)) ** 2 for share, value in zip(shares, values, strict=True)
    ]
    largest = mean * (1 - mean)
    trials = num**2 * largest / (sum(deviations) + largest)
    return score_interval(mean, trials, student_quantile(num - 1))


def gain_interval(gains: Sequence[float]) -> Interval:
    """Return `clustered_interval` of two or more gains, each in [-1, 1]."""
    low, high = clustered_interval([(gain + 1) / 2 for gain in gains])
    return 2 * low - 1, 2 * high - 1


def seeds_interval(shares: Sequence[float], num_plays: int) -> Interval:
    """Return the 95% interval of the mean share of two or more seeds.

    It is Student's interval, widened to contain Wilson's interval of all plays together. Seeds
    with equal shares by chance therefore do not give an interval that is too narrow.
    """
    mean = fmean(shares)
    half = student_quantile(len(shares) - 1) * stdev(shares) / math.sqrt(len(shares))
    low, high = score_interval(mean, num_plays)
    return max(0.0, min(low, mean - half)), min(1.0, max(high, mean + half))

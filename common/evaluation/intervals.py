"""Confidence intervals of success and scores."""

import math

Z95 = 1.959964  # of the normal distribution, two-sided


def wilson_interval(num_solved: int, num_plays: int) -> tuple[float, float]:
    """Return the 95% score interval of a share of one or more plays.

    Source: Wilson (1927), J. Am. Stat. Assoc. 22:209, without continuity correction.
    """
    return score_interval(num_solved / num_plays, num_plays)


def score_interval(mean: float, trials: float) -> tuple[float, float]:
    """Return Wilson's interval around a mean of so many independent trials, all in [0, 1]."""
    z2 = Z95**2
    centre = mean + z2 / (2 * trials)
    spread = Z95 * math.sqrt((mean * (1 - mean) + z2 / (4 * trials)) / trials)
    scale = 1 + z2 / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)

"""How old data may get, and how much must be in flight: laws of the measured pace."""

import math


def lag_bound(
    max_lag_steps: int,
    *,
    max_stretch: float,
    episode_s: float | None,
    step_period_s: float | None,
    max_ahead_steps: int,
) -> int:
    """Return the most steps of lag that an episode may have when it is consumed.

    An episode that takes five steps' time is five versions old when it arrives, and may wait
    `max_ahead_steps` more. A bound below that would discard every long episode and keep the short
    ones, so the bound follows the prediction, between the configured one and its stretch.

    Args:
        max_lag_steps: the configured bound; never tightened here.
        max_stretch: >= 1; the bound grows to at most this many times the configured one.
        episode_s: seconds that nearly all episodes of this kind stay below; None: not known.
        step_period_s: seconds between two steps; None: not known.
        max_ahead_steps: steps' worth of groups that may wait at the learner.

    Example: 4 steps configured, stretch 2, episodes of 50 s, steps of 10 s, one ahead -> 6.
    """
    if episode_s is None or not step_period_s:
        return max_lag_steps
    predicted = math.ceil(episode_s / step_period_s) + max_ahead_steps
    return min(max(predicted, max_lag_steps), int(max_lag_steps * max_stretch))


def needed_ahead_steps(
    *, busy_s: float | None, group_s: float | None, signal_frac: float, margin: float
) -> int:
    """Return how many batches must be open or ready beside that in training; 0: not known.

    A step frees the places of a whole batch at once; the groups that take them are ready
    `group_s` later, or later still where some teach nothing and are replaced. The learner never
    waits if that is done before the batches opened earlier are used up.

    Args:
        busy_s: seconds from a batch to its published weights, waiting left out.
        group_s: seconds from the opening of a group to its last member at the learner.
        signal_frac: share of groups that are worth training on, > 0.
        margin: on `group_s`, which is a mean.

    Example: steps of 2 s, groups of 3 s of which half teach something, margin 1.5 -> 5.
    """
    if not busy_s or group_s is None:
        return 0
    return max(1, math.ceil(margin * group_s / (busy_s * signal_frac)))


def lease_cap(
    *, episodes_per_s: float | None, step_period_s: float | None, num_steps: int
) -> int | None:
    """Return the most episodes that an actor may hold: what it finishes in so many steps' time.

    None if that is not known. One at least, so that the actor's speed stays measured. The gate
    holds `max_ahead_steps` + 1 batches in flight, so with more steps here than that, only actors
    slower than the mean are bound.
    """
    if episodes_per_s is None or step_period_s is None:
        return None
    return max(1, math.ceil(episodes_per_s * step_period_s * num_steps))

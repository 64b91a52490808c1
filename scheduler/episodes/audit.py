"""The selection audit: outcomes by environment, subset, horizon and length of the episode.

The length is counted in turns and in sampled tokens. Each sampled token has the outcome of its
episode, or is stale beside trained ones (`learner.partial_episodes`).

Staleness and deadlines drop long episodes first. A policy that learns only from quick episodes
learns to be quick. So the shares of dropped episodes are counted, shown, and warned about.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from common.wire.messages import Outcome
from scheduler.state import FIXED

logger = logging.getLogger(__name__)

NUM_BUCKETS = 4  # Quarters of the horizon.
UNKNOWN = 0  # Bucket of episodes that never arrived.
ENDED = "ended"  # Column of episodes that were not trained only because the run was over.
RUN_ENDED = "run_ended"  # Cause that marks an outcome as due only to the end of the run.
DROPPED = (Outcome.STALE.value, Outcome.FAILED.value)
COLUMNS = (*(outcome.value for outcome in Outcome), ENDED)
MIN_EPISODES = 50  # Least number of short episodes, and of long ones, for a warning.
MIN_DROPPED = 10  # Least number of dropped long episodes for a warning.
MIN_EXCESS = 0.02  # Least difference of the dropped shares, long minus short, for a warning.
WARN_Z = 3.0
SHORTEST_BITS = 7  # The first length class holds up to 2**7 sampled tokens, the next ones double.


@dataclass(frozen=True, slots=True)
class Cell:
    """Key of the audit: episodes with the same key are counted together."""

    env: str
    subset: str
    horizon: int  # Most turns.
    bucket: int  # Quarter of the horizon in which the episode ended, 1..NUM_BUCKETS, or UNKNOWN.
    # Sampled tokens as the exponent of the next power of two, or UNKNOWN.
    length: int = UNKNOWN


def bucket_of(num_turns: int, horizon: int) -> int:
    """Return the quarter of the horizon in which an episode ended.

    Example: horizon 10 -> turns 1-2: 1, 3-5: 2, 6-7: 3, 8-10: 4. An episode without a turn is in 1.
    """
    return min(NUM_BUCKETS, max(1, math.ceil(NUM_BUCKETS * num_turns / horizon)))


def turns_of(bucket: int, horizon: int) -> str:
    """Return the turns of a bucket as text, such as "6-7"."""
    if bucket == UNKNOWN:
        return "unknown"
    low = (bucket - 1) * horizon // NUM_BUCKETS + 1
    return f"{low}-{bucket * horizon // NUM_BUCKETS}"


def length_class_of(num_tokens: int) -> int:
    """Return the length class of an episode: the exponent of the next power of two.

    Example: 1 to 128 sampled tokens -> 7, 129 to 256 -> 8. 0 tokens -> UNKNOWN.
    """
    return max(SHORTEST_BITS, (num_tokens - 1).bit_length()) if num_tokens else UNKNOWN


def tokens_of(length: int) -> str:
    """Return the sampled tokens of a length class as text, such as "129-256"."""
    if length == UNKNOWN:
        return "unknown"
    low = 1 if length == SHORTEST_BITS else 2 ** (length - 1) + 1
    return f"{low}-{2**length}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Long episodes (past half of the horizon) against short ones of the same kind."""

    env: str
    horizon: int
    num_short: int
    num_short_dropped: int
    num_long: int
    num_long_dropped: int

    @property
    def z(self) -> float:
        """Two-proportion z statistic; > 0 if long episodes are dropped more, 0 without data."""
        num = self.num_short + self.num_long
        pooled = (self.num_short_dropped + self.num_long_dropped) / num if num else 0.0
        if not (self.num_short and self.num_long and 0 < pooled < 1):
            return 0.0
        variance = pooled * (1 - pooled) * (1 / self.num_short + 1 / self.num_long)
        return self.excess / math.sqrt(variance)

    @property
    def excess(self) -> float:
        """Dropped share of long episodes minus that of short ones."""
        long = self.num_long_dropped / max(self.num_long, 1)
        return long - self.num_short_dropped / max(self.num_short, 1)

    @property
    def is_biased(self) -> bool:
        """True if long episodes are dropped significantly more often."""
        is_enough = min(self.num_short, self.num_long) >= MIN_EPISODES
        is_enough = is_enough and self.num_long_dropped >= MIN_DROPPED
        return is_enough and self.excess >= MIN_EXCESS and self.z >= WARN_Z


@dataclass(slots=True)
class SelectionAudit:
    """Counts every settled training episode and each of its sampled tokens once, in its cell."""

    cells: dict[Cell, Counter[str]] = field(default_factory=dict[Cell, Counter[str]])  # Episodes.
    tokens: dict[Cell, Counter[str]] = field(default_factory=dict[Cell, Counter[str]])
    _warned: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]], metadata=FIXED)

    def add(
        self, cell: Cell, outcome: str, cause: str, *, num_tokens: int = 0, num_stale: int = 0
    ) -> None:
        """Count an outcome.

        Args:
            num_tokens: sampled tokens of the episode.
            num_stale: those of them that were stale although the episode was trained.
        """
        column = _column(outcome, cause)
        self.cells.setdefault(cell, Counter())[column] += 1
        counts = self.tokens.setdefault(cell, Counter())
        # An episode that was given up before its arrival has no number of tokens.
        num_stale = min(num_stale, num_tokens)
        counts[column] += num_tokens - num_stale
        counts[Outcome.STALE.value] += num_stale

    def take_back(self, cell: Cell, outcome: str, cause: str, *, num_tokens: int = 0) -> None:
        """Undo `add`: the learner reports another outcome than the provisional one."""
        column = _column(outcome, cause)
        self.cells[cell][column] -= 1
        # A state of an older version has no tokens.
        self.tokens.setdefault(cell, Counter())[column] -= num_tokens

    def total(self) -> Counter[str]:
        """Return the number of episodes by outcome; those cut off by the run's end are separate."""
        return sum(self.cells.values(), Counter())

    def compare(self) -> Iterator[Comparison]:
        """Yield one comparison per environment and horizon, over its subsets."""
        sides: dict[tuple[str, int], list[int]] = {}
        for cell, counts in self.cells.items():
            if cell.bucket == UNKNOWN:
                continue
            # Counts in the order of `Comparison`.
            side = sides.setdefault((cell.env, cell.horizon), [0, 0, 0, 0])
            first = 2 if 2 * cell.bucket > NUM_BUCKETS else 0
            side[first] += counts.total() - counts[ENDED]
            side[first + 1] += sum(counts[name] for name in DROPPED)
        for (env, horizon), side in sorted(sides.items()):
            yield Comparison(env, horizon, *side)

    def warn(self) -> None:
        """Log, once per environment and horizon, that long episodes are dropped more often."""
        for comparison in self.compare():
            key = (comparison.env, comparison.horizon)
            if not comparison.is_biased or key in self._warned:
                continue
            self._warned.add(key)
            logger.warning(
                "long episodes are dropped more often than short ones env=%s horizon=%d"
                " dropped_long=%d/%d dropped_short=%d/%d z=%.1f: raise learner.max_lag_steps or"
                " scheduler.max_stretch, or add actors",
                comparison.env,
                comparison.horizon,
                comparison.num_long_dropped,
                comparison.num_long,
                comparison.num_short_dropped,
                comparison.num_short,
                comparison.z,
            )

    def report(self) -> dict[str, Any]:
        """Return the content of selection.json: `rows`, `lengths` and `comparisons`."""
        return {
            "rows": selection_rows(self.cells),
            "lengths": length_rows(self.cells, self.tokens),
            "comparisons": [
                asdict(pair) | {"z": round(pair.z, 3), "is_biased": pair.is_biased}
                for pair in self.compare()
            ],
        }


def _column(outcome: str, cause: str) -> str:
    """Return the column of an outcome; episodes that the run's end cut off have their own."""
    return ENDED if cause == RUN_ENDED else outcome


def selection_rows(cells: dict[Cell, Counter[str]]) -> list[dict[str, Any]]:
    """Return P(dropped | environment, subset, horizon, length) as rows, in that order.

    `num` does not count episodes cut off by the run's end. `dropped_frac` is 0 if `num` is 0.
    """
    by_turns: dict[tuple[str, str, int, int], Counter[str]] = {}
    for cell, counts in cells.items():
        key = (cell.env, cell.subset, cell.horizon, cell.bucket)
        by_turns.setdefault(key, Counter()).update(counts)
    return [
        {
            "env": env,
            "subset": subset,
            "horizon": horizon,
            "turns": turns_of(bucket, horizon),
            "num": counts.total() - counts[ENDED],
            **{name: counts[name] for name in COLUMNS},
            "dropped_frac": _dropped_frac(counts),
        }
        for (env, subset, horizon, bucket), counts in sorted(by_turns.items())
    ]


def length_rows(
    cells: dict[Cell, Counter[str]], tokens: dict[Cell, Counter[str]]
) -> list[dict[str, Any]]:
    """Return the dropped shares of episodes and of sampled tokens by length class, in order.

    `num` and `sampled_tokens` do not count episodes cut off by the run's end.
    """
    episodes: dict[int, Counter[str]] = {}
    sampled: dict[int, Counter[str]] = {}
    for cell, counts in cells.items():
        episodes.setdefault(cell.length, Counter()).update(counts)
        sampled.setdefault(cell.length, Counter()).update(tokens.get(cell, {}))
    return [
        {
            "tokens": tokens_of(length),
            "num": counts.total() - counts[ENDED],
            **{name: counts[name] for name in COLUMNS},
            "dropped_frac": _dropped_frac(counts),
            "sampled_tokens": sampled[length].total() - sampled[length][ENDED],
            "trained_tokens": sampled[length][Outcome.TRAINED.value],
            "stale_tokens": sampled[length][Outcome.STALE.value],
            "dropped_tokens_frac": _dropped_frac(sampled[length]),
        }
        for length, counts in sorted(episodes.items())
    ]


def _dropped_frac(counts: Counter[str]) -> float:
    """Return the dropped share of episodes or tokens that the run's end did not cut off."""
    num = counts.total() - counts[ENDED]
    return round(sum(counts[name] for name in DROPPED) / num, 4) if num else 0.0

"""The counters of a simulation, and the figures derived from them."""

from bisect import bisect_right
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

WARM_UP_FRAC = 0.1  # Fraction of the steps that rates leave out.


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The prediction of one simulation. Rates leave the first steps out."""

    mode: str
    num_actors: int
    simulated_h: float
    num_steps: int
    num_episodes: int  # Number of delivered episodes.
    steps_per_h: float
    episodes_per_s: float
    trained_per_h: float  # Episodes per hour.
    lag_mean: float  # Mean over turns.
    lag_counts: dict[int, int]  # Lag of an episode's oldest turn at consumption, with counts.
    learner_wait_frac: float  # Fraction of the time.
    actor_idle_frac: float  # Fraction of the time without any episode.
    filtered_frac: float  # Fraction of the settled episodes, like the next two.
    stale_frac: float
    failed_frac: float
    num_reissued: int
    num_deaths: int
    short_batch_frac: float  # Fraction of the steps.
    stopped_by: str  # Error that would have ended a real run, or "".

    def to_json(self) -> dict[str, Any]:
        counts = {str(lag): num for lag, num in sorted(self.lag_counts.items())}
        return {**asdict(self), "lag_counts": counts}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """The counters of one simulated step."""

    ended_s: float
    wait_s: float
    num_arrived: int  # Episodes since the start.
    num_trained: int  # Episodes of this step.
    lag_sum: float  # Sum over the turns of this step.
    num_turns: int


@dataclass(slots=True)
class SimulationStatistics:
    """The counters of a whole simulation."""

    published_s: list[float] = field(default_factory=list)  # Publication time of version i + 1.
    steps: list[SimulatedStep] = field(default_factory=list)
    lags: Counter[int] = field(default_factory=Counter)
    num_arrived: int = 0
    num_short: int = 0  # Number of incomplete batches.

    def mean_version(self, version: int, started_s: float, ended_s: float) -> float:
        """Return the time-averaged version over an episode that started with `version`."""
        last = bisect_right(self.published_s, ended_s)
        if last <= version or ended_s <= started_s:
            return float(version)
        passed = sum(ended_s - each for each in self.published_s[version:last])
        return version + passed / (ended_s - started_s)

    def add_step(self, step: SimulatedStep) -> None:
        self.published_s.append(step.ended_s)
        self.steps.append(step)

    def rates(self) -> dict[str, float]:
        """Return the means over the steps after the warm-up; all 0 with fewer than two."""
        first = max(0, int(WARM_UP_FRAC * len(self.steps)))
        if len(self.steps) - first < 2:
            names = ("steps_per_h", "episodes_per_s", "trained_per_h", "lag_mean")
            return dict.fromkeys((*names, "learner_wait_frac"), 0.0)
        before = self.steps[first]
        later = self.steps[first + 1 :]
        seconds = later[-1].ended_s - before.ended_s
        num_turns = sum(step.num_turns for step in later)
        return {
            "steps_per_h": 3600.0 * len(later) / seconds,
            "episodes_per_s": (later[-1].num_arrived - before.num_arrived) / seconds,
            "trained_per_h": 3600.0 * sum(step.num_trained for step in later) / seconds,
            "lag_mean": sum(step.lag_sum for step in later) / max(num_turns, 1),
            "learner_wait_frac": sum(step.wait_s for step in later) / seconds,
        }

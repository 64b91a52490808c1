"""The time shares of a run's last steps: a pure function over its metrics."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MIN_STEPS = 3
MIN_CPU_S = 10.0  # Minimum time between the two processor measurements that are compared.
IDLE_CORE = 0.75  # Free share of one core that another process needs.
FAIR_FRAC = 0.5  # Share of all cores that a run gets at least when other programs compete for them.
NO_ROLES = ("cpu/cores", "cpu/per_trained_episode_s", "cpu/others_s")
CROWDED_FRAC = 0.2  # Share of all cores' time, used by other programs, that counts as crowded.


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Means per step, in seconds, and shares of time."""

    num_steps: int
    period_s: float  # Time from one step to the next.
    wait_s: float  # Time that the learner waits for a batch.
    train_s: float  # Time for forward, backward and update.
    slot_busy_frac: float  # Share of the slots' time with an episode.
    engine_frac: float  # Share of the episodes' time that waits for tokens.
    env_frac: float  # Share of the episodes' time that waits for the environment.
    num_slots: float
    stale_frac: float = 0.0  # Share of the consumed episodes that were stale.
    ahead_steps: float | None = None  # Bound of the gate that the learner sets from the ESS.
    cores: float | None = None  # Cores of the machine; None: unknown, or the GPUs do the work.
    cpu_frac: float = 0.0  # Share of all cores' time that the roles use.
    engine_cpu_frac: float = 0.0  # The part of `cpu_frac` that the engines use.
    others_frac: float = 0.0  # Share of all cores' time that other programs use.

    @property
    def wait_frac(self) -> float:
        """Share of the time that the learner waits for a batch."""
        return self.wait_s / self.period_s

    @property
    def busy_s(self) -> float:
        """Time of a step in which the learner does not wait."""
        return self.period_s - self.wait_s

    @property
    def has_idle_core(self) -> bool:
        """Whether a core is free for another computing process; true if unknown."""
        return self.cores is None or self.idle_frac * self.cores >= IDLE_CORE

    @property
    def idle_frac(self) -> float:
        """Unused share of all cores' time."""
        return max(0.0, 1.0 - self.cpu_frac - self.others_frac)

    @property
    def is_crowded(self) -> bool:
        """Whether other programs use the processor time that this run needs to become faster."""
        return not self.has_idle_core and self.others_frac >= CROWDED_FRAC

    def within_cores(self, seconds: float, cpu_frac: float | None = None) -> float:
        """Return `seconds`, raised to the minimum time of a step on the available cores.

        Other programs keep their share, but at least `FAIR_FRAC` of the machine is available: the
        system divides cores evenly among programs that compete for them.

        Args:
            cpu_frac: share of all cores that a step uses now; None: the measured share of the
                roles.
        """
        own = self.cpu_frac if cpu_frac is None else cpu_frac
        return max(seconds, self.period_s * own / max(1.0 - self.others_frac, FAIR_FRAC))


def measure(lines: Sequence[Mapping[str, float | None]]) -> Waits | None:
    """Return the means over steps; None if too few steps have a `wait/batch_s`."""
    steps = [each for each in lines if _value(each, "wait/batch_s") is not None]
    pairs = [
        (now, dt)
        for before, now in itertools.pairwise(steps)
        if (dt := (_value(now, "time_s") or 0.0) - (_value(before, "time_s") or 0.0)) > 0
    ]
    if len(pairs) + 1 < MIN_STEPS:
        return None
    time_s = sum(dt for _, dt in pairs)
    held = {"wall": 0.0, "generate": 0.0, "env": 0.0}
    slot_s = num_consumed = 0.0
    for now, dt in pairs:
        num = _value(now, "episodes/arrived") or 0.0
        for name in held:
            held[name] += num * (_value(now, f"episodes/{name}_s_mean") or 0.0)
        num_consumed += num
        slot_s += dt * (_value(now, "actor/concurrency") or 0.0)
    return Waits(
        num_steps=len(pairs),
        period_s=time_s / len(pairs),
        wait_s=min(time_s, _total(pairs, "wait/batch_s")) / len(pairs),
        train_s=_total(pairs, "train/step_s") / len(pairs),
        slot_busy_frac=min(1.0, held["wall"] / slot_s) if slot_s else 1.0,
        engine_frac=held["generate"] / held["wall"] if held["wall"] else 0.0,
        env_frac=held["env"] / held["wall"] if held["wall"] else 0.0,
        num_slots=slot_s / time_s,
        stale_frac=_total(pairs, "groups/stale_episodes") / max(1.0, num_consumed),
        ahead_steps=_value(pairs[-1][0], "controller/max_ahead_steps"),
        **_processors(steps),
    )


def _processors(steps: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """Return the use of the cores between the first and the last measurement."""
    known = [each for each in steps if _value(each, "cpu/cores")]
    if len(known) < 2 or any(_value(each, "train/is_cuda") for each in known[-1:]):
        return {}
    first = known[0]
    last = known[-1]
    time_s = (_value(last, "time_s") or 0.0) - (_value(first, "time_s") or 0.0)
    if time_s < MIN_CPU_S:
        return {}
    names = [name for name in last if name.startswith("cpu/") and name not in NO_ROLES]
    used = {n: max(0.0, (_value(last, n) or 0.0) - (_value(first, n) or 0.0)) for n in names}
    cores = _value(last, "cpu/cores") or 1.0
    return {
        "cores": cores,
        "cpu_frac": min(1.0, sum(used.values()) / (cores * time_s)),
        "others_frac": min(1.0, _others_s(first, last) / (cores * time_s)),
        "engine_cpu_frac": min(1.0, used.get("cpu/engine_s", 0.0) / (cores * time_s)),
    }


def _others_s(first: Mapping[str, float | None], last: Mapping[str, float | None]) -> float:
    """Return the processor seconds of other programs between two steps."""
    name = "cpu/others_s"  # Runs of older versions do not have this metric.
    return max(0.0, (_value(last, name) or 0.0) - (_value(first, name) or 0.0))


def _value(line: Mapping[str, float | None], name: str) -> float | None:
    """Return a metric of a step; None if the step lacks it."""
    found = line.get(name)
    return float(found) if isinstance(found, int | float) else None


def _total(pairs: Sequence[tuple[Mapping[str, float | None], float]], name: str) -> float:
    """Return the sum of a metric over steps."""
    return sum(_value(line, name) or 0.0 for line, _ in pairs)

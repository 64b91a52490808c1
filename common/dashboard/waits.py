"""Where the time of a run's last steps went: a pure function over its metrics."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MIN_STEPS = 3
MIN_CPU_S = 10.0  # between two looks at the processors that are far enough apart
IDLE_CORE = 0.75  # of a core's time, without which one more process takes from the others
FAIR_FRAC = 0.5  # of all cores' time, that a run gets at least where others want as much
NO_ROLES = ("cpu/cores", "cpu/per_trained_episode_s", "cpu/others_s")
CROWDED_FRAC = 0.2  # of the cores' time, which other programs take, and nothing is left of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Means of one step, in seconds; fractions of its time."""

    num_steps: int
    period_s: float  # from one step to the next
    wait_s: float  # of the learner for a batch
    train_s: float  # forward, backward, update
    slot_busy_frac: float  # of the actors' slots that hold an episode
    engine_frac: float  # of the episodes' time: waiting for tokens
    env_frac: float  # of the episodes' time: waiting for the environment
    num_slots: float
    stale_frac: float = 0.0  # of the episodes consumed
    ahead_steps: float | None = None  # that the learner lets the gate open, as ESS allows
    cores: float | None = None  # of the machine; None: not known, or GPUs do the work
    cpu_frac: float = 0.0  # of all cores' time that the roles use
    engine_cpu_frac: float = 0.0  # of it, the engines
    others_frac: float = 0.0  # of all cores' time that other programs use

    @property
    def wait_frac(self) -> float:
        """Share of the time that the learner waits for a batch."""
        return self.wait_s / self.period_s

    @property
    def busy_s(self) -> float:
        """What a step takes of the learner beside waiting."""
        return self.period_s - self.wait_s

    @property
    def has_idle_core(self) -> bool:
        """Whether one more process that computes would find a core; yes if it is not known."""
        return self.cores is None or self.idle_frac * self.cores >= IDLE_CORE

    @property
    def idle_frac(self) -> float:
        """Share of all cores' time that nobody uses."""
        return max(0.0, 1.0 - self.cpu_frac - self.others_frac)

    @property
    def is_crowded(self) -> bool:
        """Whether other programs take what this run would need to become faster."""
        return not self.has_idle_core and self.others_frac >= CROWDED_FRAC

    def within_cores(self, seconds: float, cpu_frac: float | None = None) -> float:
        """Return no less than a step that uses `cpu_frac` of the cores now takes at its fastest.

        What others use stays theirs, but half of the machine is ours: of programs that all want
        it, the system gives none the larger share. None: what the roles use.
        """
        own = self.cpu_frac if cpu_frac is None else cpu_frac
        return max(seconds, self.period_s * own / max(1.0 - self.others_frac, FAIR_FRAC))


def measure(lines: Sequence[Mapping[str, float | None]]) -> Waits | None:
    """Return the means over steps; None for too few, or none that say how long they waited."""
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
    """Return cores and what was used of them, between the first and the last look that is known."""
    known = [each for each in steps if _value(each, "cpu/cores")]
    if len(known) < 2 or any(_value(each, "train/is_cuda") for each in known[-1:]):
        return {}
    first, last = known[0], known[-1]
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
    name = "cpu/others_s"  # runs of older versions tell none
    return max(0.0, (_value(last, name) or 0.0) - (_value(first, name) or 0.0))


def _value(line: Mapping[str, float | None], name: str) -> float | None:
    found = line.get(name)
    return float(found) if isinstance(found, int | float) else None


def _total(pairs: Sequence[tuple[Mapping[str, float | None], float]], name: str) -> float:
    return sum(_value(line, name) or 0.0 for line, _ in pairs)

"""The limit of a run in one sentence, from its measurements: a pure function over its metrics.

Two measurements decide: whether the learner waits for batches, and whether the actors' slots hold
episodes. If the learner never waits, the learner is the limit. If it waits while slots are empty,
the gate is the limit. If it waits while slots are full, the limit is the environment or the engine:
the one in which episodes spend more of their time. If a large share of the episodes becomes stale,
the bound on lag is the limit. The free processor time bounds the gain of each advice. It follows
from the roles' processor seconds and the number of cores.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

from common.text import counted

MIN_STEPS = 3
MIN_CPU_S = 10.0  # Minimum time between the two processor measurements that are compared.
IDLE_CORE = 0.75  # Free share of one core that another process needs.
FAIR_FRAC = 0.5  # Share of all cores that a run gets at least when other programs compete for them.
NO_ROLES = ("cpu/cores", "cpu/per_trained_episode_s", "cpu/others_s")
CROWDED_FRAC = 0.2  # Share of all cores' time, used by other programs, that counts as crowded.
BUSY_FRAC = 0.15  # Largest share of time that the learner waits and still is the limit.
IDLE_FRAC = 0.40  # Share of the slots' time that is empty when the gate is the limit.
MIN_GAIN = 0.02  # Smallest gain of throughput worth advising.
STALE_FRAC = 0.15  # Share of stale episodes from which the bound on lag is the limit.
# Efficiency of an added rank: gradients are summed, and microbatches are uneven.
RANKS_EFFICIENCY = 0.9


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
        used_frac = self.cpu_frac if cpu_frac is None else cpu_frac
        return max(seconds, self.period_s * used_frac / max(1.0 - self.others_frac, FAIR_FRAC))


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
    seconds = {"wall": 0.0, "generate": 0.0, "env": 0.0}
    slot_s = num_consumed = 0.0
    for now, dt in pairs:
        num = _value(now, "episodes/arrived") or 0.0
        for name in seconds:
            seconds[name] += num * (_value(now, f"episodes/{name}_s_mean") or 0.0)
        num_consumed += num
        slot_s += dt * (_value(now, "actor/concurrency") or 0.0)
    return Waits(
        num_steps=len(pairs),
        period_s=time_s / len(pairs),
        wait_s=min(time_s, _total(pairs, "wait/batch_s")) / len(pairs),
        train_s=_total(pairs, "train/step_s") / len(pairs),
        slot_busy_frac=min(1.0, seconds["wall"] / slot_s) if slot_s else 1.0,
        engine_frac=seconds["generate"] / seconds["wall"] if seconds["wall"] else 0.0,
        env_frac=seconds["env"] / seconds["wall"] if seconds["wall"] else 0.0,
        num_slots=slot_s / time_s,
        stale_frac=_total(pairs, "groups/stale_episodes") / max(1.0, num_consumed),
        ahead_steps=_value(pairs[-1][0], "controller/max_ahead_steps"),
        **_processors(steps),
    )


def _processors(steps: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """Return the use of the cores between the first and the last measurement."""
    measured = [each for each in steps if _value(each, "cpu/cores")]
    if len(measured) < 2 or any(_value(each, "train/is_cuda") for each in measured[-1:]):
        return {}
    first = measured[0]
    last = measured[-1]
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
    value = line.get(name)
    return float(value) if isinstance(value, int | float) else None


def _total(pairs: Sequence[tuple[Mapping[str, float | None], float]], name: str) -> float:
    """Return the sum of a metric over steps."""
    return sum(_value(line, name) or 0.0 for line, _ in pairs)


class Bottleneck(StrEnum):
    """The component that limits a run."""

    UNKNOWN = "unknown"
    LEARNER = "learner"
    ENGINE = "engine"
    ENVIRONMENT = "environment"
    GATE = "gate"
    SYNC = "sync"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingAdvice:
    """A setting, and the expected gain in episodes per second: 0.6 is +60 %."""

    knob: str
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputVerdict:
    """The limit, a sentence about it with numbers, and advice, the largest gain first."""

    bound: Bottleneck
    sentence: str
    advice: list[SettingAdvice] = field(default_factory=list[SettingAdvice])
    waits: Waits | None = None


def judge(
    lines: Sequence[Mapping[str, float | None]],
    config: Mapping[str, Any],
    status: Mapping[str, Any] | None = None,
) -> ThroughputVerdict:
    """Return the limit of a run.

    Args:
        lines: lines of metrics.jsonl, of consecutive steps in order.
        config: the run's config as nested maps; missing keys have their defaults.
        status: the scheduler's status; its notice and its reason for a closed gate are quoted.
    """
    if notice := (status or {}).get("notice"):
        return ThroughputVerdict(
            bound=Bottleneck.UNKNOWN, sentence=str(notice), waits=measure(lines)
        )
    waits = measure(lines)
    if waits is None:
        text = (
            f"too early to name the run's limit: {MIN_STEPS} steps with measured waits are needed"
        )
        return ThroughputVerdict(
            bound=Bottleneck.UNKNOWN, sentence=f"{_before(lines, status or {})}{text}"
        )
    bound = bound_of(waits, is_sync=_value_of(config, "train", "mode", "async") == "sync")
    advice = sorted(_advice(bound, waits, config), key=lambda each: -each.gain)
    useful = [each for each in advice if each.gain >= MIN_GAIN]
    gate = str((status or {}).get("gate") or "") if bound is Bottleneck.GATE else ""
    return ThroughputVerdict(
        bound=bound,
        sentence=f"{_finding(bound, waits, gate)}; {_advice_text(useful, waits)}",
        advice=useful,
        waits=waits,
    )


def _before(lines: Sequence[Mapping[str, float | None]], status: Mapping[str, Any]) -> str:
    """Return the activity before the first step; "" if unknown.

    The gate is no limit yet: it closes as intended once the first batches are under way.
    """
    if lines or status.get("phase") != "train":
        return ""
    if status.get("learner") and not _value_of(status, "learner", "waiting_for", ""):
        return "the learner trains on the first batch; "
    num = [_count(status, "groups", name, 0) for name in ("ready", "open")]
    return f"the actors play the first batch ({counted(num[0], 'group')} ready, {num[1]} open); "


def bound_of(waits: Waits, *, is_sync: bool) -> Bottleneck:
    """Return the limit according to the measured waits."""
    if waits.wait_frac <= BUSY_FRAC:
        return Bottleneck.LEARNER
    if is_sync:
        return Bottleneck.SYNC
    if 1.0 - waits.slot_busy_frac >= IDLE_FRAC or waits.stale_frac >= STALE_FRAC:
        return Bottleneck.GATE
    return Bottleneck.ENVIRONMENT if waits.env_frac > waits.engine_frac else Bottleneck.ENGINE


def _advice(bound: Bottleneck, waits: Waits, config: Mapping[str, Any]) -> list[SettingAdvice]:
    """Return every useful setting with an upper bound of its gain."""
    ahead = _count(config, "scheduler", "max_ahead_steps", 1)
    lag = _count(config, "learner", "max_lag_steps", 4)
    if bound is Bottleneck.LEARNER:
        knobs = _learner_knobs(waits, config)
    elif bound is Bottleneck.SYNC:
        knobs = {"train.mode=async": max(waits.busy_s, waits.wait_s)}
    elif bound is Bottleneck.GATE and waits.stale_frac >= STALE_FRAC:
        knobs = {f"learner.max_lag_steps={lag + 1}": waits.period_s * (1.0 - waits.stale_frac)}
    elif bound is Bottleneck.GATE:
        is_held_back = waits.ahead_steps is not None and waits.ahead_steps < ahead
        # Seconds for a step's episodes if no slot were empty.
        filled_s = waits.period_s * waits.slot_busy_frac
        # Seconds of a step with one more batch under way.
        more_s = waits.period_s * (ahead + 1) / (ahead + 2)
        fewer_s = waits.period_s if is_held_back else max(waits.busy_s, filled_s, more_s)
        knobs = {f"scheduler.max_ahead_steps={ahead + 1}": waits.within_cores(fewer_s)}
    else:
        knobs = _actor_knobs(bound, waits, config)
    return [
        SettingAdvice(knob=k, gain=waits.period_s / max(s, 1e-9) - 1.0) for k, s in knobs.items()
    ]


def _learner_knobs(waits: Waits, config: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a step by setting: more ranks first, then fewer passes over a batch."""
    ranks = _count(config, "learner", "num_ranks", 1) or 1
    filled_s = waits.period_s * waits.slot_busy_frac
    knobs: dict[str, float] = {}
    if waits.has_idle_core:
        larger = ranks + (_count(config, "learner", "sequence_ranks", 1) or 1)
        shared_s = waits.busy_s - waits.train_s * (1.0 - ranks / larger / RANKS_EFFICIENCY)
        knobs[f"learner.num_ranks={larger}"] = waits.within_cores(max(shared_s, filled_s))
    for name in ("ppo_epochs", "num_minibatches"):
        if (passes := _count(config, "learner", name, 1)) > 1:
            fewer_s = waits.busy_s - waits.train_s * (1.0 - (passes // 2) / passes)
            knobs[f"learner.{name}={passes // 2}"] = max(fewer_s, filled_s)
    return knobs


def _actor_knobs(bound: Bottleneck, waits: Waits, config: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a step by setting, when every slot holds an episode.

    More slots help an engine that uses all configured slots. An engine that uses fewer slots has
    already reached its own limit.
    """
    actors = _count(config, "actor", "num_actors", 1) or 1
    engines = actors * _count(config, "actor", "engines_per_process", 1)
    slots = max(1, round(waits.num_slots / engines))
    knobs: dict[str, float] = {}
    if bound is Bottleneck.ENVIRONMENT or slots >= _count(config, "actor", "max_concurrent", 64):
        halved_s = max(waits.busy_s, waits.period_s / 2)
        # A larger batch takes the engine no more processor time.
        spared = waits.cpu_frac - waits.engine_cpu_frac / 2
        if bound is Bottleneck.ENVIRONMENT or not waits.is_crowded:
            knobs[f"actor.max_concurrent={2 * slots}"] = waits.within_cores(halved_s, spared)
    if bound is Bottleneck.ENGINE and waits.has_idle_core:
        fewer_s = max(waits.busy_s, waits.period_s * actors / (actors + 1))
        knobs[f"actor.num_actors={actors + 1}"] = waits.within_cores(fewer_s)
    return knobs


def _finding(bound: Bottleneck, waits: Waits, gate: str) -> str:
    """Return the sentence about the limit, with its numbers."""
    step = f"of each step of {waits.period_s:.3g} s"
    busy = f"{waits.busy_s:.3g} s"
    wait = f"{waits.wait_s:.3g} s"
    idle = 1.0 - waits.slot_busy_frac
    if bound is Bottleneck.LEARNER:
        share = 1.0 - waits.wait_frac
        cores = "" if waits.has_idle_core else f"; all {_busy(waits)}"
        empty = f"{idle:.0%} of the actors' slots are empty{cores}"
        return f"learner-bound: the learner computes for {share:.0%} ({busy}) {step}; {empty}"
    waited = f"the learner waits {wait} {step}"
    if bound is Bottleneck.SYNC:
        return f"synchronous: {waited} for episodes, and the actors are idle while it trains"
    if bound is Bottleneck.GATE and waits.stale_frac >= STALE_FRAC:
        stale = f"{waits.stale_frac:.0%} of the episodes are stale"
        return f"learner.max_lag_steps is too small: {stale}; {waited}"
    if bound is Bottleneck.GATE:
        why = f" ({gate})" if gate else ""
        return f"gate too tight: {waited}, and {idle:.0%} of the actors' slots are empty{why}"
    name = "environment" if bound is Bottleneck.ENVIRONMENT else "engine"
    share = waits.env_frac if bound is Bottleneck.ENVIRONMENT else waits.engine_frac
    cores = "" if waits.has_idle_core else f"; {1.0 - waits.idle_frac:.0%} of {_busy(waits)}"
    return f"{name}-bound: episodes spend {share:.0%} of their time in the {name}; {waited}{cores}"


def _busy(waits: Waits) -> str:
    """Return the text about cores that are in use."""
    by = f", {waits.others_frac:.0%} by other programs" if waits.is_crowded else ""
    return f"{counted(round(waits.cores or 0), 'core is', 'cores are')} busy{by}"


def _advice_text(advice: Sequence[SettingAdvice], waits: Waits) -> str:
    """Return the advice as one sentence."""
    if not advice and waits.is_crowded:
        return "no processor time is free: stop other programs, or run on more cores"
    if not advice:
        return "no single setting is expected to gain more than 2 %"
    return ", ".join(f"{each.knob} gains at most {each.gain:.0%}" for each in advice)


def _value_of(config: Mapping[str, Any], section: str, key: str, default: Any) -> Any:
    """Return the value of a key in a section; `default` if it is missing."""
    keys = config.get(section)
    return cast(dict[str, Any], keys).get(key, default) if isinstance(keys, dict) else default


def _count(config: Mapping[str, Any], section: str, key: str, default: int) -> int:
    """Return a whole number of a file; the default where the file has no number there."""
    number = _value_of(config, section, key, default)
    return int(number) if isinstance(number, int | float) and math.isfinite(number) else default

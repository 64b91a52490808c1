"""The limit of a run in one sentence, from its measurements: a pure function over its metrics.

Two measurements decide: whether the learner waits for batches, and whether the actors' slots hold
episodes. If the learner never waits, the learner is the limit. If it waits while slots are empty,
the gate is the limit. If it waits while slots are full, the limit is the environment or the engine:
the one in which episodes spend more of their time. If a large share of the episodes becomes stale,
the bound on lag is the limit. The free processor time bounds the gain of each advice. It follows
from the roles' processor seconds and the number of cores.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

from common.text import counted
from tools.dashboard.waits import MIN_STEPS, Waits, measure

BUSY_FRAC = 0.15  # Largest share of time that the learner waits and still is the limit.
IDLE_FRAC = 0.40  # Share of the slots' time that is empty when the gate is the limit.
MIN_GAIN = 0.02  # Smallest gain of throughput worth advising.
STALE_FRAC = 0.15  # Share of stale episodes from which the bound on lag is the limit.
# Efficiency of an added rank: gradients are summed, and microbatches are uneven.
RANKS_EFFICIENCY = 0.9


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
        more = ranks + (_count(config, "learner", "sequence_ranks", 1) or 1)
        shared_s = waits.busy_s - waits.train_s * (1.0 - ranks / more / RANKS_EFFICIENCY)
        knobs[f"learner.num_ranks={more}"] = waits.within_cores(max(shared_s, filled_s))
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
    found = config.get(section)
    return cast(dict[str, Any], found).get(key, default) if isinstance(found, dict) else default


def _count(config: Mapping[str, Any], section: str, key: str, default: int) -> int:
    """Return a whole number of a file; the default where the file has no number there."""
    found = _value_of(config, section, key, default)
    return int(found) if isinstance(found, int | float) and math.isfinite(found) else default

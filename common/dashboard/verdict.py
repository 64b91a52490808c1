"""What limits a run, in one sentence, from what was measured: a pure function over its metrics.

The learner waits for a batch, or it does not; the slots of the actors hold episodes, or they are
empty. That makes four cases: a learner that never waits is the limit itself; one that waits while
slots are empty is kept from work by the gate; one that waits while they are full waits for the
environment or the engine, whichever the episodes spend more of their time in. Where a good part
of the episodes is thrown away as stale, the bound on lag is the gate. What the processors have no
time for is advised by nobody: their seconds of a step are known, and how many there are.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

MIN_STEPS = 3
MIN_CPU_S = 10.0  # between two looks at the processors that are far enough apart
IDLE_CORE = 0.75  # of a core's time, without which one more process takes from the others
BUSY_FRAC = 0.15  # of the time that a learner may wait and still be the limit
IDLE_FRAC = 0.40  # of the slots' time that is empty when the gate is the limit
MIN_GAIN = 0.02  # of throughput: less is no advice
STALE_FRAC = 0.15  # of the episodes consumed, beyond which the bound on lag is what limits a run
NO_ROLES = ("cpu/cores", "cpu/per_trained_episode_s", "cpu/others_s")
CROWDED_FRAC = 0.2  # of the cores' time, which other programs take, and nothing is left of it
RANKS_EFFICIENCY = 0.9  # of a second rank: gradients are summed, microbatches come out uneven


class Bound(StrEnum):
    """What a run is limited by."""

    UNKNOWN = "unknown"
    LEARNER = "learner"
    ENGINE = "engine"
    ENVIRONMENT = "environment"
    GATE = "gate"
    SYNC = "sync"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A knob, and by how much the episodes per second would grow: 0.6 is +60 %."""

    knob: str
    gain: float


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

        What others use stays theirs; None: what the roles use.
        """
        own = self.cpu_frac if cpu_frac is None else cpu_frac
        return max(seconds, self.period_s * own / max(1e-9, 1.0 - self.others_frac))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The limit, a sentence about it with numbers, and what to turn, the best first."""

    bound: Bound
    sentence: str
    advice: list[Advice] = field(default_factory=list[Advice])
    waits: Waits | None = None


def judge(
    lines: Sequence[Mapping[str, float | None]],
    config: Mapping[str, Any],
    status: Mapping[str, Any] | None = None,
) -> Verdict:
    """Return what limits a run.

    Args:
        lines: of metrics.jsonl, consecutive steps, in order.
        config: the run's, as a tree of maps; keys that are missing count as their defaults.
        status: of the scheduler; its reason for a closed gate is quoted.
    """
    waits = measure(lines)
    if waits is None:
        text = (
            f"too early to say what limits the run: {MIN_STEPS} steps with their waits are needed"
        )
        return Verdict(bound=Bound.UNKNOWN, sentence=f"{_before(lines, status or {})}{text}")
    bound = bound_of(waits, is_sync=_get(config, "train", "mode", "async") == "sync")
    advice = sorted(_advice(bound, waits, config), key=lambda each: -each.gain)
    useful = [each for each in advice if each.gain >= MIN_GAIN]
    gate = str((status or {}).get("gate") or "") if bound is Bound.GATE else ""
    return Verdict(
        bound=bound,
        sentence=f"{_finding(bound, waits, gate)}; {_advice_text(useful, waits)}",
        advice=useful,
        waits=waits,
    )


def _before(lines: Sequence[Mapping[str, float | None]], status: Mapping[str, Any]) -> str:
    """Return what goes on before the first step, "" where nobody says; a gate limits nothing yet.

    It closes as soon as the first batches are under way, which is as it should be.
    """
    if lines or status.get("phase") != "train":
        return ""
    if status.get("learner") and not _get(status, "learner", "waiting_for", ""):
        return "the learner works on the first batch; "
    num = [int(_get(status, "groups", name, 0) or 0) for name in ("ready", "open")]
    return f"the first batch is being played ({num[0]} groups ready, {num[1]} open); "


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


def bound_of(waits: Waits, *, is_sync: bool) -> Bound:
    """Return the limit that the waits show."""
    if waits.wait_frac <= BUSY_FRAC:
        return Bound.LEARNER
    if is_sync:
        return Bound.SYNC
    if 1.0 - waits.slot_busy_frac >= IDLE_FRAC or waits.stale_frac >= STALE_FRAC:
        return Bound.GATE
    return Bound.ENVIRONMENT if waits.env_frac > waits.engine_frac else Bound.ENGINE


def _advice(bound: Bound, waits: Waits, config: Mapping[str, Any]) -> list[Advice]:
    """Return every knob with the gain that the measured waits allow at most."""
    ahead = int(_get(config, "scheduler", "max_ahead_steps", 1) or 0)
    lag = int(_get(config, "learner", "max_lag_steps", 4) or 0)
    if bound is Bound.LEARNER:
        knobs = _learner_knobs(waits, config)
    elif bound is Bound.SYNC:
        knobs = {"train.mode=async": max(waits.busy_s, waits.wait_s)}
    elif bound is Bound.GATE and waits.stale_frac >= STALE_FRAC:
        knobs = {f"learner.max_lag_steps={lag + 1}": waits.period_s * (1.0 - waits.stale_frac)}
    elif bound is Bound.GATE:
        is_held_back = waits.ahead_steps is not None and waits.ahead_steps < ahead
        filled_s = waits.period_s * waits.slot_busy_frac  # a step's episodes, if none were empty
        more_s = waits.period_s * (ahead + 1) / (ahead + 2)  # so many batches under way, not more
        fewer_s = waits.period_s if is_held_back else max(waits.busy_s, filled_s, more_s)
        knobs = {f"scheduler.max_ahead_steps={ahead + 1}": waits.within_cores(fewer_s)}
    else:
        knobs = _actor_knobs(bound, waits, config)
    return [Advice(knob=k, gain=waits.period_s / max(s, 1e-9) - 1.0) for k, s in knobs.items()]


def _learner_knobs(waits: Waits, config: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a step by knob: more hands first, then less to do for each batch."""
    ranks = int(_get(config, "learner", "num_ranks", 1) or 1)
    filled_s = waits.period_s * waits.slot_busy_frac
    knobs: dict[str, float] = {}
    if waits.has_idle_core:
        shared_s = waits.busy_s - waits.train_s * (1.0 - ranks / (ranks + 1) / RANKS_EFFICIENCY)
        knobs[f"learner.num_ranks={ranks + 1}"] = waits.within_cores(max(shared_s, filled_s))
    for name in ("ppo_epochs", "num_minibatches"):
        if (passes := int(_get(config, "learner", name, 1) or 1)) > 1:
            fewer_s = waits.busy_s - waits.train_s * (1.0 - (passes // 2) / passes)
            knobs[f"learner.{name}={passes // 2}"] = max(fewer_s, filled_s)
    return knobs


def _actor_knobs(bound: Bound, waits: Waits, config: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a step by knob, where every slot holds an episode.

    An engine that the configuration gives fewer slots than it keeps up with takes more at once;
    one that has fewer than it is given has said itself that it is at its end.
    """
    engines = int(_get(config, "actor", "num_actors", 1) or 1)
    slots = max(1, round(waits.num_slots / engines))
    knobs: dict[str, float] = {}
    if bound is Bound.ENVIRONMENT or slots >= int(_get(config, "actor", "max_concurrent", 64) or 1):
        halved_s = max(waits.busy_s, waits.period_s / 2)
        spared = waits.cpu_frac - waits.engine_cpu_frac / 2  # a larger batch costs no more
        if bound is Bound.ENVIRONMENT or not waits.is_crowded:
            knobs[f"actor.max_concurrent={2 * slots}"] = waits.within_cores(halved_s, spared)
    if bound is Bound.ENGINE and waits.has_idle_core:
        fewer_s = max(waits.busy_s, waits.period_s * engines / (engines + 1))
        knobs[f"actor.num_actors={engines + 1}"] = waits.within_cores(fewer_s)
    return knobs


def _finding(bound: Bound, waits: Waits, gate: str) -> str:
    step = f"of each {waits.period_s:.3g} s step"
    busy, wait = f"{waits.busy_s:.3g} s", f"{waits.wait_s:.3g} s"
    idle = 1.0 - waits.slot_busy_frac
    if bound is Bound.LEARNER:
        share = 1.0 - waits.wait_frac
        cores = "" if waits.has_idle_core else f", and all {_busy(waits)}"
        empty = f"{idle:.0%} of slots are empty{cores}"
        return f"learner-bound {share:.0%}: it works {busy} {step}, {empty}"
    waited = f"the learner waits {wait} {step}"
    if bound is Bound.SYNC:
        return f"synchronous: {waited} while episodes are played, and nobody plays while it trains"
    if bound is Bound.GATE and waits.stale_frac >= STALE_FRAC:
        return f"bound on lag too tight: {waits.stale_frac:.0%} of the episodes are stale; {waited}"
    if bound is Bound.GATE:
        why = f" ({gate})" if gate else ""
        return f"gate too tight: {waited} while {idle:.0%} of the actors' slots are empty{why}"
    name = "environment" if bound is Bound.ENVIRONMENT else "engine"
    share = waits.env_frac if bound is Bound.ENVIRONMENT else waits.engine_frac
    cores = "" if waits.has_idle_core else f"; {1.0 - waits.idle_frac:.0%} of {_busy(waits)}"
    return f"{name}-bound {share:.0%} of an episode's time: {waited}{cores}"


def _busy(waits: Waits) -> str:
    by = f", {waits.others_frac:.0%} with other programs" if waits.is_crowded else ""
    return f"{waits.cores:.0f} cores are busy{by}"


def _advice_text(advice: Sequence[Advice], waits: Waits) -> str:
    if not advice and waits.is_crowded:
        return "no processor time is free for more: end the other programs, or give it more cores"
    if not advice:
        return "no single knob is known to bring more than 2 %"
    return ", ".join(f"{each.knob} at most +{each.gain:.0%}" for each in advice)


def _value(line: Mapping[str, float | None], name: str) -> float | None:
    found = line.get(name)
    return float(found) if isinstance(found, int | float) else None


def _total(pairs: Sequence[tuple[Mapping[str, float | None], float]], name: str) -> float:
    return sum(_value(line, name) or 0.0 for line, _ in pairs)


def _get(config: Mapping[str, Any], section: str, key: str, default: Any) -> Any:
    found = config.get(section)
    return cast(dict[str, Any], found).get(key, default) if isinstance(found, dict) else default

"""The suites `actor` and `actor-pretrained`: a run's tokens per second, compared with vLLM alone.

The run is real: scheduler, hub, an actor with its engine, and a learner that accepts episodes and
writes its journal. The learner makes no step, so that only generation is measured. Afterwards vLLM
alone samples turns of the same lengths with the same concurrency and without environments.
"""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.learner.checks.bench import SMALL, DeviceBench
from benchmarks.learner.checks.weights import add_actor_cost, run_engine
from benchmarks.learner.engine import MAX_TOKEN_MS, MAX_TURN_MS
from benchmarks.real_run import (
    TRAINING_ALONE,
    Role,
    await_success,
    check_end,
    child,
    cpu_seconds,
    running,
)
from benchmarks.suite import Suite
from common.errors import LongstrideError
from common.host.machine import gpus
from common.host.process_settings import ONE_THREAD
from common.weights.buckets import CPU
from common.wire.messages import Trajectory
from learner.journal.journal import read_journal, synced_end

NUM_ROUNDS = 2  # Rounds of both, in turn.
TIMEOUT_S = 600.0  # Limit of a start or a whole measurement.
POLL_S = 0.2
MIN_RATIO = 0.90
LONG_TURNS = replace(SMALL, num_prompts=64, turn_tokens=256)
# A batch never fills, so the first step never starts.
SETTINGS = ("groups.per_step=10000", "train.num_steps=1", *TRAINING_ALONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRun:
    """The run of a measurement and its window."""

    config: str
    overrides: tuple[str, ...]
    window_s: float
    num_warm_up: int  # Number of episodes until starts and ends are balanced.


QUICKSTART = SamplingRun(
    config="quickstart", overrides=("actor.max_model_len=2048",), window_s=15.0, num_warm_up=256
)
PRETRAINED = SamplingRun(config="smollm2-chain-sum", overrides=(), window_s=45.0, num_warm_up=128)


def run_suite(suite: Suite) -> None:
    """Measure a run and vLLM alone, twice in turn, then long turns, in four minutes."""
    suite.title(f"quickstart, no steps, {NUM_ROUNDS} windows of {QUICKSTART.window_s:g} s each")
    with suite.check("sampled tokens") as folder:
        add_speeds(suite, folder, QUICKSTART)
    suite.title("turns of 256 tokens, 64 at once, random weights")
    bench = DeviceBench(suite=suite, sizes=LONG_TURNS, device=CPU, peer_device="cpu")
    with suite.check("long turns"):
        add_actor_cost(bench, "long turns", run_engine(bench, LONG_TURNS.model))


def run_pretrained(suite: Suite, *, overrides: Sequence[str]) -> None:
    """Measure a run with a pretrained model and vLLM alone, twice in turn, in seven minutes."""
    load = replace(PRETRAINED, overrides=(*PRETRAINED.overrides, *overrides))
    suite.title(f"{load.config}, no steps, {NUM_ROUNDS} windows of {load.window_s:g} s each")
    with suite.check("sampled tokens") as folder:
        add_speeds(suite, folder, load)


def add_speeds(suite: Suite, folder: Path, load: SamplingRun) -> None:
    """Add the sampling rates of this project's engine and of vLLM alone."""
    ours: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    for number in range(NUM_ROUNDS):
        ours.update(measure_run(f"run-{number}", load, folder=folder))
        alone.update(measure_alone(folder / f"run-{number}", window_s=load.window_s))
    suite.compare(
        "tokens sampled inside a run",
        ours["sampled"] / ours["time_s"],
        alone["sampled"] / alone["time_s"],
        "/s",
        against="vLLM alone, same concurrency and lengths",
        at_least=MIN_RATIO,
        note=hits(ours, alone),
    )
    for role in ("engine", "actor"):
        cost, limit = (1e3 * done[role] / done["sampled"] for done in (ours, alone))
        name = f"inside a run, {role}"
        unit = "cpu s/1k tokens"
        suite.compare(name, cost, limit, unit, against="vLLM alone", note=hits(ours, alone))
    allowed_ms = MAX_TOKEN_MS * ours["sampled"] + MAX_TURN_MS * ours["turns"]
    suite.compare(
        "inside a run, actor for a turn",
        1e3 * ours["actor"] / ours["turns"],
        allowed_ms / ours["turns"],
        "cpu ms",
        against=f"{MAX_TOKEN_MS:g} ms a token and {MAX_TURN_MS:g} ms a turn",
        at_most=1.0,
        note=f"{ours['sampled'] / ours['turns']:.1f} tokens a turn",
    )


def hits(ours: Counter[str], peer: Counter[str]) -> str:
    """Return the shares of prompt tokens from the prefix cache as text."""
    shares = [done["cached"] / max(1, done["prompt"]) for done in (ours, peer)]
    return f"prefix hits {shares[0]:.0%} and {shares[1]:.0%}"


def measure_run(name: str, load: SamplingRun, *, folder: Path) -> dict[str, float]:
    """Return tokens, processor seconds by role and seconds of a window, and write its turns.

    Raises: LongstrideError: the run failed, does not generate, or has no process of a role.
    """
    run_dir = folder / name
    overrides = (*SETTINGS, *load.overrides)
    with running(name, overrides, folder=folder, config=load.config) as run:
        deadline = time.monotonic() + TIMEOUT_S
        while sum(1 for _ in read_journal(run_dir / "journal")) < load.num_warm_up:
            check_end(run)
            if time.monotonic() > deadline:
                raise LongstrideError(f"run {name} generates nothing, see {run.log_path}")
            time.sleep(POLL_S)
        begin = synced_end(run_dir / "journal")
        started = time.monotonic()
        before = cpu_seconds(run.pid)
        time.sleep(load.window_s)
        end = synced_end(run_dir / "journal")
        took_s = time.monotonic() - started
        after = cpu_seconds(run.pid)
        check_end(run)
    used_s = cpu_between(before, after)
    records = read_journal(run_dir / "journal", start=begin)
    episodes = [episode for where, episode in records if where < end]
    if not episodes:
        raise LongstrideError(f"run {name}: no episode in {load.window_s:g}s, see {run.log_path}")
    (run_dir / "turns.json").write_text(
        json.dumps([turns_of(episode) for episode in episodes]), encoding="utf-8"
    )
    return {
        "prompt": sum(episode.num_prompt_tokens for episode in episodes),
        "cached": sum(episode.num_cached_tokens for episode in episodes),
        "sampled": sum(int(episode.loss_mask.sum()) for episode in episodes),
        "turns": sum(episode.num_turns for episode in episodes),
        "time_s": took_s,
        **used_s,
    }


def cpu_between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the processor seconds of each role between two measurements.

    Raises: LongstrideError: actor or engine is missing, so that its cost would be 0.
    """
    if lacking := sorted({Role.ACTOR, Role.ENGINE} - (before.keys() & after.keys())):
        raise LongstrideError(f"no process was measured of the role {' or '.join(lacking)}")
    return {role: used_s - before.get(role, 0.0) for role, used_s in after.items()}


def measure_alone(run_dir: Path, *, window_s: float) -> dict[str, float]:
    """Return the counters of vLLM alone for a run's turns. Raises: LongstrideError."""
    argv = ["-m", "benchmarks.actor.bare", str(run_dir), str(window_s)]
    env = {} if gpus() else ONE_THREAD  # The thread settings of the run.
    with child("vLLM alone", argv, log=run_dir / "alone.log", env=env) as alone:
        await_success(alone, timeout_s=TIMEOUT_S)
    return json.loads((run_dir / "alone.json").read_text(encoding="utf-8"))


def turns_of(episode: Trajectory) -> list[tuple[list[int], int]]:
    """Return the observed token ids and the number of sampled tokens, turn by turn."""
    turns: list[tuple[list[int], int]] = []
    for turn in range(episode.num_turns):
        is_of_turn = episode.turn_ids == turn
        observed = episode.token_ids[is_of_turn & ~episode.loss_mask]
        turns.append((observed.tolist(), int(episode.loss_mask[is_of_turn].sum())))
    return turns

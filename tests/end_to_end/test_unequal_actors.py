"""A slow, a fast and a late actor in one run: real processes, an environment that waits."""

import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from common.wire.messages import EpisodeKind
from learner.journal.journal import read_journal
from tests.end_to_end.runs import Run, balances, joining

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1500)]

ENGINE_S = 600.0  # for an engine to start and play, on a busy machine
OVERRIDES = (
    "actor.num_actors=0",
    'envhub.envs=["benchmarks.envhub.slow:make_spec"]',
    "tasks=[{env: slow, subset: wait}]",
    'envs.plugins={median_s: "0.6", sigma: "0.2", num_turns: "3", tail_frac: "0"}',
    "eval.before=false",
    "eval.after=false",
    "train.num_steps=100000",
    "groups.per_step=4",
    "scheduler.max_ahead_steps=3",
    "learner.max_lag_steps=8",
    "learner.checkpoint_every_steps=1000",
    "actor.max_turn_tokens=4",
    "learner.lr=1e-7",  # The task gives no learning signal.
    "learner.muon_lr=1e-7",
    "learner.batch_timeout_s=600",
    "actor.start_timeout_s=600",
)


def num_finished(run: Run) -> dict[str, int]:
    """Episodes by actor, as the scheduler counts them."""
    status = run.root / "status.json"
    actors = json.loads(status.read_text(encoding="utf-8"))["actors"] if status.exists() else []
    return {each["name"]: each["num_finished"] for each in actors}


def test_slow_fast_and_late_actors_contribute_proportionally(tmp_path: Path) -> None:
    with Run(tmp_path, *OVERRIDES) as run:
        run.wait_until((run.root / "addresses" / "scheduler").exists)
        with (
            joining(run, "fast", "actor.max_concurrent=12"),
            joining(run, "slow", "actor.max_concurrent=2"),
        ):
            run.wait_until(
                lambda: min(num_finished(run).get(n, 0) for n in ("fast", "slow")) > 0,
                timeout_s=ENGINE_S,
            )
            with joining(run, "late", "actor.max_concurrent=12"):
                run.wait_until(lambda: num_finished(run).get("late", 0) >= 40, timeout_s=ENGINE_S)
                run.process.send_signal(signal.SIGTERM)
                run.wait(timeout_s=30.0)
        slots = {each["name"]: each["num_slots"] for each in run.read("status.json")["actors"]}
    assert slots == {"fast": 12, "slow": 2, "late": 12}
    players = [
        trajectory.actor
        for _, trajectory in read_journal(run.root / "journal")
        if trajectory.kind is EpisodeKind.TRAIN
    ]
    together = Counter(players[players.index("late") :])
    assert together["slow"] > 0
    assert together["fast"] > 2 * together["slow"]
    assert together["late"] > 2 * together["slow"]
    ledger = run.read("ledger.json")
    assert balances(ledger)
    assert ledger["trained"] > 0
    concurrency = [line.get("actor/concurrency") for line in run.metrics()]
    assert {14.0, 26.0} <= set(concurrency), concurrency

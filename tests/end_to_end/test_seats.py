"""Laws of whole runs in an environment with seats."""

from pathlib import Path

import numpy as np
import pytest

from learner.journal.journal import read_journal
from tests.end_to_end.runs import Run, unbounded

OVERRIDES = (
    "groups.per_step=4",
    "eval.before=false",
    "eval.baselines=false",
    "eval.num_items=16",
    "actor.max_concurrent=32",
)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_self_play_trains_both_seats_on_own_tokens(tmp_path: Path) -> None:
    with Run(tmp_path, "train.num_steps=3", *OVERRIDES, config="selfplay-nim") as run:
        assert run.wait(timeout_s=1500) == 0, run.output[-3000:]
        names = {name for line in run.metrics() for name in line}
        seats = {f"episodes/seat_{seat}_reward_mean" for seat in (0, 1)}
        assert {*seats, "episodes/against_self_reward_mean"} <= names
        ledger = run.read("ledger.json")
        assert ledger["failed"] == ledger["lost"] == 0
        groups: dict[str, set[str]] = {}
        for _, each in read_journal(run.root / "journal"):
            if each.group_id.startswith("eval-"):
                assert "against_random_reward" in each.metrics
                continue
            groups.setdefault(each.group_id, set()).update(each.metrics)
            # A turn of this seat has at most eight sampled tokens.
            assert 1 <= np.count_nonzero(each.loss_mask) <= 8 * each.num_turns
        assert groups
        assert all(len(names) == 2 for names in groups.values())  # One seat and one opponent.
        assert unbounded(run.root) == []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_past_versions_play_in_an_engine_of_the_run(tmp_path: Path) -> None:
    with Run(
        tmp_path,
        "train.num_steps=3",
        "eval.after=false",
        "learner.checkpoint_every_steps=1",
        "actor.seats.opponents=[checkpoints]",
        "actor.seats.past_every_s=1",
        *OVERRIDES,
        config="selfplay-nim",
    ) as run:
        assert run.wait(timeout_s=1500) == 0, run.output[-3000:]
        names = {name for line in run.metrics() for name in line}
        assert "episodes/against_checkpoints_reward_mean" in names
        assert run.read("ledger.json")["failed"] == 0
        log = (run.root / "logs" / "opponent-past-0.log").read_text(encoding="utf-8")
        assert log.count("policy: http") >= 1

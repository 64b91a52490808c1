"""A run of simulated actors goes all the way, from the lease to the journal."""

from pathlib import Path

import pytest

from benchmarks.transport.scaling import HORIZON, episodes_per_s
from common.store.journal import read_journal


@pytest.mark.long
@pytest.mark.slow
def test_simulated_actor_plays_real_sessions_into_the_journal(tmp_path: Path) -> None:
    assert episodes_per_s(tmp_path, 1, warm_up_s=0.0, measured_s=6.0) > 0
    journalled = [trajectory for _, trajectory in read_journal(tmp_path / "r" / "journal")]
    assert {each.actor for each in journalled} == {"actor-0"}
    assert all(0 < each.num_turns <= HORIZON for each in journalled)
    assert any(each.num_turns == HORIZON for each in journalled)
    assert (tmp_path / "r" / "scheduler.json").exists()

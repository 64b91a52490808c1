"""Laws of the measurement with engines that are clocks: real processes, two engines."""

from pathlib import Path

import pytest

from benchmarks.engines.suite import measure
from common.wire.messages import EndReason
from learner.journal.journal import read_journal

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


def test_two_clocks_behind_one_process_play_whole_episodes(tmp_path: Path) -> None:
    seen = measure(tmp_path, num_engines=2, per_process=2, window_s=5.0)
    shares = [seen.scheduler, seen.intake, seen.hub, *seen.actors]
    assert len(seen.actors) == 1
    assert min(shares) > 0.0
    assert seen.pace > 0.0
    played = [trajectory for _, trajectory in read_journal(tmp_path / "r" / "journal")]
    assert {each.actor for each in played} == {"actor-0", "actor-0~1"}
    assert not any(each.end_reason.is_infrastructure_failure for each in played)
    assert {each.num_turns for each in played if each.end_reason is EndReason.HORIZON} == {20}

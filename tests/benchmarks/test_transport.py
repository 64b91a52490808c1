"""Laws of the suite of the trajectory plane, measured for half a second."""

from pathlib import Path

import pytest

from benchmarks.transport import GROUP_SIZE, NUM_TOKENS, encoded, measure
from common.wire.codec import decode
from learner.ingest.intake import refusal
from learner.journal.journal import read_journal


def test_encoded_trajectories_are_whole_accepted_groups() -> None:
    made = [decode(frames) for frames in encoded(5, 2 * GROUP_SIZE)]
    assert len({each.episode_id for each in made}) == 2 * GROUP_SIZE
    assert [each.group_id for each in made] == ["g0000005"] * GROUP_SIZE + ["g0000006"] * GROUP_SIZE
    assert {each.token_ids.size for each in made} == {NUM_TOKENS}
    whys = [refusal(each, learner_version=0, max_group_size=GROUP_SIZE) for each in made]
    assert set(whys) == {""}


@pytest.mark.long
@pytest.mark.slow
def test_acknowledged_trajectories_are_counted_and_journaled(tmp_path: Path) -> None:
    flow = measure("intake", tmp_path, measured_s=0.5)
    assert flow.per_s > 0
    assert flow.cpu_s > 0
    (folder,) = tmp_path.iterdir()
    journalled = [trajectory.episode_id for _, trajectory in read_journal(folder / "journal")]
    assert len(journalled) == len(set(journalled)) >= flow.per_s * 0.5

"""Laws of the measurement of a run's generation against vLLM alone."""

import numpy as np
import pytest

from benchmarks.actor.suite import cpu_between, turns_of
from common.errors import LongstrideError
from tests.learner.builders import make_trajectory


def test_turns_of_an_episode_split_observations_and_sampled_counts() -> None:
    turn_ids = np.array([0, 0, 0, 0, 1, 1], dtype=np.int32)
    episode = make_trajectory(
        [7, 8, 1, 2, 9, 3], [0, 0, 1, 1, 0, 1], turn_ids=turn_ids, num_turns=2
    )
    assert turns_of(episode) == [([7, 8], 2), ([9], 1)]


def test_missing_role_is_no_cost_of_zero() -> None:
    assert cpu_between({"actor": 1.0, "engine": 2.0}, {"actor": 1.5, "engine": 4.0}) == {
        "actor": 0.5,
        "engine": 2.0,
    }
    with pytest.raises(LongstrideError, match="role engine"):
        cpu_between({"actor": 1.0}, {"actor": 1.5, "engine": 4.0})

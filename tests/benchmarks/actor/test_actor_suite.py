"""Laws of the measurement of a run's generation against vLLM alone."""

import numpy as np

from benchmarks.actor.suite import turns_of
from tests.learner.builders import make_trajectory


def test_turns_of_an_episode_split_observations_and_sampled_counts() -> None:
    turn_ids = np.array([0, 0, 0, 0, 1, 1], dtype=np.int32)
    episode = make_trajectory(
        [7, 8, 1, 2, 9, 3], [0, 0, 1, 1, 0, 1], turn_ids=turn_ids, num_turns=2
    )
    assert turns_of(episode) == [([7, 8], 2), ([9], 1)]

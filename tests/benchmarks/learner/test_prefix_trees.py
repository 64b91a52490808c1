"""Laws of the branching episodes that the suite `prefix-trees` measures, with numbers by hand."""

import numpy as np
import pytest

from benchmarks.learner.prefix_trees import SHAPES, num_known, samples_of
from learner.batch.packing import forest_of


@pytest.mark.parametrize(
    ("name", "num_tokens", "num_of_rows", "known"),
    [
        # The prompts have 200 to 1,720 tokens. All but the last begin a later row.
        ("keep_thinking=last, 20 turns", 200 + 19 * 80 + 20 * 100, 20 * 300 + 80 * 190, 17_480),
        ("8 folded branches", 1_060 + 8 * 260, 8 * 480 + 100 * 28 + 1_060, 8 * 220 + 100 * 28),
        ("8 branches of one context", 800 + 8 * 120, 8 * 920, 7 * 800),
    ],
)
def test_branching_episode_has_its_tokens(
    name: str, num_tokens: int, num_of_rows: int, known: int
) -> None:
    episode = SHAPES[name](np.random.default_rng(0), 50_000)
    rows = [sample.trajectory for sample in samples_of(episode)]
    lengths = [len(row.token_ids) for row in rows]
    assert sum(lengths) == num_of_rows
    assert sum(lengths) - sum(forest_of(rows).shared) == num_tokens
    assert num_known(episode) == known

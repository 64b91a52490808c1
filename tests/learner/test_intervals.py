"""Laws of the intervals of a report: by hand, and by how often they hold the truth."""

from collections.abc import Sequence

import numpy as np
import pytest

from learner.intervals import (
    clustered_interval,
    gain_interval,
    seeds_interval,
    student_quantile,
    wilson_interval,
)

NUM_ITEMS = (2, 3, 4, 5, 10, 50)
NUM_DRAWS = 2_000


def test_wilson_interval_matches_hand_computation() -> None:
    # 8 of 10, z = 1.959964: centre (0.8 + 0.19207) / 1.38415, spread 0.22665
    assert wilson_interval(8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-5)
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.277533), abs=1e-5)
    assert wilson_interval(10, 10) == pytest.approx((0.722467, 1.0), abs=1e-5)


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (4, 2.7764), (11, 2.2010), (30, 2.0423), (100, 1.9840), (10**6, 1.9600)],
)
def test_student_quantiles_match_published_tables(degrees: int, quantile: float) -> None:
    assert student_quantile(degrees) == pytest.approx(quantile, abs=1e-4)


def test_clustered_interval_matches_hand_computation() -> None:
    # Mean 1/2, squared deviations 0 + 1/16 + 1/16 + 1/4 = 3/8: 9 * (1/4) / (3/8) = 6 trials.
    # t = 4.30265: 4.30265 * sqrt((1/4 + 18.5128 / 24) / 6) / (1 + 18.5128 / 6) = 0.434522
    interval = clustered_interval([0.5, 0.25, 0.75])
    assert interval == pytest.approx((0.5 - 0.434522, 0.5 + 0.434522), abs=1e-5)


@pytest.mark.parametrize("num", [1, 2, 5, 40])
def test_single_sample_clustered_interval_equals_wilson(num: int) -> None:
    for solved in {0, 1, num // 3, num}:
        values = [1.0] * solved + [0.0] * (num - solved)
        assert clustered_interval(values) == pytest.approx(wilson_interval(solved, num))


def test_clustered_interval_weighs_items_by_their_samples() -> None:
    # Shares 6/4 and 2/4 of an item: (1.5 + 0.5)^2 / (1.5^2 + 0.5^2) = 1.6 trials of mean 0.75.
    # z^2 = 3.841459: centre (0.75 + 1.200456) / 3.400912, spread 1.959964 * 0.701659 / 3.400912
    interval = clustered_interval([1.0, 0.0], [6, 2])
    assert interval == pytest.approx((0.573510 - 0.404371, 0.573510 + 0.404371), abs=1e-5)


def test_interval_is_never_empty_and_stays_inside() -> None:
    for values in ([0.0], [1.0] * 3, [0.5] * 8, [1.0, 0.0], [0.25, 0.25]):
        low, high = clustered_interval(values)
        assert 0.0 <= low < high <= 1.0
    for gains in ([0.0, 0.0], [1.0] * 5, [-1.0, 1.0]):
        low, high = gain_interval(gains)
        assert -1.0 <= low < high <= 1.0


def covered(intervals: Sequence[tuple[float, float]], truth: float) -> float:
    return float(np.mean([low <= truth <= high for low, high in intervals]))


@pytest.mark.parametrize("num_samples", [4, 16, 256])
@pytest.mark.parametrize("shape", [(1.0, 1.0), (2.0, 2.0), (8.0, 2.0), (0.5, 2.0)])
def test_clustered_interval_covers_truth_for_few_items(
    shape: tuple[float, float], num_samples: int
) -> None:
    draw = np.random.default_rng(5)
    for num in NUM_ITEMS:
        chances = draw.beta(*shape, size=(NUM_DRAWS, num))
        values = draw.binomial(num_samples, chances) / num_samples
        found = [clustered_interval(row) for row in values.tolist()]
        assert covered(found, shape[0] / sum(shape)) >= 0.94, num


def test_clustered_interval_covers_truth_for_mixed_items() -> None:
    draw = np.random.default_rng(5)
    for num in NUM_ITEMS:
        chances = draw.choice([0.1, 0.5, 0.9], size=(NUM_DRAWS, num))
        values = draw.binomial(4, chances) / 4
        assert covered([clustered_interval(row) for row in values.tolist()], 0.5) >= 0.94, num


@pytest.mark.parametrize("chances", [(0.05, 0.85, 0.1), (0.3, 0.4, 0.3), (0.0, 0.9, 0.1)])
def test_paired_gain_covers_truth_for_few_items(chances: tuple[float, float, float]) -> None:
    draw = np.random.default_rng(5)
    for num in NUM_ITEMS:
        gains = draw.choice([-1.0, 0.0, 1.0], p=chances, size=(NUM_DRAWS, num))
        found = [gain_interval(row) for row in gains.tolist()]
        assert covered(found, chances[2] - chances[0]) >= 0.94, num


def test_clustered_interval_of_sixty_items_is_tight() -> None:
    draw = np.random.default_rng(5)
    chances = draw.choice([0.1, 0.5, 0.9], size=(NUM_DRAWS, 60))
    found = [clustered_interval(row) for row in (draw.binomial(4, chances) / 4).tolist()]
    assert covered(found, 0.5) <= 0.97


def test_agreeing_seeds_keep_the_uncertainty_of_plays() -> None:
    assert seeds_interval([0.5, 0.5, 0.5], 30) == pytest.approx(wilson_interval(15, 30))
    # Student's is wider: 4.30265 * 0.1 / sqrt(3) = 0.248414
    found = seeds_interval([0.4, 0.5, 0.6], 30)
    assert found == pytest.approx((0.5 - 0.248414, 0.5 + 0.248414), abs=1e-5)

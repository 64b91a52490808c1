"""Which item a group gets."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config.eval import EvalSplit
from common.errors import ConfigError
from scheduler.curriculum.catalogue import HubCatalogue, SubsetEntry
from scheduler.curriculum.sampling import (
    Sampler,
    eval_items,
    floor_sum,
    member_seed,
    permute,
    spread,
)
from tests.scheduler.builders import catalogue_of, tasks_of


@given(st.integers(0, 60), st.integers(1, 40), st.integers(0, 90), st.integers(0, 90))
def test_floor_sum_equals_the_sum_of_floors(
    count: int, modulus: int, slope: int, offset: int
) -> None:
    expected = sum((slope * j + offset) // modulus for j in range(count))
    assert floor_sum(count, modulus, slope, offset) == expected


@given(st.integers(1, 200), st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection(size: int, key: int) -> None:
    assert sorted(permute(i, size, key=key) for i in range(size)) == list(range(size))


def test_sampler_visits_items_once_per_epoch() -> None:
    sampler = Sampler(tasks_of(a=1, b=2), catalogue_of(a=7, b=11), seed=3)
    visits: dict[str, list[str]] = {"a": [], "b": []}
    for number in range(0, 8 * 20):  # whole blocks, so that ranks are complete
        item = sampler.item(number)
        visits[item.subset].append(item.item_id)
    for subset, size in (("a", 7), ("b", 11)):
        num_epochs = len(visits[subset]) // size
        counts = Counter(visits[subset])
        assert num_epochs >= 4
        assert len(counts) == size
        assert set(counts.values()) <= {num_epochs, num_epochs + 1}


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_sampler_keeps_window_shares_near_weights(seed: int) -> None:
    sampler = Sampler(tasks_of(a=1, b=3, c=6), catalogue_of(a=50, b=50, c=50), seed=seed)
    subsets = [sampler.item(number).subset for number in range(600)]
    for width in (20, 50, 100):
        for start in range(600 - width):
            counts = Counter(subsets[start : start + width])
            for name, share in (("a", 0.1), ("b", 0.3), ("c", 0.6)):
                assert abs(counts[name] - share * width) <= 6


def test_sampler_repeats_no_short_pattern() -> None:
    sampler = Sampler(tasks_of(a=1, b=1), catalogue_of(a=50, b=50), seed=0)
    text = "".join(sampler.item(number).subset for number in range(160))
    blocks = [text[i : i + 8] for i in range(0, 160, 8)]
    assert len(set(blocks)) > 10
    assert any(x == y for x, y in pairwise(text))


def test_sampler_is_a_pure_function_of_seed_and_number() -> None:
    first, again = (Sampler(tasks_of(a=1, b=1), catalogue_of(a=9, b=9), seed=5) for _ in range(2))
    other = Sampler(tasks_of(a=1, b=1), catalogue_of(a=9, b=9), seed=6)
    numbers = list(range(60))
    expected = [first.item(n) for n in numbers]
    assert [again.item(n) for n in reversed(numbers)] == expected[::-1]
    assert [other.item(n) for n in numbers] != expected
    assert first.item(0).item_id == again.item(0).item_id


def test_sampler_scales_to_a_million_items_without_memory() -> None:
    sampler = Sampler(tasks_of(a=1), catalogue_of(a=1_000_000), seed=0)
    drawn = {sampler.item(number).item_id for number in range(1_000_000, 1_000_800)}
    assert len(drawn) == 800


def test_sampler_never_draws_a_task_of_weight_zero() -> None:
    sampler = Sampler(tasks_of(a=0, b=1), catalogue_of(a=9, b=9), seed=0)
    assert {sampler.item(number).subset for number in range(50)} == {"b"}


def test_member_seeds_differ_and_fit_31_bits() -> None:
    seeds = {member_seed(0, number, member) for number in range(50) for member in range(8)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_spread_gives_the_largest_remainders_the_rest() -> None:
    # 10 * (1/7, 2/7, 4/7) = 1.43, 2.86, 5.71 -> 1, 2, 5 and the two largest remainders get one
    assert spread(10, weights=[1, 2, 4], caps=[100] * 3) == [1, 3, 6]


def test_spread_redistributes_capped_shares() -> None:
    assert spread(10, weights=[1, 1], caps=[2, 100]) == [2, 8]
    assert spread(10, weights=[1, 1], caps=[2, 3]) == [2, 3]
    assert spread(0, weights=[1, 1], caps=[2, 3]) == [0, 0]


def test_eval_items_are_first_test_items_spread_by_weight() -> None:
    items = eval_items(tasks_of(a=2, b=1), catalogue_of(a=9, b=9), 3)
    assert [item.item_id for item in items] == ["a-test-0", "a-test-1", "b-test-0"]


def test_validation_items_are_those_of_their_own_split() -> None:
    entry = SubsetEntry(num_train=9, num_test=9, num_validation=2, max_turns=1)
    catalogue = HubCatalogue(envs={"maze": {"a": entry}})
    items = eval_items(tasks_of(a=1), catalogue, -1, split=EvalSplit.VALIDATION)
    assert [item.item_id for item in items] == ["a-validation-0", "a-validation-1"]


def test_task_without_validation_items_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"eval\.split=validation: maze/a has no validation items"
    ):
        eval_items(tasks_of(a=1), catalogue_of(a=9), 3, split=EvalSplit.VALIDATION)

"""Laws of rows as paths of trees: each token once, in order, and cuts that repeat the fewest."""

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest

from learner.batch.batching import Sample, collate_tokens
from learner.batch.packing import MIN_SHARED_TOKENS, cut, forest_of
from tests.learner.builders import make_microbatches, make_trajectory

PROMPT = list(range(10, 10 + MIN_SHARED_TOKENS))


def rows_of(*tails: list[int]) -> list[Any]:
    """Return trajectories with a common prompt, each of which samples its last token."""
    ids = [[*PROMPT, *tail] for tail in tails]
    return [make_trajectory(each, [0] * (len(each) - 1) + [1]) for each in ids]


def random_rows(rng: np.random.Generator, num: int) -> list[Any]:
    """Return rows that branch from earlier rows anywhere after the prompt, or end there."""
    paths = [[*PROMPT, *rng.integers(0, 3, 6).tolist()]]
    while len(paths) < num:
        start = paths[rng.integers(len(paths))]
        kept = start[: rng.integers(len(PROMPT), len(start) + 1)]
        paths.append([*kept, *rng.integers(0, 3, rng.integers(0, 8)).tolist()])
    return [make_trajectory(path, [0] * (len(path) - 1) + [1]) for path in paths]


def test_forest_puts_rows_beside_their_longest_common_beginning() -> None:
    rows = rows_of([7, 1], [5, 2, 4], [7, 1, 3], [5, 2], [5, 2, 9])
    forest = forest_of(rows)
    assert forest.order == [3, 1, 4, 0, 2]
    assert forest.shared == [0, 10, 10, 8, 10]


def test_few_common_tokens_are_not_shared() -> None:
    few = [make_trajectory([*PROMPT[1:], last], [0] * 7 + [1]) for last in (1, 2)]
    assert forest_of(few).shared == [0, 0]
    assert forest_of(rows_of([1], [2])).shared == [0, 8]


def test_tree_has_one_position_for_each_distinct_beginning() -> None:
    rng = np.random.default_rng(0)
    for num in (1, 2, 5, 12):
        rows = random_rows(rng, num)
        samples = [Sample(trajectory=row, advantage=1.0) for row in rows]
        how: dict[str, Any] = {"device": "cpu", "is_packed": True, "shares_prefix": True}
        (micro,) = make_microbatches(samples, range(num), max_tokens=10_000, **how)
        ids = [row.token_ids.tolist() for row in rows]
        beginnings = {tuple(each[: n + 1]) for each in ids for n in range(len(each))}
        assert micro.tokens.num_computed == len(beginnings)
        assert micro.num_tokens == sum(map(len, ids))
        distinct = {tuple(each) for each in ids}  # Each row scores its last token.
        assert len(micro.tokens.target_ids) == len(distinct)


def test_position_is_the_depth_and_keys_are_the_ancestors() -> None:
    ids = [[1, 2, 3], [1, 2, 4, 5], [1, 6]]
    masks = [np.arange(len(each)) > 1 for each in ids]
    masks[2] = np.array([False, True])
    block = collate_tokens(
        [np.array(each) for each in ids], masks, device="cpu", is_packed=True, shared=[0, 2, 1]
    )
    assert block.token_ids[0, :6].tolist() == [1, 2, 3, 4, 5, 6]
    assert block.position_ids is not None
    assert block.position_ids[0, :6].tolist() == [0, 1, 2, 2, 3, 1]
    assert block.packing is not None
    assert block.packing.lengths[:3] == (3, 2, 1)
    assert block.packing.key_rows is not None
    keys = block.packing.key_rows.split(list(block.packing.key_lengths))
    assert [each.tolist() for each in keys[:3]] == [[0, 1, 2], [0, 1, 3, 4], [0, 5]]
    # The second token predicts 3 in the first row and 4 in the second.
    assert block.source_rows.tolist() == [1, 1, 3, 0]
    assert block.target_ids.tolist() == [3, 4, 5, 6]


def test_token_of_several_rows_is_scored_once_and_returned_to_each() -> None:
    ids = [np.array([1, 2, 3]), np.array([1, 2, 3, 4])]
    masks = [np.array([False, True, True]), np.array([False, True, False, True])]
    block = collate_tokens(ids, masks, device="cpu", is_packed=True, shared=[0, 3])
    assert block.target_ids.tolist() == [2, 3, 4]
    assert block.scored_at is not None
    assert block.scored_at.tolist() == [0, 1, 0, 2]
    every = [np.zeros((n, 1), dtype=np.int64) for n in (2, 2)]
    with_support = collate_tokens(
        ids, masks, device="cpu", is_packed=True, shared=[0, 3], support=every
    )
    assert with_support.target_ids.tolist() == [2, 3, 2, 4]  # A row has tokens of its own there.
    assert with_support.scored_at is None


def test_unlike_tokens_cannot_be_shared() -> None:
    ids = [np.array([1, 2, 3]), np.array([1, 9, 3])]
    masks = [np.arange(3) > 1] * 2
    with pytest.raises(ValueError, match="do not begin with the same 2 tokens"):
        collate_tokens(ids, masks, device="cpu", is_packed=True, shared=[0, 2])


def test_no_rows_make_no_pieces() -> None:
    assert cut([], [], max_tokens=10) == []


def test_cut_is_made_where_the_rows_share_least() -> None:
    lengths, shared = [20, 20, 20, 20], [0, 15, 5, 15]
    assert cut(lengths, shared, max_tokens=44) == [range(2), range(2, 4)]
    assert cut(lengths, shared, max_tokens=45) == [range(4)]
    assert cut(lengths, shared, max_tokens=10) == [range(n, n + 1) for n in range(4)]
    assert cut([8, 8, 8], [0, 0, 4], max_tokens=100) == [range(1), range(1, 3)]


def test_cuts_repeat_as_few_tokens_as_the_best_of_all_cuts() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        rows = random_rows(rng, 8)
        forest = forest_of(rows)
        lengths = [len(rows[index].token_ids) for index in forest.order]
        found = cut(lengths, forest.shared, max_tokens=30)
        assert [n for piece in found for n in piece] == list(range(8))
        costs: list[tuple[int, int]] = []
        for num in range(8):
            for inner in combinations(range(1, 8), num):
                pieces = [range(*pair) for pair in pairwise([0, *inner, 8])]
                sizes = [
                    sum(lengths[piece.start : piece.stop])
                    - sum(forest.shared[piece.start + 1 : piece.stop])
                    for piece in pieces
                ]
                if all(s <= 30 or len(p) == 1 for s, p in zip(sizes, pieces, strict=True)):
                    costs.append((sum(forest.shared[at] for at in inner), len(pieces)))
        assert (sum(forest.shared[piece.start] for piece in found), len(found)) == min(costs)


def test_sampled_tokens_of_common_beginnings_count_once() -> None:
    mask = [0] * len(PROMPT) + [1, 1]
    rows = [make_trajectory([*PROMPT, *tail], mask) for tail in ([1, 2], [1, 3], [1, 2])]
    assert forest_of(rows).num_scored(rows) == 3


def test_rows_with_equal_records_are_adjacent() -> None:
    ids = np.ones((10, 2, 1), dtype=np.uint8)
    other = ids.copy()
    other[9] = 3
    kinds = [ids, other, ids, other]  # The last tokens alone would mix them.
    rows = [
        make_trajectory(
            [*PROMPT, 1, 1, last],
            [0] * 10 + [1],
            expert_ids=np.concatenate([kind, ids[:1]]),
            expert_mask=np.ones(11, dtype=bool),
        )
        for last, kind in enumerate(kinds)
    ]
    forest = forest_of(rows)
    assert forest.order == [0, 2, 1, 3]
    assert forest.shared == [0, 10, 9, 10]

"""Laws of the parts of a packed row, with numbers computed by hand."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from learner.batch.batching import PADDING_ID, RowPart, TokenBatch, collate_tokens, row_part
from learner.batch.packing import Recorded


class Group:
    """The place of a rank in a group, without processes."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def parts_of(tokens: TokenBatch, size: int) -> list[RowPart]:
    return [row_part(tokens, cast(Any, Group(rank, size))) for rank in range(size)]


@pytest.fixture
def tokens() -> TokenBatch:
    """Return a row of 32 positions: a prefix of 12, two tails of 8, and a filling of 4."""
    sequences = [np.arange(1, 21), np.concatenate([np.arange(1, 13), np.arange(31, 39)])]
    masks = [np.isin(np.arange(20), (12, 19)) for _ in sequences]
    ids = np.arange(40, dtype=np.uint8).reshape(20, 2, 1)
    recorded: list[Recorded | None] = [(ids, np.ones(20, dtype=bool)), None]
    shared = [0, 12]
    return collate_tokens(
        sequences, masks, device="cpu", is_packed=True, shared=shared, recorded=recorded
    )


def test_part_has_its_own_positions_and_targets(tokens: TokenBatch) -> None:
    first, second = (each.tokens for each in parts_of(tokens, 2))
    assert first.token_ids.tolist() == [list(range(1, 17))]
    assert second.token_ids.tolist() == [[*range(17, 21), *range(31, 39), *[PADDING_ID] * 4]]
    assert second.position_ids is not None
    assert second.position_ids.tolist() == [[*range(16, 20), *range(12, 20), 0, 0, 0, 0]]
    assert second.routes is not None
    assert second.routes.ids[:, 0, 0].tolist() == [32, 34, 36, 38, *[0] * 12]
    assert second.routes.mask.tolist() == [True] * 4 + [False] * 12
    assert first.source_rows.tolist() == [11, 11]  # the end of the prefix predicts two tokens
    assert first.target_ids.tolist() == [13, 31]
    assert second.source_rows.tolist() == [2, 10]  # rows 18 and 26 of the whole row
    assert second.target_ids.tolist() == [20, 38]
    assert first.last_rows.tolist() == []
    assert second.last_rows.tolist() == [3, 11]


def test_tokens_of_a_teacher_stay_with_their_targets(tokens: TokenBatch) -> None:
    support = torch.arange(8).reshape(4, 2)  # for the targets 13, 20, 31 and 38
    parts = parts_of(replace(tokens, support_ids=support), 2)
    found = [part.tokens.support_ids for part in parts]
    assert [None if each is None else each.tolist() for each in found] == [
        [[0, 1], [4, 5]],
        [[2, 3], [6, 7]],
    ]
    assert parts_of(tokens, 2)[0].tokens.support_ids is None


def test_gathered_entries_return_to_their_order(tokens: TokenBatch) -> None:
    for part in parts_of(tokens, 2):
        assert part.scored.most == 2
        assert part.scored.at.tolist() == [0, 2, 1, 3]  # rows 11, 18, 11 and 26
        assert part.ends.at.tolist() == [2, 3]


def test_last_part_is_filled_to_the_size_of_others(tokens: TokenBatch) -> None:
    parts = parts_of(tokens, 3)  # 3 x 11 = 33 positions
    assert [each.tokens.token_ids.shape for each in parts] == [(1, 11)] * 3
    assert parts[2].tokens.token_ids[0, -1] == PADDING_ID
    assert [each.tokens.source_rows.tolist() for each in parts] == [[], [0, 7, 0], [4]]
    assert parts[0].scored.at.tolist() == [3, 4, 5, 6]
    assert parts[0].scored.most == 3


def test_row_without_scored_tokens_has_one_place_for_each_rank() -> None:
    idle = collate_tokens([np.arange(1)], [np.zeros(1, dtype=bool)], device="cpu", is_packed=True)
    part = parts_of(idle, 2)[1]
    assert part.scored.most == 1
    assert part.scored.at.tolist() == []

"""Laws of an episode's rows, and of a step's samples as bytes."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from common.config.algorithm import Advantage, AlgorithmSection, CreditLevel, RowCredit
from common.config.learner import CriticSection, Timestep
from common.segments import as_rows, joined
from common.wire.messages import Trajectory
from learner.algorithms.critic import with_advantages
from learner.batch.batching import Sample, rows_of, with_row_credit
from learner.ingest.buffer import Group
from learner.ingest.intake import refusal
from learner.objective.advantages import samples_of
from learner.training.ranks import pack_samples, unpack_samples
from tests.learner.builders import make_samples, make_trajectory


def test_samples_come_back_as_they_were() -> None:
    one, two, three = make_samples(num_groups=3, size=1)
    samples = [
        replace(one, advantage=0.1, turn_advantages=np.array([0.5, -0.5], dtype=np.float32)),
        replace(two, turn_advantages=np.zeros(0, dtype=np.float32)),
        replace(three, own_advantages=np.array([1.0, 2.0, 3.0], dtype=np.float32)),
    ]
    found = unpack_samples(pack_samples(samples))
    assert [s.advantage for s in found] == [0.1, 1.0, 1.0]
    for name in ("turn_advantages", "own_advantages"):
        for before, after in zip(samples, found, strict=True):
            assert _same(getattr(before, name), getattr(after, name))
    for before, after in zip(samples, found, strict=True):
        for field in fields(before.trajectory):
            name = field.name
            assert _same(getattr(before.trajectory, name), getattr(after.trajectory, name)), name


def test_numbers_that_are_not_finite_survive() -> None:
    (sample,) = make_samples(num_groups=1, size=1)
    sample.trajectory.logprobs[:] = np.nan
    (found,) = unpack_samples(pack_samples([sample]))
    assert np.isnan(found.trajectory.logprobs).all()


def _same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return one == other


def forked(**changes: Any) -> Trajectory:
    """Return an agent's episode with the rows [p a q b], [p a r c] and [s d d]; p a is stored once.

    The sampled tokens are a, b, c and d d, in the turns 0, 2, 1 and 0.
    """
    return make_trajectory(
        [1, 2, 3, 4, 5, 6, 7, 8, 8],
        [0, 1, 0, 1, 0, 1, 0, 1, 1],
        logprobs=[-0.1, -0.2, -0.3, -0.4, -0.5],
        **{
            "segment_starts": np.array([0, 4, 6], dtype=np.int32),
            "segment_prefixes": np.array([0, 0, 0, 2, 0, 0], dtype=np.int32),
            "num_turns": 3,
            "turn_ids": np.array([0, 0, 2, 2, 1, 1, 0, 0, 0], dtype=np.int32),
            "invalid_turns": np.zeros(3, dtype=bool),
            "turn_scores": np.array([0.0, 0.5, 1.0], dtype=np.float32),
        }
        | changes,
    )


def refused(trajectory: Trajectory, max_tokens: int = 4) -> str:
    return refusal(
        trajectory, learner_version=3, max_group_size=4, vocab_size=9, max_tokens=max_tokens
    )


def test_rows_have_their_shared_beginning_without_loss() -> None:
    assert refused(forked()) == ""
    rows = as_rows(forked())
    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 3, 4], [1, 2, 5, 6], [7, 8, 8]]
    assert [row.loss_mask.tolist() for row in rows] == [[0, 1, 0, 1], [0, 0, 0, 1], [0, 1, 1]]
    assert rows[1].logprobs.tolist() == pytest.approx([0, 0, 0, -0.3])
    assert rows[1].versions.tolist() == [-1, -1, -1, 0]
    assert refused(joined(rows)) == ""
    assert [row.token_ids.tolist() for row in as_rows(joined(rows))] == [
        row.token_ids.tolist() for row in rows
    ]


@pytest.mark.parametrize(
    ("prefixes", "text"),
    [
        ([0, 0, 0, 5, 0, 0], "segment 1 begins with 5 tokens of segment 0"),
        ([0, 1, 0, 2, 0, 0], "segment 0 begins with 1 tokens of segment 0"),
        ([0, 0, 1, 2, 0, 0], "segment 1 begins with 2 tokens of segment 1"),
        ([0, 0, -1, 2, 0, 0], "segment 1 begins with 2 tokens of segment -1"),
        ([0, 0, 0, -1, 0, 0], "segment 1 begins with -1 tokens of segment 0"),
        ([0, 0, 0, 2], "segment_prefixes is int32 (4,), not"),
        ([0, 0, 0, 4, 0, 0], "a segment has 6 tokens, more than a microbatch of 4"),
    ],
)
def test_impossible_prefix_is_refused(prefixes: list[int], text: str) -> None:
    assert text in refused(forked(segment_prefixes=np.array(prefixes, dtype=np.int32)))


@pytest.mark.parametrize(
    ("credit", "weights"),
    [
        (RowCredit.ALL, [1, 1, 1, 1, 1]),
        (RowCredit.ROOT, [1, 1, 1, 0, 0]),  # The second row continues the first answer.
        (RowCredit.SHARE, [0.4, 0.4, 0.2, 0.4, 0.4]),
    ],
)
def test_row_credit_weighs_the_rows_of_an_episode(credit: RowCredit, weights: list[float]) -> None:
    members = [forked(reward=1.0), forked(reward=0.0, member=1)]
    algorithm = AlgorithmSection(row_credit=credit, normalize_std=False)
    samples = samples_of([Group(group_id="g0", members=members)], algorithm)
    found = [row.token_advantages() for row in rows_of(samples)]
    assert np.concatenate(found[:3]).tolist() == pytest.approx(weights)
    assert np.concatenate(found[3:]).tolist() == pytest.approx([-each for each in weights])


def test_row_of_another_prompt_with_the_same_start_is_no_root() -> None:
    """The third row shares the prompt of the first one, but none of its answers."""
    prefixes = np.array([0, 0, 0, 2, 0, 1], dtype=np.int32)
    sample = Sample(trajectory=forked(segment_prefixes=prefixes), advantage=1.0)
    weighed = with_row_credit(sample, RowCredit.ROOT)
    assert weighed.token_advantages().tolist() == [1, 1, 1, 0, 0]


def test_critic_orders_the_turns_of_rows_that_alternate() -> None:
    """Turn 0 has tokens in two rows; its value is that of its first token."""
    values = np.array([0.5, 0.25, 0.75, 9.0, 9.0], dtype=np.float32)
    section = AlgorithmSection(advantage=Advantage.PPO, reward_level=CreditLevel.TURN)
    critic = CriticSection(timestep=Timestep.TURN, gae_lambda=0.0)
    scored = with_advantages(
        Sample(trajectory=forked(), advantage=0.0),
        values=values,
        bootstrap=0.0,
        log_ratios=np.zeros(5),
        algorithm=section,
        critic=critic,
    )
    # Rewards 0, .5, .5 of the turns, values .5 (a), .75 (c), .25 (b) before them.
    expected = {0: 0.0 + 0.75 - 0.5, 1: 0.5 + 0.25 - 0.75, 2: 0.5 - 0.25}
    turns = [0, 2, 1, 0, 0]
    assert scored.own_advantages is not None
    assert scored.own_advantages.tolist() == pytest.approx([expected[turn] for turn in turns])
    assert scored.state_marks is not None
    assert scored.state_marks.tolist() == [1, 1, 1, 0, 0]

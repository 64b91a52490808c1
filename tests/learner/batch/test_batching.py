"""Laws of minibatches and microbatches."""

import numpy as np
import pytest
import torch

from learner.batch.batching import Sample, collate_tokens, make_minibatches, plan_microbatches
from tests.learner.builders import make_microbatches, make_samples, make_trajectory


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_tokens_are_predicted_from_position_before() -> None:
    sequences = [np.array([5, 6, 7]), np.array([8, 9])]
    masks = [np.array([0, 1, 1], dtype=bool), np.array([0, 1], dtype=bool)]
    got = collate_tokens(sequences, masks, device="cpu")
    assert got.token_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert got.source_rows.tolist() == [0, 1, 3]
    assert got.target_ids.tolist() == [6, 7, 9]


def test_a_first_token_cannot_be_scored() -> None:
    with pytest.raises(ValueError, match="no predecessor"):
        collate_tokens([np.array([1, 2])], [np.array([True, True])], device="cpu")


def test_plan_covers_each_sequence_once_within_the_padded_budget() -> None:
    lengths = [3, 10, 4, 4, 9, 1, 2]
    plan = plan_microbatches(lengths, max_tokens=20)
    assert plan == [[1, 4], [2, 3, 0, 6, 5]]
    assert all(max(lengths[i] for i in block) * len(block) <= 20 for block in plan)


def test_sequence_beyond_budget_gets_own_microbatch() -> None:
    assert plan_microbatches([3, 50, 3], max_tokens=10) == [[1], [0, 2]]


def test_minibatches_hold_whole_groups_and_each_sample_once() -> None:
    samples = make_samples(num_groups=5, size=3)
    parts = make_minibatches(samples, 2, generator=generator())
    assert sorted(index for part in parts for index in part) == list(range(15))
    groups = [{samples[index].trajectory.group_id for index in part} for part in parts]
    assert [len(part) for part in groups] == [3, 2]
    assert groups[0].isdisjoint(groups[1])


def test_minibatches_split_groups_only_when_too_few() -> None:
    parts = make_minibatches(make_samples(num_groups=1, size=4), 2, generator=generator())
    assert sorted(len(part) for part in parts) == [2, 2]


def test_minibatches_are_never_empty() -> None:
    parts = make_minibatches(make_samples(num_groups=1, size=2), 5, generator=generator())
    assert sorted(parts) == [[0], [1]]


def test_minibatches_follow_the_generator() -> None:
    samples = make_samples(num_groups=8)
    draws = [make_minibatches(samples, 2, generator=generator(seed)) for seed in (1, 1, 2)]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]


def test_minibatches_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        make_minibatches([], 1, generator=generator())


def test_microbatch_keeps_tokens_in_sample_order() -> None:
    samples = [
        Sample(trajectory=make_trajectory([1, 2, 3], [0, 1, 0], logprobs=[-0.5]), advantage=2.0),
        Sample(
            trajectory=make_trajectory([4, 5, 6, 7], [0, 1, 0, 1], logprobs=[-1.5, -2.5]),
            advantage=-1.0,
        ),
    ]
    (micro,) = make_microbatches(samples, [0, 1], max_tokens=100, device="cpu")
    assert micro.sample_indices == [1, 0]  # longest first
    assert micro.tokens.target_ids.tolist() == [5, 7, 2]
    assert micro.sampler_logprobs.tolist() == [-1.5, -2.5, -0.5]
    assert micro.advantages.tolist() == [-1.0, -1.0, 2.0]
    assert micro.num_tokens == 7


def test_microbatch_ignores_values_at_unsampled_positions() -> None:
    trajectory = make_trajectory([4, 5, 6, 7], [0, 1, 0, 1], logprobs=[-1.5, -2.5])
    before = Sample(trajectory=trajectory, advantage=1.0)
    (clean,) = make_microbatches([before], [0], max_tokens=9, device="cpu")
    trajectory.logprobs[~trajectory.loss_mask] = np.nan
    trajectory.versions[~trajectory.loss_mask] = 999
    (dirty,) = make_microbatches([before], [0], max_tokens=9, device="cpu")
    assert torch.equal(clean.sampler_logprobs, dirty.sampler_logprobs)
    assert torch.equal(clean.advantages, dirty.advantages)

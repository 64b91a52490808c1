"""Laws of trees: a shared token has the mean credit, and each token is trained once."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.config.algorithm import Advantage, AlgorithmSection, Baseline
from common.segments import as_fork
from common.wire.messages import Trajectory
from learner.algorithms.trees import trees_of
from learner.batch.batching import rows_of
from learner.ingest.buffer import Group
from learner.ingest.intake import refusal
from learner.objective.advantages import samples_of
from tests.learner.builders import make_model, make_trajectory

PLAIN = AlgorithmSection(
    advantage=Advantage.GRPO, baseline=Baseline.GROUP_MEAN, normalize_std=False
)


def episode(member: int, reward: float, turns: list[int], **changes: Any) -> Trajectory:
    """Return an episode with a prompt token, then a sampled and an observed token each turn."""
    tokens = [1]
    for turn in turns:
        tokens += [turn, 2]
    mask = [0, *([1, 0] * len(turns))]
    ids = [0, *(number for number in range(len(turns)) for _ in range(2))]
    num = len(turns)
    return make_trajectory(
        tokens,
        mask,
        member=member,
        reward=reward,
        num_turns=num,
        num_invalid_actions=0,
        invalid_turns=np.zeros(num, bool),
        turn_scores=np.full(num, reward, np.float32),
        turn_ids=np.array(ids, np.int32),
        **changes,
    )


def fork(member: int, reward: float, turns: list[int], num: int, trunk: int = 0) -> Trajectory:
    return as_fork(episode(member, reward, turns), trunk=trunk, num_shared_turns=num)


def tree_of_three() -> list[Trajectory]:
    """Rewards 1, 0 and 0 of a trunk and its forks after turns 1 and 2; 3 of another tree: 0."""
    return [
        episode(0, 1.0, [10, 11, 12]),
        fork(1, 0.0, [10, 21, 22], 1),
        fork(2, 0.0, [10, 11, 32], 2),
        episode(3, 0.0, [40, 41, 42]),
    ]


def credit(members: list[Trajectory], algorithm: AlgorithmSection = PLAIN) -> list[list[float]]:
    """Return the advantages of each member's own sampled tokens."""
    samples = samples_of([Group(group_id="g0", members=members)], algorithm)
    return [sample.token_advantages().tolist() for sample in samples]


def test_shared_tokens_have_the_mean_of_their_members() -> None:
    # Group mean 1/4: .75, -.25, -.25, -.25. Tree mean 1/3: .66667, -.33333, -.33333.
    # Sums 1.41667, -.58333, -.58333. The first turn is shared by three, the second by two.
    expected = [[0.08333, 0.41667, 1.41667], [-0.58333, -0.58333], [-0.58333], [-0.25] * 3]
    for own, right in zip(credit(tree_of_three()), expected, strict=True):
        assert own == pytest.approx(right, abs=1e-4)


def test_tree_that_is_the_group_counts_once() -> None:
    # Mean 1/3 of three members.
    own = credit(tree_of_three()[:3])
    expected = [[0.0, 0.16667, 0.66667], [-0.33333, -0.33333], [-0.33333]]
    for left, right in zip(own, expected, strict=True):
        assert left == pytest.approx(right, abs=1e-4)


def test_group_without_forks_is_unchanged() -> None:
    members = [episode(n, float(n == 0), [10 + n, 20 + n]) for n in range(4)]
    assert credit(members) == [[0.75, 0.75], *[[-0.25, -0.25]] * 3]


@pytest.mark.parametrize("advantage", [Advantage.GRPO, Advantage.RLOO])
def test_gradient_is_that_of_rows_with_shares(advantage: Advantage) -> None:
    """A shared token trained once equals one that each row trains with the share 1/n."""
    algorithm = replace(PLAIN, advantage=advantage)
    members = tree_of_three()
    whole = [
        episode(0, 1.0, [10, 11, 12]),
        episode(1, 0.0, [10, 21, 22]),
        episode(2, 0.0, [10, 11, 32]),
        episode(3, 0.0, [40, 41, 42]),
    ]
    # The last own token of a member has its whole advantage.
    last = [own[-1] for own in credit(members, algorithm)]
    sharers = [[3, 2, 1], [3, 1, 1], [3, 2, 1], [1, 1, 1]]
    model = make_model()
    samples = samples_of([Group(group_id="g0", members=members)], algorithm)
    trained = [(s.trajectory, s.token_advantages()) for s in rows_of(samples)]
    unshared = [
        (row, np.array([last[index] / num for num in sharers[index]], np.float32))
        for index, row in enumerate(whole)
    ]
    torch.testing.assert_close(gradient(model, trained), gradient(model, unshared))


def gradient(model: torch.nn.Module, rows: list[tuple[Trajectory, np.ndarray]]) -> Tensor:
    """Return the gradient of the sum of advantages times log-probabilities."""
    model.zero_grad()
    for row, advantages in rows:
        ids = torch.from_numpy(row.token_ids).long()[None]
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        scored = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        chosen = scored[torch.from_numpy(row.loss_mask[1:])]
        (chosen * torch.from_numpy(advantages)).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_fork_of_another_attempt_belongs_to_no_tree() -> None:
    members = [*tree_of_three()[:3], fork(3, 0.0, [17, 18, 19], 1)]
    assert trees_of(members) == [[0, 1, 2]]


def test_fork_without_its_trunk_has_the_credit_of_the_group() -> None:
    assert trees_of(tree_of_three()[1:]) == []
    members = [fork(1, 1.0, [10, 21], 1), fork(2, 0.0, [10, 32], 1)]
    assert credit(members) == [[0.5], [-0.5]]


def test_fork_is_trained_on_its_own_turns_only() -> None:
    two = fork(1, 0.0, [10, 11, 12, 13], 3)
    assert two.token_ids[two.loss_mask].tolist() == [13]
    assert two.num_turns == 4
    assert refusal(two, learner_version=0, max_group_size=4, vocab_size=50) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trunk": 1}, "trunk=1 is no other member of a group of 4"),
        ({"trunk": 4}, "trunk=4 is no other member of a group of 4"),
        ({"num_shared_turns": 5}, "num_shared_turns=5 exceeds num_turns=4"),
        ({"num_shared_turns": 4}, "a token of the first 4 turns is marked as sampled"),
    ],
)
def test_malformed_fork_is_refused(changes: dict[str, int], words: str) -> None:
    wrong = replace(fork(1, 0.0, [10, 11, 12, 13], 3), **changes)
    assert words in refusal(wrong, learner_version=0, max_group_size=4, vocab_size=50)

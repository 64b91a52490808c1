"""Advantages of groups against the formulas of their papers, on a ragged batch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from common.config.algorithm import Advantage, AlgorithmSection, Baseline, StateCredit
from common.wire.messages import Trajectory
from learner.objective.advantages import samples_of
from tests.learner.objective.ragged import groups

Members = list[Trajectory]
EPSILON = 1e-6  # Added to deviations.
PLAIN: dict[str, Any] = {"baseline": Baseline.GROUP_MEAN, "advantage": Advantage.GRPO}


def grpo(members: Members) -> list[float]:
    """arXiv:2402.03300: (r - mean) / std over the group."""
    rewards = [m.reward for m in members]
    mean = sum(rewards) / len(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
    return [(r - mean) / (std + EPSILON) for r in rewards]


def dr_grpo(members: Members) -> list[float]:
    """arXiv:2503.20783: without the deviation."""
    return [m.reward - sum(each.reward for each in members) / len(members) for m in members]


def rloo(members: Members) -> list[float]:
    """arXiv:2402.14740: less the mean of the other members; zero for a single member."""
    found: list[float] = []
    for at, member in enumerate(members):
        others = [m.reward for k, m in enumerate(members) if k != at]
        found.append(member.reward - sum(others) / len(others) if others else 0.0)
    return found


def raw(members: Members) -> list[float]:
    return [m.reward - m.start_score for m in members]


def on_tokens(of_group: Callable[[Members], list[float]]) -> np.ndarray:
    """Return the same advantage on all sampled tokens of an episode, [tokens]."""
    parts: list[float] = []
    for group in groups():
        for member, advantage in zip(group.members, of_group(group.members), strict=True):
            parts += [advantage] * int(member.loss_mask.sum())
    return np.array(parts)


def whitened(tokens: np.ndarray) -> np.ndarray:
    """REINFORCE++, arXiv:2501.03262: normalised over the tokens of the global batch."""
    return (tokens - tokens.mean()) / (tokens.std() + EPSILON)


def computed(**settings: Any) -> np.ndarray:
    samples = samples_of(list(groups()), AlgorithmSection(**settings))
    return np.concatenate([sample.token_advantages() for sample in samples])


CASES: dict[str, tuple[dict[str, Any], Callable[[], np.ndarray]]] = {
    "grpo": (PLAIN | {"normalize_std": True}, lambda: on_tokens(grpo)),
    "dr grpo": (PLAIN, lambda: on_tokens(dr_grpo)),
    "rloo": ({"advantage": Advantage.RLOO}, lambda: on_tokens(rloo)),
    "reinforce++": ({"advantage": Advantage.REINFORCE_PP}, lambda: whitened(on_tokens(raw))),
    "reinforce++ with baseline": (
        {"advantage": Advantage.REINFORCE_PP_BASELINE},
        lambda: whitened(on_tokens(dr_grpo)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_advantages_are_those_of_the_paper(name: str) -> None:
    settings, paper = CASES[name]
    expected = paper()
    assert np.ptp(expected) > 0.5
    np.testing.assert_allclose(computed(**settings), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("is_scaled", [False, True])
def test_gigpo_adds_the_step_advantage_among_equal_states(is_scaled: bool) -> None:
    """arXiv:2505.10978, equations 4 to 8, by dictionaries: discount 0.95, undiscounted outcome."""
    expected: list[float] = []
    for group in groups():
        members, of_state = group.members, dict[int, list[float]]()
        ends = [(m.num_turns, m.reward - m.start_score) for m in members]
        gains = [[0.95 ** (last - 1 - t) * r for t in range(last)] for last, r in ends]
        for member, own in zip(members, gains, strict=True):
            for state, gain in zip(member.turn_states.tolist(), own, strict=True):
                of_state.setdefault(state, []).append(gain)
        of_episodes = (grpo if is_scaled else dr_grpo)(members)
        for member, own, of_episode in zip(members, gains, of_episodes, strict=True):
            for turn in member.turn_ids[member.loss_mask].tolist():
                peers = np.array(of_state[int(member.turn_states[turn])])
                step = own[turn] - peers.mean()
                expected.append(of_episode + step / (peers.std() + EPSILON if is_scaled else 1))
    result = computed(**PLAIN, normalize_std=is_scaled, state_credit=StateCredit.GIGPO)
    np.testing.assert_allclose(result, expected, atol=1e-6, rtol=0)

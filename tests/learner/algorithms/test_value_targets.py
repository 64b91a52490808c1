"""Laws of advantages and value targets: what a value belongs to and where rewards land."""

from dataclasses import replace

import numpy as np
import pytest

from common.config.algorithm import AlgorithmSection, CreditLevel
from common.config.learner import CriticSection, CriticTargets, Timestep
from common.wire.messages import EndReason, Trajectory
from learner.algorithms.critic import step_rewards, timesteps, with_advantages
from learner.batch.batching import Sample
from tests.learner.builders import make_trajectory


def listed(array: np.ndarray | None) -> list[float]:
    assert array is not None
    return array.tolist()


def episode(*, end: EndReason = EndReason.DONE, trailing: int = 1, **changes) -> Trajectory:
    """Build two turns of two sampled tokens each, an observation before, between and after."""
    mask = [0, 1, 1, 0, 0, 1, 1, *[0] * trailing]
    trajectory = make_trajectory(list(range(1, len(mask) + 1)), mask)
    return replace(
        trajectory,
        end_reason=end,
        num_turns=2,
        reward=1.0,
        turn_scores=np.array([0.25, 1.0], dtype=np.float32),
        invalid_turns=np.zeros(2, dtype=bool),
        turn_ids=np.array([0, 0, 0, 1, 1, 1, 1, *[1] * trailing], dtype=np.int32),
        **changes,
    )


def estimated(trajectory: Trajectory, values: list[float], **settings) -> Sample:
    algorithm = settings.pop("algorithm", AlgorithmSection())
    bootstrap = settings.pop("bootstrap", 9.0)
    log_ratios = settings.pop("log_ratios", np.zeros(len(values), dtype=np.float32))
    return with_advantages(
        Sample(trajectory=trajectory, advantage=0.0),
        values=np.array(values, dtype=np.float32),
        bootstrap=bootstrap,
        log_ratios=log_ratios,
        algorithm=algorithm,
        critic=CriticSection(**settings),
    )


def test_timesteps_are_turns_or_sampled_tokens() -> None:
    assert timesteps(episode(), Timestep.TURN).tolist() == [0, 0, 1, 1]
    assert timesteps(episode(), Timestep.TOKEN).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("trailing", [0, 1, 5])
def test_reward_belongs_to_last_action_token(trailing: int) -> None:
    algorithm = AlgorithmSection()
    got = step_rewards(episode(trailing=trailing), algorithm, Timestep.TOKEN)
    assert got.tolist() == [0.0, 0.0, 0.0, 1.0]


def test_turn_rewards_are_rises_of_score() -> None:
    algorithm = AlgorithmSection(reward_level=CreditLevel.TURN)
    assert step_rewards(episode(), algorithm, Timestep.TURN).tolist() == [0.25, 0.75]
    assert step_rewards(episode(), algorithm, Timestep.TOKEN).tolist() == [0.0, 0.25, 0.0, 0.75]


@pytest.mark.parametrize("trailing", [0, 1, 5])
@pytest.mark.parametrize("timestep", list(Timestep))
def test_full_trace_without_discount_is_return_minus_value(
    timestep: Timestep, trailing: int
) -> None:
    played = episode(trailing=trailing)
    got = estimated(played, [0.5, 0.4, 0.3, 0.2], timestep=timestep, gae_lambda=1.0)
    values = [0.5, 0.5, 0.3, 0.3] if timestep is Timestep.TURN else [0.5, 0.4, 0.3, 0.2]
    assert got.token_advantages().tolist() == pytest.approx([1.0 - v for v in values])
    assert listed(got.value_targets) == pytest.approx([1.0] * 4)


def test_turn_estimates_match_hand_computed_numbers() -> None:
    algorithm = AlgorithmSection(turn_discount=0.5)
    got = estimated(episode(), [0.5, 7.0, 0.4, 7.0], gae_lambda=0.5, algorithm=algorithm)
    # deltas: 0 + 0.5 * 0.4 - 0.5 = -0.3 and 1 - 0.4 = 0.6; A0 = -0.3 + 0.25 * 0.6
    assert got.token_advantages().tolist() == pytest.approx([-0.15, -0.15, 0.6, 0.6])
    assert listed(got.state_marks) == [1.0, 0.0, 1.0, 0.0]


def test_only_truncated_episodes_are_bootstrapped() -> None:
    values = [0.0] * 4
    done = estimated(replace(episode(), reward=0.0), values, bootstrap=0.5)
    for end in (EndReason.HORIZON, EndReason.TRUNCATED, EndReason.CONTEXT_FULL):
        cut = estimated(replace(episode(end=end), reward=0.0), values, bootstrap=0.5)
        assert cut.token_advantages().tolist() == [0.5] * 4
    assert done.token_advantages().tolist() == [0.0] * 4


TURN = AlgorithmSection(reward_level=CreditLevel.TURN)
PENALTY = AlgorithmSection(invalid_action_penalty=0.2)


@pytest.mark.parametrize(
    ("algorithm", "value", "target"),
    [
        # The level 0.6 is reached. At episode level a value is of the level at the end.
        (AlgorithmSection(), 0.7, 0.7),  # not 1.3
        (AlgorithmSection(), 0.1, 0.6),  # A reached score is kept.
        (AlgorithmSection(), 5.0, 1.0),  # no more than can be reached
        (AlgorithmSection(turn_discount=0.5), 0.8, 0.5 * 0.8),  # A later reward counts once.
        # At turn level it is of the rises that are still to come.
        (TURN, 0.3, 0.9),
        (TURN, 5.0, 1.0),
        (TURN, -0.1, 0.5),  # penalties to come
        # Half of the turns were invalid: 0.1 is paid at the end, and the value has it, too.
        (PENALTY, 0.7, 0.7),
        (PENALTY, 0.2, 0.5),
    ],
)
def test_target_of_cut_episode_is_bounded(
    algorithm: AlgorithmSection, value: float, target: float
) -> None:
    played = episode(end=EndReason.HORIZON)
    played = replace(
        played,
        reward=0.6,
        num_invalid_actions=1,
        turn_scores=np.array([0.0, 0.6], dtype=np.float32),
    )
    got = estimated(played, [0.0] * 4, bootstrap=value, algorithm=algorithm)
    assert listed(got.value_targets)[-1] == pytest.approx(target)


@pytest.mark.parametrize(("trailing", "target"), [(1, 0.8), (0, 0.3)])
def test_bootstrap_falls_back_to_the_last_states_value(trailing: int, target: float) -> None:
    played = replace(episode(end=EndReason.CONTEXT_FULL, trailing=trailing), reward=0.0)
    got = estimated(played, [0.5, 9.0, 0.3, 9.0], bootstrap=0.8)
    assert listed(got.value_targets)[-1] == pytest.approx(target)


def steady(num_turns: int, *, trailing: int, **changes) -> Trajectory:
    """Build an episode that was cut short, of turns of one sampled token each."""
    mask = [0, 1] * num_turns + [0] * trailing
    turn_ids = np.append(np.repeat(np.arange(num_turns), 2), [num_turns - 1] * trailing)
    plain = make_trajectory(list(range(1, len(mask) + 1)), mask)
    return replace(
        plain,
        end_reason=EndReason.HORIZON,
        num_turns=num_turns,
        invalid_turns=np.zeros(num_turns, dtype=bool),
        turn_ids=turn_ids.astype(np.int32),
        **changes,
    )


GAMMA = 0.9


@pytest.mark.parametrize("trailing", [0, 1])
@pytest.mark.parametrize("trace", [0.0, 0.5, 1.0])
def test_perfect_critic_reproduces_its_values_for_cut_episodes(trace: float, trailing: int) -> None:
    """Cut at 0.6 after 3 turns; the task would have paid 0.7 in the sixth turn after that."""
    algorithm = AlgorithmSection(turn_discount=GAMMA)
    scores = np.array([0.2, 0.4, 0.6], dtype=np.float32)
    played = steady(3, trailing=trailing, reward=0.6, turn_scores=scores)
    values = [0.7 * GAMMA**left for left in (8, 7, 6)]
    got = estimated(played, values, bootstrap=0.7 * GAMMA**5, algorithm=algorithm, gae_lambda=trace)
    assert values[-1] == pytest.approx(0.372, abs=1e-3)
    assert listed(got.value_targets) == pytest.approx(values, abs=1e-6)
    assert got.token_advantages().tolist() == pytest.approx([0.0] * 3, abs=1e-6)


@pytest.mark.parametrize("discount", [1.0, 0.5])
@pytest.mark.parametrize("trailing", [0, 1])
def test_last_turns_reward_counts_once_without_its_observation(
    trailing: int, discount: float
) -> None:
    """Each turn pays 0.1 and five more turns would; a value is the remaining reward."""
    algorithm = AlgorithmSection(reward_level=CreditLevel.TURN, turn_discount=discount)
    worth = [sum(0.1 * discount**k for k in range(left)) for left in (8, 7, 6, 5)]
    scores = np.array([0.1, 0.2, 0.3], dtype=np.float32)
    played = steady(3, trailing=trailing, reward=0.3, turn_scores=scores)
    got = estimated(played, worth[:3], bootstrap=worth[3], algorithm=algorithm)
    if discount == 1.0:
        assert worth[:3] == pytest.approx([0.8, 0.7, 0.6])
    assert listed(got.value_targets) == pytest.approx(worth[:3], abs=1e-6)


def test_value_target_may_fall_with_score() -> None:
    # A raw score in -20..0 begins at 1.0 and is at 0.9. The critic expects it to end at 0.7: -0.3.
    scores = np.array([0.95, 0.9], dtype=np.float32)
    played = steady(2, trailing=1, reward=0.9, turn_scores=scores, start_score=1.0)
    got = estimated(played, [0.0, 0.0], bootstrap=-0.3)
    assert listed(got.value_targets) == pytest.approx([-0.3, -0.3])
    by_turn = estimated(played, [0.0, 0.0], bootstrap=-0.2, algorithm=TURN)
    assert listed(by_turn.value_targets) == pytest.approx([-0.3, -0.25])


def test_vtrace_on_policy_equals_gae_with_full_trace() -> None:
    values = [0.5, 0.0, 0.25, 0.0]
    plain = estimated(episode(), values)
    corrected = estimated(
        episode(), values, targets=CriticTargets.VTRACE, log_ratios=np.zeros(4, dtype=np.float32)
    )
    assert corrected.token_advantages().tolist() == plain.token_advantages().tolist()
    assert listed(corrected.value_targets) == listed(plain.value_targets)


def test_vtrace_uses_ratio_of_whole_turn() -> None:
    log_ratios = np.log(np.array([0.5, 0.5, 1.0, 1.0], dtype=np.float32))
    got = estimated(episode(), [0.0] * 4, targets=CriticTargets.VTRACE, log_ratios=log_ratios)
    assert listed(got.value_targets) == pytest.approx([0.25, 0.25, 1.0, 1.0])

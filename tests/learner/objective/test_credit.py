"""Laws of samples."""

from dataclasses import replace

import numpy as np
import pytest

from common.config.algorithm import Advantage, AlgorithmSection, Baseline, CreditLevel
from common.formats.seats import seat_metrics
from common.wire.messages import Trajectory
from learner.algorithms.rewards import turn_rewards
from learner.algorithms.running import RunningBaseline
from learner.ingest.buffer import Group
from learner.objective.advantages import group_has_signal, samples_of
from tests.learner.builders import make_trajectory


def member(number: int, reward: float, *, num_invalid: int = 0) -> Trajectory:
    trajectory = make_trajectory([1, 2], [0, 1], member=number)
    return replace(trajectory, reward=reward, num_invalid_actions=num_invalid)


def test_each_member_gets_its_own_advantage_in_order() -> None:
    groups = [
        Group(group_id="a", members=[member(0, 1.0), member(1, 0.0), member(2, 0.5)]),
        Group(group_id="b", members=[member(0, 0.0), member(3, 1.0)]),
    ]
    samples = samples_of(groups, AlgorithmSection())
    assert [sample.advantage for sample in samples] == [0.75, -0.75, 0.0, -1.0, 1.0]
    assert [sample.trajectory.member for sample in samples] == [0, 1, 2, 0, 3]


def test_signal_is_judged_on_the_penalized_reward() -> None:
    members = [member(0, 1.0), member(1, 1.0, num_invalid=1)]
    assert not group_has_signal(members, AlgorithmSection())
    assert group_has_signal(members, AlgorithmSection(invalid_action_penalty=0.1))


def turns(number: int, reward: float, invalid: list[bool], *, tokens: int = 1) -> Trajectory:
    """Build a member that sampled `tokens` tokens in each of its turns."""
    ids = [1] + [2] * tokens * len(invalid)
    trajectory = make_trajectory(ids, [0] + [1] * (len(ids) - 1), member=number)
    turn_ids = [0] + [turn for turn in range(len(invalid)) for _ in range(tokens)]
    return replace(
        trajectory,
        reward=reward,
        num_turns=len(invalid),
        num_invalid_actions=sum(invalid),
        invalid_turns=np.array(invalid),
        turn_ids=np.array(turn_ids, dtype=np.int32),
    )


def test_turn_penalty_applies_to_invalid_turns_and_sums_to_zero() -> None:
    cfg = AlgorithmSection(invalid_action_penalty=0.4, invalid_action_level=CreditLevel.TURN)
    group = Group(group_id="a", members=[turns(0, 1.0, [False, True]), turns(1, 0.0, [False] * 2)])
    first, second = samples_of([group], cfg)
    assert first.token_advantages().tolist() == pytest.approx([1.0, 1.0 - 0.4])
    assert second.token_advantages().tolist() == pytest.approx([-1.0, -1.0 + 0.4])


def test_turn_penalty_alone_gives_signal() -> None:
    cfg = AlgorithmSection(invalid_action_penalty=0.4, invalid_action_level=CreditLevel.TURN)
    assert group_has_signal([turns(0, 0.0, [True]), turns(1, 0.0, [False])], cfg)
    assert not group_has_signal([turns(0, 0.0, [True]), turns(1, 0.0, [True])], cfg)


def test_turn_discount_prefers_the_shorter_solution() -> None:
    group = Group(group_id="a", members=[turns(0, 1.0, [False]), turns(1, 1.0, [False] * 3)])
    short, long = samples_of([group], AlgorithmSection(turn_discount=0.5))
    assert short.advantage == pytest.approx(1.0 - 0.25)
    assert long.advantage == pytest.approx(0.25 - 1.0)


def scored(number: int, scores: list[float], *, tokens: int = 1) -> Trajectory:
    """Build a member with the score `scores` after its turns."""
    trajectory = turns(number, scores[-1], [False] * len(scores), tokens=tokens)
    return replace(trajectory, turn_scores=np.array(scores, dtype=np.float32))


def test_rloo_ignores_the_knobs_of_grpo() -> None:
    group = Group(group_id="a", members=[member(0, 1.0), member(1, 0.0), member(2, 0.5)])
    cfg = AlgorithmSection(
        advantage=Advantage.RLOO, baseline=Baseline.GROUP_MEAN, normalize_std=True
    )
    assert [s.advantage for s in samples_of([group], cfg)] == [0.75, -0.75, 0.0]


def test_reinforce_pp_whitens_over_batch_tokens() -> None:
    groups = [
        Group(group_id="a", members=[scored(0, [1.0], tokens=3), scored(1, [0.0])]),
        Group(group_id="b", members=[scored(0, [1.0]), scored(1, [1.0])]),
    ]
    samples = samples_of(groups, AlgorithmSection(advantage=Advantage.REINFORCE_PP))
    # tokens 1 1 1 0 1 1: mean 5/6, deviation sqrt(5)/6
    assert samples[0].token_advantages().tolist() == pytest.approx([0.4472] * 3, abs=1e-3)
    assert samples[1].token_advantages().tolist() == pytest.approx([-2.2361], abs=1e-3)
    flat = np.concatenate([s.token_advantages() for s in samples])
    assert flat.mean() == pytest.approx(0.0, abs=1e-6)
    assert flat.std() == pytest.approx(1.0, abs=1e-4)


def test_reinforce_pp_baseline_centres_each_group_first() -> None:
    groups = [
        Group(group_id="easy", members=[scored(0, [1.0]), scored(1, [0.5])]),
        Group(group_id="hard", members=[scored(0, [0.5]), scored(1, [0.0])]),
    ]
    samples = samples_of(groups, AlgorithmSection(advantage=Advantage.REINFORCE_PP_BASELINE))
    flat = [float(s.token_advantages()[0]) for s in samples]
    assert flat == pytest.approx([1.0, -1.0, 1.0, -1.0], abs=1e-4)


def test_only_group_relative_algorithms_filter_equal_groups() -> None:
    members = [member(0, 1.0), member(1, 1.0)]
    has_signal = {
        kind: group_has_signal(members, AlgorithmSection(advantage=kind)) for kind in Advantage
    }
    assert {kind for kind, has in has_signal.items() if has} == {
        Advantage.REINFORCE_PP,
        Advantage.PPO,
        Advantage.RUNNING,
    }


def test_turn_level_reward_credits_later_rewards() -> None:
    cfg = AlgorithmSection(reward_level=CreditLevel.TURN, turn_discount=0.5)
    group = Group(group_id="a", members=[scored(0, [0.0, 1.0]), scored(1, [0.5, 0.5])])
    first, second = samples_of([group], cfg)
    # Returns 0.5 1.0 and 0.5 0.0, less the other's in the same turn.
    assert first.token_advantages().tolist() == pytest.approx([0.0, 1.0])
    assert second.token_advantages().tolist() == pytest.approx([0.0, -1.0])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # By turn: 1 0 0, then 1 1 0: members that ended are held at their last return.
        ({}, [[1.0, 0.5, 0.5, 0.5], [-0.5, 0.5], [-0.5]]),
        ({"baseline": Baseline.GROUP_MEAN}, [[2 / 3, *[1 / 3] * 3], [-1 / 3, 1 / 3], [-1 / 3]]),
        ({"advantage": Advantage.RLOO}, [[1.0, 0.5, 0.5, 0.5], [-0.5, 0.5], [-0.5]]),
    ],
)
def test_turn_level_baseline_compares_turns_of_equal_number(
    settings: dict, expected: list[list[float]]
) -> None:
    cfg = AlgorithmSection(reward_level=CreditLevel.TURN, **settings)
    # Returns 1 1 1 1; 0 1 (the first turn's fall is paid back by the second's rise); 0.
    members = [scored(0, [0.0, 0.0, 0.0, 1.0]), scored(1, [0.0, 0.0]), scored(2, [0.0])]
    members[1] = replace(
        members[1], turn_scores=np.array([-1.0, 0.0], dtype=np.float32), reward=0.0
    )
    got = samples_of([Group(group_id="a", members=members)], cfg)
    assert [s.token_advantages().tolist() for s in got] == [pytest.approx(e) for e in expected]


OF_GROUPS = [kind for kind in Advantage if AlgorithmSection(advantage=kind).is_group_relative]


@pytest.mark.parametrize("baseline", list(Baseline))
@pytest.mark.parametrize("advantage", OF_GROUPS)
@pytest.mark.parametrize("scores", [[1.0] * 4, [0.1, 0.3, 0.7], [0.0, 0.5, 0.2]])
def test_identical_members_have_no_signal_at_turn_level(
    scores: list[float], advantage: Advantage, baseline: Baseline
) -> None:
    members = [scored(number, scores) for number in range(4)]
    plain = AlgorithmSection(reward_level=CreditLevel.TURN, advantage=advantage, baseline=baseline)
    for cfg in (plain, replace(plain, normalize_std=True), replace(plain, turn_discount=0.9)):
        got = samples_of([Group(group_id="a", members=members)], cfg)
        assert [s.token_advantages().tolist() for s in got] == [[0.0] * len(scores)] * 4
        assert not group_has_signal(members, cfg)


@pytest.mark.parametrize("baseline", list(Baseline))
def test_members_with_equal_invalid_turns_have_no_signal(baseline: Baseline) -> None:
    cfg = AlgorithmSection(
        invalid_action_penalty=0.4, invalid_action_level=CreditLevel.TURN, baseline=baseline
    )
    members = [turns(number, 1.0, [True, False, False]) for number in range(3)]
    got = samples_of([Group(group_id="a", members=members)], cfg)
    assert [s.token_advantages().tolist() for s in got] == [[0.0] * 3] * 3
    assert not group_has_signal(members, cfg)


def test_solutions_of_different_lengths_have_no_signal_at_turn_level() -> None:
    members = [scored(number, [*[0.0] * number, 1.0]) for number in range(4)]
    assert not group_has_signal(members, AlgorithmSection(reward_level=CreditLevel.TURN))


def test_turn_penalty_outlasts_other_members() -> None:
    cfg = AlgorithmSection(invalid_action_penalty=0.4, invalid_action_level=CreditLevel.TURN)
    group = Group(group_id="a", members=[turns(0, 0.0, [True]), turns(1, 0.0, [False, True])])
    first, second = samples_of([group], cfg)
    assert first.token_advantages().tolist() == pytest.approx([-0.4])
    assert second.token_advantages().tolist() == pytest.approx([0.4, -0.4])


def test_member_without_peers_in_its_turns_has_zero_advantage() -> None:
    cfg = AlgorithmSection(reward_level=CreditLevel.TURN)
    empty = replace(turns(1, 0.0, []), turn_scores=np.zeros(0, dtype=np.float32))
    group = Group(group_id="a", members=[scored(0, [0.0, 0.5]), empty])
    assert samples_of([group], cfg)[0].token_advantages().tolist() == [0.0, 0.0]


def test_turn_rewards_sum_to_the_final_score() -> None:
    cfg = AlgorithmSection(reward_level=CreditLevel.TURN)
    got = turn_rewards(scored(0, [0.25, 0.25, 0.75]), cfg)
    assert got.tolist() == pytest.approx([0.25, 0.0, 0.5])
    assert turn_rewards(scored(0, [0.25, 0.75]), AlgorithmSection()).tolist() == [0.0, 0.75]


def test_first_turn_is_paid_above_the_start() -> None:
    """Raw scores -1, -2, -3 in a range of -20..0: each turn is paid -1/20."""
    played = replace(scored(0, [0.95, 0.9, 0.85]), start_score=1.0)
    by_turn = turn_rewards(played, AlgorithmSection(reward_level=CreditLevel.TURN))
    assert by_turn.tolist() == pytest.approx([-0.05] * 3)
    at_end = turn_rewards(played, AlgorithmSection())
    assert at_end.tolist() == pytest.approx([0.0, 0.0, -0.15])


def test_discount_brings_a_cost_nearer_to_nothing() -> None:
    """Raw -3 of -20..0 after three turns is worth -0.15 * 0.5^2, not 0.85 * 0.5^2."""
    late = replace(scored(0, [1.0, 1.0, 0.85]), start_score=1.0)
    soon = replace(scored(1, [0.85]), start_score=1.0)
    first, second = samples_of(
        [Group(group_id="a", members=[late, soon])], AlgorithmSection(turn_discount=0.5)
    )
    assert first.advantage == pytest.approx(-0.0375 + 0.15)
    assert second.advantage == pytest.approx(-0.15 + 0.0375)


def test_normalisation_per_environment_equalises_advantage_scales() -> None:
    groups = [
        Group(group_id="a", members=[scored(0, [1.0]), scored(1, [0.0])]),
        Group(
            group_id="b",
            members=[replace(t, env="b") for t in (scored(0, [0.1]), scored(1, [0.0]))],
        ),
    ]
    samples = samples_of(groups, AlgorithmSection(normalize_per_env=True))
    flat = [float(s.token_advantages()[0]) for s in samples]
    assert flat == pytest.approx([1.0, -1.0, 1.0, -1.0], abs=1e-3)


def test_baseline_covers_survivors_of_damaged_group() -> None:
    survivors = [member(0, 1.0), member(3, 0.0)]  # Two of four members survive.
    samples = samples_of([Group(group_id="a", members=survivors)], AlgorithmSection())
    assert [s.advantage for s in samples] == [1.0, -1.0]


def test_running_mean_belongs_to_a_seat_and_an_opponent() -> None:
    """Seat 0 wins 9 of 10 games against itself; equal play has no advantage in any seat."""
    cfg, baseline = AlgorithmSection(advantage=Advantage.RUNNING), RunningBaseline()
    rng = np.random.default_rng(0)
    advantages: dict[str, list[float]] = {"0": [], "1": [], "random": []}
    for _ in range(400):
        members = []
        for number, name in enumerate(advantages):
            reward = float(rng.random() < {"0": 0.9, "1": 0.1, "random": 0.6}[name])
            seat, opponent = (1, name) if name == "random" else (int(name), "self")
            metrics = seat_metrics(seat, opponent, reward)
            members.append(replace(member(number, reward), item_id="Game-3", metrics=metrics))
        samples = samples_of([Group(group_id="g", members=members)], cfg, baseline)
        for name, sample in zip(advantages, samples, strict=True):
            advantages[name].append(sample.advantage)
    means = [float(np.mean(each[50:])) for each in advantages.values()]
    assert means == pytest.approx([0.0] * 3, abs=0.05)


def test_equal_episodes_have_no_advantage_over_running_means_of_turns() -> None:
    baseline = RunningBaseline()
    of_turns = AlgorithmSection(
        advantage=Advantage.RUNNING,
        reward_level=CreditLevel.TURN,
        invalid_action_penalty=0.4,
        invalid_action_level=CreditLevel.TURN,
    )
    for cfg in (of_turns, replace(of_turns, reward_level=CreditLevel.EPISODE)):
        for _ in range(3):
            members = [
                replace(turns(n, 1.0, [True, False, False]), turn_scores=np.array([0, 0.25, 1.0]))
                for n in range(2)
            ]
            got = samples_of([Group(group_id="a", members=members)], cfg, baseline)
            assert [s.token_advantages().tolist() for s in got] == [[0.0] * 3] * 2


def test_running_mean_of_a_turn_is_that_of_its_number() -> None:
    """Of the item: returns 1 1 after turns 1 and 2; of its task also 0. Prior 1, memory .5."""
    cfg = AlgorithmSection(
        advantage=Advantage.RUNNING,
        reward_level=CreditLevel.TURN,
        running_memory=0.5,
        running_prior=1.0,
    )
    baseline = RunningBaseline()

    def played(item: str, scores: list[float]) -> list[float]:
        members = [replace(scored(0, scores), item_id=item)]
        (sample,) = samples_of([Group(group_id="g", members=members)], cfg, baseline)
        return sample.token_advantages().tolist()

    assert played("T-0", [0.0, 1.0]) == [0.0, 0.0]  # Nothing is known.
    assert played("T-1", [0.0]) == [-1.0]  # T expects 1 after turn 1.
    # Turn 1: T expects 1/3 * 1, the item (1 + 1/3) / 2. Turn 2: both expect 1. Turn 3: unknown.
    expected = [0.5 - 2 / 3, 0.5 - 1.0, 0.0]
    assert played("T-0", [0.0, 0.0, 0.5]) == pytest.approx(expected)

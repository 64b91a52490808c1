"""Laws of a batch's advantages from its critic, by hand-computed numbers."""

from dataclasses import replace

import numpy as np
import pytest

from common.config.algorithm import AlgorithmSection, CreditLevel
from common.config.learner import CriticSection, CriticTargets
from common.segments import part_of
from common.wire.messages import EndReason
from learner.batch.batching import Sample
from learner.objective.advantages import Scored, advantages_from_critic
from tests.learner.builders import make_episode, make_trajectory, so_far


def samples() -> list[Sample]:
    """Build a solved episode of two tokens and, in another environment, a cut one of one token."""
    solved = make_trajectory([1, 2, 3], [0, 1, 1], logprobs=[-1.0, -2.0])
    cut = replace(
        make_trajectory([1, 2, 3], [0, 1, 0], logprobs=[-1.0], group_id="g1"),
        env="other",
        reward=0.0,
        end_reason=EndReason.HORIZON,
    )
    return [Sample(trajectory=t, advantage=0.0) for t in (solved, cut)]


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


SCORED = Scored(
    values=floats(0.25, 9.0, 0.5),  # the second token's is of no turn's first state
    end_values=floats(7.0, 0.3),
    logprobs=floats(-1.0, -2.0, -1.0),
)


def advantages(
    algorithm: AlgorithmSection | None = None, scored: Scored = SCORED, **critic
) -> list[list[float]]:
    found = advantages_from_critic(
        samples(), scored, algorithm or AlgorithmSection(), CriticSection(**critic)
    )
    return [sample.token_advantages().tolist() for sample in found]


def test_each_sample_uses_its_own_values_and_bootstrap() -> None:
    first, second = advantages(whiten=False)
    assert first == pytest.approx([0.75, 0.75])  # 1 - 0.25; a true end has no bootstrap
    assert second == pytest.approx([-0.2])  # 0 + 0.3 - 0.5: cut, so what would have followed counts


def test_whitening_covers_the_batchs_tokens() -> None:
    first, second = advantages()
    # 0.75 0.75 -0.2: mean 0.4333, deviation 0.95 * sqrt(2) / 3 = 0.4478
    assert first == pytest.approx([0.7071, 0.7071], abs=1e-3)
    assert second == pytest.approx([-1.4142], abs=1e-3)


def test_normalize_per_env_scales_each_environment() -> None:
    got = advantages(AlgorithmSection(normalize_per_env=True), whiten=False)
    assert got[0] == pytest.approx([1.0, 1.0], abs=1e-4)
    assert got[1] == pytest.approx([-1.0], abs=1e-4)


def test_vtrace_takes_the_policy_over_the_sampler() -> None:
    # The first episode is half as likely now as when it was sampled, over both of its tokens.
    now = SCORED.logprobs - floats(np.log(2.0), 0.0, 0.0)
    found = advantages_from_critic(
        samples(),
        replace(SCORED, logprobs=now),
        AlgorithmSection(),
        CriticSection(targets=CriticTargets.VTRACE, whiten=False),
    )
    assert found[0].value_targets is not None
    assert found[0].value_targets.tolist() == pytest.approx([0.25 + 0.5 * 0.75] * 2)
    assert found[0].token_advantages().tolist() == pytest.approx([0.75] * 2)


def test_part_has_its_own_rewards_and_the_value_of_its_end() -> None:
    whole = make_episode([0, 0, 0])
    scores = np.array([0.25, 0.5, 0.75], np.float32)
    running = replace(so_far(whole, 2), turn_scores=scores[:2], reward=0.5)
    ended = replace(whole, turn_scores=scores, reward=0.75)
    early = Sample(trajectory=part_of(running, 1), advantage=0.0)
    late = Sample(trajectory=part_of(ended, 2), advantage=0.0)
    scored = Scored(
        values=floats(0.3, 9.0, 0.1, 9.0),
        end_values=floats(0.2, 7.0),
        logprobs=floats(-1.0, -1.0, -1.0, -1.0),
    )
    by_turn = AlgorithmSection(reward_level=CreditLevel.TURN)
    samples = advantages_from_critic([early, late], scored, by_turn, CriticSection(whiten=False))
    # The second turn scores 0.25, and 0.2 is the value of its end; the first turn's 0.25 is not its
    # own. The last turn scores 0.25, and nothing follows.
    assert samples[0].token_advantages().tolist() == pytest.approx([0.25 + 0.2 - 0.3] * 2)
    assert samples[1].token_advantages().tolist() == pytest.approx([0.25 - 0.1] * 2)
    whole_credit = AlgorithmSection()
    samples = advantages_from_critic(
        [early, late], scored, whole_credit, CriticSection(whiten=False)
    )
    # The score so far is not paid at the cut: the value of the end, at least 0.5, includes it.
    assert samples[0].token_advantages().tolist() == pytest.approx([0.5 - 0.3] * 2)
    assert samples[1].token_advantages().tolist() == pytest.approx([0.75 - 0.1] * 2)

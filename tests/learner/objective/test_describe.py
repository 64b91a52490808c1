"""Laws of the printed objective."""

from collections.abc import Callable
from typing import Any

import pytest

from common.config.learning import (
    Advantage,
    Aggregation,
    AlgorithmSection,
    Baseline,
    Correction,
    CreditLevel,
    CriticSection,
    LearnerSection,
    PolicyLoss,
    Proximal,
)
from learner.objective.describe import dead_knobs, objective_text, proximal_in_use

Effect = Callable[[AlgorithmSection, LearnerSection], Any]


def test_ratio_is_taken_to_the_sampler_only_with_one_update_per_batch() -> None:
    def anchor(proximal: Proximal = Proximal.AUTO, **learner: Any) -> Proximal:
        return proximal_in_use(AlgorithmSection(proximal=proximal), LearnerSection(**learner))

    assert anchor() is Proximal.SAMPLER
    assert anchor(num_minibatches=2) is Proximal.RECOMPUTED
    assert anchor(ppo_epochs=2) is Proximal.RECOMPUTED
    assert anchor(Proximal.SAMPLER, ppo_epochs=2) is Proximal.SAMPLER


def test_text_states_the_form_and_its_numbers() -> None:
    assert objective_text(AlgorithmSection(), LearnerSection()) == (
        "maximise mean_tokens w*[min(r*A, clip(r, 0.8, 1.28)*A), at least 3*A if A<0]; r=pi/mu, "
        "w=min(1, 2/r), A=(R - leave_one_out), 1 update per batch, "
        "lr*max(0.1, min(1, ESS/0.9)), skipped below ESS 0.5"
    )


def test_text_follows_the_anchor() -> None:
    learner = LearnerSection(ppo_epochs=2, num_minibatches=4)
    text = objective_text(AlgorithmSection(), learner)
    assert "r=pi/pi_prox, w=min(pi_prox/mu, 2)" in text
    assert "2 epochs x 4 minibatches" in text


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"correction": Correction.NONE}, "maximise mean_tokens [min("),
        ({"correction": Correction.ICEPOP}, "w=r*[0.5<=r<=5]/r"),
        ({"correction": Correction.GEOMETRIC}, "w=[0.99<=geomean_tokens r<=1.01]"),
        ({"negative_mask_delta": 0.1}, "*[not (A<0 and mean log(mu/pi)>0.1)]"),
        ({"policy_loss": PolicyLoss.CISPO}, "w*sg(min(r, 1.28))*A*log(pi)"),
        ({"policy_loss": PolicyLoss.GSPO}, "r=exp(mean_tokens log(pi/mu))"),
        ({"policy_loss": PolicyLoss.DPPO, "dppo_delta": 0.1}, "pi-mu>0.1"),
        ({"kl_coef": 0.01}, "- 0.01*KL_k3(pi|model.path)"),
        ({"drift_coef": 0.001}, "- 0.001*(log pi - log mu)^2"),
        ({"entropy_coef": 0.01}, "+ 0.01*H]"),
        ({"aggregation": Aggregation.SEQUENCE}, "mean_episodes mean_tokens"),
        ({"aggregation": Aggregation.CONSTANT}, "sum_tokens / (episodes * 512)"),
        ({"advantage": Advantage.RLOO}, "A=(R - leave_one_out)"),
        ({"advantage": Advantage.REINFORCE_PP}, "A=whiten_batch((R))"),
        ({"advantage": Advantage.PPO}, "A=whiten_batch(GAE(per turn, gamma=1, lambda=1, V=head"),
        ({"normalize_std": True, "normalize_per_env": True}, "rms_per_env((R - leave_one_out)/std"),
        ({"reward_level": CreditLevel.TURN, "turn_discount": 0.9}, "sum_later_turns 0.9^k*dR"),
        (
            {"invalid_action_penalty": 0.3, "invalid_action_level": CreditLevel.TURN},
            "A=(R - leave_one_out) - 0.3*(invalid_turn - group_mean)",
        ),
    ],
)
def test_text_names_what_is_on(changes: dict, part: str) -> None:
    assert part in objective_text(AlgorithmSection(**changes), LearnerSection())


def test_settings_that_do_nothing_are_named_with_the_reason() -> None:
    algorithm = AlgorithmSection(
        advantage=Advantage.RLOO, baseline=Baseline.GROUP_MEAN, mask_low=0.4, constant_tokens=9
    )
    learner = LearnerSection(muon_lr=0.1, critic=CriticSection(gae_lambda=0.5))
    lines = dead_knobs(algorithm, learner)
    assert "algorithm.baseline=group_mean has no effect: advantage=rloo" in lines
    assert "algorithm.mask_low=0.4 has no effect: correction=token_tis" in lines
    assert "algorithm.constant_tokens=9 has no effect: aggregation=token" in lines
    assert "learner.muon_lr=0.1 has no effect: optimizer=adamw" in lines
    assert any(line.startswith("learner.critic.gae_lambda=0.5 has no effect") for line in lines)
    assert len(lines) == 5


def test_defaults_have_nothing_dead() -> None:
    assert dead_knobs(AlgorithmSection(), LearnerSection()) == []

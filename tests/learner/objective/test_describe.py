"""Laws of the printed objective."""

from collections.abc import Callable
from typing import Any

import pytest

from common.config.algorithm import (
    Advantage,
    Aggregation,
    AlgorithmSection,
    Baseline,
    Correction,
    CreditLevel,
    PolicyLoss,
    Proximal,
    TeacherForm,
    TeacherSection,
)
from common.config.learner import (
    ControllerSection,
    CriticSection,
    LearnerSection,
    LoraSection,
    Timestep,
)
from learner.objective.description import (
    dead_knobs,
    notes,
    objective_text,
    proximal_in_use,
    summary_lines,
)

PPO = {"advantage": Advantage.PPO}
Effect = Callable[[AlgorithmSection, LearnerSection], Any]


def test_anchor_is_the_sampler_for_one_update_per_batch() -> None:
    def anchor(proximal: Proximal = Proximal.AUTO, **learner: Any) -> Proximal:
        return proximal_in_use(AlgorithmSection(proximal=proximal), LearnerSection(**learner))

    assert anchor() is Proximal.SAMPLER
    assert anchor(num_minibatches=2) is Proximal.RECOMPUTED
    assert anchor(ppo_epochs=2) is Proximal.RECOMPUTED
    assert anchor(Proximal.SAMPLER, ppo_epochs=2) is Proximal.SAMPLER


def test_text_states_the_form_and_its_numbers() -> None:
    assert objective_text(AlgorithmSection(), LearnerSection()) == (
        "maximise mean_tokens w*[min(r*A, clip(r, 0.8, 1.28)*A), at least 3*A if A<0]; r=pi/mu, "
        "w=min(1, 2/r), A=(R - leave_one_out), without groups of equal credit, 1 update per batch, "
        "lr*max(0.1, min(1, ESS/0.9)), batches below ESS 0.5 are skipped, "
        "ESS=min(sample size, m, 1/m) with m=mean_tokens pi/mu"
    )


def test_text_follows_the_anchor() -> None:
    learner = LearnerSection(ppo_epochs=2, num_minibatches=4)
    text = objective_text(AlgorithmSection(), learner)
    assert "r=pi/pi_prox, w=min(pi_prox/mu, 2)" in text
    assert "2 epochs x 4 minibatches" in text
    learner = LearnerSection(num_minibatches=4)
    assert "1 epoch x 4 minibatches" in objective_text(AlgorithmSection(), learner)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"correction": Correction.NONE}, "maximise mean_tokens [min("),
        ({"correction": Correction.ICEPOP}, "w=[0.5<=r<=5]"),
        ({"correction": Correction.GEOMETRIC}, "w=[0.99<=geomean_tokens r<=1.01]"),
        ({"negative_mask_delta": 0.1}, "*[not (A<0 and mean_tokens log(mu/pi)>0.1)]"),
        ({"policy_loss": PolicyLoss.CISPO}, "maximise mean_tokens sg(min(r, 1.28))*A*log(pi); r="),
        ({"policy_loss": PolicyLoss.CISPO, "tis_cap": 1.1}, "w=min(r, 1.1)/min(r, 1.28)"),
        ({"policy_loss": PolicyLoss.GSPO}, "r=exp(mean_tokens log(pi/mu))"),
        ({"policy_loss": PolicyLoss.DPPO, "dppo_delta": 0.1}, "pi-mu>0.1"),
        (
            {"kl_coef": 0.01},
            "- 0.01*v*KL_k3(pi|model.path)]; r=pi/mu, w=min(1, 2/r), v=min(pi/mu, 2)",
        ),
        ({"drift_coef": 0.001}, "- 0.001*(log pi - log mu)^2"),
        ({"entropy_coef": 0.01}, "+ 0.01*H]"),
        ({"aggregation": Aggregation.SEQUENCE}, "mean_episodes mean_tokens"),
        ({"aggregation": Aggregation.CONSTANT}, "sum_tokens / (episodes * 512)"),
        ({"advantage": Advantage.RLOO}, "A=(R - leave_one_out)"),
        ({"advantage": Advantage.REINFORCE_PP}, "A=whiten_batch((R))"),
        ({"advantage": Advantage.PPO}, "A=whiten_batch(GAE(per turn, gamma=1, lambda=1, V=head"),
        ({"normalize_std": True, "normalize_per_env": True}, "rms_per_env((R - leave_one_out)/std"),
        ({"reward_level": CreditLevel.TURN, "turn_discount": 0.9}, "sum_later_turns 0.9^k*dR"),
        ({"reward_level": CreditLevel.TURN}, "dR - mean_others same_turn_or_last)"),
        (
            {"reward_level": CreditLevel.TURN, "baseline": Baseline.GROUP_MEAN},
            "dR - mean_members same_turn_or_last)",
        ),
        (
            {"invalid_action_penalty": 0.3, "invalid_action_level": CreditLevel.TURN},
            "A=(R - leave_one_out) - 0.3*(invalid_turn - mean_others same_turn_or_0)",
        ),
        (PPO | {"reward_level": CreditLevel.TURN}, "pay=dR,"),
        (PPO, "E=R is not paid and V_after=clip(V_end, E + min(V_end, 0) if S0 == 0 else V_end"),
        (PPO | {"turn_discount": 0.9}, "V_after=min(V_end, 1 - S + E), without a last observation"),
        (PPO | {"invalid_action_penalty": 0.3}, "pay=R[last] - 0.3*invalid_frac[last],"),
        (PPO, "at least 3*A if A<0] - 0.5*VL; r="),
        (PPO, "VL=mean_turns [(V-target)^2/2, first token of each turn; maximum of this and ("),
    ],
)
def test_text_names_every_active_part(changes: dict, part: str) -> None:
    assert part in objective_text(AlgorithmSection(**changes), LearnerSection())


def test_dead_settings_are_named_with_reason() -> None:
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


def test_settings_of_inactive_parts_are_named() -> None:
    controller = ControllerSection(masked_warn_frac=0.2)
    learner = LearnerSection(lora=LoraSection(alpha=8.0), controller=controller)
    lines = dead_knobs(AlgorithmSection(), learner)
    assert "learner.lora.alpha=8.0 has no effect: rank=0" in lines
    assert [line.partition(" has")[0] for line in lines] == [
        "learner.controller.masked_warn_frac=0.2",
        "learner.lora.alpha=8.0",
    ]
    masking = AlgorithmSection(correction=Correction.ICEPOP)
    assert len(dead_knobs(masking, learner)) == 1


def test_defaults_have_nothing_dead() -> None:
    assert dead_knobs(AlgorithmSection(), LearnerSection()) == []


@pytest.mark.parametrize(
    ("algorithm", "learner"),
    [
        ({"proximal": Proximal.RECOMPUTED}, {}),
        ({"proximal": Proximal.REUSED}, {}),
        ({"proximal": Proximal.REUSED}, {"num_minibatches": 7}),  # each sample's only update
    ],
)
def test_a_clip_that_never_binds_is_named(algorithm: dict, learner: dict) -> None:
    cfg, trainer = AlgorithmSection(**algorithm), LearnerSection(**learner)
    assert any("the clip never limits the step" in line for line in notes(cfg, trainer))
    [line] = dead_knobs(AlgorithmSection(clip_low=0.1, **algorithm), trainer)
    assert line.startswith("algorithm.clip_low=0.1 has no effect: proximal=")


def test_clip_that_binds_in_a_later_update_is_not_dead() -> None:
    for proximal, learner in (
        (Proximal.REUSED, LearnerSection(ppo_epochs=2)),
        (Proximal.RECOMPUTED, LearnerSection(num_minibatches=2)),
        (Proximal.INTERPOLATED, LearnerSection()),
    ):
        assert notes(AlgorithmSection(proximal=proximal), learner) == []
        assert dead_knobs(AlgorithmSection(proximal=proximal, clip_low=0.1), learner) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "only where A<0 and 2<r<3"),
        ({"dual_clip": 0.0}, "only where A<0 and r>2"),
        ({"tis_cap": 1.1}, "only where A>0 and 1.1<r<1.28, or A<0 and 1.1<r<3"),
        ({"dual_clip": 1.5}, "changes no gradient"),
        ({"policy_loss": PolicyLoss.CISPO}, "changes no gradient"),
    ],
)
def test_summary_notes_truncation_beside_sampler_clip(changes: dict, line: str) -> None:
    lines = summary_lines(AlgorithmSection(**changes), LearnerSection())
    assert line in lines[-1]
    assert lines[-1].startswith("note: correction=token_tis")


def test_combinations_that_do_nothing_are_named() -> None:
    def dead(learner: LearnerSection | None = None, **changes: Any) -> list[str]:
        lines = dead_knobs(AlgorithmSection(**changes), learner or LearnerSection())
        return [line.partition("=")[0] for line in lines]

    cispo = PolicyLoss.CISPO
    assert dead(policy_loss=cispo, tis_cap=5.0) == ["algorithm.tis_cap"]
    assert dead(policy_loss=cispo, correction=Correction.NONE) == ["algorithm.correction"]
    assert dead(policy_loss=cispo, tis_cap=1.1) == []
    assert dead(policy_loss=cispo, tis_cap=5.0, kl_coef=0.1) == []  # there it cuts the KL's weight
    assert dead(tis_cap=4.0) == []  # A cap beyond dual_clip=3 disables that of tis_cap=2.
    assert dead(tis_cap=4.0, dual_clip=1.5) == ["algorithm.tis_cap"]
    token = LearnerSection(critic=CriticSection(timestep=Timestep.TOKEN))
    assert dead(token, turn_discount=0.9, **PPO) == ["algorithm.turn_discount"]
    assert dead(reward_level=CreditLevel.TURN, baseline=Baseline.GROUP_MEAN) == []


@pytest.mark.parametrize(
    ("changes", "advantage", "term"),
    [
        ({}, "A=1*(log t - log sg(pi))", ""),
        ({"coef": 2.0, "reward_coef": 0.5}, "A=0.5*((R - leave_one_out)) + 2*(log t", ""),
        ({"form": TeacherForm.TOPK, "k": 4}, "A=0", "- 1*KL_top4(pi|t)"),
    ],
)
def test_text_names_the_part_of_a_teacher(changes: dict, advantage: str, term: str) -> None:
    cfg = AlgorithmSection(teacher=TeacherSection(path="t", **changes))
    text = objective_text(cfg, LearnerSection())
    assert advantage in text
    assert term in text
    assert "equal credit" not in text


def test_settings_of_an_absent_teacher_are_named() -> None:
    absent = AlgorithmSection(teacher=TeacherSection(coef=2.0))
    (line,) = dead_knobs(absent, LearnerSection())
    assert line.startswith("algorithm.teacher.coef=2.0 has no effect")
    served = TeacherSection(path="t", key_env="K", k=3)
    lines = dead_knobs(AlgorithmSection(teacher=served), LearnerSection())
    assert [line.partition("=")[0] for line in lines] == [
        *("algorithm.teacher.k", "algorithm.teacher.key_env")
    ]

"""Finds settings and combinations without an effect, or with an unexpected one.

This module does not import torch, so a dry run prints its result quickly.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from common.config.algorithm import (
    Advantage,
    Aggregation,
    AlgorithmSection,
    Correction,
    KlEstimator,
    PolicyLoss,
    Proximal,
    StateCredit,
    TeacherForm,
    TeacherSection,
)
from common.config.learner import (
    CriticKind,
    CriticSection,
    CriticTargets,
    LearnerSection,
    OptimizerKind,
    Timestep,
)
from learner.objective.describe import (
    MASKS_ONLY,
    is_clipped,
    is_one_update,
    objective_text,
    proximal_in_use,
    tis_at_sampler,
    why_ratio_is_one,
)

logger = logging.getLogger(__name__)


def dead_knobs(algorithm: AlgorithmSection, learner: LearnerSection) -> list[str]:
    """Return a line for every setting that differs from its default and has no effect."""
    dead = [*_dead_in_algorithm(algorithm, learner), *_dead_in_learner(algorithm, learner)]
    return [f"{key}={value} has no effect: {why}" for key, value, why in dead]


def summary_lines(algorithm: AlgorithmSection, learner: LearnerSection) -> list[str]:
    """Return the objective, a warning for every setting without effect, and the notes."""
    return [
        f"objective: {objective_text(algorithm, learner)}",
        *(f"warning: {line}" for line in dead_knobs(algorithm, learner)),
        *(f"note: {line}" for line in notes(algorithm, learner)),
    ]


def log_summary(algorithm: AlgorithmSection, learner: LearnerSection) -> None:
    """Log `summary_lines`, the settings without effect as warnings."""
    for line in summary_lines(algorithm, learner):
        level = logging.WARNING if line.startswith("warning: ") else logging.INFO
        logger.log(level, "%s", line)


def notes(algorithm: AlgorithmSection, learner: LearnerSection) -> list[str]:
    """Return a line for every combination of settings that has less effect than expected."""
    found: list[str] = []
    why = why_ratio_is_one(algorithm, learner)
    if why and is_clipped(algorithm):
        found.append(
            f"{why}: every ratio is 1, so the clip never limits the step. Make several updates"
            " per batch, or set proximal=sampler or proximal=interpolated."
        )
    is_at_sampler = proximal_in_use(algorithm, learner) is Proximal.SAMPLER
    if is_at_sampler and algorithm.correction is Correction.TOKEN_TIS:
        where = tis_at_sampler(algorithm)
        acts = f"changes gradients only where {where}" if where else "changes no gradient"
        found.append(f"correction=token_tis with a ratio to the sampling policy {acts}")
    if algorithm.kl_coef and algorithm.kl_estimator is KlEstimator.K1:
        found.append(
            "kl_estimator=k1: the gradient of k1 has mean zero on policy. k2 and k3 pull the policy"
            " towards the reference."
        )
    return found


Dead = Iterator[tuple[str, object, str]]


def _changed(key: str, section: object, why: str, *names: str) -> Dead:
    """Yield the named settings that differ from their defaults."""
    default = type(section)()
    for name in names:
        value = getattr(section, name)
        if value != getattr(default, name):
            yield f"{key}.{name}", getattr(value, "value", value), why


def _dead_in_algorithm(cfg: AlgorithmSection, learner: LearnerSection) -> Dead:
    """Yield the settings of `algorithm` without effect, except those of credit."""
    changed = partial(_changed, "algorithm", cfg)
    advantage = cfg.advantage
    if advantage is not Advantage.GRPO:
        yield from changed(f"advantage={advantage}", "baseline", "normalize_std")
    if advantage in (Advantage.REINFORCE_PP, Advantage.REINFORCE_PP_BASELINE):
        yield from changed("the advantages of the whole batch are whitened", "normalize_per_env")
    if not cfg.is_group_relative:
        yield from changed(f"advantage={advantage}", "filter_zero_variance")
    if cfg.invalid_action_penalty == 0:
        yield from changed("invalid_action_penalty=0", "invalid_action_level")
    if cfg.aggregation is not Aggregation.CONSTANT:
        yield from changed(f"aggregation={cfg.aggregation.value}", "constant_tokens")
    why = f"policy_loss={cfg.policy_loss}"
    if cfg.policy_loss is PolicyLoss.CISPO:
        yield from changed(why, "clip_low", "dual_clip")
    if not is_clipped(cfg):
        yield from changed(why, "clip_low", "clip_high", "dual_clip")
    if cfg.policy_loss is not PolicyLoss.DPPO:
        yield from changed(why, "dppo_delta")
    why = f"correction={cfg.correction}"
    if cfg.correction not in (Correction.TOKEN_TIS, Correction.SEQUENCE_TIS):
        yield from changed(why, "tis_cap")
    if cfg.correction is not Correction.ICEPOP:
        yield from changed(why, "mask_low", "mask_high")
    if cfg.correction is not Correction.GEOMETRIC:
        yield from changed(why, "geometric_low", "geometric_high")
    if cfg.correction is not Correction.SECOND_MOMENT:
        yield from changed(why, "m2_threshold")
    yield from _dead_in_credit(cfg)
    yield from _dead_in_teacher(cfg)
    if cfg.kl_coef == 0:
        yield from changed("kl_coef=0", "kl_estimator", "reference_path")
    why = why_ratio_is_one(cfg, learner)
    if why and is_clipped(cfg):
        yield from changed(f"{why} makes every ratio 1", "clip_low", "clip_high", "dual_clip")
    if why and cfg.policy_loss is not PolicyLoss.DPPO:
        yield from changed(f"{why} makes every ratio 1, so all losses are equal", "policy_loss")
    is_weighed = cfg.correction not in MASKS_ONLY
    if why and is_weighed and cfg.policy_loss in (PolicyLoss.DPPO, PolicyLoss.UNCLIPPED):
        why = f"policy_loss={cfg.policy_loss} has no clip, and the weight has the same ratio"
        yield from changed(why, "proximal")
    if proximal_in_use(cfg, learner) is Proximal.SAMPLER and not tis_at_sampler(cfg):
        why = f"policy_loss={cfg.policy_loss} already bounds the ratio to the sampling policy"
        is_never = not tis_at_sampler(replace(cfg, tis_cap=AlgorithmSection().tis_cap))
        is_capped = cfg.correction is Correction.TOKEN_TIS or (
            cfg.correction is Correction.SEQUENCE_TIS and cfg.policy_loss is PolicyLoss.CISPO
        )
        if is_capped and cfg.kl_coef == 0 and is_never:
            yield from changed(f"{why} more tightly", "tis_cap")
        if cfg.correction is Correction.NONE and cfg.kl_coef == 0:
            yield from changed(f"{why} more tightly than token_tis", "correction")


def _dead_in_teacher(cfg: AlgorithmSection) -> Dead:
    teacher = cfg.teacher
    changed = partial(_changed, "algorithm.teacher", teacher)
    if not teacher.is_on:
        why = "algorithm.teacher has neither path nor url"
        yield from changed(why, *TeacherSection.__dataclass_fields__)
        return
    if cfg.is_group_relative:
        why = "a teacher gives every group a signal"
        yield from _changed("algorithm", cfg, why, "filter_zero_variance")
    if teacher.form is not TeacherForm.TOPK:
        yield from changed(f"form={teacher.form.value}", "k")
    if teacher.path:
        yield from changed("the run starts the engine of path", "model", "key_env")
    else:
        yield from changed("the run starts no engine for url", "serve", "gpus")


def _dead_in_credit(cfg: AlgorithmSection) -> Dead:
    """Yield the settings of credit without effect."""
    changed = partial(_changed, "algorithm", cfg)
    if cfg.advantage is not Advantage.RUNNING:
        why = f"advantage={cfg.advantage}"
        yield from changed(why, "running_memory", "running_prior")
    if not cfg.is_group_relative:
        names = [f"state_{each}" for each in ("credit", "weight", "discount", "prior", "lambda")]
        yield from changed(
            f"advantage={cfg.advantage} does not compare the turns of a group", *names
        )
        return
    kind = cfg.state_credit
    why = f"state_credit={kind.value}"
    if kind is StateCredit.NONE:
        yield from changed(why, "state_discount")
    if kind not in (StateCredit.GIGPO, StateCredit.ECPO):
        yield from changed(why, "state_weight")
    if kind is not StateCredit.ECPO:
        yield from changed(why, "state_prior")
    if kind is not StateCredit.GAGPO:
        yield from changed(why, "state_lambda")
    else:
        why = f"{why} replaces the episode's advantage"
        is_grpo = cfg.advantage is Advantage.GRPO  # Other advantages already report it.
        yield from changed(why, "turn_discount", *(["baseline"] if is_grpo else []))


def why_nothing_is_clipped(algorithm: AlgorithmSection, learner: LearnerSection) -> str:
    """Return the reason why no bound clips a token in a batch's first update; "" if one may."""
    if algorithm.policy_loss is PolicyLoss.UNCLIPPED:
        return "policy_loss=unclipped has no clip"
    proximal = proximal_in_use(algorithm, learner)
    if is_clipped(algorithm) and proximal in (Proximal.RECOMPUTED, Proximal.REUSED):
        return f"proximal={proximal.value} makes every ratio 1 in a batch's first update"
    return ""


def _masks_tokens(cfg: AlgorithmSection) -> bool:
    """Return whether the correction gives some tokens the weight zero."""
    is_masking = (Correction.ICEPOP, Correction.GEOMETRIC, Correction.SECOND_MOMENT)
    return cfg.correction in is_masking or cfg.negative_mask_delta > 0


def _dead_in_learner(algorithm: AlgorithmSection, cfg: LearnerSection) -> Dead:
    """Yield the settings of `learner` without effect."""
    if cfg.optimizer is not OptimizerKind.MUON:
        yield from _changed("learner", cfg, f"optimizer={cfg.optimizer.value}", "muon_lr")
    if cfg.decay_start_frac >= 1:
        why = "decay_start_frac=1 means no decay"
        yield from _changed("learner", cfg, why, "min_lr_frac")
    changed = partial(_changed, "learner.critic", cfg.critic)
    if algorithm.advantage is not Advantage.PPO:
        why = f"algorithm.advantage={algorithm.advantage} uses no critic"
        yield from changed(why, *CriticSection.__dataclass_fields__)
    else:
        if cfg.critic.timestep is Timestep.TOKEN:
            why = "learner.critic.timestep=token has no discount per turn"
            yield from _changed("algorithm", algorithm, why, "turn_discount")
        if cfg.critic.kind is CriticKind.HEAD:
            yield from changed("kind=head", "path")
        else:
            yield from changed("kind=model has its own optimizer", "coef")
        if is_one_update(cfg):
            yield from changed(
                "with one update per batch no value changes before the update", "clip"
            )
        if cfg.critic.targets is not CriticTargets.VTRACE:
            why = f"targets={cfg.critic.targets.value}"
            yield from changed(why, "vtrace_rho", "vtrace_c")
    changed = partial(_changed, "learner.controller", cfg.controller)
    if not cfg.controller.scale_lr:
        yield from changed("scale_lr=false", "min_lr_scale")
    if not cfg.controller.skip_step:
        yield from changed("skip_step=false", "ess_skip", "max_skips")
    if not cfg.controller.tighten_gate:
        yield from changed("tighten_gate=false", "ess_gate", "clip_gate", "recover_steps")
        if not cfg.controller.scale_lr:
            yield from changed("tighten_gate=false, scale_lr=false", "ess_target")
    elif why := why_nothing_is_clipped(algorithm, cfg):
        yield from changed(why, "clip_gate")
    if not _masks_tokens(algorithm):
        why = f"algorithm.correction={algorithm.correction} masks no token"
        yield from changed(why, "masked_warn_frac")
    if cfg.lora.rank == 0:
        yield from _changed("learner.lora", cfg.lora, "rank=0", "alpha", "targets")

"""The text of the objective that a configuration really optimises.

This module does not import torch, so a dry run prints its result quickly.
"""

from collections.abc import Iterator

from common.config.algorithm import (
    Advantage,
    Aggregation,
    AlgorithmSection,
    Baseline,
    Correction,
    CreditLevel,
    PolicyLoss,
    Proximal,
    StateCredit,
    TeacherForm,
    TeacherSection,
)
from common.config.learner import CriticKind, CriticSection, CriticTargets, LearnerSection, Timestep
from common.text import counted
from learner.objective.describe_credit import (
    credit_text,
    cut_text,
    paid_text,
    running_text,
    state_text,
)

# Corrections that keep or mask the surrogate's own ratio, whatever its anchor is.
MASKS_ONLY = (Correction.NONE, Correction.GEOMETRIC, Correction.SECOND_MOMENT)


def proximal_in_use(algorithm: AlgorithmSection, learner: LearnerSection) -> Proximal:
    """Return the proximal policy in use, never AUTO: the sampler if a batch makes one update."""
    if algorithm.proximal is not Proximal.AUTO:
        return algorithm.proximal
    return Proximal.SAMPLER if is_one_update(learner) else Proximal.RECOMPUTED


def is_one_update(learner: LearnerSection) -> bool:
    """Return whether a batch makes a single update."""
    return learner.ppo_epochs * learner.num_minibatches == 1


def why_ratio_is_one(algorithm: AlgorithmSection, learner: LearnerSection) -> str:
    """Return the reason why pi / pi_prox is one in every update; "" if it is not.

    A ratio of one means that no clip binds.
    """
    proximal = proximal_in_use(algorithm, learner)
    if proximal is Proximal.RECOMPUTED and is_one_update(learner):
        return "proximal=recomputed with one update per batch"
    if proximal is Proximal.REUSED and learner.ppo_epochs == 1:
        return "proximal=reused with one epoch"
    return ""


def is_clipped(cfg: AlgorithmSection) -> bool:
    """Return whether the surrogate bounds its ratio."""
    return cfg.policy_loss not in (PolicyLoss.DPPO, PolicyLoss.UNCLIPPED)


def tis_at_sampler(cfg: AlgorithmSection) -> str:
    """Return the condition under which token_tis changes a gradient at the sampler; "" if never.

    The ratio is taken to the sampler. The clip ends the gradient above 1 + clip_high for A > 0, and
    dual_clip for A < 0.
    """
    most = 1 + cfg.clip_high
    if cfg.policy_loss is PolicyLoss.CISPO:
        return f"r>{cfg.tis_cap:g}" if cfg.tis_cap < most else ""
    if not is_clipped(cfg):
        return f"r>{cfg.tis_cap:g}"
    parts = [f"A>0 and {cfg.tis_cap:g}<r<{most:g}"] if cfg.tis_cap < most else []
    if cfg.dual_clip == 0:
        parts.append(f"A<0 and r>{cfg.tis_cap:g}")
    elif cfg.tis_cap < cfg.dual_clip:
        parts.append(f"A<0 and {cfg.tis_cap:g}<r<{cfg.dual_clip:g}")
    return ", or ".join(parts)


def objective_text(algorithm: AlgorithmSection, learner: LearnerSection) -> str:
    """Return the objective that this configuration optimises, with its numbers, in one line."""
    proximal = proximal_in_use(algorithm, learner)
    weight = _weight_text(algorithm, learner)
    of_kl = _corrected_text(algorithm, "pi/mu")
    terms = [f"{'w*' if weight else ''}{_surrogate_text(algorithm)}"]
    if algorithm.entropy_coef:
        terms.append(f"+ {algorithm.entropy_coef:g}*H")
    if algorithm.kl_coef:
        reference = algorithm.reference_path or "model.path"
        kl = f"{'v*' if of_kl else ''}KL_{algorithm.kl_estimator.value}(pi|{reference})"
        terms.append(f"- {algorithm.kl_coef:g}*{kl}")
    if algorithm.teacher.num_top and algorithm.teacher.is_on:
        teacher = algorithm.teacher
        terms.append(f"- {teacher.coef:g}*KL_top{teacher.k}(pi|{_teacher_name(teacher)})")
    if algorithm.drift_coef:
        terms.append(f"- {algorithm.drift_coef:g}*(log pi - log mu)^2")
    laws = [_ratio_text(algorithm, proximal), f"w={weight}" if weight else ""]
    laws += [f"v={of_kl}"] if algorithm.kl_coef and of_kl else []
    laws += [_taught_text(_advantage_text(algorithm, learner), algorithm.teacher)]
    laws += _value_texts(algorithm, learner.critic)
    laws += [*_data_texts(algorithm), _updates_text(learner), *_reaction_texts(learner)]
    mean = {
        Aggregation.TOKEN: "mean_tokens",
        Aggregation.SEQUENCE: "mean_episodes mean_tokens",
        Aggregation.CONSTANT: f"sum_tokens / (episodes * {algorithm.constant_tokens})",
    }[algorithm.aggregation]
    body = " ".join(terms)
    body = f"[{body}]" if len(terms) > 1 else body
    if algorithm.advantage is Advantage.PPO and learner.critic.kind is CriticKind.HEAD:
        body += f" - {learner.critic.coef:g}*VL"
    if algorithm.router_aux_coef:
        body += f" - {algorithm.router_aux_coef:g}*mean_microbatches LB"
    return f"maximise {mean} {body}; {', '.join(law for law in laws if law)}"


def _teacher_name(teacher: TeacherSection) -> str:
    return teacher.path or f"{teacher.model} at {teacher.url}"


def _taught_text(advantage: str, teacher: TeacherSection) -> str:
    """Return the text of the advantage, "A=...", with the part of a teacher."""
    if not teacher.is_on:
        return advantage
    reward = f"{teacher.reward_coef:g}*({advantage.removeprefix('A=')})"
    parts = [reward] if teacher.reward_coef else []
    if teacher.form is TeacherForm.SAMPLED:
        parts.append(f"{teacher.coef:g}*(log {_teacher_name(teacher)} - log sg(pi))")
    return f"A={' + '.join(parts) or '0'}"


def _surrogate_text(cfg: AlgorithmSection) -> str:
    """Return the formula of the surrogate loss of a token."""
    if cfg.policy_loss is PolicyLoss.CISPO:
        return f"sg(min(r, {1 + cfg.clip_high:g}))*A*log(pi)"
    if cfg.policy_loss is PolicyLoss.DPPO:
        return f"r*A*[not (A>0 and pi-mu>{cfg.dppo_delta:g} or A<0 and pi-mu<-{cfg.dppo_delta:g})]"
    if cfg.policy_loss is PolicyLoss.UNCLIPPED:
        return "r*A"
    surrogate = f"min(r*A, clip(r, {1 - cfg.clip_low:g}, {1 + cfg.clip_high:g})*A)"
    if cfg.dual_clip > 0:
        surrogate = f"[{surrogate}, at least {cfg.dual_clip:g}*A if A<0]"
    return surrogate


def _anchor_text(proximal: Proximal) -> str:
    """Return the symbol of the denominator policy."""
    return {
        Proximal.SAMPLER: "mu",
        Proximal.REUSED: "pi_first",
        Proximal.INTERPOLATED: "mu^(1/(lag+1))*sg(pi)^(lag/(lag+1))",
    }.get(proximal, "pi_prox")


def _ratio_text(cfg: AlgorithmSection, proximal: Proximal) -> str:
    """Return the definition of the ratio r."""
    ratio = f"pi/{_anchor_text(proximal)}"
    if proximal is Proximal.INTERPOLATED:
        ratio = f"pi/({_anchor_text(proximal)})"
    if cfg.policy_loss is PolicyLoss.GSPO:
        return f"r=exp(mean_tokens log({ratio}))"
    if cfg.policy_loss is PolicyLoss.TURN:
        return f"r=exp(mean_turn_tokens log({ratio}))"
    return f"r={ratio}"


def _corrected_text(cfg: AlgorithmSection, rho: str) -> str:
    """Return the formula of a ratio after `correction`; "" if it is always one."""
    return {
        Correction.NONE: "",
        Correction.TOKEN_TIS: f"min({rho}, {cfg.tis_cap:g})",
        Correction.SEQUENCE_TIS: f"min(prod_tokens {rho}, {cfg.tis_cap:g})",
        Correction.ICEPOP: f"{rho}*[{cfg.mask_low:g}<={rho}<={cfg.mask_high:g}]",
        Correction.GEOMETRIC: (
            f"[{cfg.geometric_low:g}<=geomean_tokens {rho}<={cfg.geometric_high:g}]"
        ),
        # This correction masks tokens of the batch, see `_weight_text`.
        Correction.SECOND_MOMENT: "",
    }[cfg.correction]


def _weight_text(cfg: AlgorithmSection, learner: LearnerSection) -> str:
    """Return the formula of the importance weight; "" if it is always one."""
    proximal = proximal_in_use(cfg, learner)
    if proximal is Proximal.SAMPLER:
        weight = _weight_at_sampler(cfg)
    else:
        anchor = _anchor_text(proximal)
        weight = _corrected_text(cfg, f"{f'({anchor})' if '*' in anchor else anchor}/mu")
    if cfg.correction is Correction.SECOND_MOMENT:
        weight = f"[kept, so that mean_batch (log(pi_old/mu))^2<={cfg.m2_threshold:g}]"
    if cfg.negative_mask_delta:
        known = "pi_prox" if proximal is Proximal.RECOMPUTED else "pi_first"
        now = "pi" if is_one_update(learner) else known
        mask = f"[not (A<0 and mean_tokens log(mu/{now})>{cfg.negative_mask_delta:g})]"
        weight = f"{weight}*{mask}" if weight else mask
    return weight


def _weight_at_sampler(cfg: AlgorithmSection) -> str:
    """Return the formula of the weight beside a surrogate whose ratio already is pi / mu."""
    if cfg.correction is Correction.ICEPOP:
        return f"[{cfg.mask_low:g}<=r<={cfg.mask_high:g}]"
    corrected = _corrected_text(cfg, "r")
    if cfg.correction in (Correction.NONE, Correction.GEOMETRIC, Correction.SECOND_MOMENT):
        return corrected
    is_token = cfg.correction is Correction.TOKEN_TIS
    if cfg.policy_loss is PolicyLoss.CISPO:
        most = 1 + cfg.clip_high
        if is_token and cfg.tis_cap >= most:
            return ""  # CISPO's own limit is tighter.
        of = "r" if is_token else "prod_tokens r"
        return f"min({of}, {min(cfg.tis_cap, most):g})/min(r, {most:g})"
    return f"min(1, {cfg.tis_cap:g}/r)" if is_token else f"{corrected}/r"


def _advantage_text(cfg: AlgorithmSection, learner: LearnerSection) -> str:
    """Return the definition of the advantage A."""
    if cfg.advantage is Advantage.PPO:
        return _critic_text(cfg, learner.critic)
    if cfg.advantage is Advantage.RUNNING:
        return running_text(cfg)
    by_state = cfg.state_credit if cfg.is_group_relative else StateCredit.NONE
    is_per_turn = cfg.reward_level is CreditLevel.TURN
    kind = {Advantage.GRPO: cfg.baseline, Advantage.RLOO: Baseline.LEAVE_ONE_OUT}.get(
        cfg.advantage, Baseline.GROUP_MEAN
    )
    peers = "mean_members" if kind is Baseline.GROUP_MEAN else "mean_others"
    baseline = f" - {f'{peers} same_turn_or_last' if is_per_turn else kind.value}"
    of_turns = f" - {peers} same_turn_or_0"
    if cfg.advantage is Advantage.REINFORCE_PP:
        baseline = of_turns = ""
    text = f"({credit_text(cfg)}{baseline})"
    if cfg.advantage is Advantage.GRPO and cfg.normalize_std:
        text += "/std_turns" if is_per_turn else "/std"
    penalty = cfg.invalid_action_penalty
    if penalty and cfg.invalid_action_level is CreditLevel.TURN and not is_per_turn:
        # The penalty adds to the outcome, turn by turn.
        text += f" - {penalty:g}*(invalid_turn{of_turns})"
    if by_state is StateCredit.GAGPO:
        text = state_text(cfg, kind)
    elif by_state is not StateCredit.NONE:
        text += f" + {cfg.state_weight:g}*{state_text(cfg, kind)}"
    if cfg.advantage in (Advantage.REINFORCE_PP, Advantage.REINFORCE_PP_BASELINE):
        text = f"whiten_batch({text})"
    elif cfg.normalize_per_env:
        text = f"rms_per_env({text})"
    return f"A={text}"


def _critic_text(cfg: AlgorithmSection, critic: CriticSection) -> str:
    """Return the definition of A with a critic."""
    step = critic.timestep.value
    discount = cfg.turn_discount if critic.timestep is Timestep.TURN else 1.0
    kind = "GAE" if critic.targets is CriticTargets.GAE else "V-trace"
    text = f"{kind}(per {step}, gamma={discount:g}, lambda={critic.gae_lambda:g}"
    if critic.targets is CriticTargets.VTRACE:
        text += f", rho<={critic.vtrace_rho:g}, c<={critic.vtrace_c:g}"
    text += f", V={critic.kind.value}, pay={paid_text(cfg)}, {cut_text(cfg, discount)})"
    text = f"rms_per_env({text})" if cfg.normalize_per_env else text
    return f"A={f'whiten_batch({text})' if critic.whiten else text}"


def _value_texts(cfg: AlgorithmSection, critic: CriticSection) -> Iterator[str]:
    """Yield the critic's objective; with a head on the policy's trunk it also trains the trunk."""
    if cfg.advantage is not Advantage.PPO:
        return
    free = f"(V-target)^2/2, first token of each {critic.timestep.value}"
    held = (
        f"maximum of this and (V_old+clip(V-V_old, -{critic.clip:g}, {critic.clip:g})-target)^2/2"
    )
    yield f"VL=mean_{critic.timestep.value}s [{free}" + (f"; {held}]" if critic.clip else "]")
    if critic.kind is CriticKind.MODEL:
        yield "minimised by the critic's own network"
    if critic.warmup_steps:
        yield f"the policy trains from step {critic.warmup_steps} on"


def _data_texts(cfg: AlgorithmSection) -> Iterator[str]:
    """Yield the filters of groups."""
    if cfg.filter_zero_variance and cfg.is_group_relative and not cfg.teacher.is_on:
        yield "without groups of equal credit"


def _updates_text(learner: LearnerSection) -> str:
    """Return the number of updates per batch."""
    if is_one_update(learner):
        return "1 update per batch"
    epochs = counted(learner.ppo_epochs, "epoch")
    return f"{epochs} x {counted(learner.num_minibatches, 'minibatch', 'minibatches')}"


def _reaction_texts(learner: LearnerSection) -> Iterator[str]:
    """Yield the controller's reactions to data that is too far from the policy."""
    cfg = learner.controller
    if cfg.scale_lr:
        yield f"lr*max({cfg.min_lr_scale:g}, min(1, ESS/{cfg.ess_target:g}))"
    if cfg.skip_step:
        yield f"batches below ESS {cfg.ess_skip:g} are skipped"
    if cfg.scale_lr or cfg.skip_step:
        yield "ESS=min(sample size, m, 1/m) with m=mean_tokens pi/mu"

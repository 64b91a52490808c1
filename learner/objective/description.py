"""The objective that a configuration really optimises, as text, and its settings without effect.

`learner/algorithms` has the formula of each algorithm and the keys that it reads. This module does
not import torch, so a dry run prints its result quickly.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from common.config.algorithm import (
    Advantage,
    Aggregation,
    AlgorithmSection,
    Correction,
    CreditLevel,
    KlEstimator,
    PolicyLoss,
    Proximal,
    RowCredit,
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
from common.text import counted
from learner.algorithms.critic import value_formulas
from learner.algorithms.grpo import GRPO, TURN_CREDITS
from learner.algorithms.interface import Estimator, Surrogate, TurnCredit, Unit, Weight
from learner.algorithms.table import (
    ESTIMATORS,
    SURROGATES,
    WEIGHTS,
    estimator_of,
    surrogate_of,
    weight_of,
)
from learner.algorithms.teacher import taught_formula, term_formula

logger = logging.getLogger(__name__)

Part = Surrogate | Weight | Estimator | TurnCredit


def objective_text(algorithm: AlgorithmSection, learner: LearnerSection) -> str:
    """Return the objective that this configuration optimises, with its numbers, in one line."""
    proximal = proximal_in_use(algorithm, learner)
    weight = _weight_text(algorithm, learner)
    of_kl = weight_of(algorithm).formula(algorithm, "pi/mu")
    terms = [f"{'w*' if weight else ''}{surrogate_of(algorithm).formula(algorithm)}"]
    if algorithm.entropy_coef:
        terms.append(f"+ {algorithm.entropy_coef:g}*H")
    if algorithm.kl_coef:
        reference = algorithm.reference_path or "model.path"
        kl = f"{'v*' if of_kl else ''}KL_{algorithm.kl_estimator.value}(pi|{reference})"
        terms.append(f"- {algorithm.kl_coef:g}*{kl}")
    if taught := term_formula(algorithm.teacher):
        terms.append(f"- {taught}")
    if algorithm.drift_coef:
        terms.append(f"- {algorithm.drift_coef:g}*(log pi - log mu)^2")
    laws = [_ratio_text(algorithm, proximal), f"w={weight}" if weight else ""]
    laws += [f"v={of_kl}"] if algorithm.kl_coef and of_kl else []
    laws += [f"A={taught_formula(_advantage_text(algorithm, learner), algorithm.teacher)}"]
    laws += value_formulas(algorithm, learner.critic)
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


def tis_at_sampler(cfg: AlgorithmSection) -> str:
    """Return where token_tis changes a gradient if the ratio is that to the sampler; "": never."""
    return surrogate_of(cfg).open_above(cfg, cfg.tis_cap)


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
    mean = {Unit.SEQUENCE: "mean_tokens", Unit.TURN: "mean_turn_tokens"}
    unit = surrogate_of(cfg).unit
    return f"r={ratio}" if unit is Unit.TOKEN else f"r=exp({mean[unit]} log({ratio}))"


def _weight_text(cfg: AlgorithmSection, learner: LearnerSection) -> str:
    """Return the formula of the importance weight; "" if it is always one."""
    proximal = proximal_in_use(cfg, learner)
    if proximal is Proximal.SAMPLER:
        weight = _weight_at_sampler(cfg)
    else:
        anchor = _anchor_text(proximal)
        weight = weight_of(cfg).formula(cfg, f"{f'({anchor})' if '*' in anchor else anchor}/mu")
    if cfg.correction is Correction.SECOND_MOMENT:
        weight = f"[kept, so that mean_batch (log(pi_old/mu))^2<={cfg.m2_threshold:g}]"
    if cfg.negative_mask_delta:
        before = "pi_prox" if proximal is Proximal.RECOMPUTED else "pi_first"
        now = "pi" if is_one_update(learner) else before
        mask = f"[not (A<0 and mean_tokens log(mu/{now})>{cfg.negative_mask_delta:g})]"
        weight = f"{weight}*{mask}" if weight else mask
    return weight


def _weight_at_sampler(cfg: AlgorithmSection) -> str:
    """Return the formula of the weight beside a surrogate whose ratio already is pi / mu."""
    weight = weight_of(cfg)
    if weight.over_ratio is None:
        return weight.formula(cfg, "r")
    limit = surrogate_of(cfg).limit
    return weight.over_ratio(cfg, None if limit is None else limit(cfg))


# Factors of the advantage of a row's tokens.
ROW_FACTORS = {
    RowCredit.ALL: "",
    RowCredit.ROOT: " * [row of the first conversation]",
    RowCredit.SHARE: " * row_tokens/episode_tokens",
}


def _advantage_text(cfg: AlgorithmSection, learner: LearnerSection) -> str:
    """Return the formula of the advantage A of the rewards."""
    estimator = estimator_of(cfg)
    text = estimator.formula(cfg, learner)
    if cfg.normalize_per_env and not estimator.is_whitened:
        text = f"rms_per_env({text})"
    is_whitened = cfg.advantage is Advantage.PPO and learner.critic.whiten
    text = f"whiten_batch({text})" if estimator.is_whitened or is_whitened else text
    return text + ROW_FACTORS[cfg.row_credit]


def _data_texts(cfg: AlgorithmSection) -> Iterator[str]:
    """Yield the filters of groups."""
    if cfg.filter_zero_variance and estimator_of(cfg).is_group_relative and not cfg.teacher.is_on:
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
    lines: list[str] = []
    why = why_ratio_is_one(algorithm, learner)
    if why and surrogate_of(algorithm).is_clipped:
        lines.append(
            f"{why}: every ratio is 1, so the clip never limits the step. Make several updates"
            " per batch, or set proximal=sampler or proximal=interpolated."
        )
    is_at_sampler = proximal_in_use(algorithm, learner) is Proximal.SAMPLER
    if is_at_sampler and algorithm.correction is Correction.TOKEN_TIS:
        where = tis_at_sampler(algorithm)
        acts = f"changes gradients only where {where}" if where else "changes no gradient"
        lines.append(f"correction=token_tis with a ratio to the sampling policy {acts}")
    if algorithm.kl_coef and algorithm.kl_estimator is KlEstimator.K1:
        lines.append(
            "kl_estimator=k1: the gradient of k1 has mean zero on policy. k2 and k3 pull the policy"
            " towards the reference."
        )
    if any(
        ":" in name for name in (algorithm.policy_loss, algorithm.advantage, algorithm.correction)
    ):
        from learner.algorithms.user_functions import functions_of  # It imports torch.

        lines += [user.note for user in functions_of(algorithm)]
    if not surrogate_of(algorithm).is_of_sequence:
        lines.append(
            f"policy_loss={algorithm.policy_loss}: the loss of a token reads other sequences of its"
            " microbatch, so it depends on learner.max_tokens_per_microbatch and num_ranks"
        )
    return lines


def dead_knobs(algorithm: AlgorithmSection, learner: LearnerSection) -> list[str]:
    """Return a line for every setting that differs from its default and has no effect."""
    dead = [*_dead_in_algorithm(algorithm, learner), *_dead_in_learner(algorithm, learner)]
    return [f"{key}={value} has no effect: {why}" for key, value, why in dead]


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
    why = f"advantage={cfg.advantage}"
    estimator = estimator_of(cfg)
    yield from changed(why, *_unread(ESTIMATORS.values(), estimator.keys))
    if estimator.is_whitened:
        yield from changed("the advantages of the whole batch are whitened", "normalize_per_env")
    if not estimator.is_group_relative:
        yield from changed(why, "filter_zero_variance")
    if cfg.invalid_action_penalty == 0:
        yield from changed("invalid_action_penalty=0", "invalid_action_level")
    if cfg.aggregation is not Aggregation.CONSTANT:
        yield from changed(f"aggregation={cfg.aggregation.value}", "constant_tokens")
    surrogate = surrogate_of(cfg)
    of_loss = f"policy_loss={cfg.policy_loss}"
    yield from changed(of_loss, *_unread(SURROGATES.values(), surrogate.keys))
    weight = weight_of(cfg)
    yield from changed(f"correction={cfg.correction}", *_unread(WEIGHTS.values(), weight.keys))
    yield from _dead_in_credit(cfg)
    yield from _dead_in_teacher(cfg)
    if cfg.kl_coef == 0:
        yield from changed("kl_coef=0", "kl_estimator", "reference_path")
    why = why_ratio_is_one(cfg, learner)
    if why and surrogate.is_clipped:
        yield from changed(f"{why} makes every ratio 1", *surrogate.keys)
    if why and surrogate.is_plain_at_one:
        yield from changed(f"{why} makes every ratio 1, so all losses are equal", "policy_loss")
    is_known = isinstance(cfg.policy_loss, PolicyLoss)
    if why and is_known and not weight.is_mask and not surrogate.is_clipped:
        yield from changed(f"{of_loss} has no clip, and the weight has the same ratio", "proximal")
    if proximal_in_use(cfg, learner) is Proximal.SAMPLER and not tis_at_sampler(cfg):
        why = f"{of_loss} already bounds the ratio to the sampling policy"
        is_never = not tis_at_sampler(replace(cfg, tis_cap=AlgorithmSection().tis_cap))
        is_capped = cfg.correction is Correction.TOKEN_TIS or (
            cfg.correction is Correction.SEQUENCE_TIS and surrogate.limit is not None
        )
        if is_capped and cfg.kl_coef == 0 and is_never:
            yield from changed(f"{why} more tightly", "tis_cap")
        if cfg.correction is Correction.NONE and cfg.kl_coef == 0:
            yield from changed(f"{why} more tightly than token_tis", "correction")


def _unread(parts: Iterable[Part], keys: tuple[str, ...]) -> list[str]:
    """Return the keys that only other algorithms of the same kind read, in their order."""
    read = {key for part in parts for key in part.keys}
    return [name for name in AlgorithmSection.__dataclass_fields__ if name in read - {*keys}]


def _dead_in_credit(cfg: AlgorithmSection) -> Dead:
    """Yield the settings of credit by states without effect."""
    changed = partial(_changed, "algorithm", cfg)
    if estimator_of(cfg).of_group is not GRPO.of_group:
        names = ["state_credit", *_unread(TURN_CREDITS.values(), ())]
        why = f"advantage={cfg.advantage} does not compare the turns of a group"
        yield from changed(why, *names)
        if ":" in cfg.advantage:
            yield from _dead_with_own_advantage(cfg)
        return
    credit = TURN_CREDITS.get(cfg.state_credit)
    why = f"state_credit={cfg.state_credit.value}"
    yield from changed(why, *_unread(TURN_CREDITS.values(), credit.keys if credit else ()))
    if credit is not None and credit.is_whole:
        why = f"{why} replaces the episode's advantage"
        is_grpo = cfg.advantage is Advantage.GRPO  # Other advantages already report it.
        yield from changed(why, "turn_discount", *(["baseline"] if is_grpo else []))


def _dead_with_own_advantage(cfg: AlgorithmSection) -> Dead:
    """Yield the settings of turns that only the estimators of this project read."""
    changed = partial(_changed, "algorithm", cfg)
    why = f"advantage={cfg.advantage} receives the credit of whole episodes"
    read = estimator_of(cfg).keys
    if cfg.invalid_action_level is CreditLevel.TURN and "invalid_action_penalty" not in read:
        yield from changed(f"{why}, without penalties of turns", "invalid_action_penalty")
    yield from changed(why, *({"reward_level"} - {*read}))


def _dead_in_teacher(cfg: AlgorithmSection) -> Dead:
    teacher = cfg.teacher
    changed = partial(_changed, "algorithm.teacher", teacher)
    if not teacher.is_on:
        why = "algorithm.teacher has neither path nor url"
        yield from changed(why, *TeacherSection.__dataclass_fields__)
        return
    if estimator_of(cfg).is_group_relative:
        why = "a teacher gives every group a signal"
        yield from _changed("algorithm", cfg, why, "filter_zero_variance")
    if teacher.form is not TeacherForm.TOPK:
        yield from changed(f"form={teacher.form.value}", "k")
    if teacher.path:
        yield from changed("the run starts the engine of path", "model", "key_env")
    else:
        yield from changed("the run starts no engine for url", "serve", "gpus")


def why_nothing_is_clipped(algorithm: AlgorithmSection, learner: LearnerSection) -> str:
    """Return the reason why no bound clips a token in a batch's first update; "" if one may."""
    if algorithm.policy_loss is PolicyLoss.UNCLIPPED:
        return "policy_loss=unclipped has no clip"
    proximal = proximal_in_use(algorithm, learner)
    if surrogate_of(algorithm).is_clipped and proximal in (Proximal.RECOMPUTED, Proximal.REUSED):
        return f"proximal={proximal.value} makes every ratio 1 in a batch's first update"
    return ""


def _masks_tokens(cfg: AlgorithmSection) -> bool:
    """Return whether the correction gives some tokens the weight zero."""
    return weight_of(cfg).removes_tokens or cfg.negative_mask_delta > 0


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

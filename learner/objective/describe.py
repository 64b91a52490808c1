"""The objective as it will really be optimised, in words, and the settings that do nothing.

No torch here: a dry run prints it quickly.
"""

from collections.abc import Iterator
from functools import partial

from common.config.compute import OptimizerKind
from common.config.learning import (
    Advantage,
    Aggregation,
    AlgorithmSection,
    Correction,
    CreditLevel,
    CriticKind,
    CriticSection,
    CriticTargets,
    LearnerSection,
    PolicyLoss,
    Proximal,
    Timestep,
)


def proximal_in_use(algorithm: AlgorithmSection, learner: LearnerSection) -> Proximal:
    """Return what `algorithm.proximal` means, never AUTO: the sampler if a batch is one update."""
    if algorithm.proximal is not Proximal.AUTO:
        return algorithm.proximal
    return Proximal.SAMPLER if _is_one_update(learner) else Proximal.RECOMPUTED


def _is_one_update(learner: LearnerSection) -> bool:
    return learner.ppo_epochs * learner.num_minibatches == 1


def objective_text(algorithm: AlgorithmSection, learner: LearnerSection) -> str:
    """Return the objective that this configuration optimises, with its numbers, in one line."""
    is_at_sampler = proximal_in_use(algorithm, learner) is Proximal.SAMPLER
    weight = _weight_text(algorithm, is_at_sampler)
    terms = [f"{'w*' if weight else ''}{_surrogate_text(algorithm)}"]
    if algorithm.entropy_coef:
        terms.append(f"+ {algorithm.entropy_coef:g}*H")
    if algorithm.kl_coef:
        reference = algorithm.reference_path or "model.path"
        terms.append(f"- {algorithm.kl_coef:g}*KL_{algorithm.kl_estimator.value}(pi|{reference})")
    if algorithm.drift_coef:
        terms.append(f"- {algorithm.drift_coef:g}*(log pi - log mu)^2")
    laws = [_ratio_text(algorithm, is_at_sampler), weight, _advantage_text(algorithm, learner)]
    laws += [_updates_text(learner), *_reaction_texts(learner)]
    mean = {
        Aggregation.TOKEN: "mean_tokens",
        Aggregation.SEQUENCE: "mean_episodes mean_tokens",
        Aggregation.CONSTANT: f"sum_tokens / (episodes * {algorithm.constant_tokens})",
    }[algorithm.aggregation]
    body = " ".join(terms)
    body = f"[{body}]" if len(terms) > 1 else body
    return f"maximise {mean} {body}; {', '.join(law for law in laws if law)}"


def _surrogate_text(cfg: AlgorithmSection) -> str:
    if cfg.policy_loss is PolicyLoss.CISPO:
        return f"sg(min(r, {1 + cfg.clip_high:g}))*A*log(pi)"
    if cfg.policy_loss is PolicyLoss.DPPO:
        return f"r*A*[not (A>0 and pi-mu>{cfg.dppo_delta:g} or A<0 and pi-mu<-{cfg.dppo_delta:g})]"
    surrogate = f"min(r*A, clip(r, {1 - cfg.clip_low:g}, {1 + cfg.clip_high:g})*A)"
    if cfg.dual_clip > 0:
        surrogate = f"[{surrogate}, at least {cfg.dual_clip:g}*A if A<0]"
    return surrogate


def _ratio_text(cfg: AlgorithmSection, is_at_sampler: bool) -> str:
    anchor = {
        Proximal.REUSED: "pi_first",
        Proximal.INTERPOLATED: "mu^(1/(lag+1))*pi^(lag/(lag+1))",
    }.get(cfg.proximal, "pi_prox")
    ratio = "pi/mu" if is_at_sampler else f"pi/{anchor}"
    if cfg.policy_loss is PolicyLoss.GSPO:
        return f"r=exp(mean_tokens log({ratio}))"
    return f"r={ratio}"


def _weight_text(cfg: AlgorithmSection, is_at_sampler: bool) -> str:
    """Return the law of the importance weight, "" if it is always one."""
    rho = "r" if is_at_sampler else "pi_prox/mu"
    divided = "/r" if is_at_sampler else ""
    weight = {
        Correction.NONE: "",
        Correction.TOKEN_TIS: (
            f"min(1, {cfg.tis_cap:g}/r)" if is_at_sampler else f"min({rho}, {cfg.tis_cap:g})"
        ),
        Correction.SEQUENCE_TIS: f"min(prod_tokens {rho}, {cfg.tis_cap:g}){divided}",
        Correction.ICEPOP: f"{rho}*[{cfg.mask_low:g}<={rho}<={cfg.mask_high:g}]{divided}",
        Correction.GEOMETRIC: (
            f"[{cfg.geometric_low:g}<=geomean_tokens {rho}<={cfg.geometric_high:g}]"
        ),
    }[cfg.correction]
    if cfg.negative_mask_delta:
        mask = f"[not (A<0 and mean log(mu/pi)>{cfg.negative_mask_delta:g})]"
        weight = f"{weight}*{mask}" if weight else mask
    return f"w={weight}" if weight else ""


def _advantage_text(cfg: AlgorithmSection, learner: LearnerSection) -> str:
    if cfg.advantage is Advantage.PPO:
        return _critic_text(cfg, learner.critic)
    credit = _credit_text(cfg)
    baseline = {
        Advantage.GRPO: cfg.baseline.value,
        Advantage.RLOO: "leave_one_out",
        Advantage.REINFORCE_PP: "",
        Advantage.REINFORCE_PP_BASELINE: "group_mean",
    }[cfg.advantage]
    text = f"({credit} - {baseline})" if baseline else f"({credit})"
    if cfg.advantage is Advantage.GRPO and cfg.normalize_std:
        text += "/std"
    is_turn_penalty = cfg.invalid_action_level is CreditLevel.TURN
    is_beside = cfg.reward_level is CreditLevel.EPISODE  # the outcome, turn by turn
    if cfg.invalid_action_penalty and is_turn_penalty and is_beside:
        mean = " - group_mean" if baseline else ""
        text += f" - {cfg.invalid_action_penalty:g}*(invalid_turn{mean})"
    if cfg.advantage in (Advantage.REINFORCE_PP, Advantage.REINFORCE_PP_BASELINE):
        text = f"whiten_batch({text})"
    elif cfg.normalize_per_env:
        text = f"rms_per_env({text})"
    return f"A={text}"


def _credit_text(cfg: AlgorithmSection) -> str:
    penalty = cfg.invalid_action_penalty
    is_per_turn = cfg.invalid_action_level is CreditLevel.TURN
    if cfg.reward_level is CreditLevel.TURN:
        credit = f"sum_later_turns {cfg.turn_discount:g}^k*dR"
    else:
        discount = f"*{cfg.turn_discount:g}^(turns-1)" if cfg.turn_discount != 1 else ""
        credit = f"R{discount}"
        if penalty and is_per_turn:
            return credit
    if penalty:
        credit += f" - {penalty:g}*{'invalid_turn' if is_per_turn else 'invalid_frac'}"
    return credit


def _critic_text(cfg: AlgorithmSection, critic: CriticSection) -> str:
    step = critic.timestep.value
    discount = cfg.turn_discount if critic.timestep is Timestep.TURN else 1.0
    kind = "GAE" if critic.targets is CriticTargets.GAE else "V-trace"
    text = f"{kind}(per {step}, gamma={discount:g}, lambda={critic.gae_lambda:g}"
    if critic.targets is CriticTargets.VTRACE:
        text += f", rho<={critic.vtrace_rho:g}, c<={critic.vtrace_c:g}"
    text += f", V={critic.kind.value}, bootstrapped at a horizon cut)"
    text = f"rms_per_env({text})" if cfg.normalize_per_env else text
    return f"A={f'whiten_batch({text})' if critic.whiten else text}"


def _updates_text(learner: LearnerSection) -> str:
    if _is_one_update(learner):
        return "1 update per batch"
    return f"{learner.ppo_epochs} epochs x {learner.num_minibatches} minibatches"


def _reaction_texts(learner: LearnerSection) -> Iterator[str]:
    cfg = learner.controller
    if cfg.scale_lr:
        yield f"lr*max({cfg.min_lr_scale:g}, min(1, ESS/{cfg.ess_target:g}))"
    if cfg.skip_step:
        yield f"skipped below ESS {cfg.ess_skip:g}"


def dead_knobs(algorithm: AlgorithmSection, learner: LearnerSection) -> list[str]:
    """Return a line for every setting that differs from its default and changes nothing."""
    dead = [*_dead_in_algorithm(algorithm, learner), *_dead_in_learner(algorithm, learner)]
    return [f"{key}={value} has no effect: {why}" for key, value, why in dead]


def summary_lines(algorithm: AlgorithmSection, learner: LearnerSection) -> list[str]:
    """Return the objective, and a warning for every setting that has no effect."""
    dead = dead_knobs(algorithm, learner)
    return [
        f"objective: {objective_text(algorithm, learner)}",
        *(f"warning: {line}" for line in dead),
    ]


Dead = Iterator[tuple[str, object, str]]


def _changed(key: str, section: object, why: str, *names: str) -> Dead:
    """Yield the named settings that differ from their defaults."""
    default = type(section)()
    for name in names:
        value = getattr(section, name)
        if value != getattr(default, name):
            yield f"{key}.{name}", getattr(value, "value", value), why


def _dead_in_algorithm(cfg: AlgorithmSection, learner: LearnerSection) -> Dead:
    changed = partial(_changed, "algorithm", cfg)
    advantage = cfg.advantage
    if advantage is not Advantage.GRPO:
        yield from changed(f"advantage={advantage.value}", "baseline", "normalize_std")
    if advantage in (Advantage.REINFORCE_PP, Advantage.REINFORCE_PP_BASELINE):
        yield from changed("the batch is whitened as a whole", "normalize_per_env")
    if not advantage.is_group_relative:
        yield from changed(f"advantage={advantage.value}", "filter_zero_variance")
    if cfg.invalid_action_penalty == 0:
        yield from changed("invalid_action_penalty=0", "invalid_action_level")
    if cfg.aggregation is not Aggregation.CONSTANT:
        yield from changed(f"aggregation={cfg.aggregation.value}", "constant_tokens")
    why = f"policy_loss={cfg.policy_loss.value}"
    if cfg.policy_loss is PolicyLoss.CISPO:
        yield from changed(why, "clip_low", "dual_clip")
    if cfg.policy_loss is PolicyLoss.DPPO:
        yield from changed(why, "clip_low", "clip_high", "dual_clip")
    else:
        yield from changed(why, "dppo_delta")
    why = f"correction={cfg.correction.value}"
    if cfg.correction not in (Correction.TOKEN_TIS, Correction.SEQUENCE_TIS):
        yield from changed(why, "tis_cap")
    if cfg.correction is not Correction.ICEPOP:
        yield from changed(why, "mask_low", "mask_high")
    if cfg.correction is not Correction.GEOMETRIC:
        yield from changed(why, "geometric_low", "geometric_high")
    if cfg.kl_coef == 0:
        yield from changed("kl_coef=0", "kl_estimator", "reference_path")
    never_binds = _is_one_update(learner) and cfg.proximal in (Proximal.RECOMPUTED, Proximal.REUSED)
    if never_binds and cfg.policy_loss is not PolicyLoss.DPPO:
        why = f"proximal={cfg.proximal.value} with one update makes every ratio 1"
        yield from changed(why, "clip_low", "clip_high", "dual_clip")


def _dead_in_learner(algorithm: AlgorithmSection, cfg: LearnerSection) -> Dead:
    if cfg.optimizer is not OptimizerKind.MUON:
        yield from _changed("learner", cfg, f"optimizer={cfg.optimizer.value}", "muon_lr")
    if cfg.decay_start_frac >= 1:
        why = "decay_start_frac=1: there is no decay"
        yield from _changed("learner", cfg, why, "min_lr_frac")
    changed = partial(_changed, "learner.critic", cfg.critic)
    if algorithm.advantage is not Advantage.PPO:
        why = f"algorithm.advantage={algorithm.advantage.value} has no critic"
        yield from changed(why, *CriticSection.__dataclass_fields__)
    else:
        if cfg.critic.kind is CriticKind.HEAD:
            yield from changed("kind=head", "path")
        else:
            yield from changed("kind=model has an optimizer of its own", "coef")
        if _is_one_update(cfg):
            yield from changed("one update per batch moves no value before it", "clip")
        if cfg.critic.targets is not CriticTargets.VTRACE:
            why = f"targets={cfg.critic.targets.value}"
            yield from changed(why, "vtrace_rho", "vtrace_c")
    changed = partial(_changed, "learner.controller", cfg.controller)
    if not cfg.controller.scale_lr:
        yield from changed("scale_lr=false", "min_lr_scale")
    if not cfg.controller.skip_step:
        yield from changed("skip_step=false", "ess_skip", "max_skips")
    if not cfg.controller.tighten_gate:
        yield from changed("tighten_gate=false", "ess_gate", "recover_steps")

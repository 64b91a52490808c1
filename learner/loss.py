"""The policy loss. Pure functions on tensors.

With r = pi_theta / pi_anchor, A the advantage, N the trained tokens of the whole minibatch:

    loss = -(1/N) sum_tokens w * f(r, A)  -  (entropy_coef/N) sum_tokens H
    f(r, A) = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)       where A >= 0
    f(r, A) = max(min(r A, clip(r, ...) A), dual_clip A)             where A < 0

The weight w carries no gradient. Two forms, chosen by the number of updates per batch:

    one update:   anchor = mu (the sampler),    w = min(1, tis_cap / r)
    many updates: anchor = pi_prox (the policy before them),  w = min(pi_prox / mu, tis_cap)

With one update pi_prox *is* pi_theta, so a ratio to it is always one and no clip would ever bind.
That is why the sampler is the anchor there: the trust region then limits how far the policy may
have moved from the one that sampled. In both forms the factor in front of grad log pi, before
anything is clipped and at the first update, is min(pi/mu, tis_cap) A.
"""

import torch
from torch import Tensor

from common.config import Aggregation, AlgorithmSection, CreditLevel, LearnerSection
from learner.correction import log_ratio


def clipped_policy_loss(
    new_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    *,
    is_weights: Tensor | None,
    entropy: Tensor | None,
    num_global_tokens: int,
    cfg: AlgorithmSection,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss written at the top of this module, and its metrics.

    All tensors hold trained (sampled) tokens only, so there is nothing to mask. Dividing by a
    count given from outside, not by this tensor's own, makes microbatches add up to the batch.

    Args:
        new_logprobs: [tokens] nats, current policy, with gradient.
        anchor_logprobs: [tokens] nats, policy that the ratio is clipped against.
        advantages: [tokens] constant over an episode's tokens.
        is_weights: [tokens] importance weights, used without gradient; None means ones.
        entropy: [tokens] nats with gradient; required if cfg.entropy_coef is not 0.
        num_global_tokens: trained tokens of the minibatch, over all microbatches.
        cfg: clip_low, clip_high, dual_clip (0: off), entropy_coef.

    Returns:
        (loss, metrics): scalars. Metrics are sums over tokens / num_global_tokens, so adding
        them over microbatches gives the minibatch's mean.

    Raises:
        ValueError: shapes differ, num_global_tokens < 1, or the entropy is missing.

    Source: PPO, arXiv:1707.06347; clip-higher, DAPO, arXiv:2503.14476; dual clip,
    arXiv:1912.09729; decoupled anchor, arXiv:2110.00641, used by AReaL, arXiv:2505.24298.
    """
    _check_inputs(new_logprobs, anchor_logprobs, advantages, is_weights, num_global_tokens)
    surrogate, is_clipped = _surrogate(new_logprobs, anchor_logprobs, advantages, cfg)
    if is_weights is not None:
        surrogate = surrogate * is_weights.detach()

    policy_loss = -surrogate.sum() / num_global_tokens
    metrics = {
        "loss/policy": policy_loss.detach(),
        "policy/clipped_frac": is_clipped.sum() / num_global_tokens,
        "policy/entropy": -new_logprobs.detach().sum() / num_global_tokens,  # estimate
    }
    loss = policy_loss
    if entropy is not None:
        mean_entropy = entropy.sum() / num_global_tokens
        metrics["policy/entropy"] = mean_entropy.detach()  # exact
        loss = loss - cfg.entropy_coef * mean_entropy
    elif cfg.entropy_coef != 0:
        raise ValueError(f"entropy_coef={cfg.entropy_coef} needs the entropy")
    return loss, metrics


def _surrogate(
    new_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, cfg: AlgorithmSection
) -> tuple[Tensor, Tensor]:
    """Return (f(r, A), whether a bound decides it), both [tokens]."""
    ratio = log_ratio(new_logprobs, anchor_logprobs).exp()  # [tokens]
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    plain = ratio * advantages
    surrogate = torch.minimum(plain, clipped * advantages)
    if cfg.dual_clip > 0:
        floored = torch.maximum(surrogate, cfg.dual_clip * advantages)
        surrogate = torch.where(advantages < 0, floored, surrogate)
    return surrogate, surrogate != plain


def _check_inputs(
    new_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    is_weights: Tensor | None,
    num_global_tokens: int,
) -> None:
    given = [new_logprobs, anchor_logprobs, advantages]
    given += [] if is_weights is None else [is_weights]
    shapes = {tuple(tensor.shape) for tensor in given}
    if len(shapes) != 1 or new_logprobs.ndim != 1:
        raise ValueError(f"inputs must share one [tokens] shape, got {sorted(shapes)}")
    if num_global_tokens < 1:
        raise ValueError(f"num_global_tokens={num_global_tokens} must be >= 1")


def is_anchored_at_sampler(cfg: LearnerSection) -> bool:
    """Return True if a batch makes one update, so that the ratio is taken to the sampler."""
    return cfg.ppo_epochs * cfg.num_minibatches == 1


def objective_text(cfg_algorithm: AlgorithmSection, cfg_learner: LearnerSection) -> str:
    """Return the objective that this configuration optimises, with its numbers, in one line."""
    cfg = cfg_algorithm
    low, high = 1 - cfg.clip_low, 1 + cfg.clip_high
    surrogate = f"min(r*A, clip(r, {low:g}, {high:g})*A)"
    if cfg.dual_clip > 0:
        surrogate = f"[{surrogate}, at least {cfg.dual_clip:g}*A if A<0]"
    if is_anchored_at_sampler(cfg_learner):
        ratio, weight = "r=pi/mu", f"w=min(1, {cfg.tis_cap:g}/r)"
        updates = "1 update per batch"
    else:
        ratio, weight = "r=pi/pi_prox", f"w=min(pi_prox/mu, {cfg.tis_cap:g})"
        updates = f"{cfg_learner.ppo_epochs} epochs x {cfg_learner.num_minibatches} minibatches"
    entropy = f" + {cfg.entropy_coef:g}*H" if cfg.entropy_coef != 0 else ""
    weighted = f"w*{surrogate}" if cfg.tis_cap > 0 else surrogate
    laws = ", ".join([ratio, *([weight] if cfg.tis_cap > 0 else []), _advantage_text(cfg)])
    mean = "mean_tokens" if cfg.aggregation is Aggregation.TOKEN else "mean_episodes mean_tokens"
    return f"maximise {mean} {weighted}{entropy}; {laws}; {updates}"


def _advantage_text(cfg: AlgorithmSection) -> str:
    discount = f"*{cfg.turn_discount:g}^(turns-1)" if cfg.turn_discount != 1 else ""
    reward, turn = f"R{discount}", ""
    if cfg.invalid_action_penalty != 0:
        if cfg.invalid_action_level is CreditLevel.EPISODE:
            reward = f"({reward} - {cfg.invalid_action_penalty:g}*invalid_frac)"
        else:
            turn = f" - {cfg.invalid_action_penalty:g}*(invalid_turn - group_mean)"
    scale = "/std" if cfg.normalize_std else ""
    return f"A=({reward} - {cfg.baseline.value}){scale}{turn}"

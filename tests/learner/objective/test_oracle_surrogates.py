"""Surrogates and their means against the formulas of their papers, written out token by token."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.config.learning import Aggregation, AlgorithmSection, Correction, PolicyLoss
from learner.batch.batching import MicroBatch, make_microbatches
from learner.batch.credit import samples_of
from learner.objective.loss import Denominator, LossInputs, policy_loss
from learner.objective.second_moment import second_moment_mask
from tests.learner.objective.ragged import groups

LOW, HIGH, DUAL, DELTA = 0.2, 0.28, 1.5, 0.05
Surrogate = Callable[[Tensor, Tensor, Tensor, list[list[int]], list[int]], list[Tensor]]


def batch() -> MicroBatch:
    """Lay out the ragged batch: turns of no token and of one, equal rewards, one member alone."""
    samples = samples_of(list(groups()), AlgorithmSection())
    everything = range(len(samples))
    (micro,) = make_microbatches(samples, everything, max_tokens=10**6, device="cpu")
    return micro


def parts_of(ids: Tensor) -> list[list[int]]:
    """Return for each token the tokens that share its number, itself included."""
    return [[k for k, other in enumerate(ids.tolist()) if other == own] for own in ids.tolist()]


def mean_ratio(log_r: Tensor, part: list[int]) -> Tensor:
    return torch.stack([log_r[k] for k in part]).mean().exp()


def clipped(r: Tensor, a: Tensor) -> Tensor:
    """PPO, arXiv:1707.06347, with clip-higher and the dual clip of arXiv:1912.09729."""
    kept = min(r * a, r.clamp(1 - LOW, 1 + HIGH) * a)
    return max(kept, DUAL * a) if a < 0 else kept


def ppo(log_r: Tensor, a: Tensor, mu: Tensor, parts: list[list[int]], _: list[int]) -> list[Tensor]:
    return [clipped(x.exp(), y) for x, y in zip(log_r, a, strict=True)]


def by_part(
    log_r: Tensor, a: Tensor, mu: Tensor, parts: list[list[int]], _: list[int]
) -> list[Tensor]:
    """GSPO-token, arXiv:2507.18071 equation 13, over sequences, or the same over turns."""
    ratios = [mean_ratio(log_r.detach(), part) for part in parts]
    own = [s * (x - x.detach()).exp() for s, x in zip(ratios, log_r, strict=True)]
    return [clipped(s, y) for s, y in zip(own, a, strict=True)]


def cispo(
    log_r: Tensor, a: Tensor, mu: Tensor, parts: list[list[int]], _: list[int]
) -> list[Tensor]:
    """arXiv:2506.13585, equation 4: the clipped weight has no gradient, log pi has all of it."""
    held = [min(x.detach().exp(), torch.tensor(1 + HIGH)) for x in log_r]
    return [w * y * (x + m) for w, y, x, m in zip(held, a, log_r, mu, strict=True)]


def dppo(
    log_r: Tensor, a: Tensor, mu: Tensor, parts: list[list[int]], _: list[int]
) -> list[Tensor]:
    """The trust region is a change of probability, not of its ratio."""
    found: list[Tensor] = []
    for x, y, m in zip(log_r, a, mu, strict=True):
        moved = ((x + m).exp() - m.exp()).item()
        is_out = (y > 0 and moved > DELTA) or (y < 0 and moved < -DELTA)
        found.append(0 * x if is_out else x.exp() * y)
    return found


def m2po(
    log_r: Tensor, a: Tensor, mu: Tensor, parts: list[list[int]], kept: list[int]
) -> list[Tensor]:
    """arXiv:2510.01161: the plain ratio on the tokens that its second moment trusts."""
    pairs = zip(log_r, a, strict=True)
    return [x.exp() * y if k in kept else 0 * x for k, (x, y) in enumerate(pairs)]


PAPERS: dict[PolicyLoss, Surrogate] = {
    PolicyLoss.PPO: ppo,
    PolicyLoss.GSPO: by_part,
    PolicyLoss.TURN: by_part,
    PolicyLoss.CISPO: cispo,
    PolicyLoss.DPPO: dppo,
    PolicyLoss.UNCLIPPED: m2po,
}


def trusted(log_r: Tensor, threshold: float) -> list[int]:
    """M2PO's algorithm 1: take away the worst token until the second moment is trusted."""
    left = list(range(len(log_r)))
    while sum(float(log_r[k]) ** 2 for k in left) / len(left) > threshold:
        left.remove(max(left, key=lambda k: abs(float(log_r[k]))))
    return left


def averaged(terms: list[Tensor], micro: MicroBatch, how: Aggregation) -> Tensor:
    if how is Aggregation.TOKEN:
        return sum(terms, torch.zeros(())) / len(terms)
    number = micro.num_sequences
    rows = [
        [t for t, s in zip(terms, micro.sequence_ids, strict=True) if s == i] for i in range(number)
    ]
    if how is Aggregation.CONSTANT:
        return sum((sum(row, torch.zeros(())) / 7 for row in rows), torch.zeros(())) / number
    return sum((sum(row, torch.zeros(())) / len(row) for row in rows), torch.zeros(())) / number


@pytest.mark.parametrize("how", list(Aggregation))
@pytest.mark.parametrize("kind", list(PolicyLoss))
def test_loss_and_gradient_match_the_paper(kind: PolicyLoss, how: Aggregation) -> None:
    assert set(PAPERS) == set(PolicyLoss)
    micro, generator = batch(), torch.Generator().manual_seed(4)
    mu = micro.sampler_logprobs.double()
    moved = 0.5 * torch.randn(len(mu), generator=generator, dtype=torch.float64)
    new = (mu + moved).clamp(max=-0.02).requires_grad_()
    advantages = micro.advantages.double()
    kept = trusted((new - mu).detach(), 0.1)
    assert 1 < len(kept) < len(mu)
    ids = micro.turn_ids if kind is PolicyLoss.TURN else micro.sequence_ids
    terms = PAPERS[kind](new - mu, advantages, mu, parts_of(ids), kept)
    expected = -averaged(terms, micro, how)
    (gradient,) = torch.autograd.grad(expected, new)

    cfg = AlgorithmSection(
        policy_loss=kind,
        aggregation=how,
        constant_tokens=7,
        clip_low=LOW,
        clip_high=HIGH,
        dual_clip=DUAL,
        dppo_delta=DELTA,
        correction=Correction.NONE,
    )
    mask = second_moment_mask((new - mu).detach(), threshold=0.1)
    inputs = LossInputs(
        new_logprobs=new,
        anchor_logprobs=mu,
        sampler_logprobs=mu,
        advantages=advantages,
        is_weights=mask.double() if kind is PolicyLoss.UNCLIPPED else torch.ones_like(mu),
        sequence_ids=micro.sequence_ids,
        num_sequences=micro.num_sequences,
        turn_ids=micro.turn_ids,
    )
    counts = Denominator(num_tokens=len(mu), num_sequences=micro.num_sequences)
    loss, _ = policy_loss(inputs, counts, cfg)
    (ours,) = torch.autograd.grad(loss, new)
    assert gradient.abs().max() > 1e-3
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(ours, gradient, atol=1e-6, rtol=0)


def test_gspo_by_sequence_matches_the_paper() -> None:
    """Equation 5 of arXiv:2507.18071: mean over sequences of min(s A, clip(s) A)."""
    micro = batch()
    mu = micro.sampler_logprobs.double()
    moved = 0.5 * torch.randn(len(mu), generator=torch.Generator().manual_seed(4))
    new = (mu + moved).requires_grad_()
    rows = [(micro.sequence_ids == i).nonzero()[:, 0].tolist() for i in range(micro.num_sequences)]
    advantages = micro.advantages.double()
    terms = [clipped(mean_ratio(new - mu, row), advantages[row[0]]) for row in rows]
    expected = -torch.stack(terms).mean()
    cfg = AlgorithmSection(
        policy_loss=PolicyLoss.GSPO,
        aggregation=Aggregation.SEQUENCE,
        clip_low=LOW,
        clip_high=HIGH,
        dual_clip=DUAL,
    )
    inputs = LossInputs(
        new_logprobs=new,
        anchor_logprobs=mu,
        sampler_logprobs=mu,
        advantages=advantages,
        is_weights=torch.ones_like(mu),
        sequence_ids=micro.sequence_ids,
        num_sequences=micro.num_sequences,
    )
    counts = Denominator(num_tokens=len(mu), num_sequences=micro.num_sequences)
    loss, _ = policy_loss(inputs, counts, cfg)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    for theirs, ours in zip(
        torch.autograd.grad(expected, new), torch.autograd.grad(loss, new), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)

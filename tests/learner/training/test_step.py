"""Laws of what a batch is compared with during its step."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.config.algorithm import Aggregation, AlgorithmSection, Correction, PolicyLoss, Proximal
from common.config.learner import LearnerSection, Precision
from learner.algorithms.interface import LossInputs
from learner.batch.batching import MicroBatch
from learner.policy.forward import Networks
from learner.training.ranks import Ranks
from learner.training.step import Gradients, TrainerSettings
from tests.learner.builders import make_microbatches, make_model, make_samples

VERSION = 3


class Step:
    """A batch of two groups at version 3, sampled at version 1, with a model that can move."""

    def __init__(self, *, lag: int = 2, ranks: Ranks | None = None, **algorithm: Any) -> None:
        samples = make_samples(num_groups=2)
        for sample in samples:
            t = sample.trajectory
            t.versions[t.loss_mask] = VERSION - lag
        self.model = make_model()
        settings = TrainerSettings(
            learner=LearnerSection(precision=Precision.FP32, ppo_epochs=2),
            algorithm=AlgorithmSection(**algorithm),
            num_steps=10,
            engine_dtype="float32",
        )
        networks = Networks(
            policy=self.model, reference=make_model(seed=1) if algorithm.get("kl_coef") else None
        )
        self.gradients = Gradients(settings, networks, ranks or Ranks())
        self.batch = self.gradients.prepare(samples, VERSION)

    def micro(self, indices: list[int]) -> MicroBatch:
        how: dict[str, Any] = {"max_tokens": 10_000, "device": "cpu"}
        is_packed = self.gradients.passes.is_packed
        (micro,) = make_microbatches(self.batch.samples, indices, is_packed=is_packed, **how)
        return micro

    def logprobs(self, micro: MicroBatch) -> Tensor:
        return self.gradients.passes.score(micro.tokens).logprobs.detach()

    def inputs(self, indices: list[int]) -> tuple[MicroBatch, LossInputs]:
        micro = self.micro(indices)
        scores = self.gradients.passes.score(micro.tokens)
        return micro, self.gradients.loss_inputs(self.batch, micro, scores)

    def update_on(self, indices: list[int]) -> None:
        """Take a minibatch as the trainer does, and leave the weights alone."""
        gradient = self.gradients.accumulate(self.batch, indices)
        self.batch = self.batch.with_scored(gradient.logprobs)

    def ess_frac(self) -> float:
        return self.gradients.overlap(self.batch).ess_frac

    def move(self) -> None:
        """Change the policy, as an update would."""
        with torch.no_grad():
            self.model.lm_head.weight.mul_(1.1)


FIRST, SECOND = [0, 1], [2, 3]


def test_recomputed_anchor_is_the_policy_before_the_first_update() -> None:
    step = Step(proximal=Proximal.RECOMPUTED)
    before = step.logprobs(step.micro(SECOND))
    step.update_on(FIRST)
    step.move()
    micro, got = step.inputs(SECOND)
    # Other neighbours in a microbatch, other rounding.
    torch.testing.assert_close(got.anchor_logprobs, before, atol=2e-6, rtol=0)
    assert (got.new_logprobs - before).abs().max() > 1e-3
    rho = (before - micro.sampler_logprobs).exp()
    torch.testing.assert_close(got.is_weights, rho.clamp(max=2.0))


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])  # A reference needs all scores before.
def test_reused_anchor_is_the_policy_at_a_samples_first_update(kl_coef: float) -> None:
    step = Step(proximal=Proximal.REUSED, kl_coef=kl_coef)
    step.update_on(FIRST)
    step.move()
    micro, got = step.inputs(SECOND)
    between = step.logprobs(micro)
    assert got.anchor_logprobs.equal(between)  # the first that the second minibatch has seen
    step.update_on(SECOND)
    step.move()
    _, again = step.inputs(SECOND)
    assert again.anchor_logprobs.equal(between)


def test_the_sampler_as_anchor_stays_the_sampler() -> None:
    step = Step(proximal=Proximal.SAMPLER)
    step.move()
    micro, got = step.inputs(FIRST)
    assert got.anchor_logprobs.equal(micro.sampler_logprobs)
    ratio = (got.new_logprobs.detach() - micro.sampler_logprobs).exp()
    torch.testing.assert_close(got.is_weights * ratio, ratio.clamp(max=2.0))


def test_interpolated_anchor_follows_the_lag() -> None:
    micro, got = Step(proximal=Proximal.INTERPOLATED, lag=2).inputs(FIRST)
    new, mu = got.new_logprobs.detach(), micro.sampler_logprobs
    torch.testing.assert_close(got.anchor_logprobs, mu / 3 + 2 * new / 3)


@pytest.mark.parametrize("correction", [c for c in Correction if c is not Correction.SECOND_MOMENT])
def test_interpolated_anchor_without_lag_needs_no_correction(correction: Correction) -> None:
    step = Step(proximal=Proximal.INTERPOLATED, correction=correction, lag=0)
    micro, got = step.inputs(FIRST)
    assert got.anchor_logprobs.equal(micro.sampler_logprobs)
    assert got.is_weights.tolist() == [1.0] * len(got.is_weights)


def test_negative_mask_uses_policy_before_step() -> None:
    step = Step(proximal=Proximal.RECOMPUTED, negative_mask_delta=1e-9)
    micro = step.micro(FIRST)
    mu = step.logprobs(micro) + 0.1  # the sampler liked all of it more
    for sample, part in zip(step.batch.samples, _parts(step, mu, micro), strict=False):
        sample.trajectory.logprobs[sample.trajectory.loss_mask] = part
    _, got = step.inputs(FIRST)
    is_masked = got.is_weights == 0
    assert is_masked.tolist() == (got.advantages < 0).tolist()
    assert is_masked.any()


def _parts(step: Step, flat: Tensor, micro: MicroBatch) -> list[np.ndarray]:
    """Return values in a block's order as one array per sample, in the samples' order."""
    counts = [step.batch.samples[i].num_sampled_tokens for i in micro.sample_indices]
    by_index = dict(zip(micro.sample_indices, flat.split(counts), strict=True))
    return [by_index[i].numpy() for i in sorted(by_index)]


def test_ess_covers_tokens_scored_so_far() -> None:
    step = Step(proximal=Proximal.REUSED)
    micro = step.micro(FIRST)
    step.update_on(FIRST)
    weights = (step.logprobs(micro) - micro.sampler_logprobs).double().exp()
    expected = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    assert step.ess_frac() == pytest.approx(expected.item(), rel=1e-5)
    step.update_on(SECOND)
    assert step.ess_frac() != pytest.approx(expected.item(), rel=1e-3)


class Halves(Ranks):
    """One of two ranks, and what the other one adds to a sum of moments."""

    def __init__(self, index: int, other: Tensor) -> None:
        super().__init__()
        self.index, self.size, self._other = index, 2, other

    def sum(self, values: Tensor) -> Tensor:
        return values + self._other


def test_ess_covers_all_ranks() -> None:
    theirs = torch.tensor([0.5, 4.0, 1.0], dtype=torch.float64)
    moments = torch.tensor([3.0, theirs.sum(), (theirs**2).sum()], dtype=torch.float64)
    step = Step(proximal=Proximal.REUSED, ranks=Halves(0, moments))
    micro = step.micro(FIRST[:1])
    step.batch = step.batch.with_scored({0: step.logprobs(micro)})
    own = (step.logprobs(micro) - micro.sampler_logprobs).double().exp()
    both = torch.cat([own, theirs])
    expected = both.sum() ** 2 / (len(both) * (both**2).sum())
    assert step.ess_frac() == pytest.approx(expected.item(), rel=1e-5)


def _gradient_of(step: Step, part: list[int]) -> tuple[dict[str, float], Tensor, set[int]]:
    """Return the metrics, the gradient and the computed samples."""
    step.model.zero_grad()
    found = step.gradients.accumulate(step.batch, part)
    flat = [each.grad.flatten() for each in step.model.parameters() if each.grad is not None]
    return found.sums, torch.cat(flat).clone(), set(found.logprobs)


# Each correction, and each pair of the others, occurs in one case. The rest are nightly.
CORRECTIONS = list(Correction)
PAIRS = list(product(PolicyLoss, Aggregation))
USUAL = {(CORRECTIONS[i % len(CORRECTIONS)], *pair) for i, pair in enumerate(PAIRS)}


@pytest.mark.parametrize(
    ("correction", "policy_loss", "aggregation"),
    [
        pytest.param(*case, marks=[pytest.mark.long] * (case not in USUAL))
        for case in product(Correction, PolicyLoss, Aggregation)
    ],
)
def test_zero_advantage_samples_count_without_computation(
    correction: Correction, policy_loss: PolicyLoss, aggregation: Aggregation
) -> None:
    told = {"correction": correction, "policy_loss": policy_loss, "aggregation": aggregation}
    step = Step(**told, geometric_low=0.1, geometric_high=10.0)
    taught = [step.batch.samples[index] for index in FIRST]
    others = [replace(step.batch.samples[index], advantage=0.0) for index in SECOND]
    step.batch = step.gradients.prepare([*taught, *others], VERSION)
    sums, gradient, computed = _gradient_of(step, [*FIRST, *SECOND])
    assert computed == {*FIRST}
    alone, expected, _ = _gradient_of(step, FIRST)
    counts = {
        Aggregation.TOKEN: [sum(each.num_sampled_tokens for each in s) for s in (taught, others)],
        Aggregation.SEQUENCE: [len(taught), len(others)],
        Aggregation.CONSTANT: [len(taught), len(others)],
    }[aggregation]
    share = counts[0] / sum(counts)
    torch.testing.assert_close(gradient, share * expected, rtol=1e-5, atol=1e-6)
    assert expected.abs().max() > 1e-3
    assert sums["loss/policy"] == pytest.approx(share * alone["loss/policy"], rel=1e-5)
    for name in ("entropy", "clipped_frac", "masked_frac", "weight_mean"):  # Computed samples only.
        assert sums[f"policy/{name}"] == pytest.approx(alone[f"policy/{name}"], rel=1e-5)


@pytest.mark.parametrize("told", [{"entropy_coef": 0.1}, {"kl_coef": 0.1}, {"drift_coef": 0.1}])
def test_zero_advantage_samples_with_a_gradient_are_computed(told: dict[str, Any]) -> None:
    step = Step(**told)
    samples = [replace(each, advantage=0.0) for each in step.batch.samples[2:]]
    step.batch = step.gradients.prepare([*step.batch.samples[:2], *samples], VERSION)
    _, gradient, computed = _gradient_of(step, [*FIRST, *SECOND])
    assert computed == {*FIRST, *SECOND}
    _, of_others, _ = _gradient_of(step, SECOND)
    assert gradient.isfinite().all()
    assert of_others.abs().max() > 0


def test_batch_without_advantage_is_computed_with_zero_gradient() -> None:
    step = Step()
    samples = [replace(each, advantage=0.0) for each in step.batch.samples]
    step.batch = step.gradients.prepare(samples, VERSION)
    sums, gradient, computed = _gradient_of(step, [*FIRST, *SECOND])
    assert computed == {*FIRST, *SECOND}
    assert sums["policy/entropy"] > 0
    assert not gradient.any()

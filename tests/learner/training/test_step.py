"""Laws of what a batch is compared with during its step."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from common.config.learning import AlgorithmSection, Correction, LearnerSection, Proximal
from learner.batch.batching import MicroBatch
from learner.objective.loss import LossInputs
from learner.policy.forward import Passes
from learner.training.ranks import Ranks
from learner.training.step import BatchStep, StepParts
from tests.learner.builders import make_model, make_samples

VERSION = 3


class Step:
    """A batch of two groups at version 3, sampled at version 1, with a model that can move."""

    def __init__(self, *, lag: int = 2, **algorithm) -> None:
        samples = make_samples(num_groups=2)
        for sample in samples:
            t = sample.trajectory
            t.versions[t.loss_mask] = VERSION - lag
        self.model = make_model()
        cfg = LearnerSection(autocast=False, ppo_epochs=2)
        self._passes = Passes(cfg, self.model, None, temperature=1.0, engine_dtype="float32")
        self.batch = BatchStep(
            StepParts(
                cfg=cfg,
                algorithm=AlgorithmSection(**algorithm),
                passes=self._passes,
                reference=None,
                has_critic=False,
                ranks=Ranks(),
                device=torch.device("cpu"),
            ),
            samples,
            VERSION,
            must_train=False,
        )
        self.batch.score_before()

    def logprobs(self, micro: MicroBatch) -> Tensor:
        return self._passes.score(micro.tokens).logprobs.detach()

    def inputs(self, indices: list[int]) -> tuple[MicroBatch, LossInputs]:
        (micro,) = self.batch.microbatches(indices)
        return micro, self.batch.loss_inputs(micro, self._passes.score(micro.tokens))

    def move(self) -> None:
        """Change the policy, as an update would."""
        with torch.no_grad():
            self.model.lm_head.weight.mul_(1.1)


FIRST, SECOND = [0, 1], [2, 3]


def test_a_recomputed_anchor_is_the_policy_before_the_first_update() -> None:
    step = Step(proximal=Proximal.RECOMPUTED)
    (micro,) = step.batch.microbatches(SECOND)
    before = step.logprobs(micro)
    step.inputs(FIRST)
    step.move()
    micro, got = step.inputs(SECOND)
    assert got.anchor_logprobs.equal(before)
    assert (got.new_logprobs - before).abs().max() > 1e-3
    rho = (before - micro.sampler_logprobs).exp()
    torch.testing.assert_close(got.is_weights, rho.clamp(max=2.0))


def test_a_reused_anchor_is_the_policy_of_a_sample_s_first_update() -> None:
    step = Step(proximal=Proximal.REUSED)
    step.inputs(FIRST)
    step.move()
    micro, got = step.inputs(SECOND)
    between = step.logprobs(micro)
    assert got.anchor_logprobs.equal(between)  # the first that the second minibatch has seen
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


def test_an_interpolated_anchor_lies_between_sampler_and_policy_by_the_lag() -> None:
    micro, got = Step(proximal=Proximal.INTERPOLATED, lag=2).inputs(FIRST)
    new, mu = got.new_logprobs.detach(), micro.sampler_logprobs
    torch.testing.assert_close(got.anchor_logprobs, mu / 3 + 2 * new / 3)


@pytest.mark.parametrize("correction", list(Correction))
def test_without_lag_an_interpolated_anchor_needs_no_correction(correction: Correction) -> None:
    step = Step(proximal=Proximal.INTERPOLATED, correction=correction, lag=0)
    micro, got = step.inputs(FIRST)
    assert got.anchor_logprobs.equal(micro.sampler_logprobs)
    assert got.is_weights.tolist() == [1.0] * len(got.is_weights)


def test_bad_episodes_are_masked_by_the_policy_before_the_step() -> None:
    step = Step(proximal=Proximal.RECOMPUTED, negative_mask_delta=1e-9)
    (micro,) = step.batch.microbatches(FIRST)
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


def test_effective_sample_size_is_over_the_tokens_scored_so_far() -> None:
    step = Step(proximal=Proximal.REUSED)
    micro, _ = step.inputs(FIRST)
    weights = (step.logprobs(micro) - micro.sampler_logprobs).double().exp()
    expected = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    assert step.batch.ess_frac() == pytest.approx(expected.item(), rel=1e-5)
    step.inputs(SECOND)
    assert step.batch.ess_frac() != pytest.approx(expected.item(), rel=1e-3)


class Halves(Ranks):
    """One of two ranks, and what the other one adds to a sum of moments."""

    def __init__(self, index: int, other: Tensor) -> None:
        super().__init__()
        self.index, self.size, self._other = index, 2, other

    def sum(self, values: Tensor) -> Tensor:
        return values + self._other


def test_effective_sample_size_is_that_of_all_ranks_together() -> None:
    step = Step(proximal=Proximal.REUSED)
    (micro,) = step.batch.microbatches(FIRST)
    step.inputs(FIRST)
    own = (step.logprobs(micro) - micro.sampler_logprobs).double().exp()
    theirs = torch.tensor([0.5, 4.0, 1.0], dtype=torch.float64)
    moments = torch.tensor([3.0, theirs.sum(), (theirs**2).sum()], dtype=torch.float64)
    step.batch._parts = replace(step.batch._parts, ranks=Halves(0, moments))
    both = torch.cat([own, theirs])
    expected = both.sum() ** 2 / (len(both) * (both**2).sum())
    assert step.batch.ess_frac() == pytest.approx(expected.item(), rel=1e-5)

"""KL estimators against derivatives by hand, and against divergences by enumeration."""

import math

import pytest
import torch

from common.config.learning import KlEstimator
from learner.objective.loss import kl_estimate

BY_HAND = {  # value and derivative by log pi, of d = log pi - log reference
    KlEstimator.K1: lambda d: (d, 1.0),
    KlEstimator.K2: lambda d: (d * d / 2, d),
    KlEstimator.K3: lambda d: (math.exp(-d) - 1 + d, 1 - math.exp(-d)),
}


@pytest.mark.parametrize("kind", list(KlEstimator))
def test_value_and_gradient_are_those_by_hand(kind: KlEstimator) -> None:
    reference = torch.tensor([-0.5, -1.0, -3.0, -7.0], dtype=torch.float64)
    new = torch.tensor([-0.5, -2.0, -0.25, -6.5], dtype=torch.float64, requires_grad=True)
    found = kl_estimate(new, reference, kind)
    found.sum().backward()
    assert new.grad is not None
    for at, gap in enumerate((new - reference).tolist()):
        value, slope = BY_HAND[kind](gap)
        assert found[at].item() == pytest.approx(value, abs=1e-6)
        assert new.grad[at].item() == pytest.approx(slope, abs=1e-6)


def test_on_policy_kl_estimators_match_divergence() -> None:
    logits = torch.tensor([0.3, -1.2, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.4, 0.5, 0.2, 1.0], dtype=torch.float64).log_softmax(0)
    new = logits.log_softmax(0)
    forward = (new.exp() * (new - reference)).sum()  # KL(pi | reference)
    backward = (reference.exp() * (reference - new)).sum()
    wanted = {
        KlEstimator.K1: torch.zeros(4, dtype=torch.float64),
        KlEstimator.K2: torch.autograd.grad(forward, logits, retain_graph=True)[0],
        KlEstimator.K3: torch.autograd.grad(backward, logits, retain_graph=True)[0],
    }
    for kind, gradient in wanted.items():
        # What samples of pi give on average; their distribution is not differentiated.
        mean = (new.exp().detach() * kl_estimate(new, reference, kind)).sum()
        (found,) = torch.autograd.grad(mean, logits, retain_graph=True)
        torch.testing.assert_close(found, gradient, atol=1e-6, rtol=0)
        if kind is not KlEstimator.K2:  # k2 is biased
            assert mean.item() == pytest.approx(forward.item(), abs=1e-6)

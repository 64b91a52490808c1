"""Law of routers with a bias on a CPU: it changes the choice of experts, not their gates."""

import pytest
import torch


def test_router_bias_changes_the_choice_only() -> None:
    from actor.engine.cpu_worker import biased_choice

    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).log()  # The softmax is .4, .3, .2, .1.
    how = {"hidden_states": torch.zeros(1, 2), "gating_output": logits, "topk": 2}
    plain, ids = biased_choice(torch.zeros(4), **how, renormalize=False)
    assert ids.tolist() == [[0, 1]]
    assert plain[0].tolist() == pytest.approx([0.4, 0.3])
    bias = torch.tensor([0.0, 0.0, 0.15, 0.0])
    gates, ids = biased_choice(bias, **how, renormalize=True)
    assert ids.tolist() == [[0, 2]]
    assert gates[0].tolist() == pytest.approx([0.4 / 0.6, 0.2 / 0.6])

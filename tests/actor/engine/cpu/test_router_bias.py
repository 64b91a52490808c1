"""Laws of routers on a CPU: a bias changes the choice of experts, not their gates."""

from functools import partial
from typing import Any

import pytest
import torch


def test_router_bias_changes_the_choice_only() -> None:
    from actor.engine.cpu.worker import chosen_experts

    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).log()  # The softmax is .4, .3, .2, .1.
    how = {"hidden_states": torch.zeros(1, 2), "gating_output": logits, "topk": 2}
    plain, ids = chosen_experts(torch.zeros(4), False, 1.0, **how, renormalize=False)
    assert ids.tolist() == [[0, 1]]
    assert plain[0].tolist() == pytest.approx([0.4, 0.3])
    bias = torch.tensor([0.0, 0.0, 0.15, 0.0])
    gates, ids = chosen_experts(bias, False, 1.0, **how, renormalize=True)
    assert ids.tolist() == [[0, 2]]
    assert gates[0].tolist() == pytest.approx([0.4 / 0.6, 0.2 / 0.6])


def test_sigmoid_router_scales_its_gates() -> None:
    from actor.engine.cpu.worker import chosen_experts

    logits = torch.tensor([[0.8, 0.6, 0.5, 0.2]]).logit()  # The sigmoids are .8, .6, .5, .2.
    how = {"hidden_states": torch.zeros(1, 2), "gating_output": logits, "topk": 2}
    gates, ids = chosen_experts(None, True, 1.0, **how, renormalize=False)
    assert ids.tolist() == [[0, 1]]
    assert gates[0].tolist() == pytest.approx([0.8, 0.6])
    bias = torch.tensor([0.0, 0.0, 0.2, 0.0])
    gates, ids = chosen_experts(bias, True, 2.5, **how, renormalize=True)
    assert ids.tolist() == [[0, 2]]
    assert gates[0].tolist() == pytest.approx([2.5 * 0.8 / 1.3, 2.5 * 0.5 / 1.3])


def test_sigmoid_routers_are_completed_on_a_cpu() -> None:
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    from actor.engine.cpu.worker import chosen_experts, complete_routers

    layer: Any = torch.nn.Module()
    layer.sigmoid = CPURouter(2, 4, scoring_func="sigmoid", routed_scaling_factor=2.0)
    layer.softmax = CPURouter(2, 4)
    complete_routers(layer)
    made = layer.sigmoid.custom_routing_function
    assert isinstance(made, partial)
    assert made.func is chosen_experts
    assert made.args == (None, True, 2.0)
    assert layer.softmax.custom_routing_function is None

"""DPPO: the plain ratio, without the tokens whose probability has moved far already.

r A, but 0 where A > 0 and pi - mu > dppo_delta, or A < 0 and pi - mu < -dppo_delta
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.config.algorithm import AlgorithmSection
from learner.algorithms.interface import LossInputs, Surrogate

if TYPE_CHECKING:
    from torch import Tensor


def loss(inputs: LossInputs, cfg: AlgorithmSection) -> tuple[Tensor, Tensor]:
    advantages = inputs.advantages
    moved = (inputs.new_logprobs.exp() - inputs.sampler_logprobs.exp()).detach()
    too_far = moved.where(advantages > 0, -moved) > cfg.dppo_delta
    return -(inputs.log_ratios.exp() * advantages * ~too_far), too_far


def formula(cfg: AlgorithmSection) -> str:
    delta = f"{cfg.dppo_delta:g}"
    return f"r*A*[not (A>0 and pi-mu>{delta} or A<0 and pi-mu<-{delta})]"


DPPO = Surrogate(loss=loss, formula=formula, keys=("dppo_delta",), is_plain_at_one=False)

"""Surrogates with one ratio for a sequence or a turn: GSPO, and the turn's ratio of GAGPO.

The clipped surrogate of PPO with s in place of r: s is the geometric mean of r over the sequence or
over the turn. It has the value of s, but the gradient of r for each token: advantages may differ by
turn. Where A is constant over the sequence, this token form equals the sequence form.

Source: GSPO, arXiv:2507.18071; the turn's ratio, GAGPO, arXiv:2605.13217.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from common.config.algorithm import AlgorithmSection
from learner.algorithms.interface import LossInputs, Unit, mean_over, sequence_mean
from learner.algorithms.ppo import PPO, clipped

if TYPE_CHECKING:
    from torch import Tensor


def sequence_loss(inputs: LossInputs, cfg: AlgorithmSection) -> tuple[Tensor, Tensor]:
    log_r = inputs.log_ratios.detach()
    mean = sequence_mean(log_r, inputs.sequence_ids, inputs.num_sequences)[inputs.sequence_ids]
    return clipped(_with_gradient(mean, inputs), inputs.advantages, cfg)


def turn_loss(inputs: LossInputs, cfg: AlgorithmSection) -> tuple[Tensor, Tensor]:
    is_single = inputs.turn_ids is None
    turns = inputs.sequence_ids if inputs.turn_ids is None else inputs.turn_ids
    num_turns = inputs.num_sequences if is_single else inputs.num_turns
    mean = mean_over(inputs.log_ratios.detach(), turns, num_turns)
    return clipped(_with_gradient(mean, inputs), inputs.advantages, cfg)


def _with_gradient(log_s: Tensor, inputs: LossInputs) -> Tensor:
    """Return log s with the gradient of each token's log-probability."""
    return log_s + inputs.new_logprobs - inputs.new_logprobs.detach()


GSPO = replace(PPO, loss=sequence_loss, unit=Unit.SEQUENCE)
TURN = replace(PPO, loss=turn_loss, unit=Unit.TURN)

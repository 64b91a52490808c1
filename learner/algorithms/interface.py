"""The parts of an objective that an algorithm defines, and the inputs of its functions.

Each file of this folder is an algorithm: its computation, its formula as text, the keys that it
reads, and its paper. `table.py` names them all. They import torch only to check types, so a dry run
prints their formulas quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from common.config.algorithm import AlgorithmSection, Baseline
from common.config.learner import LearnerSection
from common.wire.messages import Trajectory

if TYPE_CHECKING:  # The import takes seconds.
    from torch import Tensor

STD_EPSILON = 1e-6  # Keeps a division finite; far below any real deviation of rewards.
MAX_LOG_RATIO = 20.0  # exp(20) = 5e8 stays finite in float32 after squaring and summation.


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The sampled tokens of one microbatch. Other tokens are absent, so no mask is needed."""

    new_logprobs: Tensor = field(repr=False)  # [tokens] nats, current policy, with gradient
    anchor_logprobs: Tensor = field(repr=False)  # [tokens] nats, denominator of the ratio
    sampler_logprobs: Tensor = field(repr=False)  # [tokens] nats of mu
    advantages: Tensor = field(repr=False)  # [tokens]
    is_weights: Tensor = field(repr=False)  # [tokens] importance weights, masks included
    sequence_ids: Tensor = field(repr=False)  # [tokens] int64 in [0, num_sequences)
    num_sequences: int
    entropy: Tensor | None = field(repr=False, default=None)  # [tokens] nats, with gradient
    reference_logprobs: Tensor | None = field(repr=False, default=None)  # [tokens] nats
    # [tokens] int64; None: one turn for each sequence
    turn_ids: Tensor | None = field(repr=False, default=None)
    num_turns: int | None = None  # Above all of `turn_ids`; None: the loss reads the largest.
    kl_weights: Tensor | None = field(repr=False, default=None)  # [tokens] v of the loss; None: 1
    # [tokens] nats of the teacher at the sampled tokens, with form=sampled
    teacher_logprobs: Tensor | None = field(repr=False, default=None)
    # [tokens, k] nats at the teacher's most probable tokens, with form=topk
    teacher_top: Tensor | None = field(repr=False, default=None)
    # [tokens, k] nats of the current policy at these tokens, with gradient
    support_logprobs: Tensor | None = field(repr=False, default=None)
    # [sequence] sampled tokens in all rows of the episode; None: each sequence is an episode
    episode_tokens: Tensor | None = field(repr=False, default=None)

    def __post_init__(self) -> None:
        logprobs = (self.new_logprobs, self.anchor_logprobs, self.sampler_logprobs)
        others = (self.advantages, self.is_weights, self.sequence_ids)
        shapes = {tuple(tensor.shape) for tensor in (*logprobs, *others)}
        if len(shapes) != 1 or self.new_logprobs.ndim != 1:
            raise ValueError(f"inputs must share one [tokens] shape, got {sorted(shapes)}")

    @property
    def log_ratios(self) -> Tensor:
        """log(pi / anchor) [tokens] nats, with gradient."""
        return log_ratio(self.new_logprobs, self.anchor_logprobs)


class Unit(StrEnum):
    """Unit whose tokens share one ratio, the geometric mean over them."""

    TOKEN = "token"
    TURN = "turn"
    SEQUENCE = "sequence"


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """A policy loss, a value of `algorithm.policy_loss`."""

    # The loss [tokens] that training reduces, and optionally [tokens] bool: a bound determines it.
    # `policy_loss` of the objective multiplies the weights, adds the other terms and the tokens.
    loss: Callable[[LossInputs, AlgorithmSection], Tensor | tuple[Tensor, Tensor]]
    formula: Callable[[AlgorithmSection], str]  # Formula of minus the loss.
    keys: tuple[str, ...]  # Keys of `algorithm` that it reads.
    unit: Unit = Unit.TOKEN
    is_clipped: bool = False  # It bounds its ratio.
    # Largest ratio of a token with a weight of its own; None: the weight has no such limit.
    limit: Callable[[AlgorithmSection], float] | None = None
    # Condition under which a ratio r above a cap still has a gradient; "": it never has.
    open_above: Callable[[AlgorithmSection, float], str] = lambda _, cap: f"r>{cap:g}"
    is_plain_at_one: bool = True  # At a ratio of one its gradient is that of r A.
    is_zero_without_advantage: bool = True  # A token with advantage 0 has no gradient.
    is_of_sequence: bool = True  # The loss of a token reads no other sequence of the microbatch.


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """An importance weight of sampled tokens, a value of `algorithm.correction`.

    The ratio rho is pi_prox / mu. A float weight replaces rho, so rho itself corrects completely. A
    mask (bool) only keeps or removes a token; the surrogate's own ratio does not change.
    """

    # (log rho [tokens], sequence ids [tokens], number of sequences, cfg) -> [tokens], no gradient.
    weight: Callable[[Tensor, Tensor, int, AlgorithmSection], Tensor]
    formula: Callable[[AlgorithmSection, str], str]  # Formula of the weight of a ratio, given rho.
    keys: tuple[str, ...]
    is_mask: bool = False
    removes_tokens: bool = False  # Some tokens have the weight 0.
    # Formula of weight / r, given the limit of the surrogate's ratio; not for masks.
    over_ratio: Callable[[AlgorithmSection, float | None], str] | None = None
    # (log rho [tokens] of a whole batch, cfg) -> [tokens] bool, with a mask over a batch.
    batch_mask: Callable[[Tensor, AlgorithmSection], Tensor] | None = None


# The advantages of a group: [member], and for each member [num_turns], added to those of its turns.
GroupAdvantages = tuple["Tensor", list[np.ndarray] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """An estimator of advantages, a value of `algorithm.advantage`."""

    formula: Callable[[AlgorithmSection, LearnerSection], str]  # Formula of A, without whitening.
    keys: tuple[str, ...]
    # (credit of each member's episode [member], members, cfg); None: it needs more than a group.
    of_group: Callable[[Tensor, Sequence[Trajectory], AlgorithmSection], GroupAdvantages] | None
    is_group_relative: bool = False  # A group has no signal if all its advantages are zero.
    is_whitened: bool = False  # The batch's advantages get mean 0 and deviation 1.


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCredit:
    """A credit of turns by their states, a value of `algorithm.state_credit`."""

    # (rewards of each member's turns, members, cfg, baseline, normalize_std) -> [num_turns] each
    credit: Callable[
        [list[np.ndarray], Sequence[Trajectory], AlgorithmSection, Baseline, bool], list[np.ndarray]
    ]
    formula: Callable[[AlgorithmSection, Baseline, bool], str]
    keys: tuple[str, ...]
    is_whole: bool = False  # It replaces the episode's advantage.


def log_ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    """Return log(p / q) per token, clamped to +-20 so that its exponential stays finite.

    Args:
        numerator_logprobs: [tokens] nats of p.
        denominator_logprobs: [tokens] nats of q.

    Raises:
        ValueError: the shapes differ.
    """
    if numerator_logprobs.shape != denominator_logprobs.shape:
        shapes = (tuple(numerator_logprobs.shape), tuple(denominator_logprobs.shape))
        raise ValueError(f"logprobs must share one shape, got {shapes[0]} and {shapes[1]}")
    return (numerator_logprobs - denominator_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_sum(values: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """Return the sum over the tokens of each sequence, [sequence].

    Args:
        values: [tokens].
        sequence_ids: [tokens] int64 in [0, num_sequences).
    """
    return values.new_zeros(num_sequences).index_add(0, sequence_ids, values)


def sequence_mean(values: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """Return the mean over the tokens of each sequence, [sequence]; 0 for an empty sequence."""
    counts = sequence_sum(values.new_ones(values.shape), sequence_ids, num_sequences)
    return sequence_sum(values, sequence_ids, num_sequences) / counts.clamp(min=1.0)


def mean_over(values: Tensor, part_ids: Tensor, num_parts: int | None = None) -> Tensor:
    """Return for each token the mean over the tokens of its part (for example a turn), [tokens].

    Args:
        values: [tokens].
        part_ids: [tokens] int64 >= 0; some numbers may be missing.
        num_parts: above all ids. None: the largest id is read, which waits for a GPU.
    """
    if num_parts is None:
        num_parts = int(part_ids.max()) + 1 if part_ids.numel() else 0
    return sequence_mean(values, part_ids, num_parts)[part_ids]


def tensor_of(array: np.ndarray) -> Tensor:
    """Return an array as a tensor that shares its memory."""
    import torch

    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]

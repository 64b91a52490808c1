"""Measures the updates that a forward pass in bf16 does not see."""

import logging

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from learner.policy.precision import rounded_names
from learner.training.ranks import Ranks

logger = logging.getLogger(__name__)

# Numbers of each weight that are compared. All numbers of a large weight would take a copy of it.
SAMPLED = 1 << 16
LIMIT = 0.9  # A larger share is logged as a warning.


class VanishedUpdates:
    """The share of changed weights whose rounded value is the same before and after a step.

    An update below half a unit of bf16 changes the fp32 master, and not the weight of the forward
    pass, until several have added up. Weights of a checkpoint in bf16 lie on the grid of bf16, so
    small updates vanish there for many steps. Without rounding the share is 0.

    Example: weights of .02 have units of 2^-13 = 1.2e-4, so steps of 1e-5 vanish six times.
    """

    def __init__(self, model: nn.Module, *, is_bf16: bool, ranks: Ranks | None = None) -> None:
        """Watch the trained weights, which must be sharded by now."""
        self._ranks = ranks or Ranks()
        self._weights: list[Tensor] = []
        # [number] of the sampled numbers: how many numbers each stands for, and if it is rounded.
        self._shares = self._is_rounded = torch.zeros(0)
        self._before: Tensor | None = None
        self._is_high = False
        if is_bf16:
            self._watch(model)

    def _watch(self, model: nn.Module) -> None:
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        shapes = {name: each.shape for name, each in trained.items() if ".lora_" not in name}
        rounded = rounded_names(model, shapes) | (trained.keys() - shapes.keys())
        self._weights = list(trained.values())
        sampled = [_sampled(each) for each in self._weights]
        device = sampled[0].device
        sizes = torch.tensor([len(each) for each in sampled])
        totals = torch.tensor([_local(each).numel() for each in self._weights])
        shares = totals.double() / sizes.clamp_min(1)
        flags = torch.tensor([name in rounded for name in trained])
        self._shares = shares.repeat_interleave(sizes).to(device, torch.float32)
        self._is_rounded = flags.repeat_interleave(sizes).to(device)

    @torch.no_grad()
    def begin(self) -> None:
        """Note the weights before the updates of a step."""
        if self._weights:
            self._before = torch.cat([_sampled(each) for each in self._weights])

    @torch.no_grad()
    def share(self, *, lr: float) -> float:
        """Return the share of the updates since `begin` over all ranks, and warn if it is large.

        All ranks call this method together.

        Args:
            lr: the learning rate of the step, for the warning.
        """
        before = self._before
        if before is None:
            return 0.0
        self._before = None
        now = torch.cat([_sampled(each) for each in self._weights])
        is_changed = now != before
        is_hidden = is_changed & self._is_rounded & (now.bfloat16() == before.bfloat16())
        counts = torch.stack([(self._shares * each).sum() for each in (is_hidden, is_changed)])
        num_hidden, num_changed = self._ranks.sum(counts).tolist()
        hidden = num_hidden / max(num_changed, 1.0)
        if hidden > LIMIT and not self._is_high:
            logger.warning(
                "train/vanished_update_frac=%.2f: rounding to bf16 hides this share of the updates"
                " from the forward pass until they add up (learning rate %.1e). Set"
                " learner.precision=fp32, or raise the learning rate.",
                hidden,
                lr,
            )
        self._is_high = hidden > LIMIT
        return hidden


def _local(weight: Tensor) -> Tensor:
    """Return this rank's numbers of a weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _sampled(weight: Tensor) -> Tensor:
    """Return up to about `SAMPLED` numbers of a weight, [number]; the same ones at each call."""
    flat = _local(weight).detach().reshape(-1)
    # An odd distance meets all columns of the usual widths.
    return flat[:: len(flat) // SAMPLED | 1]

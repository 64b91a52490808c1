"""Reacts to data that is too far from the policy: bounded, logged, each reaction switchable.

Example (defaults): ESS 0.8 -> learning rate x 0.89. ESS 0.6 -> x 0.67, and the gate lets actors be
half as many steps ahead (8, 4, 2, 1, 0). ESS 0.4 -> nothing is learnt from this batch, the gate
closes and the next batch must have lag 0. Twenty steps above 0.9 -> it opens by one again, as in
congestion control (Chiu and Jain, 1989). Clipped tokens teach nothing, and keep the sample size up:
more than a tenth of them before a batch's first update -> the gate halves likewise.
"""

import logging
import math
from dataclasses import dataclass
from typing import Any

from common.config.learning import ControllerSection

logger = logging.getLogger(__name__)

TINY = 1e-30  # what a mean weight is divided by at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    lr_scale: float  # (0, 1]
    is_skipped: bool  # learn nothing from it, and take only fresh data next
    max_ahead_steps: int  # what the dispatch gate is to allow from now on


class Controller:
    """Decides once per batch. Deterministic: the same batches lead to the same decisions."""

    def __init__(self, cfg: ControllerSection, *, max_ahead_steps: int) -> None:
        """Start with an open gate; `max_ahead_steps` is never exceeded."""
        self._cfg = cfg
        self._most_ahead = max_ahead_steps
        self.max_ahead_steps = max_ahead_steps  # what the dispatch gate may allow now
        self._num_good = 0  # steps above the target since the gate last moved
        self._num_skips = 0  # in a row

    def decide(
        self,
        *,
        version: int,
        ess_frac: float,
        masked_frac: float,
        weight_mean: float = 1.0,
        clipped_frac: float = 0.0,
        must_train: bool = False,
        must_skip: bool = False,
    ) -> Decision:
        """Return what to do with a batch and remember it.

        Args:
            version: that the batch would improve; for the log.
            ess_frac: effective sample size over tokens, (0, 1]; NaN: the policy is broken, which is
                not for this class: the batch is trained on, and its updates are refused.
            weight_mean: of pi / mu over tokens. Where all ratios shrink alike, as of a policy that
                has left, the effective sample size stays 1 and this falls.
            masked_frac: tokens that the correction masks, [0, 1].
            clipped_frac: tokens that the surrogate's bound decides before the first update, [0, 1].
            must_train: do not skip it: it was decided so before.
            must_skip: skip it: it was decided so before.
        """
        cfg = self._cfg
        if not math.isfinite(ess_frac * weight_mean):
            logger.warning("policy is broken version=%d ess=%f", version, ess_frac)
            return Decision(
                lr_scale=1.0, is_skipped=must_skip, max_ahead_steps=self.max_ahead_steps
            )
        ess_frac = min(ess_frac, weight_mean, 1 / max(weight_mean, TINY))
        if masked_frac > cfg.masked_warn_frac:
            logger.warning("many tokens masked version=%d frac=%.3f", version, masked_frac)
        is_skipped = must_skip
        if must_train or must_skip:
            self._num_skips = self._num_skips + 1 if must_skip else 0
        else:
            is_skipped = self._skips(version, ess_frac)
        self._move_gate(version, ess_frac, clipped_frac, is_skipped=is_skipped)
        lr_scale = 1.0
        if cfg.scale_lr and ess_frac < cfg.ess_target and not is_skipped:
            lr_scale = max(cfg.min_lr_scale, ess_frac / cfg.ess_target)
            logger.info("lr scaled version=%d by=%.3f ess=%.3f", version, lr_scale, ess_frac)
        return Decision(
            lr_scale=lr_scale, is_skipped=is_skipped, max_ahead_steps=self.max_ahead_steps
        )

    def _skips(self, version: int, ess_frac: float) -> bool:
        cfg = self._cfg
        if not cfg.skip_step or ess_frac >= cfg.ess_skip:
            self._num_skips = 0
            return False
        if self._num_skips >= cfg.max_skips:
            self._num_skips = 0
            logger.warning(
                "batch kept although far off version=%d ess=%.3f after_skips=%d",
                *(version, ess_frac, cfg.max_skips),
            )
            return False
        self._num_skips += 1
        logger.warning(
            "batch skipped version=%d ess=%.3f below=%.2f in_a_row=%d",
            *(version, ess_frac, cfg.ess_skip, self._num_skips),
        )
        return True

    def _move_gate(
        self, version: int, ess_frac: float, clipped_frac: float, *, is_skipped: bool
    ) -> None:
        cfg, before = self._cfg, self.max_ahead_steps
        if not cfg.tighten_gate:
            return
        is_used_up = clipped_frac > cfg.clip_gate
        if is_skipped:
            self.max_ahead_steps = 0
        elif ess_frac < cfg.ess_gate or is_used_up:
            self.max_ahead_steps //= 2
        is_good = ess_frac >= cfg.ess_target and not is_used_up
        self._num_good = self._num_good + 1 if is_good else 0
        if self._num_good >= cfg.recover_steps and self.max_ahead_steps < self._most_ahead:
            self.max_ahead_steps += 1
        if self.max_ahead_steps != before:
            self._num_good = 0
            logger.warning(
                "gate moved version=%d ahead_steps=%d to=%d ess=%.3f clipped=%.3f",
                *(version, before, self.max_ahead_steps, ess_frac, clipped_frac),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to decide alike."""
        return {
            "ahead": self.max_ahead_steps,
            "num_good": self._num_good,
            "num_skips": self._num_skips,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.max_ahead_steps = min(state["ahead"], self._most_ahead)
        self._num_good = state["num_good"]
        self._num_skips = state["num_skips"]

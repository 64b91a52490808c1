"""Reacts to batches that are too far off-policy: bounded, logged, each reaction switchable.

Example with the default settings:
- ESS 0.8: the learning rate is multiplied by 0.89.
- ESS 0.6: the learning rate is multiplied by 0.67. The dispatch gate halves the number of steps
  that actors may be ahead (8, 4, 2, 1, 0).
- ESS 0.4: the batch is skipped and the gate closes. The next batch must have lag 0.
- ESS above 0.9 for twenty steps: the gate opens by one step, as in congestion control (Chiu and
  Jain, 1989).

Clipped tokens have no gradient but keep the ESS high. If more than a tenth of the tokens are
clipped before a batch's first update, the gate halves, too.
"""

import logging
import math
from dataclasses import dataclass
from typing import Any

from common.config.learner import ControllerSection

logger = logging.getLogger(__name__)

TINY = 1e-30  # Lower bound of a mean weight in a division.


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The controller's decision about one batch."""

    lr_scale: float  # Factor of the learning rate, (0, 1].
    is_skipped: bool  # True: the batch is skipped, and the next one must be fresh.
    max_ahead_steps: int  # New limit of the dispatch gate.


class Controller:
    """Decides once per batch. Deterministic: equal batches lead to equal decisions."""

    def __init__(self, cfg: ControllerSection, *, max_ahead_steps: int) -> None:
        """Start with an open gate; `max_ahead_steps` is its upper limit."""
        self._cfg = cfg
        self.most_ahead = max_ahead_steps  # Configured limit of the dispatch gate.
        self.max_ahead_steps = max_ahead_steps  # Current limit of the dispatch gate.
        self._num_good = 0  # Steps above the target since the last change of the gate.
        self._num_skips = 0  # Skipped batches in a row.

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
        """Return the decision on a batch and update the controller's state.

        Args:
            version: version of the policy before the update, for the log.
            ess_frac: effective sample size over tokens, (0, 1]. NaN: the policy is broken. The
                controller then lets the trainer continue, and the trainer refuses the updates.
            weight_mean: mean of pi / mu over tokens. If all ratios shrink equally, as with a
                diverged policy, the effective sample size stays 1 but this mean falls.
            masked_frac: fraction of tokens that the correction masks, [0, 1].
            clipped_frac: fraction of tokens at the surrogate's bound before the first update.
            must_train: do not skip the batch: the step log records it as trained.
            must_skip: skip the batch: the step log records it as skipped.
        """
        cfg = self._cfg
        if not math.isfinite(ess_frac * weight_mean):
            logger.warning(
                "effective sample size is not finite version=%d ess=%f", version, ess_frac
            )
            return Decision(
                lr_scale=1.0, is_skipped=must_skip, max_ahead_steps=self.max_ahead_steps
            )
        ess_frac = min(ess_frac, weight_mean, 1 / max(weight_mean, TINY))
        if masked_frac > cfg.masked_warn_frac:
            logger.warning(
                "correction masks many tokens version=%d frac=%.3f", version, masked_frac
            )
        is_skipped = must_skip
        if must_train or must_skip:
            self._num_skips = self._num_skips + 1 if must_skip else 0
        else:
            is_skipped = self._skips(version, ess_frac)
        self._move_gate(version, ess_frac, clipped_frac, is_skipped=is_skipped)
        lr_scale = 1.0
        if cfg.scale_lr and ess_frac < cfg.ess_target and not is_skipped:
            lr_scale = max(cfg.min_lr_scale, ess_frac / cfg.ess_target)
            logger.info(
                "scaled learning rate version=%d by=%.3f ess=%.3f", version, lr_scale, ess_frac
            )
        return Decision(
            lr_scale=lr_scale, is_skipped=is_skipped, max_ahead_steps=self.max_ahead_steps
        )

    def _skips(self, version: int, ess_frac: float) -> bool:
        """Return whether to skip the batch because its effective sample size is too small."""
        cfg = self._cfg
        if not cfg.skip_step or ess_frac >= cfg.ess_skip:
            self._num_skips = 0
            return False
        if self._num_skips >= cfg.max_skips:
            self._num_skips = 0
            logger.warning(
                "kept a batch with low ess version=%d ess=%.3f after_skips=%d",
                version,
                ess_frac,
                cfg.max_skips,
            )
            return False
        self._num_skips += 1
        logger.warning(
            "skipped batch version=%d ess=%.3f below=%.2f in_a_row=%d",
            version,
            ess_frac,
            cfg.ess_skip,
            self._num_skips,
        )
        return True

    def _move_gate(
        self, version: int, ess_frac: float, clipped_frac: float, *, is_skipped: bool
    ) -> None:
        """Narrow or widen the dispatch gate by the effective sample size and clipping."""
        cfg = self._cfg
        before = self.max_ahead_steps
        if not cfg.tighten_gate:
            return
        is_used_up = clipped_frac > cfg.clip_gate
        if is_skipped:
            self.max_ahead_steps = 0
        elif ess_frac < cfg.ess_gate or is_used_up:
            self.max_ahead_steps //= 2
        is_good = ess_frac >= cfg.ess_target and not is_used_up
        self._num_good = self._num_good + 1 if is_good else 0
        if self._num_good >= cfg.recover_steps and self.max_ahead_steps < self.most_ahead:
            self.max_ahead_steps += 1
        if self.max_ahead_steps != before:
            self._num_good = 0
            logger.warning(
                "moved gate version=%d ahead_steps=%d to=%d ess=%.3f clipped=%.3f",
                version,
                before,
                self.max_ahead_steps,
                ess_frac,
                clipped_frac,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to make the same decisions."""
        return {
            "ahead": self.max_ahead_steps,
            "num_good": self._num_good,
            "num_skips": self._num_skips,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`.

        A gate that nothing had narrowed is open again, also if the configured limit is higher now.

        Args:
            state: with "most_ahead", the configured limit at that time, unless it is older.
        """
        is_open = state["ahead"] == state.get("most_ahead") or not self._cfg.tighten_gate
        self.max_ahead_steps = self.most_ahead if is_open else min(state["ahead"], self.most_ahead)
        self._num_good = state["num_good"]
        self._num_skips = state["num_skips"]

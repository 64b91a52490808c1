"""Options of the controller, which reacts to data that is too far from the policy."""

from collections.abc import Iterator
from dataclasses import dataclass

from common.config.knobs import Contradiction, knob


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSection:
    """Reactions to data that is too far from the policy. Each is bounded, logged and optional.

    ESS is the minimum of three values: the effective sample size of pi / mu as a share of the
    tokens, the mean m of pi / mu, and 1 / m. It is 1 on-policy. The sample size alone would stay 1
    if all ratios shrank equally.
    """

    scale_lr: bool = knob(
        True, "Scales the learning rate down while the effective sample size is below ess_target."
    )
    tighten_gate: bool = knob(
        True,
        "Halves scheduler.max_ahead_steps at an effective sample size below ess_gate, and raises it"
        " again above ess_target.",
    )
    skip_step: bool = knob(
        True,
        "Skips a batch whose effective sample size is below ess_skip. The next batch must then be "
        "fresh.",
    )
    ess_target: float = knob(
        0.9,
        "Sets the effective sample size, as a share of the tokens, below which the learning rate "
        "is scaled down.",
        ge=0,
        le=1,
    )
    ess_gate: float = knob(
        0.7,
        "Sets the effective sample size, as a share of the tokens, below which max_ahead_steps is "
        "halved.",
        ge=0,
        le=1,
    )
    clip_gate: float = knob(
        0.1,
        "Sets the share of clipped tokens above which max_ahead_steps is halved. 1 turns this off.",
        ge=0,
        le=1,
    )
    ess_skip: float = knob(
        0.5,
        "Sets the effective sample size, as a share of the tokens, below which a batch is skipped.",
        ge=0,
        le=1,
    )
    min_lr_scale: float = knob(
        0.1, "Limits how far the controller scales the learning rate down.", gt=0, le=1
    )
    recover_steps: int = knob(
        20, "Raises max_ahead_steps by one after this many steps in a row above ess_target.", ge=1
    )
    max_skips: int = knob(
        3, "Limits the skipped batches in a row. The next batch is trained on in any case.", ge=0
    )
    masked_warn_frac: float = knob(
        0.05, "Logs a warning above this share of masked tokens.", ge=0, le=1
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if not self.ess_skip <= self.ess_gate <= self.ess_target:
            law = "must be >= ess_gate, and ess_gate must be >= ess_skip"
            yield "ess_target", self.ess_target, law

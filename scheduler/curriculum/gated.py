"""A gated horizon or distance: it grows when this would help training, and shrinks if it hurts."""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from common.config.curriculum import DistanceGatedSection
from common.config.horizon import GatedSection, HorizonPolicy
from scheduler.curriculum.horizon import HorizonStamp
from scheduler.state import FIXED

logger = logging.getLogger(__name__)

UNKNOWN = -1.0  # Value of a signal that the learner did not send.
MAX_MOVES = 100  # Number of decisions that are kept.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """Signals of one training step, and its episodes of one environment at the current stage."""

    version: int
    num_episodes: int
    num_solved: int
    num_truncated: int  # Episodes cut by the horizon that the environment would have let continue.
    entropy: float  # Nats per sampled token, over the whole batch; UNKNOWN.
    ess_frac: float  # Effective sample size over the whole batch, as a share; UNKNOWN.


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStatistics:
    """The measurements that a decision is based on. UNKNOWN where there are too few steps."""

    truncated_frac: float
    # Gain of success over the window: the slope of its fitted line times its span.
    gain: float | None
    entropy_ratio: float  # Mean entropy of the last steps over that of the window before.
    ess_frac: float
    success: float  # Mean success over the window.


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One change of stage with the measurements that caused it."""

    version: int
    from_stage: int
    to_stage: int
    cause: str  # "truncated_and_flat" | "solved" | "entropy" | "ess"
    truncated_frac: float
    gain: float | None
    entropy_ratio: float
    ess_frac: float
    success: float = UNKNOWN


@dataclass(slots=True)
class GatedHorizon:
    """Decides after every step whether to change the stage.

    Example (window_steps 40, min_steps 40): stage 0 begins at version 0. At version 40 the horizon
    has cut 35% of the episodes of the last 40 steps, and success rose by 0.01: stage 1 begins. At
    version 50 the entropy of the last five steps is a quarter of its earlier value: stage 0 begins
    again, until version 90 at least. A gated distance follows the same rules, but grows when
    success is high enough.
    """

    policy: HorizonPolicy = field(metadata=FIXED)
    env: str = field(metadata=FIXED)
    unit: str = field(default="turns", metadata=FIXED)
    steps: deque[StepSeen] = field(init=False)  # The most recent steps.
    since: int = 0  # Version at which the stage began.
    stage: int = 0
    moves: deque[Move] = field(default_factory=partial(deque[Move], maxlen=MAX_MOVES))
    num_episodes: int = 0  # Episodes of the current stage since the last step.
    num_solved: int = 0
    num_truncated: int = 0

    def __post_init__(self) -> None:
        size = self.policy.gated.window_steps + self.policy.gated.backoff_steps
        self.steps = deque(maxlen=size)

    @property
    def stamp(self) -> HorizonStamp:
        """Horizon and stage for a group that opens now."""
        return HorizonStamp(horizon=self.policy.stages[self.stage], stage=self.stage)

    def configure(self, policy: HorizonPolicy, version: int) -> None:
        """Use another schedule of the same kind; a stage whose value changes begins anew."""
        before = self.stamp
        self.policy = policy
        self.after_restore()
        if self.stamp != before:
            self.since = version
            self.num_episodes = self.num_solved = self.num_truncated = 0

    def see(self, *, is_success: bool, is_truncated: bool) -> None:
        """Count an episode of the current stage."""
        self.num_episodes += 1
        self.num_solved += is_success
        self.num_truncated += is_truncated

    def end_step(self, version: int, *, entropy: float, ess_frac: float) -> None:
        """Process one step with the episodes counted since the last one."""
        seen = StepSeen(
            version=version,
            num_episodes=self.num_episodes,
            num_solved=self.num_solved,
            num_truncated=self.num_truncated,
            entropy=entropy,
            ess_frac=ess_frac,
        )
        self.num_episodes = self.num_solved = self.num_truncated = 0
        self.step(seen)

    def step(self, seen: StepSeen) -> None:
        """Process one step, and move by at most one stage."""
        self.steps.append(seen)
        measured = self.measure()
        is_far = isinstance(self.policy.gated, DistanceGatedSection)
        cause = self._backs_off(measured)
        to_stage = self.stage - 1
        if not cause and self._advances(measured, seen.version):
            cause = "solved" if is_far else "truncated_and_flat"
            to_stage = self.stage + 1
        if not cause:
            return
        stages = {"from_stage": self.stage, "to_stage": to_stage}
        move = Move(version=seen.version, cause=cause, **stages, **asdict(measured))
        logger.warning(
            "%s moved env=%s version=%d stage=%d to=%d %s=%d cause=%s truncated=%.3f"
            " success=%.3f gain=%s entropy_ratio=%.3f ess=%.3f after_steps=%d",
            "distance" if is_far else "horizon",
            self.env,
            seen.version,
            self.stage,
            to_stage,
            self.unit,
            self.policy.stages[to_stage],
            cause,
            move.truncated_frac,
            move.success,
            _signal_text(move.gain),
            move.entropy_ratio,
            move.ess_frac,
            seen.version - self.since,
        )
        self.moves.append(move)
        self.stage = to_stage
        self.since = seen.version

    def measure(self) -> WindowStatistics:
        """Return the measurements over the last steps."""
        window = self._own(self.policy.gated.window_steps)
        num = sum(step.num_episodes for step in window)
        cut = sum(step.num_truncated for step in window)
        solved = sum(step.num_solved for step in window)
        recent = self._own(self.policy.gated.backoff_steps)
        earlier = list(self.steps)[: len(self.steps) - len(recent)]
        before = earlier[-self.policy.gated.window_steps :]
        entropy = _mean_entropy(recent)
        entropy_before = _mean_entropy(before)
        is_known = entropy != UNKNOWN and entropy_before > 0 and len(before) >= len(recent)
        ess = [step.ess_frac for step in recent if step.ess_frac != UNKNOWN]
        return WindowStatistics(
            truncated_frac=cut / num if num else UNKNOWN,
            gain=success_gain(window),
            entropy_ratio=entropy / entropy_before if is_known else UNKNOWN,
            ess_frac=sum(ess) / len(ess) if ess else UNKNOWN,
            success=solved / num if num else UNKNOWN,
        )

    def _own(self, num_steps: int) -> list[StepSeen]:
        """Return the last `num_steps` steps of the current stage, none if there are fewer."""
        own = [step for step in self.steps if step.version > self.since]
        return own[-num_steps:] if len(own) >= num_steps else []

    def _backs_off(self, measured: WindowStatistics) -> str:
        """Return the reason to go back one stage, "" if there is none."""
        if self.stage == 0:
            return ""
        if 0 <= measured.entropy_ratio < self.policy.gated.entropy_frac:
            return "entropy"
        return "ess" if 0 <= measured.ess_frac < self.policy.gated.ess_frac else ""

    def _advances(self, measured: WindowStatistics, version: int) -> bool:
        """Return whether the schedule moves to the next stage."""
        if self.stage == len(self.policy.stages) - 1:
            return False
        gate = self.policy.gated
        if version - self.since < gate.min_steps or measured.gain is None:
            return False
        if isinstance(gate, DistanceGatedSection):
            return measured.success >= gate.min_success
        assert isinstance(gate, GatedSection)
        is_cut = measured.truncated_frac >= gate.min_truncated_frac
        return is_cut and abs(measured.gain) <= gate.max_gain

    def report(self) -> dict[str, Any]:
        """Return the current measurements and the decisions so far."""
        return {
            "since_version": self.since,
            **asdict(self.measure()),
            "moves": [asdict(move) for move in self.moves],
        }

    def after_restore(self) -> None:
        """Move to the last stage if the configuration no longer has the restored one."""
        self.stage = min(self.stage, len(self.policy.stages) - 1)


def success_gain(steps: Sequence[StepSeen]) -> float | None:
    """Return the gain of success over the steps: slope of the fitted line times their span.

    The line is the least-squares fit of success over versions. Each step is weighted by its number
    of episodes. None if fewer than two steps have any.
    """
    seen = [step for step in steps if step.num_episodes]
    num = sum(step.num_episodes for step in seen)
    if len(seen) < 2:
        return None
    mean_x = sum(step.version * step.num_episodes for step in seen) / num
    mean_y = sum(step.num_solved for step in seen) / num
    spread = sum(step.num_episodes * (step.version - mean_x) ** 2 for step in seen)
    joint = sum(
        (step.version - mean_x) * (step.num_solved - mean_y * step.num_episodes) for step in seen
    )
    return joint / spread * (steps[-1].version - steps[0].version)


def _mean_entropy(steps: Sequence[StepSeen]) -> float:
    """Return the mean entropy of the steps that report one."""
    known = [step.entropy for step in steps if step.entropy != UNKNOWN]
    return sum(known) / len(known) if known else UNKNOWN


def _signal_text(value: float | None) -> str:
    return "?" if value is None else f"{value:+.3f}"

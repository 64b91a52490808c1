"""Checks of the engines while the learner waits: do they take weights, and are these correct?"""

import logging
import time
from collections.abc import Callable, Sequence

from common.config.run import OnStall
from common.config.run_config import RunConfig
from common.config.train import TrainMode
from common.errors import ConfigError, LongstrideError
from learner.weights.prompts import RecentPrompts
from learner.weights.publisher import EngineCheck, Publisher

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 30.0  # Seconds without a new version before the engines are checked.
# Seconds as `CHECK_EVERY_S`, in sync mode: steps may be long, and runs must be reproducible.
LOCKSTEP_EVERY_S = 600.0


class EnginesDiffer(ConfigError):
    """The engines and the trainer score the same tokens with the same version differently.

    A restarted learner would publish the same weights and repeat the same steps, so the run ends:
    exit code 2.
    """


class EngineWatch:
    """Checks the engines' scores if no new version does. For the main thread, between steps.

    Example: an engine samples nonsense, so that no group has signal and no step follows. After 30 s
    it must score the beginnings of its own episodes. Its scores are wrong: an alarm. After
    `learner.max_canary_alarms` consecutive alarms `check` raises.
    """

    def __init__(
        self,
        publisher: Publisher,
        recent: RecentPrompts,
        score: Callable[[Sequence[Sequence[int]]], list[list[float]]],
        cfg: RunConfig,
    ) -> None:
        """Create a watch.

        Args:
            score: returns logprobs [seq-1] of sequences under the current weights.
        """
        self._publisher = publisher
        self._recent = recent
        self._score = score
        self._cfg = cfg.learner
        is_lockstep = cfg.train.mode is TrainMode.SYNC
        self._every_s = LOCKSTEP_EVERY_S if is_lockstep else CHECK_EVERY_S
        self._run = cfg.run
        self._asked_at = time.monotonic()
        self._is_measured = is_lockstep  # Other runs measure each engine's usual difference first.
        self._warned_at = 0.0

    def postpone(self) -> None:
        """Restart the interval: a version is published, whose canaries are checked."""
        self._asked_at = time.monotonic()

    def check(self) -> None:
        """Return if engines and trainer agree. Raises: EnginesDiffer: too many alarms."""
        num_alarms = self._publisher.num_canary_alarms
        if num_alarms >= self._cfg.max_canary_alarms:
            raise EnginesDiffer(
                f"The logprobs of engine {self._publisher.worst_engine} and of the trainer differed"
                f" {num_alarms} times in a row by more than usual"
                f" (learner.max_canary_alarms={self._cfg.max_canary_alarms}). A restart would"
                " repeat these steps, so the run ends. If other engines agree, start this actor"
                " again. Otherwise compute in one precision, such as learner.precision=fp32 with"
                " model.dtype=float32. If the difference is the engine's noise, raise"
                f" learner.max_canary_delta={self._cfg.max_canary_delta}."
            )

    def check_if_due(self, version: int) -> None:
        """Send a check to the engines, if one is due.

        Args:
            version: version of the current weights.

        Raises: EnginesDiffer: as `check`.
        """
        self.check()
        is_first = not self._is_measured and self._recent.is_full
        if time.monotonic() - self._asked_at < self._every_s and not is_first:
            return
        self._is_measured = self._is_measured or is_first
        self.postpone()
        checks = [
            EngineCheck(actor, version, prompts, self._score(prompts.token_ids))
            for actor, prompts in self._recent.take().items()
        ]
        if checks:
            self._publisher.check_engines(checks)

    def missing_engines(self, num_slots: int) -> str:
        """Return the role to wait for if no engine has taken weights for `run.stall_s`; else "".

        Args:
            num_slots: episodes at once of all actors that are connected to the scheduler.

        Raises: LongstrideError: actors exist, so the connection to them is broken; a restarted
            learner has a new one. Not raised with `run.on_stall=warn`.
        """
        no_engine_s = self._publisher.no_engine_s
        if no_engine_s < self._run.stall_s:
            return ""
        what = f"No engine has loaded weights for {no_engine_s:.0f} s"
        if num_slots and self._run.on_stall is not OnStall.WARN:
            raise LongstrideError(f"{what}, although actors have {num_slots} slots.")
        if time.monotonic() - self._warned_at > self._run.stall_s:
            self._warned_at = time.monotonic()
            logger.error("%s, although actors have %d slots", what, num_slots)
        return "actors: an engine that loads weights"

"""The publisher: sends every version to every engine. One thread owns the weight plane.

`EngineWatch` checks between the versions that the engines take weights and that these are correct.
"""

import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from common.config.run import OnStall
from common.config.run_config import RunConfig
from common.config.train import TrainMode
from common.errors import ConfigError, LongstrideError
from common.weights.messages import CanaryCheck, EngineSleep
from common.wire.sockets import Router
from learner.weights.canary import Canary, Prompts, RecentPrompts
from learner.weights.lock import WeightsLock
from learner.weights.receivers import EngineMember, Membership
from learner.weights.source import KeptVersion, PublishedWeights, VersionKeeper
from learner.weights.transfer import STOP_S, WAIT_S, PublishSettings, Transfers

logger = logging.getLogger(__name__)

WARN_EVERY_S = 10.0
CHECK_EVERY_S = 30.0  # Seconds without a new version before the engines are checked.
# Seconds as `CHECK_EVERY_S`, in sync mode: steps may be long, and runs must be reproducible.
LOCKSTEP_EVERY_S = 600.0

Done = Callable[[], object]


class EngineCheck(NamedTuple):
    """Prompts for an engine to score, independent of a new version."""

    actor: str
    version: int
    prompts: Prompts
    logprobs: list[list[float]]  # [prompt, seq-1] nats, of the trainer.


class Publisher(threading.Thread):
    """The learner's side of the weight plane.

    Consumes: versions from `publish`; joins, answers and canary scores from the engines.
    Waits for: every present member, until it has answered, is silent for `silent_after_s`, or is
        alive but does not do its part for as long.
    Unblocked by: those messages, `mark_silent`, `stop`, a weights lock whose `close` waited too
        long.

    Example: begin(v3) returns while v3 is sent and the trainer computes the next gradient. The
    trainer's weights_lock.close() returns after the last bucket of v3 is sent. `on_done` is called
    when v3 is loaded; begin(v4) waits for that. An engine that dies or hangs delays v3 by
    `silent_after_s`. Broadcasts then skip it until it has loaded a version alone. An engine that
    loads slowly gets the newest version when it is free. Without members a version is done at once,
    and a later member gets the newest one.
    """

    def __init__(
        self, router: Router, settings: PublishSettings, *, weights_lock: WeightsLock | None = None
    ):
        """Create a publisher on `router`; `weights_lock` guards the weights that are read live."""
        super().__init__(name="publisher", daemon=True)
        self._router = router
        self.port = router.port
        self._weights_lock = weights_lock or WeightsLock(timeout_s=settings.timeout_s)
        self._members = Membership(silent_after_s=settings.silent_after_s)
        self._canary = Canary(max_delta=settings.max_canary_delta)
        self._stop_requested = threading.Event()
        self._transfers = Transfers(
            router,
            self._members,
            self._canary,
            settings,
            weights_lock=self._weights_lock,
            stop_requested=self._stop_requested,
        )
        self._keeper = VersionKeeper() if settings.keeps_versions else None
        self._changed = threading.Condition()
        self._wanted: PublishedWeights | None = None
        self._on_done: Done = lambda: None
        self._begun_at = 0.0
        self._must_load = False
        self._checks: list[EngineCheck] = []
        # Number of the latest request to sleep. A random start differs from an earlier learner's.
        self._sleep = secrets.randbelow(1 << 31)
        self._is_putting_to_sleep = False
        self._error: BaseException | None = None
        self._metrics: dict[str, float] = {}

    # --- any thread -------------------------------------------------------------------------

    def publish(
        self,
        weights: PublishedWeights,
        *,
        on_done: Done = lambda: None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Send a version to all members; True when they have it, False if the learner stops first.

        Raises: LongstrideError: the publisher's thread failed.
        """
        is_begun = self.begin(weights, on_done=on_done, is_stopping=is_stopping, must_load=True)
        return is_begun and self.wait_done(is_stopping=is_stopping)

    def begin(
        self,
        weights: PublishedWeights,
        *,
        on_done: Done = lambda: None,
        is_stopping: Callable[[], bool] = lambda: False,
        must_load: bool = False,
    ) -> bool:
        """Start to send a version, once the one before is done; False if the learner stops first.

        Live weights must not be changed before the lock allows it. For the trainer's thread.

        Args:
            on_done: called by the publisher's thread when the engines have the version.
            must_load: the version is done only after slow engines have loaded it too.

        Raises: LongstrideError: as `publish`.
        """
        if not self.wait_done(is_stopping=is_stopping):
            return False
        if weights.source.is_live:
            self._weights_lock.open()
            self._weights_lock.enter()
        with self._changed:
            self._wanted = weights
            self._on_done = on_done
            self._begun_at = time.monotonic()
            self._must_load = must_load
        self._router.wake()
        return True

    def put_to_sleep(
        self, *, timeout_s: float, is_stopping: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until all engines have given their memory back; False if the learner stops first.

        Raises: LongstrideError: an engine has not done so in time, or the thread failed.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._sleep += 1
            self._is_putting_to_sleep = True
            self._router.wake()
            while self._is_putting_to_sleep:
                self._check()
                if is_stopping():
                    return False
                if time.monotonic() > deadline:
                    names = ", ".join(m.actor for m in self._members.awake(self._sleep))
                    raise LongstrideError(
                        f"actor.sleep: {names} did not give GPU memory back in {timeout_s:g} s"
                    )
                self._changed.wait(WAIT_S)
        return True

    def wait_done(self, *, is_stopping: Callable[[], bool] = lambda: False) -> bool:
        """Wait until no version is being sent; False if the learner stops first.

        Raises: LongstrideError: as `publish`.
        """
        warned_at = time.monotonic()
        with self._changed:
            while self._wanted is not None:
                self._check()
                if is_stopping():
                    return False
                self._changed.wait(WAIT_S)
                if time.monotonic() - warned_at > WARN_EVERY_S:
                    warned_at = time.monotonic()
                    self._warn(self._wanted)
            self._check()
        return True

    def _warn(self, wanted: PublishedWeights | None) -> None:
        """Log that a version is still being sent, and to which engines."""
        if wanted is not None:
            names = ", ".join(sorted(member.actor for member in self._members.present()))
            waited_s = time.monotonic() - self._begun_at
            logger.warning(
                "still publishing version=%d to=%s for_s=%.1f", wanted.version, names, waited_s
            )

    def check(self) -> None:
        """Return if the thread has not failed. Raises: LongstrideError: as `publish`."""
        with self._changed:
            self._check()

    def _check(self) -> None:
        """Raise the failure of the thread, if there was one."""
        if isinstance(self._error, ConfigError):  # A restart would fail again.
            raise self._error
        if self._error is not None:
            raise LongstrideError(
                f"The publisher of weights failed: {self._error}"
            ) from self._error

    def num_refused(self) -> dict[str, int]:
        """Return how many messages the weight plane's listeners refused, by peer."""
        return self._router.num_refused("weights") | self._transfers.rendezvous.num_refused()

    def mark_silent(self, incarnations: Iterable[str]) -> None:
        """Do not wait for these actors, but for all others; replaces the earlier set."""
        if self._members.mark_silent(incarnations):
            self._router.wake()

    def check_engines(self, checks: Iterable[EngineCheck]) -> None:
        """Send prompts to the present engines to score; the answers count as canaries."""
        with self._changed:
            self._checks = list(checks)
        self._router.wake()

    @property
    def num_canary_alarms(self) -> int:
        """Largest number of consecutive canary alarms of an engine."""
        return self._canary.num_alarms

    @property
    def worst_engine(self) -> str:
        """The actor with the most consecutive canary alarms; "" if there is none."""
        return self._canary.worst_engine

    @property
    def no_engine_s(self) -> float:
        """Seconds without any engine that takes weights."""
        return self._members.no_engine_s

    def drain_metrics(self) -> dict[str, float]:
        """Return the metrics of the transfers and canaries since the last call."""
        with self._changed:
            metrics = self._metrics
            self._metrics = {}
        metrics["weights/members"] = float(len(self._members.present()))
        metrics["publish/gate_wait_s"] = self._weights_lock.drain_waited_s()
        return metrics | self._transfers.drain_metrics() | self._canary.drain_metrics()

    def stop(self) -> None:
        """End the thread; if it is blocked in a broadcast, it ends with the process."""
        self._stop_requested.set()
        self._router.wake()
        self.join(timeout=STOP_S)

    # --- the thread -------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until stopped; a failure is stored and raised in the main thread."""
        transfers = self._transfers
        failure: BaseException | None = None
        try:
            while not self._stop_requested.is_set():
                transfers.receive(WAIT_S)
                if self._wanted is not None:
                    self._send_wanted(self._wanted)
                elif transfers.current is not None:
                    if self._is_putting_to_sleep:
                        self._send_sleep()
                    else:
                        self._serve_newcomers(transfers.current)
                        self._ask_for_scores()
        except LongstrideError as error:
            failure = error
        finally:
            with self._changed:
                self._error = failure or sys.exception()
                self._changed.notify_all()
            if self._error is not None:
                logger.error("publisher failed", exc_info=self._error)
            transfers.close()

    def _send_wanted(self, weights: PublishedWeights) -> None:
        """Send a version to the members, first as a delta where that is possible."""
        if self._keeper is None:
            version = KeptVersion(weights, None, None)
        else:
            version = self._keep(weights, self._keeper)
        whole = version.whole
        self._transfers.current = whole
        self._canary.expect(whole)
        members = self._members.take_for_version()
        if version.delta is not None:
            members = self._send_delta(version.delta, members)
        self._transfers.broadcast(
            whole, members, is_held=whole.source.is_live, must_load=self._must_load
        )
        if not self._stop_requested.is_set():
            self._on_done()
        with self._changed:
            self._metrics["publish/total_s"] = time.monotonic() - self._begun_at
            self._wanted = None
            self._changed.notify_all()

    def _keep(self, weights: PublishedWeights, keeper: VersionKeeper) -> KeptVersion:
        """Copy a version; the trainer may change the live weights after that."""
        try:
            version = keeper.keep(weights)
        finally:
            if weights.source.is_live:
                self._weights_lock.leave()
        if version.changed_frac is not None:
            with self._changed:
                self._metrics["publish/changed_frac"] = version.changed_frac
        return version

    def _send_delta(
        self, delta: PublishedWeights, members: list[EngineMember]
    ) -> list[EngineMember]:
        """Send a delta to the members that hold its base; return the others.

        The others include members that refused the delta. They get the whole version.
        """
        holders = [m for m in members if self._members.held(m) == delta.base]
        self._transfers.broadcast(delta, holders, must_load=self._must_load)
        has_refused = [m for m in holders if self._members.has(m) and self._members.held(m) < 0]
        return [*has_refused, *(m for m in members if m not in holders)]

    def _serve_newcomers(self, weights: PublishedWeights) -> None:
        """Send the current version to new members. If it is outdated, they get the next one."""
        if weights.source.is_live and not self._weights_lock.is_open:
            return
        newcomers = self._members.take_newcomers()
        self._transfers.broadcast(
            weights, newcomers, is_superseded=lambda: self._wanted is not None
        )

    def _send_sleep(self) -> None:
        """Ask the engines that are awake to sleep; a repeated request is harmless."""
        awake = self._members.awake(self._sleep)
        for member in awake:
            self._router.send(self._members.sender_of(member), EngineSleep(number=self._sleep))
        if not awake:
            with self._changed:
                self._is_putting_to_sleep = False
                self._changed.notify_all()

    def _ask_for_scores(self) -> None:
        """Send the requested checks to the engines that are present."""
        with self._changed:
            checks = self._checks
            self._checks = []
        present = {member.actor: member for member in self._members.present()}
        for actor, version, prompts, logprobs in checks:
            if actor in present:
                number = self._canary.expect_check(actor, version, prompts, logprobs)
                check = CanaryCheck(version=version, number=number, token_ids=prompts.token_ids)
                self._router.send(self._members.sender_of(present[actor]), check)


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
        problem = f"No engine has loaded weights for {no_engine_s:.0f} s"
        if num_slots:
            problem = f"{problem}, although actors have {num_slots} slots."
            if self._run.on_stall is not OnStall.WARN:
                raise LongstrideError(problem)
        else:
            problem = f"{problem}, and no actor has a started engine."
        if time.monotonic() - self._warned_at > self._run.stall_s:
            self._warned_at = time.monotonic()
            logger.log(logging.ERROR if num_slots else logging.WARNING, "%s", problem)
        return "actors: an engine that loads weights"

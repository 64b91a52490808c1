"""The learner's ear: trajectories in, acknowledgements out, and the line to the scheduler.

A thread of its own, so that actors are answered while the model trains.
"""

import logging
import threading
import time
from collections.abc import Sequence

from common.errors import LongstrideError
from common.store.journal import JournalPosition, JournalWriter
from common.store.run_dir import RunDir
from common.wire.messages import (
    Ack,
    EpisodeKind,
    EpisodeOutcome,
    EpisodeSeen,
    GroupArrived,
    Heartbeat,
    Hello,
    Outcome,
    Outcomes,
    Progress,
    Rejected,
    StepDone,
    Trajectory,
)
from common.wire.security import RunKeys
from common.wire.sockets import Received, Router
from learner.ingest.admission import refusal, seen_of
from learner.ingest.episode_stats import EpisodeStats
from learner.ingest.group_assembly import Group, GroupAssembly
from learner.ingest.journal_index import JournalIndex
from learner.ingest.replay_point import Bookmark
from learner.ingest.scheduler_client import SchedulerLink

logger = logging.getLogger(__name__)

POLL_S = 0.02
CONNECT_S = 60.0


class Intake(threading.Thread):
    """Validates, deduplicates, journals, acknowledges; assembles groups; keeps the books in step.

    Order per trajectory: refuse or journal -> fsync -> acknowledge -> group -> tell the scheduler.
    Main-thread side: `next_batch`, `report`, `step_done`, `drain_stats`.
    """

    def __init__(
        self,
        run_dir: RunDir,
        keys: RunKeys,
        router: Router,
        journal: JournalWriter,
        table: GroupAssembly,
        *,
        hello: Hello,
        heartbeat_s: float,
        group_size: int,
        silence_s: float,
        vocab_size: int | None = None,
        closed_below: int = 0,
    ) -> None:
        super().__init__(name="intake", daemon=True)
        self._router = router
        self.port = router.port
        self._journal = journal
        self._table = table
        self._hello = hello
        self._heartbeat_s = heartbeat_s
        self._group_size = group_size
        self._vocab_size = vocab_size
        self._changed = threading.Condition()
        self._stop_requested = threading.Event()
        self.index = JournalIndex(end=journal.position, closed_below=closed_below)
        self._link = SchedulerLink(
            run_dir, keys, hello=hello, silence_s=silence_s, on_progress=self._apply
        )
        self._stale: list[EpisodeOutcome] = []  # since the last batch
        self._stats = EpisodeStats()
        self._stats_since = time.monotonic()
        self._error: BaseException | None = None
        self._last_beat = 0.0
        self._lag_bounds: dict[tuple[str, int], int] = {}  # of the scheduler; by env and horizon
        self._num_slots = 0  # of all actors, by the scheduler's word
        self.version = hello.version
        self.tokens_per_s = 0.0
        self.rss_bytes = 0
        self.num_refused = 0
        self.num_duplicates = 0
        self.is_finished = False
        self.waiting_for = ""

    # --- main thread ------------------------------------------------------------------------

    def adopt(self, trajectory: Trajectory, position: JournalPosition, *, step: int | None) -> bool:
        """Take an episode that the journal already holds (before the thread starts).

        Args:
            step: that consumed it, None if none has.

        Returns:
            True if its group was settled for good, so that nobody need be told.
        """
        is_closed = self.index.is_closed(trajectory)
        if is_closed:  # it is read in case that its step must be repeated once more
            self.index.enter(trajectory, position, told=0)
        else:
            self._adopt_open(trajectory, position, is_consumed=step is not None)
        if step is not None:
            self.index.trained([trajectory.group_id], step=step)
        return is_closed

    def _adopt_open(
        self, trajectory: Trajectory, position: JournalPosition, *, is_consumed: bool
    ) -> None:
        self.index.know(trajectory)
        told = self._link.queue(self._outcomes(seen=[seen_of(trajectory)]))
        self.index.enter(trajectory, position, told=told)
        if trajectory.kind is not EpisodeKind.TRAIN:
            return
        outcomes, groups = (
            self._table.mark_completed(trajectory.group_id)
            if is_consumed
            else self._table.add(trajectory)
        )
        self._news(outcomes, groups)

    def adopt_outcomes(self, outcomes: list[EpisodeOutcome]) -> None:
        """Take outcomes of steps that were logged by a previous learner."""
        self._news(outcomes, [])

    def bookmark(self, *, version: int) -> Bookmark:
        """Return where a learner would begin to read, if it restores `version` or a later one."""
        return self.index.bookmark(num_saved=self._link.num_saved, version=version)

    def next_batch(
        self,
        version: int,
        *,
        max_lag_steps: int,
        in_order: bool,
        timeout_s: float,
        may_stretch: bool = True,
    ) -> tuple[list[Group], list[EpisodeOutcome]]:
        """Wait for a batch of fresh groups; return it and what has grown stale since the last.

        Args:
            may_stretch: where the scheduler says so, a wider bound than `max_lag_steps` holds.

        Raises:
            TimeoutError: none within `timeout_s`; says what there is and who is waited for.
            LongstrideError: the intake thread failed.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._raise_failure()
                if self._table.is_batch_ready(version):
                    groups, outcomes = self._table.take(
                        version,
                        max_lag_steps=max_lag_steps,
                        in_order=in_order,
                        lag_bounds=self._lag_bounds if may_stretch else None,
                    )
                    self._stale += outcomes
                    self._news(outcomes, [])
                    if groups:
                        stale, self._stale = self._stale, []
                        return groups, stale
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise TimeoutError(
                        f"no batch within {timeout_s:g}s: {self._table.num_ready} groups ready, "
                        f"{self._table.num_open} waiting for members; see status.json"
                    )
                self._changed.wait(min(remaining, 1.0))

    def report(self, outcomes: list[EpisodeOutcome]) -> None:
        """Tell the scheduler what became of episodes."""
        with self._changed:
            self._link.queue(self._outcomes(outcomes=outcomes))

    def step_done(
        self, version: int, *, is_last: bool, max_ahead_steps: int, signals: dict[str, float]
    ) -> None:
        """Tell the scheduler that a version is published, how far to go ahead, and how it went."""
        with self._changed:
            self.version = version
            self._link.queue(
                StepDone(
                    version=version,
                    is_last=is_last,
                    max_ahead_steps=max_ahead_steps,
                    signals=signals,
                )
            )

    def drain_stats(self) -> dict[str, float]:
        """Return metrics over the episodes that arrived since the last call."""
        with self._changed:
            now = time.monotonic()
            metrics = self._stats.drain(now - self._stats_since)
            self._stats_since = now
            metrics["inbox/refused"] = float(self.num_refused)
            metrics["inbox/duplicates"] = float(self.num_duplicates)
            metrics["groups/ready"] = float(self._table.num_ready)
            metrics["groups/open"] = float(self._table.num_open)
            if self._num_slots:
                metrics["actor/concurrency"] = float(self._num_slots)
            return metrics

    def wait_finished(self, *, timeout_s: float) -> bool:
        """Wait until the scheduler says that the run is over; False if it did not in time."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self.is_finished and time.monotonic() < deadline:
                self._raise_failure()
                self._changed.wait(0.5)
            return self.is_finished

    def stop(self) -> None:
        """Flush what the scheduler should know, end the thread, close its sockets."""
        self._stop_requested.set()
        self.join(timeout=5.0)

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise LongstrideError(f"intake failed: {self._error}") from self._error

    # --- the thread -------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until stopped; a failure is kept and raised in the main thread."""
        try:
            self._link.connect(timeout_s=CONNECT_S)
            while not self._stop_requested.is_set():
                self._serve_once()
            self._link.flush()
        except Exception as e:
            logger.exception("intake failed")
            with self._changed:
                self._error = e
                self._changed.notify_all()
        finally:
            self._router.close()
            self._link.close()

    def _serve_once(self) -> None:
        received = self._router.receive_all(timeout_s=POLL_S)
        if received:
            self._take_in(received)
        self._link.pump()
        now = time.monotonic()
        if now - self._last_beat > self._heartbeat_s:
            self._last_beat = now
            self._link.beat(self._heartbeat())

    def _take_in(self, received: list[Received]) -> None:
        """Journal what is new and good, make it durable, then acknowledge all of it."""
        answers: list[tuple[bytes, Ack]] = []
        accepted: list[tuple[Trajectory, JournalPosition]] = []
        for item in received:
            trajectory = item.message
            if not isinstance(trajectory, Trajectory):
                name = type(trajectory).__name__
                self._router.send(item.sender, Rejected(reason=f"{name} is no trajectory"))
                continue
            reason = self._accept(trajectory, accepted)
            ack = Ack(episode_id=trajectory.episode_id, is_accepted=not reason, reason=reason)
            answers.append((item.sender, ack))
        if accepted:
            self._journal.sync()
        for sender, ack in answers:
            self._router.send(sender, ack)
        with self._changed:
            for trajectory, position in accepted:
                self._enter(trajectory, position)
            self.index.move_end(self._journal.position)
            self._changed.notify_all()

    def _accept(
        self, trajectory: Trajectory, accepted: list[tuple[Trajectory, JournalPosition]]
    ) -> str:
        """Append a trajectory to the journal unless it is known or refused; return why refused."""
        if trajectory in self.index:
            self.num_duplicates += 1
            with self._changed:
                self._link.queue(self._outcomes(num_duplicates=1))
            return ""
        reason = refusal(
            trajectory,
            learner_version=self.version + 1,
            max_group_size=self._group_size,
            vocab_size=self._vocab_size,
        )
        if reason:
            self.num_refused += 1
            logger.error(
                "refused episode=%s actor=%s reason=%s",
                trajectory.episode_id,
                trajectory.actor,
                reason,
            )
            self._refuse(trajectory)
            return reason
        position = self._journal.append(trajectory)
        self.index.know(trajectory)
        accepted.append((trajectory, position))
        return ""

    def _refuse(self, trajectory: Trajectory) -> None:
        """A refused episode never arrives: its group is completed without it."""
        if trajectory.kind is not EpisodeKind.TRAIN:
            return
        with self._changed:
            failed = EpisodeOutcome(
                episode_id=trajectory.episode_id, outcome=Outcome.FAILED, cause="refused"
            )
            outcomes, groups = self._table.give_up(trajectory.group_id, trajectory.member)
            self._link.queue(self._outcomes(outcomes=[failed, *outcomes], groups=groups))

    def _enter(self, trajectory: Trajectory, position: JournalPosition) -> None:
        told = self._link.queue(self._outcomes(seen=[seen_of(trajectory)]))
        self.index.enter(trajectory, position, told=told)
        if trajectory.kind is not EpisodeKind.TRAIN:
            return
        self._stats.add(trajectory)
        self._news(*self._table.add(trajectory))

    # --- the scheduler ----------------------------------------------------------------------

    def _apply(self, progress: Progress) -> None:
        """Complete groups whose members will never come; note bounds and the end of the run."""
        with self._changed:
            self._close_below(progress.closed_below)
            self._table.decide(progress.learner_version, progress.num_batch_groups)
            self._num_slots = progress.num_slots
            self._lag_bounds = {(b.env, b.horizon): b.max_lag_steps for b in progress.lag_bounds}
            for episode_id in progress.revoked:
                group_id, _, member = episode_id.rpartition("/")
                self._news(*self._table.give_up(group_id, int(member)))
            self.is_finished = self.is_finished or progress.is_finished
            self._changed.notify_all()

    def _close_below(self, number: int) -> None:
        if number < self.index.closed_below:
            raise LongstrideError(
                f"the scheduler has open groups from number {number} on, and those below"
                f" {self.index.closed_below} were settled: its scheduler.json is lost or another's"
            )
        if number > self.index.closed_below:
            self.index.close_below(number)
            self._table.close_below(number)

    def _outcomes(
        self,
        *,
        seen: Sequence[EpisodeSeen] = (),
        outcomes: Sequence[EpisodeOutcome] = (),
        groups: Sequence[GroupArrived] = (),
        num_duplicates: int = 0,
    ) -> Outcomes:
        return Outcomes(
            version=self.version,
            seen=list(seen),
            outcomes=list(outcomes),
            groups=list(groups),
            num_duplicates=num_duplicates,
        )

    def _news(self, outcomes: list[EpisodeOutcome], groups: list[GroupArrived]) -> None:
        if outcomes or groups:
            self._link.queue(self._outcomes(outcomes=outcomes, groups=groups))

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            role="learner",
            name=self._hello.name,
            version=self.version,
            running=self._table.open_ids,
            num_free_slots=0,
            num_slots=0,
            tokens_per_s=self.tokens_per_s,
            waiting_for=self.waiting_for,
            rss_bytes=self.rss_bytes,
        )

"""The scheduler as a pure state machine: messages and the current time in, answers out.

The core has no socket, no file and no clock of its own. A simulation can run it on virtual time.

consumes:   messages of actors (hello, heartbeat, lease request, goodbye) and of the learner
            (reports, steps), one at a time; a tick four times a second
waits for:  nothing: a request that cannot be served yet is answered at once with an empty grant,
            the reason and the time to retry
unblocked by: the learner's reports and steps, which free the gate; ticks, which expire leases
"""

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.wire.messages import (
    EpisodeSeen,
    Goodbye,
    GroupArrived,
    Heartbeat,
    Hello,
    Lease,
    LeaseGrant,
    LeaseRequest,
    Outcomes,
    Progress,
    Rejected,
    StepDone,
    Welcome,
)
from scheduler.components import Components, configure
from scheduler.dispatch import grants
from scheduler.episodes.lifecycle import Arrived
from scheduler.episodes.table import EpisodePhase
from scheduler.evaluation import NEXT_PHASE, Phase
from scheduler.members import liveness
from scheduler.state import restore, save
from scheduler.status import build_status


class ReportCursor:
    """Counts the learner's numbered messages since its hello.

    Example: messages 1 and 2 are received and the state is saved. Message 3 is lost, and 4 is
    received: num_heard stays at 2 and num_saved is 2. The learner gets these numbers and resends
    all messages after 2.
    """

    def __init__(self) -> None:
        self.num_heard = 0
        self.num_saved = 0
        self.closed_below = 0  # Number of the oldest training group that was open at the last save.

    def begin(self) -> None:
        """Restart the count: a learner numbers its messages from 1 after its hello."""
        self.num_heard = self.num_saved = 0

    def hear(self, number: int) -> None:
        """Count a handled message; a message after a gap does not count."""
        self.num_heard += number == self.num_heard + 1

    def save(self, *, closed_below: int) -> None:
        """Record that all counted messages are on disk."""
        self.num_saved = self.num_heard
        self.closed_below = closed_below


logger = logging.getLogger(__name__)

STATE_FORMAT = 3
TICK_S = 0.25  # Seconds between two checks for dead members and overdue leases.
RETRY_S = 0.1  # Seconds until an actor asks again after an empty grant.
REST_RETRY_S = 1.0  # Retry time after the end of the run, and for spare engines.


class SchedulerCore:
    """Grants episodes, bounds their horizon, and records the outcome of each.

    Example:
        core = SchedulerCore(build_components(cfg, catalogue), clock=time.monotonic)
        answer = core.handle("actor-0", LeaseRequest(actor="actor-0", ...))  # a LeaseGrant
        core.tick()

    Raises (from `handle` and `tick`):
        LedgerError: the ledger does not balance.
        EpisodesFailed: from `tick`: too many episodes failed by infrastructure.
    """

    def __init__(
        self, parts: Components, *, clock: Callable[[], float], run_epoch: str = "0"
    ) -> None:
        self._clock = clock
        self.run_epoch = run_epoch
        self.parts = parts
        self.run = parts.run
        self.lifecycle = parts.lifecycle
        self.members = parts.members
        self._cursor = ReportCursor()
        # A constant answer to most heartbeats, so that it is encoded once.
        self._go_on = Progress(run_epoch=run_epoch, revoked=[], is_finished=False)
        self._handlers: dict[type, Callable[[Any], Any]] = {
            Hello: self._hello,
            Goodbye: self._goodbye,
            LeaseRequest: self._lease_request,
            Heartbeat: self._heartbeat,
            Outcomes: self._outcomes,
            StepDone: self._step_done,
        }
        self._enter_phase()
        self._advance_phase()

    @property
    def version(self) -> int:
        """Newest version that a learner has reported."""
        return self.run.version

    @property
    def phase(self) -> Phase:
        """Current phase of the run."""
        return self.run.phase

    def handle(self, sender_name: str, message: Any) -> Any:
        """Process one message; return the answer to its sender, None if there is none."""
        handler = self._handlers.get(type(message))
        if handler is None:
            name = type(message).__name__
            logger.warning("rejected an unexpected message type=%s sender=%s", name, sender_name)
            return Rejected(reason=f"the scheduler does not accept a {name}")
        self.lifecycle.failures.now = self._clock()
        answer = handler(message)
        self._advance_phase()
        return answer

    def wake(self) -> None:
        """Renew all deadlines after this process was suspended: no member missed them by itself."""
        self.members.touch_all(self._clock())
        self.lifecycle.renew_all(now=self._clock())

    def configure(self, cfg: RunConfig) -> None:
        """Use other values of live keys from the next message on. The state of the run remains."""
        configure(self.parts, cfg)
        self._advance_phase()

    def tick(self, *, is_replay: bool = False) -> bool:
        """Reissue the episodes of dead members and of overdue leases.

        Args:
            is_replay: the tick is one of an earlier process, which did not end there.

        Returns: False, without any effect, if the last tick is less than `TICK_S` ago; else True.
        """
        now = self._clock()
        if now - self.run.last_tick < TICK_S:
            return False
        self.run.last_tick = self.lifecycle.failures.now = now
        liveness.tick(self.parts, now)
        self._advance_phase()
        # The check is not part of `handle`: the learner repeats its reports to every restarted
        # scheduler, so a report that raises would stop each of them.
        if not is_replay:
            self.lifecycle.check_failures()
        return True

    # --- members ------------------------------------------------------------------------------

    def _hello(self, message: Hello) -> Welcome:
        """Register a role; with a learner's hello, the numbering of its reports begins anew."""
        liveness.hello(self.parts, message, self._clock())
        if message.role == "learner":
            self._cursor.begin()
            self.run.learner_version = message.version
            own_version = self.run.version
            if message.version > own_version:
                logger.info("learner is ahead version=%d known=%d", message.version, own_version)
                self._set_version(message.version)
            elif message.version < own_version:
                logger.warning(
                    "learner is behind version=%d known=%d", message.version, own_version
                )
        return Welcome(run_epoch=self.run_epoch)

    def _goodbye(self, message: Goodbye) -> None:
        liveness.goodbye(self.parts, message, self._clock())

    def _heartbeat(self, message: Heartbeat) -> Progress:
        """Record the state of a role; return its revoked episodes and the end of the run."""
        revoked = liveness.heartbeat(self.parts, message, self._clock())
        if message.role == "learner":
            return self._progress_of_learner(revoked, num_reports=message.num_reports)
        if (is_finished := self.phase is Phase.DONE) or revoked:
            return Progress(run_epoch=self.run_epoch, revoked=revoked, is_finished=is_finished)
        return self._go_on

    def _progress_of_learner(self, revoked: list[str], *, num_reports: int = 0) -> Progress:
        """Return the answer to a learner, with the size of its next batch."""
        learner_version, num_groups = self._batch()
        return Progress(
            run_epoch=self.run_epoch,
            revoked=revoked,
            is_finished=self.phase is Phase.DONE,
            lag_bounds=self.parts.limits.lag_bounds,
            num_slots=sum(m.num_slots for m in self.members.alive("actor")),
            num_heard=self._cursor.num_heard,
            num_reports=num_reports,
            num_saved=self._cursor.num_saved,
            closed_below=self._cursor.closed_below,
            learner_version=learner_version,
            num_batch_groups=num_groups,
            silent=self.members.silent(self._clock()),
        )

    def _batch(self) -> tuple[int, int]:
        """Return (learner version, number of ready groups in the next batch of that version)."""
        num_groups = self.parts.gate.num_batch_groups(self.parts.gate_state())
        return self.run.learner_version, num_groups

    # --- leases -------------------------------------------------------------------------------

    def _lease_request(self, message: LeaseRequest) -> LeaseGrant:
        """Answer an actor's request for leases."""
        member = self.members.by_name.get(message.actor)
        now = self._clock()
        run = self.run
        if member is None:
            return self._grant([], f"{message.actor} is not registered, a Hello is needed")
        self.members.touch(member, now)
        member.version = message.version
        member.absent = list(message.absent)
        if run.phase is Phase.DONE:
            return self._grant([], "finished")
        if self.members.is_spare(member, now):
            return self._grant([], "spare: actor.num_actors other actors already play")
        taken, reason = grants.serve(self.parts, message, now)
        for group, _ in taken:
            self.parts.stream.granted(group, version=message.version)
        self.lifecycle.grant(taken, member, now=now)
        leases = [grants.lease(*each, deadline_s=self.parts.episode_timeout_s) for each in taken]
        return self._grant(leases, reason)

    def _grant(self, leases: list[Lease], reason: str) -> LeaseGrant:
        """Return a grant; a spare actor waits longer for its next request."""
        is_rest = self.phase is Phase.DONE or reason.startswith("spare")
        retry_s = REST_RETRY_S if is_rest else RETRY_S
        return LeaseGrant(leases=leases, retry_after_s=retry_s, reason=reason)

    # --- the learner --------------------------------------------------------------------------

    def _outcomes(self, message: Outcomes) -> Progress | None:
        """Process a report. Return a `Progress` if the report changed the next batch, else None."""
        before = self._batch()
        self._touch_learner()
        take_report(self.parts, message, now=self._clock())
        self._cursor.hear(message.number)
        return self._progress_of_learner([]) if self._batch() != before else None

    def _step_done(self, message: StepDone) -> Progress:
        """Apply the report of a finished step."""
        self._touch_learner()
        self.run.learner_version = message.version
        if message.version > self.run.version:
            self._set_version(message.version)
            busy_s = message.signals.get("busy_s")
            wait_s = message.signals.get("wait_s")
            self.parts.pace.add_step(self._clock(), busy_s=busy_s, wait_s=wait_s)
        self.parts.curriculum.step(message.version, message.signals)
        self.parts.limits.update(self.parts.pace, max_ahead_steps=message.max_ahead_steps)
        self.run.is_trained = self.run.is_trained or message.is_last
        if self.phase is Phase.TRAIN:
            due = self.parts.stream.due(message.version, is_last=self.run.is_trained)
            if due is not None:
                self.lifecycle.open(due)
        self.lifecycle.assert_balanced()
        self.lifecycle.audit.warn()
        self._cursor.hear(message.number)
        return self._progress_of_learner([])

    def _touch_learner(self) -> None:
        """Record that the learner is alive."""
        now = self._clock()
        for member in self.members.alive("learner"):
            self.members.touch(member, now)

    def _set_version(self, version: int) -> None:
        """Set the version of new groups; end the evaluation before training in a resumed run."""
        self.run.version = version
        self.lifecycle.num_filtered = 0
        self.run.is_trained = self.run.is_trained or version >= self.parts.gate.train.num_steps
        if self.phase is Phase.EVAL_BEFORE:
            logger.info(
                "skipped the evaluation before training: the run resumed at version=%d", version
            )
            self._skip_phase("resumed")

    # --- phases -------------------------------------------------------------------------------

    def continue_training(self) -> None:
        """Return from the end of the run to training if it has further steps now.

        An evaluation of the earlier end that is still open is abandoned. The next end has its own
        evaluation.
        """
        run = self.run
        num_steps = self.parts.gate.train.num_steps
        if run.phase not in (Phase.EVAL_AFTER, Phase.DONE) or run.version >= num_steps:
            return
        logger.info("continuing training version=%d num_steps=%d", run.version, num_steps)
        self._skip_phase("continued")
        run.is_trained = False
        run.num_continued += 1
        run.phase = Phase.TRAIN

    def _skip_phase(self, cause: str) -> None:
        """Book the open evaluation episodes of the current phase as failed."""
        for group_id in self.parts.phases.ids(self.run.phase, self.run.num_continued).values():
            self.lifecycle.skip(group_id, cause)

    def _advance_phase(self) -> None:
        """Enter the next phase, repeatedly, while the current phase has no work left."""
        run = self.run
        self.parts.stream.collect(self.lifecycle.table, self.parts.success, version=run.version)
        while run.phase is not Phase.DONE and self._is_phase_over():
            if run.phase is Phase.TRAIN:
                unplayed = (EpisodePhase.QUEUED, EpisodePhase.LEASED)
                self.lifecycle.end_training(states=unplayed)
            run.phase = NEXT_PHASE[run.phase]
            logger.info("entered phase=%s version=%d", run.phase, run.version)
            self._enter_phase()

    def _is_phase_over(self) -> bool:
        """Return whether the current phase has no work left."""
        if self.phase is Phase.TRAIN:
            return self.run.is_trained
        if self.phase is Phase.EVAL_AFTER and self.parts.stream.is_open:
            return False  # The evaluation beside training finishes in this phase.
        number = self.run.num_continued
        return not self.parts.phases.are_open(self.phase, self.lifecycle.table, number=number)

    def _enter_phase(self) -> None:
        """Open the groups of the current phase."""
        if self.phase is Phase.DONE:
            self.lifecycle.end_training(states=(EpisodePhase.ARRIVED,))
        run = self.run
        for group in self.parts.phases.make(
            run.phase, number=run.num_continued, version=run.version
        ):
            self.lifecycle.open(group)

    # --- state --------------------------------------------------------------------------------

    def mark_saved(self) -> None:
        """Record that the current state is on disk, so the learner may drop the reports in it."""
        self._cursor.save(closed_below=self.lifecycle.table.closed_below)

    def snapshot(self, *, with_volatile: bool = False) -> dict[str, Any]:
        """Return the whole state as JSON; `restore` of it gives the same `snapshot`.

        Args:
            with_volatile: include times, so that the log written from here on can be replayed.
        """
        return {
            "format": STATE_FORMAT,
            "seed": self.parts.seed,
            "has_times": with_volatile,
            **save(self.parts, with_volatile=with_volatile),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state. Without saved times every lease and member gets a new deadline.

        Raises: ConfigError: the state is of another format or another `run.seed`.
        """
        expected = {"format": STATE_FORMAT, "seed": self.parts.seed}
        for key, value in expected.items():
            if state.get(key) != value:
                raise ConfigError(
                    f"scheduler.json: {key}={state.get(key)!r}, expected {value!r}. Another version"
                    " of the product or another run wrote it. Start a new run."
                )
        restore(self.parts, state)
        if not state["has_times"]:
            now = self._clock()
            self.lifecycle.renew_all(now=now)
            self.members.touch_all(now)

    def status(self) -> dict[str, Any]:
        """Return the state of the run for status.json and the dashboard."""
        return build_status(self.parts, now=self._clock()) | {
            "progress": self.parts.phases.progress(
                self.phase, self.lifecycle.table, number=self.run.num_continued
            ),
            "run_epoch": self.run_epoch,
        }


def take_report(parts: Components, message: Outcomes, *, now: float) -> None:
    """Apply a report of the learner to all counts and means of the run."""
    parts.lifecycle.ledger.num_duplicates += message.num_duplicates
    _see_all(parts, message.seen)
    parts.signal.see(message, now)
    for group in message.groups:
        _complete(parts, group, now)
    for outcome in message.outcomes:
        parts.lifecycle.report(outcome)


def _see_all(parts: Components, seen: list[EpisodeSeen]) -> None:
    """Record arrived episodes; the episodes of one message ended at about the same time."""
    by_actor: defaultdict[str, list[tuple[float, Arrived]]] = defaultdict(list)
    for report in seen:
        arrived = parts.lifecycle.arrive(report)
        if arrived is None:
            continue
        if not report.end_reason.is_infrastructure_failure:
            _count(parts, report, arrived)
        if arrived.actor:
            by_actor[arrived.actor].append((report.wall_s, arrived))
    for actor, ended in by_actor.items():
        num_held = parts.lifecycle.leases.num_of(actor) + len(ended)
        for wall_s, arrived in ended:
            episode = arrived.episode
            usual_s = parts.pace.median_s(episode.env, episode.horizon)
            parts.members.finished(actor, wall_s=wall_s, num_held=num_held, usual_s=usual_s)


def _count(parts: Components, seen: EpisodeSeen, arrived: Arrived) -> None:
    """Count an episode whose result depends on the policy."""
    group = arrived.group
    episode = arrived.episode
    if not group.is_train:
        parts.success.evaluation.add(group.group_id, seen)
        return
    parts.success.train.add(f"{episode.env}/{episode.subset}", seen)
    parts.curriculum.see(seen, group, episode)
    parts.pace.add_episode(episode.env, episode.horizon, seen.wall_s)


def _complete(parts: Components, message: GroupArrived, now: float) -> None:
    """Complete a group, and record how long it was open."""
    group = parts.lifecycle.complete(message)
    if group is not None:
        seconds = None if group.opened_at is None else max(0.0, now - group.opened_at)
        parts.pace.add_group(seconds, has_signal=message.is_ready)

"""The scheduler as a pure state machine: messages and the clock's time in, answers out.

No socket, no file and no clock of its own, so that a simulation can run it on virtual time.
"""

import json
import logging
from collections.abc import Callable
from typing import Any

from common.config.run_config import RunConfig, TrainMode
from common.errors import ConfigError
from common.wire.messages import (
    EpisodeSeen,
    Heartbeat,
    Hello,
    Lease,
    LeaseGrant,
    LeaseRequest,
    Outcomes,
    Progress,
    Rejected,
    Status,
    StatusRequest,
    StepDone,
    Welcome,
)
from learner.scheduler.curriculum.catalogue import Catalogue
from learner.scheduler.curriculum.sampling import eval_items
from learner.scheduler.dispatch.gate import num_batch_groups
from learner.scheduler.dispatch.grants import Grants
from learner.scheduler.episodes.ledger import FAILED
from learner.scheduler.episodes.lifecycle import Books
from learner.scheduler.episodes.table import Episode, EpisodeState
from learner.scheduler.evaluation.eval_stream import EvalStream
from learner.scheduler.evaluation.phases import (
    NEXT_PHASE,
    Phase,
    eval_group,
    eval_group_id,
    eval_policies,
)
from learner.scheduler.members.liveness import RollCall
from learner.scheduler.members.members import Members
from learner.scheduler.members.report_cursor import Told
from learner.scheduler.status import build_status

logger = logging.getLogger(__name__)

STATE_FORMAT = 2
TICK_S = 0.25  # between two searches for the dead and the overdue
NEVER = -1e9
RETRY_S = 0.1  # after an empty grant
FINISHED_RETRY_S = 1.0


class SchedulerCore:
    """Who plays what, how long, and what became of it.

    Example:
        core = SchedulerCore(cfg, catalogue, clock=time.monotonic)
        answer = core.handle("actor-0", LeaseRequest(actor="actor-0", ...))  # a LeaseGrant
        core.tick()

    Raises (from `handle` and `tick`):
        LedgerError: the books do not balance, or two outcomes for one episode.
        LongstrideError: too many episodes failed by infrastructure.
    """

    def __init__(
        self,
        cfg: RunConfig,
        catalogue: Catalogue,
        *,
        clock: Callable[[], float],
        run_epoch: str = "0",
    ) -> None:
        self._cfg = cfg
        self._catalogue = catalogue
        self._clock = clock
        self._eval_items = eval_items(cfg.tasks, catalogue, cfg.eval.num_items)
        self._is_sync = cfg.train.mode is TrainMode.SYNC
        self.run_epoch = run_epoch
        self.version = 0
        self.phase = Phase.EVAL_BEFORE
        self.books = Books(cfg, catalogue)
        self._grants = Grants(cfg, catalogue, self.books)
        self.stream = EvalStream(cfg, catalogue)
        self.members = Members(dead_after_s=cfg.scheduler.dead_after_s)
        self._roll_call = RollCall(cfg, self.books, self.members)
        self._told = Told()
        self._learner_version = -1  # as the learner said; it may be behind ours
        self._is_trained = cfg.train.num_steps == 0
        self._last_tick = NEVER
        self._handlers: dict[type, Callable[[str, Any], Any]] = {
            Hello: self._hello,
            LeaseRequest: self._lease_request,
            Heartbeat: self._heartbeat,
            Outcomes: self._outcomes,
            StepDone: self._step_done,
            StatusRequest: self._status_request,
        }
        self._enter_phase()
        self._advance_phase()

    def handle(self, sender_name: str, message: Any) -> Any:
        """Take one message; return the answer to its sender, None if there is none."""
        handler = self._handlers.get(type(message))
        if handler is None:
            name = type(message).__name__
            logger.warning("unexpected message type=%s sender=%s", name, sender_name)
            return Rejected(reason=f"the scheduler takes no {name}")
        answer = handler(sender_name, message)
        self._advance_phase()
        return answer

    def tick(self) -> bool:
        """Issue again what the dead and the overdue hold. True if it was time to look."""
        now = self._clock()
        if now - self._last_tick < TICK_S:
            return False
        self._last_tick = now
        self._roll_call.tick(now)
        self._advance_phase()
        return True

    # --- members ------------------------------------------------------------------------------

    def _hello(self, sender_name: str, message: Hello) -> Welcome:
        self._roll_call.hello(message, self._clock())
        if message.role == "learner":
            self._told.begin()
            self._learner_version = message.version
        if message.role == "learner" and message.version > self.version:
            logger.info("learner is ahead version=%d known=%d", message.version, self.version)
            self._set_version(message.version)
        elif message.role == "learner" and message.version < self.version:
            logger.warning("learner is behind version=%d known=%d", message.version, self.version)
        return self._welcome()

    def _welcome(self) -> Welcome:
        return Welcome(run_epoch=self.run_epoch, version=self.version, is_lockstep=self._is_sync)

    def _heartbeat(self, sender_name: str, message: Heartbeat) -> Progress:
        revoked = self._roll_call.heartbeat(message, self._clock())
        if message.role == "learner":
            return self._progress_of_learner(revoked)
        return Progress(
            run_epoch=self.run_epoch,
            version=self.version,
            revoked=revoked,
            lag_bounds=[],
            num_slots=0,
            is_finished=self.phase is Phase.DONE,
        )

    def _progress_of_learner(self, revoked: list[str]) -> Progress:
        learner_version, num_groups = self._batch()
        return Progress(
            run_epoch=self.run_epoch,
            version=self.version,
            revoked=revoked,
            lag_bounds=self._grants.limits.lag_bounds,
            num_slots=sum(m.num_slots for m in self.members.alive("actor")),
            is_finished=self.phase is Phase.DONE,
            num_heard=self._told.num_heard,
            num_saved=self._told.num_saved,
            closed_below=self._told.closed_below,
            learner_version=learner_version,
            num_batch_groups=num_groups,
        )

    def _batch(self) -> tuple[int, int]:
        """Return for which version of the learner how many ready groups make a batch."""
        state = self._grants.gate_state(self.version)
        return self._learner_version, num_batch_groups(self._cfg, state)

    # --- leases -------------------------------------------------------------------------------

    def _lease_request(self, sender_name: str, message: LeaseRequest) -> LeaseGrant:
        member = self.members.by_name.get(message.actor)
        if member is None:
            return self._answer([], f"{message.actor} is not known, say hello")
        self.members.touch(member, self._clock())
        member.version = message.version
        if self.phase is Phase.DONE:
            return self._answer([], "finished")
        now = self._clock()
        taken, reason = self._grants.serve(
            message, self.members, phase=self.phase, version=self.version, now=now
        )
        for group, _ in taken:
            self.stream.granted(group, version=message.version)
        leases = [self._grants.grant(*each, member=member, now=now) for each in taken]
        return self._answer(leases, reason)

    def _answer(self, leases: list[Lease], reason: str) -> LeaseGrant:
        retry_s = FINISHED_RETRY_S if self.phase is Phase.DONE else RETRY_S
        return LeaseGrant(
            run_epoch=self.run_epoch, leases=leases, retry_after_s=retry_s, reason=reason
        )

    # --- the learner --------------------------------------------------------------------------

    def _outcomes(self, sender_name: str, message: Outcomes) -> Progress | None:
        """Take a report; the answer says what is a batch now, if that has changed."""
        before = self._batch()
        self._touch_learner()
        self.books.ledger.num_duplicates += message.num_duplicates
        self._see(message.seen)
        for group in message.groups:
            self.books.group_arrived(group, now=self._clock())
        for outcome in message.outcomes:
            self.books.report(outcome)
        self._told.hear(message.number)
        return self._progress_of_learner([]) if self._batch() != before else None

    def _see(self, seen: list[EpisodeSeen]) -> None:
        """Take in episodes; those that one message names ended at about the same time."""
        ended: dict[str, list[tuple[float, Episode]]] = {}
        for each in seen:
            found = self.books.table.find(each.episode_id)
            if actor := self.books.see(each):
                assert found is not None, f"{each.episode_id} was leased, and is not in the table"
                ended.setdefault(actor, []).append((each.wall_s, found[1]))
        pace = self.books.pace
        for actor, episodes in ended.items():
            num_held = self.books.leases.num_leased_to(actor) + len(episodes)
            for wall_s, episode in episodes:
                usual_s = pace.median_s(episode.env, episode.horizon)
                self.members.finished(actor, wall_s=wall_s, num_held=num_held, usual_s=usual_s)

    def _step_done(self, sender_name: str, message: StepDone) -> Progress:
        self._touch_learner()
        self._learner_version = message.version
        if message.version > self.version:
            self._set_version(message.version)
            busy_s, wait_s = message.signals.get("busy_s"), message.signals.get("wait_s")
            self.books.pace.add_step(self._clock(), busy_s=busy_s, wait_s=wait_s)
        self.books.curriculum.step(message.version, message.signals)
        self._grants.limits.update(self.books.pace, max_ahead_steps=message.max_ahead_steps)
        self._is_trained = self._is_trained or message.is_last
        if self.phase is Phase.TRAIN:
            due = self.stream.due(message.version, is_last=self._is_trained)
            if due is not None:
                self.books.open(due)
        self.books.assert_balanced()
        self.books.audit.warn()
        self._told.hear(message.number)
        return self._progress_of_learner([])

    def _touch_learner(self) -> None:
        now = self._clock()
        for member in self.members.alive("learner"):
            self.members.touch(member, now)

    def _set_version(self, version: int) -> None:
        self.version = version
        self.books.num_filtered = 0
        self._is_trained = self._is_trained or version >= self._cfg.train.num_steps
        if self.phase is Phase.EVAL_BEFORE:
            logger.info("no evaluation before training: resumed at version=%d", version)
            for group, episode in list(self.books.table.episodes()):
                if episode.settled is None:
                    self.books.give_up(group, episode, FAILED, "resumed")

    # --- phases -------------------------------------------------------------------------------

    def _advance_phase(self) -> None:
        """Go on to the next phase as long as the current one has nothing to do."""
        self.stream.collect(self.books.table, self.books.averages, version=self.version)
        while self.phase is not Phase.DONE and self._is_phase_over():
            if self.phase is Phase.TRAIN:
                unplayed = (EpisodeState.QUEUED, EpisodeState.LEASED)
                self.books.end_training(states=unplayed)
            self.phase = NEXT_PHASE[self.phase]
            logger.info("phase=%s version=%d", self.phase, self.version)
            self._enter_phase()

    def _is_phase_over(self) -> bool:
        if self.phase is Phase.TRAIN:
            return self._is_trained
        if self.phase is Phase.EVAL_AFTER and self.stream.is_open:
            return False  # an evaluation beside training is finished here
        open_groups = self.books.table.groups
        policies = eval_policies(self._cfg.eval, self.phase)
        return not any(eval_group_id(self.phase, policy) in open_groups for policy in policies)

    def _enter_phase(self) -> None:
        if self.phase is Phase.DONE:
            self.books.end_training(states=(EpisodeState.ARRIVED,))
        if not self._eval_items:
            return
        for policy in eval_policies(self._cfg.eval, self.phase):
            group = eval_group(
                self.phase, policy, self._eval_items, self._catalogue, version=self.version
            )
            self.books.open(group)

    # --- state --------------------------------------------------------------------------------

    def mark_saved(self) -> None:
        """A snapshot of this moment is on disk: the learner may forget what it told until now."""
        self._told.save(closed_below=self.books.closed_below)

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as JSON: `restore` of it gives the same `snapshot`."""
        return {
            "format": STATE_FORMAT,
            "seed": self._cfg.run.seed,
            "version": self.version,
            "learner_version": self._learner_version,
            "phase": self.phase.value,
            "is_trained": self._is_trained,
            "books": self.books.snapshot(),
            "limits": self._grants.limits.snapshot(),
            "stream": self.stream.snapshot(),
            "members": self.members.snapshot(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a state. Leases and members get a fresh term from now on.

        Raises:
            ConfigError: the state is of another format or another `run.seed`.
        """
        expected = {"format": STATE_FORMAT, "seed": self._cfg.run.seed}
        for key, value in expected.items():
            if state.get(key) != value:
                raise ConfigError(f"scheduler state: {key}={state.get(key)!r}, not {value!r}")
        now = self._clock()
        self._last_tick = NEVER
        self.version = state["version"]
        self._learner_version = state["learner_version"]
        self.phase = Phase(state["phase"])
        self._is_trained = state["is_trained"]
        self.books.restore(state["books"], now=now)
        self._grants.limits.restore(state["limits"])
        self.stream.restore(state["stream"])
        self.members.restore(state["members"], now)

    def terms(self) -> dict[str, Any]:
        """Return the times that a snapshot leaves out: with them a log can be handled again."""
        return {
            "books": self.books.terms(),
            "members": self.members.terms(),
            "last_tick": self._last_tick,
        }

    def restore_terms(self, terms: dict[str, Any]) -> None:
        """Take over `terms` on top of the snapshot of the same moment, on the same clock."""
        self.books.restore_terms(terms["books"])
        self.members.restore_terms(terms["members"])
        self._last_tick = terms["last_tick"]

    def _status_request(self, sender_name: str, message: StatusRequest) -> Status:
        return Status(state=json.dumps(self.status()))

    def status(self) -> dict[str, Any]:
        """Return what is going on, for people and the display."""
        return build_status(
            self._cfg,
            self.books,
            self.members,
            limits=self._grants.limits,
            gate=self._grants.gate_state(self.version),
            phase=self.phase,
            now=self._clock(),
        ) | {"run_epoch": self.run_epoch, "eval_stream": self.stream.report()}

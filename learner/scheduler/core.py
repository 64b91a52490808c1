"""The scheduler as a pure state machine: messages and the clock's time in, answers out.

No socket, no file and no clock of its own, so that a simulation can run it on virtual time.
"""

import json
import logging
from collections.abc import Callable
from typing import Any

from common.config import RunConfig, TrainMode
from common.errors import ConfigError
from common.messages import (
    Heartbeat,
    Hello,
    Lease,
    LeaseGrant,
    LeaseRequest,
    Outcomes,
    Progress,
    Rejected,
    Snapshot,
    SnapshotRequest,
    Status,
    StatusRequest,
    StepDone,
    Welcome,
)
from learner.scheduler.books import Books
from learner.scheduler.catalog import Catalogue
from learner.scheduler.evaluation import (
    NEXT_PHASE,
    Phase,
    eval_group,
    eval_group_id,
    eval_policies,
)
from learner.scheduler.grants import Grants
from learner.scheduler.groups import EpisodeState
from learner.scheduler.ledger import FAILED
from learner.scheduler.members import Member, Members
from learner.scheduler.sampling import eval_items
from learner.scheduler.status import build_status

logger = logging.getLogger(__name__)

STATE_FORMAT = 1
TICK_S = 0.25  # between two searches for the dead and the overdue
NEVER = -1e9
RETRY_S = 0.1  # after an empty grant
FINISHED_RETRY_S = 1.0
MAX_MISSED = 2  # heartbeats in a row that may not list a lease before it counts as lost


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
        self.books = Books(cfg)
        self._grants = Grants(cfg, catalogue, self.books)
        self.members = Members(dead_after_s=cfg.scheduler.dead_after_s)
        self._is_trained = cfg.train.num_steps == 0
        self._generation = 0  # times that a checkpoint took the run back
        self._last_tick = NEVER
        self._handlers: dict[type, Callable[[str, Any], Any]] = {
            Hello: self._hello,
            LeaseRequest: self._lease_request,
            Heartbeat: self._heartbeat,
            Outcomes: self._outcomes,
            StepDone: self._step_done,
            SnapshotRequest: self._snapshot_request,
            Snapshot: self._roll_back,
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
        for member in self.members.bury(now):
            logger.warning("dead role=%s name=%s", member.role, member.name)
            self._lose_all(member.name, "actor_dead")
        for episode in reversed(self.books.leases.overdue(now)):
            self.books.lose(episode, "lease_deadline")
        self._advance_phase()
        return True

    # --- members ------------------------------------------------------------------------------

    def _hello(self, sender_name: str, message: Hello) -> Welcome:
        if self.members.hello(message, self._clock()):
            logger.warning("restarted role=%s name=%s", message.role, message.name)
            self._lose_all(message.name, "actor_restarted")
        else:
            for episode in self.books.leases.leased_to(message.name):
                episode.incarnation = episode.incarnation or message.incarnation
                if episode.incarnation != message.incarnation:
                    self.books.lose(episode, "actor_restarted")
        if message.role == "learner" and message.version > self.version:
            logger.info("learner is ahead version=%d known=%d", message.version, self.version)
            self._set_version(message.version)
        elif message.role == "learner" and message.version < self.version:
            logger.warning("learner is behind version=%d known=%d", message.version, self.version)
        return self._welcome()

    def _welcome(self) -> Welcome:
        return Welcome(run_epoch=self.run_epoch, version=self.version, is_lockstep=self._is_sync)

    def _heartbeat(self, sender_name: str, message: Heartbeat) -> Progress:
        now = self._clock()
        member = self.members.heartbeat(message, now)
        if message.role == "actor":
            revoked = self._renew(member, message.running, now)
        else:
            revoked = self.books.given_up_ids()
        return Progress(
            run_epoch=self.run_epoch,
            version=self.version,
            revoked=revoked,
            is_finished=self.phase is Phase.DONE,
        )

    def _renew(self, member: Member, running: list[str], now: float) -> list[str]:
        """Renew what an actor lists, miss what it does not; return what it should abandon."""
        revoked = [episode_id for episode_id in running if not self._keep(member, episode_id, now)]
        listed = set(running)
        patience_s = self._cfg.scheduler.dead_after_s / 2
        for episode in self.books.leases.leased_to(member.name):
            if episode.episode_id in listed:
                continue
            episode.num_missed += 1
            if episode.num_missed >= MAX_MISSED and now - episode.listed_at >= patience_s:
                self.books.lose(episode, "lost_by_actor")
        return revoked

    def _keep(self, member: Member, episode_id: str, now: float) -> bool:
        """Renew one listed episode; False if the actor should abandon it."""
        found = self.books.table.find(episode_id)
        if found is None:
            return False
        episode = found[1]
        match episode.state:
            case EpisodeState.LEASED:
                if episode.actor != member.name:
                    return False
                self.books.leases.renew(episode, now=now)
            case EpisodeState.QUEUED:  # thought lost, and here it is
                if episode.num_issues == 0:
                    return False
                self.books.leases.lease(
                    episode, actor=member.name, incarnation=member.incarnation, now=now
                )
            case EpisodeState.ARRIVED:  # on its first issue it only waits to be acknowledged
                return episode.num_issues <= 1
            case EpisodeState.SETTLED:
                return False
        return True

    def _lose_all(self, actor: str, cause: str) -> None:
        for episode in reversed(self.books.leases.leased_to(actor)):  # requeued in their order
            self.books.lose(episode, cause)
        self.books.leases.disown(actor)

    # --- leases -------------------------------------------------------------------------------

    def _lease_request(self, sender_name: str, message: LeaseRequest) -> LeaseGrant:
        member = self.members.by_name.get(message.actor)
        if member is None:
            return self._answer([], f"{message.actor} is not known, say hello")
        self.members.touch(member, self._clock())
        member.version = message.version
        if self.phase is Phase.DONE:
            return self._answer([], "finished")
        taken, reason = self._grants.take(
            message, phase=self.phase, version=self.version, generation=self._generation
        )
        leases = [self._grants.grant(*each, member=member, now=self._clock()) for each in taken]
        return self._answer(leases, reason if len(leases) < message.num_free_slots else "")

    def _answer(self, leases: list[Lease], reason: str) -> LeaseGrant:
        retry_s = FINISHED_RETRY_S if self.phase is Phase.DONE else RETRY_S
        return LeaseGrant(
            run_epoch=self.run_epoch, leases=leases, retry_after_s=retry_s, reason=reason
        )

    # --- the learner --------------------------------------------------------------------------

    def _outcomes(self, sender_name: str, message: Outcomes) -> None:
        self._touch_learner()
        self.books.ledger.num_duplicates += message.num_duplicates
        for seen in message.seen:
            self.books.see(seen)
        for group in message.groups:
            self.books.group_arrived(group)
        for outcome in message.outcomes:
            self.books.report(outcome)

    def _step_done(self, sender_name: str, message: StepDone) -> None:
        self._touch_learner()
        if message.version > self.version:
            self._set_version(message.version)
        self._grants.max_ahead_steps = message.max_ahead_steps
        self._is_trained = self._is_trained or message.is_last
        self.books.assert_balanced()

    def _touch_learner(self) -> None:
        now = self._clock()
        for member in self.members.by_name.values():
            if member.role == "learner" and not member.is_dead:
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

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as JSON: `restore` of it gives the same `snapshot`."""
        return {
            "format": STATE_FORMAT,
            "seed": self._cfg.run.seed,
            "version": self.version,
            "phase": self.phase.value,
            "is_trained": self._is_trained,
            "generation": self._generation,
            "books": self.books.snapshot(),
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
        self.phase = Phase(state["phase"])
        self._is_trained = state["is_trained"]
        self._generation = state["generation"]
        self.books.restore(state["books"], now=now)
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

    def _snapshot_request(self, sender_name: str, message: SnapshotRequest) -> Snapshot:
        return Snapshot(version=message.version, state=json.dumps(self.snapshot()))

    def _roll_back(self, sender_name: str, message: Snapshot) -> Welcome:
        """Return to the state of a checkpoint. New groups get ids that were never used before."""
        members, generation = self.members.by_name, self._generation
        logger.warning("rolling back version=%d to=%d", self.version, message.version)
        self.restore(json.loads(message.state))
        self._generation = max(generation, self._generation) + 1
        self.members.by_name.update(members)
        for member in members.values():
            for episode in reversed(self.books.leases.leased_to(member.name)):
                if member.is_dead or episode.incarnation != member.incarnation:
                    self.books.lose(episode, "actor_restarted")
            if member.is_dead:
                self.books.leases.disown(member.name)
        return self._welcome()

    def _status_request(self, sender_name: str, message: StatusRequest) -> Status:
        return Status(state=json.dumps(self.status()))

    def status(self) -> dict[str, Any]:
        """Return what is going on, for people and the display."""
        return build_status(
            self._cfg,
            self.books,
            self.members,
            gate=self._grants.gate_state(self.version),
            phase=self.phase,
            now=self._clock(),
        ) | {"run_epoch": self.run_epoch}

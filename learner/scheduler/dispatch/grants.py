"""Which episodes an actor gets when it asks, and the opening of groups for it."""

from dataclasses import dataclass

from common.wire.messages import EpisodeKind, Lease, LeaseRequest, PolicyKind
from learner.scheduler.curriculum.curriculum import Curriculum
from learner.scheduler.dispatch.gate import Gate, GateState
from learner.scheduler.dispatch.limits import Limits
from learner.scheduler.dispatch.pace import Pace
from learner.scheduler.episodes.lifecycle import EpisodeLifecycle
from learner.scheduler.episodes.queue import Taken
from learner.scheduler.episodes.table import EpisodeRecord, GroupRecord
from learner.scheduler.evaluation.phases import Phase
from learner.scheduler.members.members import Member, Members

UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Where the run stands when an actor asks."""

    phase: Phase
    version: int  # of the learner
    needed_version: int  # that engines are to hold by now
    now: float  # core's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """Serves requests for work out of the queue, and fills the queue as far as the gate lets it."""

    gate: Gate
    limits: Limits
    pace: Pace
    lifecycle: EpisodeLifecycle
    curriculum: Curriculum
    members: Members
    episode_timeout_s: float  # from a lease until its episode must have ended

    def serve(self, request: LeaseRequest, moment: Moment) -> tuple[Taken, str]:
        """Choose what an actor gets by what it asks for, by its speed and by who waits for work.

        Example: the gate is closed. fast holds 60 episodes, late asks and is refused. Until late
        holds as many, or has all that it can play, fast is not given new groups.

        Returns:
            (episodes taken off the queue, why there are no more; "" if it has all it asked for).
        """
        name, num = request.actor, max(0, request.num_free_slots)
        num_allowed = min(num, self._num_by_speed(self.members.by_name[name]))
        num_fresh = min(num_allowed, self._num_in_turn(name, moment.now))
        taken, reason = self._take(request, num_allowed, num_fresh, moment)
        if len(taken) == num:
            self.members.satisfy(name)
            return taken, ""
        if len(taken) == num_allowed:
            self.members.satisfy(name)
            return taken, f"speed: {name} has as much as it finishes before it is stale"
        if not moment.phase.is_eval and request.version >= moment.needed_version:
            self.members.refuse(name, moment.now, has_some=bool(taken))
        return taken, reason or "turn: an actor with fewer episodes is served first"

    def _num_by_speed(self, member: Member) -> int:
        """Return how many more episodes an actor may get. One that is alone may have all."""
        limit = self.limits.lease_limit(self.pace, member)
        if limit is None or not self.members.has_other_actor(member):
            return UNLIMITED
        return max(0, limit - self.lifecycle.num_leased_to(member.name))

    def _num_in_turn(self, name: str, now: float) -> int:
        """Return how many episodes an actor may get beyond those of open groups."""
        rival = self.members.first_refused(name, now)
        if self.gate.is_sync or not rival:
            return UNLIMITED
        lead = self.lifecycle.num_leased_to(name) - self.lifecycle.num_leased_to(rival)
        return max(0, self.gate.groups.size - lead)

    def _take(
        self, request: LeaseRequest, num: int, num_fresh: int, moment: Moment
    ) -> tuple[Taken, str]:
        """Take up to `num` episodes off the queue; open groups for up to `num_fresh` of them."""
        is_behind = request.version < moment.needed_version

        def is_allowed(group: GroupRecord) -> bool:
            needs_latest = group.kind is EpisodeKind.EVAL or self.gate.is_sync
            return not (is_behind and needs_latest and group.policy is PolicyKind.MODEL)

        actor, queue = request.actor, self.lifecycle.queue
        taken = queue.take(actor, num, is_allowed=is_allowed)
        reason = ""
        if is_behind and (self.gate.is_sync or moment.phase.is_eval):
            needed = moment.needed_version
            reason = f"weights: the actor holds version {request.version}, {needed} is needed"
        elif moment.phase.is_eval:
            reason = f"{moment.phase}: all its episodes are being played"
        else:
            while len(taken) < num_fresh and not reason:
                reason = self._open_groups(moment)
                taken += queue.take(actor, num - len(taken), is_allowed=is_allowed)
        if len(taken) < num:
            taken += queue.steal(actor, num - len(taken), is_allowed=is_allowed)
        return taken, reason

    def _open_groups(self, moment: Moment) -> str:
        """Open the next group, in sync mode the whole batch; return why not, "" if opened."""
        verdict = self.gate.allowed(self.gate_state(moment.version))
        is_sync = self.gate.is_sync
        for _ in range(verdict.num_allowed if is_sync else min(1, verdict.num_allowed)):
            number = self.lifecycle.table.next_number
            group = self.curriculum.make_group(number, version=moment.version, now=moment.now)
            self.lifecycle.open(group)
        return verdict.reason

    def gate_state(self, version: int) -> GateState:
        """Return what the gate sees now."""
        return GateState(
            version=version,
            num_open=self.lifecycle.table.num_open,
            num_ready=self.lifecycle.table.num_ready,
            num_filtered=self.lifecycle.num_filtered,
            max_ahead_steps=self.limits.max_ahead_steps,
            needed_ahead_steps=self.limits.needed_ahead_steps,
        )

    def lease(self, group: GroupRecord, episode: EpisodeRecord) -> Lease:
        """Return what an actor is told of an episode that it has been granted."""
        return Lease(
            episode_id=episode.episode_id,
            group_id=group.group_id,
            member=episode.member,
            attempt=episode.attempt,
            kind=group.kind,
            policy=group.policy,
            env=episode.env,
            item_id=episode.item_id,
            seed=episode.seed,
            horizon=episode.horizon,
            horizon_stage=group.horizon_stage,
            opened_at_version=group.opened_at_version,
            deadline_s=self.episode_timeout_s,
        )

"""Chooses the episodes that an actor is granted, and opens groups for it."""

from collections.abc import Sequence
from functools import partial

from common.wire.messages import EpisodeKind, Lease, LeaseRequest, PolicyKind
from scheduler.components import Components
from scheduler.episodes.queue import Taken
from scheduler.episodes.table import EpisodeRecord, GroupRecord
from scheduler.members.members import RunMember

UNLIMITED = 1 << 30
MAX_LEASES = 2_048  # Leases of one grant: with the longest ids they stay below the wire's limit.


def serve(parts: Components, request: LeaseRequest, now: float) -> tuple[Taken, str]:
    """Choose episodes for an actor by its request, its speed and the actors that wait for work.

    Example: the gate is closed. Actor "fast" holds 60 episodes; actor "late" asks and gets none.
    Actor "fast" gets no new groups until "late" holds as many episodes, or as many as it can play.

    Returns:
        (episodes taken off the queue, reason for not granting more; "" if all requested ones are
        granted).
    """
    name = request.actor
    num = min(request.num_free_slots, MAX_LEASES)
    num_allowed = min(num, _num_by_speed(parts, parts.members.by_name[name]))
    num_fresh = min(num_allowed, _num_in_turn(parts, name, now))
    taken, reason = _take(parts, request, num_allowed, num_fresh, now)
    if len(taken) == num:
        parts.members.satisfy(name)
        return taken, ""
    if len(taken) == num_allowed:
        parts.members.satisfy(name)
        return taken, f"speed: {name} has all episodes that it can finish before they are stale"
    if not parts.run.phase.is_eval and request.version >= parts.needed_version(parts.run.version):
        parts.members.refuse(name, now, has_some=bool(taken))
    return taken, reason or "turn: an actor with fewer episodes is served first"


def _num_by_speed(parts: Components, member: RunMember) -> int:
    """Return how many more episodes the actor may get by its speed. A sole actor has no limit."""
    limit = parts.limits.lease_limit(parts.pace, member)
    if limit is None or not parts.members.has_other_actor(member):
        return UNLIMITED
    return max(0, limit - parts.lifecycle.leases.num_of(member.name))


def _num_in_turn(parts: Components, name: str, now: float) -> int:
    """Return how many episodes the actor may get beyond those of groups that are already open."""
    rival = parts.members.first_refused(name, now)
    if parts.gate.is_sync or not rival:
        return UNLIMITED
    leases = parts.lifecycle.leases
    lead = leases.num_of(name) - leases.num_of(rival)
    return max(0, parts.gate.groups.size - lead)


def _take(
    parts: Components, request: LeaseRequest, num: int, num_fresh: int, now: float
) -> tuple[Taken, str]:
    """Take up to `num` episodes off the queue; open groups for up to `num_fresh` of them."""
    phase = parts.run.phase
    is_sync = parts.gate.is_sync
    needed = parts.needed_version(parts.run.version)
    is_behind = request.version < needed

    def is_allowed(group: GroupRecord) -> bool:
        needs_latest = group.kind is EpisodeKind.EVAL or is_sync
        return not (is_behind and needs_latest and group.policy is PolicyKind.MODEL)

    actor = request.actor
    queue = parts.lifecycle.queue
    take = partial(queue.take, actor, is_allowed=is_allowed, absent=request.absent)
    taken = take(num)
    reason = ""
    if is_behind and (is_sync or phase.is_eval):
        reason = f"weights: the actor has version {request.version}, version {needed} is needed"
    elif phase.is_eval:
        reason = f"{phase}: all episodes of this phase are leased"
    else:
        while len(taken) < num_fresh and not reason:
            reason = _open_groups(parts, now, request.absent)
            taken += take(num - len(taken))
    if len(taken) < num and not parts.gate.groups.forks:  # Forks play beside their trunk.
        left = num - len(taken)
        taken += queue.steal(actor, left, is_allowed=is_allowed, absent=request.absent)
    return taken, reason


def _open_groups(parts: Components, now: float, absent: Sequence[str]) -> str:
    """Open the next group, in sync mode the whole batch; return the gate's reason, "" if open.

    Args:
        absent: environments from which no group is drawn if another can be. Ignored in sync mode,
            where groups depend only on their numbers.
    """
    gate = parts.gate
    lifecycle = parts.lifecycle
    verdict = gate.allowed(parts.gate_state())
    for _ in range(verdict.num_allowed if gate.is_sync else min(1, verdict.num_allowed)):
        number = lifecycle.table.next_number
        version = parts.run.version
        shunned = () if gate.is_sync else sorted({*absent, *parts.members.absent_envs()})
        make = parts.curriculum.make_group
        lifecycle.open(make(number, version=version, now=now, shunned=shunned))
    return verdict.reason


def lease(group: GroupRecord, episode: EpisodeRecord, *, deadline_s: float) -> Lease:
    """Return the lease message for a granted episode."""
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
        horizon_unit=episode.horizon_unit,
        max_turns=episode.max_turns,
        horizon_stage=group.horizon_stage,
        distance=group.distance,
        distance_stage=group.distance_stage,
        opened_at_version=group.opened_at_version,
        deadline_s=deadline_s,
    )

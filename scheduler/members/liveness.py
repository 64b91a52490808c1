"""Liveness of the roles: hellos, heartbeats and timeouts, and their effect on leases.

An episode that an actor no longer holds is issued again. A straggler is an episode that takes far
too long: its actor must abandon it, and only then is it issued again.

Example: actor-0 holds g/0 and g/1, and two of its heartbeats list only g/0 -> g/1 is issued again.
Its heartbeats stop -> both are issued again, and the first actor to list one of them keeps it.
While the learner is silent, the scheduler cannot find out whether g/1 was delivered, so it does not
issue g/1 again.
"""

import logging

from common.wire.messages import Goodbye, Heartbeat, Hello
from scheduler.components import Components
from scheduler.episodes.table import EpisodePhase, EpisodeRecord, GroupRecord
from scheduler.members.members import RunMember

logger = logging.getLogger(__name__)

AWAY_FACTOR = 1.5
MAX_MISSED = 2  # Consecutive heartbeats that omit a lease before it counts as lost.


def hello(parts: Components, message: Hello, now: float) -> None:
    """Register a role; reissue the episodes of an earlier process with the same name."""
    if parts.members.hello(message, now):
        logger.warning("restarted role=%s name=%s", message.role, message.name)
        parts.lifecycle.lose_all(message.name, "actor_restarted")
        return
    for episode in parts.lifecycle.leases.of(message.name):
        parts.lifecycle.identify(episode, message.incarnation)
        if episode.incarnation != message.incarnation:
            parts.lifecycle.lose(episode, "actor_restarted")


def goodbye(parts: Components, message: Goodbye, now: float) -> None:
    """Remove a role and reissue its episodes. A goodbye of an earlier process is ignored."""
    if parts.members.leave(message, now):
        logger.info("left role=%s name=%s", message.role, message.name)
        parts.lifecycle.lose_all(message.name, "actor_left")


def heartbeat(parts: Components, message: Heartbeat, now: float) -> list[str]:
    """Record the state of a role; return the episodes that it should not wait for or play."""
    member = parts.members.heartbeat(message, now)
    if message.role == "actor":
        return _renew(parts, member, message.running, now)
    size = parts.gate.groups.size
    return parts.lifecycle.table.given_up_ids(message.running, group_size=size)


def tick(parts: Components, now: float) -> None:
    """Reissue the episodes of dead and silent members and of overdue leases."""
    for member in parts.members.newly_silent(now):
        logger.warning(
            "silent role=%s name=%s: its episodes are issued again", member.role, member.name
        )
        parts.lifecycle.lose_all(member.name, "actor_silent")
    for member in parts.members.expire(now):
        logger.warning("dead role=%s name=%s", member.role, member.name)
        parts.lifecycle.lose_all(member.name, "actor_dead")
    overdue = (each for each in parts.lifecycle.leases if each.deadline < now)
    for episode in sorted(overdue, key=lambda each: each.lease_number, reverse=True):
        parts.lifecycle.lose(episode, "lease_deadline")
    if parts.notice(now):
        parts.signal.log(now, parts.success.mean)


def _renew(parts: Components, member: RunMember, running: list[str], now: float) -> list[str]:
    """Renew the leases that an actor lists, count the missed ones; return those to abandon."""
    revoked = [episode_id for episode_id in running if not _keep(parts, member, episode_id, now)]
    leased = parts.lifecycle.leases.of(member.name)
    listed = set(running)
    if unlisted := [episode for episode in leased if episode.episode_id not in listed]:
        _miss(parts, unlisted, now)
    return revoked


def _miss(parts: Components, unlisted: list[EpisodeRecord], now: float) -> None:
    """Process the leases that are missing from an actor's heartbeat."""
    # The learner may already have such an episode. The limit is longer than the time after which
    # a silent learner is detected.
    limit_s = max(parts.members.dead_after_s / 2, AWAY_FACTOR * parts.members.silent_after_s)
    is_learner_away = parts.members.is_learner_away(now)
    for episode in reversed(unlisted):
        # The learner may have it, but cannot report it now.
        if is_learner_away and not episode.is_revoked:
            parts.lifecycle.renew(episode, now=now)
            continue
        parts.lifecycle.count_missed_beat(episode)
        if episode.is_revoked:
            parts.lifecycle.lose(episode, "straggler")
        elif episode.num_missed >= MAX_MISSED and now - episode.listed_at >= limit_s:
            parts.lifecycle.lose(episode, "lost_by_actor")


def _keep(parts: Components, member: RunMember, episode_id: str, now: float) -> bool:
    """Renew one listed episode; False if the actor should abandon it."""
    entry = parts.lifecycle.table.find(episode_id)
    if entry is None:
        return False
    group, episode = entry
    match episode.state:
        case EpisodePhase.LEASED:
            if episode.actor != member.name:
                return False
            if not episode.is_revoked and _is_straggler(parts, group, episode, now):
                parts.lifecycle.revoke(episode)
            if episode.is_revoked:
                return False
            parts.lifecycle.renew(episode, now=now)
        case EpisodePhase.QUEUED:  # The lease was wrongly declared lost.
            if episode.num_issues == 0:
                return False
            parts.lifecycle.reclaim(episode, member, now=now)
        case EpisodePhase.ARRIVED:  # A first issue only waits for its acknowledgement.
            return episode.num_issues <= 1
        case EpisodePhase.SETTLED:
            return False
    return True


def _is_straggler(
    parts: Components, group: GroupRecord, episode: EpisodeRecord, now: float
) -> bool:
    """True if the episode takes far longer than most of its environment and horizon.

    Without a learner no episode is acknowledged, so none counts as a straggler.
    """
    cfg = parts.gate.groups
    if cfg.straggler_factor == 0 or not group.is_train or episode.granted_at is None:
        return False
    if now - episode.granted_at <= cfg.straggler_min_s:
        return False
    usual_s = parts.pace.episode_s(episode.env, episode.horizon)
    if usual_s is None or not parts.members.alive("learner"):
        return False
    limit_s = max(cfg.straggler_min_s, cfg.straggler_factor * usual_s)
    if now - episode.granted_at <= limit_s:
        return False
    logger.warning(
        "straggler episode=%s actor=%s after_s=%.1f usual_s=%.1f",
        episode.episode_id,
        episode.actor,
        now - episode.granted_at,
        usual_s,
    )
    return True

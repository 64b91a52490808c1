"""Who is there and what each of them plays: hello, heartbeats, deaths, and what follows for leases.

An episode that an actor no longer has is issued again. One that the actor has for far too long is
a straggler: the actor is told to abandon it, and only when it has done so is it issued again.
"""

import logging

from common.config.run_config import RunConfig
from common.wire.messages import EpisodeKind, Heartbeat, Hello
from learner.scheduler.episodes.lifecycle import Books
from learner.scheduler.episodes.table import Episode, EpisodeState, Group
from learner.scheduler.members.members import Member, Members

logger = logging.getLogger(__name__)

MAX_MISSED = 2  # heartbeats in a row that may not list a lease before it counts as lost


class RollCall:
    """Keeps the leases in step with what the actors say that they do.

    Example: actor-0 holds g/0 and g/1 and lists g/0 only, twice -> g/1 is issued again. It falls
    silent -> both are, and the first to list one of them again keeps it.
    """

    def __init__(self, cfg: RunConfig, books: Books, members: Members) -> None:
        self._dead_after_s = cfg.scheduler.dead_after_s
        self._straggler_factor = cfg.groups.straggler_factor
        self._straggler_min_s = cfg.groups.straggler_min_s
        self._books = books
        self._members = members

    def hello(self, message: Hello, now: float) -> None:
        """Enter a role; what an earlier process of its name held is issued again."""
        if self._members.hello(message, now):
            logger.warning("restarted role=%s name=%s", message.role, message.name)
            self._lose_all(message.name, "actor_restarted")
            return
        for episode in self._books.leases.leased_to(message.name):
            episode.incarnation = episode.incarnation or message.incarnation
            if episode.incarnation != message.incarnation:
                self._books.lose(episode, "actor_restarted")

    def heartbeat(self, message: Heartbeat, now: float) -> list[str]:
        """Note what a role does; return the episodes that it should not wait for or play."""
        member = self._members.heartbeat(message, now)
        if message.role == "actor":
            return self._renew(member, message.running, now)
        return self._books.given_up_ids(message.running)

    def tick(self, now: float) -> None:
        """Issue again what the dead and the overdue hold."""
        for member in self._members.bury(now):
            logger.warning("dead role=%s name=%s", member.role, member.name)
            self._lose_all(member.name, "actor_dead")
        for episode in reversed(self._books.leases.overdue(now)):
            self._books.lose(episode, "lease_deadline")

    def _lose_all(self, actor: str, cause: str) -> None:
        for episode in reversed(self._books.leases.leased_to(actor)):  # requeued in their order
            self._books.lose(episode, cause)
        self._books.leases.disown(actor)

    def _renew(self, member: Member, running: list[str], now: float) -> list[str]:
        """Renew what an actor lists, miss what it does not; return what it should abandon."""
        revoked = [episode_id for episode_id in running if not self._keep(member, episode_id, now)]
        listed = set(running)
        patience_s = self._dead_after_s / 2
        for episode in reversed(self._books.leases.leased_to(member.name)):
            if episode.episode_id in listed:
                continue
            episode.num_missed += 1
            if episode.is_revoked:
                self._books.lose(episode, "straggler")
            elif episode.num_missed >= MAX_MISSED and now - episode.listed_at >= patience_s:
                self._books.lose(episode, "lost_by_actor")
        return revoked

    def _keep(self, member: Member, episode_id: str, now: float) -> bool:
        """Renew one listed episode; False if the actor should abandon it."""
        leases = self._books.leases
        found = self._books.table.find(episode_id)
        if found is None:
            return False
        group, episode = found
        match episode.state:
            case EpisodeState.LEASED:
                if episode.actor != member.name:
                    return False
                episode.is_revoked = episode.is_revoked or self._is_straggler(group, episode, now)
                if episode.is_revoked:
                    return False
                leases.renew(episode, now=now)
            case EpisodeState.QUEUED:  # thought lost, and here it is
                if episode.num_issues == 0:
                    return False
                leases.lease(episode, actor=member.name, incarnation=member.incarnation, now=now)
            case EpisodeState.ARRIVED:  # on its first issue it only waits to be acknowledged
                return episode.num_issues <= 1
            case EpisodeState.SETTLED:
                return False
        return True

    def _is_straggler(self, group: Group, episode: Episode, now: float) -> bool:
        """True if it takes far longer than nearly all of its environment and horizon.

        Without a learner nothing is acknowledged, so then nobody is late.
        """
        if self._straggler_factor == 0 or group.kind is not EpisodeKind.TRAIN:
            return False
        usual_s = self._books.pace.episode_s(episode.env, episode.horizon)
        if usual_s is None or episode.granted_at is None or not self._members.alive("learner"):
            return False
        limit_s = max(self._straggler_min_s, self._straggler_factor * usual_s)
        if now - episode.granted_at <= limit_s:
            return False
        logger.warning(
            "straggler episode=%s actor=%s after_s=%.1f usual_s=%.1f",
            *(episode.episode_id, episode.actor, now - episode.granted_at, usual_s),
        )
        return True

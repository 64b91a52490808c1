"""Applies the learner's reports to all counts and means of the run."""

from collections import defaultdict

from common.wire.messages import EpisodeSeen, GroupArrived, Outcomes
from scheduler.components import Components
from scheduler.episodes.lifecycle import Arrived


def take(parts: Components, message: Outcomes, *, now: float) -> None:
    """Process one report."""
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
    for each in seen:
        arrived = parts.lifecycle.arrive(each)
        if arrived is None:
            continue
        if not each.end_reason.is_infrastructure_failure:
            _count(parts, each, arrived)
        if arrived.actor:
            by_actor[arrived.actor].append((each.wall_s, arrived))
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

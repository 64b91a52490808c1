"""What the learner reports: every count and mean of the run that follows from it."""

from dataclasses import dataclass

from common.wire.messages import EpisodeSeen, GroupArrived, Outcomes
from learner.scheduler.components import Components
from learner.scheduler.episodes.lifecycle import Arrived

Ended = list[tuple[float, Arrived]]  # seconds that the episode took


@dataclass(frozen=True, slots=True)
class LearnerReports:
    """Moves episodes and groups on, and keeps pace, curriculum and averages in step."""

    parts: Components

    def take(self, message: Outcomes, *, now: float) -> None:
        """Take one report.

        Raises:
            LedgerError: two outcomes for one episode.
            LongstrideError: too many episodes failed by infrastructure.
        """
        self.parts.lifecycle.ledger.num_duplicates += message.num_duplicates
        self._see_all(message.seen)
        for group in message.groups:
            self._complete(group, now)
        for outcome in message.outcomes:
            self.parts.lifecycle.report(outcome)

    def _see_all(self, seen: list[EpisodeSeen]) -> None:
        """Take in episodes; those that one message names ended at about the same time."""
        by_actor: dict[str, Ended] = {}
        for each in seen:
            arrived = self.parts.lifecycle.arrive(each)
            if arrived is None:
                continue
            if not each.end_reason.is_infrastructure_failure:
                self._count(each, arrived)
            if arrived.actor:
                by_actor.setdefault(arrived.actor, []).append((each.wall_s, arrived))
        for actor, ended in by_actor.items():
            num_held = self.parts.lifecycle.leases.num_of(actor) + len(ended)
            for wall_s, arrived in ended:
                episode = arrived.episode
                usual_s = self.parts.pace.median_s(episode.env, episode.horizon)
                self.parts.members.finished(
                    actor, wall_s=wall_s, num_held=num_held, usual_s=usual_s
                )

    def _count(self, seen: EpisodeSeen, arrived: Arrived) -> None:
        """Count an episode that says something about the policy."""
        group, episode = arrived.group, arrived.episode
        if not group.is_train:
            self.parts.success.evaluation.add(group.group_id, seen)
            return
        self.parts.success.train.add(f"{episode.env}/{episode.subset}", seen)
        self.parts.curriculum.see(seen, group, episode)
        self.parts.pace.add_episode(episode.env, episode.horizon, seen.wall_s)

    def _complete(self, message: GroupArrived, now: float) -> None:
        group = self.parts.lifecycle.complete(message)
        if group is not None:
            seconds = None if group.opened_at is None else max(0.0, now - group.opened_at)
            self.parts.pace.add_group(seconds, has_signal=message.is_ready)

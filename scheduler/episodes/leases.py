"""An index of the current leases by actor; it repeats information from the table of episodes."""

from collections.abc import Iterable, Iterator

from scheduler.episodes.table import EpisodePhase, EpisodeRecord


class LeaseIndex:
    """Finds leased episodes without a scan of the table. Only `EpisodeLifecycle` writes it."""

    def __init__(self) -> None:
        self._by_actor: dict[str, dict[str, EpisodeRecord]] = {}

    def rebuild(self, episodes: Iterable[EpisodeRecord]) -> None:
        """Rebuild the index from all episodes."""
        self._by_actor = {}
        leased = (e for e in episodes if e.state is EpisodePhase.LEASED)
        for episode in sorted(leased, key=lambda e: e.lease_number):
            self.add(episode)

    def add(self, episode: EpisodeRecord) -> None:
        """Add an episode that its actor now holds."""
        self._by_actor.setdefault(episode.actor, {})[episode.episode_id] = episode

    def remove(self, episode: EpisodeRecord) -> None:
        """Remove an episode whose lease has ended."""
        held = self._by_actor[episode.actor]
        del held[episode.episode_id]
        if not held:
            del self._by_actor[episode.actor]

    def __iter__(self) -> Iterator[EpisodeRecord]:
        return (episode for held in self._by_actor.values() for episode in held.values())

    def __len__(self) -> int:
        return sum(len(held) for held in self._by_actor.values())

    def of(self, actor: str) -> list[EpisodeRecord]:
        """Return the episodes leased to this actor, in the order of their leases."""
        return list(self._by_actor.get(actor, {}).values())

    def num_of(self, actor: str) -> int:
        """Return how many episodes are leased to this actor."""
        return len(self._by_actor.get(actor, ()))

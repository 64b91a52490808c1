"""Where the roles are reached: each tells the scheduler, and the scheduler tells the others."""

from common.wire.join_messages import Directory, HubPlace
from common.wire.messages import Heartbeat, Hello


class Registry:
    """The one list of addresses. Nothing of it is saved: who lives says hello to a new scheduler.

    Example: a learner says hello with its addresses -> the directory is number 2. An actor's
    heartbeat says that it knows number 1 -> it is sent number 2, as often as it takes.
    """

    def __init__(self, hubs: list[HubPlace]) -> None:
        self.directory = Directory(number=1, learner="", weights="", hubs=hubs)

    def hear(self, message: object) -> Directory | None:
        """Note what a message says of addresses; return what its sender should know, if it asks."""
        if not isinstance(message, Hello | Heartbeat):
            return None
        if isinstance(message, Hello) and message.addresses:
            self._note(message.addresses)
        is_asked = message.directory >= 0
        return self.directory if is_asked and message.directory != self.directory.number else None

    def _note(self, addresses: dict[str, str]) -> None:
        known = self.directory
        learner = addresses.get("learner", known.learner)
        weights = addresses.get("weights", known.weights)
        if (learner, weights) != (known.learner, known.weights):
            self.directory = Directory(
                number=known.number + 1, learner=learner, weights=weights, hubs=known.hubs
            )

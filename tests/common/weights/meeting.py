"""A rendezvous for tests: served in this process, reached over its sockets."""

from typing import Any

from common.weights.rendezvous import GroupStore, StoreConnection, StoreServer

HOST = "127.0.0.1"


NOWHERE: dict[str, Any] = {  # Fields of an offer that are not used.
    "store_host": HOST,
    "store_port": 1,
    "store_public": "",
    "store_secret": "",
    "group_key": "",
}


class Meeting:
    """A server with one open group."""

    def __init__(self) -> None:
        self.server = StoreServer(HOST)
        self.group = self.server.open_group()

    def store(self, *, timeout_s: float = 60.0) -> GroupStore:
        """A member's side, with a connection of its own."""
        return GroupStore(StoreConnection(self.server.place), self.group, timeout_s=timeout_s)

    def of_offer(self) -> dict[str, Any]:
        """Return the fields of an offer for this rendezvous."""
        place = self.server.place
        return {
            "store_host": HOST,
            "store_port": place.port,
            "store_public": place.public,
            "store_secret": place.secret,
            "group_key": self.group,
        }

    def close(self) -> None:
        """The learner is gone."""
        self.server.close()

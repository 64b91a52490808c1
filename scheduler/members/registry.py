"""The registry of addresses: roles send theirs to the scheduler, which sends all to the actors."""

import logging
from dataclasses import dataclass, field, replace
from typing import Any

from common.wire.addresses import SAME_MACHINE
from common.wire.messages import (
    OWN_HUB,
    Directory,
    Heartbeat,
    Hello,
    HubGoodbye,
    HubHello,
    HubNoted,
    HubPlace,
    RanksPlace,
    RanksRequest,
    Rejected,
)

logger = logging.getLogger(__name__)

FORGET_S = 3600.0  # Seconds after which a removed hub is no longer shown.


@dataclass(slots=True)
class _Hub:
    """A hub, which sends a hello periodically."""

    hello: HubHello
    sender: bytes
    heard_at: float
    num_restarts: int = 0  # Number of earlier processes with the same name.
    gone: str = ""  # Reason for the removal from the directory; "" for a live hub.


@dataclass(slots=True)
class AddressRegistry:
    """The only list of addresses. It is not saved: each role sends a hello to a new scheduler.

    Example: a learner's hello contains its addresses -> the directory has number 2. An actor's
    heartbeat contains number 1 -> the actor is sent directory 2, after each such heartbeat. A hub
    falls silent -> directory 3 is without it.
    """

    dead_after_s: float  # Seconds of silence after which a hub is removed from the directory.
    # Hubs outside the run; they never expire.
    fixed: list[HubPlace] = field(default_factory=list[HubPlace])
    directory: Directory = field(
        default_factory=lambda: Directory(number=1, learner="", weights="", hubs=[])
    )
    # Place of the learner's rank 0, for its other nodes.
    ranks: RanksPlace = field(default_factory=lambda: RanksPlace(address="", incarnation=""))
    _hubs: dict[str, _Hub] = field(default_factory=dict[str, _Hub])  # Live hubs by name.
    # Recently removed hubs, kept for the status.
    _gone: dict[str, _Hub] = field(default_factory=dict[str, _Hub])
    # Digest of the items of each environment, by the first hub or by the run's own.
    _content: dict[str, str] = field(default_factory=dict[str, str])

    def hear(self, message: object) -> Directory | None:
        """Record the addresses in a message; return the directory if the sender's is outdated."""
        if not isinstance(message, Hello | Heartbeat):
            return None
        if isinstance(message, Hello) and message.role == "learner" and message.addresses:
            directory = self.directory
            addresses = message.addresses
            learner = addresses.get("learner", directory.learner)
            self._change(learner, addresses.get("weights", directory.weights), directory.hubs)
        is_asked = message.directory >= 0
        return self.directory if is_asked and message.directory != self.directory.number else None

    def hear_hub(
        self, message: object, sender: bytes, now: float, *, is_finished: bool = False
    ) -> HubNoted | Rejected | None:
        """Process a message of a hub; return the answer to a hello."""
        match message:
            case HubHello():
                if others := self._other_items(message):
                    if message.name in self._hubs:
                        self._forget(message.name, "other items")
                    return Rejected(
                        reason=f"its items of {', '.join(others)} are not those of the run; give"
                        " this machine the same data files, settings and versions"
                    )
                hub = self._hubs.get(message.name)
                if hub is None or hub.hello != message:
                    logger.info("registered hub name=%s url=%s", message.name, message.place.url)
                before = hub or self._gone.pop(message.name, None)
                is_other = before and before.hello.incarnation != message.incarnation
                num = before.num_restarts + bool(is_other) if before else 0
                self._hubs[message.name] = _Hub(message, sender, now, num)
                self._renew_hubs()
                return HubNoted(is_finished=is_finished)
            case HubGoodbye():
                hub = self._hubs.get(message.name)
                if hub is not None and hub.hello.incarnation == message.incarnation:
                    self._forget(message.name, "left")
            case _:
                pass
        return None

    def _other_items(self, hello: HubHello) -> list[str]:
        """Return the environments of a hub whose items differ from those of the other hubs.

        An item has the same number on each hub, so a group would mix the episodes of two items.
        """
        if hello.name == OWN_HUB:  # The run's record has already been compared with its items.
            self._content |= hello.content
            return []
        content = hello.content | self._content
        others = [env for env, digest in hello.content.items() if content[env] != digest]
        if not others:  # A refused hub decides about no environment.
            self._content = content
        return others

    def hear_ranks(self, message: object, *, is_finished: bool = False) -> RanksPlace | None:
        """Record the place of rank 0; return the answer to a node that requests it."""
        if isinstance(message, RanksPlace):
            self.ranks = message
        elif isinstance(message, RanksRequest):
            return replace(self.ranks, is_finished=is_finished)
        return None

    def expire(self, now: float) -> None:
        """Remove silent hubs from the directory; the next hello of a hub adds it again."""
        for name, hub in list(self._hubs.items()):
            if now - hub.heard_at > self.dead_after_s:
                self._forget(name, "silent")
        for name, hub in list(self._gone.items()):
            if now - hub.heard_at > FORGET_S:
                del self._gone[name]

    def wake(self, now: float) -> None:
        """Extend all deadlines by the time in which this process was suspended."""
        for hub in self._hubs.values():
            hub.heard_at = now

    def add_fixed(self, place: HubPlace) -> None:
        """Add a hub outside the run."""
        self.fixed.append(place)
        self._renew_hubs()

    def has_hub(self, name: str) -> bool:
        """Return whether a live hub has this name."""
        return name in self._hubs

    def refused(self) -> dict[str, int]:
        """Return how many messages the live hubs refused, by "name/address/reason"."""
        hellos = [hub.hello for hub in self._hubs.values()]
        return {f"{h.name}/{who}": num for h in hellos for who, num in h.refused.items()}

    @property
    def hub_senders(self) -> list[bytes]:
        """The ROUTER identities of the live hubs."""
        return [hub.sender for hub in self._hubs.values()]

    def report(self, now: float) -> list[dict[str, Any]]:
        """Return live and recently removed hubs for the status, without their tokens."""
        fixed = [
            {"name": place.url, "role": "envhub", "url": place.url, "envs": place.envs}
            for place in self.fixed
        ]
        return fixed + [
            {
                "name": hub.hello.name,
                "role": "envhub",
                "incarnation": hub.hello.incarnation,
                "node": hub.hello.node,
                "url": hub.hello.place.url.replace(f"/{SAME_MACHINE}:", f"/{hub.hello.node}:"),
                "envs": hub.hello.place.envs,
                "num_restarts": hub.num_restarts,
                "gone": hub.gone,
                "last_seen_s": round(now - hub.heard_at, 3),
                "num_sessions": use.num_sessions,
                "max_sessions": use.max_sessions,
                "rss_bytes": use.rss_bytes,
                "cpu_s": use.cpu_s,
                "paused": dict(hub.hello.paused),
            }
            for hub in (*self._hubs.values(), *self._gone.values())
            for use in (hub.hello.use,)
        ]

    def saved_hubs(self, token: str) -> list[dict[str, Any]]:
        """Return the hubs that have the run's own token, without it, for the next scheduler."""
        hellos = [hub.hello for hub in self._hubs.values() if hub.hello.place.token == token]
        return [
            {
                "name": hello.name,
                "incarnation": hello.incarnation,
                "url": hello.place.url,
                "envs": hello.place.envs,
            }
            for hello in hellos
        ]

    def _forget(self, name: str, reason: str) -> None:
        """Remove a hub, and keep it for the status."""
        logger.warning("removed hub name=%s reason=%s", name, reason)
        self._gone[name] = self._hubs.pop(name)
        self._gone[name].gone = reason
        self._renew_hubs()

    def _renew_hubs(self) -> None:
        """Update the hubs of the directory."""
        places = [*self.fixed, *(hub.hello.place for hub in self._hubs.values())]
        self._change(self.directory.learner, self.directory.weights, places)

    def _change(self, learner: str, weights: str, hubs: list[HubPlace]) -> None:
        """Replace the directory if its content changes."""
        directory = self.directory
        if (learner, weights, hubs) != (directory.learner, directory.weights, directory.hubs):
            self.directory = Directory(
                number=directory.number + 1, learner=learner, weights=weights, hubs=hubs
            )

"""Senders of a ROUTER: the owner of each connection's key, refused messages, and rate limits."""

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import zmq

from common.wire.access.bounds import shown
from common.wire.access.identities import RUN, Identities, Identity
from common.wire.messages import SCHEMA_VERSION

logger = logging.getLogger(__name__)

MAX_SENDERS = 100_000  # Maximum number of records. A reconnected peer is a new sender.
RATE = 5_000  # Sustained messages per second of one connection.
BURST = 50_000  # Messages that one connection may send at once.
MAX_REFUSALS = 100  # Refused messages after which a connection is muted.
MUTED_S = 10.0  # Seconds for which messages of a muted connection are dropped.
REFRESH_S = 1.0  # Seconds between two polls of the list of keys.
LOG_FIRST = 3  # Number of first refusals of a peer that are logged, before every 10,000th.
MAX_SHOWN = 50  # Maximum number of peers in a report, those with most refusals first.


@dataclass(slots=True)
class KeyCounts:
    """Counts of one key, over all its connections."""

    num_invalid: int = 0  # Messages that could not be decoded or were out of bounds.
    num_forbidden: int = 0  # Messages that the key does not allow.
    num_dropped: int = 0  # Messages dropped undecoded, over the rate limit or while muted.
    num_unsent: int = 0  # Answers that could not be sent.
    last_reason: str = ""

    @property
    def num_refused(self) -> int:
        return self.num_invalid + self.num_forbidden + self.num_dropped

    def counts(self) -> dict[str, int]:
        """Return the counts by reason."""
        return {
            "invalid": self.num_invalid,
            "forbidden": self.num_forbidden,
            "dropped": self.num_dropped,
            "unsent": self.num_unsent,
        }


@dataclass(slots=True)
class Sender:
    """One connection."""

    identity: Identity
    account: KeyCounts
    descriptor: int = -1  # File descriptor of the connection.
    version: int = SCHEMA_VERSION  # Schema version of its last message.
    num_refusals: int = 0
    allowance: float = BURST
    refilled_at: float = field(default_factory=time.monotonic)
    muted_until: float = 0.0


class Peers:
    """The senders of one ROUTER. Use from its thread.

    Example: a connection sends 100 invalid messages. Each one is counted, answered with
    `Rejected`. After too many of them the connection is muted for ten seconds: its messages are
    counted and dropped.
    """

    def __init__(self, identities: Identities) -> None:
        self._identities = identities
        self._senders: dict[bytes, Sender] = {}
        self._accounts: dict[str, KeyCounts] = {}  # Accounts by the name of the key's owner.
        self._unknown = Identity("stranger", "node", "", is_revoked=True)
        self._refresh_at = 0.0

    def register_sender(self, sender: bytes, first_frame: Any) -> Sender:
        """Return the record of a sender, from the key with which its connection was accepted.

        A ROUTER identity that begins with a zero byte is unique to its connection. A peer can
        choose any other identity, so the key is checked again for each message.
        """
        registered = self._senders.get(sender)
        if registered is not None and sender[:1] == b"\0":
            return registered
        public = str(first_frame.get("User-Id") or "")
        if registered is not None and registered.identity.public == public:
            return registered
        identity = self._identities.find(public)
        if identity is None and self._identities.refresh():
            identity = self._identities.find(public)
        identity = identity or self._unknown
        if len(self._senders) >= MAX_SENDERS:
            self._senders.clear()
        account = self._accounts.setdefault(identity.name, KeyCounts())
        self._senders[sender] = made = Sender(identity, account, _descriptor(first_frame))
        return made

    def owner_of(self, sender: bytes) -> Identity:
        """Return the owner of a sender's key."""
        registered = self._senders.get(sender)
        return self._unknown if registered is None else registered.identity

    def version_of(self, sender: bytes) -> int:
        """Return the schema version of a sender's last message."""
        registered = self._senders.get(sender)
        return SCHEMA_VERSION if registered is None else registered.version

    def may_send(self, sender: Sender) -> bool:
        """Count a message; False if it must be dropped undecoded."""
        sender.allowance -= 1
        if sender.allowance >= 0 and not sender.muted_until:
            return True
        now = time.monotonic()
        if sender.muted_until and now >= sender.muted_until:
            sender.muted_until, sender.num_refusals = 0.0, 0
        if sender.allowance < 0:
            sender.allowance += (now - sender.refilled_at) * RATE
            sender.allowance, sender.refilled_at = min(sender.allowance, BURST), now
        if sender.muted_until or sender.allowance < 0:
            sender.account.num_dropped += 1
            return False
        return True

    def count_refusal(self, sender: Sender, reason: str, *, is_forbidden: bool) -> None:
        """Count a refused message, and mute its connection after too many."""
        account = sender.account
        account.num_forbidden += is_forbidden
        account.num_invalid += not is_forbidden
        account.last_reason = reason[:300]
        num = account.num_refused
        if num <= LOG_FIRST or num % 10_000 == 0:
            logger.warning(
                "refused message peer=%s num=%d reason=%s", *self._log_fields(sender), reason
            )
        sender.num_refusals += 1
        if sender.num_refusals >= MAX_REFUSALS and not sender.muted_until:
            sender.muted_until = time.monotonic() + MUTED_S
            logger.warning("muted for_s=%g peer=%s num=%d", MUTED_S, *self._log_fields(sender))

    def _log_fields(self, sender: Sender) -> tuple[str, int]:
        """Return the owner's name and the number of refusals, for a log line."""
        return shown(sender.identity.name), sender.account.num_refused

    def note_refused(self, sender: bytes, reason: str) -> None:
        """Count a valid message that its receiver refused."""
        registered = self._senders.get(sender)
        if registered is not None:
            self.count_refusal(registered, reason, is_forbidden=True)

    def note_unsent(self, receiver: bytes) -> None:
        """Count an answer that could not be sent."""
        registered = self._senders.get(receiver)
        if registered is not None:
            registered.account.num_unsent += 1

    def refresh(self) -> None:
        """Poll the list of keys once a second. Connections of a revoked key lose their rights."""
        now = time.monotonic()
        if now < self._refresh_at:
            return
        self._refresh_at = now + REFRESH_S
        if not self._identities.refresh():
            return
        for sender in self._senders.values():
            if sender.identity is not self._unknown:
                identity = self._identities.find(sender.identity.public)
                sender.identity = identity or self._unknown

    @property
    def num_invalid(self) -> int:
        """Number of messages that could not be decoded."""
        return sum(account.num_invalid for account in self._accounts.values())

    def report(self) -> dict[str, dict[str, Any]]:
        """Return the counts of refusals by peer name, for peers with at least one."""
        return {
            ("the run's own key" if name == RUN else name): {
                **account.counts(),
                "last_reason": account.last_reason,
            }
            for name, account in self._refused_accounts()
        }

    def _refused_accounts(self) -> list[tuple[str, KeyCounts]]:
        """Return the keys with the most refused messages."""
        accounts = list(self._accounts.items())  # A copy: another thread may add an account.
        refused = [(n, a) for n, a in accounts if a.num_refused or a.num_unsent]
        return sorted(refused, key=lambda each: -each[1].num_refused)[:MAX_SHOWN]

    def num_refused(self) -> dict[str, int]:
        """Return the number of refused messages and unsent answers, by "peer/reason"."""
        return {
            f"{name}/{kind}": num
            for name, account in self._refused_accounts()
            for kind, num in account.counts().items()
            if num
        }


def _descriptor(frame: Any) -> int:
    """Return the file descriptor of the connection that received a frame, -1 if unknown."""
    try:
        return int(frame.get(zmq.SRCFD))
    except (zmq.ZMQError, ValueError):
        return -1

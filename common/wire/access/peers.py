"""Who sends what through a ROUTER: whose key it is, what was refused, and how much may come."""

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import zmq

from common.wire.access.bounds import shown
from common.wire.access.identities import RUN, Identities, Identity

logger = logging.getLogger(__name__)

MAX_SENDERS = 100_000  # remembered; a connection that broke is another sender afterwards
RATE = 5_000  # messages a second that one connection may send for long...
BURST = 50_000  # ...and at once
MAX_STRIKES = 100  # refused messages of one connection...
MUTED_S = 10.0  # ...after which it is not listened to for so long
REFRESH_S = 1.0  # between looks for keys that were taken back
LOG_FIRST = 3  # refusals of one peer that are logged, and then every 10,000th
MAX_SHOWN = 50  # peers in a report, those with most refusals first


@dataclass(slots=True)
class Account:
    """What one key's holder did, over all its connections."""

    num_invalid: int = 0  # not decoded: no message, or beyond its bounds
    num_forbidden: int = 0  # not its to say
    num_dropped: int = 0  # not looked at: too many came, or too many had been refused
    num_unsent: int = 0  # answers that it did not take
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
    account: Account
    descriptor: int = -1  # of its connection
    num_strikes: int = 0
    allowance: float = BURST
    refilled_at: float = field(default_factory=time.monotonic)
    muted_until: float = 0.0


class Peers:
    """The senders of one ROUTER. For its thread.

    Example: a connection sends what no message is, 100 times -> each is counted, answered and
    struck; for ten seconds nothing of it is decoded, only counted, then it may try again.
    """

    def __init__(self, identities: Identities) -> None:
        self._identities = identities
        self._senders: dict[bytes, Sender] = {}
        self._accounts: dict[str, Account] = {}  # by name
        self._nobody = Identity("stranger", "node", "", is_revoked=True)
        self._refresh_at = 0.0

    def meet(self, sender: bytes, first_frame: Any) -> Sender:
        """Return the record of a sender, by the key that its connection was let in with.

        An identity that a peer chose itself may be another peer's by the next message.
        """
        known = self._senders.get(sender)
        if known is not None and sender[:1] == b"\0":
            return known
        public = str(first_frame.get("User-Id") or "")
        if known is not None and known.identity.public == public:
            return known
        identity = self._identities.find(public)
        if identity is None and self._identities.refresh():
            identity = self._identities.find(public)
        identity = identity or self._nobody
        if len(self._senders) >= MAX_SENDERS:
            self._senders.clear()
        account = self._accounts.setdefault(identity.name, Account())
        self._senders[sender] = made = Sender(identity, account, _descriptor(first_frame))
        return made

    def of(self, sender: bytes) -> Identity:
        """Return whose connection it is."""
        known = self._senders.get(sender)
        return self._nobody if known is None else known.identity

    def is_heard(self, sender: Sender) -> bool:
        """Count a message; False if it is to be dropped unread."""
        sender.allowance -= 1
        if sender.allowance >= 0 and not sender.muted_until:
            return True
        now = time.monotonic()
        if sender.muted_until and now >= sender.muted_until:
            sender.muted_until, sender.num_strikes = 0.0, 0
        if sender.allowance < 0:
            sender.allowance += (now - sender.refilled_at) * RATE
            sender.allowance, sender.refilled_at = min(sender.allowance, BURST), now
        if sender.muted_until or sender.allowance < 0:
            sender.account.num_dropped += 1
            return False
        return True

    def strike(self, sender: Sender, reason: str, *, is_forbidden: bool) -> None:
        """Count a message that was refused."""
        account = sender.account
        account.num_forbidden += is_forbidden
        account.num_invalid += not is_forbidden
        account.last_reason = reason[:300]
        num = account.num_refused
        if num <= LOG_FIRST or num % 10_000 == 0:
            logger.warning("refused message peer=%s num=%d reason=%s", *self._say(sender), reason)
        sender.num_strikes += 1
        if sender.num_strikes >= MAX_STRIKES and not sender.muted_until:
            sender.muted_until = time.monotonic() + MUTED_S
            logger.warning("not listening for_s=%g to peer=%s num=%d", MUTED_S, *self._say(sender))

    def _say(self, sender: Sender) -> tuple[str, int]:
        return shown(sender.identity.name), sender.account.num_refused

    def note_refused(self, sender: bytes, reason: str) -> None:
        """Count a message that was valid, and yet refused."""
        known = self._senders.get(sender)
        if known is not None:
            self.strike(known, reason, is_forbidden=True)

    def note_unsent(self, receiver: bytes) -> None:
        """Count an answer that could not be sent."""
        known = self._senders.get(receiver)
        if known is not None:
            known.account.num_unsent += 1

    def refresh(self) -> None:
        """Look, once a second, whether a key was taken back; its connections lose their rights."""
        now = time.monotonic()
        if now < self._refresh_at:
            return
        self._refresh_at = now + REFRESH_S
        if not self._identities.refresh():
            return
        for sender in self._senders.values():
            if sender.identity is not self._nobody:
                found = self._identities.find(sender.identity.public)
                sender.identity = found or self._nobody

    @property
    def num_invalid(self) -> int:
        """Messages that were not decoded."""
        return sum(account.num_invalid for account in self._accounts.values())

    def report(self) -> dict[str, dict[str, Any]]:
        """Return what was refused of whom, by name; nothing of peers that did nothing wrong."""
        return {
            ("the run's own key" if name == RUN else name): {
                **account.counts(),
                "last_reason": account.last_reason,
            }
            for name, account in self._guilty()
        }

    def _guilty(self) -> list[tuple[str, Account]]:
        known = list(self._accounts.items())  # another thread may add one meanwhile
        guilty = [(n, a) for n, a in known if a.num_refused or a.num_unsent]
        return sorted(guilty, key=lambda each: -each[1].num_refused)[:MAX_SHOWN]

    def num_refused(self) -> dict[str, int]:
        """Return how many messages were refused, and answers not taken, by "peer/reason"."""
        return {
            f"{name}/{kind}": num
            for name, account in self._guilty()
            for kind, num in account.counts().items()
            if num
        }


def _descriptor(frame: Any) -> int:
    """Return the file descriptor that a frame came by, -1 if it is not told."""
    try:
        return int(frame.get(zmq.SRCFD))
    except (zmq.ZMQError, ValueError):
        return -1

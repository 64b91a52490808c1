"""The mark of a lease: only the centre makes it, so no actor claims what it was not given."""

import functools
import hashlib
import hmac
from dataclasses import replace
from operator import attrgetter

from common.wire.messages import EpisodeIdentity, LeaseGrant, Trajectory
from common.wire.security import RunKeys

MAC_HEX = 32  # characters
_FIELDS = tuple(name for name in EpisodeIdentity.__dataclass_fields__ if name != "lease_mac")
_get = attrgetter(*_FIELDS)


def lease_key(keys: RunKeys) -> bytes:
    """Return what scheduler and learner make and check marks with; actors cannot derive it."""
    return hmac.digest(keys.server_secret.encode(), b"leases", hashlib.sha256)


def lease_mac(episode: EpisodeIdentity, actor: str, key: bytes) -> str:
    """Return the mark of an episode that was leased to an actor."""
    text = "\0".join((actor, *map(str, _get(episode))))
    keyed = _keyed(key).copy()
    keyed.update(text.encode(errors="surrogatepass"))
    return keyed.hexdigest()[:MAC_HEX]


@functools.lru_cache(maxsize=1)
def _keyed(key: bytes) -> hmac.HMAC:
    """Return what has hashed the key already: a copy costs less than to begin anew."""
    return hmac.new(key, digestmod=hashlib.sha256)


def marked(grant: LeaseGrant, actor: str, key: bytes) -> LeaseGrant:
    """Return a grant whose leases carry their marks."""
    leases = [replace(each, lease_mac=lease_mac(each, actor, key)) for each in grant.leases]
    return LeaseGrant(leases=leases, retry_after_s=grant.retry_after_s, reason=grant.reason)


def is_leased(trajectory: Trajectory, key: bytes) -> bool:
    """Return whether its actor was given this very episode."""
    expected = lease_mac(trajectory, trajectory.actor, key)
    return hmac.compare_digest(expected.encode(), trajectory.lease_mac.encode(errors="replace"))

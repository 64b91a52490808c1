"""MAC of a lease: it proves that the scheduler leased this episode to this actor."""

import functools
import hashlib
import hmac
from dataclasses import replace
from operator import attrgetter

from common.wire.messages import EpisodeIdentity, LeaseGrant, Trajectory
from common.wire.security import RunKeys

MAC_HEX = 32  # Length in hexadecimal characters.
_FIELDS = tuple(name for name in EpisodeIdentity.__dataclass_fields__ if name != "lease_mac")
_get = attrgetter(*_FIELDS)


def lease_key(keys: RunKeys) -> bytes:
    """Return the key with which scheduler and learner compute MACs. Actors cannot derive it."""
    return hmac.digest(keys.server_secret.encode(), b"leases", hashlib.sha256)


def lease_mac(episode: EpisodeIdentity, actor: str, key: bytes) -> str:
    """Return the MAC of an episode that is leased to an actor."""
    text = "\0".join((actor, *map(str, _get(episode))))
    keyed = _keyed(key).copy()
    keyed.update(text.encode(errors="surrogatepass"))
    return keyed.hexdigest()[:MAC_HEX]


@functools.lru_cache(maxsize=1)
def _keyed(key: bytes) -> hmac.HMAC:
    """Return an HMAC object that has hashed the key. Copying it is faster than hashing again."""
    return hmac.new(key, digestmod=hashlib.sha256)


def marked(grant: LeaseGrant, actor: str, key: bytes) -> LeaseGrant:
    """Return a copy of a grant whose leases carry their MACs."""
    leases = [replace(each, lease_mac=lease_mac(each, actor, key)) for each in grant.leases]
    return LeaseGrant(leases=leases, retry_after_s=grant.retry_after_s, reason=grant.reason)


def is_leased(trajectory: Trajectory, key: bytes) -> bool:
    """Return whether the scheduler leased exactly this episode to the trajectory's actor."""
    expected = lease_mac(trajectory, trajectory.actor, key)
    return hmac.compare_digest(expected.encode(), trajectory.lease_mac.encode(errors="replace"))

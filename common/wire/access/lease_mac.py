"""MAC of a lease: it proves that the scheduler leased this episode to this actor."""

import functools
import hashlib
import hmac
from dataclasses import replace
from operator import attrgetter

from common.wire.messages import SCHEMA_VERSION, EpisodeIdentity, Lease, LeaseGrant, Trajectory
from common.wire.security import RunKeys
from common.wire.versions import OLDEST_RECORD, is_in

MAC_HEX = 32  # Length in hexadecimal characters.
_FIELDS = tuple(name for name in EpisodeIdentity.__dataclass_fields__ if name != "lease_mac")
_FIRST = tuple(name for name in _FIELDS if is_in(OLDEST_RECORD, Lease.__name__, name))
_LATER = tuple(name for name in _FIELDS if name not in _FIRST)
_get = attrgetter(*_FIRST)


def lease_key(keys: RunKeys) -> bytes:
    """Return the key with which scheduler and learner compute MACs. Actors cannot derive it."""
    return hmac.digest(keys.server_secret.encode(), b"leases", hashlib.sha256)


def lease_mac(episode: EpisodeIdentity, actor: str, key: bytes) -> str:
    """Return the MAC of an episode that is leased to an actor.

    A field that a later schema version has added counts only if it differs from its default. So the
    MAC of a lease is the same before and after an upgrade.
    """
    text = "\0".join((actor, *map(str, _get(episode)), *_later_of(episode)))
    keyed = _keyed(key).copy()
    keyed.update(text.encode(errors="surrogatepass"))
    return keyed.hexdigest()[:MAC_HEX]


def _later_of(episode: EpisodeIdentity) -> list[str]:
    """Return the later fields that differ from their defaults, as name=value."""
    fields = EpisodeIdentity.__dataclass_fields__
    changed = ((name, getattr(episode, name)) for name in _LATER)
    return [f"{name}={value}" for name, value in changed if value != fields[name].default]


@functools.lru_cache(maxsize=1)
def _keyed(key: bytes) -> hmac.HMAC:
    """Return an HMAC object that has hashed the key. Copying it is faster than hashing again."""
    return hmac.new(key, digestmod=hashlib.sha256)


def marked(
    grant: LeaseGrant, actor: str, key: bytes, *, version: int = SCHEMA_VERSION
) -> LeaseGrant:
    """Return a copy of a grant whose leases carry their MACs.

    Args:
        version: schema version of the actor. Fields that it does not have get their defaults, since
            the trajectory will have them.
    """
    fields = EpisodeIdentity.__dataclass_fields__
    unknown = [name for name in _LATER if not is_in(version, Lease.__name__, name)]
    plain = {name: fields[name].default for name in unknown}
    leases = [replace(each, **plain) if plain else each for each in grant.leases]
    leases = [replace(each, lease_mac=lease_mac(each, actor, key)) for each in leases]
    return LeaseGrant(leases=leases, retry_after_s=grant.retry_after_s, reason=grant.reason)


def is_leased(trajectory: Trajectory, key: bytes) -> bool:
    """Return whether the scheduler leased exactly this episode to the trajectory's actor."""
    expected = lease_mac(trajectory, trajectory.actor, key)
    return hmac.compare_digest(expected.encode(), trajectory.lease_mac.encode(errors="replace"))

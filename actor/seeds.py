"""Seeds of random draws. They are derived from the lease and are equal on all machines."""

import hashlib

from common.wire.messages import EpisodeIdentity, EpisodeKind

SEED_BITS = 63  # Bits of a sampling seed.
SHORT_SEED_BITS = 31  # Bits of a seed for libraries that accept no more.


def draw_seed(*words: int | str, bits: int = SEED_BITS) -> int:
    """Return a seed of `bits` bits that depends on the words alone."""
    text = "/".join(map(str, words))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - bits)


class SamplingSeeds:
    """The sampling seeds of one attempt at an episode, one for each request to the policy.

    A repeated attempt draws the same seeds. In training they depend on the episode id and its seed,
    so that the members of a group differ. In an evaluation they depend on the seed alone, which
    identifies the item and the sample. Two evaluations therefore differ only by their policies.

    Example: the first SamplingSeeds(lease).next() is the seed of the first turn.
    """

    def __init__(self, episode: EpisodeIdentity, *, num_requests: int = 0) -> None:
        """Start after the first `num_requests` requests."""
        is_train = episode.kind is EpisodeKind.TRAIN
        self._stream = (episode.episode_id if is_train else "", episode.seed)
        self._num_requests = num_requests

    def next(self) -> int:
        """Return the seed of the next request."""
        seed = draw_seed("sample", *self._stream, self._num_requests)
        self._num_requests += 1
        return seed


def environment_seed(episode: EpisodeIdentity) -> int:
    """Return the seed for the reset of the environment.

    Members of a training group share it, so that only the policy's actions make their rewards
    differ. In an evaluation it identifies the item and the sample.
    """
    if episode.kind is EpisodeKind.EVAL:
        return episode.seed
    return draw_seed("environment", episode.group_id, episode.item_id, bits=SHORT_SEED_BITS)


def engine_seed(run_seed: int, *, name: str, incarnation: str) -> int:
    """Return the seed of an engine for requests without their own seed.

    It is unique to each start of an actor, even if two actors have the same name.
    """
    return draw_seed("engine", run_seed, name, incarnation, bits=SHORT_SEED_BITS)

"""Seeds of random draws. Each follows from the lease, so that it is the same on any machine."""

import hashlib

from common.wire.messages import EpisodeIdentity, EpisodeKind

SEED_BITS = 63  # of a sampling seed
SHORT_SEED_BITS = 31  # of a seed for libraries that take no more


def draw_seed(*words: int | str, bits: int = SEED_BITS) -> int:
    """Return a seed of so many bits that follows from the words alone."""
    text = "/".join(map(str, words))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - bits)


class SamplingSeeds:
    """The sampling seeds of one play of an episode, one for each request to the policy.

    A repeated play of the episode draws the same. In training the seeds follow from the episode and
    its seed, so that members of a group differ. In an evaluation they follow from the seed alone,
    which is that of an item and its sample: two evaluations differ in the policy, not by chance.

    Example: the first SamplingSeeds(lease).next() is the seed of the first turn.
    """

    def __init__(self, episode: EpisodeIdentity) -> None:
        """Begin with the first request."""
        is_train = episode.kind is EpisodeKind.TRAIN
        self._stream = (episode.episode_id if is_train else "", episode.seed)
        self._num_requests = 0

    def next(self) -> int:
        """Return the seed of the next request."""
        seed = draw_seed("sample", *self._stream, self._num_requests)
        self._num_requests += 1
        return seed


def environment_seed(episode: EpisodeIdentity) -> int:
    """Return the seed that the environment is reset with.

    Members of a training group share it, so that their rewards differ by what the policy did. In an
    evaluation it is the seed of the item and its sample.
    """
    if episode.kind is EpisodeKind.EVAL:
        return episode.seed
    return draw_seed("environment", episode.group_id, episode.item_id, bits=SHORT_SEED_BITS)


def engine_seed(run_seed: int, *, name: str, incarnation: str) -> int:
    """Return the seed of an engine, for requests without a seed of their own.

    Two actors never share it, not even of one name, nor does one that was restarted.
    """
    return draw_seed("engine", run_seed, name, incarnation, bits=SHORT_SEED_BITS)

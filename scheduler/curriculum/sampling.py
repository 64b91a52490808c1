"""Draws items by weight: a pure function of (seed, group number).

The subset follows the weights along a golden-ratio sequence. The sequence keeps the shares of *any*
window of groups near the weights; short blocks of it are shuffled. Inside a subset every item is
visited once per epoch, in an order that a keyed permutation defines.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from common.config.eval import EvalSplit
from common.config.horizon import HorizonUnit
from common.config.tasks import TaskSection
from common.errors import ConfigError
from common.ids import episode_id_of
from scheduler.curriculum.catalogue import HubCatalogue
from scheduler.episodes.table import EpisodeRecord

_SIZE = 1 << 64  # Size of the integer circle that represents [0, 1).
_MASK = _SIZE - 1
_GOLDEN = 0x9E3779B97F4A7C15  # `_SIZE` / golden ratio, made odd.
ONE_BELOW = 1 - 2**-53  # Largest float below 1.
_BLOCK = 8  # Number of consecutive groups that are shuffled together.
_NUM_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One task item by its portable name."""

    env: str
    subset: str
    item_id: str  # "<subset>-<split>-<index>"

    def episode(
        self,
        group_id: str,
        member: int,
        *,
        seed: int,
        horizon: int,
        unit: HorizonUnit = HorizonUnit.TURNS,
        max_turns: int = 0,
    ) -> EpisodeRecord:
        """Return an episode of the item, as a member of a group."""
        return EpisodeRecord(
            episode_id=episode_id_of(group_id, member),
            member=member,
            env=self.env,
            subset=self.subset,
            item_id=self.item_id,
            seed=seed,
            horizon=horizon,
            horizon_unit=unit,
            max_turns=max_turns,
        )


@dataclass(frozen=True, slots=True)
class TrainItems:
    """The training items of a task, in a new order in every epoch."""

    env: str
    subset: str
    num: int
    key: int  # Key of the permutations.

    def at(self, place: int) -> tuple[int, int]:
        """Return (epoch, index) of the item at a place, counted over all epochs."""
        epoch, position = divmod(place, self.num)
        return epoch, permute(position, self.num, key=hash_words(self.key, epoch))

    def item(self, index: int) -> Item:
        """Return the training item with this index."""
        item_id = f"{self.subset}-train-{index}"
        return Item(env=self.env, subset=self.subset, item_id=item_id)


def train_items(
    task: TaskSection, catalogue: HubCatalogue, *, seed: int, bound: int = 0
) -> TrainItems:
    """Return the training items of a task; their order depends only on the run's seed.

    Args:
        bound: most turns that the expert may need for an item; 0: the task's own bound.
    """
    subset = task.items(bound)
    num = catalogue.entry(task.env, subset).num_train
    return TrainItems(task.env, subset, num, hash_words(seed, task.env, subset))


def unbounded(_: str) -> int:
    """Return 0, the distance bound of every environment without a distance curriculum."""
    return 0


@dataclass(frozen=True, slots=True)
class _Slice:
    """The arc [low, high) of the circle that belongs to one task."""

    task: TaskSection
    low: int
    high: int


def hash_words(*words: int | str) -> int:
    """Return 64 well mixed bits of the words; the same on every machine and in every process."""
    state = _GOLDEN
    for word in words:
        state = _mix(state ^ (_digest(word) if isinstance(word, str) else word & _MASK))
    return state


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mix(word: int) -> int:
    """Finalizer of SplitMix64. Source: Steele et al., OOPSLA 2014."""
    word = (word + _GOLDEN) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def permute(position: int, size: int, *, key: int) -> int:
    """Return the image of `position` under a keyed permutation of range(size).

    A Feistel network permutes the next power of four, and is repeated until the value is inside the
    range. It needs constant memory.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    value = position
    while True:
        left = value >> half
        right = value & mask
        for i in range(_NUM_ROUNDS):
            left, right = right, left ^ (_mix(key ^ (i << 56) ^ right) & mask)
        value = (left << half) | right
        if value < size:
            return value


def floor_sum(count: int, modulus: int, slope: int, offset: int) -> int:
    """Return sum of floor((slope * j + offset) / modulus) for j in range(count), in O(log).

    Source: the Euclid-like recursion of Graham, Knuth, Patashnik, Concrete Mathematics, 3.5.
    """
    total = 0
    while count > 0:
        total += (count - 1) * count // 2 * (slope // modulus) + count * (offset // modulus)
        slope = slope % modulus
        offset = offset % modulus
        end = slope * count + offset
        if end < modulus:
            break
        count = end // modulus
        offset = end % modulus
        modulus, slope = slope, modulus
    return total


def member_seed(seed: int, number: int, member: int) -> int:
    """Return the sampling seed of one member of a group; it fits a signed 32-bit integer."""
    return hash_words(seed, "member", number, member) >> 33


class GoldenSequence:
    """Maps a group number to a point of the integer circle [0, 2^64)."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed
        self.offset = hash_words(seed, "offset")

    def place(self, number: int) -> int:
        """Return the place of the number after its block is shuffled."""
        block, position = divmod(number, _BLOCK)
        key = hash_words(self._seed, "block", block)
        return block * _BLOCK + permute(position, _BLOCK, key=key)

    def phase(self, place: int) -> int:
        """Return the point of a place: each place is one golden angle after the one before."""
        return (self.offset + place * _GOLDEN) & _MASK

    def share(self, number: int) -> float:
        """Return the point of a number as a fraction of the circle, [0, 1)."""
        return min(self.phase(self.place(number)) / _SIZE, ONE_BELOW)


class Sampler:
    """Maps a group number to an item."""

    def __init__(self, tasks: list[TaskSection], catalogue: HubCatalogue, *, seed: int) -> None:
        self._points = GoldenSequence(seed=seed)
        self._catalogue = catalogue
        self._seed = seed
        self._slices = _slices(tasks)

    def item(self, number: int, bound_of: Callable[[str], int] = unbounded) -> Item:
        """Return the training item of group `number` (0-based).

        Args:
            bound_of: environment -> bound on the distance of its items; 0: no bound.
        """
        place = self._points.place(number)
        phase = self._points.phase(place)
        part = next(s for s in self._slices if s.low <= phase < s.high)
        rank = self._num_below(place, part.high) - self._num_below(place, part.low)
        bound = bound_of(part.task.env)
        items = train_items(part.task, self._catalogue, seed=self._seed, bound=bound)
        return items.item(items.at(rank)[1])

    def _num_below(self, count: int, bound: int) -> int:
        """Return how many of the first `count` phases are below `bound`."""
        passed = floor_sum(count, _SIZE, _GOLDEN, self._points.offset)
        beyond = floor_sum(count, _SIZE, _GOLDEN, self._points.offset + _SIZE - bound)
        return count + passed - beyond


def _slices(tasks: list[TaskSection]) -> list[_Slice]:
    """Return an arc of the circle for each task with a weight, in proportion to it."""
    active = [task for task in tasks if task.weight > 0]
    total = sum(task.weight for task in active)
    slices: list[_Slice] = []
    low = 0
    weight = 0.0
    for i, task in enumerate(active):
        weight += task.weight
        high = _SIZE if i == len(active) - 1 else int(weight / total * _SIZE)
        slices.append(_Slice(task, low, high))
        low = high
    return slices


def eval_items(
    tasks: list[TaskSection],
    catalogue: HubCatalogue,
    num_items: int,
    *,
    split: EvalSplit = EvalSplit.TEST,
) -> list[Item]:
    """Return the held-out items, spread by weight; the same for every training seed.

    Args:
        num_items: number of items, fewer only if the subsets have fewer items of the split; -1: all
            of them.

    Raises: ConfigError: a task has no validation items.
    """
    active = [task for task in tasks if task.weight > 0]
    entries = [catalogue.entry(task.env, task.items()) for task in active]
    if split is EvalSplit.VALIDATION:
        caps = [entry.num_validation for entry in entries]
        for task, num in zip(active, caps, strict=True):
            if not num:
                raise ConfigError(
                    f"eval.split=validation: {task.env}/{task.items()} has no validation items;"
                    " use eval.split=test"
                )
    else:
        caps = [entry.num_test for entry in entries]
    num_items = sum(caps) if num_items < 0 else num_items
    quotas = spread(num_items, weights=[task.weight for task in active], caps=caps)
    return [
        Item(env=task.env, subset=task.items(), item_id=f"{task.items()}-{split}-{i}")
        for task, quota in zip(active, quotas, strict=True)
        for i in range(quota)
    ]


def spread(total: int, *, weights: list[float], caps: list[int]) -> list[int]:
    """Return whole quotas by largest remainder; other quotas get the rest of a capped one."""
    quotas = [0] * len(weights)
    free = [i for i in range(len(weights)) if caps[i] > 0]
    remaining = min(total, sum(caps))
    while free and remaining > 0:
        scale = remaining / sum(weights[i] for i in free)
        full = [i for i in free if weights[i] * scale >= caps[i]]
        if not full:
            break
        for i in full:
            quotas[i] = min(caps[i], remaining)
            remaining -= quotas[i]
        free = [i for i in free if i not in full]
    if not free or remaining <= 0:
        return quotas
    scale = remaining / sum(weights[i] for i in free)
    for i in free:
        quotas[i] = int(weights[i] * scale)
    short = remaining - sum(quotas[i] for i in free)
    by_remainder = sorted(free, key=lambda i: (quotas[i] - weights[i] * scale, i))
    for i in by_remainder[:short]:
        quotas[i] += 1
    return quotas

"""Which item a training group gets: by weight alone, or also by what there is to learn from it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from common.config.curriculum import MixtureKind, MixtureSection, TaskSection
from common.wire.messages import EpisodeSeen
from learner.scheduler.curriculum.catalogue import Catalogue
from learner.scheduler.curriculum.sampling import (
    ONE_BELOW,
    Item,
    Sampler,
    Spiral,
    TrainItems,
    hash_words,
    train_items,
    unbounded,
)
from learner.scheduler.curriculum.success import SuccessPool, worth
from learner.scheduler.state import CONFIGURED, FIXED

MIN_TASK_EPISODES = 32  # before the success of a task says anything
MAX_ITEMS = 20_000  # whose success is remembered
MAX_SKIPS = 64  # items passed over for one group


@dataclass(slots=True, kw_only=True)
class MixtureTask:
    """One part of the mixture and how far its items have been gone through."""

    task: TaskSection = field(metadata=FIXED)
    base: float = field(metadata=FIXED)  # its share if all tasks were worth the same
    cursor: int = 0  # items passed, drawn or skipped

    @property
    def name(self) -> str:
        return f"{self.task.env}/{self.task.items()}"


@dataclass(init=False, slots=True)
class Mixture:
    """Draws one item per group. Inside a subset no item is drawn twice in an epoch.

    `weights` and `temperature` are pure functions of the group number, which is the cursor.
    `adaptive` keeps a cursor per subset and the recent success of subsets and items; it is asked
    once for every number, in order.

    Example (adaptive, floor 0.1): two subsets of equal weight, solved in 50% and in 95% of the
    episodes, are worth 1 and 0.19, so of 119 groups 100 are of the first. An item of it that was
    always solved is skipped in nine epochs of ten.
    """

    cfg: MixtureSection = field(metadata=FIXED)
    seed: int = field(metadata=FIXED)  # of the run
    group_size: int = field(metadata=FIXED)  # episodes of an item at a time
    tasks: dict[str, MixtureTask] = field(metadata=CONFIGURED)
    subset_success: SuccessPool
    item_success: SuccessPool
    bound_of: Callable[[str], int] = field(metadata=FIXED)  # environment -> on distance; 0: none
    _sampler: Sampler = field(metadata=FIXED)
    _spiral: Spiral = field(metadata=FIXED)
    _catalogue: Catalogue = field(metadata=FIXED)
    _names: dict[str, str] = field(metadata=FIXED)  # of tasks, by what all their stages share

    def __init__(
        self,
        cfg: MixtureSection,
        tasks: list[TaskSection],
        catalogue: Catalogue,
        *,
        seed: int,
        group_size: int,
    ) -> None:
        """Start at the first item. An item's success is averaged over two groups of it."""
        self.cfg, self.seed, self.group_size = cfg, seed, group_size
        self._catalogue, self.bound_of = catalogue, unbounded
        tempered = temper(tasks, cfg.temperature)
        self._sampler = Sampler(tempered, catalogue, seed=seed)
        self._spiral = Spiral(seed=seed)
        parts = [MixtureTask(task=task, base=task.weight) for task in tempered if task.weight > 0]
        self.tasks = {part.name: part for part in parts}
        self._names = {_shared(name): name for name in self.tasks}
        self.subset_success = SuccessPool(
            memory_episodes=cfg.memory_episodes, max_keys=len(parts) + 1
        )
        self.item_success = SuccessPool(memory_episodes=2 * group_size, max_keys=MAX_ITEMS)

    @property
    def is_adaptive(self) -> bool:
        """True if the draws depend on what was seen."""
        return self.cfg.kind is MixtureKind.ADAPTIVE

    def item(self, number: int) -> Item:
        """Return the training item of group `number` (0-based)."""
        if not self.is_adaptive:
            return self._sampler.item(number, self.bound_of)
        part = self._choose_task(self._spiral.share(number))
        bound = self.bound_of(part.task.env)
        items = train_items(part.task, self._catalogue, seed=self.seed, bound=bound)
        return items.item(self._choose_index(part, items))

    def see(self, seen: EpisodeSeen, item: Item) -> None:
        """Count a training episode that says something about the policy."""
        if self.is_adaptive:
            self.subset_success.add(self._names[_shared(f"{item.env}/{item.subset}")], seen)
            self.item_success.add(f"{item.env}/{item.item_id}", seen)

    def forget_items(self, name: str) -> None:
        """Forget the items of an environment or "environment/subset": another horizon, others."""
        self.item_success.forget(*(f"{name}-", f"{name}@") if "/" in name else (f"{name}/",))

    def shares(self) -> dict[str, float]:
        """Return "<env>/<subset>" -> share of the next groups."""
        worths = {name: task.base for name, task in self.tasks.items()}
        if self.is_adaptive:
            known = partial(self.subset_success.success, min_episodes=MIN_TASK_EPISODES)
            worths = {name: base * self._worth(known(name)) for name, base in worths.items()}
        total = sum(worths.values())
        return {name: each / total for name, each in worths.items()}

    def _worth(self, success: float | None) -> float:
        return 1.0 if success is None else worth(success, floor=self.cfg.floor)

    def _choose_task(self, point: float) -> MixtureTask:
        """Return the task whose arc of the circle holds the point, [0, 1)."""
        end = 0.0
        for task, share in zip(self.tasks.values(), self.shares().values(), strict=True):
            end += share
            if point < end:
                return task
        return list(self.tasks.values())[-1]

    def _choose_index(self, task: MixtureTask, items: TrainItems) -> int:
        """Go on to the next item that is not skipped; of too many skipped ones take the best."""
        best, best_worth = 0, -1.0
        for _ in range(min(items.num, MAX_SKIPS)):
            epoch, index = items.at(task.cursor)
            task.cursor += 1
            known = self.item_success.success(f"{items.env}/{items.subset}-train-{index}")
            item_worth = self._worth(known)
            draw = min(hash_words(items.key, "keep", epoch, index) / 2**64, ONE_BELOW)
            if draw < item_worth:
                return index
            if item_worth > best_worth:
                best, best_worth = index, item_worth
        return best

    def report(self) -> dict[str, Any]:
        """Return kind, shares and what is known of the tasks, for people."""
        success = {name: self.subset_success.success(name) for name in self.tasks}
        shares = {name: round(share, 4) for name, share in self.shares().items()}
        known = {"success": success} if self.is_adaptive else {}
        return {"kind": self.cfg.kind.value, "shares": shares, **known}


def _shared(name: str) -> str:
    """Return what the names of a task's items have in common at all bounds on their distance."""
    return name.partition("..")[0]


def temper(tasks: list[TaskSection], temperature: float) -> list[TaskSection]:
    """Return the tasks with weights that sum to one, each first raised to 1 / temperature.

    Weight zero stays zero.
    """
    if temperature == 1.0:
        return tasks
    largest = max(task.weight for task in tasks)
    shares = [task.weight / largest for task in tasks]
    powers = [share ** (1 / temperature) if share else 0.0 for share in shares]
    total = sum(powers)
    return [replace(task, weight=p / total) for task, p in zip(tasks, powers, strict=True)]

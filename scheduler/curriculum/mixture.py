"""The mixture: draws the item of each training group, by fixed weights or by learning potential."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from common.config.mixture import MixtureKind, MixtureSection
from common.config.tasks import TaskSection
from common.ids import distance_of, subset_of
from common.wire.messages import EpisodeSeen
from scheduler.curriculum.catalogue import HubCatalogue
from scheduler.curriculum.sampling import (
    ONE_BELOW,
    GoldenSequence,
    Item,
    Sampler,
    TrainItems,
    hash_words,
    train_items,
    unbounded,
)
from scheduler.curriculum.success import SuccessPool, worth
from scheduler.curriculum.user_functions import ItemFunction, TaskChoice
from scheduler.state import CONFIGURED, FIXED

MIN_TASK_EPISODES = 32  # Episodes of a task before its success is used.
MAX_ITEMS = 20_000  # Number of items whose success is kept.
MAX_SKIPS = 64  # Most items skipped for one group.


@dataclass(slots=True, kw_only=True)
class MixtureTask:
    """One task of the mixture and the cursor into its items."""

    task: TaskSection = field(metadata=FIXED)
    # Share of the task if all tasks had the same learning potential.
    base: float = field(metadata=FIXED)
    cursor: int = 0  # Number of items drawn or skipped.

    @property
    def name(self) -> str:
        return f"{self.task.env}/{self.task.items()}"


@dataclass(init=False, slots=True)
class Mixture:
    """Draws one item per group. Inside a subset no item is drawn twice in an epoch.

    `weights` and `temperature` are pure functions of the group number. `adaptive` keeps a cursor
    for each subset, and the recent success of subsets and items. It must be asked once for each
    number, in order.

    Example (adaptive, floor 0.1): two subsets have equal weight. The policy solves 50% of the
    episodes of the first and 95% of the second, so they are worth 1 and 0.19: of 119 groups 100 are
    of the first. An item of the first that was always solved is skipped in nine epochs of ten.
    """

    cfg: MixtureSection = field(metadata=FIXED)
    seed: int = field(metadata=FIXED)  # Seed of the run.
    group_size: int = field(metadata=FIXED)  # Episodes of one item in a group.
    tasks: dict[str, MixtureTask] = field(metadata=CONFIGURED)
    subset_success: SuccessPool
    item_success: SuccessPool
    user: ItemFunction | None = None  # Chooses the items in place of `cfg`.
    _sampler: Sampler = field(metadata=FIXED)
    _points: GoldenSequence = field(metadata=FIXED)
    _catalogue: HubCatalogue = field(metadata=FIXED)
    # Names of tasks by the part of the name that all distance stages share.
    _names: dict[str, str] = field(metadata=FIXED)

    def __init__(
        self,
        cfg: MixtureSection,
        tasks: list[TaskSection],
        catalogue: HubCatalogue,
        *,
        seed: int,
        group_size: int,
        user: ItemFunction | None = None,
    ) -> None:
        """Start at the first item. The success of an item is averaged over two of its groups."""
        self.user = user
        self.cfg = cfg
        self.seed = seed
        self.group_size = group_size
        self._catalogue = catalogue
        tempered = temper(tasks, cfg.temperature)
        self._sampler = Sampler(tempered, catalogue, seed=seed)
        self._points = GoldenSequence(seed=seed)
        parts = [MixtureTask(task=task, base=task.weight) for task in tempered if task.weight > 0]
        self.tasks = {part.name: part for part in parts}
        self._names = {_without_bound(name): name for name in self.tasks}
        self.subset_success = SuccessPool(
            memory_episodes=cfg.memory_episodes, max_keys=len(parts) + 1
        )
        self.item_success = SuccessPool(memory_episodes=2 * group_size, max_keys=MAX_ITEMS)

    @property
    def is_adaptive(self) -> bool:
        """True if the draws depend on the success seen so far."""
        return self.cfg.kind is MixtureKind.ADAPTIVE

    def item(
        self,
        number: int,
        bound_of: Callable[[str], int] = unbounded,
        *,
        version: int = 0,
        shunned: Sequence[str] = (),
    ) -> Item:
        """Return the training item of group `number` (0-based).

        Args:
            bound_of: returns the bound on the distance of an environment's items; 0: no bound.
            version: trained steps, for a function of the user.
            shunned: environments that a function of the user must not choose, unless all are.
        """
        if self.user is not None:
            return self._item_of_user(self.user, number, version=version, shunned=shunned)
        if not self.is_adaptive:
            return self._sampler.item(number, bound_of)
        part = self._choose_task(self._points.share(number))
        bound = bound_of(part.task.env)
        items = train_items(part.task, self._catalogue, seed=self.seed, bound=bound)
        return items.item(self._choose_index(part, items))

    def see(self, seen: EpisodeSeen, item: Item) -> None:
        """Count a training episode whose result depends on the policy."""
        if self.is_adaptive or self.user is not None:
            self.subset_success.add(self._names[_without_bound(f"{item.env}/{item.subset}")], seen)
            self.item_success.add(f"{item.env}/{item.item_id}", seen)

    def _item_of_user(
        self, user: ItemFunction, number: int, *, version: int, shunned: Sequence[str]
    ) -> Item:
        """Return the item that a function of the user chooses. Raises: ConfigError."""
        items = {
            name: train_items(part.task, self._catalogue, seed=self.seed)
            for name, part in self.tasks.items()
        }
        playable = [name for name, each in items.items() if each.env not in shunned]
        choices = [
            TaskChoice(
                name=name,
                weight=self.tasks[name].base,
                num_items=items[name].num,
                success=self.subset_success.success(name),
            )
            for name in playable or items
        ]

        def success_of(name: str, index: int) -> float | None:
            item = items[name].item(index)
            return self.item_success.success(f"{item.env}/{item.item_id}")

        name, index = user.choose(number, choices, success_of, version=version)
        return items[name].item(index)

    def forget_items(self, subsets: Collection[str]) -> None:
        """Forget the success of items, which depends on the horizon.

        Args:
            subsets: subsets as "environment/subset", at any distance.
        """

        def is_in_subsets(key: str) -> bool:
            subset = subset_of(key)
            far = distance_of(subset)
            return (far[0] if far else subset) in subsets

        self.item_success.forget([each for each in self.item_success.known if is_in_subsets(each)])

    def shares(self) -> dict[str, float]:
        """Return "<env>/<subset>" -> share of the next groups."""
        worths = {name: task.base for name, task in self.tasks.items()}
        if self.is_adaptive:
            success_of = partial(self.subset_success.success, min_episodes=MIN_TASK_EPISODES)
            worths = {name: base * self._worth(success_of(name)) for name, base in worths.items()}
        total = sum(worths.values())
        return {name: each / total for name, each in worths.items()}

    def _worth(self, success: float | None) -> float:
        """Return the learning potential at a success; 1 if the success is unknown."""
        return 1.0 if success is None else worth(success, floor=self.cfg.floor)

    def _choose_task(self, point: float) -> MixtureTask:
        """Return the task whose arc of the circle contains the point, [0, 1)."""
        end = 0.0
        for task, share in zip(self.tasks.values(), self.shares().values(), strict=True):
            end += share
            if point < end:
                return task
        return list(self.tasks.values())[-1]

    def _choose_index(self, task: MixtureTask, items: TrainItems) -> int:
        """Return the next item that is not skipped; after `MAX_SKIPS` skips, the best of those."""
        best = 0
        best_worth = -1.0
        for _ in range(min(items.num, MAX_SKIPS)):
            epoch, index = items.at(task.cursor)
            task.cursor += 1
            success = self.item_success.success(f"{items.env}/{items.subset}-train-{index}")
            item_worth = self._worth(success)
            draw = min(hash_words(items.key, "keep", epoch, index) / 2**64, ONE_BELOW)
            if draw < item_worth:
                return index
            if item_worth > best_worth:
                best = index
                best_worth = item_worth
        return best

    def report(self) -> dict[str, Any]:
        """Return the kind, the shares and, if adaptive, the measured success of the tasks."""
        success = {name: self.subset_success.success(name) for name in self.tasks}
        shares = {name: round(share, 4) for name, share in self.shares().items()}
        measured = {"success": success} if self.is_adaptive else {}
        kind = self.cfg.kind.value if self.user is None else str(self.user.section.kind)
        return {"kind": kind, "shares": shares, **measured}


def _without_bound(name: str) -> str:
    """Return the part of a task's name that is the same for all bounds on the distance."""
    return name.partition("..")[0]


def temper(tasks: list[TaskSection], temperature: float) -> list[TaskSection]:
    """Return the tasks with weights raised to 1 / temperature and then normalised to sum to one.

    Weight zero stays zero. Temperature 1 returns the tasks unchanged.
    """
    if temperature == 1.0:
        return tasks
    largest = max(task.weight for task in tasks)
    shares = [task.weight / largest for task in tasks]
    powers = [share ** (1 / temperature) if share else 0.0 for share in shares]
    total = sum(powers)
    return [replace(task, weight=p / total) for task, p in zip(tasks, powers, strict=True)]

"""The offered ScienceWorld tasks, and the item ids of their variations."""

from dataclasses import dataclass

from envhub.env import ItemId, SubsetSpec, UnknownItem, parse_item
from envhub.tables import read_table

EVERYTHING = "all"


@dataclass(frozen=True, slots=True)
class SciWorldTask:
    """A ScienceWorld task; its variations from `first_test` on are the simulator's test set."""

    name: str
    num_variations: int
    first_test: int


@dataclass(frozen=True, slots=True)
class Variation:
    """A variation of a task, as the simulator loads it."""

    task: str
    index: int


_TABLE = read_table(__file__, "catalogue.yaml")
TASKS = tuple(SciWorldTask(name, *numbers) for name, numbers in _TABLE["tasks"].items())
SIMPLIFICATIONS = frozenset(_TABLE["simplifications"])
PREFIXES = {subset: tuple(facts["tasks"]) for subset, facts in _TABLE["subsets"].items()}


def split_of(task: SciWorldTask, index: int) -> str:
    """Return the split of a variation: the simulator's training and dev sets are `train`."""
    return "test" if index >= task.first_test else "train"


def _variations(subset: str, split: str) -> tuple[Variation, ...]:
    """Return the variations of a subset's tasks that belong to a split."""
    return tuple(
        Variation(task.name, index)
        for task in TASKS
        if task.name.startswith(PREFIXES[subset])
        for index in range(task.num_variations)
        if split_of(task, index) == split
    )


ITEMS = {
    (subset, split): _variations(subset, split)
    for subset in PREFIXES
    for split in ("train", "test")
}

SUBSETS = {
    subset: SubsetSpec(
        num_train=len(ITEMS[subset, "train"]),
        num_test=len(ITEMS[subset, "test"]),
        max_turns=_TABLE["subsets"][subset]["max_turns"],
    )
    for subset in PREFIXES
}


def variation_of(item: ItemId) -> Variation:
    """Return the variation of an item of `SUBSETS`."""
    return ITEMS[item.subset, item.split][item.index]


def from_agentgym(index: int) -> str:
    """Return the item id of AgentGym's data index.

    Raises: UnknownItem: not in 0 to 4638.
    """
    num_before = {"train": 0, "test": 0}
    left = index
    for task in TASKS:
        num_train = task.first_test
        if 0 <= left < task.num_variations:
            split = split_of(task, left)
            offset = left if split == "train" else left - num_train
            return f"{EVERYTHING}-{split}-{num_before[split] + offset}"
        left -= task.num_variations
        num_before["train"] += num_train
        num_before["test"] += task.num_variations - num_train
    last = sum(task.num_variations for task in TASKS) - 1
    raise UnknownItem(f"no data index {index}; the last is {last}")


def column_item(index: int) -> str:
    """Return the item of AgentGym's data index within the paper's task for it, if there is one.

    Raises: UnknownItem: as `from_agentgym`.
    """
    item = parse_item(from_agentgym(index), SUBSETS)
    variation = variation_of(item)
    for subset in PREFIXES:
        variations = ITEMS[subset, item.split]
        if subset != EVERYTHING and variation in variations:
            return f"{subset}-{item.split}-{variations.index(variation)}"
    return f"{EVERYTHING}-{item.split}-{item.index}"

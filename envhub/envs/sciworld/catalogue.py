"""Which ScienceWorld tasks are offered, and the item ids of their variations."""

from dataclasses import dataclass

from envhub.env import ItemId, SubsetSpec, UnknownItem

EVERYTHING = "all"


@dataclass(frozen=True, slots=True)
class Task:
    """A ScienceWorld task; its variations from `first_test` on are the simulator's test set."""

    name: str
    num_variations: int
    first_test: int


@dataclass(frozen=True, slots=True)
class Variation:
    """What the simulator loads."""

    task: str
    index: int


# In AgentGym's order, which numbers all variations through. The tasks that it leaves out
# (5-1, 5-2, 9-1 to 9-3, 10-1, 10-2: growing, genetics, inclined planes) are left out here.
TASKS = (
    Task("boil", 30, 21),
    Task("melt", 30, 21),
    Task("freeze", 30, 21),
    Task("change-the-state-of-matter-of", 30, 21),
    Task("use-thermometer", 540, 405),
    Task("measure-melting-point-known-substance", 436, 327),
    Task("measure-melting-point-unknown-substance", 300, 225),
    Task("power-component", 20, 15),
    Task("power-component-renewable-vs-nonrenewable-energy", 20, 15),
    Task("test-conductivity", 900, 675),
    Task("test-conductivity-of-unknown-substances", 600, 450),
    Task("find-living-thing", 300, 225),
    Task("find-non-living-thing", 300, 225),
    Task("find-plant", 300, 225),
    Task("find-animal", 300, 225),
    Task("chemistry-mix", 32, 24),
    Task("chemistry-mix-paint-secondary-color", 36, 27),
    Task("chemistry-mix-paint-tertiary-color", 36, 27),
    Task("lifespan-longest-lived", 125, 93),
    Task("lifespan-shortest-lived", 125, 93),
    Task("lifespan-longest-lived-then-shortest-lived", 125, 93),
    Task("identify-life-stages-1", 14, 9),
    Task("identify-life-stages-2", 10, 6),
)

# Which tasks make up a subset, by how their names begin.
PREFIXES = {
    "Measure": ("use-thermometer", "measure-melting-point"),
    "TestCond": ("test-conductivity",),
    "Find": ("find-",),
    "ChemMix": ("chemistry-mix",),
    "Lifespan": ("lifespan-",),
    EVERYTHING: ("",),
}

# Somewhat longer than the longest gold path of the subset's items.
MAX_TURNS = {
    "Measure": 120,
    "TestCond": 80,
    "Find": 40,
    "ChemMix": 60,
    "Lifespan": 20,
    EVERYTHING: 200,
}


def split_of(task: Task, index: int) -> str:
    """Return the split of a variation: the simulator's training and dev sets are `train`."""
    return "test" if index >= task.first_test else "train"


def _variations(subset: str, split: str) -> tuple[Variation, ...]:
    """Return the items of a subset in AgentGym's order."""
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
        max_turns=MAX_TURNS[subset],
    )
    for subset in PREFIXES
}


def variation_of(item: ItemId) -> Variation:
    """Return what an item of `SUBSETS` loads."""
    return ITEMS[item.subset, item.split][item.index]


def from_agentgym(index: int) -> str:
    """Return the item id of AgentGym's data index.

    Raises:
        UnknownItem: not in 0 to 4638.
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

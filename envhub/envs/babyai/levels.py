"""The BabyAI levels and tasks we offer, their turn limits and AgentGym's numbering of them."""

from collections.abc import Callable
from functools import cache
from typing import Any

import gymnasium
import minigrid  # noqa: F401 - registers the BabyAI levels
import minigrid.envs.babyai.core.roomgrid_level as roomgrid_level
from gymnasium.envs.registration import load_env_creator
from minigrid.envs.babyai.core.roomgrid_level import RejectSampling, RoomGridLevel

from envhub.env import ItemId, SubsetSpec, UnknownItem
from envhub.envs.babyai.solvable import has_way
from envhub.tables import read_table

NUM_TRAIN = 1_000_000
NUM_TEST = 1_000
FIRST_TEST_SEED = 10_000_000

_TABLE = read_table(__file__, "levels.yaml")
MAX_TURNS: dict[str, int] = _TABLE["max_turns"]
MAX_TURNS_LONG: dict[str, int] = _TABLE["max_turns_long"]
MAX_TURNS_OTHERS = 20
AGENTGYM_LEVELS: tuple[str, ...] = tuple(_TABLE["agentgym_levels"])
AGENTGYM_SIZES: dict[str, tuple[str, int]] = _TABLE["agentgym_sizes"]
AS_IN_AGENTGYM: dict[str, str] = {of: name for name, (of, _) in AGENTGYM_SIZES.items()}
TASK_LEVELS = {task: tuple(levels) for task, levels in _TABLE["task_levels"].items()}
# A task's training seeds are 0-44 and 245 upwards, its test seeds are 45-244. AgentGym trains on
# the first 45 seeds of these levels and tests on the next five.
FIRST_TASK_TEST_SEED = 45
NUM_TASK_TEST_SEEDS = 200
LEVEL_SUFFIX = "Level"  # a level whose name a task took is offered with it: `PickupLevel`

MAX_DRAWS = 20_000  # of one layout; those that end need a few hundred

# minigrid reports every rejected layout with print(); a server has no use for that.
roomgrid_level.print = lambda *args, **kwargs: None  # type: ignore[attr-defined]


def subsets() -> dict[str, SubsetSpec]:
    """Return the measured levels, AgentGym's others, and the tasks, by name."""
    names = dict.fromkeys(map(subset_of, (*MAX_TURNS, *AGENTGYM_LEVELS, *AGENTGYM_SIZES)))
    single = {
        name: SubsetSpec(
            num_train=NUM_TRAIN, num_test=NUM_TEST, max_turns=max_turns(level_of(name))
        )
        for name in names
    }
    pooled = {
        task: SubsetSpec(
            num_train=NUM_TRAIN,
            num_test=NUM_TASK_TEST_SEEDS * len(levels),
            max_turns=max(map(max_turns, levels)),
        )
        for task, levels in TASK_LEVELS.items()
    }
    return single | pooled


def max_turns(level: str) -> int:
    """Return the most turns an episode of a level may use."""
    return MAX_TURNS.get(level) or MAX_TURNS_LONG.get(level, MAX_TURNS_OTHERS)


def subset_of(level: str) -> str:
    """Return the subset of a level's items: its name, or with a suffix if a task has the name."""
    return level + LEVEL_SUFFIX if level in TASK_LEVELS else level


def level_of(subset: str) -> str:
    """Return the level of a subset that is no task."""
    level = subset.removesuffix(LEVEL_SUFFIX)
    return level if level in TASK_LEVELS else subset


def locate(item: ItemId) -> tuple[str, int]:
    """Return the level and minigrid seed of an item; train and test seeds of a level never meet."""
    names = TASK_LEVELS.get(item.subset)
    if names is None:
        is_train = item.split == "train"
        return level_of(item.subset), item.index if is_train else FIRST_TEST_SEED + item.index
    number, which = divmod(item.index, len(names))
    if item.split == "test":
        return names[which], FIRST_TASK_TEST_SEED + number
    is_early = number < FIRST_TASK_TEST_SEED
    return names[which], number if is_early else number + NUM_TASK_TEST_SEEDS


def from_agentgym(index: int) -> str:
    """Return the item of AgentGym's data index: the level at `index % 40`, seed `index // 40`.

    Raises: UnknownItem: negative, or the seed is not below the number of a level's training items.
    """
    seed, number = divmod(index, len(AGENTGYM_LEVELS))
    if not 0 <= seed < NUM_TRAIN:
        last = NUM_TRAIN * len(AGENTGYM_LEVELS) - 1
        raise UnknownItem(f"data index {index} is out of range; they are 0 to {last}")
    level: str = AGENTGYM_LEVELS[number]
    return f"{subset_of(AS_IN_AGENTGYM.get(level, level))}-train-{seed}"


def column_item(index: int) -> str:
    """Return the item of AgentGym's data index in the task that the paper counts it to, if any.

    Raises: UnknownItem: as `from_agentgym`.
    """
    seed, number = divmod(index, len(AGENTGYM_LEVELS))
    level = AGENTGYM_LEVELS[number]
    for task, names in TASK_LEVELS.items():
        place = seed - FIRST_TASK_TEST_SEED
        if level in names and 0 <= place < NUM_TASK_TEST_SEEDS:
            return f"{task}-test-{place * len(names) + names.index(level)}"
    return from_agentgym(index)


class Layouts:
    """Has a level draw anew where its layout would be drawn for ever, or could not be solved.

    The level then draws another one, with the numbers that follow, as it does where it rejects a
    layout itself; all others are untouched.
    """

    def __init__(self, level: RoomGridLevel, *, keeps_unsolvable: bool) -> None:
        self._level, self._keeps_unsolvable = level, keeps_unsolvable
        self._draw, self._generate = level._rand_int, level.gen_mission
        self._num_draws = 0
        level._rand_int, level.gen_mission = self.draw, self.generate

    def generate(self) -> None:
        """Draw one layout.

        Raises: RejectSampling: it cannot be solved; minigrid takes it as a sign to begin anew.
        """
        self._num_draws = 0
        self._generate()
        if not self._keeps_unsolvable and not has_way(self._level):
            raise RejectSampling("what is needed is locked away")

    def draw(self, low: int, high: int) -> int:
        """Return a number from `low` to below `high`.

        Raises: RecursionError: too many for one layout; minigrid takes it as a sign to begin anew.
        """
        self._num_draws += 1
        if self._num_draws > MAX_DRAWS:
            self._num_draws = 0  # the next layout draws before it comes to its mission
            raise RecursionError(f"no layout after {MAX_DRAWS} draws")
        return self._draw(low, high)


@cache
def _creator(name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return what makes a level, and with which arguments.

    `gymnasium.make` looks the class up by a new string each time. The interpreter keeps thousands
    of these alive, scattered over the memory of levels that are gone, which then stays taken.
    """
    sized = {"room_size": AGENTGYM_SIZES[name][1]} if name in AGENTGYM_SIZES else {}
    prefix = f"BabyAI-{AGENTGYM_SIZES[name][0] if sized else name}-v"
    version = next(v for v in (1, 0) if f"{prefix}{v}" in gymnasium.registry)
    spec = gymnasium.spec(f"{prefix}{version}")
    assert isinstance(spec.entry_point, str)
    return load_env_creator(spec.entry_point), {**spec.kwargs, **sized}


def make_level(name: str, *, keeps_unsolvable: bool = False) -> RoomGridLevel:
    """Return a fresh bare minigrid level; some levels are registered only as version 1.

    Args:
        name: such as `GoToLocal`.
        keeps_unsolvable: it may have a layout that nobody can solve, where minigrid draws one.
    """
    create, kwargs = _creator(name)
    level = create(**kwargs)
    assert isinstance(level, RoomGridLevel)
    Layouts(level, keeps_unsolvable=keeps_unsolvable)
    return level

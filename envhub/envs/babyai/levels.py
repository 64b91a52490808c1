"""The offered BabyAI levels and tasks, their turn limits, and AgentGym's numbering of them.

Some layouts lock the only key behind its own door. They are not offered.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import gymnasium
import minigrid  # noqa: F401 - registers the BabyAI levels
import minigrid.envs.babyai.core.roomgrid_level as roomgrid_level
from gymnasium.envs.registration import load_env_creator
from minigrid.core.world_object import Door, Key
from minigrid.envs.babyai.core.roomgrid_level import RejectSampling, RoomGridLevel
from minigrid.envs.babyai.core.verifier import Instr, ObjDesc, OpenInstr, PutNextInstr, SeqInstr

from envhub.env import ItemId, SubsetSpec, UnknownItem
from envhub.tables import read_table

Cell = tuple[int, int]


def has_way(level: RoomGridLevel) -> bool:
    """Return whether the mission's objects are reachable with the reachable keys.

    The check is exact for locked doors. It assumes that obstacles can be moved aside and that rooms
    without a locked door are connected, as in minigrid.
    """
    doors = [thing for thing in level.grid.grid if isinstance(thing, Door)]
    if not any(door.is_locked for door in doors):
        return True
    faced, entered = _reach(level)
    return _can_be_met(level, level.instrs, faced, entered)  # type: ignore[attr-defined]


def _reach(level: RoomGridLevel) -> tuple[set[Cell], set[Cell]]:
    """Return the cells that the agent can face, and those that it can enter or clear."""
    # Colours of found keys. `level.carrying` still belongs to the last episode.
    colors: set[str] = set()
    shut: dict[str, list[Cell]] = {}  # Locked doors without a found key, by colour.
    faced: set[Cell] = set()
    entered: set[Cell] = set()
    x, y = level.agent_pos
    stack = [(int(x), int(y))]
    while stack:
        cell = stack.pop()
        thing = level.grid.get(*cell)
        if cell in entered or (thing is not None and thing.type in ("wall", "lava")):
            continue
        faced.add(cell)
        if isinstance(thing, Door) and thing.is_locked and thing.color not in colors:
            shut.setdefault(thing.color, []).append(cell)
            continue
        entered.add(cell)
        for candidate in (thing, getattr(thing, "contains", None)):
            if isinstance(candidate, Key) and candidate.color not in colors:
                colors.add(candidate.color)
                stack += shut.pop(candidate.color, [])
        x, y = cell
        stack += [(x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)]
    return faced, entered


def _can_be_met(
    level: RoomGridLevel, instruction: Instr, faced: set[Cell], entered: set[Cell]
) -> bool:
    """Return whether all objects of an instruction are reachable."""
    if isinstance(instruction, SeqInstr):
        parts = (instruction.instr_a, instruction.instr_b)
        return all(_can_be_met(level, part, faced, entered) for part in parts)
    if isinstance(instruction, PutNextInstr):
        both = (instruction.desc_move, instruction.desc_fixed)
        return all(_is_any_in(level, each, faced) for each in both)
    wanted: ObjDesc = instruction.desc  # type: ignore[attr-defined]
    return _is_any_in(level, wanted, entered if isinstance(instruction, OpenInstr) else faced)


def _is_any_in(level: RoomGridLevel, wanted: ObjDesc, cells: set[Cell]) -> bool:
    """Return whether one of the described objects is in these cells."""
    _, positions = wanted.find_matching_objs(level)
    return any(position in cells for position in positions)


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
LEVEL_SUFFIX = "Level"  # Suffix of a level's subset if a task has the level's name: `PickupLevel`.

MAX_DRAWS = 20_000  # Maximum number of draws of one layout. A normal layout needs a few hundred.

# minigrid prints a line for every rejected layout, which is noise in a server.
roomgrid_level.print = lambda *args, **kwargs: None  # type: ignore[attr-defined]


def subsets() -> dict[str, SubsetSpec]:
    """Return all subsets: levels with measured limits, AgentGym's other levels, and tasks."""
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
    """Return the maximum number of turns of a level's episode."""
    return MAX_TURNS.get(level) or MAX_TURNS_LONG.get(level, MAX_TURNS_OTHERS)


def subset_of(level: str) -> str:
    """Return the subset of a level: its name, with a suffix if a task has the same name."""
    return level + LEVEL_SUFFIX if level in TASK_LEVELS else level


def level_of(subset: str) -> str:
    """Return the level of a single-level subset."""
    level = subset.removesuffix(LEVEL_SUFFIX)
    return level if level in TASK_LEVELS else subset


def locate(item: ItemId) -> tuple[str, int]:
    """Return the level and minigrid seed of an item; its train and test seeds are disjoint."""
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
    """Return the item of AgentGym's data index within the paper's task for it, if there is one.

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
    """Makes a level draw a new layout when a draw never ends or the layout is unsolvable.

    The level then continues with its next random numbers, like after its own rejections. All other
    layouts are unchanged.
    """

    def __init__(self, level: RoomGridLevel, *, keeps_unsolvable: bool) -> None:
        self._level = level
        self._keeps_unsolvable = keeps_unsolvable
        self._draw = level._rand_int
        self._generate = level.gen_mission
        self._num_draws = 0
        level._rand_int, level.gen_mission = self.draw, self.generate

    def generate(self) -> None:
        """Draw one layout.

        Raises: RejectSampling: it is unsolvable; minigrid then draws again.
        """
        self._num_draws = 0
        self._generate()
        if not self._keeps_unsolvable and not has_way(self._level):
            raise RejectSampling("a required object is behind a locked door")

    def draw(self, low: int, high: int) -> int:
        """Return a number from `low` to below `high`.

        Raises: RecursionError: too many draws for one layout; minigrid then starts again.
        """
        self._num_draws += 1
        if self._num_draws > MAX_DRAWS:
            self._num_draws = 0  # The next layout draws numbers before it calls `generate`.
            raise RecursionError(f"no layout after {MAX_DRAWS} draws")
        return self._draw(low, high)


@cache
def _creator(name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the constructor of a level and its arguments.

    `gymnasium.make` searches the class by a new string each time. The interpreter keeps thousands
    of these strings alive. They are scattered over the memory of deleted levels, which then cannot
    be freed.
    """
    sized = {"room_size": AGENTGYM_SIZES[name][1]} if name in AGENTGYM_SIZES else {}
    prefix = f"BabyAI-{AGENTGYM_SIZES[name][0] if sized else name}-v"
    version = next(v for v in (1, 0) if f"{prefix}{v}" in gymnasium.registry)
    spec = gymnasium.spec(f"{prefix}{version}")
    assert isinstance(spec.entry_point, str)
    return load_env_creator(spec.entry_point), {**spec.kwargs, **sized}


def make_level(name: str, *, keeps_unsolvable: bool = False) -> RoomGridLevel:
    """Return a new unwrapped minigrid level; some levels are registered only as version 1.

    Args:
        name: such as `GoToLocal`.
        keeps_unsolvable: keep an unsolvable layout if minigrid draws one.
    """
    create, kwargs = _creator(name)
    level = create(**kwargs)
    assert isinstance(level, RoomGridLevel)
    Layouts(level, keeps_unsolvable=keeps_unsolvable)
    return level

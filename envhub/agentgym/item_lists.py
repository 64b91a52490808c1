"""AgentGym's data indices: their train and test splits, and published lists."""

import hashlib
import json
import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from common.config.env import RemoteOptions
from common.config.envs import EnvsSection, ItemFiles
from common.errors import ConfigError
from envhub.agentgym.dialects import DIALECTS, SCIWORLD, Dialect
from envhub.env import AsyncEnv, Env, EnvSpec, Style, SubsetSpec, TaskSpec, UnknownItem, parse_item
from envhub.envs.sciworld.catalogue import TASKS

logger = logging.getLogger(__name__)

SUBSET = "agentgym"  # Subset of a built-in environment with the items of the configured lists.
SPLITS = ("train", "test")


class JoinedRanges(Sequence[int]):
    """The numbers of several consecutive ranges, computed on demand."""

    def __init__(self, ranges: Sequence[range]) -> None:
        self._ranges = ranges
        self._ends = list(accumulate(map(len, ranges)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        which = bisect_right(self._ends, index)
        return self._ranges[which][index - self._ends[which]]


def indices_of(dialect: Dialect, options: RemoteOptions) -> dict[str, Sequence[int]]:
    """Return the data indices of a server's training and test items, in order.

    The indices come from the configured files, otherwise from the dialect. `num_train` and
    `num_test` select evenly spaced items. Unless both files are configured, no test item is also a
    training item.

    Raises: ConfigError: a file is not a list of items of this dialect, or all its training items
        are the dialect's test items.
    """
    dialect_numbers = own_numbers(dialect)
    named = {split: read_list(getattr(options, f"{split}_items"), dialect) for split in SPLITS}
    numbers = {split: named[split] or dialect_numbers[split] for split in SPLITS}
    if named["test"] and not named["train"]:
        tested = frozenset(named["test"])
        rest = (number for split in SPLITS for number in dialect_numbers[split])
        numbers["train"] = [number for number in rest if number not in tested]
    if named["train"] and not named["test"]:
        numbers["train"] = _without_tests(named["train"], dialect_numbers["test"], options)
    wanted = {"train": options.num_train, "test": options.num_test}
    return {split: spread(numbers[split], wanted[split]) for split in SPLITS}


def _without_tests(
    trained: Sequence[int], tested: Sequence[int], options: RemoteOptions
) -> list[int]:
    """Return the items of a training list that are no test items of the dialect.

    Raises: ConfigError: none is left.
    """
    held_out = frozenset(tested)
    rest = [number for number in trained if number not in held_out]
    if not rest:
        raise ConfigError(
            f"env.train_items={options.train_items}: all items are test items of {options.dialect};"
            " name other test items with env.test_items"
        )
    if len(rest) < len(trained):
        logger.warning(
            "skipped training items that are test items file=%s skipped=%d of=%d; env.test_items "
            "names other test items",
            options.train_items,
            len(trained) - len(rest),
            len(trained),
        )
    return rest


def own_numbers(dialect: Dialect) -> dict[str, Sequence[int]]:
    """Return a dialect's training and test items if no list is configured."""
    if dialect is SCIWORLD:
        return _of_sciworld()
    tests = [range(*each) for each in dialect.test_items]
    trains = [range(*each) for each in dialect.train_items]
    if not trains and dialect.num_items:
        held_out = frozenset(number for each in tests for number in each)
        trains = _runs([n for n in range(dialect.num_items) if n not in held_out])
    return {"train": JoinedRanges(trains), "test": JoinedRanges(tests)}


def _of_sciworld() -> dict[str, Sequence[int]]:
    """Return the simulator's own split: the last variations of every task are test items."""
    firsts = [0, *accumulate(task.num_variations for task in TASKS)]
    pairs = list(zip(firsts, TASKS, strict=False))
    return {
        "train": JoinedRanges([range(at, at + task.first_test) for at, task in pairs]),
        "test": JoinedRanges([range(at + t.first_test, at + t.num_variations) for at, t in pairs]),
    }


def _runs(numbers: Sequence[int]) -> list[range]:
    """Return increasing numbers as ranges of consecutive ones."""
    starts = [i for i, n in enumerate(numbers) if i == 0 or n != numbers[i - 1] + 1]
    ends = [*starts[1:], len(numbers)]
    pairs = zip(starts, ends, strict=False)  # Without numbers there is no run.
    return [range(numbers[start], numbers[end - 1] + 1) for start, end in pairs]


def spread(numbers: Sequence[int], num_wanted: int) -> Sequence[int]:
    """Return `num_wanted` numbers at even distances; all of them if -1 or too many are wanted."""
    if not 0 <= num_wanted < len(numbers):
        return numbers
    return [numbers[i * len(numbers) // num_wanted] for i in range(num_wanted)]


def read_list(path: str, dialect: Dialect) -> list[int]:
    """Return the data indices in a list of AgentGym, [] if the path is "".

    AgentGym-RL's `AgentItemId/*.json`, AgentEval's and AgentTraj's are lists of `{"item_id":
    "<task>_<number>"}`. Bare ids and numbers are accepted as well. For a folder of AgentEval, its
    `<task>_test.json` is read. Numbers unknown to the server are skipped with a warning.

    Raises: ConfigError: no such file, another format, or items of another environment.
    """
    if not path:
        return []
    file = Path(path)
    if file.is_dir():
        file /= f"{dialect.name}_test.json"
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as a list of items: {error}") from error
    if not isinstance(entries, list) or not entries:
        example = f'{{"item_id": "{dialect.name}_0"}}'
        raise ConfigError(f"{file}: must be a list of items such as {example}")
    numbers = [_number(entry, dialect, file) for entry in entries]
    valid = [n for n in numbers if 0 <= n < (dialect.num_items or n + 1)]
    if not valid:
        raise ConfigError(f"{file}: {dialect.name} has no item of this list")
    if len(valid) < len(numbers):
        num_unknown = len(numbers) - len(valid)
        logger.warning(
            "skipped unknown items file=%s unknown=%d of=%d", file, num_unknown, len(numbers)
        )
    return valid


def _number(entry: object, dialect: Dialect, file: Path) -> int:
    """Return the data index of a list's entry. Raises: ConfigError."""
    shown = entry.get("item_id") if isinstance(entry, Mapping) else entry
    if isinstance(shown, int) and not isinstance(shown, bool):
        return shown
    name, _, digits = str(shown).rpartition("_")
    of = name.split("_")[-1] if name else dialect.name
    if of in DIALECTS and of != dialect.name:
        raise ConfigError(f"{file}: {str(shown)[:80]!r} is an item of {of}, not of {dialect.name}")
    # ALFWorld's training list names games by folders, which also end in a number.
    is_number = digits.isdecimal() and digits.isascii() and len(digits) < 10
    if not is_number or "-" in name:
        form = f"{dialect.name}_<number>"
        raise ConfigError(f"{file}: {str(shown)[:80]!r} is not of the form {form}")
    return int(digits)


def with_lists(spec: EnvSpec, options: EnvsSection) -> EnvSpec:
    """Return a built-in environment with an extra subset for its configured item lists.

    Without lists the environment is unchanged. The subset is `agentgym`; it holds the lists' items
    in order, and the task `AgentGym` has all of them.

    Raises: ConfigError: a list cannot be read, or has no item that exists here.
    """
    named = getattr(options, spec.name, None)
    if not isinstance(named, ItemFiles) or not (named.train_items or named.test_items):
        return spec
    dialect = DIALECTS[spec.name]
    items = {split: _items(spec, getattr(named, f"{split}_items"), dialect) for split in SPLITS}
    sizes = {f"num_{split}": len(items[split]) for split in SPLITS}
    subset = SubsetSpec(**sizes, max_turns=max(s.max_turns for s in spec.subsets.values()))
    scenario = next((task.scenario for task in spec.tasks.values()), "")
    train, test = (
        tuple(f"{SUBSET}-{split}-{i}" for i in range(len(items[split]))) for split in SPLITS
    )
    task = TaskSpec(scenario=scenario, subset=SUBSET, train=train, test=test)

    def make(style: Style) -> Any:
        return _ItemIdMapper(spec.make(style), subset, items)

    content = dict(spec.content) | {
        f"envs.{spec.name}.{split}_items": hashlib.sha256(json.dumps(each).encode()).hexdigest()
        for split, each in items.items()
        if each
    }
    return replace(
        spec,
        subsets={**spec.subsets, SUBSET: subset},
        make=make,
        tasks={**spec.tasks, "AgentGym": task},
        content=content,
    )


def _items(spec: EnvSpec, path: str, dialect: Dialect) -> list[str]:
    """Return the item ids of a list of AgentGym's numbers; unknown numbers are skipped."""
    assert spec.from_agentgym is not None
    items = []
    num_unknown = 0
    why = ""
    for number in read_list(path, dialect):
        try:
            items.append(spec.from_agentgym(number))
        except UnknownItem as error:
            num_unknown = num_unknown + 1
            why = str(error)
    if num_unknown and not items:
        raise ConfigError(f"{path}: {spec.name} has no item of this list: {why}")
    if num_unknown:
        logger.warning("skipped unknown items file=%s unknown=%d reason=%s", path, num_unknown, why)
    return items


class _ItemIdMapper:
    """An episode that maps items of `SUBSET` to the environment's own item ids."""

    def __init__(
        self, env: Env | AsyncEnv, subset: SubsetSpec, items: Mapping[str, Sequence[str]]
    ) -> None:
        self._env = env
        self._subset = subset
        self._items = items

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self, item_id: str, seed: int = 0) -> Any:
        """Start an item; returns the result of the environment's own `reset`, also a coroutine."""
        if item_id.startswith(f"{SUBSET}-"):
            item = parse_item(item_id, {SUBSET: self._subset})
            item_id = self._items[item.split][item.index]
        return self._env.reset(item_id, seed)

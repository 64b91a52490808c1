"""The test sets of AgentGym-RL's tables: the corresponding items and the differences."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from common.config.envs import EnvsSection, ItemFiles
from common.text import counted
from envhub.agentgym.dialects import DIALECTS
from envhub.agentgym.item_lists import own_numbers, read_list
from envhub.env import EnvSpec, PaperSet, UnknownItem, split_item
from envhub.tables import read_table

logger = logging.getLogger(__name__)

PAPER: dict[str, dict[str, Any]] = read_table(__file__, "paper.yaml")


def with_paper(spec: EnvSpec, options: EnvsSection) -> EnvSpec:
    """Return an environment with the paper's test set; unchanged if the paper has none.

    The items come from the configured list (`test_items`), otherwise from the paper's indices. If
    the tasks are not the original ones, or the indices are unpublished, the same number of the
    tasks' own test items is used.
    """
    entry = PAPER.get(spec.name)
    if entry is None:
        return spec
    named = getattr(options, spec.name, None)
    file = named.test_items if isinstance(named, ItemFiles) else ""
    numbers: Sequence[int] = ()
    if file:
        numbers = read_list(file, DIALECTS[spec.name])
    elif not spec.note:
        numbers = _published(spec.name, entry)
    if numbers:
        items = _of_numbers(spec, numbers)
        note = "" if file else entry.get("note", "")
    else:
        items = _of_tasks(spec, entry["sizes"])
        note = spec.note or entry.get("note", "")
    num_items = sum(map(len, items.values()))
    num_meant = sum(entry["sizes"].values())
    if not file and num_items < num_meant:
        lacking = f"{num_items} of the paper's {counted(num_meant, 'item')}"
        note = f"{note}; {lacking}" if note else lacking
    return replace(spec, paper=PaperSet(items=items, turns=entry["turns"], note=note))


def _published(name: str, entry: dict[str, Any]) -> Sequence[int]:
    """Return the data indices of a published test set."""
    numbers = entry.get("numbers", ())
    return own_numbers(DIALECTS[name])["test"] if numbers == "dialect" else numbers


def _of_numbers(spec: EnvSpec, numbers: Sequence[int]) -> dict[str, tuple[str, ...]]:
    """Return the items of data indices by column; missing items are skipped with a warning."""
    item_of = spec.column_item or spec.from_agentgym
    assert item_of is not None
    items: dict[str, list[str]] = {}
    num_unknown = 0
    why = ""
    for number in numbers:
        try:
            item_id = item_of(number)
        except UnknownItem as error:
            num_unknown = num_unknown + 1
            why = str(error)
            continue
        item = split_item(item_id)
        assert item is not None
        items.setdefault(item.subset, []).append(item_id)
    if num_unknown:
        logger.warning(
            "skipped items of the paper env=%s unknown=%d of=%d reason=%s",
            spec.name,
            num_unknown,
            len(numbers),
            why,
        )
    return {subset: tuple(found) for subset, found in items.items()}


def _of_tasks(spec: EnvSpec, sizes: dict[str, int]) -> dict[str, tuple[str, ...]]:
    """Return the given numbers of first test items of the catalogue's tasks."""
    tests = {task.subset: task.test for task in spec.tasks.values()}
    return {subset: tests[subset][:size] for subset, size in sizes.items() if subset in tests}

"""Plans the held-out episodes of the command `eval`."""

import logging
from collections.abc import Mapping

from common.config.tasks import TaskSection
from common.errors import ConfigError
from common.ids import subset_of
from scheduler.curriculum.catalogue import HubCatalogue
from scheduler.curriculum.sampling import Item, eval_items, hash_words, spread
from tools.evaluate.config import EvalItems, EvalOptions
from tools.evaluate.play import PlannedEpisode

logger = logging.getLogger(__name__)

# Environment -> test items of all its tasks, in the catalogue's order.
TaskLists = Mapping[str, list[str]]
NO_TURNS: Mapping[str, int] = {}


def plan_heldout(
    cfg: EvalOptions,
    tasks: list[TaskSection],
    catalogue: HubCatalogue,
    lists: TaskLists,
    turns: Mapping[str, int] = NO_TURNS,
) -> list[PlannedEpisode]:
    """Return the first sample of every item, then the second, up to `eval.k`.

    A seed depends only on its item and the number of its sample.

    Args:
        lists: test items of the tasks; not used with eval.items=spread.
        turns: environment -> most turns, if they differ from those of the subset.

    Raises: ConfigError: there is no item to play, or a subset belongs to no task.
    """
    if cfg.items is EvalItems.SPREAD:
        items = eval_items(tasks, catalogue, cfg.num_items)
    else:
        items = _task_items(cfg, tasks, lists)
    if not items:
        raise ConfigError(
            f"eval.num_items={cfg.num_items}: no held-out item of the configured tasks is selected"
        )
    horizons = {
        (each.env, each.subset): turns.get(each.env)
        or catalogue.entry(each.env, each.subset).max_turns
        for each in items
    }
    return [
        _plan(item, sample, horizons[item.env, item.subset])
        for sample in range(cfg.k)
        for item in items
    ]


def _plan(item: Item, sample: int, horizon: int) -> PlannedEpisode:
    """Return one sample of an item as a planned episode."""
    return PlannedEpisode(
        episode_id=f"{item.env}/{item.item_id}/{horizon}.{sample}",
        env=item.env,
        item_id=item.item_id,
        seed=hash_words("eval", item.env, item.item_id, sample) >> 33,
        horizon=horizon,
    )


def _task_items(cfg: EvalOptions, tasks: list[TaskSection], lists: TaskLists) -> list[Item]:
    """Return the test items of the configured subsets, cut to the same share of each subset."""
    active = [task for task in tasks if task.weight > 0]
    found: list[list[str]] = []
    for task in active:
        listed = lists.get(task.env, [])
        mine = [item_id for item_id in listed if subset_of(item_id) == task.items()]
        if not mine:
            known = sorted({subset_of(item_id) for item_id in listed})
            raise ConfigError(
                f"eval.items={cfg.items}: the list of the"
                f" {'paper' if cfg.items is EvalItems.PAPER else 'catalogue'} has no items of"
                f" {task.items()!r} of {task.env}. It has items of {known}."
            )
        found.append(mine)
    sizes = [len(mine) for mine in found]
    num_items = sum(sizes) if cfg.num_items < 0 else cfg.num_items
    quotas = spread(num_items, weights=[float(size) for size in sizes], caps=sizes)
    if sum(quotas) < sum(sizes):
        num_left = sum(sizes) - sum(quotas)
        text = "eval.num_items=%d skips %d of the %d held-out items of the tasks"
        logger.warning(text, cfg.num_items, num_left, sum(sizes))
    return [
        Item(env=task.env, subset=task.items(), item_id=item_id)
        for task, mine, quota in zip(active, found, quotas, strict=True)
        for item_id in mine[:quota]
    ]

"""Laws of what the command `eval` plays."""

import pytest

from common.config.tasks import TaskSection
from common.errors import ConfigError
from scheduler.curriculum.sampling import eval_items
from tests.scheduler.builders import CATALOGUE, make_config
from tools.evaluate.config import EvalConfig, EvalItems, EvalOptions
from tools.evaluate.evaluate import plan_heldout
from tools.evaluate.play import PlannedEpisode

LISTS = {"maze": ["easy-test-5", "easy-test-3", "easy-test-1", "hard-test-2", "other-test-0"]}


def _choose(cfg: EvalConfig, lists: dict[str, list[str]]) -> list[PlannedEpisode]:
    return plan_heldout(cfg.eval, cfg.tasks, CATALOGUE, lists)


def _config(**fields: object) -> EvalConfig:
    return make_config(evaluation=EvalOptions(**fields))  # type: ignore[arg-type]


def test_items_equal_those_of_run_evaluations_at_full_horizon() -> None:
    cfg = _config(num_items=4)
    items = _choose(cfg, {})
    known = eval_items(cfg.tasks, CATALOGUE, 4)
    assert [item.item_id for item in items] == [item.item_id for item in known]
    assert [item.horizon for item in items] == [8, 8, 30, 30]


def test_seeds_depend_on_item_and_sample_alone() -> None:
    few = _choose(_config(num_items=2, k=2), {})
    many = _choose(_config(num_items=12, k=4), {})
    by_id = {each.episode_id: each for each in many}
    assert [by_id[each.episode_id] for each in few] == few
    assert len(few) == 4
    assert len({each.seed for each in many}) == len(many) == 48


def test_task_items_follow_the_catalogues_lists() -> None:
    items = _choose(_config(items=EvalItems.TASKS), LISTS)
    assert [item.item_id for item in items] == LISTS["maze"][:4]


def test_fewer_task_items_keep_lists_proportions() -> None:
    lists = {"maze": [f"easy-test-{i}" for i in range(6)] + ["hard-test-0", "hard-test-1"]}
    items = _choose(_config(items=EvalItems.TASKS, num_items=4), lists)
    assert [item.item_id for item in items] == [
        "easy-test-0",
        "easy-test-1",
        "easy-test-2",
        "hard-test-0",
    ]


def test_unset_number_plays_all_items() -> None:
    lists = {"maze": [f"easy-test-{i}" for i in range(6)] + ["hard-test-0", "hard-test-1"]}
    items = _choose(_config(items=EvalItems.TASKS, num_items=-1), lists)
    assert [item.item_id for item in items] == lists["maze"]
    assert len(_choose(_config(num_items=-1), {})) == 12


def test_subset_without_a_task_is_refused_by_name() -> None:
    cfg = _config(items=EvalItems.TASKS)
    cfg.tasks.append(TaskSection(env="maze", subset="odd"))
    with pytest.raises(ConfigError, match=r"eval\.items=tasks: .* no items of 'odd' of maze"):
        _choose(cfg, LISTS)


def test_nothing_to_play_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"eval\.num_items=0"):
        _choose(_config(num_items=0), {})

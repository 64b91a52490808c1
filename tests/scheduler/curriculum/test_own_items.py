"""Laws of a curriculum whose items a function of the user chooses."""

import json
from pathlib import Path

import pytest

from common.config.curriculum import CurriculumSection
from common.config.load import load_config
from common.config.mixture import MixtureSection
from common.config.tasks import TaskSection
from common.errors import ConfigError
from common.wire.messages import EndReason, EpisodeSeen
from scheduler.curriculum.catalogue import HubCatalogue, SubsetEntry
from scheduler.curriculum.mixture import Mixture
from scheduler.curriculum.sampling import Item
from scheduler.curriculum.user_functions import ItemFunction, check_user_functions
from scheduler.state import restore, save
from tests.in_process import carry_out

OWN = """
import numpy as np

def in_turn(draw, cfg):
    "The items of all tasks in turn."
    number = draw.state["next"] = draw.state.get("next", -1) + 1
    task = draw.tasks[number % len(draw.tasks)]
    return task.name, number // len(draw.tasks) % task.num_items

def unsolved(draw, cfg):
    task = draw.tasks[0]
    known = [draw.success(task.name, index) for index in range(3)]
    return task.name, next(i for i, success in enumerate(known) if not success)

def anything(draw, cfg):
    task = draw.random.choice(draw.tasks)
    return task.name, draw.random.randrange(task.num_items)

def of_numpy(draw, cfg): return draw.tasks[0].name, np.int64(2)
def number_only(draw, cfg): return 3
def other_task(draw, cfg): return "maze/none", 3
def beyond(draw, cfg): return draw.tasks[0].name, draw.tasks[0].num_items
def negative(draw, cfg): return draw.tasks[0].name, -1
def text(draw, cfg): return draw.tasks[0].name, "1"
def no_arguments(): return 0
def broken(draw, cfg): return draw.items[0]
def drawn_elsewhere(draw, cfg):
    return draw.tasks[0].name, int(np.random.randint(draw.tasks[0].num_items))
"""
CATALOGUE = HubCatalogue(
    envs={
        "maze": {"easy": SubsetEntry(num_train=5, num_test=1, max_turns=9)},
        "shop": {"long": SubsetEntry(num_train=3, num_test=1, max_turns=9)},
    }
)
TASKS = [TaskSection(env="maze", subset="easy"), TaskSection(env="shop", subset="long")]


@pytest.fixture
def own(tmp_path: Path) -> str:
    """The path of a file with the user's functions."""
    path = tmp_path / "own_items.py"
    path.write_text(OWN, encoding="utf-8")
    return str(path)


def mixture_of(reference: str) -> Mixture:
    user = ItemFunction(CurriculumSection(kind=reference), 7)
    return Mixture(MixtureSection(), TASKS, CATALOGUE, seed=7, group_size=2, user=user)


def ids(mixture: Mixture, numbers: range) -> list[str]:
    return [mixture.item(number).item_id for number in numbers]


def test_function_chooses_the_item_of_each_group(own: str) -> None:
    mixture = mixture_of(f"{own}:in_turn")
    expected = ["easy-train-0", "long-train-0", "easy-train-1", "long-train-1", "easy-train-2"]
    assert ids(mixture, range(5)) == expected
    assert mixture.report()["kind"] == f"{own}:in_turn"


def test_whole_number_of_numpy_is_an_item(own: str) -> None:
    assert ids(mixture_of(f"{own}:of_numpy"), range(1)) == ["easy-train-2"]


def test_resumed_curriculum_continues_with_its_state(own: str) -> None:
    whole = ids(mixture_of(f"{own}:in_turn"), range(6))
    first = mixture_of(f"{own}:in_turn")
    begun = ids(first, range(2))
    resumed = mixture_of(f"{own}:in_turn")
    restore(resumed, json.loads(json.dumps(save(first))))
    assert begun + ids(resumed, range(2, 6)) == whole


def test_random_numbers_depend_on_seed_and_group_only(own: str) -> None:
    drawn = ids(mixture_of(f"{own}:anything"), range(20))
    assert drawn == ids(mixture_of(f"{own}:anything"), range(20))
    assert len(set(drawn)) > 3


def test_function_sees_the_success_of_items(own: str) -> None:
    mixture = mixture_of(f"{own}:unsolved")
    assert mixture.item(0).item_id == "easy-train-0"
    item = Item(env="maze", subset="easy", item_id="easy-train-0")
    seen = EpisodeSeen(
        episode_id="g0000000/0",
        reward=1.0,
        is_success=True,
        end_reason=EndReason.DONE,
        num_turns=3,
        wall_s=1.0,
    )
    mixture.see(seen, item)
    assert mixture.item(1).item_id == "easy-train-1"


def test_absent_environment_is_not_offered(own: str) -> None:
    mixture = mixture_of(f"{own}:in_turn")
    assert {mixture.item(i, shunned=["maze"]).env for i in range(4)} == {"shop"}
    assert {mixture.item(i, shunned=["maze", "shop"]).env for i in range(2)} == {"maze", "shop"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("number_only", r"returned 3 for group 0; expected \(task, index\) with one of the tasks"),
        ("other_task", "one of the tasks babyai/GoToLocal"),
        ("beyond", "expected a whole number from 0 to"),
        ("negative", "returned the item -1 of babyai/GoToLocal"),
        ("text", "returned the item '1'"),
        ("no_arguments", r"is called with \(draw, cfg\)"),
        ("broken", "AttributeError.*own_items.py, line"),
        ("drawn_elsewhere", "two calls with equal arguments returned "),
        ("missing", "has no function 'missing'"),
    ],
)
def test_check_names_key_function_and_fault(own: str, name: str, text: str) -> None:
    cfg = load_config("smoke", [f"curriculum.kind={own}:{name}"])
    with pytest.raises(ConfigError, match=text) as raised:
        check_user_functions(cfg)
    assert f"curriculum.kind={own}:{name}" in str(raised.value)


@pytest.mark.slow
def test_dry_run_prints_the_function(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", "smoke", f"curriculum.kind={own}:in_turn", "--dry-run"]
    done = carry_out(words, capsys)
    assert done.returncode == 0, done.stderr
    line = f"# objective: curriculum.kind={own}:in_turn: The items of all tasks in turn. (sha256 "
    assert line in done.stdout

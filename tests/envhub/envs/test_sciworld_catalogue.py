"""ScienceWorld's items and wordings; none of it needs Java."""

import pytest

from common.config.envs import EnvsSection
from envhub.env import Style, UnknownItem, parse_item
from envhub.envs.sciworld import catalogue
from envhub.envs.sciworld.catalogue import Variation
from envhub.envs.sciworld.env import (
    MAX_ACTION_CHARS,
    check,
    compact_text,
    listed_choices,
    make_spec,
    one_line,
)
from tests.configs import edited

ROOM = """This room is called the hallway. In it, you see:\x20
\tthe agent
\ta substance called air
\ta substance called unknown substance A
\ta chair. On the chair is: nothing.
You also see:
\tA door to the art studio (that is closed)
\tA door to the kitchen (that is open)"""

# AgentGym's number of the first variation of some tasks, and of the last of all.
FIRST_IDS = {
    0: Variation("boil", 0),
    30: Variation("melt", 0),
    120: Variation("use-thermometer", 0),
    660: Variation("measure-melting-point-known-substance", 0),
    1096: Variation("measure-melting-point-unknown-substance", 0),
    1436: Variation("test-conductivity", 0),
    2336: Variation("test-conductivity-of-unknown-substances", 0),
    2936: Variation("find-living-thing", 0),
    4136: Variation("chemistry-mix", 0),
    4168: Variation("chemistry-mix-paint-secondary-color", 0),
    4240: Variation("lifespan-longest-lived", 0),
    4490: Variation("lifespan-longest-lived-then-shortest-lived", 0),
    4615: Variation("identify-life-stages-1", 0),
    4629: Variation("identify-life-stages-2", 0),
    4638: Variation("identify-life-stages-2", 9),
}


def loaded(item_id: str) -> Variation:
    return catalogue.variation_of(parse_item(item_id, catalogue.SUBSETS))


def test_agentgyms_numbers_lead_to_its_variations():
    for index, variation in FIRST_IDS.items():
        assert loaded(catalogue.from_agentgym(index)) == variation


def test_agentgym_numbers_name_each_item_once():
    named = {loaded(catalogue.from_agentgym(index)) for index in range(4639)}
    assert len(named) == 4639
    everything = catalogue.SUBSETS["all"]
    assert everything.num_train + everything.num_test == 4639


@pytest.mark.parametrize("index", [-1, 4639, 10**12])
def test_agentgyms_number_out_of_range_is_unknown(index):
    with pytest.raises(UnknownItem, match="the last is 4638"):
        catalogue.from_agentgym(index)


def test_train_and_test_share_no_variation():
    for subset in catalogue.SUBSETS:
        assert not set(catalogue.ITEMS[subset, "train"]) & set(catalogue.ITEMS[subset, "test"])


def test_tasks_have_the_papers_sizes_and_existing_items():
    tasks = make_spec(EnvsSection()).tasks
    sizes = {name: len(task.test) for name, task in tasks.items()}
    assert sizes == {"Measure": 53, "Test-Cond": 83, "Find": 44, "Chem-Mix": 5, "Lifespan": 15}
    for task in tasks.values():
        for split, items in (("train", task.train), ("test", task.test)):
            assert len(set(items)) == len(items)
            for item_id in items:
                item = parse_item(item_id, catalogue.SUBSETS)
                assert (item.subset, item.split) == (task.subset, split)


def test_check_names_an_unknown_simplification():
    options = EnvsSection()
    options = edited(options, {"sciworld.simplifications": "easy,openDors"})
    assert any("openDors" in line for line in check(options))


def test_compact_room_is_one_line_without_constant_objects():
    assert compact_text(ROOM) == (
        "hallway: unknown substance A; chair. On the chair is: nothing; "
        "ways: door to the art studio closed; door to the kitchen open"
    )


def test_compact_question_lists_its_choices():
    question = (
        "Ambiguous request: Please enter the number for the action you intended (or blank to "
        "cancel):\n0:\topen door between kitchen and hallway\n1:\topen door to outside\n"
    )
    assert listed_choices(question) == ("0", "1")
    assert compact_text(question) == (
        "which number? 0: open door between kitchen and hallway; 1: open door to outside"
    )


def test_line_is_printable_ascii_and_bounded():
    assert one_line("  go\tto\0\nkitchen\ud800 \u00e9 ") == "go to kitchen"
    assert len(one_line("x" * 10_000)) == MAX_ACTION_CHARS


def test_instructions_exist_in_both_styles():
    instruction = make_spec(EnvsSection()).instruction
    assert all("focus on" in instruction[style] for style in (Style.COMPACT, Style.AGENTGYM))

"""Laws of the page of recipes: each row states a command, its planned memory and its rate."""

import re

import pytest

from common.repository import ROOT
from tests.docs.recipes import PAGE, RECIPES, Recipe
from tests.docs.table import How, rule_of
from tools.checks.memory_plan import MemoryBudget, plan_here

GIB = 1 << 30
PLANNED = [each for each in RECIPES if each.memory != "no plan"]
WITHOUT_PLAN = ("sft", "dpo", "evolve")  # Commands whose dry run prints no plan.
EXPECTED = re.compile(r"expected on ([\w ]+): ([\d,]+) trained and ([\d,]+) sampled tokens/s")
TOLERANCE = 0.05  # The number format of a processor's units changes a small part.


def fullest(places: list[MemoryBudget]) -> MemoryBudget:
    """Return the GPU that needs most, or the host of a run without GPUs."""
    gpus = [each for each in places if "gpu" in each.name]
    return max(gpus or places, key=lambda place: place.total_bytes)


def comment_of(config: str) -> str:
    """Return the comments of a preset as one text."""
    lines = (ROOT / "configs" / f"{config}.yaml").read_text(encoding="utf-8").splitlines()
    return " ".join(each.removeprefix("# ") for each in lines if each.startswith("#"))


def test_every_row_of_a_recipe_is_read() -> None:
    rows = PAGE.read_text(encoding="utf-8").count("| `python run.py")
    assert len(RECIPES) == rows > 25
    assert {each.request.command for each in RECIPES} == {"train", *WITHOUT_PLAN}


@pytest.mark.parametrize("recipe", PLANNED, ids=str)
def test_memory_of_a_recipe_is_its_plan(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cfg = recipe.configuration
    place = fullest(plan_here(cfg))
    wanted = [place.total_bytes / GIB]
    wanted += [place.capacity_bytes / GIB] if cfg.machine.num_gpus else []
    assert recipe.memory.endswith(" GiB")
    found = [float(each) for each in re.findall(r"[\d.]+", recipe.memory)]
    assert found == pytest.approx(wanted, rel=TOLERANCE)


def test_only_offline_recipes_have_no_plan() -> None:
    without = {each.request.command for each in RECIPES if each not in PLANNED}
    assert without == {*WITHOUT_PLAN}
    assert {each.request.command for each in PLANNED} == {"train"}


def test_rate_of_a_recipe_names_its_measurement() -> None:
    unnamed = [
        recipe.rate
        for recipe in RECIPES
        if recipe.rate != "not measured"
        and not EXPECTED.fullmatch(recipe.rate)
        and not re.fullmatch(r"\[.*\d.*\]\(.+\.md.*\)", recipe.rate)
    ]
    assert unnamed == []


@pytest.mark.parametrize(
    "recipe", [each for each in RECIPES if EXPECTED.fullmatch(each.rate)], ids=str
)
def test_expected_rate_stands_in_the_preset(recipe: Recipe) -> None:
    found = EXPECTED.fullmatch(recipe.rate)
    assert found is not None
    comment = comment_of(recipe.request.config or "")
    if "Expected" not in comment:
        named = re.search(r"are those of ([\w.-]+)[;.]", comment)
        assert named is not None
        comment = comment_of(named[1])
    card, trained, sampled = found.groups()
    expected = comment.partition(f"Expected on {card}")[2]
    assert f"{trained} tokens/s" in expected
    assert f"{sampled} tokens/s" in expected


def test_configuration_of_every_recipe_is_checked() -> None:
    rules = {recipe.command: rule_of(recipe.command) for recipe in RECIPES}
    unchecked = [
        command
        for command, rule in rules.items()
        if rule is None or (rule.how not in (How.DRY, How.CONFIG) and "mcp:" not in command)
    ]
    assert unchecked == []

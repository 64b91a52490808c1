"""Laws of folders of Minecraft recipe files: kept recipes, omitted recipes and item ids."""

import json
from pathlib import Path

import pytest

from common.config.envs import EnvsSection, TextcraftOptions
from envhub.env import Style, parse_item
from envhub.envs.textcraft.book import Book
from envhub.envs.textcraft.env import check, folder_catalogue, make_spec
from envhub.envs.textcraft.minecraft import RecipesError, load_book
from tests.envhub.envs.playing import expert_results, item_of, new_episode


def item(name: str) -> dict[str, str]:
    return {"item": f"minecraft:{name}"}


def tag(name: str) -> dict[str, str]:
    return {"tag": f"minecraft:{name}"}


def shaped(result: str, pattern: list[str], key: dict, *, count: int = 1, group: str = "") -> dict:
    content = {
        "type": "minecraft:crafting_shaped",
        "pattern": pattern,
        "key": key,
        "result": {**item(result), "count": count},
    }
    return {**content, "group": group} if group else content


def shapeless(result: str, parts: list, *, count: int = 1, group: str = "") -> dict:
    content = {
        "type": "minecraft:crafting_shapeless",
        "ingredients": parts,
        "result": {**item(result), "count": count},
    }
    return {**content, "group": group} if group else content


WOOD = {
    "oak_planks": shapeless("oak_planks", [tag("oak_logs")], count=4, group="planks"),
    "birch_planks": shapeless("birch_planks", [item("birch_log")], count=4, group="planks"),
    "stick": shaped("stick", ["#", "#"], {"#": tag("planks")}, count=4, group="sticks"),
    "ladder": shaped("ladder", ["# #", "###", "# #"], {"#": item("stick")}, count=3),
    "sign": shaped("sign", ["PPP", "PPP", " s "], {"P": tag("planks"), "s": item("stick")}),
}
METAL = {
    "iron_ingot_from_iron_block": shapeless("iron_ingot", [item("iron_block")], count=9),
    "iron_ingot_from_nuggets": shaped(
        "iron_ingot", ["###", "###", "###"], {"#": item("iron_nugget")}, group="iron_ingot"
    ),
    "iron_nugget": shapeless("iron_nugget", [item("iron_ingot")], count=9),
    "iron_block": shaped("iron_block", ["###", "###", "###"], {"#": item("iron_ingot")}),
    "glass": {"type": "minecraft:smelting", "ingredient": item("sand"), "result": "glass"},
}


def written(folder: Path, recipes: dict[str, dict]) -> str:
    """Write recipe files, the last name first, and returns their folder."""
    folder.mkdir(exist_ok=True)
    for name, content in sorted(recipes.items(), reverse=True):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return str(folder)


def book_of(folder: Path, recipes: dict[str, dict]) -> Book:
    return load_book(written(folder, recipes))


def commands(book: Book, target: str) -> list[str]:
    return [recipe.command() for recipe in book.recipes[target]]


def options(folder: str) -> EnvsSection:
    return EnvsSection(textcraft=TextcraftOptions(recipes_dir=folder))


def test_shaped_recipe_counts_its_pattern_symbols(tmp_path):
    book = book_of(tmp_path, WOOD)
    assert commands(book, "ladder") == ["craft 3 ladder using 7 stick"]
    assert commands(book, "sign") == ["craft 1 sign using 6 planks, 1 stick"]


def test_shapeless_recipe_sums_ingredients_and_yields_one_by_default(tmp_path):
    recipe = shapeless("book", [item("paper"), item("paper"), item("leather"), item("paper")])
    del recipe["result"]["count"]
    assert commands(book_of(tmp_path, {"book": recipe}), "book") == [
        "craft 1 book using 3 paper, 1 leather"
    ]


def test_ingredient_uses_its_first_alternative_only(tmp_path):
    torch = shaped("torch", ["c", "s"], {"c": [item("coal"), item("charcoal")], "s": item("stick")})
    book = book_of(tmp_path, {"torch": torch})
    assert commands(book, "torch") == ["craft 1 torch using 1 coal, 1 stick"]
    assert not book.is_gettable("charcoal")


def test_recipe_group_becomes_tag_of_outputs(tmp_path):
    book = book_of(tmp_path, WOOD)
    assert book.tags == {"planks": ("birch planks", "oak planks"), "sticks": ("stick",)}
    assert (book.depths["planks"], book.depths["stick"], book.depths["ladder"]) == (1, 2, 3)


def test_command_lists_ingredients_in_key_order(tmp_path):
    key = {"q": item("quartz"), "g": item("glass"), "w": tag("slabs")}
    book = book_of(tmp_path, {"sensor": shaped("sensor", ["ggg", "qqq", "www"], key)})
    assert commands(book, "sensor") == ["craft 1 sensor using 3 quartz, 3 glass, 3 slabs"]


def test_item_without_kept_recipes_is_gettable(tmp_path):
    pillar = shaped("quartz_pillar", ["#", "#"], {"#": item("quartz_block")})
    book = book_of(tmp_path, WOOD | {"quartz_pillar": pillar})
    assert book.is_gettable("quartz pillar")
    assert book.is_gettable("quartz block")
    assert not book.is_gettable("planks")


def test_depth_is_the_shallowest_recipes_deepest_ingredient(tmp_path):
    recipes = {
        **WOOD,
        "lamp": shapeless("lamp", [item("ladder"), item("coal")]),
        "lamp_from_sticks": shapeless("lamp", [item("stick"), item("coal")]),
        "coarse_rug": shapeless("coarse_rug", [item("ladder")], group="rugs"),
        "fine_rug": shapeless("fine_rug", [item("wool")], group="rugs"),
        "tent": shapeless("tent", [tag("rugs"), item("wool")]),
    }
    depths = book_of(tmp_path, recipes).depths
    assert (depths["lamp"], depths["coarse rug"], depths["rugs"], depths["tent"]) == (3, 4, 1, 2)


def test_result_may_be_bare_item_name(tmp_path):
    recipe = shapeless("book", [item("paper")]) | {"result": "minecraft:book"}
    book = book_of(tmp_path, {"book": recipe})
    assert commands(book, "book") == ["craft 1 book using 1 paper"]


def test_tag_without_craftable_members_is_gettable(tmp_path):
    book = book_of(tmp_path, WOOD)
    assert commands(book, "oak planks") == ["craft 4 oak planks using 1 oak logs"]
    assert book.is_gettable("oak logs")
    assert not book.is_gettable("planks")


def test_recipe_from_one_block_is_omitted(tmp_path):
    recipes = {
        "slime_ball": shapeless("slime_ball", [item("slime_block")], count=9),
        "quartz": shaped("quartz", ["##"], {"#": item("quartz_block")}),
        "piston": shapeless("piston", [item("slime_block"), item("stick")]),
    }
    assert list(book_of(tmp_path, recipes).recipes) == ["piston"]


def test_recipe_that_closes_cycle_is_omitted(tmp_path):
    book = book_of(tmp_path, METAL)
    assert "iron nugget" not in book.recipes
    assert book.is_gettable("iron nugget")
    # Files are sorted by name and not by the order of writing: here the nugget comes first.
    renamed = {"a_nugget": METAL["iron_nugget"], "b_ingot": METAL["iron_ingot_from_nuggets"]}
    assert list(book_of(tmp_path / "renamed", renamed).recipes) == ["iron nugget"]


def test_recipe_that_closes_a_tag_cycle_is_omitted(tmp_path):
    cyclic = {
        "a_stick": WOOD["stick"],
        "b_bundle": shapeless("bundle", [item("stick")]),
        "c_planks": shapeless("oak_planks", [item("bundle")], group="planks"),
        "d_planks": WOOD["birch_planks"],
    }
    book = book_of(tmp_path, cyclic)
    assert list(book.recipes) == ["stick", "bundle", "birch planks"]
    assert book.depths["bundle"] == 3


def test_recipe_of_another_type_is_left_out(tmp_path):
    assert "glass" not in book_of(tmp_path, METAL).recipes


def test_tag_named_like_item_is_renamed(tmp_path):
    recipes = {
        "bed": shapeless("bed", [tag("wool")]),
        "rug": shapeless("rug", [item("wool")]),
        "red_wool": shapeless("red_wool", [item("dye")], group="wool"),
    }
    book = book_of(tmp_path, recipes)
    assert commands(book, "bed") == ["craft 1 bed using 1 any wool"]
    assert commands(book, "rug") == ["craft 1 rug using 1 wool"]
    assert book.is_gettable("wool")


def test_newer_notation_is_read_as_well(tmp_path):
    newer = shaped("stick", ["#", "#"], {"#": "#minecraft:planks"}, count=4)
    newer["result"] = {"id": "minecraft:stick", "count": 4}
    book = book_of(tmp_path, {**WOOD, "stick": newer})
    assert commands(book, "stick") == ["craft 4 stick using 2 planks"]


def test_data_index_follows_depth_then_file_names(tmp_path):
    spec = make_spec(options(written(tmp_path, {**WOOD, **METAL})))
    catalogue = folder_catalogue(str(tmp_path))

    def goal(index: int) -> str:
        return catalogue.make_task(parse_item(item_of(spec, index), spec.subsets)).goal

    # iron_block.json stands before iron_ingot_from_nuggets.json, which makes it deeper
    assert [goal(index) for index in range(7)] == [
        *("birch planks", "iron ingot", "oak planks"),
        *("iron block", "stick"),
        *("ladder", "sign"),
    ]
    assert goal(7) == goal(0)
    assert goal(-1) == "sign"


def test_expert_solves_every_item_of_folder(tmp_path):
    spec = make_spec(options(written(tmp_path, {**WOOD, **METAL})))
    assert list(spec.subsets) == ["depth1", "depth2", "depth3"]
    for subset, sizes in spec.subsets.items():
        for split, num in (("train", sizes.num_train), ("test", sizes.num_test)):
            for index in range(min(num, 20)):
                env = new_episode(spec, Style.AGENTGYM)
                env.reset(f"{subset}-{split}-{index}", 0)
                results = expert_results(env)
                assert results[-1].reward == 1.0
                assert len(results) <= sizes.max_turns


def test_two_slots_of_one_kind_consume_two_pieces(tmp_path):
    peg = {"peg": shapeless("peg", [item("oak_planks")] * 3)}
    crate = {"crate": shapeless("crate", [item("oak_planks"), tag("planks")])}
    spec = make_spec(options(written(tmp_path, WOOD | peg | crate)))
    env = new_episode(spec)
    item_ids = [item_of(spec, number) for number in range(5)]
    next(each for each in item_ids if env.reset(each, 0).rstrip(".").endswith("stick"))

    def said(action: str) -> str:
        return env.step(action).observation

    said("get 2 oak logs")
    said("craft 4 oak planks using 1 oak logs")
    assert said("craft 1 peg using 3 oak planks") == "crafted 1 peg"
    both = "craft 1 crate using 1 oak planks, 1 oak planks"
    assert said(both) == "could not find enough items to craft crate"
    assert said("inventory") == "inventory: 1 oak logs, 1 oak planks, 1 peg"
    said("craft 4 oak planks using 1 oak logs")
    assert said(both) == "crafted 1 crate"
    assert said("inventory") == "inventory: 3 oak planks, 1 peg, 1 crate"


def test_observation_shows_every_member_of_tag(tmp_path):
    spec = make_spec(options(written(tmp_path, WOOD)))
    item_ids = [item_of(spec, number) for number in range(5)]
    item_id = next(each for each in item_ids if each.startswith("depth2"))
    shown = new_episode(spec, Style.AGENTGYM).reset(item_id, 0)
    assert shown.endswith("\n\nGoal: craft stick.")
    for command in ("craft 4 stick using 2 planks", "craft 4 birch planks using 1 birch log"):
        assert command in shown.split("\n")


def test_folder_tasks_name_existing_items(tmp_path):
    spec = make_spec(options(written(tmp_path, {**WOOD, **METAL})))
    for task in spec.tasks.values():
        assert task.test
        for item_id in (*task.train, *task.test):
            parse_item(item_id, spec.subsets)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "has no *.json file"),
        ({"a": "{"}, "a.json is not a recipe: JSONDecodeError"),
        ({"a": "[]"}, "a.json is not a recipe: TypeError"),
        ({"a": '{"type": "crafting_shaped", "pattern": ["x"], "key": {}}'}, "KeyError: 'x'"),
        ({"a": '{"type": "minecraft:smelting"}'}, "none of its files is a crafting recipe (1)"),
    ],
)
def test_bad_folder_is_reported_at_start(tmp_path, files, reason):
    for name, text in files.items():
        (tmp_path / f"{name}.json").write_text(text, encoding="utf-8")
    (line,) = check(options(str(tmp_path)))
    assert line.startswith("envs.textcraft.recipes_dir: ")
    assert reason in line
    with pytest.raises(RecipesError):
        make_spec(options(str(tmp_path)))


def test_missing_folder_is_reported_at_start(tmp_path):
    (line,) = check(options(str(tmp_path / "none")))
    assert "is not a folder" in line

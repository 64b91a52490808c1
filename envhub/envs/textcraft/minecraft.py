"""Parser of a folder of Minecraft recipe files."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from envhub.envs.textcraft.book import Book, Recipe, make_book

NAMESPACE = "minecraft:"
SHAPED = "crafting_shaped"
SHAPELESS = "crafting_shapeless"
BLOCK_SUFFIX = "_block"


class RecipesError(ValueError):
    """The folder has no usable recipes; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class Ingredient:
    """An item or, with `is_tag`, any item of a kind; with the file's name and namespace."""

    name: str
    is_tag: bool


@dataclass(frozen=True, slots=True)
class FileRecipe:
    """One recipe file; `group` is its target's tag, or None."""

    target: str
    count: int
    group: str | None
    ingredients: tuple[tuple[int, Ingredient], ...]

    def makes(self) -> tuple[Ingredient, ...]:
        """Return the target, and its tag if there is one."""
        item = Ingredient(self.target, False)
        return (item,) if self.group is None else (item, Ingredient(self.group, True))


@lru_cache(maxsize=4)
def load_book(folder: str) -> Book:
    """Return the book of a folder of recipe files.

    Files are read in the order of their names, so that the book is the same on every machine. Only
    shaped and shapeless crafting counts. The first alternative of an ingredient is used. Recipes
    from a single kind of block are left out, and so are recipes that would close a cycle with
    earlier ones. A tag without a craftable member is an item of the same name.

    Raises: RecipesError: no such folder, a file that is no recipe, or no recipe at all.
    """
    paths = sorted(Path(folder).glob("*.json"), key=lambda path: path.name)
    if not paths:
        what = "has no *.json file" if Path(folder).is_dir() else "is not a folder"
        raise RecipesError(f"{folder} {what}")
    file_recipes: list[FileRecipe] = []
    makers: dict[Ingredient, list[FileRecipe]] = {}
    known_items: set[str] = set()  # Items that occur only in omitted recipes are still gettable.
    for path in paths:
        recipe = _read(path)
        if recipe is None:
            continue
        known_items.add(recipe.target)
        known_items |= {part.name for _, part in recipe.ingredients if not part.is_tag}
        if _is_block_only(recipe) or _closes_cycle(recipe, makers):
            continue
        file_recipes.append(recipe)
        for made in recipe.makes():
            makers.setdefault(made, []).append(recipe)
    if not file_recipes:
        raise RecipesError(f"{folder}: none of its files is a crafting recipe ({len(paths)})")
    return _to_book(file_recipes, known_items)


def _read(path: Path) -> FileRecipe | None:
    """Return the recipe of a file; None if its type is not crafting."""
    try:
        content = json.loads(path.read_bytes())
        kind = str(content["type"]).removeprefix(NAMESPACE)
        if kind == SHAPED:
            symbols = Counter("".join(content["pattern"]).replace(" ", ""))
            wanted = {symbol: content["key"][symbol] for symbol in symbols}
            # The order of the key is AgentGym's order.
            order = [symbol for symbol in content["key"] for _ in range(symbols[symbol])]
            parts = [_ingredient(wanted[symbol]) for symbol in order]
        elif kind == SHAPELESS:
            parts = [_ingredient(part) for part in content["ingredients"]]
        else:
            return None
        target, count = _result(content["result"])
        if not parts or count < 1:
            raise ValueError("the recipe has no result or no ingredients")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OSError) as error:
        raise RecipesError(f"{path} is not a recipe: {type(error).__name__}: {error}") from error
    group = content.get("group")
    counted = tuple((number, part) for part, number in Counter(parts).items())
    return FileRecipe(target, count, _full(group) if group else None, counted)


def _ingredient(part: Any) -> Ingredient:
    """Return the first alternative of an ingredient, in the older or the newer notation."""
    if isinstance(part, list):
        part = part[0]
    if isinstance(part, str):
        return Ingredient(_full(part.removeprefix("#")), part.startswith("#"))
    if "item" in part:
        return Ingredient(_full(part["item"]), False)
    return Ingredient(_full(part["tag"]), True)


def _result(result: Any) -> tuple[str, int]:
    """Return the target of a recipe file, and its count."""
    if isinstance(result, str):
        return _full(result), 1
    return _full(result["item"] if "item" in result else result["id"]), int(result.get("count", 1))


def _full(name: str) -> str:
    """Return an item's id with its namespace."""
    return name if ":" in name else NAMESPACE + name


def _is_block_only(recipe: FileRecipe) -> bool:
    """Return whether a recipe only unpacks a block of the same material."""
    return len(recipe.ingredients) == 1 and recipe.ingredients[0][1].name.endswith(BLOCK_SUFFIX)


def _closes_cycle(recipe: FileRecipe, makers: Mapping[Ingredient, list[FileRecipe]]) -> bool:
    """Return whether an ingredient is made from the target by earlier recipes."""
    made = recipe.makes()
    needed = [part for _, part in recipe.ingredients]
    seen = set(needed)
    while needed:
        part = needed.pop()
        if part in made:
            return True
        for earlier in makers.get(part, ()):
            following = {p for _, p in earlier.ingredients} - seen
            seen |= following
            needed.extend(following)
    return False


def _to_book(file_recipes: list[FileRecipe], known_items: set[str]) -> Book:
    """Return the book with displayed names; recipes keep the order of the files."""
    members: dict[str, dict[str, None]] = {}
    for recipe in file_recipes:
        if recipe.group is not None:
            members.setdefault(recipe.group, {})[shown(recipe.target)] = None
    parts = {part for recipe in file_recipes for _, part in recipe.ingredients}
    items = {shown(recipe.target) for recipe in file_recipes}
    items |= {shown(part.name) for part in parts if not part.is_tag}
    names = {
        part: _tag_name(part, items) if part.is_tag and part.name in members else shown(part.name)
        for part in parts
    }
    recipes: dict[str, list[Recipe]] = {}
    for recipe in file_recipes:
        merged: Counter[str] = Counter()
        for number, part in recipe.ingredients:
            merged[names[part]] += number
        slots = tuple((number, name) for name, number in merged.items())
        made = Recipe(shown(recipe.target), recipe.count, slots)
        recipes.setdefault(made.target, []).append(made)
    tags = {
        names[part]: tuple(members[part.name])
        for part in sorted(parts, key=lambda part: part.name)
        if part.is_tag and part.name in members
    }
    # A kind that no recipe uses is a tag, too: it is neither gettable nor craftable.
    for group, made in members.items():
        if shown(group) not in items:
            tags.setdefault(shown(group), tuple(made))
    return make_book(recipes, tags, map(shown, known_items - members.keys()))


def _tag_name(tag: Ingredient, items: set[str]) -> str:
    """Return a tag's plain name, or `any <name>` if an item has the same name."""
    name = shown(tag.name)
    return f"any {name}" if name in items else name


def shown(name: str) -> str:
    """Return the displayed name: `minecraft:oak_log` is `oak log`."""
    return name.removeprefix(NAMESPACE).replace("_", " ")

"""Recipe books: recipes by target, tags, and the depth of each item."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from envhub.tables import read_table

_TABLE = read_table(__file__, "recipes.yaml")
TAGS: dict[str, tuple[str, ...]] = {tag: tuple(members) for tag, members in _TABLE["tags"].items()}


@dataclass(frozen=True, slots=True)
class Recipe:
    """`count` of `target` from ingredients (count, item or tag), each listed once."""

    target: str
    count: int
    ingredients: tuple[tuple[int, str], ...]

    def command(self) -> str:
        """Return the crafting command in observations; tags have their plain names."""
        parts = ", ".join(f"{count} {name}" for count, name in self.ingredients)
        return f"craft {self.count} {self.target} using {parts}"


@dataclass(frozen=True, slots=True)
class Book:
    """All recipes. An item is either craftable or gettable; a tag is neither."""

    recipes: Mapping[str, tuple[Recipe, ...]]
    tags: Mapping[str, tuple[str, ...]]
    # Depth of items and tags; 0 for items that can only be obtained with `get`.
    depths: Mapping[str, int]
    users: Mapping[str, tuple[Recipe, ...]]  # Recipes that use an item or tag, in book order.
    gettable: frozenset[str]  # Items that `get` provides.

    def is_gettable(self, name: str) -> bool:
        """Return whether `get` provides this item."""
        return name in self.gettable

    def members(self, name: str) -> tuple[str, ...]:
        """Return the members of a tag with the lowest depth, or the item itself."""
        members = self.tags.get(name)
        if members is None:
            return (name,)
        return tuple(m for m in members if self.depths[m] == self.depths[name])

    def goals(self, depth: int) -> list[str]:
        """Return the craftable items of a depth, sorted."""
        return sorted(item for item in self.recipes if self.depths[item] == depth)


def recipe_lines() -> list[str]:
    """Return every recipe of our own table as one line."""
    lines: list[str] = _TABLE["recipes"].splitlines()
    for family in _TABLE["families"]:
        columns = family["over"]
        for values in zip(*columns.values(), strict=True):
            text = family["recipes"].format(**dict(zip(columns, values, strict=True)))
            lines += text.splitlines()
    return lines


def parse_recipe(line: str) -> Recipe:
    """Return the recipe of one line of the table."""
    product, _, inputs = line.partition(" = ")
    count, _, target = product.partition(" ")
    ingredients = []
    for part in inputs.split(", "):
        num, _, name = part.partition(" ")
        ingredients.append((int(num), name.removeprefix("#")))
    return Recipe(target, int(count), tuple(ingredients))


@cache
def the_book() -> Book:
    """Return our own recipe book.

    Raises: ValueError: the table has a cycle.
    """
    recipes: dict[str, list[Recipe]] = {}
    for recipe in map(parse_recipe, recipe_lines()):
        recipes.setdefault(recipe.target, []).append(recipe)
    return make_book({target: recipes[target] for target in sorted(recipes)}, TAGS)


def make_book(
    recipes: Mapping[str, Sequence[Recipe]],
    tags: Mapping[str, tuple[str, ...]],
    others: Iterable[str] = (),
) -> Book:
    """Return the book of some recipes and other items; an item's easiest recipe comes first.

    Raises: ValueError: there is a cycle.
    """
    by_target = {target: tuple(made) for target, made in recipes.items()}
    depths = dict.fromkeys(others, 0) | _depths(by_target, tags)
    # The easiest recipe is first, because the solver uses the first.
    ordered = {
        target: tuple(sorted(rs, key=lambda r: (_depth_of(r, depths), r.command())))
        for target, rs in by_target.items()
    }
    users: dict[str, list[Recipe]] = {}
    for made in ordered.values():
        for recipe in made:
            for _, part in recipe.ingredients:
                users.setdefault(part, []).append(recipe)
    frozen_users = {part: tuple(using) for part, using in users.items()}
    gettable = frozenset(depths.keys() - ordered.keys() - tags.keys())
    return Book(recipes=ordered, tags=tags, depths=depths, users=frozen_users, gettable=gettable)


def _depth_of(recipe: Recipe, depths: Mapping[str, int]) -> int:
    """Return the depth of a recipe: one more than that of its deepest ingredient."""
    return 1 + max(depths[name] for _, name in recipe.ingredients)


def _depths(
    recipes: Mapping[str, tuple[Recipe, ...]], tags: Mapping[str, tuple[str, ...]]
) -> dict[str, int]:
    """Return depths: 0 without recipe, else 1 + the deepest ingredient of the easiest recipe."""
    depths: dict[str, int] = {}
    open_items: set[str] = set()

    def depth(name: str) -> int:
        """Return the depth of an item. Raises: ValueError: its recipes have a cycle."""
        if name in depths:
            return depths[name]
        if name in open_items:
            raise ValueError(f"the recipes have a cycle through {name!r}")
        open_items.add(name)
        if name in tags:
            smallest = min(depth(member) for member in tags[name])
        else:
            smallest = min(
                (1 + max(depth(part) for _, part in r.ingredients) for r in recipes.get(name, ())),
                default=0,
            )
        open_items.discard(name)
        depths[name] = smallest
        return smallest

    for target in recipes:
        depth(target)
    return depths

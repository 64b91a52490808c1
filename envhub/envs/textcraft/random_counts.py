"""Recipes with random numbers, so that a goal's needs cannot be remembered from the book."""

import random
from collections.abc import Iterator
from dataclasses import replace

from envhub.envs.textcraft.book import Book, Recipe
from envhub.envs.textcraft.tasks import CraftTask

MAX_COUNT = 9
ONE_FRAC = 0.35  # Share of the counts that are 1; the book also has more ones than other counts.
OTHER_FRAC = 0.3  # Share of the gettable ingredients that are replaced by another gettable item.
MAX_CRAFTS = 2  # Maximum crafts of an ingredient, so that a task takes only a few more turns.


def redrawn(task: CraftTask, book: Book, rng: random.Random) -> tuple[CraftTask, Book]:
    """Return the task with new counts and some new ingredients, and the book of its recipes.

    The goal, the selection of recipes, their order and their depths are unchanged.
    """
    gettable = sorted(book.gettable)
    makes = {recipe.target: _count(rng, MAX_COUNT) for recipe in task.recipes}
    changed: dict[Recipe, Recipe] = {}
    for recipe in task.recipes:
        parts: dict[str, int] = {}
        for _, part in recipe.ingredients:
            if part in book.gettable:
                other = rng.choice(gettable) if rng.random() < OTHER_FRAC else part
                part = other if other not in _names(recipe, parts) else part
            made = min(_made(part, makes, book), default=MAX_COUNT)
            parts[part] = _count(rng, min(MAX_COUNT, MAX_CRAFTS * made))
        counts = tuple((count, part) for part, count in parts.items())
        changed[recipe] = replace(recipe, count=makes[recipe.target], ingredients=counts)
    recipes = dict(book.recipes)
    for target in makes:
        recipes[target] = tuple(changed.get(each, each) for each in book.recipes[target])
    shown = tuple(changed[recipe] for recipe in task.recipes)
    return replace(task, recipes=shown), replace(book, recipes=recipes)


def _count(rng: random.Random, most: int) -> int:
    """Return a random count, often 1."""
    return 1 if rng.random() < ONE_FRAC else rng.randint(1, most)


def _names(recipe: Recipe, chosen: dict[str, int]) -> set[str]:
    """Return the ingredients of a recipe and those already drawn."""
    return {part for _, part in recipe.ingredients} | chosen.keys()


def _made(part: str, makes: dict[str, int], book: Book) -> Iterator[int]:
    """Yield the product counts of recipes for a part or its members; nothing if it is gettable."""
    for member in book.tags.get(part, (part,)):
        if member in makes:
            yield makes[member]

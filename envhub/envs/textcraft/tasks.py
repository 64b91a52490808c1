"""TextCraft tasks: which goals a subset has, and the crafting commands an item shows."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from envhub.env import ItemId, SubsetSpec
from envhub.envs.textcraft.book import Book, Recipe, the_book

MAX_TURNS = {1: 6, 2: 10, 3: 16, 4: 24}
TEST_FRAC = 0.25
MIN_TEST_GOALS = 3
NUM_TRAIN_VARIATIONS = 1000
NUM_TEST_VARIATIONS = 25
MAX_SHOWN_MEMBERS = 2
MAX_DISTRACTORS = 5


@dataclass(frozen=True, slots=True)
class Task:
    """One item: a goal, the recipes shown in their order, and the tag members these make."""

    goal: str
    recipes: tuple[Recipe, ...]
    members: Mapping[str, tuple[str, ...]]


@cache
def goals(depth: int, split: str) -> tuple[str, ...]:
    """Returns the goals of a depth and split; train and test goals never meet."""
    shuffled = the_book().goals(depth)
    random.Random(f"goals of depth {depth}").shuffle(shuffled)
    num_test = max(MIN_TEST_GOALS, round(len(shuffled) * TEST_FRAC))
    chosen = shuffled[:num_test] if split == "test" else shuffled[num_test:]
    return tuple(sorted(chosen))


def subsets() -> dict[str, SubsetSpec]:
    """Returns one subset per depth."""
    return {
        f"depth{depth}": SubsetSpec(
            num_train=len(goals(depth, "train")) * NUM_TRAIN_VARIATIONS,
            num_test=len(goals(depth, "test")) * NUM_TEST_VARIATIONS,
            max_turns=max_turns,
        )
        for depth, max_turns in MAX_TURNS.items()
    }


def make_task(item: ItemId) -> Task:
    """Returns the task of an item: index i is goal i mod n, variation i div n.

    The variation draws the tag members whose recipes are shown, the distractors and the order.
    """
    names = goals(int(item.subset.removeprefix("depth")), item.split)
    goal, variation = names[item.index % len(names)], item.index // len(names)
    rng = random.Random(f"{goal}/{item.split}/{variation}")
    book = the_book()
    needed, members = _needed(book, goal, rng)
    shown = list(needed) + _distractors(book, needed, rng)
    rng.shuffle(shown)
    return Task(goal, tuple(shown), members)


def _needed(
    book: Book, goal: str, rng: random.Random
) -> tuple[dict[Recipe, None], dict[str, tuple[str, ...]]]:
    """Returns the recipes reachable from the goal and the members drawn for each tag met."""
    needed: dict[Recipe, None] = {}
    members: dict[str, tuple[str, ...]] = {}
    queue = [goal]
    while queue:
        name = queue.pop()
        if name in book.tags:
            if name not in members:
                pool = book.members(name)
                members[name] = tuple(rng.sample(pool, min(MAX_SHOWN_MEMBERS, len(pool))))
                queue.extend(members[name])
            continue
        for recipe in book.recipes.get(name, ()):
            if recipe not in needed:
                needed[recipe] = None
                queue.extend(part for _, part in recipe.ingredients)
    return needed, members


@cache
def _recipes_using(name: str) -> tuple[Recipe, ...]:
    everything = (recipe for recipes in the_book().recipes.values() for recipe in recipes)
    return tuple(r for r in everything if any(part == name for _, part in r.ingredients))


def _distractors(book: Book, needed: dict[Recipe, None], rng: random.Random) -> list[Recipe]:
    """Returns recipes that are not needed but use something that the needed ones use."""
    parts = dict.fromkeys(part for recipe in needed for _, part in recipe.ingredients)
    pool = dict.fromkeys(r for part in parts for r in _recipes_using(part) if r not in needed)
    return rng.sample(list(pool), min(MAX_DISTRACTORS, len(pool)))

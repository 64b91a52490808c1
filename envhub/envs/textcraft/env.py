"""TextCraft's catalogue entry, with the recipes and tasks of the options.

Items can have permuted words and random numbers, so that recipes must be read, not remembered.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from common.config.envs import EnvsSection
from envhub.env import EnvSpec, StepResult, Style, parse_item
from envhub.envs.textcraft.book import Book, Recipe
from envhub.envs.textcraft.episode import TextCraftEnv
from envhub.envs.textcraft.minecraft import RecipesError
from envhub.envs.textcraft.tasks import CraftCatalogue, CraftTask, folder_catalogue, our_catalogue
from envhub.tasks import spec_beside

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


KEPT = frozenset(("a", "and", "item", "of", "on"))  # These words occur in our own sentences.
WORD = re.compile(r"[a-z]+")


class Exchange:
    """A permutation of the words of a book's items.

    Example: with oak -> iron, log -> dye, iron -> oak, the world's "get 1 oak log" is shown as
    "get 1 iron dye". The agent's "get 1 iron dye" is translated back to "get 1 oak log".
    """

    def __init__(self, words: list[str], seed: str) -> None:
        others = words.copy()
        random.Random(seed).shuffle(others)
        self._shown = dict(zip(words, others, strict=True))
        self._meant = dict(zip(others, words, strict=True))

    def shown(self, text: str) -> str:
        """Return the world's text in the agent's words."""
        return WORD.sub(lambda word: self._shown.get(word[0], word[0]), text)

    def meant(self, text: str) -> str:
        """Return the agent's text in the world's words."""
        return WORD.sub(lambda word: self._meant.get(word[0], word[0]), text)


class ExchangedEnv(TextCraftEnv):
    """TextCraft with permuted words and random numbers in a share of the training items.

    An item is always the same. Items of the test split are unchanged.
    """

    def __init__(self, style: Style, *, catalogue: CraftCatalogue, frac: float) -> None:
        super().__init__(style, catalogue=catalogue)
        self._frac = frac
        names = (name.split() for name in catalogue.book.depths)
        self._vocabulary = sorted({word for name in names for word in name} - KEPT)
        self._exchange: Exchange | None = None

    def reset(self, item_id: str, seed: int = 0) -> str:
        """Start an item. `seed` is unused: the item determines everything."""
        is_train = parse_item(item_id, self._catalogue.subsets).split == "train"
        is_exchanged = is_train and random.Random(f"is {item_id}").random() < self._frac
        self._exchange = Exchange(self._vocabulary, item_id) if is_exchanged else None
        return self._shown(super().reset(item_id, seed))

    def _make_task(self, item_id: str) -> CraftTask:
        """Return the task of an item, with new numbers if its words are permuted."""
        task = super()._make_task(item_id)
        self._book = self._catalogue.book
        if self._exchange is not None:
            task, self._book = redrawn(task, self._book, random.Random(f"numbers {item_id}"))
        return task

    def _shown(self, text: str) -> str:
        """Return a text in the agent's words."""
        return text if self._exchange is None else self._exchange.shown(text)

    def _step(self, action: str) -> StepResult:
        """Perform a command in the words of the agent."""
        if self._exchange is None:
            return super()._step(action)
        result = super()._step(self._exchange.meant(action.lower() if self._is_compact else action))
        result.observation = self._exchange.shown(result.observation)
        return result

    def _valid_actions(self) -> list[str]:
        return [self._shown(action) for action in super()._valid_actions()]

    def _expert_action(self) -> str | None:
        action = super()._expert_action()
        return action and self._shown(action)

    def render(self) -> str:
        """Return the goal, the commands and the inventory."""
        return self._shown(super().render())

    def detail(self, what: str) -> Any:
        """Return the `picture` of TextCraft, with the permuted names."""
        details = super().detail(what)
        if details is None or self._exchange is None:
            return details
        inventory = {self._shown(name): count for name, count in details["held"].items()}
        return {"tree": self._renamed(details["tree"]), "held": inventory}

    def _renamed(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return a tree of ingredients with the agent's names."""
        parts = [self._renamed(part) for part in tree["parts"]]
        return tree | {"name": self._shown(tree["name"]), "parts": parts}

    def _state(self) -> str:
        return self._shown(super()._state())


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return TextCraft's catalogue entry.

    Raises: RecipesError: the folder of recipe files is unusable.
    """
    folder = options.textcraft.recipes_dir
    catalogue = folder_catalogue(folder) if folder else our_catalogue()
    if options.textcraft.max_distractors >= 0:
        catalogue = replace(catalogue, max_distractors=options.textcraft.max_distractors)
    make = partial(TextCraftEnv, catalogue=catalogue)
    if options.textcraft.exchanged_frac:
        make = partial(ExchangedEnv, catalogue=catalogue, frac=options.textcraft.exchanged_frac)
    spec = spec_beside(__file__, catalogue.subsets, make, from_agentgym=catalogue.from_agentgym)
    return replace(spec, tasks=catalogue.tasks()) if folder else spec


def check(options: EnvsSection) -> list[str]:
    """Return a line about the problem of the recipe folder, if one is given."""
    if not options.textcraft.recipes_dir:
        return []
    try:
        folder_catalogue(options.textcraft.recipes_dir)
    except RecipesError as error:
        return [f"envs.textcraft.recipes_dir: {error}; use a folder of Minecraft recipe files"]
    return []

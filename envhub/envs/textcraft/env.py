"""TextCraft: get ingredients and craft until the goal item is made.

Items can have permuted words and random numbers, so that recipes must be read, not remembered.
"""

import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from common.config.envs import EnvsSection
from envhub.digests import digest_of_files
from envhub.env import EnvSpec, StepResult, Style, action_text, parse_item
from envhub.envs.text_env import TextEnv, plain_result
from envhub.envs.textcraft.book import Book, Recipe
from envhub.envs.textcraft.minecraft import NAMESPACE, RecipesError
from envhub.envs.textcraft.tasks import CraftCatalogue, CraftTask, folder_catalogue, our_catalogue
from envhub.tasks import spec_beside


def next_action(
    book: Book, goal: str, inventory: Mapping[str, int], members: Mapping[str, tuple[str, ...]]
) -> str:
    """Return the next `get` or `craft` towards `goal`; following it always reaches the goal.

    Args:
        book: the recipe book.
        goal: a craftable item.
        inventory: counts of held items.
        members: for each tag, the items to use for it, the preferred one first.
    """
    recipe = book.recipes[goal][0]
    return _craft(book, recipe, 1, Counter(inventory), members)


def _craft(book: Book, recipe: Recipe, num_times: int, free: Counter[str], members: Mapping) -> str:
    """Return the next action towards crafting a recipe; remove the used items from `free`."""
    used = []
    for count, part in recipe.ingredients:
        total = count * num_times
        item = _choose(book, part, count, free, members)
        action = _provide(book, item, total, free, members)
        if action is not None:
            return action
        used.append(f"{count} {item}")
    return f"craft {recipe.count} {recipe.target} using {', '.join(used)}"


def _choose(book: Book, part: str, count: int, free: Counter[str], members: Mapping) -> str:
    """Return the item for a slot: a member held in full, or else the preferred one."""
    if part not in book.tags:
        return part
    sufficient = [member for member in book.tags[part] if free[member] >= count]
    return sufficient[0] if sufficient else members.get(part, book.members(part))[0]


def _provide(book: Book, item: str, count: int, free: Counter[str], members: Mapping) -> str | None:
    """Reserve `count` of an item in `free`; return the next action for the missing amount."""
    taken = min(count, free[item])
    free[item] -= taken
    missing = count - taken
    if not missing:
        return None
    if book.is_gettable(item):
        return f"get {missing} {item}"
    recipe = book.recipes[item][0]
    return _craft(book, recipe, -(-missing // recipe.count), free, members)


MAX_ECHO_CHARS = 200  # Limit of repeated action text in observations, since it is untrusted.
COUNTED = re.compile(r"([0-9]{1,9}) +(\S.*)")
# The name is all words before the first "using". Each word is matched possessively: a lazy `.*?`
# would take hours on a million spaces.
NAME = r"(?=\S)[^ \n]++(?: ++(?!using +\S)[^ \n]++)*+"
CRAFT = re.compile(rf"craft +(?:([0-9]{{1,9}}) +)?({NAME}) +using +(\S.*)")
GET = re.compile(r"get +([0-9]{1,9}) +(\S.*)")
# Limits of the parse cache: length of an action, and number of actions.
MAX_KEPT_CHARS = 200
MAX_KEPT = 8_192


class CraftCommand(NamedTuple):
    """A parsed action, independent of the world."""

    verb: str  # "get", "craft" or "inventory"; "?": none of them; "wrong": a wrong ingredient.
    count: int = 1
    name: str = ""  # Name of the wanted item, or the text that was not understood.
    ingredients: tuple[tuple[int, str], ...] = ()  # Pairs of count and item.
    message: str = ""  # The success message of "get", or the item id of the product of "craft".


class TextCraftEnv(TextEnv):
    """One TextCraft episode. Crafting the goal item gives reward 1 and ends it."""

    def __init__(self, style: Style, *, catalogue: CraftCatalogue | None = None) -> None:
        super().__init__(style)
        self._catalogue = catalogue or our_catalogue()
        self._book = self._catalogue.book
        self._inventory: Counter[str] = Counter()
        self._read = read_lower if self._is_compact else read_exactly

    def reset(self, item_id: str, seed: int = 0) -> str:
        """Start an item. `seed` is unused: the item determines everything."""
        self._task = self._make_task(item_id)
        self._inventory = Counter()
        self._begin()
        commands = "\n".join(recipe.command() for recipe in self._task.recipes)
        if self._is_compact:
            return f"{commands}\ngoal: {self._task.goal}"
        return f"Crafting commands:\n{commands}\n\nGoal: craft {self._task.goal}."

    def save(self) -> dict[str, int]:
        """Return the inventory."""
        return dict(self._inventory)

    def load(self, state: dict[str, int]) -> None:
        """Replace the inventory by a saved one."""
        self._inventory = Counter(state)

    def _make_task(self, item_id: str) -> CraftTask:
        """Return the task of an item."""
        return self._catalogue.make_task(parse_item(item_id, self._catalogue.subsets))

    def _step(self, action: str) -> StepResult:
        """Perform a command, and describe the result."""
        read = self._read if len(action) <= MAX_KEPT_CHARS else self._read.__wrapped__
        verb, count, name, ingredients, message = read(action)
        if verb == "get":
            return self._get(count, name, message)
        if verb == "craft":
            return self._craft(count, name, ingredients, message)
        if verb == "inventory":
            return plain_result(self._inventory_text(self._is_compact), True)
        if verb == "wrong":
            return self._refusal(f"Wrong item format: {name}", "wrong item format")
        return self._refusal(f"Could not execute {name}", "could not execute")

    def state_text(self) -> str:
        """Return a text that identifies the current state of the item."""
        stacks = sorted((name, count) for name, count in self._inventory.items() if count)
        return f"holds {stacks}"

    def _refusal(self, agentgym: str, compact: str) -> StepResult:
        """Return the result of an impossible action, in the style of the episode."""
        return plain_result(compact if self._is_compact else agentgym, False)

    def _inventory_text(self, is_compact: bool) -> str:
        """Return the inventory as text."""
        items = self._inventory.items()
        if is_compact:
            listed = ", ".join([f"{count} {name}" for name, count in items if count])
            return f"inventory: {listed or 'nothing'}"
        if not items:
            return "Inventory: You are not carrying anything."
        return "Inventory: " + "".join([f"[{name}] ({count}) " for name, count in items])

    def _get(self, count: int, name: str, message: str) -> StepResult:
        """Add an item to the inventory, if it is gettable."""
        if name not in self._book.gettable:
            compact = f"could not find {self._known(name)}".rstrip()
            return self._refusal(f"Could not find {name[:MAX_ECHO_CHARS]}", compact)
        inventory = self._inventory
        inventory[name] = inventory.get(name, 0) + count
        return plain_result(message, True)

    def _craft(
        self, count_asked: int, target: str, ingredients: tuple[tuple[int, str], ...], raw: str
    ) -> StepResult:
        """Craft an item. Check first the held ingredients, then that a recipe matches exactly.

        The requested count only appears in one error message; the recipe determines the produced
        count.
        """
        inventory = self._inventory
        for count, name in ingredients:
            if name not in inventory or inventory[name] < count:
                return self._too_few(target, raw)
        recipe = find_recipe(self._book, target, ingredients)
        if recipe is None:
            tag, item_id = (raw, None) if target in self._book.tags else (None, raw)
            return self._refusal(
                "Could not find a valid recipe for ItemTagWithCount(item_tag=ItemTag("
                f"tag={tag!r}, item_id={item_id!r}), count={count_asked})",
                f"could not find a valid recipe for {self._known(target)}".rstrip(),
            )
        wanted: Counter[str] = Counter()
        for count, name in ingredients:
            wanted[name] += count
        if not wanted <= inventory:  # One kind of item can fill two slots.
            return self._too_few(target, raw)
        for name, count in wanted.items():
            inventory[name] -= count
            if not inventory[name]:
                del inventory[name]
        inventory[target] += recipe.count
        message = f"Crafted {recipe.count} {raw}"
        if self._is_compact:
            message = f"crafted {recipe.count} {target}"
        if target != self._task.goal:
            return plain_result(message, True)
        self._done = True
        return StepResult(observation=message, reward=1.0, done=True, is_valid=True)

    def _too_few(self, target: str, raw: str) -> StepResult:
        """Return the refusal for missing ingredients."""
        if self._is_compact:
            message = f"could not find enough items to craft {self._known(target)}".rstrip()
        else:
            named = None if target in self._book.tags else raw
            message = f"Could not find enough items to craft {named}"
        return plain_result(message, False)

    def _valid_actions(self) -> list[str]:
        """Return `inventory`, gets in the amounts of the commands, and the crafts possible now."""
        actions = {"inventory": None}
        for recipe in self._task.recipes:
            for count, part in recipe.ingredients:
                if self._book.is_gettable(part):
                    actions[f"get {count} {part}"] = None
        for recipe in self._task.recipes:
            command = self._filled(recipe)
            if command is not None:
                actions[command] = None
        return list(actions)

    def _filled(self, recipe: Recipe) -> str | None:
        """Return the command with held items in its slots; None if an item is missing."""
        used = []
        for count, part in recipe.ingredients:
            members = self._book.tags.get(part, (part,))
            sufficient = [name for name in members if self._inventory[name] >= count]
            if not sufficient:
                return None
            used.append(f"{count} {sufficient[0]}")
        return f"craft {recipe.count} {recipe.target} using {', '.join(used)}"

    def _expert_action(self) -> str | None:
        task = self._task
        return next_action(self._book, task.goal, self._inventory, task.members)

    def render(self) -> str:
        """Return the goal, the commands and the inventory."""
        commands = "\n".join(recipe.command() for recipe in self._task.recipes)
        return f"goal: {self._task.goal}\n{commands}\n{self._inventory_text(True)}"

    def detail(self, what: str) -> Any:
        """Return the `picture`: the held items, and the goal's tree of ingredients."""
        if what != "picture":
            return None
        inventory = {name: count for name, count in self._inventory.items() if count}
        return {"tree": self._tree(self._task.goal, 1), "held": inventory}

    def _tree(self, name: str, count: int) -> dict[str, object]:
        """Return an item's tree of ingredients.

        A tag has the tree of a shown recipe for one of its members.
        """
        members = self._book.tags.get(name, (name,))
        made = [recipe for recipe in self._task.recipes if recipe.target in members]
        parts = made[0].ingredients if made else ()
        num_held = sum(self._inventory[member] for member in members)
        below = [self._tree(part, num) for num, part in parts]
        return {"name": name, "count": count, "held": num_held, "parts": below}

    def _state(self) -> str:
        return "\n".join([self._task.goal, *(recipe.command() for recipe in self._task.recipes)])

    def _known(self, name: str) -> str:
        """Return the name if the book has it, else "": compact text contains known words only."""
        return name if name in self._book.depths else ""


@lru_cache(MAX_KEPT)  # Actions repeat often, so that a cache is worthwhile.
def read_exactly(action: str) -> CraftCommand:
    """Return the command of an action in AgentGym's exact syntax."""
    return read_command(action_text(action), "Got")


@lru_cache(MAX_KEPT)
def read_lower(action: str) -> CraftCommand:
    """Return the command of an action in compact style."""
    return read_command(action_text(action).lower(), "got")


def read_command(text: str, got: str) -> CraftCommand:
    """Return the command of an action; the rest of its line is part of the command."""
    if text.startswith("craft") and (craft := CRAFT.match(text)):
        ingredients: list[tuple[int, str]] = []
        for fragment in craft[3].split(","):
            counted = COUNTED.fullmatch(fragment.strip())
            if counted is None:
                return CraftCommand("wrong", name=fragment.strip()[:MAX_ECHO_CHARS])
            ingredients.append((int(counted[1]), counted[2]))
        return CraftCommand(
            "craft", int(craft[1] or 1), craft[2], tuple(ingredients), _raw(craft[2])
        )
    if text.startswith("get") and (get := GET.match(text)):
        count = int(get[1])
        name = get[2].strip()
        return CraftCommand("get", count, name, message=f"{got} {count} {name}")
    if text.startswith("inventory"):
        return CraftCommand("inventory")
    return CraftCommand("?", name=text[:MAX_ECHO_CHARS])


def find_recipe(book: Book, target: str, ingredients: Sequence[tuple[int, str]]) -> Recipe | None:
    """Return the recipe whose slots the ingredients fill one to one, a tag with one kind."""
    for recipe in book.recipes.get(target, ()):
        if len(recipe.ingredients) == len(ingredients) and _fills(book, recipe, ingredients):
            return recipe
    return None


def _fills(book: Book, recipe: Recipe, ingredients: Sequence[tuple[int, str]]) -> bool:
    """Return whether the ingredients fill all slots of a recipe."""
    tags = book.tags
    left = list(ingredients)
    for count, part in sorted(recipe.ingredients, key=lambda slot: slot[1] in tags):
        members = tags.get(part, (part,))
        fitting = [one for one in left if one[0] == count and one[1] in members]
        if not fitting:
            return False
        left.remove(fitting[0])
    return True


def _raw(name: str) -> str:
    """Return an item's id in the format of the recipe files."""
    raw = name[:MAX_ECHO_CHARS].replace(" ", "_")
    return raw if ":" in raw else NAMESPACE + raw


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
    if not folder:
        return spec
    root = Path(folder)
    content = {"envs.textcraft.recipes_dir": digest_of_files(root, root.glob("*.json"))}
    return replace(spec, tasks=catalogue.tasks(), content=content)


def check(options: EnvsSection) -> list[str]:
    """Return a line about the problem of the recipe folder, if one is given."""
    if not options.textcraft.recipes_dir:
        return []
    try:
        folder_catalogue(options.textcraft.recipes_dir)
    except RecipesError as error:
        return [f"envs.textcraft.recipes_dir: {error}; use a folder of Minecraft recipe files"]
    return []

"""A TextCraft episode: get ingredients and craft until the goal item is made."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from envhub.env import StepResult, Style, action_text, parse_item
from envhub.envs.text_env import TextEnv, plain_result
from envhub.envs.textcraft.book import Book, Recipe
from envhub.envs.textcraft.minecraft import NAMESPACE
from envhub.envs.textcraft.tasks import CraftCatalogue, CraftTask, our_catalogue


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

"""The exact solver: the next action towards a goal from any inventory."""

from collections import Counter
from collections.abc import Mapping

from envhub.envs.textcraft.book import Book, Recipe


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
    held = [member for member in book.tags[part] if free[member] >= count]
    return held[0] if held else members.get(part, book.members(part))[0]


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

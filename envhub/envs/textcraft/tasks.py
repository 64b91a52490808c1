"""TextCraft tasks: the goals of a subset, and the crafting commands of an item."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from envhub.env import ItemId, SubsetSpec, TaskSpec
from envhub.envs.textcraft.book import Book, Recipe, the_book
from envhub.envs.textcraft.minecraft import RecipesError, load_book

MAX_TURNS = {1: 6, 2: 10, 3: 16, 4: 24}  # Maximum number of turns by depth, for our own book.
# Maximum number of turns by depth, for the book of a folder.
MAX_TURNS_FOLDER = {1: 10, 2: 30, 3: 50, 4: 60}
TEST_FRAC = 0.25
MIN_TEST_GOALS = 3
NUM_TRAIN_VARIATIONS = 1000
NUM_TEST_VARIATIONS = 25
# Number of a task's items by depth. The test sizes are at least those of published papers.
NUM_TASK_TRAIN = {1: 100, 2: 150, 3: 100, 4: 24}
NUM_TASK_TEST = {1: 40, 2: 50, 3: 40, 4: 20}


@dataclass(frozen=True, slots=True)
class CraftTask:
    """One item: a goal, the shown recipes in order, and the tag members that they make."""

    goal: str
    recipes: tuple[Recipe, ...]
    members: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class CraftCatalogue:
    """The tasks of a book.

    Attributes:
        book: the recipes.
        max_turns: maximum number of turns of each offered depth.
        max_shown_members: shown members of a tag, drawn from those of lowest depth; None: all
            members.
        max_distractors: maximum number of shown recipes that are not needed.
    """

    book: Book
    max_turns: Mapping[int, int]
    max_shown_members: int | None = 2
    max_distractors: int = 5

    @cached_property
    def subsets(self) -> dict[str, SubsetSpec]:
        """One subset for each depth that has goals."""
        return {
            f"depth{depth}": SubsetSpec(
                num_train=len(self.goals(depth, "train")) * NUM_TRAIN_VARIATIONS,
                num_test=len(self.goals(depth, "test")) * NUM_TEST_VARIATIONS,
                max_turns=max_turns,
            )
            for depth, max_turns in self.max_turns.items()
            if self.book.goals(depth)
        }

    @cached_property
    def _goals(self) -> dict[tuple[int, str], tuple[str, ...]]:
        """Return the goals by depth and split."""
        chosen = {}
        for depth in self.max_turns:
            shuffled = self.book.goals(depth)
            random.Random(f"goals of depth {depth}").shuffle(shuffled)
            num_test = max(MIN_TEST_GOALS, round(len(shuffled) * TEST_FRAC))
            num_test = min(num_test, (len(shuffled) + 1) // 2)
            chosen[depth, "test"] = tuple(sorted(shuffled[:num_test]))
            # A single goal is used in both splits.
            chosen[depth, "train"] = tuple(sorted(shuffled[num_test:] or shuffled))
        return chosen

    def goals(self, depth: int, split: str) -> tuple[str, ...]:
        """Return the goals of a depth and split.

        Train and test goals are disjoint, except that a single goal is in both.
        """
        return self._goals[depth, split]

    def tasks(self) -> dict[str, TaskSpec]:
        """Return one task per depth, with at most as many first items as in our own book."""
        tasks = {}
        for name, spec in self.subsets.items():
            depth = int(name.removeprefix("depth"))
            tasks[f"Depth {depth}"] = TaskSpec(
                scenario="Digital games",
                subset=name,
                train=self._distinct(name, "train", NUM_TASK_TRAIN[depth], spec.num_train),
                test=self._distinct(name, "test", NUM_TASK_TEST[depth], spec.num_test),
            )
        return tasks

    def _distinct(self, subset: str, split: str, num_wanted: int, num: int) -> tuple[str, ...]:
        """Return the first items that differ by more than the order of their commands."""
        chosen: dict[object, str] = {}
        for index in range(num):
            task = self.make_task(ItemId(subset, split, index))
            chosen.setdefault((task.goal, frozenset(task.recipes)), f"{subset}-{split}-{index}")
            if len(chosen) == num_wanted:
                break
        return tuple(chosen.values())

    @cached_property
    def _agentgym_order(self) -> list[str]:
        """Return the goals in the order of AgentGym's data indices."""
        depths = self.book.depths
        offered = [goal for goal in self.book.recipes if depths[goal] in self.max_turns]
        return sorted(offered, key=lambda goal: depths[goal])

    def from_agentgym(self, index: int) -> str:
        """Return the item of a data index: goals by depth, then in the book's order, cyclically.

        AgentGym's own order within a depth depends on the directory listing of its machine.
        """
        goal = self._agentgym_order[index % len(self._agentgym_order)]
        depth = self.book.depths[goal]
        split = "test" if goal in self.goals(depth, "test") else "train"
        return f"depth{depth}-{split}-{self.goals(depth, split).index(goal)}"

    def make_task(self, item: ItemId) -> CraftTask:
        """Return the task of an item: index i is goal i mod n, variation i div n.

        The variation draws the tag members with shown recipes, the distractors and the order.
        """
        names = self.goals(int(item.subset.removeprefix("depth")), item.split)
        goal = names[item.index % len(names)]
        variation = item.index // len(names)
        rng = random.Random(f"{goal}/{item.split}/{variation}")
        needed, members = self._needed(goal, rng)
        shown = list(needed) + self._distractors(needed, rng)
        rng.shuffle(shown)
        return CraftTask(goal, tuple(shown), members)

    def _needed(
        self, goal: str, rng: random.Random
    ) -> tuple[dict[Recipe, None], dict[str, tuple[str, ...]]]:
        """Return the recipes reachable from the goal, and the drawn members of each reached tag."""
        needed: dict[Recipe, None] = {}
        members: dict[str, tuple[str, ...]] = {}
        queue = [goal]
        while queue:
            name = queue.pop()
            if name in self.book.tags:
                if name not in members:
                    members[name] = self._draw_members(name, rng)
                    queue.extend(members[name])
                continue
            for recipe in self.book.recipes.get(name, ()):
                if recipe not in needed:
                    needed[recipe] = None
                    queue.extend(part for _, part in recipe.ingredients)
        return needed, members

    def _draw_members(self, tag: str, rng: random.Random) -> tuple[str, ...]:
        """Return the shown members of a tag; the first has the lowest depth."""
        if self.max_shown_members is None:
            depths = self.book.depths
            return tuple(sorted(self.book.tags[tag], key=lambda member: (depths[member], member)))
        pool = self.book.members(tag)
        return tuple(rng.sample(pool, min(self.max_shown_members, len(pool))))

    def _distractors(self, needed: dict[Recipe, None], rng: random.Random) -> list[Recipe]:
        """Return recipes that are not needed but share an ingredient with the needed ones."""
        parts = dict.fromkeys(part for recipe in needed for _, part in recipe.ingredients)
        users = self.book.users
        pool = dict.fromkeys(r for part in parts for r in users.get(part, ()) if r not in needed)
        return rng.sample(list(pool), min(self.max_distractors, len(pool)))


@cache
def our_catalogue() -> CraftCatalogue:
    """Return the tasks of our own book."""
    return CraftCatalogue(book=the_book(), max_turns=MAX_TURNS)


@cache
def folder_catalogue(folder: str) -> CraftCatalogue:
    """Return the tasks of a folder of recipe files, with all possibly useful recipes shown.

    Raises: RecipesError: the folder has no usable recipes.
    """
    catalogue = CraftCatalogue(
        book=load_book(folder),
        max_turns=MAX_TURNS_FOLDER,
        max_shown_members=None,
        max_distractors=10,
    )
    if not catalogue.subsets:
        raise RecipesError(f"{folder}: none of its recipes can be crafted")
    return catalogue

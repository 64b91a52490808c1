"""TextCraft with permuted words and random numbers: recipes must be read, not remembered."""

import random
import re
from typing import Any

from envhub.env import StepResult, Style, parse_item
from envhub.envs.textcraft.episode import TextCraftEnv
from envhub.envs.textcraft.random_counts import redrawn
from envhub.envs.textcraft.tasks import CraftCatalogue, CraftTask

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
        held = {self._shown(name): count for name, count in details["held"].items()}
        return {"tree": self._renamed(details["tree"]), "held": held}

    def _renamed(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return a tree of ingredients with the agent's names."""
        parts = [self._renamed(part) for part in tree["parts"]]
        return tree | {"name": self._shown(tree["name"]), "parts": parts}

    def _state(self) -> str:
        return self._shown(super()._state())

"""Nim: two players take objects in turn. The player who takes the last object wins."""

import functools
import random
import re
from typing import Any, NamedTuple

from common.config.envs import EnvsSection
from envhub.env import EnvSpec, ItemId, StepResult, Style, SubsetSpec, action_text, parse_item
from envhub.envs.text_env import TextEnv
from envhub.tasks import first_items

MOVE = re.compile(r"take ([0-9]{1,3})(?: from(?: pile)? ([0-9]{1,2}))?")

MAX_ACTION_CHARS = 100

Piles = tuple[int, ...]


class NimMove(NamedTuple):
    """Take `num` objects from the pile with the index `pile`, from 0 on."""

    pile: int
    num: int


class Rules(NamedTuple):
    """The rules of a subset. The player who takes the last object wins."""

    max_taken: int  # Most objects of a move; 0: no limit.

    def moves(self, piles: Piles) -> list[NimMove]:
        """Return all legal moves, by pile and number."""
        return [
            NimMove(pile, num)
            for pile, size in enumerate(piles)
            for num in range(1, min(size, self.max_taken or size) + 1)
        ]

    def value(self, piles: Piles) -> int:
        """Return the nim-sum of a position; 0: the player who moves loses against perfect play.

        Source: Bouton, "Nim, a game with a complete mathematical theory", 1901. With at most m
        objects a move, a pile of n counts as n modulo m + 1.
        """
        sizes = [size % (self.max_taken + 1) if self.max_taken else size for size in piles]
        return functools.reduce(int.__xor__, sizes, 0)

    def best_move(self, piles: Piles) -> NimMove:
        """Return a move to a lost position; without one, the smallest move of the largest pile."""
        for move in self.moves(piles):
            if self.value(position_after(piles, move)) == 0:
                return move
        return NimMove(piles.index(max(piles)), 1)


def position_after(piles: Piles, move: NimMove) -> Piles:
    """Return the position after a move."""
    left = list(piles)
    left[move.pile] -= move.num
    return tuple(left)


def move_text(move: NimMove, piles: Piles) -> str:
    """Return a move as an action. The pile is left out if there is only one."""
    return f"take {move.num}" + (f" from {move.pile + 1}" if len(piles) > 1 else "")


def parsed_move(text: str, piles: Piles) -> NimMove | None:
    """Return the move that an action names; None if it names none. The move may be illegal."""
    match = MOVE.fullmatch(" ".join(text[:MAX_ACTION_CHARS].lower().split()))
    if match is None or (match[2] is None and len(piles) > 1):
        return None
    return NimMove(int(match[2] or 1) - 1, int(match[1]))


RULES_TEXT = """\
You play nim against another player. Each of you takes objects from piles in turn. The player who \
takes the last object wins. If there is one pile, take 1, 2 or 3 objects. If there are several \
piles, take any number of objects from one of them. An illegal move loses the game.
The actions: take N, if there is one pile; take N from P, where P is the number of a pile from 1 on.
"""
INSTRUCTIONS = {
    Style.COMPACT: "",
    Style.AGENTGYM: RULES_TEXT
    + "Your answer must have this format:\nThought:\n<your thought>\n\nAction:\n<your action>",
    Style.INSTRUCTED: RULES_TEXT + "Answer with one action and nothing else.",
}
NUM_SEATS = 2
ONE_PILE = "OnePile"
PILES = "Piles"
RULES = {ONE_PILE: Rules(max_taken=3), PILES: Rules(max_taken=0)}
ONE_PILE_SIZES = (9, 21)  # Smallest and largest pile of the subset OnePile.
MAX_PILE = 7
NUM_PILES = 3
SUBSETS = {
    ONE_PILE: SubsetSpec(num_train=100_000, num_test=1_000, max_turns=ONE_PILE_SIZES[1]),
    PILES: SubsetSpec(num_train=100_000, num_test=1_000, max_turns=NUM_PILES * MAX_PILE),
}


def start_of(item: ItemId) -> Piles:
    """Return the first position of an item."""
    rng = random.Random(f"nim/{item.subset}/{item.split}/{item.index}")
    if item.subset == ONE_PILE:
        return (rng.randint(*ONE_PILE_SIZES),)
    return tuple(rng.randint(1, MAX_PILE) for _ in range(NUM_PILES))


class NimEnv(TextEnv):
    """One game for two seats. The winner's reward is 1, the loser's is 0.

    An illegal move loses the game.
    """

    def reset(self, item_id: str, seed: int = 0) -> str:
        """Start an item. `seed` is unused: the item determines the position."""
        item = parse_item(item_id, SUBSETS)
        self._rules = RULES[item.subset]
        self._start = start_of(item)
        self._piles = self._start
        self._seat = 0
        self._moves: list[str] = []
        self._begin()
        return self._position()

    def _step(self, action: str) -> StepResult:
        """Move for the seat whose turn it is."""
        move = parsed_move(action_text(action), self._piles)
        if move is None or move not in self._rules.moves(self._piles):
            return self._end(winner=1 - self._seat, is_valid=False)
        self._moves.append(f"player {self._seat + 1}: {move_text(move, self._piles)}")
        self._piles = position_after(self._piles, move)
        if not any(self._piles):
            return self._end(winner=self._seat, is_valid=True)
        self._seat = 1 - self._seat
        return StepResult(
            observation=f"{self._described(move)}\n{self._position()}",
            reward=0.0,
            done=False,
            is_valid=True,
            seat=self._seat,
            seat_rewards=[0.0] * NUM_SEATS,
        )

    def _end(self, *, winner: int, is_valid: bool) -> StepResult:
        """Return the result of the last move."""
        self._done = True
        rewards = [float(seat == winner) for seat in range(NUM_SEATS)]
        return StepResult(
            observation=f"{'' if is_valid else 'invalid move, '}player {winner + 1} wins",
            reward=rewards[self._seat],
            done=True,
            is_valid=is_valid,
            seat_rewards=rewards,
        )

    def save(self) -> dict[str, Any]:
        """Return the position, the seat that moves, and the moves."""
        return {"piles": [*self._piles], "seat": self._seat, "moves": self._moves}

    def load(self, state: dict[str, Any]) -> None:
        """Continue at a saved position."""
        self._piles = tuple(state["piles"])
        self._seat, self._moves = state["seat"], state["moves"]

    def _described(self, move: NimMove) -> str:
        """Return the other player's move in the words of an observation."""
        taken = move_text(move, self._start).removeprefix("take ")
        return f"took {taken}" if self._is_compact else f"The other player took {taken}."

    def _position(self) -> str:
        """Return the position in the words of an observation."""
        sizes = " ".join(map(str, self._piles))
        if self._is_compact:
            return f"left {sizes}"
        noun = "piles hold" if len(self._piles) > 1 else "pile holds"
        return f"The {noun} {sizes}. It is your turn."

    def state_text(self) -> str:
        """Return a text that identifies the current state of the item."""
        return f"{self._seat} moves, {self._piles}"

    def _valid_actions(self) -> list[str]:
        return [move_text(move, self._piles) for move in self._rules.moves(self._piles)]

    def _expert_action(self) -> str | None:
        """Return a move of perfect play."""
        return move_text(self._rules.best_move(self._piles), self._piles)

    def render(self) -> str:
        """Return the moves so far and the position."""
        return "\n".join([*self._moves, self._position()])

    def _state(self) -> str:
        return repr((self._rules, self._start))


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return the catalogue entry of Nim."""
    return EnvSpec(
        name="nim",
        subsets=SUBSETS,
        instruction=INSTRUCTIONS,
        make=NimEnv,
        tasks={
            f"Nim{subset}": first_items("Digital games", subset, num_train=1_000, num_test=200)
            for subset in SUBSETS
        },
        seats=NUM_SEATS,
    )

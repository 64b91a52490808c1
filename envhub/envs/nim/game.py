"""The rules of nim, its positions and its perfect play."""

import functools
import re
from typing import NamedTuple

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
            if self.value(after(piles, move)) == 0:
                return move
        return NimMove(piles.index(max(piles)), 1)


def after(piles: Piles, move: NimMove) -> Piles:
    """Return the position after a move."""
    left = list(piles)
    left[move.pile] -= move.num
    return tuple(left)


def named(move: NimMove, piles: Piles) -> str:
    """Return a move as an action. The pile is left out if there is only one."""
    return f"take {move.num}" + (f" from {move.pile + 1}" if len(piles) > 1 else "")


def parsed(text: str, piles: Piles) -> NimMove | None:
    """Return the move that an action names; None if it names none. The move may be illegal."""
    match = MOVE.fullmatch(" ".join(text[:MAX_ACTION_CHARS].lower().split()))
    if match is None or (match[2] is None and len(piles) > 1):
        return None
    return NimMove(int(match[2] or 1) - 1, int(match[1]))

"""Nim: two players take objects in turn. The player who takes the last object wins."""

import random

from common.config.envs import EnvsSection
from envhub.env import EnvSpec, ItemId, StepResult, SubsetSpec, action_text, parse_item
from envhub.envs.nim.game import NimMove, Piles, Rules, after, named, parsed
from envhub.envs.text_env import TextEnv
from envhub.tables import read_instructions
from envhub.tasks import first_items

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
        move = parsed(action_text(action), self._piles)
        if move is None or move not in self._rules.moves(self._piles):
            return self._end(winner=1 - self._seat, is_valid=False)
        self._moves.append(f"player {self._seat + 1}: {named(move, self._piles)}")
        self._piles = after(self._piles, move)
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

    def _described(self, move: NimMove) -> str:
        """Return the other player's move in the words of an observation."""
        taken = named(move, self._start).removeprefix("take ")
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
        return [named(move, self._piles) for move in self._rules.moves(self._piles)]

    def _expert_action(self) -> str | None:
        """Return a move of perfect play."""
        return named(self._rules.best_move(self._piles), self._piles)

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
        instruction=read_instructions(__file__),
        make=NimEnv,
        tasks={
            f"Nim{subset}": first_items("Digital games", subset, num_train=1_000, num_test=200)
            for subset in SUBSETS
        },
        seats=NUM_SEATS,
    )

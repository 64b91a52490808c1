"""Maze: find the goal in a maze; an observation has only the adjacent walls."""

from typing import Any

from common.config.envs import EnvsSection
from envhub.conversations import CONVERSATIONS
from envhub.env import EnvSpec, ItemId, StepResult, SubsetSpec, UnknownItem, action_text, parse_item
from envhub.envs.maze import maze
from envhub.envs.maze.maze import GOAL, MOVES, STARTS, Cell
from envhub.envs.text_env import TextEnv
from envhub.tasks import spec_beside

SUBSET = "DoubleT"
NAMES = tuple(f"move {direction}" for direction in MOVES)
MAX_MOVES = 50
TEST_EVERY = 5  # Every fifth start, from the third on, is a test item.
START_NUMBERS = {
    "test": tuple(range(2, len(STARTS), TEST_EVERY)),
    "train": tuple(i for i in range(len(STARTS)) if i % TEST_EVERY != 2),
}
SUBSETS = {
    SUBSET: SubsetSpec(
        num_train=len(START_NUMBERS["train"]),
        num_test=len(START_NUMBERS["test"]),
        max_turns=MAX_MOVES,
    )
}


def start_of(item: ItemId) -> Cell:
    """Return the cell where an item begins."""
    return STARTS[START_NUMBERS[item.split][item.index]]


class MazeEnv(TextEnv):
    """One Maze episode. The reward is 1 at the goal; turn 51 ends it without a reward."""

    def reset(self, item_id: str, seed: int = 0) -> str:
        """Start an item. `seed` is unused: nothing is random."""
        self._start = self._at = start_of(parse_item(item_id, SUBSETS))
        self._num_moves = 0
        self._begin()
        if self._is_compact:
            return f"goal: {GOAL[0]} {GOAL[1]}\n{self._observation()}"
        return CONVERSATIONS["maze"].first_observation(self._observation())

    def _step(self, action: str) -> StepResult:
        """Move the agent, and describe the adjacent walls."""
        if self._num_moves == MAX_MOVES:
            self._done = True
            return StepResult(observation=self._end("Failure"), reward=0, done=True, is_valid=False)
        self._num_moves += 1
        name = action_text(action)
        before = self._at
        if self._is_compact:  # AgentGym accepts its four exact actions only.
            name = f"move {' '.join(name.lower().split()).removeprefix('move ')}"
        if name in NAMES:
            self._at = maze.cell_after(before, name.removeprefix("move "))
        is_valid = self._at != before
        if self._at == GOAL:
            self._done = True
            return StepResult(observation=self._end("Success"), reward=1, done=True, is_valid=True)
        observation = self._observation()
        if self._is_compact and not is_valid:
            observation = f"invalid action, {observation}"
        return StepResult(observation=observation, reward=0, done=False, is_valid=is_valid)

    def state_text(self) -> str:
        """Return a text that identifies the current state of the item."""
        return f"at {self._at}"

    def _end(self, word: str) -> str:
        """Return the last observation of an episode."""
        return word.lower() if self._is_compact else f"{word}\n"

    def _observation(self) -> str:
        """Return the position and the adjacent walls as text."""
        if not self._is_compact:
            return maze.described(self._at)
        return f"at {self._at[0]} {self._at[1]}, wall {' '.join(maze.walls(self._at)) or 'nowhere'}"

    def _valid_actions(self) -> list[str]:
        return [f"move {d}" for d in MOVES if maze.cell_after(self._at, d) != self._at]

    def _expert_action(self) -> str | None:
        """Return the first move of a shortest path."""
        return f"move {maze.best_moves().get(self._at, 'left')}"

    def render(self) -> str:
        """Return the map and the number of moves."""
        return f"{maze.drawn(self._at)}\nmoves: {self._num_moves} of {MAX_MOVES}"

    def detail(self, what: str) -> Any:
        """Return the `picture` of the maze as a map; None for anything else."""
        return {"map": maze.drawn(self._at).split("\n")} if what == "picture" else None

    def _state(self) -> str:
        return maze.drawn(self._start)


def from_agentgym(index: int) -> str:
    """Return the item of AgentGym's game number.

    Raises: UnknownItem: there is no such start, or it is the goal, where AgentGym refuses to begin.
    """
    if index == STARTS.index(GOAL):
        raise UnknownItem(f"The game {index} begins at its goal.")
    for split, numbers in START_NUMBERS.items():
        if index in numbers:
            return f"{SUBSET}-{split}-{numbers.index(index)}"
    raise UnknownItem(f"The game {index} is not valid.")


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return Maze's catalogue entry."""
    return spec_beside(__file__, SUBSETS, MazeEnv, from_agentgym=from_agentgym)

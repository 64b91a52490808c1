"""Maze: find the goal in a maze; an observation has only the adjacent walls."""

from collections import deque
from functools import cache
from typing import Any

from common.config.envs import EnvsSection
from envhub.conversations import CONVERSATIONS, begun
from envhub.env import EnvSpec, ItemId, StepResult, SubsetSpec, UnknownItem, action_text, parse_item
from envhub.envs.text_env import TextEnv
from envhub.tables import one_instruction
from envhub.tasks import first_items

Cell = tuple[int, int]  # (row, column); rows grow downwards

NUM_ROWS = 10
NUM_COLUMNS = 13
GOAL: Cell = (8, 6)
# The order is AgentGym's numbering of its games.
STARTS: tuple[Cell, ...] = (
    *((1, column) for column in range(1, 6)),
    *((1, column) for column in range(7, 12)),
    *((row, 3) for row in range(2, 6)),
    (5, 4),
    (5, 5),
    (5, 6),
    (6, 6),
    (7, 6),
    (5, 7),
    (5, 8),
    (5, 9),
    *((row, 9) for row in (4, 3, 2)),
    GOAL,  # Any action is a success there.
)
FREE = frozenset(STARTS)
# The order is that of the walls in observations.
MOVES: dict[str, Cell] = {"right": (0, 1), "left": (0, -1), "up": (-1, 0), "down": (1, 0)}
WALL_WORDS = {"right": "to your right", "left": "to your left", "up": "above you"} | {
    "down": "below you"
}


def cell_after(cell: Cell, direction: str) -> Cell:
    """Return the cell after one move: the same cell if a wall is in the way."""
    rows, columns = MOVES[direction]
    there = (cell[0] + rows, cell[1] + columns)
    return there if there in FREE else cell


def walls_beside(cell: Cell) -> list[str]:
    """Return the directions in which a wall is next to a cell."""
    return [direction for direction in MOVES if cell_after(cell, direction) == cell]


@cache
def best_moves() -> dict[Cell, str]:
    """Return for each cell but the goal the first direction of a shortest path."""
    directions: dict[Cell, str] = {}
    queue = deque([GOAL])
    while queue:
        cell = queue.popleft()
        for direction, (rows, columns) in MOVES.items():
            before = (cell[0] - rows, cell[1] - columns)
            if before in FREE and before != GOAL and before not in directions:
                directions[before] = direction
                queue.append(before)
    return directions


def position_text(cell: Cell) -> str:
    """Return the agent's position and the adjacent walls, in AgentGym's sentences."""
    words = [WALL_WORDS[direction] for direction in walls_beside(cell)]
    near = "There are no walls near you."
    if words:
        near = f"There {'is a wall' if len(words) == 1 else 'are walls'} {', '.join(words)}."
    return (
        f"The goal is at position {GOAL[0]}, {GOAL[1]}. "
        f"Your current position is at position {cell[0]}, {cell[1]}. {near}"
    )


def drawn_map(cell: Cell) -> str:
    """Return the map: `#` wall, `.` free, `G` goal, `@` the agent."""
    signs = dict.fromkeys(FREE, ".") | {GOAL: "G"} | {cell: "@"}
    return "\n".join(
        "".join(signs.get((row, column), "#") for column in range(NUM_COLUMNS))
        for row in range(NUM_ROWS)
    )


INSTRUCTED = """\
You walk in a maze from cell to cell. The first message names the cell of the goal: its row and \
its column. Each message names your cell and the directions in which a wall is next to you. Each \
of your turns is one action: move up (to the row with the next smaller number), move down, move \
left (to the column with the next smaller number) or move right. A move against a wall has no \
effect.
Answer with one action and nothing else."""
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
            self._at = cell_after(before, name.removeprefix("move "))
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

    def save(self) -> list[int]:
        """Return the cell, and the number of moves."""
        return [*self._at, self._num_moves]

    def load(self, state: list[int]) -> None:
        """Go to a saved cell."""
        row, column, self._num_moves = state
        self._at = row, column

    def _end(self, word: str) -> str:
        """Return the last observation of an episode."""
        return word.lower() if self._is_compact else f"{word}\n"

    def _observation(self) -> str:
        """Return the position and the adjacent walls as text."""
        if not self._is_compact:
            return position_text(self._at)
        return (
            f"at {self._at[0]} {self._at[1]}, wall {' '.join(walls_beside(self._at)) or 'nowhere'}"
        )

    def _valid_actions(self) -> list[str]:
        return [f"move {d}" for d in MOVES if cell_after(self._at, d) != self._at]

    def _expert_action(self) -> str | None:
        """Return the first move of a shortest path."""
        return f"move {best_moves().get(self._at, 'left')}"

    def render(self) -> str:
        """Return the map and the number of moves."""
        return f"{drawn_map(self._at)}\nmoves: {self._num_moves} of {MAX_MOVES}"

    def detail(self, what: str) -> Any:
        """Return the `picture` of the maze as a map; None for anything else."""
        return {"map": drawn_map(self._at).split("\n")} if what == "picture" else None

    def _state(self) -> str:
        return drawn_map(self._start)


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
    return EnvSpec(
        name="maze",
        subsets=SUBSETS,
        make=MazeEnv,
        tasks={"Maze": first_items("Digital games", SUBSET, num_train=20, num_test=5)},
        from_agentgym=from_agentgym,
        **begun("maze", one_instruction(INSTRUCTED)),
    )

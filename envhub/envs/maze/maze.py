"""The double T maze: its cells, the shortest paths, and the text about its walls."""

from collections import deque
from functools import cache

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


def walls(cell: Cell) -> list[str]:
    """Return the directions in which a wall is next to a cell."""
    return [direction for direction in MOVES if cell_after(cell, direction) == cell]


@cache
def best_moves() -> dict[Cell, str]:
    """Return for each cell but the goal the first direction of a shortest path."""
    found: dict[Cell, str] = {}
    queue = deque([GOAL])
    while queue:
        cell = queue.popleft()
        for direction, (rows, columns) in MOVES.items():
            before = (cell[0] - rows, cell[1] - columns)
            if before in FREE and before != GOAL and before not in found:
                found[before] = direction
                queue.append(before)
    return found


def described(cell: Cell) -> str:
    """Return the agent's position and the adjacent walls, in AgentGym's sentences."""
    words = [WALL_WORDS[direction] for direction in walls(cell)]
    near = "There are no walls near you."
    if words:
        near = f"There {'is a wall' if len(words) == 1 else 'are walls'} {', '.join(words)}."
    return (
        f"The goal is at position {GOAL[0]}, {GOAL[1]}. "
        f"Your current position is at position {cell[0]}, {cell[1]}. {near}"
    )


def drawn(cell: Cell) -> str:
    """Return the map: `#` wall, `.` free, `G` goal, `@` the agent."""
    signs = dict.fromkeys(FREE, ".") | {GOAL: "G"} | {cell: "@"}
    return "\n".join(
        "".join(signs.get((row, column), "#") for column in range(NUM_COLUMNS))
        for row in range(NUM_ROWS)
    )

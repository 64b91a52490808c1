"""Routes through the city: a grid of roads, and a river with two bridges."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from envhub.envs.minisites.maps.seed import NUM_COLUMNS

BLOCK_METERS = 150
BRIDGE_LINES = (2, 9)  # The streets that cross the river, which flows east of column 5.
METERS_PER_MINUTE = {"foot": 75, "bicycle": 250, "car": 500}
PARKING_MINUTES = {"foot": 0, "bicycle": 1, "car": 4}

Corner = tuple[int, int]  # (column, line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One straight part of a route; streets run east and west, avenues north and south."""

    heading: str
    axis: str
    position: int
    meters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The shortest route between two corners, with its duration by each mode."""

    legs: tuple[Leg, ...]
    meters: int

    def minutes(self, mode: str) -> int:
        """Return whole minutes, rounded up."""
        return -(-self.meters // METERS_PER_MINUTE[mode]) + PARKING_MINUTES[mode]


def is_west(corner: Corner) -> bool:
    """Return whether a corner lies west of the river."""
    return corner[0] < NUM_COLUMNS // 2


def corners_between(start: Corner, end: Corner) -> list[Corner]:
    """Return the corners at which the shortest route turns, including both ends."""
    if is_west(start) == is_west(end):
        return [start, (end[0], start[1]), end]
    line = min(BRIDGE_LINES, key=lambda bridge: abs(start[1] - bridge) + abs(end[1] - bridge))
    return [start, (start[0], line), (end[0], line), end]


def find_route(start: Corner, end: Corner) -> Route:
    """Return the shortest route from one corner to another."""
    legs = []
    corners = corners_between(start, end)
    for (col, line), (next_col, next_line) in pairwise(corners):
        if (col, line) == (next_col, next_line):
            continue
        is_street = line == next_line
        blocks = (next_col - col) + (next_line - line)
        east_south = "east" if is_street else "south"
        heading = east_south if blocks > 0 else {"east": "west", "south": "north"}[east_south]
        axis, position = ("street", line) if is_street else ("avenue", col)
        leg = Leg(heading=heading, axis=axis, position=position, meters=abs(blocks) * BLOCK_METERS)
        legs.append(leg)
    return Route(legs=tuple(legs), meters=sum(leg.meters for leg in legs))


def kilometers(meters: int) -> str:
    """Return a distance as the map prints it, such as `1.35 km`."""
    return f"{meters / 1000:.2f} km"


def describe(leg: Leg, roads: Mapping[tuple[str, int], str]) -> str:
    """Return a leg in words."""
    return f"Go {leg.heading} on {roads[leg.axis, leg.position]} for {leg.meters} m"

"""Fills the city map's database from a seed."""

import sqlite3
from random import Random
from typing import Any

from envhub.envs.minisites.seeding import WORDS as COMMON
from envhub.envs.minisites.seeding import filling, insert, slug_of
from envhub.tables import read_table

PLACES_PER_CATEGORY = 6
NUM_COLUMNS = 12  # Number of avenues, from west to east.
NUM_LINES = 12  # Number of streets, from north to south.
NEVER_CLOSED = ("Hotel", "Park")
WORDS: dict[str, Any] = read_table(__file__, "words.yaml")
WEEKDAYS = tuple(WORDS["weekdays"])
CATEGORIES = tuple(WORDS["categories"])
QUARTERS = tuple(WORDS["quarters"])
PLURALS = {
    category: f"{category[:-1]}ies" if category.endswith("y") else f"{category}s"
    for category in CATEGORIES
}


def fill_maps(db: sqlite3.Connection, seed: int) -> None:
    """Create and fill the tables; equal seeds give equal rows."""
    with filling(db, __file__, "maps", seed) as random:
        names = random.sample(COMMON["streets"], NUM_COLUMNS + NUM_LINES - 1)
        avenues = [f"{name} Avenue" for name in names[:NUM_COLUMNS]]
        streets = [f"{name} Street" for name in names[NUM_COLUMNS:]] + ["Market Street"]
        for axis, roads in (("avenue", avenues), ("street", streets)):
            for position, name in enumerate(roads):
                insert(db, "road", axis=axis, position=position, name=name)
        corners = [(col, line) for col in range(NUM_COLUMNS) for line in range(NUM_LINES)]
        num_places = PLACES_PER_CATEGORY * len(CATEGORIES)
        spots = iter(random.sample(corners, num_places))
        names = iter(random.sample(WORDS["names"], num_places))
        for category in CATEGORIES:
            ratings = random.sample(range(28, 50), PLACES_PER_CATEGORY)
            for rating in ratings:
                col, line = next(spots)
                name = f"{next(names)} {category}"
                place_id = insert(
                    db,
                    "place",
                    name=name,
                    slug=slug_of(name),
                    category=category,
                    number=col * 20 + random.randrange(1, 20),
                    street=streets[line],
                    avenue=avenues[col],
                    quarter=QUARTERS[(col >= NUM_COLUMNS // 2) * 3 + line * 3 // NUM_LINES],
                    col=col,
                    line=line,
                    phone=f"555-{random.randrange(100, 200)}-{random.randrange(1000, 10000)}",
                    rating=rating / 10,
                    is_accessible=int(random.random() < 0.6),
                )
                _fill_hours(db, random, place_id, is_always_open=category in NEVER_CLOSED)


def _fill_hours(
    db: sqlite3.Connection, random: Random, place_id: int, *, is_always_open: bool
) -> None:
    """Add the opening hours of a place."""
    closed = random.sample(range(7), random.randrange(0, 3))
    opens = random.randrange(7, 12)
    closes = random.randrange(17, 23)
    for weekday in range(7):
        shift = int(weekday >= 5)
        times = (f"{opens + shift:02d}:00", f"{closes - 2 * shift:02d}:30")
        if is_always_open:
            times = ("00:00", "24:00")
        elif weekday in closed:
            continue
        insert(db, "hours", place_id=place_id, weekday=weekday, opens=times[0], closes=times[1])

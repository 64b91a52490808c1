"""Fills the city map's database from a seed."""

import sqlite3
from random import Random

from envhub.envs.minisites.words import STREETS, listed

PLACES_PER_CATEGORY = 6
NUM_COLUMNS = 12  # avenues, from west to east
NUM_LINES = 12  # streets, from north to south
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
CATEGORIES = ("Bakery", "Bookshop", "Cafe", "Cinema", "Hotel", "Library", "Museum", "Park")
CATEGORIES += ("Pharmacy", "Restaurant", "Supermarket", "Theater")
PLURALS = {
    category: f"{category[:-1]}ies" if category.endswith("y") else f"{category}s"
    for category in CATEGORIES
}
NEVER_CLOSED = ("Hotel", "Park")
NAMES = listed(
    "Anchor Aurora Beacon Bluebell Brass Canal Cardinal Castle Cobalt Comet Copper Crescent "
    "Crown Crystal Daisy Delta Dragon Eagle Echo Ember Falcon Fern Fountain Galaxy Garnet Golden "
    "Granite Grove Harbor Heron Horizon Indigo Iris Ivory Jasmine Jubilee Kingfisher Lantern "
    "Lavender Lighthouse Lilac Lion Lotus Lunar Magnolia Marble Meadow Meridian Mirror Mosaic "
    "Nautilus Nightingale Oasis Onyx Opal Orchid Otter Owl Palace Pavilion Pegasus Phoenix Pilgrim "
    "Pioneer Plaza Poppy Prism Quartz Raven Regent Ruby Saffron Sapphire Silver Sparrow Sunrise "
    "Swan Tempest Thistle Tiger Topaz Trident Velvet Violet Walnut Willow Zephyr Zodiac"
)
QUARTERS = ("Oldtown", "Millbank", "Foxhill", "Riverside", "Eastgate", "Southfield")
SCHEMA = """
CREATE TABLE place (
    id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, slug TEXT UNIQUE NOT NULL,
    category TEXT NOT NULL, number INTEGER NOT NULL, street TEXT NOT NULL, avenue TEXT NOT NULL,
    quarter TEXT NOT NULL, col INTEGER NOT NULL, line INTEGER NOT NULL, phone TEXT NOT NULL,
    rating REAL NOT NULL, is_accessible INTEGER NOT NULL, UNIQUE (col, line));
CREATE TABLE hours (
    place_id INTEGER NOT NULL REFERENCES place (id), weekday INTEGER NOT NULL,
    opens TEXT NOT NULL, closes TEXT NOT NULL, PRIMARY KEY (place_id, weekday));
CREATE TABLE saved (place_id INTEGER PRIMARY KEY, note TEXT NOT NULL);
CREATE TABLE correction (
    id INTEGER PRIMARY KEY, place_id INTEGER NOT NULL REFERENCES place (id),
    topic TEXT NOT NULL, body TEXT NOT NULL);
CREATE TABLE road (axis TEXT NOT NULL, position INTEGER NOT NULL, name TEXT NOT NULL,
    PRIMARY KEY (axis, position));
"""


def fill_maps(db: sqlite3.Connection, seed: int) -> None:
    """Creates the tables and everything in them; equal seeds give equal rows."""
    random = Random(f"maps-{seed}")
    db.executescript("BEGIN;" + SCHEMA)
    roads = random.sample(STREETS, NUM_COLUMNS + NUM_LINES - 1)
    avenues = [f"{name} Avenue" for name in roads[:NUM_COLUMNS]]
    streets = [f"{name} Street" for name in roads[NUM_COLUMNS:]] + ["Market Street"]
    for axis, names in (("avenue", avenues), ("street", streets)):
        for position, name in enumerate(names):
            db.execute("INSERT INTO road VALUES (?, ?, ?)", (axis, position, name))
    corners = [(col, line) for col in range(NUM_COLUMNS) for line in range(NUM_LINES)]
    num_places = PLACES_PER_CATEGORY * len(CATEGORIES)
    spots = iter(random.sample(corners, num_places))
    names = iter(random.sample(NAMES, num_places))
    for category in CATEGORIES:
        ratings = random.sample(range(28, 50), PLACES_PER_CATEGORY)
        for rating in ratings:
            col, line = next(spots)
            _add_place(db, random, f"{next(names)} {category}", category, rating / 10, col, line)
    db.execute("COMMIT")


def _add_place(
    db: sqlite3.Connection,
    random: Random,
    name: str,
    category: str,
    rating: float,
    col: int,
    line: int,
) -> None:
    roads = dict(
        db.execute("SELECT axis, name FROM road WHERE axis = 'avenue' AND position = ?", (col,))
    )
    roads |= dict(
        db.execute("SELECT axis, name FROM road WHERE axis = 'street' AND position = ?", (line,))
    )
    quarter = QUARTERS[(col >= NUM_COLUMNS // 2) * 3 + line * 3 // NUM_LINES]
    number = col * 20 + random.randrange(1, 20)
    cursor = db.execute(
        "INSERT INTO place (name, slug, category, number, street, avenue, quarter, col, line,"
        " phone, rating, is_accessible) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(name, name.lower().replace(" ", "-"), category, number),
            *(roads["street"], roads["avenue"], quarter, col, line),
            f"555-{random.randrange(100, 200)}-{random.randrange(1000, 10000)}",
            *(rating, int(random.random() < 0.6)),
        ),
    )
    closed = random.sample(range(7), random.randrange(0, 3))
    opens, closes = random.randrange(7, 12), random.randrange(17, 23)
    for weekday in range(7):
        if category in NEVER_CLOSED:
            times = ("00:00", "24:00")
        elif weekday in closed:
            continue
        else:
            shift = int(weekday >= 5)
            times = (f"{opens + shift:02d}:00", f"{closes - 2 * shift:02d}:30")
        db.execute("INSERT INTO hours VALUES (?, ?, ?, ?)", (cursor.lastrowid, weekday, *times))

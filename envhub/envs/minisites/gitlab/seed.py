"""Fills the code host's database from a seed."""

import sqlite3
from random import Random

from envhub.envs.minisites.words import FIRST_NAMES, LAST_NAMES

OWN_ID = 1  # who is signed in
TODAY = "2024-01-15"
NUM_USERS = 24
NUM_PROJECTS = 16
ROLES = ("Guest", "Reporter", "Developer", "Maintainer")
LABELS = ("bug", "docs", "feature", "help wanted", "performance", "security")
LANGUAGES = ("C++", "Go", "Java", "Kotlin", "Python", "Rust", "TypeScript")
PROJECT_NAMES = (
    ("Tide Tables", "Computes tides for small harbors"),
    ("Paper Trail", "Keeps receipts in order"),
    ("Bee Counter", "Counts bees at the hive's door"),
    ("Night Bus", "Timetables for night buses"),
    ("Seed Vault", "A catalogue of garden seeds"),
    ("Quiet Mail", "A mail client without notifications"),
    ("Rain Barrel", "Reads the level of rain barrels"),
    ("Map Folder", "Folds large maps into tiles"),
    ("Chess Clock", "A chess clock for two phones"),
    ("Loom Planner", "Plans weaving patterns"),
    ("Bread Log", "Notes about sourdough"),
    ("Star Chart", "Prints charts of the night sky"),
    ("Key Ring", "Stores short secrets"),
    ("Choir Box", "Practice tracks for choirs"),
    ("Frost Alarm", "Warns gardeners of frost"),
    ("Trail Mix", "Random hikes near you"),
    ("Ink Well", "A distraction-free editor"),
    ("Wind Vane", "Collects wind measurements"),
    ("Shelf Life", "Tracks what is in the pantry"),
    ("Bike Doctor", "Repair guides for bicycles"),
)
PARTS = ("the parser", "the settings page", "the import", "the search", "the login", "the cache")
PARTS += ("the export", "the installer", "the command line", "the test suite", "the sidebar")
TROUBLES = (
    "{} crashes on an empty file",
    "{} is slow with many records",
    "Document how {} works",
    "{} forgets its state after a restart",
    "Translate {} to German",
    "Add keyboard shortcuts to {}",
    "{} shows the wrong time zone",
    "Rewrite {} with fewer dependencies",
)
CHANGES = (
    "Fix a typo in {}",
    "Speed up {}",
    "Add tests for {}",
    "Refactor {}",
    "Remove dead code from {}",
    "Handle errors in {}",
    "Log what {} does",
)
SCHEMA = """
CREATE TABLE user (
    id INTEGER PRIMARY KEY, username TEXT UNIQUE NOT NULL, name TEXT UNIQUE NOT NULL,
    email TEXT NOT NULL, status TEXT NOT NULL DEFAULT '', joined TEXT NOT NULL);
CREATE TABLE project (
    id INTEGER PRIMARY KEY, owner_id INTEGER NOT NULL REFERENCES user (id), name TEXT NOT NULL,
    slug TEXT NOT NULL, description TEXT NOT NULL, language TEXT NOT NULL, readme TEXT NOT NULL,
    created TEXT NOT NULL, num_stars INTEGER NOT NULL, num_forks INTEGER NOT NULL,
    forked_from INTEGER REFERENCES project (id), UNIQUE (owner_id, slug));
CREATE TABLE star (project_id INTEGER PRIMARY KEY REFERENCES project (id));
CREATE TABLE member (
    project_id INTEGER NOT NULL REFERENCES project (id),
    user_id INTEGER NOT NULL REFERENCES user (id), role TEXT NOT NULL,
    PRIMARY KEY (project_id, user_id));
CREATE TABLE issue (
    id INTEGER PRIMARY KEY, project_id INTEGER NOT NULL REFERENCES project (id),
    number INTEGER NOT NULL, title TEXT NOT NULL, body TEXT NOT NULL, label TEXT NOT NULL,
    is_open INTEGER NOT NULL DEFAULT 1, author_id INTEGER NOT NULL REFERENCES user (id),
    assignee_id INTEGER REFERENCES user (id), created TEXT NOT NULL,
    UNIQUE (project_id, number));
CREATE TABLE remark (
    id INTEGER PRIMARY KEY, issue_id INTEGER NOT NULL REFERENCES issue (id),
    author_id INTEGER NOT NULL REFERENCES user (id), body TEXT NOT NULL, created TEXT NOT NULL);
CREATE TABLE change (
    id INTEGER PRIMARY KEY, project_id INTEGER NOT NULL REFERENCES project (id),
    sha TEXT NOT NULL, title TEXT NOT NULL, author_id INTEGER NOT NULL REFERENCES user (id),
    created TEXT NOT NULL, UNIQUE (project_id, sha));
CREATE TABLE merge_request (
    id INTEGER PRIMARY KEY, project_id INTEGER NOT NULL REFERENCES project (id),
    number INTEGER NOT NULL, title TEXT NOT NULL, source TEXT NOT NULL, state TEXT NOT NULL,
    author_id INTEGER NOT NULL REFERENCES user (id),
    reviewer_id INTEGER NOT NULL REFERENCES user (id), created TEXT NOT NULL,
    UNIQUE (project_id, number));
"""


def fill_gitlab(db: sqlite3.Connection, seed: int) -> None:
    """Creates the tables and everything in them; equal seeds give equal rows."""
    random = Random(f"gitlab-{seed}")
    db.executescript("BEGIN;" + SCHEMA)
    for user_id, first in enumerate(random.sample(FIRST_NAMES, NUM_USERS), start=1):
        last = random.choice(LAST_NAMES)
        username = f"{first}.{last}".lower()
        row = (user_id, username, f"{first} {last}", f"{username}@example.org", _day(random, 2021))
        db.execute("INSERT INTO user VALUES (?, ?, ?, ?, '', ?)", row)
    projects = random.sample(PROJECT_NAMES, NUM_PROJECTS)
    stars = random.sample(range(3, 900), NUM_PROJECTS)
    for project_id, (name, text) in enumerate(projects, start=1):
        owner_id = OWN_ID if project_id <= 5 else random.randrange(2, NUM_USERS + 1)
        language = random.choice(LANGUAGES)
        readme = f"{name}\n\n{text}. Written in {language}."
        row = (project_id, owner_id, name, name.lower().replace(" ", "-"), text, language, readme)
        db.execute(
            "INSERT INTO project VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL)",
            (*row, _day(random, 2022), stars[project_id - 1], random.randrange(1, 80)),
        )
        _fill_project(db, random, project_id, owner_id)
    db.execute("COMMIT")


def _day(random: Random, year: int) -> str:
    return f"{year}-{random.randrange(1, 13):02d}-{random.randrange(1, 29):02d}"


def _fill_project(db: sqlite3.Connection, random: Random, project_id: int, owner_id: int) -> None:
    others = [user_id for user_id in range(2, NUM_USERS + 1) if user_id != owner_id]
    team = random.sample(others, random.randrange(3, 7))
    db.execute("INSERT INTO member VALUES (?, ?, 'Owner')", (project_id, owner_id))
    for user_id in team:
        row = (project_id, user_id, random.choice(ROLES))
        db.execute("INSERT INTO member VALUES (?, ?, ?)", row)
    people = [owner_id, *team]
    _fill_issues(db, random, project_id, people)
    dates = sorted(_day(random, 2023) for _ in range(random.randrange(14, 26)))
    for created in dates:
        title = random.choice(CHANGES).format(random.choice(PARTS))
        row = (project_id, f"{random.getrandbits(32):08x}", title, random.choice(people), created)
        db.execute(
            "INSERT INTO change (project_id, sha, title, author_id, created)"
            " VALUES (?, ?, ?, ?, ?)",
            row,
        )
    drafts = random.sample([(c, p) for c in CHANGES for p in PARTS], random.randrange(4, 8))
    for number, (change, part) in enumerate(drafts, start=1):
        author_id, reviewer_id = random.sample(people, 2)
        title = change.format(part)
        source = "-".join(title.lower().split()[:5])
        state = random.choice(("Open", "Merged", "Merged", "Closed"))
        db.execute(
            "INSERT INTO merge_request (project_id, number, title, source, state, author_id,"
            " reviewer_id, created) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (project_id, number, title, source, state, author_id, reviewer_id, _day(random, 2023)),
        )


def _fill_issues(
    db: sqlite3.Connection, random: Random, project_id: int, people: list[int]
) -> None:
    troubles = random.sample([(t, p) for t in TROUBLES for p in PARTS], random.randrange(9, 16))
    dates = sorted(_day(random, 2023) for _ in troubles)
    for number, ((trouble, part), created) in enumerate(zip(troubles, dates, strict=True), 1):
        title = trouble.format(part)
        body = f"Seen with the newest version. {title}; please have a look."
        assignee_id = random.choice([None, *people])
        cursor = db.execute(
            "INSERT INTO issue (project_id, number, title, body, label, is_open, author_id,"
            " assignee_id, created) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(project_id, number, title[0].upper() + title[1:], body, random.choice(LABELS)),
                *(int(random.random() < 0.65), random.randrange(2, NUM_USERS + 1)),
                *(assignee_id, created),
            ),
        )
        for _ in range(random.randrange(3)):
            text = random.choice(("I can confirm this.", "A patch is ready.", "Any news?"))
            db.execute(
                "INSERT INTO remark (issue_id, author_id, body, created) VALUES (?, ?, ?, ?)",
                (cursor.lastrowid, random.choice(people), text, created),
            )

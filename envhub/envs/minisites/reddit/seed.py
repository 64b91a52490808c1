"""Fills the forum's database from a seed."""

import sqlite3
from random import Random

from envhub.envs.minisites.words import FIRST_NAMES

OWN_ID = 1  # who is signed in
TODAY = "2024-01-15"
NUM_USERS = 30
NUM_FORUMS = 12
POSTS_PER_FORUM = 9
FORUMS = {
    "astronomy": ("the moon's craters", "a first telescope", "meteor showers", "Saturn's rings"),
    "baking": ("sourdough starters", "flaky pastry", "rye bread", "oven temperatures"),
    "birding": ("winter feeders", "owl calls", "field guides", "migrating cranes"),
    "bookclub": ("short novels", "translated poetry", "library cards", "unreliable narrators"),
    "boardgames": ("solo games", "games for two", "house rules", "long strategy games"),
    "cycling": ("puncture repair", "night rides", "gravel tires", "commuting in rain"),
    "diy": ("squeaky floors", "wall anchors", "paint brushes", "crooked shelves"),
    "gardening": ("tomato seedlings", "compost heaps", "slugs", "shade plants"),
    "hiking": ("waterproof boots", "mountain huts", "day packs", "trail snacks"),
    "languages": ("irregular verbs", "flash cards", "accents", "false friends"),
    "music": ("practice routines", "old pianos", "home recording", "choir warm-ups"),
    "photography": ("long exposures", "street portraits", "film cameras", "cheap tripods"),
    "running": ("first marathons", "sore knees", "early mornings", "interval training"),
    "science": ("volcano models", "deep sea life", "kitchen chemistry", "paper retractions"),
}
HEADLINES = (
    "What nobody told me about {}",
    "A question about {}",
    "My best advice on {}",
    "Is it only me, or are {} overrated?",
    "Ten years with {}",
    "Show me your {}",
    "Why I gave up on {}",
    "A beginner's guide to {}",
)
TEXTS = (
    "I have been thinking about this for a while and would like to hear what you do.",
    "This is what worked for me, after many failed attempts.",
    "Be kind, this is my first post here.",
    "I could not find a good answer elsewhere, so I ask you.",
)
REPLIES = (
    "Thank you, this helped.",
    "I disagree, but you make a fair point.",
    "Could you post a picture?",
    "Same here, every single year.",
    "It depends on how much time you have.",
    "Do not spend too much money on it.",
    "My grandmother did it the same way.",
    "This should be pinned.",
    "Try it twice before you decide.",
)
HANDLE_ENDS = ("fox", "owl", "leaf", "stone", "brook", "spark", "moss", "cloud")
SCHEMA = """
CREATE TABLE user (
    id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, bio TEXT NOT NULL DEFAULT '',
    joined TEXT NOT NULL);
CREATE TABLE forum (
    id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, description TEXT NOT NULL,
    num_subscribers INTEGER NOT NULL);
CREATE TABLE subscription (forum_id INTEGER PRIMARY KEY REFERENCES forum (id));
CREATE TABLE post (
    id INTEGER PRIMARY KEY, forum_id INTEGER NOT NULL REFERENCES forum (id),
    author_id INTEGER NOT NULL REFERENCES user (id), title TEXT NOT NULL, body TEXT NOT NULL,
    score INTEGER NOT NULL, created TEXT NOT NULL);
CREATE TABLE comment (
    id INTEGER PRIMARY KEY, post_id INTEGER NOT NULL REFERENCES post (id),
    author_id INTEGER NOT NULL REFERENCES user (id), body TEXT NOT NULL,
    score INTEGER NOT NULL, created TEXT NOT NULL);
CREATE INDEX comment_post ON comment (post_id);
CREATE TABLE vote (post_id INTEGER PRIMARY KEY REFERENCES post (id), value INTEGER NOT NULL);
"""


def fill_reddit(db: sqlite3.Connection, seed: int) -> None:
    """Creates the tables and everything in them; equal seeds give equal rows."""
    random = Random(f"reddit-{seed}")
    db.executescript("BEGIN;" + SCHEMA)
    for user_id, first in enumerate(random.sample(FIRST_NAMES, NUM_USERS), start=1):
        name = f"{first.lower()}_{random.choice(HANDLE_ENDS)}"
        row = (user_id, name, _day(random, 2021))
        db.execute("INSERT INTO user (id, name, joined) VALUES (?, ?, ?)", row)
    forums = sorted(random.sample(sorted(FORUMS), NUM_FORUMS))
    sizes = random.sample(range(40, 9000), NUM_FORUMS)
    for forum_id, (name, size) in enumerate(zip(forums, sizes, strict=True), start=1):
        text = f"Everything about {name}: {', '.join(FORUMS[name][:2])} and more."
        db.execute("INSERT INTO forum VALUES (?, ?, ?, ?)", (forum_id, name, text, size))
        _fill_forum(db, random, forum_id, name)
    db.execute("COMMIT")


def _day(random: Random, year: int) -> str:
    return f"{year}-{random.randrange(1, 13):02d}-{random.randrange(1, 29):02d}"


def _fill_forum(db: sqlite3.Connection, random: Random, forum_id: int, name: str) -> None:
    headlines = random.sample([(h, t) for h in HEADLINES for t in FORUMS[name]], POSTS_PER_FORUM)
    days = random.sample(range(364), POSTS_PER_FORUM)
    scores = random.sample(range(-8, 400), POSTS_PER_FORUM)
    for (headline, topic), day, score in zip(headlines, days, scores, strict=True):
        created = f"2023-{day // 28 % 12 + 1:02d}-{day % 28 + 1:02d}"
        row = (forum_id, random.randrange(2, NUM_USERS + 1), headline.format(topic))
        cursor = db.execute(
            "INSERT INTO post (forum_id, author_id, title, body, score, created)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (*row, random.choice(TEXTS), score, created),
        )
        replies = random.sample(REPLIES, random.randrange(0, 7))
        writers = random.sample(range(2, NUM_USERS + 1), len(replies))
        for writer, reply in zip(writers, replies, strict=True):
            db.execute(
                "INSERT INTO comment (post_id, author_id, body, score, created)"
                " VALUES (?, ?, ?, ?, ?)",
                (cursor.lastrowid, writer, reply, random.randrange(-6, 40), created),
            )

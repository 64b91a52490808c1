"""Fills the forum's database from a seed."""

import sqlite3
from random import Random
from typing import Any

from envhub.envs.minisites.seeding import WORDS as COMMON
from envhub.envs.minisites.seeding import day_of, filling, insert
from envhub.tables import read_table

OWN_ID = 1  # Id of the signed-in user.
NUM_USERS = 30
NUM_FORUMS = 12
POSTS_PER_FORUM = 9
WORDS: dict[str, Any] = read_table(__file__, "words.yaml")


def fill_reddit(db: sqlite3.Connection, seed: int) -> None:
    """Create and fill the tables; equal seeds give equal rows."""
    topics = WORDS["forums"]
    with filling(db, __file__, "reddit", seed) as random:
        for first in random.sample(COMMON["first_names"], NUM_USERS):
            name = f"{first.lower()}_{random.choice(WORDS['handle_ends'])}"
            insert(db, "user", name=name, joined=day_of(random, 2021))
        forums = sorted(random.sample(sorted(topics), NUM_FORUMS))
        sizes = random.sample(range(40, 9000), NUM_FORUMS)
        for name, size in zip(forums, sizes, strict=True):
            text = f"Everything about {name}: {', '.join(topics[name][:2])} and more."
            forum_id = insert(db, "forum", name=name, description=text, num_subscribers=size)
            _fill_forum(db, random, forum_id, topics[name])


def _fill_forum(db: sqlite3.Connection, random: Random, forum_id: int, topics: list[str]) -> None:
    """Add the posts of a forum with their comments."""
    titles = [headline.format(topic) for headline in WORDS["headlines"] for topic in topics]
    titles = random.sample(titles, POSTS_PER_FORUM)
    days = random.sample(range(364), POSTS_PER_FORUM)
    scores = random.sample(range(-8, 400), POSTS_PER_FORUM)
    for title, day, score in zip(titles, days, scores, strict=True):
        created = f"2023-{day // 28 % 12 + 1:02d}-{day % 28 + 1:02d}"
        post_id = insert(
            db,
            "post",
            forum_id=forum_id,
            author_id=random.randrange(2, NUM_USERS + 1),
            title=title,
            body=random.choice(WORDS["texts"]),
            score=score,
            created=created,
        )
        replies = random.sample(WORDS["replies"], random.randrange(0, 7))
        writers = random.sample(range(2, NUM_USERS + 1), len(replies))
        for writer, reply in zip(writers, replies, strict=True):
            insert(
                db,
                "comment",
                post_id=post_id,
                author_id=writer,
                body=reply,
                score=random.randrange(-6, 40),
                created=created,
            )

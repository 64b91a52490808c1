"""Task templates of the forum."""

import sqlite3
from collections.abc import Iterator
from random import Random

from envhub.envs.minisites.drafts import (
    Draft,
    Step,
    both,
    button,
    ends_at,
    fill,
    link,
    says,
    says_all,
    shows,
    some,
    stop,
)
from envhub.envs.minisites.reddit.seed import FORUMS, OWN_ID

HOST = "http://reddit.test"
POSTS = """
    SELECT post.*, forum.name AS forum, user.name AS author,
           (SELECT count(*) FROM comment WHERE post_id = post.id) AS num_comments
    FROM post JOIN forum ON forum.id = forum_id JOIN user ON user.id = author_id ORDER BY post.id
"""
OWN_TITLES = ("Looking for company", "Thoughts after a year", "Please explain", "A small success")
OWN_TEXTS = (
    "Who would like to join me in spring?",
    "I learned more than I had hoped.",
    "I read three books and am still confused.",
    "It worked at the fifth attempt.",
)
OWN_REPLIES = (
    "I will try this at the weekend.",
    "Where can I read more about it?",
    "This saved me a lot of work.",
    "I wish I had known this earlier.",
)
BIOS = ("Reader", "Gardener", "Night owl", "Amateur baker", "Retired pilot", "Collector of maps")
TOWNS = ("Alder Falls", "Birchmont", "Dunmore", "Fairhaven", "Glenrock", "Juniper", "Kingsley")


def _posts(db: sqlite3.Connection) -> list[sqlite3.Row]:
    return db.execute(POSTS).fetchall()


def _forums(db: sqlite3.Connection) -> list[sqlite3.Row]:
    return db.execute("SELECT * FROM forum ORDER BY id").fetchall()


def to_forum(name: str) -> tuple[Step, ...]:
    """Returns the way to a forum's page."""
    return (link("Forums"), link(name))


def to_post(post: sqlite3.Row) -> tuple[Step, ...]:
    """Returns the way to a post's page."""
    return (*to_forum(post["forum"]), link(post["title"]))


def url_of(post: sqlite3.Row) -> str:
    """Returns the URL of a post."""
    return f"{HOST}/f/{post['forum']}/{post['id']}/post.html"


def post_author(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """Who wrote a post, and when."""
    for post in some(random, _posts(db)):
        yield Draft(
            intent=f'Who wrote the post "{post["title"]}" in the forum {post["forum"]}, and on '
            "which date? Give the date as yyyy-mm-dd.",
            check=says_all([post["author"], post["created"]]),
            path=(*to_post(post), stop(f"{post['author']}, {post['created']}")),
        )


def extreme_post(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """The author of a forum's first post by score or by date."""
    for forum in _forums(db):
        posts = [post for post in _posts(db) if post["forum_id"] == forum["id"]]
        for words, order, key in (
            ("with the highest score", "Top", "score"),
            ("that is the newest", "New", "created"),
        ):
            post = max(posts, key=lambda row: row[key])
            yield Draft(
                intent=f"Who is the author of the post in the forum {forum['name']} {words}? "
                "Answer with the username only.",
                check=says(post["author"]),
                path=(*to_forum(forum["name"]), link(order), stop(post["author"])),
            )


def comment_count(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """How many comments of a post have a negative score."""
    for post in some(random, [row for row in _posts(db) if row["num_comments"] > 2]):
        (number,) = db.execute(
            "SELECT count(*) FROM comment WHERE post_id = ? AND score < 0", (post["id"],)
        ).fetchone()
        yield Draft(
            intent=f'How many comments on the post "{post["title"]}" in the forum '
            f"{post['forum']} have a score below zero? Answer with the number only.",
            check=says(str(number)),
            path=(*to_post(post), stop(str(number))),
        )


def commenters(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """Who commented on a post."""
    for post in some(random, [row for row in _posts(db) if 0 < row["num_comments"] < 5]):
        rows = db.execute(
            "SELECT user.name FROM comment JOIN user ON user.id = author_id WHERE post_id = ?"
            " ORDER BY comment.id",
            (post["id"],),
        ).fetchall()
        names = [row["name"] for row in rows]
        yield Draft(
            intent=f'List the users who commented on the post "{post["title"]}" in the forum '
            f"{post['forum']}.",
            check=says_all(names),
            path=(*to_post(post), stop(", ".join(names))),
        )


def subscriber_count(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """How many subscribers two forums have."""
    forums = _forums(db)
    for forum in forums:
        others = [other for other in forums if other["id"] > forum["id"]]
        for other in some(random, others, 3):
            answer = str(forum["num_subscribers"] + other["num_subscribers"])
            yield Draft(
                intent=f"How many subscribers do the forums {forum['name']} and {other['name']} "
                "have together? Answer with the number only.",
                check=says(answer),
                path=(link("Forums"), stop(answer)),
            )


def best_comment(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """In which forum somebody wrote the comment with the highest score."""
    for person in db.execute("SELECT * FROM user WHERE id > 1 ORDER BY id").fetchall():
        rows = db.execute(
            "SELECT comment.score, forum.name AS forum"
            " FROM comment JOIN post ON post.id = post_id JOIN forum ON forum.id = forum_id"
            " WHERE comment.author_id = ? ORDER BY comment.score DESC",
            (person["id"],),
        ).fetchall()
        if len(rows) < 2 or rows[0]["score"] == rows[1]["score"]:
            continue
        answer = rows[0]["forum"]
        yield Draft(
            intent=f"In which forum did the user {person['name']} write the comment with the "
            "highest score? Answer with the forum's name only.",
            check=says(answer),
            path=(link("Users"), link(person["name"]), stop(answer)),
        )


def sorted_forum(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """A forum in a given order."""
    for forum in _forums(db):
        for words, label, key in (
            ("the newest", "New", "new"),
            ("the most commented", "Most commented", "comments"),
            ("the highest scored", "Top", "top"),
        ):
            yield Draft(
                intent=f"Show me the posts of the forum {forum['name']} with {words} ones first.",
                check=ends_at(f"{HOST}/f/{forum['name']}?sort={key}"),
                path=(*to_forum(forum["name"]), link(label), stop()),
            )


def open_post(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """The page of a forum's most commented or newest post."""
    for forum in _forums(db):
        posts = [post for post in _posts(db) if post["forum_id"] == forum["id"]]
        for words, label, key in (
            ("most commented", "Most commented", "num_comments"),
            ("newest", "New", "created"),
            ("highest scored", "Top", "score"),
        ):
            ranked = sorted(posts, key=lambda row: row[key], reverse=True)
            if ranked[0][key] == ranked[1][key]:
                continue
            yield Draft(
                intent=f"Open the {words} post of the forum {forum['name']}.",
                check=ends_at(url_of(ranked[0])),
                path=(
                    *to_forum(forum["name"]),
                    link(label),
                    link(ranked[0]["title"]),
                    stop(),
                ),
            )


def write_post(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """A post submitted."""
    (newest,) = db.execute("SELECT max(id) FROM post").fetchone()
    for forum in _forums(db):
        for title in random.sample(OWN_TITLES, 2):
            title = f"{title}: {random.choice(FORUMS[forum['name']])}"
            body = random.choice(OWN_TEXTS)
            url = f"{HOST}/f/{forum['name']}/{newest + 1}/post.html"
            yield Draft(
                intent=f'Submit a post to the forum {forum["name"]} with the title "{title}" and '
                f'the text "{body}"',
                check=both(shows(url, "title", exact=title), shows(url, "body", exact=body)),
                path=(
                    *to_forum(forum["name"]),
                    link("Submit a post"),
                    fill("Title", title),
                    fill("Text", body),
                    button("Publish"),
                    stop(),
                ),
            )


def write_comment(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """A comment on a post."""
    for post in some(random, _posts(db)):
        text = random.choice(OWN_REPLIES)
        yield Draft(
            intent=f'Comment on the post "{post["title"]}" in the forum {post["forum"]}: "{text}"',
            check=shows(url_of(post), "comments", parts=[text]),
            path=(*to_post(post), fill("Your comment", text), button("Reply"), stop()),
        )


def vote_post(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """A post voted up or down."""
    for post in some(random, _posts(db)):
        verb, change = random.choice((("Upvote", 1), ("Downvote", -1)))
        yield Draft(
            intent=f'{verb} the post "{post["title"]}" in the forum {post["forum"]}.',
            check=shows(url_of(post), "score", exact=str(post["score"] + change)),
            path=(*to_post(post), button(verb), stop()),
        )


def subscribe(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """A forum subscribed to."""
    for forum in _forums(db):
        for words in ("Subscribe to the forum {}.", "Make me a subscriber of the forum {}."):
            yield Draft(
                intent=words.format(forum["name"]),
                check=shows(f"{HOST}/", "subscribed", parts=[forum["name"]]),
                path=(*to_forum(forum["name"]), button("Subscribe"), stop()),
            )


def set_bio(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """One's own biography."""
    (me,) = db.execute("SELECT name FROM user WHERE id = ?", (OWN_ID,)).fetchone()
    for bio in BIOS:
        text = f"{bio} from {random.choice(TOWNS)}"
        yield Draft(
            intent=f'Set my biography to "{text}".',
            check=shows(f"{HOST}/user/{me}", "bio", exact=text),
            path=(
                link("Edit biography"),
                fill("Biography", text),
                button("Save biography"),
                stop(),
            ),
        )


def new_forum(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """A forum created."""
    for topic in random.sample(("knots", "kites", "caves", "stamps", "trams", "moss", "clocks"), 5):
        place = random.choice(TOWNS)
        name = f"{topic}{random.randrange(10, 100)}"
        text = f"For friends of {topic} in {place}"
        yield Draft(
            intent=f'Create a forum called {name} with the description "{text}".',
            check=shows(f"{HOST}/f/{name}", "description", exact=text),
            path=(
                link("Forums"),
                link("Create a forum"),
                fill("Name", name),
                fill("Description", text),
                button("Create forum"),
                stop(),
            ),
        )


REDDIT_TEMPLATES = (
    post_author,
    extreme_post,
    comment_count,
    commenters,
    subscriber_count,
    best_comment,
    sorted_forum,
    open_post,
    write_post,
    write_comment,
    vote_post,
    subscribe,
    set_bio,
    new_forum,
)

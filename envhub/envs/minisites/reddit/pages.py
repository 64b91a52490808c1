"""The forum, reddit.test: the pages of `pages.yaml`, and what its forms do."""

import sqlite3

from starlette.responses import Response

from envhub.envs.minisites.reddit.seed import OWN_ID
from envhub.envs.minisites.seeding import TODAY
from envhub.envs.minisites.site import PageMissing, Site, Visit

REDDIT = Site(
    "reddit",
    database="reddit",
    table="reddit/pages.yaml",
    own_id=OWN_ID,
    orders=(("top", "Top"), ("new", "New"), ("comments", "Most commented")),
)


def _address(post: sqlite3.Row) -> str:
    return f"/f/{post['forum']}/{post['id']}/post.html"


@REDDIT.post("/create_forum")
def add_forum(visit: Visit) -> Response:
    name, text = visit.text("name")[:30], visit.text("description")
    is_taken = bool(visit.rows("SELECT 1 FROM forum WHERE name = :name", name=name))
    if not name.isascii() or not name.isalnum() or not text or is_taken:
        text = "A forum needs a new name of letters and digits, and a description."
        return visit.go("/create_forum", text)
    visit.insert("forum", name=name, description=text, num_subscribers=0)
    return visit.go(f"/f/{name}", "The forum was created.")


@REDDIT.post("/f/{forum}/subscribe")
def subscribe(visit: Visit) -> Response:
    found = visit.find("forum")
    if found["is_subscribed"]:
        visit.run("DELETE FROM subscription WHERE forum_id = :forum_id")
    else:
        visit.run("INSERT INTO subscription VALUES (:forum_id)")
    return visit.go(f"/f/{found['name']}")


@REDDIT.post("/f/{forum}/submit")
def submit(visit: Visit) -> Response:
    found, title, body = visit.find("forum"), visit.text("title")[:200], visit.text("body")
    if not title:
        return visit.go(f"/f/{found['name']}/submit", "A post needs a title.")
    written = {"author_id": OWN_ID, "title": title, "body": body, "score": 1, "created": TODAY}
    post_id = visit.insert("post", forum_id=found["id"], **written)
    return visit.go(f"/f/{found['name']}/{post_id}/post.html", "Your post was published.")


@REDDIT.post("/f/{forum}/{post_id}/vote")
def vote(visit: Visit) -> Response:
    found = visit.find("post")
    value = {"up": 1, "down": -1}.get(visit.text("direction"))
    if value is None:
        raise PageMissing(visit.path)
    if found["vote"] == value:
        visit.run("DELETE FROM vote WHERE post_id = :post_id")
    else:
        visit.run("INSERT OR REPLACE INTO vote VALUES (:post_id, :value)", value=value)
    return visit.go(_address(found))


@REDDIT.post("/f/{forum}/{post_id}/comments")
def add_comment(visit: Visit) -> Response:
    found, body = visit.find("post"), visit.text("body")
    if not body:
        return visit.go(_address(found), "A comment needs a text.")
    written = {"author_id": OWN_ID, "body": body, "score": 1, "created": TODAY}
    visit.insert("comment", post_id=found["id"], **written)
    return visit.go(_address(found), "Your comment was published.")


@REDDIT.post("/profile")
def set_profile(visit: Visit) -> Response:
    visit.run("UPDATE user SET bio = :bio WHERE id = :own_id", bio=visit.text("bio")[:300])
    return visit.go(f"/user/{visit.find('me')['name']}", "Your biography was saved.")

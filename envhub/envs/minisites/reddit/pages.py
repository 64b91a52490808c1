"""Pages of the forum, reddit.test."""

import sqlite3

from starlette.responses import Response

from envhub.envs.minisites.reddit.seed import OWN_ID
from envhub.envs.minisites.seeding import TODAY
from envhub.envs.minisites.site import PageMissing, Site, Visit

REDDIT = Site("reddit", database="reddit")
PAGE_ROWS = 20
ORDERS = {
    "top": "total DESC, post.id",
    "new": "created DESC, post.id DESC",
    "comments": "num_comments DESC, total DESC, post.id",
}
ORDER_LABELS = (("top", "Top"), ("new", "New"), ("comments", "Most commented"))
POSTS = """
    SELECT post.*, forum.name AS forum, user.name AS author, coalesce(vote.value, 0) AS vote,
           score + coalesce(vote.value, 0) AS total,
           (SELECT count(*) FROM comment WHERE post_id = post.id) AS num_comments
    FROM post JOIN forum ON forum.id = forum_id JOIN user ON user.id = author_id
    LEFT JOIN vote ON vote.post_id = post.id
"""
FORUMS = """
    SELECT forum.*, subscription.forum_id IS NOT NULL AS is_subscribed,
           num_subscribers + (subscription.forum_id IS NOT NULL) AS subscribers,
           (SELECT count(*) FROM post WHERE forum_id = forum.id) AS num_posts
    FROM forum LEFT JOIN subscription ON subscription.forum_id = forum.id
"""


def _page(visit: Visit, template: str, **values: object) -> Response:
    me = visit.one("SELECT * FROM user WHERE id = ?", OWN_ID)
    return visit.page(template, me=me, orders=ORDER_LABELS, **values)


def _forum(visit: Visit) -> sqlite3.Row:
    return visit.one(FORUMS + " WHERE forum.name = ?", visit.params["forum"])


def _post(visit: Visit) -> sqlite3.Row:
    return visit.one(
        POSTS + " WHERE forum.name = ? AND post.id = ?",
        *(visit.params["forum"], visit.number("post", 0)),
    )


def _address(post: sqlite3.Row) -> str:
    return f"/f/{post['forum']}/{post['id']}/post.html"


@REDDIT.get("/")
def home(visit: Visit) -> Response:
    order = ORDERS[visit.choice("sort", tuple(ORDERS))]
    subscribed = visit.rows(FORUMS + " WHERE subscription.forum_id IS NOT NULL ORDER BY forum.name")
    posts = visit.rows(f"{POSTS} ORDER BY {order} LIMIT {PAGE_ROWS}")
    return _page(visit, "home.html", posts=posts, subscribed=subscribed)


@REDDIT.get("/forums")
def forums(visit: Visit) -> Response:
    by_size = visit.choice("sort", ("name", "size")) == "size"
    order = "subscribers DESC" if by_size else "forum.name"
    return _page(visit, "forums.html", forums=visit.rows(f"{FORUMS} ORDER BY {order}"))


@REDDIT.get("/users")
def users(visit: Visit) -> Response:
    return _page(visit, "users.html", users=visit.rows("SELECT name FROM user ORDER BY name"))


@REDDIT.get("/search")
def search(visit: Visit) -> Response:
    posts = visit.rows(
        f"{POSTS} WHERE (post.title || ' ' || post.body) LIKE ? ESCAPE '\\'"
        f" ORDER BY {ORDERS['top']} LIMIT {PAGE_ROWS}",
        visit.pattern(),
    )
    return _page(visit, "search.html", posts=posts, words=visit.query.get("q", ""))


@REDDIT.get("/create_forum")
def forum_form(visit: Visit) -> Response:
    return _page(visit, "new_forum.html")


@REDDIT.post("/create_forum")
def add_forum(visit: Visit) -> Response:
    name, text = visit.text("name")[:30], visit.text("description")
    is_taken = bool(visit.rows("SELECT 1 FROM forum WHERE name = ?", name))
    if not name.isascii() or not name.isalnum() or not text or is_taken:
        text = "A forum needs a new name of letters and digits, and a description."
        return visit.go("/create_forum", text)
    visit.insert("forum", name=name, description=text, num_subscribers=0)
    return visit.go(f"/f/{name}", "The forum was created.")


@REDDIT.get("/f/{forum}")
def forum(visit: Visit) -> Response:
    found, order = _forum(visit), visit.choice("sort", tuple(ORDERS))
    posts = visit.rows(
        f"{POSTS} WHERE forum_id = ? ORDER BY {ORDERS[order]} LIMIT {PAGE_ROWS}", found["id"]
    )
    return _page(visit, "forum.html", forum=found, posts=posts)


@REDDIT.post("/f/{forum}/subscribe")
def subscribe(visit: Visit) -> Response:
    found = _forum(visit)
    if found["is_subscribed"]:
        visit.run("DELETE FROM subscription WHERE forum_id = ?", found["id"])
    else:
        visit.run("INSERT INTO subscription VALUES (?)", found["id"])
    return visit.go(f"/f/{found['name']}")


@REDDIT.get("/f/{forum}/submit")
def post_form(visit: Visit) -> Response:
    return _page(visit, "submit.html", forum=_forum(visit))


@REDDIT.post("/f/{forum}/submit")
def submit(visit: Visit) -> Response:
    found, title, body = _forum(visit), visit.text("title")[:200], visit.text("body")
    if not title:
        return visit.go(f"/f/{found['name']}/submit", "A post needs a title.")
    written = {"author_id": OWN_ID, "title": title, "body": body, "score": 1, "created": TODAY}
    post_id = visit.insert("post", forum_id=found["id"], **written)
    return visit.go(f"/f/{found['name']}/{post_id}/post.html", "Your post was published.")


@REDDIT.get("/f/{forum}/{post}/post.html")
def post(visit: Visit) -> Response:
    found = _post(visit)
    comments = visit.rows(
        "SELECT comment.*, user.name AS author FROM comment JOIN user ON user.id = author_id"
        " WHERE post_id = ? ORDER BY comment.id",
        found["id"],
    )
    return _page(visit, "post.html", post=found, comments=comments)


@REDDIT.post("/f/{forum}/{post}/vote")
def vote(visit: Visit) -> Response:
    found = _post(visit)
    value = {"up": 1, "down": -1}.get(visit.text("direction"))
    if value is None:
        raise PageMissing(visit.path)
    if found["vote"] == value:
        visit.run("DELETE FROM vote WHERE post_id = ?", found["id"])
    else:
        visit.run("INSERT OR REPLACE INTO vote VALUES (?, ?)", found["id"], value)
    return visit.go(_address(found))


@REDDIT.post("/f/{forum}/{post}/comments")
def add_comment(visit: Visit) -> Response:
    found, body = _post(visit), visit.text("body")
    if not body:
        return visit.go(_address(found), "A comment needs a text.")
    written = {"author_id": OWN_ID, "body": body, "score": 1, "created": TODAY}
    visit.insert("comment", post_id=found["id"], **written)
    return visit.go(_address(found), "Your comment was published.")


@REDDIT.get("/user/{name}")
def person(visit: Visit) -> Response:
    found = visit.one("SELECT * FROM user WHERE name = ?", visit.params["name"])
    posts = visit.rows(f"{POSTS} WHERE author_id = ? ORDER BY {ORDERS['new']}", found["id"])
    comments = visit.rows(
        "SELECT comment.*, post.title, forum.name AS forum FROM comment"
        " JOIN post ON post.id = post_id JOIN forum ON forum.id = forum_id"
        " WHERE comment.author_id = ? ORDER BY comment.created DESC, comment.id DESC",
        found["id"],
    )
    return _page(visit, "person.html", person=found, posts=posts, comments=comments)


@REDDIT.get("/profile")
def profile_form(visit: Visit) -> Response:
    return _page(visit, "profile.html")


@REDDIT.post("/profile")
def set_profile(visit: Visit) -> Response:
    visit.run("UPDATE user SET bio = ? WHERE id = ?", visit.text("bio")[:300], OWN_ID)
    me = visit.one("SELECT name FROM user WHERE id = ?", OWN_ID)["name"]
    return visit.go(f"/user/{me}", "Your biography was saved.")

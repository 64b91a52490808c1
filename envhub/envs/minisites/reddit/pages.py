"""The forum, reddit.test: its pages and forms, and new forums."""

from typing import Any

from starlette.responses import Response

from envhub.envs.minisites.reddit.seed import OWN_ID
from envhub.envs.minisites.site import Site, Visit

FINDS = {
    "me": "SELECT * FROM user WHERE id = :own_id",
    "forum": "SELECT * FROM forums WHERE name = :forum",
    "post": "SELECT * FROM posts WHERE forum = :forum AND id = :post_id",
    "next": "SELECT 1 + coalesce(max(id), 0) AS post_id FROM post",
    "choice": "SELECT CASE :direction WHEN 'up' THEN 1 ELSE -1 END AS value WHERE :direction "
    "IN ('up', 'down')",
    "person": "SELECT * FROM user WHERE name = :name",
}
ORDERS = {
    "top": "total DESC, id",
    "new": "created DESC, id DESC",
    "comments": "num_comments DESC, total DESC, id",
}
FORUMS_ORDERS = {"name": "name", "size": "subscribers DESC"}


def _frame(visit: Visit) -> dict[str, Any]:
    """Return the values that all pages show."""
    return {"me": visit.find("me")}


REDDIT = Site(
    "reddit",
    database="reddit",
    finds=FINDS,
    frame=_frame,
    own_id=OWN_ID,
    orders=(("top", "Top"), ("new", "New"), ("comments", "Most commented")),
)


@REDDIT.get("/")
def home(visit: Visit) -> Response:
    sort = visit.take("sort", tuple(ORDERS))
    return visit.page(
        "home.html",
        sort=sort,
        subscribed=visit.rows("SELECT * FROM forums WHERE is_subscribed ORDER BY name"),
        posts=visit.rows(f"SELECT * FROM posts ORDER BY {ORDERS[sort]} LIMIT 20"),
    )


@REDDIT.get("/forums")
def forums(visit: Visit) -> Response:
    sort = visit.take("sort", tuple(FORUMS_ORDERS))
    return visit.page(
        "forums.html",
        sort=sort,
        forums=visit.rows(f"SELECT * FROM forums ORDER BY {FORUMS_ORDERS[sort]}"),
    )


@REDDIT.get("/users")
def users(visit: Visit) -> Response:
    return visit.page("users.html", users=visit.rows("SELECT name FROM user ORDER BY name"))


@REDDIT.get("/search")
def search(visit: Visit) -> Response:
    return visit.page(
        "search.html",
        posts=visit.rows(
            "SELECT * FROM posts WHERE (title || ' ' || body) LIKE :pattern ESCAPE '\\' "
            "ORDER BY total DESC, id LIMIT 20"
        ),
    )


@REDDIT.get("/create_forum")
def new_forum(visit: Visit) -> Response:
    return visit.page("new_forum.html")


@REDDIT.get("/f/{forum}")
def forum(visit: Visit) -> Response:
    sort = visit.take("sort", tuple(ORDERS))
    return visit.page(
        "forum.html",
        sort=sort,
        forum=visit.find("forum"),
        posts=visit.rows(
            f"SELECT * FROM posts WHERE forum_id = :forum_id ORDER BY {ORDERS[sort]} LIMIT 20"
        ),
    )


@REDDIT.get("/f/{forum}/submit")
def submit(visit: Visit) -> Response:
    return visit.page("submit.html", forum=visit.find("forum"))


@REDDIT.get("/f/{forum}/{post_id}/post.html")
def post(visit: Visit) -> Response:
    return visit.page(
        "post.html",
        post=visit.find("post"),
        comments=visit.rows(
            "SELECT comment.*, user.name AS author FROM comment JOIN user ON user.id = "
            "author_id WHERE post_id = :post_id ORDER BY comment.id"
        ),
    )


@REDDIT.get("/user/{name}")
def person(visit: Visit) -> Response:
    return visit.page(
        "person.html",
        person=visit.find("person"),
        posts=visit.rows(
            "SELECT * FROM posts WHERE author_id = :person_id ORDER BY created DESC, id DESC"
        ),
        comments=visit.rows(
            "SELECT comment.*, post.title, forum.name AS forum FROM comment JOIN post ON "
            "post.id = post_id JOIN forum ON forum.id = forum_id WHERE comment.author_id = "
            ":person_id ORDER BY comment.created DESC, comment.id DESC"
        ),
    )


@REDDIT.get("/profile")
def profile(visit: Visit) -> Response:
    return visit.page("profile.html")


@REDDIT.post("/f/{forum}/subscribe")
def subscribe(visit: Visit) -> Response:
    visit.find("forum")
    visit.run("DELETE FROM subscription WHERE forum_id = :forum_id")
    visit.run("INSERT INTO subscription SELECT :forum_id WHERE NOT :forum_is_subscribed")
    return visit.go("/f/{forum_name}")


@REDDIT.post("/f/{forum}/submit")
def add_post(visit: Visit) -> Response:
    visit.field("title", max_chars=200)
    visit.field("body")
    visit.find("forum")
    visit.find("next")
    if not visit.holds(":title <> ''"):
        return visit.go("/f/{forum_name}/submit", "A post needs a title.")
    visit.run(
        "INSERT INTO post VALUES (:next_post_id, :forum_id, :own_id, :title, :body, 1, :today)"
    )
    return visit.go("/f/{forum_name}/{next_post_id}/post.html", "Your post was published.")


@REDDIT.post("/f/{forum}/{post_id}/vote")
def vote(visit: Visit) -> Response:
    visit.field("direction")
    visit.find("post")
    visit.find("choice")
    visit.run("DELETE FROM vote WHERE post_id = :post_id")
    visit.run("INSERT INTO vote SELECT :post_id, :choice_value WHERE :post_vote <> :choice_value")
    return visit.go("/f/{post_forum}/{post_id}/post.html")


@REDDIT.post("/f/{forum}/{post_id}/comments")
def add_comment(visit: Visit) -> Response:
    visit.field("body")
    visit.find("post")
    if not visit.holds(":body <> ''"):
        return visit.go("/f/{post_forum}/{post_id}/post.html", "A comment needs a text.")
    visit.run(
        "INSERT INTO comment (post_id, author_id, body, score, created) VALUES "
        "(:post_id, :own_id, :body, 1, :today)"
    )
    return visit.go("/f/{post_forum}/{post_id}/post.html", "Your comment was published.")


@REDDIT.post("/profile")
def save_profile(visit: Visit) -> Response:
    visit.field("bio", max_chars=300)
    visit.find("me")
    visit.run("UPDATE user SET bio = :bio WHERE id = :own_id")
    return visit.go("/user/{me_name}", "Your biography was saved.")


@REDDIT.post("/create_forum")
def add_forum(visit: Visit) -> Response:
    """Add a forum of the form, or return to the form with the reason."""
    name = visit.text("name")[:30]
    text = visit.text("description")
    is_taken = bool(visit.rows("SELECT 1 FROM forum WHERE name = :name", name=name))
    if not name.isascii() or not name.isalnum() or not text or is_taken:
        text = "A forum needs a new name of letters and digits, and a description."
        return visit.go("/create_forum", text)
    visit.insert("forum", name=name, description=text, num_subscribers=0)
    return visit.go(f"/f/{name}", "The forum was created.")

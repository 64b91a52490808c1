"""The forum, reddit.test: the pages and forms of `pages.yaml`, and new forums."""

from starlette.responses import Response

from envhub.envs.minisites.reddit.seed import OWN_ID
from envhub.envs.minisites.site import Site, Visit

REDDIT = Site(
    "reddit",
    database="reddit",
    table="reddit/pages.yaml",
    own_id=OWN_ID,
    orders=(("top", "Top"), ("new", "New"), ("comments", "Most commented")),
)


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

"""The code host, gitlab.test: the pages and forms of `pages.yaml`, and new projects."""

from starlette.responses import Response

from envhub.envs.minisites.gitlab.seed import OWN_ID, WORDS
from envhub.envs.minisites.seeding import TODAY
from envhub.envs.minisites.site import Site, Visit

GITLAB = Site(
    "gitlab",
    database="gitlab",
    table="gitlab/pages.yaml",
    own_id=OWN_ID,
    labels=WORDS["labels"],
    member_roles=WORDS["roles"],
    states=("Open", "Merged", "Closed"),
)


@GITLAB.post("/projects/new")
def add_project(visit: Visit) -> Response:
    """Add a project of the form, or return to the form with the reason."""
    name = visit.text("name")[:60]
    text = visit.text("description")
    slug = "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
    taken = visit.rows("SELECT 1 FROM project WHERE owner_id = :own_id AND slug = :slug", slug=slug)
    if not slug.isascii() or not slug or taken:
        return visit.go("/projects/new", "A project needs a new name of letters and digits.")
    made = {"name": name, "slug": slug, "description": text, "language": "-", "readme": name}
    made |= {"created": TODAY, "num_stars": 0, "num_forks": 0}
    project_id = visit.insert("project", owner_id=OWN_ID, **made)
    visit.insert("member", project_id=project_id, user_id=OWN_ID, role="Owner")
    return visit.go(f"/{visit.find('me')['username']}/{slug}", "The project was created.")

"""Pages of the code host, gitlab.test: people, projects and what belongs to a project."""

import sqlite3
from collections.abc import Mapping

from starlette.responses import Response

from envhub.envs.minisites.gitlab.seed import OWN_ID, WORDS
from envhub.envs.minisites.seeding import TODAY
from envhub.envs.minisites.site import PageMissing, Site, Visit

GITLAB = Site("gitlab", database="gitlab")
PROJECTS = """
    SELECT project.*, user.username AS owner, user.name AS owner_name,
           project.num_stars + (star.project_id IS NOT NULL) AS stars,
           star.project_id IS NOT NULL AS is_starred
    FROM project JOIN user ON user.id = owner_id
    LEFT JOIN star ON star.project_id = project.id
"""
PROJECT_ORDERS = {
    "name": "project.name, project.id",
    "stars": "stars DESC, project.name",
    "created": "project.created DESC, project.name",
}


def page(visit: Visit, template: str, **values: object) -> Response:
    """Return a page with what the frame of every page needs."""
    me = visit.one("SELECT * FROM user WHERE id = ?", OWN_ID)
    return visit.page(template, me=me, **values)


def project_of(visit: Visit) -> sqlite3.Row:
    """Return the project of the address.

    Raises:
        PageMissing: there is none.
    """
    return visit.one(
        PROJECTS + " WHERE user.username = ? AND project.slug = ?",
        *(visit.params["owner"], visit.params["project"]),
    )


def root_of(project: sqlite3.Row) -> str:
    """Return the address of a project's first page."""
    return f"/{project['owner']}/{project['slug']}"


def _projects(visit: Visit, where: str, *args: object, order: str = "name") -> list[sqlite3.Row]:
    return visit.rows(f"{PROJECTS} WHERE {where} ORDER BY {PROJECT_ORDERS[order]}", *args)


@GITLAB.get("/")
def home(visit: Visit) -> Response:
    return page(visit, "home.html", projects=_projects(visit, "owner_id = ?", OWN_ID))


@GITLAB.get("/explore")
def explore(visit: Visit) -> Response:
    order = visit.choice("sort", tuple(PROJECT_ORDERS))
    return page(visit, "explore.html", projects=_projects(visit, "1", order=order))


@GITLAB.get("/search")
def search(visit: Visit) -> Response:
    where = "(project.name || ' ' || project.description) LIKE ? ESCAPE '\\'"
    people = visit.rows(
        "SELECT * FROM user WHERE (name || ' ' || username) LIKE ? ESCAPE '\\' ORDER BY name",
        visit.pattern(),
    )
    found = _projects(visit, where, visit.pattern())
    return page(visit, "search.html", projects=found, people=people, words=visit.words())


@GITLAB.get("/-/profile")
def profile_form(visit: Visit) -> Response:
    return page(visit, "profile.html")


@GITLAB.post("/-/profile")
def set_profile(visit: Visit) -> Response:
    status = visit.text("status")[:100]
    visit.run("UPDATE user SET status = ? WHERE id = ?", status, OWN_ID)
    return visit.go("/-/profile", "Your status was saved.")


@GITLAB.get("/projects/new")
def project_form(visit: Visit) -> Response:
    return page(visit, "new_project.html")


@GITLAB.post("/projects/new")
def add_project(visit: Visit) -> Response:
    name, text = visit.text("name")[:60], visit.text("description")
    slug = "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
    taken = visit.rows("SELECT 1 FROM project WHERE owner_id = ? AND slug = ?", OWN_ID, slug)
    if not slug.isascii() or not slug or taken:
        return visit.go("/projects/new", "A project needs a new name of letters and digits.")
    made = {"name": name, "slug": slug, "description": text, "language": "-", "readme": name}
    _add(visit, made)
    owner = visit.one("SELECT username FROM user WHERE id = ?", OWN_ID)["username"]
    return visit.go(f"/{owner}/{slug}", "The project was created.")


def _add(visit: Visit, values: Mapping[str, object]) -> int:
    """Add a project of one's own and return its id."""
    project_id = visit.insert(
        "project", owner_id=OWN_ID, created=TODAY, num_stars=0, num_forks=0, **values
    )
    visit.insert("member", project_id=project_id, user_id=OWN_ID, role="Owner")
    return project_id


@GITLAB.get("/{owner}")
def person(visit: Visit) -> Response:
    found = visit.one("SELECT * FROM user WHERE username = ?", visit.params["owner"])
    roles = visit.rows(
        "SELECT project.name, project.slug, user.username AS owner, member.role FROM member"
        " JOIN project ON project.id = project_id JOIN user ON user.id = owner_id"
        " WHERE member.user_id = ? ORDER BY project.name, project.id",
        found["id"],
    )
    return page(visit, "person.html", person=found, roles=roles)


@GITLAB.get("/{owner}/{project}")
def project(visit: Visit) -> Response:
    found = project_of(visit)
    source = None
    if found["forked_from"] is not None:
        source = visit.one(PROJECTS + " WHERE project.id = ?", found["forked_from"])
    return page(visit, "project.html", project=found, source=source)


@GITLAB.post("/{owner}/{project}/-/star")
def star(visit: Visit) -> Response:
    found = project_of(visit)
    if found["is_starred"]:
        visit.run("DELETE FROM star WHERE project_id = ?", found["id"])
    else:
        visit.run("INSERT INTO star VALUES (?)", found["id"])
    return visit.go(root_of(found))


@GITLAB.post("/{owner}/{project}/-/fork")
def fork(visit: Visit) -> Response:
    found = project_of(visit)
    mine = visit.rows(PROJECTS + " WHERE owner_id = ? AND slug = ?", OWN_ID, found["slug"])
    if mine:
        return visit.go(root_of(mine[0]), "You have a project of this name already.")
    copied = ("name", "slug", "description", "language", "readme")
    project_id = _add(visit, {key: found[key] for key in copied} | {"forked_from": found["id"]})
    visit.run("UPDATE project SET num_forks = num_forks + 1 WHERE id = ?", found["id"])
    forked = visit.one(PROJECTS + " WHERE project.id = ?", project_id)
    return visit.go(root_of(forked), "The project was forked.")


@GITLAB.get("/{owner}/{project}/-/readme")
def readme_form(visit: Visit) -> Response:
    return page(visit, "readme.html", project=_own(visit))


@GITLAB.post("/{owner}/{project}/-/readme")
def edit_readme(visit: Visit) -> Response:
    found = _own(visit)
    text = visit.text("readme").replace("\r\n", "\n")
    visit.run("UPDATE project SET readme = ? WHERE id = ?", text, found["id"])
    return visit.go(root_of(found), "The README was saved.")


def _own(visit: Visit) -> sqlite3.Row:
    found = project_of(visit)
    if found["owner_id"] != OWN_ID:
        raise PageMissing(visit.path)
    return found


@GITLAB.get("/{owner}/{project}/-/members")
def members(visit: Visit) -> Response:
    found = project_of(visit)
    rows = visit.rows(
        "SELECT user.name, user.username, member.role FROM member"
        " JOIN user ON user.id = user_id WHERE project_id = ? ORDER BY user.name",
        found["id"],
    )
    return page(visit, "members.html", project=found, rows=rows)


@GITLAB.post("/{owner}/{project}/-/members")
def invite(visit: Visit) -> Response:
    found, role = _own(visit), visit.text("role")
    people = visit.rows("SELECT id FROM user WHERE username = ?", visit.text("username"))
    if not people or people[0]["id"] == OWN_ID or role not in WORDS["roles"]:
        return visit.go(f"{root_of(found)}/-/members", "Give a username and a role.")
    visit.run(
        "INSERT INTO member VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET role = excluded.role",
        *(found["id"], people[0]["id"], role),
    )
    return visit.go(f"{root_of(found)}/-/members", "The member was added.")


@GITLAB.get("/{owner}/{project}/-/commits")
def commits(visit: Visit) -> Response:
    found, author = project_of(visit), visit.query.get("author", "")
    rows = visit.rows(
        "SELECT change.*, user.name AS author, user.username FROM change"
        " JOIN user ON user.id = author_id"
        " WHERE project_id = ? AND (? = '' OR user.username = ?)"
        " ORDER BY created DESC, change.id DESC",
        *(found["id"], author, author),
    )
    return page(visit, "commits.html", project=found, rows=rows, author=author)


@GITLAB.get("/{owner}/{project}/-/contributors")
def contributors(visit: Visit) -> Response:
    found = project_of(visit)
    rows = visit.rows(
        "SELECT user.name, user.username, user.email, count(*) AS num_commits FROM change"
        " JOIN user ON user.id = author_id WHERE project_id = ? GROUP BY user.id"
        " ORDER BY num_commits DESC, user.name",
        found["id"],
    )
    return page(visit, "contributors.html", project=found, rows=rows)

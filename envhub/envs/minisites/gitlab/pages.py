"""The code host, gitlab.test: the pages of `pages.yaml`, and what its forms do."""

import sqlite3
from collections.abc import Mapping

from starlette.responses import Response

from envhub.envs.minisites.gitlab.seed import OWN_ID, WORDS
from envhub.envs.minisites.seeding import TODAY
from envhub.envs.minisites.site import PageMissing, Site, Visit

MERGE_STATES = ("Open", "Merged", "Closed")
GITLAB = Site(
    "gitlab",
    database="gitlab",
    table="gitlab/pages.yaml",
    own_id=OWN_ID,
    labels=WORDS["labels"],
    states=MERGE_STATES,
)


def _root(project: sqlite3.Row) -> str:
    return f"/{project['owner']}/{project['slug']}"


def _own(visit: Visit) -> sqlite3.Row:
    found = visit.find("project")
    if found["owner_id"] != OWN_ID:
        raise PageMissing(visit.path)
    return found


def _user_ids(visit: Visit) -> list[int]:
    """Return the id of the user that the form names, if there is one."""
    named = "SELECT id FROM user WHERE username = :username"
    return [row["id"] for row in visit.rows(named, username=visit.text("username"))]


@GITLAB.post("/-/profile")
def set_profile(visit: Visit) -> Response:
    status = visit.text("status")[:100]
    visit.run("UPDATE user SET status = :status WHERE id = :own_id", status=status)
    return visit.go("/-/profile", "Your status was saved.")


@GITLAB.post("/projects/new")
def add_project(visit: Visit) -> Response:
    name, text = visit.text("name")[:60], visit.text("description")
    slug = "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
    taken = visit.rows("SELECT 1 FROM project WHERE owner_id = :own_id AND slug = :slug", slug=slug)
    if not slug.isascii() or not slug or taken:
        return visit.go("/projects/new", "A project needs a new name of letters and digits.")
    made = {"name": name, "slug": slug, "description": text, "language": "-", "readme": name}
    _add(visit, made)
    return visit.go(f"/{visit.find('me')['username']}/{slug}", "The project was created.")


def _add(visit: Visit, values: Mapping[str, object]) -> int:
    project_id = visit.insert(
        "project", owner_id=OWN_ID, created=TODAY, num_stars=0, num_forks=0, **values
    )
    visit.insert("member", project_id=project_id, user_id=OWN_ID, role="Owner")
    return project_id


@GITLAB.post("/{owner}/{project}/-/star")
def star(visit: Visit) -> Response:
    found = visit.find("project")
    if found["is_starred"]:
        visit.run("DELETE FROM star WHERE project_id = :project_id")
    else:
        visit.run("INSERT INTO star VALUES (:project_id)")
    return visit.go(_root(found))


@GITLAB.post("/{owner}/{project}/-/fork")
def fork(visit: Visit) -> Response:
    found = visit.find("project")
    mine = visit.rows("SELECT * FROM projects WHERE owner_id = :own_id AND slug = :project_slug")
    if mine:
        return visit.go(_root(mine[0]), "You have a project of this name already.")
    copied = ("name", "slug", "description", "language", "readme")
    _add(visit, {key: found[key] for key in copied} | {"forked_from": found["id"]})
    visit.run("UPDATE project SET num_forks = num_forks + 1 WHERE id = :project_id")
    return visit.go(f"/{visit.find('me')['username']}/{found['slug']}", "The project was forked.")


@GITLAB.get("/{owner}/{project}/-/readme")
def readme_form(visit: Visit) -> Response:
    return visit.page("readme.html", project=_own(visit))


@GITLAB.post("/{owner}/{project}/-/readme")
def edit_readme(visit: Visit) -> Response:
    found, text = _own(visit), visit.text("readme").replace("\r\n", "\n")
    visit.run("UPDATE project SET readme = :text WHERE id = :project_id", text=text)
    return visit.go(_root(found), "The README was saved.")


@GITLAB.post("/{owner}/{project}/-/members")
def invite(visit: Visit) -> Response:
    back, role = f"{_root(_own(visit))}/-/members", visit.text("role")
    people = _user_ids(visit)
    if not people or people[0] == OWN_ID or role not in WORDS["roles"]:
        return visit.go(back, "Give a username and a role.")
    visit.run(
        "INSERT INTO member VALUES (:project_id, :person, :role)"
        " ON CONFLICT DO UPDATE SET role = excluded.role",
        person=people[0],
        role=role,
    )
    return visit.go(back, "The member was added.")


@GITLAB.post("/{owner}/{project}/-/issues/new")
def add_issue(visit: Visit) -> Response:
    found, title, label = visit.find("project"), visit.text("title")[:200], visit.text("label")
    if not title or label not in WORDS["labels"]:
        return visit.go(f"{_root(found)}/-/issues/new", "An issue needs a title and a label.")
    newest = "SELECT coalesce(max(number), 0) AS number FROM issue WHERE project_id = :project_id"
    number = 1 + visit.rows(newest)[0]["number"]
    written = {"title": title, "body": visit.text("body"), "label": label}
    made = {"number": number, "author_id": OWN_ID, "created": TODAY}
    visit.insert("issue", project_id=found["id"], **made, **written)
    return visit.go(f"{_root(found)}/-/issues/{number}", "The issue was created.")


def _issue(visit: Visit) -> tuple[sqlite3.Row, str]:
    project, found = visit.find("project"), visit.find("issue")
    return found, f"{_root(project)}/-/issues/{found['number']}"


@GITLAB.post("/{owner}/{project}/-/issues/{number}/state")
def toggle_issue(visit: Visit) -> Response:
    _, back = _issue(visit)
    visit.run("UPDATE issue SET is_open = 1 - is_open WHERE id = :issue_id")
    return visit.go(back)


@GITLAB.post("/{owner}/{project}/-/issues/{number}/assign")
def assign_issue(visit: Visit) -> Response:
    (_, back), people = _issue(visit), _user_ids(visit)
    if not people:
        return visit.go(back, "There is no user of this name.")
    visit.run("UPDATE issue SET assignee_id = :person WHERE id = :issue_id", person=people[0])
    return visit.go(back, "The issue was assigned.")


@GITLAB.post("/{owner}/{project}/-/issues/{number}/remarks")
def add_remark(visit: Visit) -> Response:
    (found, back), body = _issue(visit), visit.text("body")
    if not body:
        return visit.go(back, "A comment needs a text.")
    visit.insert("remark", issue_id=found["id"], author_id=OWN_ID, body=body, created=TODAY)
    return visit.go(back, "The comment was added.")


@GITLAB.post("/{owner}/{project}/-/merge_requests/{number}/state")
def move_merge_request(visit: Visit) -> Response:
    project, state = visit.find("project"), visit.text("state")
    back = f"{_root(project)}/-/merge_requests/{visit.names['number']}"
    if state not in MERGE_STATES or project["owner_id"] != OWN_ID:
        return visit.go(back, "You may not do this.")
    visit.run(
        "UPDATE merge_request SET state = :state"
        " WHERE project_id = :project_id AND number = :number AND state = 'Open'",
        state=state,
    )
    return visit.go(back)

"""The code host, gitlab.test: its pages and forms, and new projects."""

from typing import Any

from starlette.responses import Response

from envhub.envs.minisites.gitlab.seed import OWN_ID, WORDS
from envhub.envs.minisites.seeding import TODAY
from envhub.envs.minisites.site import Site, Visit

FINDS = {
    "me": "SELECT * FROM user WHERE id = :own_id",
    "person": "SELECT * FROM user WHERE username = :owner",
    "project": "SELECT * FROM projects WHERE owner = :owner AND slug = :project",
    "issue": "SELECT * FROM issues WHERE project_id = :project_id AND number = :number",
    "mine": "SELECT id FROM project WHERE id = :project_id AND owner_id = :own_id",
    "next": "SELECT 1 + coalesce(max(number), 0) AS number FROM issue WHERE project_id = "
    ":project_id",
    "request": "SELECT * FROM merge_requests WHERE project_id = :project_id AND number = :number",
}
ORDERS = {"name": "name, id", "stars": "stars DESC, name", "created": "created DESC, name"}


def _frame(visit: Visit) -> dict[str, Any]:
    """Return the values that all pages show."""
    return {"me": visit.find("me")}


GITLAB = Site(
    "gitlab",
    database="gitlab",
    finds=FINDS,
    frame=_frame,
    own_id=OWN_ID,
    labels=WORDS["labels"],
    member_roles=WORDS["roles"],
    states=("Open", "Merged", "Closed"),
)


@GITLAB.get("/")
def home(visit: Visit) -> Response:
    return visit.page(
        "home.html",
        projects=visit.rows("SELECT * FROM projects WHERE owner_id = :own_id ORDER BY name, id"),
    )


@GITLAB.get("/explore")
def explore(visit: Visit) -> Response:
    sort = visit.take("sort", tuple(ORDERS))
    return visit.page(
        "explore.html",
        sort=sort,
        projects=visit.rows(f"SELECT * FROM projects ORDER BY {ORDERS[sort]}"),
    )


@GITLAB.get("/search")
def search(visit: Visit) -> Response:
    return visit.page(
        "search.html",
        projects=visit.rows(
            "SELECT * FROM projects WHERE (name || ' ' || description) LIKE :pattern ESCAPE "
            "'\\' ORDER BY name, id"
        ),
        people=visit.rows(
            "SELECT * FROM user WHERE (name || ' ' || username) LIKE :pattern ESCAPE '\\' "
            "ORDER BY name"
        ),
    )


@GITLAB.get("/-/profile")
def profile(visit: Visit) -> Response:
    return visit.page("profile.html")


@GITLAB.get("/projects/new")
def new_project(visit: Visit) -> Response:
    return visit.page("new_project.html")


@GITLAB.get("/{owner}")
def person(visit: Visit) -> Response:
    return visit.page(
        "person.html",
        person=visit.find("person"),
        roles=visit.rows(
            "SELECT projects.name, projects.slug, projects.owner, member.role FROM member "
            "JOIN projects ON projects.id = project_id WHERE member.user_id = :person_id "
            "ORDER BY projects.name, projects.id"
        ),
    )


@GITLAB.get("/{owner}/{project}")
def project(visit: Visit) -> Response:
    return visit.page(
        "project.html",
        project=visit.find("project"),
        sources=visit.rows("SELECT * FROM projects WHERE id = :project_forked_from"),
    )


@GITLAB.get("/{owner}/{project}/-/members")
def members(visit: Visit) -> Response:
    return visit.page(
        "members.html",
        project=visit.find("project"),
        rows=visit.rows(
            "SELECT user.name, user.username, member.role FROM member JOIN user ON user.id = "
            "user_id WHERE project_id = :project_id ORDER BY user.name"
        ),
    )


@GITLAB.get("/{owner}/{project}/-/commits")
def commits(visit: Visit) -> Response:
    return visit.page(
        "commits.html",
        author=visit.take("author"),
        project=visit.find("project"),
        rows=visit.rows(
            "SELECT change.*, user.name AS author, user.username FROM change JOIN user ON "
            "user.id = author_id WHERE project_id = :project_id AND (:author = '' OR "
            "user.username = :author) ORDER BY created DESC, change.id DESC"
        ),
    )


@GITLAB.get("/{owner}/{project}/-/contributors")
def contributors(visit: Visit) -> Response:
    return visit.page(
        "contributors.html",
        project=visit.find("project"),
        rows=visit.rows(
            "SELECT user.name, user.username, user.email, count(*) AS num_commits FROM "
            "change JOIN user ON user.id = author_id WHERE project_id = :project_id GROUP BY "
            "user.id ORDER BY num_commits DESC, user.name"
        ),
    )


@GITLAB.get("/{owner}/{project}/-/issues")
def issues(visit: Visit) -> Response:
    return visit.page(
        "issues.html",
        state=visit.take("state", ("open", "closed", "all")),
        label=visit.take("label"),
        project=visit.find("project"),
        rows=visit.rows(
            "SELECT * FROM issues WHERE project_id = :project_id AND (:state = 'all' OR "
            "is_open = (:state = 'open')) AND (:label = '' OR label = :label) AND title LIKE "
            ":pattern ESCAPE '\\' ORDER BY number DESC"
        ),
    )


@GITLAB.get("/{owner}/{project}/-/issues/new")
def new_issue(visit: Visit) -> Response:
    return visit.page("new_issue.html", project=visit.find("project"))


@GITLAB.get("/{owner}/{project}/-/issues/{number}")
def issue(visit: Visit) -> Response:
    return visit.page(
        "issue.html",
        project=visit.find("project"),
        issue=visit.find("issue"),
        remarks=visit.rows(
            "SELECT remark.*, user.name AS author FROM remark JOIN user ON user.id = "
            "author_id WHERE issue_id = :issue_id ORDER BY remark.id"
        ),
    )


@GITLAB.get("/{owner}/{project}/-/merge_requests")
def merge_requests(visit: Visit) -> Response:
    return visit.page(
        "merge_requests.html",
        state=visit.take("state", ("", "Open", "Merged", "Closed")),
        project=visit.find("project"),
        rows=visit.rows(
            "SELECT * FROM merge_requests WHERE project_id = :project_id AND (:state = '' OR "
            "state = :state) ORDER BY number DESC"
        ),
    )


@GITLAB.get("/{owner}/{project}/-/merge_requests/{number}")
def merge_request(visit: Visit) -> Response:
    return visit.page(
        "merge_request.html", project=visit.find("project"), request=visit.find("request")
    )


@GITLAB.get("/{owner}/{project}/-/readme")
def readme(visit: Visit) -> Response:
    return visit.page("readme.html", project=visit.find("project"), mine=visit.find("mine"))


@GITLAB.post("/-/profile")
def save_profile(visit: Visit) -> Response:
    visit.field("status", max_chars=100)
    visit.run("UPDATE user SET status = :status WHERE id = :own_id")
    return visit.go("/-/profile", "Your status was saved.")


@GITLAB.post("/{owner}/{project}/-/star")
def star_project(visit: Visit) -> Response:
    visit.find("project")
    visit.run("DELETE FROM star WHERE project_id = :project_id")
    visit.run("INSERT INTO star SELECT :project_id WHERE NOT :project_is_starred")
    return visit.go("/{project_owner}/{project_slug}")


@GITLAB.post("/{owner}/{project}/-/fork")
def fork_project(visit: Visit) -> Response:
    visit.find("project")
    visit.find("me")
    if not visit.holds(
        "NOT EXISTS (SELECT 1 FROM project WHERE owner_id = :own_id AND slug = :project_slug)"
    ):
        return visit.go("/{me_username}/{project_slug}", "You have a project of this name already.")
    visit.run(
        "INSERT INTO project (owner_id, name, slug, description, language, readme, "
        "created, num_stars, num_forks, forked_from) VALUES (:own_id, :project_name, "
        ":project_slug, :project_description, :project_language, :project_readme, "
        ":today, 0, 0, :project_id)"
    )
    visit.run("INSERT INTO member VALUES (last_insert_rowid(), :own_id, 'Owner')")
    visit.run("UPDATE project SET num_forks = num_forks + 1 WHERE id = :project_id")
    return visit.go("/{me_username}/{project_slug}", "The project was forked.")


@GITLAB.post("/{owner}/{project}/-/readme")
def save_readme(visit: Visit) -> Response:
    visit.field("readme")
    visit.find("project")
    visit.find("mine")
    visit.run(
        "UPDATE project SET readme = replace(:readme, char(13, 10), char(10)) WHERE id = "
        ":project_id"
    )
    return visit.go("/{project_owner}/{project_slug}", "The README was saved.")


@GITLAB.post("/{owner}/{project}/-/members")
def add_member(visit: Visit) -> Response:
    visit.field("username")
    visit.entry("role", of="member_roles")
    visit.find("project")
    visit.find("mine")
    if not visit.holds(
        ":role <> '' AND EXISTS (SELECT 1 FROM user WHERE username = :username AND id <> :own_id)"
    ):
        return visit.go("/{project_owner}/{project_slug}/-/members", "Give a username and a role.")
    visit.run(
        "INSERT INTO member SELECT :project_id, id, :role FROM user WHERE username = "
        ":username ON CONFLICT DO UPDATE SET role = excluded.role"
    )
    return visit.go("/{project_owner}/{project_slug}/-/members", "The member was added.")


@GITLAB.post("/{owner}/{project}/-/issues/new")
def add_issue(visit: Visit) -> Response:
    visit.field("title", max_chars=200)
    visit.field("body")
    visit.entry("label", of="labels")
    visit.find("project")
    visit.find("next")
    if not visit.holds(":title <> '' AND :label <> ''"):
        return visit.go(
            "/{project_owner}/{project_slug}/-/issues/new", "An issue needs a title and a label."
        )
    visit.run(
        "INSERT INTO issue (project_id, number, title, body, label, author_id, created) "
        "VALUES (:project_id, :next_number, :title, :body, :label, :own_id, :today)"
    )
    return visit.go(
        "/{project_owner}/{project_slug}/-/issues/{next_number}", "The issue was created."
    )


@GITLAB.post("/{owner}/{project}/-/issues/{number}/state")
def change_issue(visit: Visit) -> Response:
    visit.find("project")
    visit.find("issue")
    visit.run("UPDATE issue SET is_open = 1 - is_open WHERE id = :issue_id")
    return visit.go("/{project_owner}/{project_slug}/-/issues/{issue_number}")


@GITLAB.post("/{owner}/{project}/-/issues/{number}/assign")
def assign_issue(visit: Visit) -> Response:
    visit.field("username")
    visit.find("project")
    visit.find("issue")
    if not visit.holds("EXISTS (SELECT 1 FROM user WHERE username = :username)"):
        return visit.go(
            "/{project_owner}/{project_slug}/-/issues/{issue_number}",
            "There is no user of this name.",
        )
    visit.run(
        "UPDATE issue SET assignee_id = (SELECT id FROM user WHERE username = :username) "
        "WHERE id = :issue_id"
    )
    return visit.go(
        "/{project_owner}/{project_slug}/-/issues/{issue_number}", "The issue was assigned."
    )


@GITLAB.post("/{owner}/{project}/-/issues/{number}/remarks")
def add_remark(visit: Visit) -> Response:
    visit.field("body")
    visit.find("project")
    visit.find("issue")
    if not visit.holds(":body <> ''"):
        return visit.go(
            "/{project_owner}/{project_slug}/-/issues/{issue_number}", "A comment needs a text."
        )
    visit.run(
        "INSERT INTO remark (issue_id, author_id, body, created) VALUES (:issue_id, "
        ":own_id, :body, :today)"
    )
    return visit.go(
        "/{project_owner}/{project_slug}/-/issues/{issue_number}", "The comment was added."
    )


@GITLAB.post("/{owner}/{project}/-/merge_requests/{number}/state")
def change_request(visit: Visit) -> Response:
    visit.entry("state", of="states")
    visit.find("project")
    if not visit.holds(":state <> '' AND :project_owner_id = :own_id"):
        return visit.go(
            "/{project_owner}/{project_slug}/-/merge_requests/{number}", "You may not do this."
        )
    visit.run(
        "UPDATE merge_request SET state = :state WHERE project_id = :project_id AND "
        "number = :number AND state = 'Open'"
    )
    return visit.go("/{project_owner}/{project_slug}/-/merge_requests/{number}")


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

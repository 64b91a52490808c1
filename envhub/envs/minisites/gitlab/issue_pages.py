"""Pages of the code host about issues and merge requests; they complete its site."""

import sqlite3

from starlette.responses import Response

from envhub.envs.minisites.gitlab.pages import GITLAB, page, project_of, root_of
from envhub.envs.minisites.gitlab.seed import OWN_ID, WORDS
from envhub.envs.minisites.seeding import TODAY
from envhub.envs.minisites.site import Visit

MERGE_STATES = ("Open", "Merged", "Closed")
ISSUES = """
    SELECT issue.*, author.name AS author, assignee.name AS assignee FROM issue
    JOIN user AS author ON author.id = author_id
    LEFT JOIN user AS assignee ON assignee.id = assignee_id
"""
MERGE_REQUESTS = """
    SELECT merge_request.*, author.name AS author, reviewer.name AS reviewer FROM merge_request
    JOIN user AS author ON author.id = author_id
    JOIN user AS reviewer ON reviewer.id = reviewer_id
"""


@GITLAB.get("/{owner}/{project}/-/issues")
def issues(visit: Visit) -> Response:
    found = project_of(visit)
    state, label = visit.choice("state", ("open", "closed", "all")), visit.query.get("label", "")
    rows = visit.rows(
        ISSUES + " WHERE project_id = ? AND (? = 'all' OR is_open = (? = 'open'))"
        " AND (? = '' OR label = ?) AND title LIKE ? ESCAPE '\\' ORDER BY number DESC",
        *(found["id"], state, state, label, label, visit.pattern()),
    )
    shown = {"state": state, "label": label, "labels": WORDS["labels"], "words": visit.words()}
    return page(visit, "issues.html", project=found, rows=rows, **shown)


@GITLAB.get("/{owner}/{project}/-/issues/new")
def issue_form(visit: Visit) -> Response:
    return page(visit, "new_issue.html", project=project_of(visit), labels=WORDS["labels"])


@GITLAB.post("/{owner}/{project}/-/issues/new")
def add_issue(visit: Visit) -> Response:
    found, title, label = project_of(visit), visit.text("title")[:200], visit.text("label")
    if not title or label not in WORDS["labels"]:
        back = f"{root_of(found)}/-/issues/new"
        return visit.go(back, "An issue needs a title and a label.")
    newest = "SELECT coalesce(max(number), 0) AS number FROM issue WHERE project_id = ?"
    number = 1 + visit.one(newest, found["id"])["number"]
    visit.insert(
        "issue",
        project_id=found["id"],
        number=number,
        title=title,
        body=visit.text("body"),
        label=label,
        author_id=OWN_ID,
        created=TODAY,
    )
    return visit.go(f"{root_of(found)}/-/issues/{number}", "The issue was created.")


def _issue(visit: Visit) -> tuple[sqlite3.Row, sqlite3.Row, str]:
    """Return the project, the issue and its address."""
    project = project_of(visit)
    where = " WHERE project_id = ? AND number = ?"
    found = visit.one(ISSUES + where, project["id"], visit.number("number", 0))
    return project, found, f"{root_of(project)}/-/issues/{found['number']}"


@GITLAB.get("/{owner}/{project}/-/issues/{number}")
def issue(visit: Visit) -> Response:
    project, found, _ = _issue(visit)
    remarks = visit.rows(
        "SELECT remark.*, user.name AS author FROM remark JOIN user ON user.id = author_id"
        " WHERE issue_id = ? ORDER BY remark.id",
        found["id"],
    )
    return page(visit, "issue.html", project=project, issue=found, remarks=remarks)


@GITLAB.post("/{owner}/{project}/-/issues/{number}/state")
def toggle_issue(visit: Visit) -> Response:
    _, found, back = _issue(visit)
    visit.run("UPDATE issue SET is_open = 1 - is_open WHERE id = ?", found["id"])
    return visit.go(back)


@GITLAB.post("/{owner}/{project}/-/issues/{number}/assign")
def assign_issue(visit: Visit) -> Response:
    _, found, back = _issue(visit)
    people = visit.rows("SELECT id FROM user WHERE username = ?", visit.text("username"))
    if not people:
        return visit.go(back, "There is no user of this name.")
    visit.run("UPDATE issue SET assignee_id = ? WHERE id = ?", people[0]["id"], found["id"])
    return visit.go(back, "The issue was assigned.")


@GITLAB.post("/{owner}/{project}/-/issues/{number}/remarks")
def add_remark(visit: Visit) -> Response:
    (_, found, back), body = _issue(visit), visit.text("body")
    if not body:
        return visit.go(back, "A comment needs a text.")
    visit.insert("remark", issue_id=found["id"], author_id=OWN_ID, body=body, created=TODAY)
    return visit.go(back, "The comment was added.")


@GITLAB.get("/{owner}/{project}/-/merge_requests")
def merge_requests(visit: Visit) -> Response:
    found, state = project_of(visit), visit.choice("state", ("", *MERGE_STATES))
    rows = visit.rows(
        MERGE_REQUESTS + " WHERE project_id = ? AND (? = '' OR state = ?) ORDER BY number DESC",
        *(found["id"], state, state),
    )
    return page(
        visit, "merge_requests.html", project=found, rows=rows, states=MERGE_STATES, state=state
    )


@GITLAB.get("/{owner}/{project}/-/merge_requests/{number}")
def merge_request(visit: Visit) -> Response:
    project = project_of(visit)
    found = visit.one(
        MERGE_REQUESTS + " WHERE project_id = ? AND number = ?",
        *(project["id"], visit.number("number", 0)),
    )
    return page(visit, "merge_request.html", project=project, request=found)


@GITLAB.post("/{owner}/{project}/-/merge_requests/{number}/state")
def move_merge_request(visit: Visit) -> Response:
    project, state = project_of(visit), visit.text("state")
    number = visit.number("number", 0)
    back = f"{root_of(project)}/-/merge_requests/{number}"
    if state not in MERGE_STATES or project["owner_id"] != OWN_ID:
        return visit.go(back, "You may not do this.")
    visit.run(
        "UPDATE merge_request SET state = ? WHERE project_id = ? AND number = ? AND state = 'Open'",
        *(state, project["id"], number),
    )
    return visit.go(back)

"""Task templates of the code host."""

import sqlite3
from collections.abc import Iterator
from random import Random
from urllib.parse import quote_plus

from envhub.envs.minisites.drafts import (
    Draft,
    Step,
    both,
    button,
    click,
    ends_at,
    fill,
    link,
    says,
    says_all,
    seek,
    shows,
    some,
    stop,
)
from envhub.envs.minisites.gitlab.seed import LABELS, OWN_ID, PARTS, ROLES

HOST = "http://gitlab.test"
PROJECTS = """
    SELECT project.*, user.username AS owner FROM project
    JOIN user ON user.id = owner_id ORDER BY project.id
"""
REQUESTS = ("Please support {}", "Questions about {}", "Simplify {}", "Warn before {} stops")
STATUSES = ("On holiday", "Reviewing", "At a conference", "Focusing", "Sick today", "Pairing")
REMARKS = (
    "I will take care of it.",
    "This also happens on my machine.",
    "Fixed on the main branch.",
    "Let us discuss it on Monday.",
)
SENTENCES = (
    "This project looks for a new maintainer.",
    "Moved to another host; this copy is read-only.",
    "See the wiki before you ask.",
    "Version 2 breaks old files.",
    "Funded by the harbor office.",
)


def _projects(db: sqlite3.Connection) -> list[sqlite3.Row]:
    return db.execute(PROJECTS).fetchall()


def _own(db: sqlite3.Connection) -> list[sqlite3.Row]:
    return [row for row in _projects(db) if row["owner_id"] == OWN_ID]


def to_project(name: str) -> tuple[Step, ...]:
    """Returns the way to a project's page."""
    return (seek("Search projects and people", name), link(name))


def page_of(project: sqlite3.Row) -> str:
    """Returns the URL of a project."""
    return f"{HOST}/{project['owner']}/{project['slug']}"


def commit_count(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """How many commits somebody made to a project."""
    for project in _projects(db):
        rows = db.execute(
            "SELECT user.name, count(*) AS n FROM change JOIN user ON user.id = author_id"
            " WHERE project_id = ? GROUP BY user.id ORDER BY user.id",
            (project["id"],),
        ).fetchall()
        for row in some(random, rows, 3):
            answer = str(row["n"])
            yield Draft(
                intent=f"How many commits did {row['name']} make to the project "
                f"{project['name']}? Answer with the number only.",
                check=says(answer),
                path=(*to_project(project["name"]), link("Contributors"), stop(answer)),
            )


def top_contributor(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """Who made most commits to a project, where there is one."""
    for project in _projects(db):
        rows = db.execute(
            "SELECT user.name, user.email, count(*) AS n FROM change"
            " JOIN user ON user.id = author_id WHERE project_id = ? GROUP BY user.id"
            " ORDER BY n DESC",
            (project["id"],),
        ).fetchall()
        if len(rows) > 1 and rows[0]["n"] == rows[1]["n"]:
            continue
        name, email = rows[0]["name"], rows[0]["email"]
        yield Draft(
            intent=f"Who made the most commits to {project['name']}? Give name and email address.",
            check=says_all([name, email]),
            path=(*to_project(project["name"]), link("Contributors"), stop(f"{name}, {email}")),
        )


def issue_people(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """Who wrote an issue, and who takes care of it."""
    rows = db.execute(
        "SELECT issue.*, project.name AS project, author.name AS author, other.name AS assignee"
        " FROM issue JOIN project ON project.id = project_id"
        " JOIN user AS author ON author.id = author_id"
        " JOIN user AS other ON other.id = assignee_id"
        " WHERE is_open AND other.id <> author.id ORDER BY issue.id"
    ).fetchall()
    for row in some(random, rows):
        yield Draft(
            intent=f'Who opened the issue "{row["title"]}" of {row["project"]}, and to whom is it '
            "assigned?",
            check=says_all([row["author"], row["assignee"]]),
            path=(
                *to_project(row["project"]),
                link("Issues"),
                link(row["title"]),
                stop(f"{row['author']}, assigned to {row['assignee']}"),
            ),
        )


def issue_count(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """How many issues of a label are open or closed."""
    for project in _projects(db):
        for label in random.sample(LABELS, 3):
            (number,) = db.execute(
                "SELECT count(*) FROM issue WHERE project_id = ? AND label = ? AND is_open",
                (project["id"], label),
            ).fetchone()
            yield Draft(
                intent=f'How many open issues of {project["name"]} have the label "{label}"? '
                "Answer with the number only.",
                check=says(str(number)),
                path=(
                    *to_project(project["name"]),
                    link("Issues"),
                    link(f"Label {label}"),
                    stop(str(number)),
                ),
            )


def member_role(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """Somebody's role in a project."""
    rows = db.execute(
        "SELECT project.name AS project, user.name, member.role FROM member"
        " JOIN project ON project.id = project_id JOIN user ON user.id = user_id"
        " ORDER BY project.id, user.id"
    ).fetchall()
    for row in some(random, rows):
        yield Draft(
            intent=f"What role does {row['name']} have in the project {row['project']}? "
            "Answer with the role only.",
            check=says(row["role"]),
            path=(*to_project(row["project"]), link("Members"), stop(row["role"])),
        )


def issues_of_label(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """The list of a project's open issues with a label."""
    for project in _projects(db):
        for label in random.sample(LABELS, 2):
            query = f"state=open&label={quote_plus(label)}"
            yield Draft(
                intent=f'Show me the open issues of {project["name"]} with the label "{label}".',
                check=ends_at(f"{page_of(project)}/-/issues?{query}"),
                path=(
                    *to_project(project["name"]),
                    link("Issues"),
                    link(f"Label {label}"),
                    stop(),
                ),
            )


def open_merge_request(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """The page of a merge request."""
    for project in _projects(db):
        rows = db.execute(
            "SELECT * FROM merge_request WHERE project_id = ? ORDER BY number", (project["id"],)
        ).fetchall()
        for row in some(random, rows, 2):
            yield Draft(
                intent=f'Open the merge request "{row["title"]}" of {project["name"]}.',
                check=ends_at(f"{page_of(project)}/-/merge_requests/{row['number']}"),
                path=(
                    *to_project(project["name"]),
                    link("Merge requests"),
                    link(row["title"]),
                    stop(),
                ),
            )


def new_issue(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """An issue opened."""
    for project in _projects(db):
        (newest,) = db.execute(
            "SELECT max(number) FROM issue WHERE project_id = ?", (project["id"],)
        ).fetchone()
        for request in random.sample(REQUESTS, 2):
            title, label = request.format(random.choice(PARTS)), random.choice(LABELS)
            page = f"{page_of(project)}/-/issues/{newest + 1}"
            yield Draft(
                intent=f'Create an issue in {project["name"]} with the title "{title}" and the '
                f'label "{label}".',
                check=both(shows(page, "title", exact=title), shows(page, "label", exact=label)),
                path=(
                    *to_project(project["name"]),
                    link("Issues"),
                    link("New issue"),
                    fill("Title", title),
                    click("radio", label),
                    button("Create issue"),
                    stop(),
                ),
            )


def star_project(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """A project starred."""
    for project in _projects(db):
        yield Draft(
            intent=f"Star the project {project['name']}.",
            check=shows(page_of(project), "stars", exact=str(project["num_stars"] + 1)),
            path=(*to_project(project["name"]), button("Star"), stop()),
        )


def fork_project(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """Somebody else's project forked."""
    (me,) = db.execute("SELECT username FROM user WHERE id = ?", (OWN_ID,)).fetchone()
    for project in _projects(db):
        if project["owner_id"] == OWN_ID:
            continue
        source = f"{project['owner']}/{project['slug']}"
        yield Draft(
            intent=f"Fork {project['name']} into my own account.",
            check=shows(f"{HOST}/{me}/{project['slug']}", "source", exact=source),
            path=(*to_project(project["name"]), button("Fork"), stop()),
        )


def edit_readme(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """A README replaced."""
    for project in _own(db):
        for sentence in SENTENCES:
            yield Draft(
                intent=f"Replace the whole README of my project {project['name']} by this: "
                f'"{sentence}"',
                check=shows(page_of(project), "readme", exact=sentence),
                path=(
                    link(project["name"]),
                    link("Edit README"),
                    fill("README", sentence),
                    button("Save README"),
                    stop(),
                ),
            )


def invite_member(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """Somebody added to a project of one's own."""
    for project in _own(db):
        people = db.execute(
            "SELECT * FROM user WHERE id NOT IN"
            " (SELECT user_id FROM member WHERE project_id = ?) ORDER BY id",
            (project["id"],),
        ).fetchall()
        for person in some(random, people, 6):
            role = random.choice(ROLES)
            yield Draft(
                intent=f"Add {person['username']} to my project {project['name']} as {role}.",
                check=shows(
                    f"{page_of(project)}/-/members", "members", parts=[f"{person['name']}: {role}"]
                ),
                path=(
                    link(project["name"]),
                    link("Members"),
                    fill("Username", person["username"]),
                    click("radio", role),
                    button("Add member"),
                    stop(),
                ),
            )


def _open_issues(db: sqlite3.Connection, random: Random) -> Iterator[tuple[sqlite3.Row, str]]:
    """Yields open issues with the URL of each."""
    rows = db.execute(
        "SELECT issue.*, project.name AS project, project.slug, user.username AS owner FROM issue"
        " JOIN project ON project.id = project_id JOIN user ON user.id = project.owner_id"
        " WHERE is_open ORDER BY issue.id"
    ).fetchall()
    for row in some(random, rows):
        yield row, f"{page_of(row)}/-/issues/{row['number']}"


def close_issue(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """An issue closed."""
    for row, url in _open_issues(db, random):
        yield Draft(
            intent=f'Close the issue "{row["title"]}" of {row["project"]}.',
            check=shows(url, "state", exact="Closed"),
            path=(
                *to_project(row["project"]),
                link("Issues"),
                link(row["title"]),
                button("Close issue"),
                stop(),
            ),
        )


def comment_issue(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """A comment on an issue."""
    for row, url in _open_issues(db, random):
        text = random.choice(REMARKS)
        yield Draft(
            intent=f'Comment on the issue "{row["title"]}" of {row["project"]}: "{text}"',
            check=shows(url, "remarks", parts=[text]),
            path=(
                *to_project(row["project"]),
                link("Issues"),
                link(row["title"]),
                fill("Your comment", text),
                button("Comment"),
                stop(),
            ),
        )


def assign_issue(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """An issue assigned to somebody else."""
    people = db.execute("SELECT * FROM user ORDER BY id").fetchall()
    for row, url in _open_issues(db, random):
        person = random.choice([p for p in people if p["id"] != row["assignee_id"]])
        yield Draft(
            intent=f'Assign the issue "{row["title"]}" of {row["project"]} to '
            f"{person['username']}.",
            check=shows(url, "assignee", exact=person["name"]),
            path=(
                *to_project(row["project"]),
                link("Issues"),
                link(row["title"]),
                fill("Assign to username", person["username"], enter=True),
                stop(),
            ),
        )


def set_status(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """One's own status."""
    (me,) = db.execute("SELECT username FROM user WHERE id = ?", (OWN_ID,)).fetchone()
    for status in STATUSES:
        text = f"{status} until 2024-02-{random.randrange(1, 29):02d}"
        yield Draft(
            intent=f'Set my status to "{text}".',
            check=shows(f"{HOST}/{me}", "status", exact=text),
            path=(
                link("Edit profile"),
                fill("Status", text),
                button("Save profile"),
                stop(),
            ),
        )


GITLAB_TEMPLATES = (
    commit_count,
    top_contributor,
    issue_people,
    issue_count,
    member_role,
    issues_of_label,
    open_merge_request,
    new_issue,
    star_project,
    fork_project,
    edit_readme,
    invite_member,
    close_issue,
    comment_issue,
    assign_issue,
    set_status,
)

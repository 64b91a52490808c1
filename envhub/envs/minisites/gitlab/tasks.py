"""Task templates of the code host."""

from collections.abc import Iterator
from urllib.parse import quote_plus

from envhub.envs.minisites.drafts import (
    SiteTemplates,
    Step,
    TaskDraft,
    TaskWorld,
    button,
    ends_at,
    enter,
    fill,
    holds,
    link,
    radio,
    reads,
    says,
    says_all,
    seek,
    shows,
    stop,
)
from envhub.envs.minisites.gitlab.seed import WORDS

HOST = "http://gitlab.test"
PROJECTS = (
    "SELECT project.id AS project_id, project.name AS project, slug, num_stars, owner_id, "
    "username AS owner FROM project JOIN user ON user.id = owner_id ORDER BY project.id"
)
COMMITS = (
    "SELECT user.id AS person_id, user.name AS person, email, count(*) AS num FROM change JOIN "
    "user ON user.id = author_id WHERE project_id = :project_id GROUP BY user.id"
)
OPEN_ISSUES = (
    "SELECT issue.title, issue.number, assignee_id, project.name AS project, project.slug, "
    "user.username AS owner FROM issue JOIN project ON project.id = project_id JOIN user ON "
    "user.id = project.owner_id WHERE is_open ORDER BY issue.id"
)
ME = "SELECT username AS me FROM user WHERE id = 1"
TASKS = SiteTemplates(host=HOST, site="gitlab", database="gitlab")


def to_project(project: str) -> tuple[Step, ...]:
    """Return the steps to the page of a project."""
    return (seek("Search projects and people", project), link(project))


def to_issues(project: str) -> tuple[Step, ...]:
    """Return the steps to the issues of a project."""
    return (*to_project(project), link("Issues"))


@TASKS.template
def commit_count(world: TaskWorld) -> Iterator[TaskDraft]:
    for project in world.rows(PROJECTS):
        for member in world.some(3, f"SELECT * FROM ({COMMITS}) ORDER BY person_id", project):
            yield TaskDraft(
                f"How many commits did {member.person} make to the project {project.project}? "
                "Answer with the number only.",
                says(member.num),
                [*to_project(project.project), link("Contributors"), stop(member.num)],
            )


@TASKS.template
def top_contributor(world: TaskWorld) -> Iterator[TaskDraft]:
    best = f"SELECT * FROM ({COMMITS}) WHERE num = (SELECT max(num) FROM ({COMMITS}))"
    for project in world.rows(PROJECTS):
        for member in world.only(best, project):
            answer = f"{member.person}, {member.email}"
            yield TaskDraft(
                f"Who made the most commits to {project.project}? Give name and email address.",
                says_all(member.person, member.email),
                [*to_project(project.project), link("Contributors"), stop(answer)],
            )


@TASKS.template
def issue_people(world: TaskWorld) -> Iterator[TaskDraft]:
    for issue in world.some(
        40,
        "SELECT title, project.name AS project, author.name AS author, other.name AS "
        "assignee FROM issue JOIN project ON project.id = project_id JOIN user AS author "
        "ON author.id = author_id JOIN user AS other ON other.id = assignee_id WHERE "
        "is_open AND other.id <> author.id ORDER BY issue.id",
    ):
        yield TaskDraft(
            f'Who opened the issue "{issue.title}" of {issue.project}, and to whom is it assigned?',
            says_all(issue.author, issue.assignee),
            [
                *to_issues(issue.project),
                link(issue.title),
                stop(f"{issue.author}, assigned to {issue.assignee}"),
            ],
        )


@TASKS.template
def issue_count(world: TaskWorld) -> Iterator[TaskDraft]:
    for project in world.rows(PROJECTS):
        for label in world.random.sample(WORDS["labels"], 3):
            num = world.value(
                "SELECT count(*) AS num FROM issue WHERE project_id = :project_id AND label = "
                ":label AND is_open",
                project,
                label=label,
            )
            yield TaskDraft(
                f'How many open issues of {project.project} have the label "{label}"? Answer with '
                "the number only.",
                says(num),
                [*to_issues(project.project), link(f"Label {label}"), stop(num)],
            )


@TASKS.template
def member_role(world: TaskWorld) -> Iterator[TaskDraft]:
    for member in world.some(
        40,
        "SELECT project.name AS project, user.name AS person, member.role FROM member JOIN "
        "project ON project.id = project_id JOIN user ON user.id = user_id ORDER BY "
        "project.id, user.id",
    ):
        yield TaskDraft(
            f"What role does {member.person} have in the project {member.project}? Answer with "
            "the role only.",
            says(member.role),
            [*to_project(member.project), link("Members"), stop(member.role)],
        )


@TASKS.template
def issues_of_label(world: TaskWorld) -> Iterator[TaskDraft]:
    for project in world.rows(PROJECTS):
        for label in world.random.sample(WORDS["labels"], 2):
            yield TaskDraft(
                f'Show me the open issues of {project.project} with the label "{label}".',
                ends_at(
                    f"{HOST}/{project.owner}/{project.slug}/-/issues?state=open&label={quote_plus(label)}"
                ),
                [*to_issues(project.project), link(f"Label {label}"), stop()],
            )


@TASKS.template
def open_merge_request(world: TaskWorld) -> Iterator[TaskDraft]:
    for project in world.rows(PROJECTS):
        for merge_request in world.some(
            2,
            "SELECT title, number FROM merge_request WHERE project_id = :project_id ORDER BY "
            "number",
            project,
        ):
            yield TaskDraft(
                f'Open the merge request "{merge_request.title}" of {project.project}.',
                ends_at(
                    f"{HOST}/{project.owner}/{project.slug}/-/merge_requests/{merge_request.number}"
                ),
                [
                    *to_project(project.project),
                    link("Merge requests"),
                    link(merge_request.title),
                    stop(),
                ],
            )


@TASKS.template
def new_issue(world: TaskWorld) -> Iterator[TaskDraft]:
    for project in world.rows(PROJECTS):
        number = world.value(
            "SELECT max(number) + 1 AS number FROM issue WHERE project_id = :project_id", project
        )
        for request in world.random.sample(WORDS["tasks"]["requests"], 2):
            title = request.format(part=world.random.choice(WORDS["parts"]))
            label = world.random.choice(WORDS["labels"])
            page = f"{HOST}/{project.owner}/{project.slug}/-/issues/{number}"
            yield TaskDraft(
                f'Create an issue in {project.project} with the title "{title}" and the label '
                f'"{label}".',
                shows(reads(page, "title", title), reads(page, "label", label)),
                [
                    *to_issues(project.project),
                    link("New issue"),
                    fill("Title", title),
                    radio(label),
                    button("Create issue"),
                    stop(),
                ],
            )


@TASKS.template
def star_project(world: TaskWorld) -> Iterator[TaskDraft]:
    for project in world.rows(PROJECTS):
        yield TaskDraft(
            f"Star the project {project.project}.",
            reads(f"{HOST}/{project.owner}/{project.slug}", "stars", project.num_stars + 1),
            [*to_project(project.project), button("Star"), stop()],
        )


@TASKS.template
def fork_project(world: TaskWorld) -> Iterator[TaskDraft]:
    me = world.value(ME)
    for project in world.rows(
        f"SELECT * FROM ({PROJECTS}) WHERE owner_id <> 1 ORDER BY project_id"
    ):
        yield TaskDraft(
            f"Fork {project.project} into my own account.",
            reads(f"{HOST}/{me}/{project.slug}", "source", f"{project.owner}/{project.slug}"),
            [*to_project(project.project), button("Fork"), stop()],
        )


@TASKS.template
def edit_readme(world: TaskWorld) -> Iterator[TaskDraft]:
    for project in world.rows(f"SELECT * FROM ({PROJECTS}) WHERE owner_id = 1 ORDER BY project_id"):
        for sentence in WORDS["tasks"]["sentences"]:
            yield TaskDraft(
                f'Replace the whole README of my project {project.project} by this: "{sentence}"',
                reads(f"{HOST}/{project.owner}/{project.slug}", "readme", sentence),
                [
                    link(project.project),
                    link("Edit README"),
                    fill("README", sentence),
                    button("Save README"),
                    stop(),
                ],
            )


@TASKS.template
def invite_member(world: TaskWorld) -> Iterator[TaskDraft]:
    for project in world.rows(f"SELECT * FROM ({PROJECTS}) WHERE owner_id = 1 ORDER BY project_id"):
        for user in world.some(
            6,
            "SELECT name AS person, username FROM user WHERE id NOT IN (SELECT user_id FROM "
            "member WHERE project_id = :project_id) ORDER BY id",
            project,
        ):
            role = world.random.choice(WORDS["roles"])
            yield TaskDraft(
                f"Add {user.username} to my project {project.project} as {role}.",
                holds(
                    f"{HOST}/{project.owner}/{project.slug}/-/members",
                    "members",
                    f"{user.person}: {role}",
                ),
                [
                    link(project.project),
                    link("Members"),
                    fill("Username", user.username),
                    radio(role),
                    button("Add member"),
                    stop(),
                ],
            )


@TASKS.template
def close_issue(world: TaskWorld) -> Iterator[TaskDraft]:
    for issue in world.some(40, OPEN_ISSUES):
        yield TaskDraft(
            f'Close the issue "{issue.title}" of {issue.project}.',
            reads(f"{HOST}/{issue.owner}/{issue.slug}/-/issues/{issue.number}", "state", "Closed"),
            [*to_issues(issue.project), link(issue.title), button("Close issue"), stop()],
        )


@TASKS.template
def comment_issue(world: TaskWorld) -> Iterator[TaskDraft]:
    for issue in world.some(40, OPEN_ISSUES):
        remark = world.random.choice(WORDS["tasks"]["remarks"])
        yield TaskDraft(
            f'Comment on the issue "{issue.title}" of {issue.project}: "{remark}"',
            holds(f"{HOST}/{issue.owner}/{issue.slug}/-/issues/{issue.number}", "remarks", remark),
            [
                *to_issues(issue.project),
                link(issue.title),
                fill("Your comment", remark),
                button("Comment"),
                stop(),
            ],
        )


@TASKS.template
def assign_issue(world: TaskWorld) -> Iterator[TaskDraft]:
    for issue in world.some(40, OPEN_ISSUES):
        user = world.pick(
            "SELECT name AS person, username FROM user WHERE id IS NOT :assignee_id ORDER BY id",
            issue,
        )
        yield TaskDraft(
            f'Assign the issue "{issue.title}" of {issue.project} to {user.username}.',
            reads(
                f"{HOST}/{issue.owner}/{issue.slug}/-/issues/{issue.number}",
                "assignee",
                user.person,
            ),
            [
                *to_issues(issue.project),
                link(issue.title),
                enter("Assign to username", user.username),
                stop(),
            ],
        )


@TASKS.template
def set_status(world: TaskWorld) -> Iterator[TaskDraft]:
    me = world.value(ME)
    for status in WORDS["tasks"]["statuses"]:
        day = world.random.randrange(1, 29)
        text = f"{status} until 2024-02-{day:02d}"
        yield TaskDraft(
            f'Set my status to "{text}".',
            reads(f"{HOST}/{me}", "status", text),
            [link("Edit profile"), fill("Status", text), button("Save profile"), stop()],
        )

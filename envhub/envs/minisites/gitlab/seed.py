"""Fills the code host's database from a seed."""

import sqlite3
from random import Random
from typing import Any

from envhub.envs.minisites.seeding import WORDS as COMMON
from envhub.envs.minisites.seeding import day_of, filling, insert, slug_of
from envhub.tables import read_table

OWN_ID = 1  # Id of the signed-in user.
NUM_USERS = 24
NUM_PROJECTS = 16
WORDS: dict[str, Any] = read_table(__file__, "words.yaml")


def fill_gitlab(db: sqlite3.Connection, seed: int) -> None:
    """Create and fill the tables; equal seeds give equal rows."""
    with filling(db, __file__, "gitlab", seed) as random:
        for first in random.sample(COMMON["first_names"], NUM_USERS):
            last = random.choice(COMMON["last_names"])
            username = f"{first}.{last}".lower()
            insert(
                db,
                "user",
                username=username,
                name=f"{first} {last}",
                email=f"{username}@example.org",
                joined=day_of(random, 2021),
            )
        projects = random.sample(list(WORDS["projects"].items()), NUM_PROJECTS)
        stars = random.sample(range(3, 900), NUM_PROJECTS)
        for place, (name, text) in enumerate(projects):
            owner_id = OWN_ID if place < 5 else random.randrange(2, NUM_USERS + 1)
            language = random.choice(WORDS["languages"])
            project_id = insert(
                db,
                "project",
                owner_id=owner_id,
                name=name,
                slug=slug_of(name),
                description=text,
                language=language,
                readme=f"{name}\n\n{text}. Written in {language}.",
                created=day_of(random, 2022),
                num_stars=stars[place],
                num_forks=random.randrange(1, 80),
            )
            _fill_project(db, random, project_id, owner_id)


def _fill_project(db: sqlite3.Connection, random: Random, project_id: int, owner_id: int) -> None:
    """Add the members, changes and issues of a project."""
    others = [user_id for user_id in range(2, NUM_USERS + 1) if user_id != owner_id]
    team = random.sample(others, random.randrange(3, 7))
    insert(db, "member", project_id=project_id, user_id=owner_id, role="Owner")
    for user_id in team:
        role = random.choice(WORDS["roles"])
        insert(db, "member", project_id=project_id, user_id=user_id, role=role)
    people = [owner_id, *team]
    _fill_issues(db, random, project_id, people)
    changes = WORDS["changes"]
    parts = WORDS["parts"]
    dates = sorted(day_of(random, 2023) for _ in range(random.randrange(14, 26)))
    for created in dates:
        title = random.choice(changes).format(random.choice(parts))
        insert(
            db,
            "change",
            project_id=project_id,
            sha=f"{random.getrandbits(32):08x}",
            title=title,
            author_id=random.choice(people),
            created=created,
        )
    drafts = random.sample([(c, p) for c in changes for p in parts], random.randrange(4, 8))
    for number, (change, part) in enumerate(drafts, start=1):
        author_id, reviewer_id = random.sample(people, 2)
        title = change.format(part)
        insert(
            db,
            "merge_request",
            project_id=project_id,
            number=number,
            title=title,
            source="-".join(title.lower().split()[:5]),
            state=random.choice(("Open", "Merged", "Merged", "Closed")),
            author_id=author_id,
            reviewer_id=reviewer_id,
            created=day_of(random, 2023),
        )


def _fill_issues(
    db: sqlite3.Connection, random: Random, project_id: int, people: list[int]
) -> None:
    """Add the issues of a project with their comments."""
    pairs = [(trouble, part) for trouble in WORDS["troubles"] for part in WORDS["parts"]]
    troubles = random.sample(pairs, random.randrange(9, 16))
    dates = sorted(day_of(random, 2023) for _ in troubles)
    for number, ((trouble, part), created) in enumerate(zip(troubles, dates, strict=True), 1):
        title = trouble.format(part)
        assignee_id = random.choice([None, *people])
        issue_id = insert(
            db,
            "issue",
            project_id=project_id,
            number=number,
            title=title[0].upper() + title[1:],
            body=f"Seen with the newest version. {title}; please have a look.",
            label=random.choice(WORDS["labels"]),
            is_open=int(random.random() < 0.65),
            author_id=random.randrange(2, NUM_USERS + 1),
            assignee_id=assignee_id,
            created=created,
        )
        for _ in range(random.randrange(3)):
            body = random.choice(("I can confirm this.", "A patch is ready.", "Any news?"))
            author_id = random.choice(people)
            insert(db, "remark", issue_id=issue_id, author_id=author_id, body=body, created=created)

"""Task templates of the city map."""

import sqlite3
from collections.abc import Iterator
from random import Random

from envhub.envs.minisites.drafts import (
    Draft,
    Step,
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
from envhub.envs.minisites.maps.routes import Route, find_route, kilometers
from envhub.envs.minisites.maps.seed import CATEGORIES, PLURALS, WEEKDAYS

HOST = "http://maps.test"
MODE_WORDS = {"foot": "on foot", "bicycle": "by bicycle", "car": "by car"}
MODE_LABELS = {"foot": "On foot", "bicycle": "Bicycle", "car": "Car"}
NOTES = (
    "Meet Farah here on Friday.",
    "Ask for the table by the window.",
    "Bring the old tickets.",
    "Good light for photographs.",
    "Closed for a private party in May.",
    "The entrance is at the back.",
)


def _places(db: sqlite3.Connection) -> list[sqlite3.Row]:
    return db.execute("SELECT * FROM place ORDER BY id").fetchall()


def _pairs(db: sqlite3.Connection, random: Random) -> list[tuple[sqlite3.Row, sqlite3.Row]]:
    places = _places(db)
    drawn = [random.sample(places, 2) for _ in range(30)]
    return [(start, end) for start, end in drawn]


def route_between(start: sqlite3.Row, end: sqlite3.Row) -> Route:
    """Returns the shortest way between two places."""
    return find_route((start["col"], start["line"]), (end["col"], end["line"]))


def to_place(name: str) -> tuple[Step, ...]:
    """Returns the way to a place's page."""
    return (seek("Search places", name), link(name))


def to_route(start: str, end: str, mode: str) -> tuple[Step, ...]:
    """Returns the way to a route's page."""
    return (
        link("Directions"),
        fill("From", start),
        fill("To", end),
        click("radio", MODE_LABELS[mode]),
        button("Get Directions"),
    )


def place_phone(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """A place's phone number."""
    for row in some(random, _places(db)):
        yield Draft(
            intent=f"What is the phone number of the {row['name']}? Answer with the number only.",
            check=says(row["phone"]),
            path=(*to_place(row["name"]), stop(row["phone"])),
        )


def place_address(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """A place's address and quarter."""
    for row in some(random, _places(db)):
        address = f"{row['number']} {row['street']}"
        yield Draft(
            intent=f"Give the address of the {row['name']} and the quarter in which it lies.",
            check=says_all([address, row["quarter"]]),
            path=(*to_place(row["name"]), stop(f"{address}, {row['quarter']}")),
        )


def closing_time(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """When a place closes on some weekday."""
    rows = db.execute(
        "SELECT place.name, weekday, closes FROM hours JOIN place ON place.id = place_id"
        " WHERE closes < '24:00' ORDER BY place.id, weekday"
    ).fetchall()
    for row in some(random, rows):
        yield Draft(
            intent=f"At what time does the {row['name']} close on a {WEEKDAYS[row['weekday']]}? "
            "Answer with the time only, as hh:mm.",
            check=says(row["closes"]),
            path=(*to_place(row["name"]), stop(row["closes"])),
        )


def travel_minutes(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """How long a way takes."""
    for start, end in _pairs(db, random):
        mode = random.choice(sorted(MODE_WORDS))
        answer = str(route_between(start, end).minutes(mode))
        yield Draft(
            intent=f"How many minutes does it take from the {start['name']} to the {end['name']} "
            f"{MODE_WORDS[mode]}? Answer with the number only.",
            check=says(answer),
            path=(*to_route(start["name"], end["name"], mode), stop(answer)),
        )


def travel_distance(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """How long a way is."""
    for start, end in _pairs(db, random):
        answer = kilometers(route_between(start, end).meters)
        yield Draft(
            intent=f"How far is it from the {start['name']} to the {end['name']}? "
            "Answer as the map prints it, such as 1.35 km.",
            check=says(answer),
            path=(*to_route(start["name"], end["name"], "foot"), stop(answer)),
        )


def _nearest(
    db: sqlite3.Connection, random: Random
) -> Iterator[tuple[sqlite3.Row, str, sqlite3.Row, int]]:
    """Yields places, a category, its one nearest place and the distance in meters."""
    places = _places(db)
    for centre in some(random, places):
        category = random.choice([name for name in CATEGORIES if name != centre["category"]])
        others = [row for row in places if row["category"] == category]
        ranked = sorted(
            (route_between(centre, row).meters, place, row) for place, row in enumerate(others)
        )
        if ranked[0][0] < ranked[1][0]:
            yield centre, category, ranked[0][2], ranked[0][0]


def nearest_place(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """The nearest place of a category."""
    for centre, category, found, meters in _nearest(db, random):
        yield Draft(
            intent=f"Which {category.lower()} is nearest to the {centre['name']}, and how far "
            "away is it?",
            check=says_all([found["name"], kilometers(meters)]),
            path=(
                *to_place(centre["name"]),
                link(f"{PLURALS[category]} nearby"),
                stop(f"{found['name']}, {kilometers(meters)}"),
            ),
        )


def open_nearest(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """The page of the nearest place of a category."""
    for centre, category, found, _ in _nearest(db, random):
        yield Draft(
            intent=f"Open the page of the {category.lower()} that is nearest to the "
            f"{centre['name']}.",
            check=ends_at(f"{HOST}/place/{found['slug']}.html"),
            path=(
                *to_place(centre["name"]),
                link(f"{PLURALS[category]} nearby"),
                link(found["name"]),
                stop(),
            ),
        )


def best_rated(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """The best or worst rated place of a category."""
    for category in CATEGORIES:
        rows = sorted(
            (row for row in _places(db) if row["category"] == category), key=lambda r: r["rating"]
        )
        for word, row in (("best", rows[-1]), ("worst", rows[0])):
            yield Draft(
                intent=f"Which {category.lower()} has the {word} rating, and on what street is it?",
                check=says_all([row["name"], row["street"]]),
                path=(
                    link(PLURALS[category]),
                    link("Best rated first"),
                    stop(f"{row['name']}, {row['street']}"),
                ),
            )


def open_on_day(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """What is closed on a weekday."""
    for category in CATEGORIES:
        for weekday, day in enumerate(WEEKDAYS):
            rows = db.execute(
                "SELECT name FROM place JOIN hours ON place_id = place.id"
                " WHERE category = ? AND weekday = ? ORDER BY name",
                (category, weekday),
            ).fetchall()
            names = [row["name"] for row in rows]
            num_places = sum(row["category"] == category for row in _places(db))
            if not 0 < len(names) < num_places:
                continue
            yield Draft(
                intent=f"List all {PLURALS[category].lower()} that are open on a {day}.",
                check=says_all(names),
                path=(link(PLURALS[category]), link(f"Open on {day}"), stop(", ".join(names))),
            )


def show_route(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """The page of a route."""
    for start, end in _pairs(db, random):
        mode = random.choice(sorted(MODE_WORDS))
        yield Draft(
            intent=f"Show me the way from the {start['name']} to the {end['name']} "
            f"{MODE_WORDS[mode]}.",
            check=ends_at(f"{HOST}/directions/{start['slug']}/{end['slug']}/{mode}"),
            path=(*to_route(start["name"], end["name"], mode), stop()),
        )


def closer_of_two(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """Which of two places of a category is closer."""
    places = _places(db)
    for category in CATEGORIES:
        group = [row for row in places if row["category"] == category]
        for _ in range(4):
            centre = random.choice([row for row in places if row["category"] != category])
            first, second = random.sample(group, 2)
            near, far = (route_between(centre, row).meters for row in (first, second))
            if near == far:
                continue
            answer = first["name"] if near < far else second["name"]
            yield Draft(
                intent=f"Which is closer to the {centre['name']}: the {first['name']} or the "
                f"{second['name']}? Answer with the name only.",
                check=says(answer),
                path=(
                    *to_place(centre["name"]),
                    link(f"{PLURALS[category]} nearby"),
                    stop(answer),
                ),
            )


def save_with_note(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """A place saved with a note."""
    for row in some(random, _places(db)):
        note = random.choice(NOTES)
        yield Draft(
            intent=f'Save the {row["name"]} to my places with the note "{note}"',
            check=shows(f"{HOST}/saved", "saved", parts=[f"{row['name']}: {note}"]),
            path=(*to_place(row["name"]), fill("Note", note), button("Save Place"), stop()),
        )


def report_phone(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """A correction sent in."""
    for row in some(random, _places(db)):
        phone = f"555-{random.randrange(300, 400)}-{random.randrange(1000, 10000)}"
        yield Draft(
            intent=f"Report that the phone number of the {row['name']} should be {phone}.",
            check=shows(
                f"{HOST}/corrections", "corrections", parts=[f"{row['name']}, Phone number", phone]
            ),
            path=(
                *to_place(row["name"]),
                link("Suggest a Correction"),
                click("radio", "Phone number"),
                fill("What would be right", phone),
                button("Send Correction"),
                stop(),
            ),
        )


MAPS_TEMPLATES = (
    place_phone,
    place_address,
    closing_time,
    travel_minutes,
    travel_distance,
    nearest_place,
    open_nearest,
    best_rated,
    open_on_day,
    show_route,
    closer_of_two,
    save_with_note,
    report_phone,
)

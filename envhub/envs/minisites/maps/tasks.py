"""Task templates of the city map."""

from collections.abc import Iterator
from typing import Any

from envhub.envs.minisites.drafts import (
    SiteTemplates,
    Step,
    TaskDraft,
    TaskWorld,
    button,
    ends_at,
    fill,
    holds,
    link,
    radio,
    says,
    says_all,
    seek,
    stop,
)
from envhub.envs.minisites.maps.routes import Route, find_route, kilometers
from envhub.envs.minisites.maps.seed import CATEGORIES, PLURALS, WEEKDAYS, WORDS

HOST = "http://maps.test"
PLACES = "SELECT * FROM place ORDER BY id"
TASKS = SiteTemplates(host=HOST, site="map", database="maps")


def to_place(name: str) -> tuple[Step, ...]:
    """Return the steps to the page of a place."""
    return (seek("Search places", name), link(name))


def to_route(first_name: str, second_name: str, label: str) -> tuple[Step, ...]:
    """Return the steps to the page of a route."""
    return (
        link("Directions"),
        fill("From", first_name),
        fill("To", second_name),
        radio(label),
        button("Get Directions"),
    )


def route_between(start: Any, end: Any) -> Route:
    """Return the shortest route between two places."""
    return find_route((start.col, start.line), (end.col, end.line))


@TASKS.template
def place_phone(world: TaskWorld) -> Iterator[TaskDraft]:
    for place in world.some(40, PLACES):
        yield TaskDraft(
            f"What is the phone number of the {place.name}? Answer with the number only.",
            says(place.phone),
            [*to_place(place.name), stop(place.phone)],
        )


@TASKS.template
def place_address(world: TaskWorld) -> Iterator[TaskDraft]:
    for place in world.some(40, PLACES):
        yield TaskDraft(
            f"Give the address of the {place.name} and the quarter in which it lies.",
            says_all(f"{place.number} {place.street}", place.quarter),
            [*to_place(place.name), stop(f"{place.number} {place.street}, {place.quarter}")],
        )


@TASKS.template
def closing_time(world: TaskWorld) -> Iterator[TaskDraft]:
    for hours in world.some(
        40,
        "SELECT place.name, weekday, closes FROM hours JOIN place ON place.id = place_id "
        "WHERE closes < '24:00' ORDER BY place.id, weekday",
    ):
        yield TaskDraft(
            f"At what time does the {hours.name} close on a {WEEKDAYS[hours.weekday]}? Answer "
            "with the time only, as hh:mm.",
            says(hours.closes),
            [*to_place(hours.name), stop(hours.closes)],
        )


@TASKS.template
def travel_minutes(world: TaskWorld) -> Iterator[TaskDraft]:
    for first, second in world.pairs(30, PLACES):
        mode, by, label = world.random.choice(WORDS["tasks"]["modes"])
        minutes = route_between(first, second).minutes(mode)
        yield TaskDraft(
            f"How many minutes does it take from the {first.name} to the {second.name} {by}? "
            "Answer with the number only.",
            says(minutes),
            [*to_route(first.name, second.name, label), stop(minutes)],
        )


@TASKS.template
def travel_distance(world: TaskWorld) -> Iterator[TaskDraft]:
    for first, second in world.pairs(30, PLACES):
        distance = kilometers(route_between(first, second).meters)
        yield TaskDraft(
            f"How far is it from the {first.name} to the {second.name}? Answer as the map "
            "prints it, such as 1.35 km.",
            says(distance),
            [*to_route(first.name, second.name, "On foot"), stop(distance)],
        )


def nearest_places(world: TaskWorld) -> Iterator[tuple[Any, str, Any, str]]:
    """Yield places, each with a category, its nearest place of this category, and the distance."""
    for place in world.some(40, PLACES):
        category = world.random.choice(
            world.column(
                "SELECT DISTINCT category FROM place WHERE category <> :category ORDER BY category",
                place,
            )
        )
        others = world.rows("SELECT * FROM place WHERE category = :category", category=category)
        others = sorted((route_between(place, other).meters, other.id, other) for other in others)
        (meters, _, nearest), (next_meters, _, _), *_ = others
        if meters < next_meters:
            yield place, category, nearest, kilometers(meters)


@TASKS.template
def nearest_place(world: TaskWorld) -> Iterator[TaskDraft]:
    for place, category, nearest, distance in nearest_places(world):
        yield TaskDraft(
            f"Which {category.lower()} is nearest to the {place.name}, and how far away is it?",
            says_all(nearest.name, distance),
            [
                *to_place(place.name),
                link(f"{PLURALS[category]} nearby"),
                stop(f"{nearest.name}, {distance}"),
            ],
        )


@TASKS.template
def open_nearest(world: TaskWorld) -> Iterator[TaskDraft]:
    for place, category, nearest, _ in nearest_places(world):
        nearby = link(f"{PLURALS[category]} nearby")
        yield TaskDraft(
            f"Open the page of the {category.lower()} that is nearest to the {place.name}.",
            ends_at(f"{HOST}/place/{nearest.slug}.html"),
            [*to_place(place.name), nearby, link(nearest.name), stop()],
        )


@TASKS.template
def best_rated(world: TaskWorld) -> Iterator[TaskDraft]:
    for category in CATEGORIES:
        for word, direction in (("best", "DESC"), ("worst", "ASC")):
            place = world.first(
                f"SELECT * FROM place WHERE category = :category ORDER BY rating {direction}",
                category=category,
            )
            answer = f"{place.name}, {place.street}"
            yield TaskDraft(
                f"Which {category.lower()} has the {word} rating, and on what street is it?",
                says_all(place.name, place.street),
                [link(PLURALS[category]), link("Best rated first"), stop(answer)],
            )


@TASKS.template
def open_on_day(world: TaskWorld) -> Iterator[TaskDraft]:
    for category in CATEGORIES:
        for weekday, day in enumerate(WEEKDAYS):
            places = world.column(
                "SELECT id FROM place WHERE category = :category", category=category
            )
            names = world.column(
                "SELECT name FROM place JOIN hours ON place_id = place.id "
                "WHERE category = :category AND weekday = :weekday ORDER BY name",
                category=category,
                weekday=weekday,
            )
            if len(names) < len(places):
                yield TaskDraft(
                    f"List all {PLURALS[category].lower()} that are open on a {day}.",
                    says_all(*names),
                    [link(PLURALS[category]), link(f"Open on {day}"), stop(", ".join(names))],
                )


@TASKS.template
def show_route(world: TaskWorld) -> Iterator[TaskDraft]:
    for first, second in world.pairs(30, PLACES):
        mode, by, label = world.random.choice(WORDS["tasks"]["modes"])
        yield TaskDraft(
            f"Show me the way from the {first.name} to the {second.name} {by}.",
            ends_at(f"{HOST}/directions/{first.slug}/{second.slug}/{mode}"),
            [*to_route(first.name, second.name, label), stop()],
        )


@TASKS.template
def closer_of_two(world: TaskWorld) -> Iterator[TaskDraft]:
    for category in CATEGORIES:
        for _ in range(4):
            place = world.pick(
                "SELECT * FROM place WHERE category <> :category ORDER BY id", category=category
            )
            ((first, second),) = world.pairs(
                1, "SELECT * FROM place WHERE category = :category ORDER BY id", category=category
            )
            to_first = route_between(place, first).meters
            to_second = route_between(place, second).meters
            if to_first != to_second:
                answer = first.name if to_first < to_second else second.name
                yield TaskDraft(
                    f"Which is closer to the {place.name}: the {first.name} or the "
                    f"{second.name}? Answer with the name only.",
                    says(answer),
                    [*to_place(place.name), link(f"{PLURALS[category]} nearby"), stop(answer)],
                )


@TASKS.template
def save_with_note(world: TaskWorld) -> Iterator[TaskDraft]:
    for place in world.some(40, PLACES):
        note = world.random.choice(WORDS["tasks"]["notes"])
        yield TaskDraft(
            f'Save the {place.name} to my places with the note "{note}"',
            holds(f"{HOST}/saved", "saved", f"{place.name}: {note}"),
            [*to_place(place.name), fill("Note", note), button("Save Place"), stop()],
        )


@TASKS.template
def report_phone(world: TaskWorld) -> Iterator[TaskDraft]:
    for place in world.some(40, PLACES):
        middle = world.random.randrange(300, 400)
        last = world.random.randrange(1000, 10000)
        right = f"555-{middle}-{last}"
        yield TaskDraft(
            f"Report that the phone number of the {place.name} should be {right}.",
            holds(f"{HOST}/corrections", "corrections", f"{place.name}, Phone number", right),
            [
                *to_place(place.name),
                link("Suggest a Correction"),
                radio("Phone number"),
                fill("What would be right", right),
                button("Send Correction"),
                stop(),
            ],
        )

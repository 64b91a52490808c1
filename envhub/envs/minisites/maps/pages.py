"""The city map, maps.test: its pages and forms, and the computed pages."""

import sqlite3

from starlette.responses import Response

from envhub.envs.minisites.maps.routes import METERS_PER_MINUTE, Route, describe, find_route
from envhub.envs.minisites.maps.routes import kilometers as in_km
from envhub.envs.minisites.maps.seed import CATEGORIES, PLURALS, QUARTERS, WEEKDAYS
from envhub.envs.minisites.site import PageMissing, Site, Visit

MODES = tuple(METERS_PER_MINUTE)
FINDS = {
    "place": "SELECT * FROM place WHERE slug = :slug",
    "start": "SELECT * FROM place WHERE slug = :start",
    "end": "SELECT * FROM place WHERE slug = :end",
    "quarter": "SELECT DISTINCT quarter AS name FROM place WHERE quarter = :quarter",
}


MAPS = Site(
    "maps",
    database="maps",
    finds=FINDS,
    categories=[(category.lower(), PLURALS[category]) for category in CATEGORIES],
    quarters=QUARTERS,
    weekdays=WEEKDAYS,
    topics=("Phone number", "Opening hours", "Address"),
)


@MAPS.get("/")
def home(visit: Visit) -> Response:
    return visit.page("home.html")


@MAPS.get("/search")
def search(visit: Visit) -> Response:
    return visit.page(
        "search.html",
        places=visit.rows(
            "SELECT * FROM place WHERE (name || ' ' || number || ' ' || street || ' ' || "
            "quarter) LIKE :pattern ESCAPE '\\' ORDER BY name LIMIT 20"
        ),
    )


@MAPS.get("/quarter/{quarter}")
def quarter(visit: Visit) -> Response:
    return visit.page(
        "quarter.html",
        quarter=visit.find("quarter"),
        places=visit.rows("SELECT * FROM place WHERE quarter = :quarter ORDER BY category, name"),
    )


@MAPS.get("/saved")
def saved(visit: Visit) -> Response:
    return visit.page(
        "saved.html",
        places=visit.rows(
            "SELECT place.*, saved.note FROM saved JOIN place ON place.id = place_id ORDER BY name"
        ),
    )


@MAPS.get("/place/{slug}/correction")
def correction(visit: Visit) -> Response:
    return visit.page("correction.html", place=visit.find("place"))


@MAPS.get("/corrections")
def corrections(visit: Visit) -> Response:
    return visit.page(
        "corrections.html",
        rows=visit.rows(
            "SELECT correction.*, place.name FROM correction JOIN place ON place.id = "
            "place_id ORDER BY correction.id DESC"
        ),
    )


@MAPS.post("/place/{slug}/save")
def save_place(visit: Visit) -> Response:
    visit.field("note")
    visit.find("place")
    visit.run(
        "INSERT INTO saved VALUES (:place_id, :note) ON CONFLICT (place_id) DO UPDATE "
        "SET note = excluded.note"
    )
    return visit.go("/place/{place_slug}.html", "The place was saved.")


@MAPS.post("/place/{slug}/forget")
def forget_place(visit: Visit) -> Response:
    visit.find("place")
    visit.run("DELETE FROM saved WHERE place_id = :place_id")
    return visit.go("/saved", "The place is no longer saved.")


@MAPS.post("/place/{slug}/correction")
def add_correction(visit: Visit) -> Response:
    visit.entry("topic", of="topics")
    visit.field("body")
    visit.find("place")
    if not visit.holds(":topic <> '' AND :body <> ''"):
        return visit.go(
            "/place/{place_slug}/correction", "Say what is wrong, and what would be right."
        )
    visit.run("INSERT INTO correction (place_id, topic, body) VALUES (:place_id, :topic, :body)")
    return visit.go("/corrections", "Thank you. We will look into it.")


def _category(visit: Visit) -> str:
    """Return the category of an address. Raises: PageMissing."""
    name = visit.names["category"].capitalize()
    if name not in CATEGORIES:
        raise PageMissing(visit.path)
    return name


@MAPS.get("/category/{category}")
def category(visit: Visit) -> Response:
    """Return the page of a category's places."""
    name = _category(visit)
    order = visit.choice("sort", ("name", "rating"))
    day = visit.choice("day", ("", *WEEKDAYS))
    rows = visit.rows(
        "SELECT * FROM place WHERE category = :name AND (:weekday < 0 OR id IN"
        " (SELECT place_id FROM hours WHERE weekday = :weekday))"
        " ORDER BY CASE WHEN :order = 'rating' THEN -rating ELSE 0 END, name",
        name=name,
        weekday=WEEKDAYS.index(day) if day else -1,
        order=order,
    )
    return visit.page("category.html", title=PLURALS[name], places=rows, day=day)


@MAPS.get("/place/{slug}.html")
def place(visit: Visit) -> Response:
    """Return the page of a place with its hours."""
    entry = visit.find("place")
    listed = visit.rows("SELECT * FROM hours WHERE place_id = :place_id")
    hours = {row["weekday"]: row for row in listed}
    week = [(name, hours.get(number)) for number, name in enumerate(WEEKDAYS)]
    is_saved = bool(visit.rows("SELECT * FROM saved WHERE place_id = :place_id"))
    return visit.page("place.html", place=entry, week=week, is_saved=is_saved)


@MAPS.get("/nearby/{slug}/{category}")
def nearby(visit: Visit) -> Response:
    """Return the page of a category's places, the nearest to a place first."""
    centre, name = visit.find("place"), _category(visit)
    others = visit.rows(
        "SELECT * FROM place WHERE category = :name AND id <> :place_id ORDER BY name", name=name
    )
    routes = [(_route(centre, other), other) for other in others]
    routes.sort(key=lambda pair: (pair[0].meters, pair[1]["name"]))
    listed = [(place, in_km(route.meters), route.minutes("foot")) for route, place in routes]
    return visit.page("nearby.html", centre=centre, title=PLURALS[name], listed=listed)


def _route(start: sqlite3.Row, end: sqlite3.Row) -> Route:
    """Return the shortest route between two places."""
    return find_route((start["col"], start["line"]), (end["col"], end["line"]))


@MAPS.get("/directions")
def directions(visit: Visit) -> Response:
    """Return the form, or a redirect to the route's page once the form is sent."""
    start = visit.query.get("from", "").strip()
    end = visit.query.get("to", "").strip()
    mode = visit.choice("mode", MODES)
    if not start or not end:
        return visit.page("directions.html", start=start, end=end, mode=mode, error="")
    slugs = []
    for words in (start[:200], end[:200]):
        rows = visit.rows(
            "SELECT slug FROM place WHERE name = :words COLLATE NOCASE"
            " OR number || ' ' || street = :words COLLATE NOCASE",
            words=words,
        )
        if not rows:
            error = f'No place is called "{words}". Search for its full name.'
            return visit.page("directions.html", start=start, end=end, mode=mode, error=error)
        slugs.append(rows[0]["slug"])
    return visit.go(f"/directions/{slugs[0]}/{slugs[1]}/{mode}")


@MAPS.get("/directions/{start}/{end}/{mode}")
def route(visit: Visit) -> Response:
    """Return the page of a route between two places."""
    start = visit.find("start")
    end = visit.find("end")
    mode = visit.names["mode"]
    if mode not in MODES:
        raise PageMissing(visit.path)
    trip = _route(start, end)
    roads = {
        (row["axis"], row["position"]): row["name"] for row in visit.rows("SELECT * FROM road")
    }
    return visit.page(
        "route.html",
        start=start,
        end=end,
        mode=mode,
        minutes=trip.minutes(mode),
        distance=in_km(trip.meters),
        legs=[describe(leg, roads) for leg in trip.legs],
    )

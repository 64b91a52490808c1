"""Pages of the city map, maps.test."""

import sqlite3

from starlette.responses import Response

from envhub.envs.minisites.maps.routes import METERS_PER_MINUTE, Route, describe, find_route
from envhub.envs.minisites.maps.routes import kilometers as in_km
from envhub.envs.minisites.maps.seed import CATEGORIES, PLURALS, QUARTERS, WEEKDAYS
from envhub.envs.minisites.site import PageMissing, Site, Visit

MAPS = Site("maps", database="maps")
MODES = tuple(METERS_PER_MINUTE)
TOPICS = ("Phone number", "Opening hours", "Address")


def _page(visit: Visit, template: str, **values: object) -> Response:
    slugs = [(category.lower(), PLURALS[category]) for category in CATEGORIES]
    return visit.page(template, categories=slugs, quarters=QUARTERS, **values)


def _place(visit: Visit, slug: str) -> sqlite3.Row:
    return visit.one("SELECT * FROM place WHERE slug = ?", slug)


def _category(visit: Visit) -> str:
    name = visit.params["category"].capitalize()
    if name not in CATEGORIES:
        raise PageMissing(visit.path)
    return name


@MAPS.get("/")
def home(visit: Visit) -> Response:
    return _page(visit, "home.html")


@MAPS.get("/search")
def search(visit: Visit) -> Response:
    rows = visit.rows(
        "SELECT * FROM place WHERE (name || ' ' || number || ' ' || street || ' ' || quarter)"
        " LIKE ? ESCAPE '\\' ORDER BY name LIMIT 20",
        visit.pattern(),
    )
    return _page(visit, "search.html", places=rows, words=visit.words())


@MAPS.get("/category/{category}")
def category(visit: Visit) -> Response:
    name, order = _category(visit), visit.choice("sort", ("name", "rating"))
    day = visit.choice("day", ("", *WEEKDAYS))
    weekday = WEEKDAYS.index(day) if day else -1
    rows = visit.rows(
        "SELECT * FROM place WHERE category = ? AND (? < 0 OR id IN"
        " (SELECT place_id FROM hours WHERE weekday = ?))"
        " ORDER BY CASE WHEN ? = 'rating' THEN -rating ELSE 0 END, name",
        *(name, weekday, weekday, order),
    )
    return _page(
        visit, "category.html", title=PLURALS[name], places=rows, weekdays=WEEKDAYS, day=day
    )


@MAPS.get("/quarter/{quarter}")
def quarter(visit: Visit) -> Response:
    name = visit.params["quarter"]
    rows = visit.rows("SELECT * FROM place WHERE quarter = ? ORDER BY category, name", name)
    if not rows:
        raise PageMissing(visit.path)
    return _page(visit, "quarter.html", title=name, places=rows)


@MAPS.get("/place/{slug}.html")
def place(visit: Visit) -> Response:
    found = _place(visit, visit.params["slug"])
    hours = {
        row["weekday"]: row
        for row in visit.rows("SELECT * FROM hours WHERE place_id = ?", found["id"])
    }
    saved = visit.rows("SELECT * FROM saved WHERE place_id = ?", found["id"])
    return _page(
        visit,
        "place.html",
        place=found,
        week=[(name, hours.get(number)) for number, name in enumerate(WEEKDAYS)],
        is_saved=bool(saved),
    )


@MAPS.get("/nearby/{slug}/{category}")
def nearby(visit: Visit) -> Response:
    centre, name = _place(visit, visit.params["slug"]), _category(visit)
    others = visit.rows(
        "SELECT * FROM place WHERE category = ? AND id <> ? ORDER BY name", name, centre["id"]
    )
    found = [(_route(centre, other), other) for other in others]
    found.sort(key=lambda pair: (pair[0].meters, pair[1]["name"]))
    listed = [(place, in_km(route.meters), route.minutes("foot")) for route, place in found]
    return _page(visit, "nearby.html", centre=centre, title=PLURALS[name], listed=listed)


def _route(start: sqlite3.Row, end: sqlite3.Row) -> Route:
    return find_route((start["col"], start["line"]), (end["col"], end["line"]))


@MAPS.get("/directions")
def directions(visit: Visit) -> Response:
    """The form; once it is sent, the way to the page of the route."""
    start, end = visit.query.get("from", "").strip(), visit.query.get("to", "").strip()
    mode = visit.choice("mode", MODES)
    if not start or not end:
        return _page(visit, "directions.html", start=start, end=end, mode=mode, error="")
    found = []
    for words in (start, end):
        rows = visit.rows(
            "SELECT slug FROM place WHERE name = ? COLLATE NOCASE"
            " OR number || ' ' || street = ? COLLATE NOCASE",
            *(words[:200], words[:200]),
        )
        if not rows:
            error = f'No place is called "{words[:200]}". Search for its full name.'
            return _page(visit, "directions.html", start=start, end=end, mode=mode, error=error)
        found.append(rows[0]["slug"])
    return visit.go(f"/directions/{found[0]}/{found[1]}/{mode}")


@MAPS.get("/directions/{start}/{end}/{mode}")
def route(visit: Visit) -> Response:
    start, end = _place(visit, visit.params["start"]), _place(visit, visit.params["end"])
    mode = visit.params["mode"]
    if mode not in MODES:
        raise PageMissing(visit.path)
    found = _route(start, end)
    roads = {
        (row["axis"], row["position"]): row["name"] for row in visit.rows("SELECT * FROM road")
    }
    return _page(
        visit,
        "route.html",
        start=start,
        end=end,
        mode=mode,
        minutes=found.minutes(mode),
        distance=in_km(found.meters),
        legs=[describe(leg, roads) for leg in found.legs],
    )


@MAPS.get("/saved")
def saved(visit: Visit) -> Response:
    rows = visit.rows(
        "SELECT place.*, saved.note FROM saved JOIN place ON place.id = place_id ORDER BY name"
    )
    return _page(visit, "saved.html", places=rows)


@MAPS.post("/place/{slug}/save")
def save(visit: Visit) -> Response:
    found = _place(visit, visit.params["slug"])
    visit.run(
        "INSERT INTO saved VALUES (?, ?) ON CONFLICT (place_id) DO UPDATE SET note = excluded.note",
        *(found["id"], visit.text("note")),
    )
    return visit.go(f"/place/{found['slug']}.html", "The place was saved.")


@MAPS.post("/place/{slug}/forget")
def forget(visit: Visit) -> Response:
    found = _place(visit, visit.params["slug"])
    visit.run("DELETE FROM saved WHERE place_id = ?", found["id"])
    return visit.go("/saved", "The place is no longer saved.")


@MAPS.get("/place/{slug}/correction")
def correction_form(visit: Visit) -> Response:
    found = _place(visit, visit.params["slug"])
    return _page(visit, "correction.html", place=found, topics=TOPICS)


@MAPS.post("/place/{slug}/correction")
def correct(visit: Visit) -> Response:
    found = _place(visit, visit.params["slug"])
    topic, body = visit.text("topic"), visit.text("body")
    if topic not in TOPICS or not body:
        text = "Say what is wrong, and what would be right."
        return visit.go(f"/place/{found['slug']}/correction", text)
    visit.insert("correction", place_id=found["id"], topic=topic, body=body)
    return visit.go("/corrections", "Thank you. We will look into it.")


@MAPS.get("/corrections")
def corrections(visit: Visit) -> Response:
    rows = visit.rows(
        "SELECT correction.*, place.name FROM correction JOIN place ON place.id = place_id"
        " ORDER BY correction.id DESC"
    )
    return _page(visit, "corrections.html", rows=rows)

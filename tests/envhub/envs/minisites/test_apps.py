"""The self-hosted sites: sessions, escaping and invalid input."""

import re
import time
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from envhub.envs.minisites.env import SITES, make_app
from envhub.envs.minisites.site import MAX_BODY_BYTES
from envhub.envs.minisites.store import FILLERS, master
from tests.envhub.envs.minisites.sites_browser import Browser, parse
from tests.marks import long_for

REPEATED = ("cms.test", "maps.test", "reddit.test")
HOSTILE = "<script>alert('1')</script>\"'&{{ 7 * 7 }}%_\\"


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(make_app()) as client:
        yield client


def start(client: TestClient, session: str, seed: int = 0) -> Browser:
    assert client.post("/__reset__", json={"session": session, "seed": seed}).status_code == 200
    return Browser(client, session)


def wish(browser: Browser) -> str:
    """Put the first product of the home page on the wish list; returns its name."""
    browser.goto("http://shopping.test/")
    (name, *_) = [
        browser.name(node)
        for node in browser.page.walk()
        if node.attributes.get("href", "").startswith("/product/")
    ]
    browser.do({"do": "click", "role": "link", "name": name})
    browser.do({"do": "click", "role": "button", "name": "Add to Wish List"})
    return name


def wishes(browser: Browser) -> str:
    browser.goto("http://shopping.test/wishlist")
    return browser.text_of("wishes")


def crawl(browser: Browser, host: str, most: int) -> list[str]:
    """Return the addresses of pages that links lead to, breadth first."""
    queue, seen = [f"http://{host}/"], {f"http://{host}/"}
    visited = []
    while queue and len(visited) < most:
        url = queue.pop(0)
        browser.goto(url)
        assert browser.status == 200, url
        visited.append(url)
        for node in browser.page.walk():
            href = node.attributes.get("href", "")
            target = f"http://{host}{href}"
            if href.startswith("/") and target not in seen:
                seen.add(target)
                queue.append(target)
    return visited


def test_session_sees_nothing_of_another(client: TestClient) -> None:
    first, second, demo = start(client, "first"), start(client, "second"), Browser(client, None)
    name = wish(first)
    assert name in wishes(first)
    assert name not in wishes(second)
    assert name not in wishes(demo)


def test_reset_restores_the_seeded_world(client: TestClient) -> None:
    browser = start(client, "one")
    before = browser.goto("http://shopping.test/wishlist")
    name = wish(browser)
    assert name in wishes(browser)
    start(client, "one")
    assert browser.goto("http://shopping.test/wishlist") == before


def test_dropped_session_returns_status_410(client: TestClient) -> None:
    start(client, "one")
    assert client.post("/__drop__", json={"session": "one"}).json() == {"dropped": True}
    assert client.post("/__drop__", json={"session": "one"}).json() == {"dropped": False}
    headers = {"X-Longstride-Session": "one", "Host": "shopping.test"}
    assert client.get("/", headers=headers).status_code == 410


def test_pages_depend_only_on_the_seed(client: TestClient) -> None:
    for host in SITES:
        first, second, other = (
            start(client, "a", 3).goto(f"http://{host}/"),
            start(client, "b", 3).goto(f"http://{host}/"),
            start(client, "c", 4).goto(f"http://{host}/"),
        )
        assert first == second
        if host != "maps.test":  # its first page holds nothing of the world
            assert first != other


def test_price_edited_in_administration_appears_in_the_shop(client: TestClient) -> None:
    browser = start(client, "one")
    row = master("shop", 0).execute("SELECT * FROM product WHERE id = 1").fetchone()
    browser.goto("http://cms.test/products/1")
    browser.do({"do": "type", "role": "textbox", "name": "Price", "text": "1234.5", "enter": True})
    browser.goto(f"http://shopping.test/product/{row['slug']}.html")
    assert browser.text_of("price") == "$1,234.50"


def test_site_accepts_any_port_and_refuses_foreign_hosts(client: TestClient) -> None:
    assert "Citygrid" in client.get("/", headers={"Host": "maps.test:8123"}).text
    assert client.get("/", headers={"Host": "elsewhere.test"}).status_code == 404


@pytest.mark.parametrize("host", long_for(SITES, REPEATED))
def test_page_is_well_formed_and_loads_nothing_external(client: TestClient, host: str) -> None:
    browser = start(client, "one")
    for url in crawl(browser, host, most=25):
        source = browser.goto(url)
        nodes = browser.page.walk()
        tags = [node.tag for node in nodes]
        assert tags.count("h1") == 1, url
        assert tags.count("main") == 1, url
        assert re.search(r"(src|href)=\"(https?:)?//", source) is None, url
        ids = [node.attributes["id"] for node in nodes if "id" in node.attributes]
        assert len(ids) == len(set(ids)), url
        for node in nodes:
            assert not browser.role(node) or browser.name(node), f"a nameless {node.tag} at {url}"


@pytest.mark.parametrize("host", long_for(SITES, REPEATED))
def test_page_stays_standing_when_addresses_are_nonsense(client: TestClient, host: str) -> None:
    browser = start(client, "one")
    urls = crawl(browser, host, most=12)
    for url in urls:
        tail = "&" if "?" in url else "?"
        odd = f"{tail}q={'%00' * 3}%F0%9F&sort=x&page=99999999999999999999&day=-1&state='&from=%25"
        browser.goto(url + odd)
        assert browser.status == 200, url
        browser.goto(url.rstrip("/") + "/99999999999999999999999")
        assert browser.status in (200, 404)
        for body in (b"", b"\xff\xfe=%ff&a", b"quantity=-1&price=nan&rating=9&status=%00&q"):
            reply = client.post(url, content=body, headers=browser.headers)
            assert reply.status_code in (200, 405, 404), url


def test_visitor_text_is_escaped(client: TestClient) -> None:
    browser = start(client, "one")
    browser.goto("http://shopping.test/")
    search = {"do": "type", "role": "searchbox", "name": "Search products", "enter": True}
    browser.do({**search, "text": HOSTILE})
    assert browser.status == 200
    assert HOSTILE in " ".join(node.text() for node in browser.page.walk() if node.tag == "h1")
    forum = master("reddit", 0).execute("SELECT name FROM forum").fetchone()["name"]
    browser.goto(f"http://reddit.test/f/{forum}/submit")
    for field in ("Title", "Text"):
        browser.do(
            {"do": "type", "role": "textbox", "name": field, "text": HOSTILE, "enter": False}
        )
    browser.do({"do": "click", "role": "button", "name": "Publish"})
    assert browser.text_of("title") == browser.text_of("body") == HOSTILE
    assert all(node.tag != "script" for node in browser.page.walk())


OTHERS_PROJECT = "SELECT '/' || owner || '/' || slug FROM projects WHERE owner_id <> 1"
REFUSED = [  # Database, SELECT of an address, path below it, form, redirect, notice.
    ("gitlab", OTHERS_PROJECT, "/-/issues/new", {"title": "A", "label": "none"},
     "/-/issues/new", "An issue needs a title and a label."),
    ("gitlab", OTHERS_PROJECT, "/-/issues/1/assign", {"username": "nobody"},
     "/-/issues/1", "There is no user of this name."),
    ("gitlab", OTHERS_PROJECT, "/-/merge_requests/1/state", {"state": "Merged"},
     "/-/merge_requests/1", "You may not do this."),
    ("reddit", "SELECT '/f/' || name FROM forum", "/submit", {"body": "text"},
     "/submit", "A post needs a title."),
    ("shop", "SELECT '/product/' || slug FROM products", "/review",
     {"rating": "6", "title": "A", "body": "B"}, "/review",
     "A review needs a rating, a title and a text."),
    ("maps", "SELECT '/place/' || slug FROM place", "/correction",
     {"topic": "Weather", "body": "B"}, "/correction",
     "Say what is wrong, and what would be right."),
]  # fmt: skip


@pytest.mark.parametrize(("database", "select", "below", "form", "back", "notice"), REFUSED)
def test_refused_form_shows_its_reason_and_changes_nothing(
    client: TestClient,
    database: str,
    select: str,
    below: str,
    form: dict[str, str],
    back: str,
    notice: str,
) -> None:
    host = "shopping.test" if database == "shop" else f"{database}.test"
    browser = start(client, "one")
    db = client.app.state.store.session("one").database(database)  # type: ignore[attr-defined]
    base, before = db.execute(select).fetchone()[0], list(db.iterdump())
    reply = client.post(
        f"http://{host}{base}{below}", data=form, headers=browser.headers, follow_redirects=False
    )
    assert reply.headers["location"] == base + back
    assert notice in browser.goto(f"http://{host}{base}{back}")
    assert list(db.iterdump()) == before


def test_only_the_owner_adds_members_in_known_roles(client: TestClient) -> None:
    headers = start(client, "one").headers
    db = client.app.state.store.session("one").database("gitlab")  # type: ignore[attr-defined]
    projects = "SELECT '/' || owner || '/' || slug || '/-/members' FROM projects WHERE owner_id"
    (own,), (others,) = (db.execute(f"{projects} {which} 1").fetchone() for which in ("=", "<>"))
    (user,) = db.execute("SELECT username FROM user WHERE id = 24").fetchone()

    def roles(path: str, role: str) -> list[str]:
        client.post(
            f"http://gitlab.test{path}", data={"username": user, "role": role}, headers=headers
        )
        found = db.execute(
            "SELECT role FROM member JOIN projects ON projects.id = project_id WHERE user_id = 24"
            " AND '/' || owner || '/' || slug || '/-/members' = ?",
            (path,),
        )
        return [row["role"] for row in found]

    before = roles(own, "King")
    assert "King" not in before
    assert roles(own, "Maintainer") == ["Maintainer"]
    assert roles(own, "Guest") == ["Guest"]
    assert roles(others, "Owner") == roles(others, "Guest")


def test_form_that_is_too_large_is_refused(client: TestClient) -> None:
    browser = start(client, "one")
    reply = client.post(
        "http://reddit.test/profile",
        content=b"bio=" + b"x" * MAX_BODY_BYTES,
        headers=browser.headers,
    )
    assert reply.status_code == 413


def test_reset_requires_name_and_small_seed(client: TestClient) -> None:
    for body in ({"session": "", "seed": 1}, {"session": "a", "seed": -1}, {"seed": 1}):
        assert client.post("/__reset__", json=body).status_code == 422


def test_seeded_databases_hold_the_documented_numbers_of_rows() -> None:
    def count(database: str, table: str) -> int:
        return master(database, 1).execute(f"SELECT count(*) FROM {table}").fetchone()[0]

    assert count("shop", "product") >= 60
    assert count("maps", "place") >= 60
    assert count("shop", "purchase") >= 100
    assert count("gitlab", "issue") >= 100
    assert count("reddit", "post") >= 100


@pytest.mark.long
@pytest.mark.slow
def test_hundred_sessions_reset_in_milliseconds_each(client: TestClient) -> None:
    for name in FILLERS:
        master(name, 0)
    started = time.perf_counter()
    for number in range(100):
        browser = start(client, f"session-{number}")
        for host in SITES:
            browser.goto(f"http://{host}/")
    took_ms = (time.perf_counter() - started) * 10
    assert took_ms < 250  # five pages and four copied databases, on a busy machine


def test_html_parser_refuses_badly_nested_tags() -> None:
    with pytest.raises(AssertionError):
        parse("<p><b>x</p></b>")

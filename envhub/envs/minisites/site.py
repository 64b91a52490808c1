"""One site: routes to page functions, and the request data that a page function gets."""

import logging
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Router

from envhub.envs.minisites.seeding import TODAY, insert
from envhub.envs.minisites.store import Store, UnknownSession, VisitorSession
from envhub.tables import read_table

SESSION_HEADER = "x-longstride-session"
MAX_BODY_BYTES = 64 * 1024
MAX_TEXT_CHARS = 4000

logger = logging.getLogger(__name__)


class PageMissing(LookupError):
    """The page does not exist, or no longer exists."""


def literal(words: str) -> str:
    """Return a text escaped for LIKE ... ESCAPE '\\', so that it matches itself."""
    return words.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")


def money(cents: int) -> str:
    """Return an amount in the sites' format, such as `$1,234.50`."""
    return f"${cents / 100:,.2f}"


def _environment() -> Environment:
    """Return the environment of the page templates."""
    folder = Path(__file__).parent / "templates"
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["money"] = money
    return environment


ENVIRONMENT = _environment()


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One request and the visitor's own database.

    `names` are the :name parameters of queries: the parameters of the address, the site's `given`
    values, the day as :today, the columns of found rows, and the fields of a form.
    """

    site: "Site"
    path: str
    db: sqlite3.Connection
    session: VisitorSession
    names: dict[str, Any]
    query: Mapping[str, str]
    form: Mapping[str, str]

    def rows(self, sql: str, **values: object) -> list[sqlite3.Row]:
        """Return all rows of a query."""
        return self.db.execute(sql, self.names | values).fetchall()

    def find(self, name: str) -> sqlite3.Row:
        """Return the row of one of the site's `finds`; its columns become :<name>_<column>.

        Raises: PageMissing: no row.
        """
        row = next(iter(self.rows(self.site.table["finds"][name])), None)
        if row is None:
            raise PageMissing(self.path)
        self.names.update({f"{name}_{key}": value for key, value in dict(row).items()})
        return row

    def run(self, sql: str, **values: object) -> None:
        """Execute a statement that changes the visitor's database."""
        self.db.execute(sql, self.names | values)

    def insert(self, table: str, **values: object) -> int:
        """Add a row to the visitor's database and return its id."""
        return insert(self.db, table, **values)

    def words(self) -> str:
        """Return the search words, stripped and cut."""
        return self.query.get("q", "").strip()[:200]

    def text(self, name: str) -> str:
        """Return a field of the form, stripped and cut; "" if it was not sent."""
        return self.form.get(name, "").strip()[:MAX_TEXT_CHARS]

    def choice(self, name: str, allowed: Sequence[str]) -> str:
        """Return a query parameter that is one of `allowed`, else the first of these."""
        value = self.query.get(name, "")
        return value if value in allowed else allowed[0]

    def page(self, template: str, **values: object) -> HTMLResponse:
        """Return a rendered page. A pending notice is shown on it once."""
        notice, self.session.notice = self.session.notice, ""
        shown = self.site.given | self.values_of(self.site.table.get("frame", {})) | values
        text = ENVIRONMENT.get_template(f"{self.site.name}/{template}").render(
            {"words": self.words(), **shown}, notice=notice, path=self.path, query=self.query
        )
        return HTMLResponse(text)

    def values_of(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that a page shows, by an entry of the site's table."""
        shown: dict[str, Any] = {}
        for name, allowed in entry.get("takes", {}).items():
            shown[name] = self.choice(name, allowed) if allowed else self.query.get(name, "")
        self.names.update(shown)
        shown |= {name: self.find(name) for name in entry.get("finds", ())}
        order = entry["orders"][shown["sort"]] if "orders" in entry else ""
        for name, sql in entry.get("rows", {}).items():
            shown[name] = self.rows(sql.replace("{order}", order))
        if "page_rows" in entry:
            shown |= self._one_page(shown["rows"], entry["page_rows"])
        return shown

    def submit(self, entry: Mapping[str, Any]) -> Response:
        """Process a form by an entry of the site's table."""
        names = self.names
        for name, kind in entry.get("takes", {}).items():
            names[name] = self._field(name, kind)
        for name in entry.get("finds", ()):
            self.find(name)
        if "wants" in entry and not self.rows(f"SELECT 1 WHERE {entry['wants']}"):
            return self.go(entry.get("back", entry["goes"]).format(**names), entry["refuses"])
        for sql in entry["runs"]:
            self.run(sql)
        return self.go(entry["goes"].format(**names), entry.get("says", "").format(**names))

    def _field(self, name: str, kind: int | str | None) -> str | int | None:
        """Return a field of the form, converted by its kind in the table."""
        text = self.text(name)
        if kind == "whole":
            return parse_number(text)
        if isinstance(kind, str):
            return text if text in self.site.given[kind] else ""
        return text[:kind]

    def _one_page(self, rows: list[sqlite3.Row], num_shown: int) -> dict[str, Any]:
        """Return the rows of the requested page of a list, with the numbers of pages."""
        num_pages = max(1, -(-len(rows) // num_shown))
        page = parse_number(self.query.get("page", ""))
        number = max(1, min(1 if page is None else page, num_pages))
        listed = rows[(number - 1) * num_shown : number * num_shown]
        return {"rows": listed, "num_rows": len(rows), "page": number, "num_pages": num_pages}

    def go(self, path: str, notice: str = "") -> RedirectResponse:
        """Return a redirect to a page that will show the notice."""
        self.session.notice = notice
        return RedirectResponse(path, status_code=303)


Handler = TypeVar("Handler", bound=Callable[[Visit], Response])


class Site:
    """Pages and forms over one of the databases, defined by a table and by functions.

    The table has `finds`, SELECTs of a single row for an address or a page, and the `pages` and
    `forms` by their addresses. A page has a `page`, its template, and may have
        takes: {x: [...]}    query parameters with their allowed values, the first as the
                             default; an empty list allows any text
        finds: [x]           rows of `finds`; if one does not exist, the page is missing
        rows: {x: SELECT}    all rows of a SELECT
        orders: {x: ...}     the text of {order} in the SELECTs, by the parameter `sort`
        page_rows: N         number of `rows` on a page; the parameter `page` selects the page
    The template gets all of these by their names. `frame` is the same for all pages. SELECTs can
    use `Visit.names`, the taken parameters, and the search words as :pattern.
    A form has
        takes: {x: kind}     its fields, by kind: a number is the maximum length of a text;
                             `whole` is a whole number or NULL; the name of one of the site's lists
                             is an entry of the list, or ""
        finds: [x]           as for a page
        wants: EXPRESSION    of SQL; if it is false, the notice `refuses` is shown at `back`
        runs: [SQL]          statements to execute
        goes: address        the next page, with the notice `says`; also the default of `back`

    Args:
        table: path of the table, relative to this file.
        given: values for all templates and SELECTs.
    """

    def __init__(self, name: str, *, database: str, table: str, **given: Any) -> None:
        self.name = name
        self.router = Router()
        self.table = read_table(__file__, table)
        self.given = given
        self._database = database
        for path, entry in self.table["pages"].items():
            self.get(path)(partial(_show, entry))
        for path, entry in self.table["forms"].items():
            self.post(path)(partial(_submit, entry))

    def get(self, path: str) -> Callable[[Handler], Handler]:
        """Register a page."""
        return self._register(path, "GET")

    def post(self, path: str) -> Callable[[Handler], Handler]:
        """Register the handler of a form."""
        return self._register(path, "POST")

    def _register(self, path: str, method: str) -> Callable[[Handler], Handler]:
        """Return a decorator that adds a handler of a path."""

        def add_handler(handler: Handler) -> Handler:
            """Add the handler's route, and return the handler."""

            async def endpoint(request: Request) -> Response:
                """Answer a request to the path."""
                return await self._answer(request, handler)

            self.router.add_route(path, endpoint, methods=[method])
            return handler

        return add_handler

    async def _answer(self, request: Request, handler: Callable[[Visit], Response]) -> Response:
        """Return the response of a handler to a request of a session."""
        store: Store = request.app.state.store
        try:
            session = store.session(request.headers.get(SESSION_HEADER))
        except UnknownSession as error:
            text = f"no session {error.args[0][:80]!r}: POST /__reset__ first\n"
            return PlainTextResponse(text, status_code=410)
        form = await _form(request)
        if form is None:
            return PlainTextResponse("the form is too large\n", status_code=413)
        visit = Visit(
            site=self,
            path=request.url.path,
            db=session.database(self._database),
            session=session,
            names={"today": TODAY} | self.given | _numbered(request.path_params),
            query=request.query_params,
            form=form,
        )
        visit.names["pattern"] = f"%{literal(visit.words())}%"
        try:
            return handler(visit)
        except PageMissing:
            logger.debug("no such page site=%s path=%s", self.name, request.url.path)
            return missing_page()


def _show(entry: Mapping[str, Any], visit: Visit) -> Response:
    """Return a page of the table."""
    return visit.page(entry["page"], **visit.values_of(entry))


def _submit(entry: Mapping[str, Any], visit: Visit) -> Response:
    """Process a form of the table."""
    return visit.submit(entry)


def _numbered(params: Mapping[str, str]) -> dict[str, Any]:
    """Return an address's parameters; a `number` or `..._id` is an int, 0 if malformed."""
    return {
        name: parse_number(text) or 0 if name == "number" or name.endswith("_id") else text
        for name, text in params.items()
    }


def missing_page() -> HTMLResponse:
    """Return the page for an unknown address."""
    return HTMLResponse(ENVIRONMENT.get_template("missing.html").render(notice=""), status_code=404)


def parse_number(text: str) -> int | None:
    """Return a text's whole number of at most nine digits; None if it is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else None


async def _form(request: Request) -> dict[str, str] | None:
    """Return the fields of an urlencoded form; None when it is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            return None
    return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))

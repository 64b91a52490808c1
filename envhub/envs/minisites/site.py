"""One site: routes to page functions, and the request data that a page function gets."""

import logging
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Router

from envhub.envs.minisites.seeding import TODAY, insert
from envhub.envs.minisites.store import Store, UnknownSession, VisitorSession

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
        row = next(iter(self.rows(self.site.finds[name])), None)
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
        shown = self.site.shared | self.site.frame(self) | values
        text = ENVIRONMENT.get_template(f"{self.site.name}/{template}").render(
            {"words": self.words(), **shown}, notice=notice, path=self.path, query=self.query
        )
        return HTMLResponse(text)

    def take(self, name: str, allowed: Sequence[str] = ()) -> str:
        """Return a query parameter, also as a name; without `allowed` it is any text."""
        value = self.choice(name, allowed) if allowed else self.query.get(name, "")
        self.names[name] = value
        return value

    def field(self, name: str, *, max_chars: int | None = None) -> None:
        """Name a field of the form."""
        self.names[name] = self.text(name)[:max_chars]

    def whole(self, name: str) -> None:
        """Name a field that is a whole number, or NULL."""
        self.names[name] = parse_number(self.text(name))

    def entry(self, name: str, *, of: str) -> None:
        """Name a field that is an entry of one of the site's lists, or ""."""
        text = self.text(name)
        self.names[name] = text if text in self.site.shared[of] else ""

    def holds(self, expression: str) -> bool:
        """Return whether an expression of SQL is true."""
        return bool(self.rows(f"SELECT 1 WHERE {expression}"))

    def one_page(self, sql: str, *, num_shown: int) -> dict[str, Any]:
        """Return the rows of the requested page of a query, with the numbers of pages."""
        rows = self.rows(sql)
        num_pages = max(1, -(-len(rows) // num_shown))
        page = parse_number(self.query.get("page", ""))
        number = max(1, min(1 if page is None else page, num_pages))
        listed = rows[(number - 1) * num_shown : number * num_shown]
        return {"rows": listed, "num_rows": len(rows), "page": number, "num_pages": num_pages}

    def go(self, path: str, notice: str = "") -> RedirectResponse:
        """Return a redirect to a page that will show the notice; both may have {names}."""
        self.session.notice = notice.format(**self.names)
        return RedirectResponse(path.format(**self.names), status_code=303)


Handler = TypeVar("Handler", bound=Callable[[Visit], Response])


class Site:
    """Pages and forms over one of the databases.

    Args:
        finds: SELECTs of a single row for an address or a page, by name.
        frame: returns the values that all pages show.
        shared: values for all templates and SELECTs.
    """

    def __init__(
        self,
        name: str,
        *,
        database: str,
        finds: Mapping[str, str],
        frame: Callable[[Visit], dict[str, Any]] = lambda visit: {},
        **shared: Any,
    ) -> None:
        self.name = name
        self.router = Router()
        self.finds = finds
        self.frame = frame
        self.shared = shared
        self._database = database

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
            names={"today": TODAY} | self.shared | _numbered(request.path_params),
            query=request.query_params,
            form=form,
        )
        visit.names["pattern"] = f"%{literal(visit.words())}%"
        try:
            return handler(visit)
        except PageMissing:
            logger.debug("no such page site=%s path=%s", self.name, request.url.path)
            return missing_page()


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

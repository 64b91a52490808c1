"""One site: routes to page functions, and what a page function is given."""

import logging
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qsl

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Router

from envhub.envs.minisites.seeding import insert
from envhub.envs.minisites.store import Session, Store, UnknownSession

SESSION_HEADER = "x-longstride-session"
MAX_BODY_BYTES = 64 * 1024
MAX_TEXT_CHARS = 4000

logger = logging.getLogger(__name__)


class PageMissing(LookupError):
    """There is no such page, or not any more."""


def literal(words: str) -> str:
    """Return a text as LIKE ... ESCAPE '\\' takes it for itself."""
    return words.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")


def money(cents: int) -> str:
    """Return an amount as the sites print it, such as `$1,234.50`."""
    return f"${cents / 100:,.2f}"


def _environment() -> Environment:
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
    """One request: its parameters, and the visitor's own database."""

    site: str
    path: str
    db: sqlite3.Connection
    session: Session
    params: Mapping[str, str]
    query: Mapping[str, str]
    form: Mapping[str, str]

    def rows(self, sql: str, *args: object) -> list[sqlite3.Row]:
        """Return all rows of a query."""
        return self.db.execute(sql, args).fetchall()

    def one(self, sql: str, *args: object) -> sqlite3.Row:
        """Return the first row of a query.

        Raises:
            PageMissing: no row.
        """
        row = self.db.execute(sql, args).fetchone()
        if row is None:
            raise PageMissing(self.path)
        return row

    def run(self, sql: str, *args: object) -> None:
        """Change the visitor's database."""
        self.db.execute(sql, args)

    def insert(self, table: str, **values: object) -> int:
        """Add a row to the visitor's database and return its id."""
        return insert(self.db, table, **values)

    def pattern(self) -> str:
        """Return the LIKE pattern of the words that are searched for."""
        return f"%{literal(self.words())}%"

    def words(self) -> str:
        """Return the words that are searched for, stripped and cut."""
        return self.query.get("q", "").strip()[:200]

    def text(self, name: str) -> str:
        """Return a field of the form, stripped and cut; "" when it was not sent."""
        return self.form.get(name, "").strip()[:MAX_TEXT_CHARS]

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        """Return a parameter of the query that is one of `allowed`, else the first of them."""
        value = self.query.get(name, "")
        return value if value in allowed else allowed[0]

    def number(self, name: str, default: int) -> int:
        """Return a small whole number of the query or the path."""
        value = whole(self.params.get(name, self.query.get(name, "")))
        return default if value is None else value

    def page(self, template: str, **values: object) -> HTMLResponse:
        """Return a rendered page; a waiting notice is shown on it once."""
        notice, self.session.notice = self.session.notice, ""
        text = ENVIRONMENT.get_template(f"{self.site}/{template}").render(
            values, notice=notice, path=self.path, query=self.query
        )
        return HTMLResponse(text)

    def go(self, path: str, notice: str = "") -> RedirectResponse:
        """Return a redirect to a page that will show the notice."""
        self.session.notice = notice
        return RedirectResponse(path, status_code=303)


Handler = TypeVar("Handler", bound=Callable[[Visit], Response])


class Site:
    """A router of page functions over one of the databases."""

    def __init__(self, name: str, database: str) -> None:
        self.name = name
        self.router = Router()
        self._database = database

    def get(self, path: str) -> Callable[[Handler], Handler]:
        """Register a page."""
        return self._register(path, "GET")

    def post(self, path: str) -> Callable[[Handler], Handler]:
        """Register what a form is sent to."""
        return self._register(path, "POST")

    def _register(self, path: str, method: str) -> Callable[[Handler], Handler]:
        def keep(handler: Handler) -> Handler:
            async def endpoint(request: Request) -> Response:
                return await self._answer(request, handler)

            self.router.add_route(path, endpoint, methods=[method])
            return handler

        return keep

    async def _answer(self, request: Request, handler: Callable[[Visit], Response]) -> Response:
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
            site=self.name,
            path=request.url.path,
            db=session.database(self._database),
            session=session,
            params=request.path_params,
            query=request.query_params,
            form=form,
        )
        try:
            return handler(visit)
        except PageMissing:
            logger.debug("no such page site=%s path=%s", self.name, request.url.path)
            return missing_page()


def missing_page() -> HTMLResponse:
    """Return the page for an address that leads nowhere."""
    return HTMLResponse(ENVIRONMENT.get_template("missing.html").render(notice=""), status_code=404)


def whole(text: str) -> int | None:
    """Return a text's whole number, at most nine digits; None when it is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else None


async def _form(request: Request) -> dict[str, str] | None:
    """Return the fields of an urlencoded form; None when it is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            return None
    return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))

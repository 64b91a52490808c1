"""The dashboard's pages and API, with their access control, and the routes of the Play view.

It only reads run directories. At the Play view a user or a policy plays episodes step by step.
"""

import asyncio
import hmac
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlencode

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.middleware.gzip import GZipMiddleware
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field

from common.config.actor import AgentFormat
from common.errors import ConfigError, EnvError, WireError
from common.wire.addresses import is_loopback
from tools.dashboard.prometheus import add_metrics_page
from tools.dashboard.reading.rows import KEYS, PAGE
from tools.dashboard.reading.run_source import COMPACT, RunSource
from tools.dashboard.reading.sources import Source, SourceRefresher
from tools.dashboard.web.views import compare, drawn_names, fleet, overview

if TYPE_CHECKING:
    from tools.dashboard.interactive import InteractiveEpisodes, RecordedEpisode

PLAY_PATH = "/api/play/"  # Only these routes accept a POST, from the page's own origin.
MAX_CHARS = 20_000  # Maximum length of an action.
EpisodeReply = Mapping[str, Any]
COOKIE = "longstride_dashboard"
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
Next = Callable[[Request], Awaitable[Response]]
STATIC = Path(__file__).with_name("static")
MAX_PAGE = 1000
MAX_COMPARED = 16
EVENT_S = 1.0  # Minimum interval between two events.
BEAT_S = 15.0  # After this time without an event, a comment line keeps the connection open.


class _OpenBody(BaseModel):
    """Body of a request that opens an episode."""

    env: str = Field(max_length=200)
    item: str = Field(max_length=200)
    run: str = Field("", max_length=200)  # Run whose style and answer format are used.


class _EpisodeBody(BaseModel):
    """Body of a request about an open episode."""

    id: str = Field(max_length=100)


class _StepBody(_EpisodeBody):
    """Body of a request that sends an action."""

    action: str = Field(max_length=MAX_CHARS)


class _AskBody(_EpisodeBody):
    """Body of a request that lets a policy choose the action."""

    # Run whose policy answers, in place of the endpoint `url`.
    run: str = Field("", max_length=200)
    url: str = Field("", max_length=2000)
    model: str = Field("", max_length=200)
    key: str = Field("", max_length=2000)


def add_play(app: FastAPI, table: "InteractiveEpisodes") -> None:
    """Add the routes over a table; the application's shutdown also shuts down the table."""

    async def open_one(body: _OpenBody, request: Request) -> EpisodeReply:
        """Open an episode, in the style and format of a run if one is named."""
        style = COMPACT
        format = AgentFormat.PLAIN
        if body.run:
            run = _run(request, body.run)
            style = run.style()
            format = run.format()
        return await table.open(body.env, body.item, style=style, format=format)

    async def step(body: _StepBody) -> EpisodeReply:
        return await table.step(body.id, body.action)

    async def ask(body: _AskBody, request: Request) -> EpisodeReply:
        """Let a policy act: the one of a run, or one behind an endpoint."""
        if body.run:
            return await table.ask_run(body.id, str(_run(request, body.run).run_dir.root.resolve()))
        return await table.ask(body.id, url=body.url, model=body.model, key=body.key)

    async def close(body: _EpisodeBody) -> EpisodeReply:
        await table.close(body.id)
        return {}

    async def pictures(name: str, id: str, request: Request) -> EpisodeReply:
        """Replay a recorded episode; return its pictures."""
        run = _run(request, name)
        try:
            recorded = cast("RecordedEpisode", await asyncio.to_thread(run.recorded, id))
        except KeyError:
            raise HTTPException(404, f"{id:.200}: run {name} has no such episode.") from None
        return await table.redo(recorded, run.config())

    app.add_api_route(f"{PLAY_PATH}environments", table.environments)
    app.add_api_route("/api/run/{name}/pictures", pictures)
    for word, answer in (("open", open_one), ("step", step), ("ask", ask), ("close", close)):
        app.add_api_route(f"{PLAY_PATH}{word}", answer, methods=["POST"])
    app.add_exception_handler(EnvError, _answer_failure)


def _answer_failure(_: Request, error: Exception) -> JSONResponse:
    """Return a 502 with the text of an environment's failure."""
    return JSONResponse({"error": str(error)}, status_code=502)


class AccessMiddleware:
    """Middleware that accepts or refuses a request and adds security headers to every response.

    Example: http://host:8600/?token=T sets a cookie and redirects to http://host:8600/.
    """

    def __init__(self, *, host: str, token: str, writable: str) -> None:
        """Set the rules; `writable` is the prefix of all paths that accept a POST."""
        self._is_local = is_loopback(host)
        self._token = token
        self._writable = writable

    async def __call__(self, request: Request, call_next: Next) -> Response:
        """Handle one request."""
        response = self._refusal(request) or await call_next(request)
        for name, value in HEADERS.items():
            response.headers[name] = value
        return response

    def _refusal(self, request: Request) -> Response | None:
        """Return the response to a forbidden request; None if the request is allowed."""
        is_read = request.method in ("GET", "HEAD")
        if not is_read and not request.url.path.startswith(self._writable):
            return _error(405, "The dashboard is read-only.")
        name = request.headers.get("host", "").rpartition("]")
        host = name[0] + name[1] if name[1] else name[2].partition(":")[0]
        # Refuse DNS rebinding: the page of another site whose name resolves to this machine.
        if self._is_local and host not in LOCAL_NAMES:
            return _error(403, "Use localhost, 127.0.0.1 or [::1] as the host name of the address.")
        is_page = request.headers.get("sec-fetch-site", "none") in ("same-origin", "none")
        if request.url.path.startswith("/api/") and not is_page:
            return _error(403, "Requests from other sites are refused.")
        origin = request.headers.get("origin", "").partition("://")[2]
        if not is_read and origin != request.headers.get("host"):
            return _error(403, "Actions from other sites are refused.")
        if not self._token:
            return None
        token = request.query_params.get("token", "")
        if token and self._is_right(token):
            rest = [(k, v) for k, v in request.query_params.multi_items() if k != "token"]
            target = request.url.path + (f"?{urlencode(rest)}" if rest else "")
            response = RedirectResponse(target, status_code=303)
            response.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            return response
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_right(request.cookies.get(COOKIE, "")) or self._is_right(bearer):
            return None
        return _error(
            401, "The token is missing or wrong. Open the address that the command printed."
        )

    def _is_right(self, token: str) -> bool:
        """Return whether a token is the right one, in constant time."""
        return hmac.compare_digest(token.encode(), self._token.encode())


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status_code=status)


def make_app(
    watch: SourceRefresher, access: AccessMiddleware, table: "InteractiveEpisodes | None" = None
) -> FastAPI:
    """Return the application over the watched sources; without a table there are no play routes."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.middleware("http")(access)
    app.add_middleware(GZipMiddleware, minimum_size=2048, compresslevel=1)
    app.add_api_route("/", _index)
    app.add_api_route("/favicon.ico", lambda: FileResponse(STATIC / "icon.svg"))
    for path, answer in (
        ("/api/runs", _runs),
        ("/api/run/{name}", _overview),
        ("/api/run/{name}/metrics", _metrics),
        ("/api/run/{name}/fleet", _fleet),
        ("/api/run/{name}/episodes", _episodes),
        ("/api/run/{name}/episode", _episode),
        ("/api/run/{name}/group", _group),
        ("/api/compare", _compare),
        ("/api/events", _events),
    ):
        app.add_api_route(path, answer)
    add_metrics_page(app, watch.sources.run_folders)
    if table is not None:
        add_play(app, table)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_exception_handler(ConfigError, _answer_bad_request)
    app.add_exception_handler(WireError, _answer_damaged)
    app.state.watch = watch
    return app


async def _index() -> FileResponse:
    return FileResponse(STATIC / "index.html")


def _answer_bad_request(_: Request, error: Exception) -> JSONResponse:
    """Return a 400 with the error's text."""
    return JSONResponse({"error": str(error)}, status_code=400)


def _answer_damaged(_: Request, error: Exception) -> JSONResponse:
    """Return a 422 for a damaged record."""
    return JSONResponse({"error": f"The record is damaged: {error}"}, status_code=422)


def _source(request: Request, name: str) -> Source:
    """Return a source by its name; 404 if there is none."""
    try:
        return request.app.state.watch.ask(name)
    except KeyError:
        raise HTTPException(404, f"{name}: no such run.") from None


def _run(request: Request, name: str) -> RunSource:
    """Return a run by its name; 404 if there is none, or for a file of conversations."""
    source = _source(request, name)
    if not isinstance(source, RunSource):
        raise HTTPException(404, f"{name} is a conversation file, which has episodes only.")
    return source


def _runs(request: Request) -> list[dict[str, Any]]:
    """Return the entries of the list of runs."""
    watch: SourceRefresher = request.app.state.watch
    return [each.summary() for each in watch.sources.list_all()]  # Only opened runs are read.


def _overview(request: Request, name: str) -> dict[str, Any]:
    """Return the data of the Run view, or the summary of a conversation file."""
    source = _source(request, name)
    return overview(source) if isinstance(source, RunSource) else source.summary()


def _metrics(request: Request, name: str, names: str = "") -> dict[str, Any]:
    """Return the named series; without names, the series of the Run view."""
    run = _run(request, name)
    return run.metrics.series(names.split(",") if names else drawn_names(run.metrics.columns))


def _fleet(request: Request, name: str) -> dict[str, Any]:
    return fleet(_run(request, name))


def _episodes(request: Request, name: str, start: int = 0, num: int = PAGE) -> dict[str, Any]:
    """Return one page of a source's episodes that match the filters."""
    source = _source(request, name)
    wanted = {k: v for k, v in request.query_params.items() if k not in ("start", "num")}
    page = source.page(wanted, start=max(0, start), num=max(0, min(num, MAX_PAGE)))
    return page | {"keys": KEYS, "indexed": source.summary()["indexed"]}


def _episode(request: Request, name: str, id: str) -> JSONResponse:
    """Return one complete episode."""
    try:
        return JSONResponse(_source(request, name).episode(id))
    except KeyError:
        raise HTTPException(404, f"{id:.200}: run {name} has no such episode.") from None


def _group(request: Request, name: str, id: str) -> JSONResponse:
    """Return the members of a group."""
    try:
        return JSONResponse(_run(request, name).group(id))
    except KeyError:
        raise HTTPException(404, f"{id:.200}: run {name} has no such group.") from None


def _compare(request: Request, runs: str) -> dict[str, Any]:
    """Return the data of the Compare view."""
    names = [name for name in re.split(r",", runs) if name][:MAX_COMPARED]
    return compare([_run(request, name) for name in names])


async def _events(request: Request) -> StreamingResponse:
    """Send the page an event, at most once a second, when a source has changed."""
    watch: SourceRefresher = request.app.state.watch

    async def events() -> AsyncIterator[str]:
        """Yield an event for each change, and a comment at intervals that keeps the connection."""
        sent = -1
        silent_s = 0.0
        while not await request.is_disconnected():
            if watch.num_changes != sent:
                sent = watch.num_changes
                silent_s = 0.0
                yield f"event: changed\ndata: {sent}\n\n"
            elif silent_s >= BEAT_S:
                silent_s = 0.0
                yield ": beat\n\n"
            await asyncio.sleep(EVENT_S)
            silent_s += EVENT_S

    return StreamingResponse(events(), media_type="text/event-stream")

"""The HTTP interface of the hub: routes and status codes, access before them, and metrics."""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from itertools import accumulate
from typing import Annotated, Any
from urllib.parse import urlsplit

import psutil
from fastapi import FastAPI, HTTPException, Query, Request, Response
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import EnvTimeout
from common.formats.action_size import DEFAULT_ACTION_MIB, FIELDS_BYTES, MIB, TOGETHER_BYTES
from common.http.serving import REFUSED, Refusals, token_in
from envhub.catalogue.registry import Registry, load_extensions
from envhub.env import UnknownItem
from envhub.errors import (
    BadState,
    CapacityFull,
    EnvRaised,
    HubDraining,
    ServicePaused,
    SessionConflict,
    SessionUnknown,
    StateUnsaved,
    UnknownEnv,
)
from envhub.hosting.session import STEP_BUCKETS_S
from envhub.hosting.sessions import Sessions
from envhub.http.bodies import (
    MAX_NAME_CHARS,
    BadBody,
    BatchStepRequest,
    CloseRequest,
    Created,
    CreatedEntry,
    CreateRequest,
    Entry,
    Failed,
    Hint,
    LoadRequest,
    Pictured,
    Rendered,
    Stepped,
    SteppedEntry,
    StepRequest,
    body_of,
    json_response,
    parse_batch,
    parse_body,
    parse_entry,
)
from envhub.http.exposition import CONTENT_TYPE, MetricsPage, counter, gauge
from envhub.http.parts import AgentGymLimits, HubParts

logger = logging.getLogger(__name__)


COUNTS = (
    *("created", "expired", "deleted", "steps", "repeated", "refused", "failed", "repaired"),
    *("saved", "saved_bytes", "saved_us", "unsaved", "loaded"),
)
CONNECTION_REFUSALS = (
    "large_headers",
    "slow",
    "too_many",
)  # Refused connections, see `common.http.serving`.


class HubMetrics(Collector):
    """The metrics of one hub. Counts are read from the session table at every scrape."""

    def __init__(self, sessions: Sessions, refusals: Refusals) -> None:
        self._sessions = sessions
        self._refusals = refusals
        self._process = psutil.Process()
        self._page = MetricsPage(self)
        # The histogram is built per environment, since each prometheus_client counter takes a lock.

    def text(self) -> bytes:
        return self._page.text()

    def collect(self) -> Iterator[Metric]:
        """Yield the current values of the session table and the workers."""
        sessions = self._sessions
        live = [((env_name,), num) for env_name, num in sessions.num_live.items()]
        yield gauge("envhub_sessions_live", "Open sessions.", ["env"], live)
        steps = HistogramMetricFamily(
            "envhub_step_seconds", "Duration of one executed step in seconds.", labels=["env"]
        )
        bounds = [*map(str, STEP_BUCKETS_S), "+Inf"]
        for env_name, (steps_s, *nums) in sessions.steps.items():
            buckets = list(zip(bounds, accumulate(nums), strict=True))
            steps.add_metric([env_name], buckets, steps_s)
        yield steps
        for name in (*COUNTS, *CONNECTION_REFUSALS):
            num = sessions.num_steps if name == "steps" else sessions.counts[name]
            text = f"Number of sessions or steps since the start: {name}."
            yield counter(f"envhub_{name}", text, [], [((), num)])
        yield counter(
            "envhub_refused_requests",
            "Number of refused requests since the start.",
            ["address", "reason"],
            [(who.rsplit("/", 1), num) for who, num in self._refusals.report().items()],
        )
        services = sessions.services
        yield gauge(
            "envhub_paused",
            "1 for an environment that waits for a service, such as a judge.",
            ["env"],
            [((name,), float(name in services.paused)) for name in services.names],
        )
        placement = sessions.placement
        yield counter(
            "envhub_worker_restarts",
            "Number of lost worker processes since the start.",
            ["env", "cause"],
            [(list(labels), num) for labels, num in placement.num_lost.items()],
        )
        memory = [(("hub",), float(self._process.memory_info().rss))]
        memory += [((str(worker),), float(worker.rss_bytes)) for worker in placement.workers()]
        text = "Resident memory of the hub and its workers in bytes."
        yield gauge("envhub_resident_bytes", text, ["process"], memory)


OPEN_PATHS = frozenset({"/healthz", "/readyz"})


class AuthMiddleware:
    """ASGI middleware that answers 401 without the token and 413 to bodies over the limit."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        max_body_bytes: int,
        max_action_bytes: int,
        refusals: Refusals,
    ) -> None:
        """Requests that carry actions may have `max_action_bytes`, others `max_body_bytes`."""
        self._app = app
        self._refusals = refusals
        self._token = token.encode() if token is not None else None
        self._max_body_bytes = max_body_bytes
        self._max_action_bytes = max(max_action_bytes, TOGETHER_BYTES + max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and (refusal := self._no_socket(scope)) is not None:
            self._refusals.note(scope["client"], REFUSED[refusal.status_code])
            await refusal(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = self._counted(scope, send)
        headers = dict(scope["headers"])
        if not self._is_allowed(scope["path"], headers):
            await _refusal(401, "a valid bearer token is required")(scope, receive, send)
            return
        path = scope["path"]
        is_large = path.endswith(("/step", "/batch", "/load")) or path.startswith("/agentgym/")
        limit = self._max_action_bytes if is_large else self._max_body_bytes
        length = headers.get(b"content-length")
        if length is not None and (not length.isdigit() or int(length[:20]) > limit):
            detail = f"request bodies are limited to {limit} bytes"
            await _refusal(413, detail)(scope, receive, send)
            return
        if length is None and b"transfer-encoding" in headers:
            receive = _limited(receive, limit)
        await self._app(scope, receive, send)

    def _no_socket(self, scope: Scope) -> Response | None:
        """Return the refusal of a WebSocket; None if it is allowed.

        A browser opens a WebSocket for any page and sends the page's origin. Other origins are
        refused.
        """
        headers = dict(scope["headers"])
        if not self._is_allowed(scope["path"], headers):
            return _refusal(401, "a valid bearer token is required")
        origin = headers.get(b"origin")
        host = headers.get(b"host", b"")
        if origin is not None and urlsplit(origin.decode("latin-1")).netloc.encode() != host:
            return _refusal(403, "pages of other origins may not open a WebSocket here")
        return None

    def _counted(self, scope: Scope, send: Send) -> Send:
        """Return a `send` that counts answers which refuse a request."""

        async def counting(message: Message) -> None:
            """Send a message, and count it if it refuses the request."""
            if reason := REFUSED.get(message.get("status", 0)):
                self._refusals.note(scope["client"], reason)
            await send(message)

        return counting

    def _is_allowed(self, path: str, headers: dict[bytes, bytes]) -> bool:
        """Return whether a path is open to all, or the request has the token."""
        if self._token is None or path in OPEN_PATHS:
            return True
        return hmac.compare_digest(token_in(headers.get(b"authorization", b"")), self._token)


def _limited(receive: Receive, max_bytes: int) -> Receive:
    """Return a `receive` that raises 413 once a body of undeclared length grows too large."""
    num_bytes = 0

    async def receive_limited() -> Message:
        """Return the next part of the body; 413 once it is too large."""
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise HTTPException(413, "the request body is too large")
        return message

    return receive_limited


def _refusal(status: int, detail: str) -> Response:
    """Return the response with which a request is refused."""
    response = json_response({"detail": detail}, status=status)
    if status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


RETRY_AFTER_S = 1
MAX_REASON_CHARS = 500
SIGN_S = 0.5  # Seconds between two bytes to a client that holds a presence connection.

STATUS_CODES: dict[type[Exception], int] = {
    BadBody: 422,
    UnknownEnv: 404,
    UnknownItem: 404,
    BadState: 422,
    StateUnsaved: 422,
    SessionUnknown: 404,
    SessionConflict: 409,
    CapacityFull: 429,
    ServicePaused: 424,  # "Failed dependency". The entry precedes its base class.
    EnvRaised: 500,
    HubDraining: 503,
    EnvTimeout: 504,
}


def make_app(
    sessions: Sessions,
    registry: Registry,
    *,
    token: str | None,
    step_timeout_s: float,
    max_action_bytes: int = DEFAULT_ACTION_MIB * MIB,
    agentgym: AgentGymLimits | None = None,
) -> FastAPI:
    """Return the hub's application, which also ends idle `sessions`.

    Every route but /healthz and /readyz requires `token`, unless it is None. `step_timeout_s` is
    only reported to clients. An action of more than `max_action_bytes` is refused; its client then
    requests the answer to an invalid action. `agentgym` None: the idle limit of the sessions, and
    no queue.
    """
    app = FastAPI(title="Longstride environment hub", lifespan=_lifespan_of(sessions))
    app.state.refusals = refusals = Refusals()
    app.state.max_action_bytes = max_action_bytes
    app.state.token = token
    app.add_middleware(
        AuthMiddleware,
        token=token,
        max_body_bytes=FIELDS_BYTES,
        max_action_bytes=max_action_bytes + FIELDS_BYTES,
        refusals=refusals,
    )
    for error, status in STATUS_CODES.items():
        app.add_exception_handler(error, _failure(status))
    app.add_exception_handler(ClientDisconnect, _failure(400))  # The client has disconnected.
    metrics = HubMetrics(sessions, refusals)
    _add_catalogue_routes(app, sessions, registry, metrics, step_timeout_s=step_timeout_s)
    _add_session_routes(app, sessions)
    _add_presence_route(app, sessions)
    _add_inspection_routes(app, sessions)
    _add_batch_routes(app, sessions)
    hub = HubParts(
        app=app,
        sessions=sessions,
        registry=registry,
        limits=agentgym or AgentGymLimits(idle_s=sessions.idle_s),
    )
    for mount in load_extensions("routes"):
        mount(hub)
    return app


def _lifespan_of(sessions: Sessions) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return the context that watches idle sessions and memory, and ends sessions at the end."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        """Watch idle sessions, memory and services; at the end, stop the sessions."""
        upkeep = [
            asyncio.create_task(sessions.watch_idle()),
            asyncio.create_task(sessions.placement.watch_memory()),
        ]
        if sessions.services.names:
            upkeep.append(asyncio.create_task(sessions.services.watch()))
        for task in upkeep:
            task.add_done_callback(_log_end)
        yield
        for task in upkeep:
            task.cancel()
        await asyncio.gather(*upkeep, return_exceptions=True)
        await sessions.stop()

    return lifespan


def _log_end(task: asyncio.Task[None]) -> None:
    """Log the failure of a maintenance task."""
    if not task.cancelled():
        logger.error("maintenance task ended reason=%r", task.exception())


def _add_catalogue_routes(
    app: FastAPI,
    sessions: Sessions,
    registry: Registry,
    hub_metrics: HubMetrics,
    *,
    step_timeout_s: float,
) -> None:
    """Add the routes about the hub and its environments."""

    @app.get("/healthz", tags=["hub"])
    async def healthz() -> Response:
        counts = {f"num_{name}": num for name, num in sorted(sessions.counts.items())}
        counts["num_steps"] = sessions.num_steps
        status = "draining" if sessions.is_draining else "ok"
        num_workers = len(sessions.placement.workers())
        state = {"status": status, "num_sessions": len(sessions), "num_workers": num_workers}
        moved = sessions.placement.inline.moved
        state |= {"moved_to_workers": moved} if moved else {}
        paused = sessions.services.paused
        state |= {"paused": sorted(paused)} if paused else {}
        return json_response(state | {"step_timeout_s": step_timeout_s} | counts)

    @app.get("/readyz", tags=["hub"], responses=_fails(503))
    async def readyz() -> Response:
        if sessions.is_draining:
            raise HubDraining("the hub is stopping and accepts no new sessions")
        return json_response({"status": "ready"})

    @app.get("/metrics", tags=["hub"])
    async def metrics() -> Response:
        return Response(hub_metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/v1/envs", tags=["catalogue"])
    async def list_envs(subset: Annotated[list[str] | None, Query()] = None) -> Response:
        catalogue = await sessions.distances.catalogue(subset or ())
        for name, entry in catalogue.items():
            entry["num_places"] = sessions.placement.capacity(registry.spec(name))
        return json_response(catalogue)

    @app.get("/v1/envs/{env}/tasks", tags=["catalogue"], responses=_fails(404))
    async def list_tasks(env: str) -> Response:
        tasks = registry.spec(env).tasks
        lists = {name: {"train": task.train, "test": task.test} for name, task in tasks.items()}
        return json_response(lists)


def _add_session_routes(app: FastAPI, sessions: Sessions) -> None:
    """Add the routes of single sessions."""

    @app.post(
        "/v1/sessions",
        status_code=201,
        response_model=Created,
        responses=_fails(404, 422, 424, 429, 500, 503, 504),
        openapi_extra=body_of(CreateRequest),
        tags=["sessions"],
    )
    async def create(request: Request) -> Response:
        body = parse_body(CreateRequest, await request.body())
        return json_response(await _create(sessions, body), status=201)

    @app.post(
        "/v1/sessions/{session_id}/step",
        response_model=Stepped,
        responses=_fails(404, 409, 422, 424, 500, 504),
        openapi_extra=body_of(StepRequest),
        tags=["sessions"],
    )
    async def step(session_id: str, request: Request) -> Response:
        body = parse_body(StepRequest, await request.body())
        return json_response(await _step(sessions, session_id, body))

    @app.post(
        "/v1/sessions/{session_id}/load",
        status_code=204,
        responses=_fails(404, 409, 422, 424, 500, 504),
        openapi_extra=body_of(LoadRequest),
        tags=["sessions"],
    )
    async def load(session_id: str, request: Request) -> Response:
        await sessions.load(session_id, parse_body(LoadRequest, await request.body()).saved)
        return Response(status_code=204)

    @app.delete(
        "/v1/sessions/{session_id}", status_code=204, responses=_fails(404, 500), tags=["sessions"]
    )
    async def delete(session_id: str) -> Response:
        await sessions.delete(session_id)
        return Response(status_code=204)


def _add_presence_route(app: FastAPI, sessions: Sessions) -> None:
    """Add the route by which a client shows that it is alive."""

    async def signs(owner: str) -> AsyncIterator[bytes]:
        """Yield a line at regular intervals until the hub drains."""
        with sessions.owned_by(owner):
            while not sessions.is_draining:
                yield b"\n"
                await asyncio.sleep(SIGN_S)

    # Not in the schema: the response lasts as long as the owner, which tools do not expect.
    @app.get("/v1/presence/{owner}", include_in_schema=False)
    async def presence(owner: str) -> StreamingResponse:
        """Stream until the connection closes; then the owner's sessions end."""
        return StreamingResponse(signs(owner[:MAX_NAME_CHARS]), media_type="text/plain")


def _add_inspection_routes(app: FastAPI, sessions: Sessions) -> None:
    """Add the routes that show the state of a session."""
    fails = _fails(404, 500, 504)
    path = "/v1/sessions/{session_id}"

    @app.get(f"{path}/hint", response_model=Hint, responses=fails, tags=["sessions"])
    async def hint(session_id: str) -> Response:
        valid_actions, expert_action = await sessions.hint(session_id)
        return json_response({"valid_actions": valid_actions, "expert_action": expert_action})

    @app.get(f"{path}/render", response_model=Rendered, responses=fails, tags=["sessions"])
    async def render(session_id: str) -> Response:
        text, fingerprint = await sessions.render(session_id)
        return json_response({"text": text, "fingerprint": fingerprint})

    @app.get(f"{path}/picture", response_model=Pictured, responses=fails, tags=["sessions"])
    async def picture(session_id: str) -> Response:
        drawn = await sessions.detail(session_id, "picture")
        if drawn is None:
            drawn = (await sessions.render(session_id))[0]
        return json_response({"picture": drawn})


def _add_batch_routes(app: FastAPI, sessions: Sessions) -> None:
    """Add the routes that take a list of entries."""

    async def create(entry: object) -> dict[str, Any]:
        return await _create(sessions, parse_entry(CreateRequest, entry))

    async def step(entry: object) -> dict[str, Any]:
        body = parse_entry(BatchStepRequest, entry)
        return await _step(sessions, body.session_id, body)

    async def close(entry: object) -> dict[str, Any]:
        await sessions.delete(parse_entry(CloseRequest, entry).session_id)
        return {}

    @app.post("/v1/sessions/batch", response_model=list[CreatedEntry], **_batch_of(CreateRequest))
    async def create_batch(request: Request) -> Response:
        return await _each(request, create, status=201)

    @app.post("/v1/step/batch", response_model=list[SteppedEntry], **_batch_of(BatchStepRequest))
    async def step_batch(request: Request) -> Response:
        return await _each(request, step, status=200)

    @app.post("/v1/close/batch", response_model=list[Entry], **_batch_of(CloseRequest))
    async def close_batch(request: Request) -> Response:
        return await _each(request, close, status=204)


def _batch_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI options of a batch route."""
    openapi = body_of(model, is_list=True)
    return {"responses": _fails(422), "openapi_extra": openapi, "tags": ["batch"]}


async def _each(
    request: Request, work: Callable[[object], Coroutine[Any, Any, dict[str, Any]]], *, status: int
) -> Response:
    """Return the answer to a batch, whose entries are processed concurrently."""
    entries = parse_batch(await request.body())
    return json_response(
        await asyncio.gather(*(_entry(work(each), status=status) for each in entries))
    )


async def _create(sessions: Sessions, body: CreateRequest) -> dict[str, Any]:
    """Create a session; return the body of the answer."""
    session_id, observation = await sessions.create(
        body.env, body.item_id, seed=body.seed, style=body.style, owner=body.owner
    )
    messages = sessions.first_messages(session_id)
    created = {
        "session_id": session_id,
        "observation": observation,
        "state": sessions.first_state(session_id),
        "start_score": sessions.start_score(body.env),
    }
    created |= {"messages": messages} if messages else {}
    tools = sessions.item_tools(session_id)
    created |= {"tools": tools} if tools else {}
    created |= {"can_save": True} if sessions.can_save(session_id) else {}
    created |= {"is_repeatable": True} if sessions.registry.spec(body.env).is_repeatable else {}
    num_seats = sessions.registry.spec(body.env).seats
    return created | ({"seat": 0, "num_seats": num_seats} if num_seats > 1 else {})


async def _step(sessions: Sessions, session_id: str, body: StepRequest) -> dict[str, Any]:
    """Perform a step; return the body of the answer."""
    result = await sessions.step(session_id, body.action, body.seq, num_bytes=body.num_bytes)
    answer = result.as_dict()
    if body.save and not result.done:
        try:
            answer["saved"] = await sessions.save(session_id)
        except StateUnsaved as error:
            answer["unsaved"] = str(error)[:MAX_REASON_CHARS]
    return answer


async def _entry(work: Coroutine[Any, Any, dict[str, Any]], *, status: int) -> dict[str, Any]:
    """Return one entry of a batch's answer; its failure does not affect other entries."""
    try:
        return {"status": status} | await work
    except tuple(STATUS_CODES) as error:
        return {"status": _status_of(error), "detail": str(error)}


def _status_of(error: Exception) -> int:
    """Return the HTTP status of an error."""
    return next(status for kind, status in STATUS_CODES.items() if isinstance(error, kind))


def _fails(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entries of a route's failures, including those of AuthMiddleware."""
    return {status: {"model": Failed} for status in (401, 413, *statuses)}


def _failure(status: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return a handler that answers one type of error with its text."""

    async def handle(_: Request, error: Exception) -> Response:
        response = json_response({"detail": str(error)}, status=status)
        if status in (429, 503):
            response.headers["Retry-After"] = str(RETRY_AFTER_S)
        return response

    return handle

"""The page `/metrics`: a route of the dashboard, or a server of its own beside a run."""

import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse

from envhub.http.exposition import CONTENT_TYPE, MetricsPage
from tools.dashboard.prometheus.run_metrics import RunMetrics

PATH = "/metrics"
Next = Callable[[Request], Awaitable[Response]]


def add_metrics_page(app: FastAPI, runs: Callable[[], list[Path]]) -> None:
    """Add the page to an application. `runs` returns the folders of the runs at each scrape."""
    page = MetricsPage(RunMetrics(runs))

    def metrics() -> Response:
        return Response(page.text(), media_type=CONTENT_TYPE)

    app.add_api_route(PATH, metrics)


def make_metrics_app(runs: Callable[[], list[Path]], *, token: str) -> FastAPI:
    """Return an application with only this page. Each request needs the bearer token."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def check_token(request: Request, call_next: Next) -> Response:
        """Answer 401 to a request without the token."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(given.encode(), token.encode()):
            return await call_next(request)
        headers = {"WWW-Authenticate": "Bearer"}
        return PlainTextResponse("The bearer token is missing or wrong.\n", 401, headers)

    app.middleware("http")(check_token)
    add_metrics_page(app, runs)
    return app

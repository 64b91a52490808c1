"""The five sites as one application, selected by the Host header.

A visitor names its session in the header `X-Longstride-Session`. Requests without it share a demo
session: `curl -H 'Host: shopping.test' http://127.0.0.1:PORT/`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, Field
from starlette.routing import Host

from envhub.envs.minisites.gitlab.pages import GITLAB
from envhub.envs.minisites.maps.pages import MAPS
from envhub.envs.minisites.reddit.pages import REDDIT
from envhub.envs.minisites.shop.admin_pages import CMS
from envhub.envs.minisites.shop.store_pages import SHOPPING
from envhub.envs.minisites.site import missing_page
from envhub.envs.minisites.store import Store

SITES = {f"{site.name}.test": site for site in (SHOPPING, CMS, MAPS, GITLAB, REDDIT)}


class DropBody(BaseModel):
    """The session to drop."""

    session: str = Field(min_length=1, max_length=200)


class ResetBody(DropBody):
    """The session to reset, and the seed of its world."""

    seed: int = Field(ge=0, lt=2**31)


def make_app() -> FastAPI:
    """Return an application with its own sessions; run it in one process and one event loop."""
    store = Store()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        store.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.store = store

    @app.post("/__reset__")
    async def reset(body: ResetBody) -> dict[str, int]:
        store.reset(body.session, body.seed)
        return {"num_sessions": store.num_sessions}

    @app.post("/__drop__")
    async def drop(body: DropBody) -> dict[str, bool]:
        return {"dropped": store.drop(body.session)}

    @app.exception_handler(404)
    async def missing(request: Request, error: Exception) -> Response:
        return missing_page()

    app.router.routes.extend(Host(host, app=site.router) for host, site in SITES.items())
    return app

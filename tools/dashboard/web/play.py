"""The routes of the Play view: a person at the page or a policy plays episodes step by step.

Only these routes accept a POST. It must have the page's own origin, so that no other site can play.
"""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from common.config.actor import AgentFormat
from common.errors import EnvError
from tools.dashboard.reading.run_source import COMPACT, RunSource

if TYPE_CHECKING:
    from tools.dashboard.interactive import InteractiveEpisodes

PATH = "/api/play/"
MAX_CHARS = 20_000  # Maximum length of an action.
EpisodeReply = Mapping[str, Any]


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
            recorded = await asyncio.to_thread(run.recorded, id)
        except KeyError:
            raise HTTPException(404, f"{id:.200}: run {name} has no such episode.") from None
        return await table.redo(recorded, run.config())

    app.add_api_route(f"{PATH}environments", table.environments)
    app.add_api_route("/api/run/{name}/pictures", pictures)
    for word, answer in (("open", open_one), ("step", step), ("ask", ask), ("close", close)):
        app.add_api_route(f"{PATH}{word}", answer, methods=["POST"])
    app.add_exception_handler(EnvError, _answer_failure)


def _run(request: Request, name: str) -> RunSource:
    """Return a run by its name; 404 if there is none, or for a file of conversations."""
    try:
        source = request.app.state.watch.ask(name)
    except KeyError:
        raise HTTPException(404, f"{name:.200}: no such run.") from None
    if not isinstance(source, RunSource):
        raise HTTPException(404, f"{name:.200} is a conversation file, which cannot be played.")
    return source


def _answer_failure(_: Request, error: Exception) -> JSONResponse:
    """Return a 502 with the text of an environment's failure."""
    return JSONResponse({"error": str(error)}, status_code=502)

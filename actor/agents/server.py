"""The policy behind the APIs of OpenAI and Anthropic, for agents that run their own loop.

The API key says which episode a request is of. Beside the API, `GET /env` tells the task and
`POST /env/step {"action": text}` acts in the episode's environment, and `POST /env/end` ends it. An
agent that plays many asks `POST /episodes/...` for the next one. Served to this machine only.
"""

import asyncio
import json
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

from aiohttp import web

from actor.agents.chat_api import BARE_API, CHAT_API
from actor.agents.episode import AgentEpisode
from actor.agents.messages_api import MESSAGES_API, anthropic_error
from actor.agents.requests import Api, ApiError, Asked, Event, invalid, openai_error
from actor.agents.responses_api import RESPONSES_API
from actor.rollout.episode import PolicyFailed
from common.errors import EnvError, LongstrideError

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 * 1024 * 1024
BODY_S = 30.0  # for a request to arrive whole
NUM_ENDED = 10_000  # keys of episodes that ended which are still known as such
ANTHROPIC = "/v1/messages"
APIS = {
    "/v1/chat/completions": CHAT_API,
    "/v1/completions": BARE_API,
    "/v1/responses": RESPONSES_API,
    ANTHROPIC: MESSAGES_API,
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# whether the agent still waits for an answer -> its next episode, None if none comes
Take = Callable[[Callable[[], bool]], Awaitable[AgentEpisode | None]]


class AgentServer:
    """Serves all agents of one actor.

    Example:
        await server.start()
        with server.serving(episode):
            ...  # an agent uses server.url and episode.key
    """

    def __init__(self) -> None:
        """Make one that does not listen yet."""
        self.url = ""
        self.refused: Counter[str] = Counter()  # requests, by the error's code
        self.takers: dict[str, Take] = {}  # by the key in an agent's address of episodes
        self._episodes: dict[str, AgentEpisode] = {}
        self._ended: deque[str] = deque(maxlen=NUM_ENDED)
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._answered])
        for path, api in APIS.items():
            app.router.add_post(path, partial(self._policy, api))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/env", self._task)
        app.router.add_post("/env/step", self._step)
        app.router.add_post("/env/end", self._end)
        app.router.add_post("/episodes/{key}", self._next)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def start(self) -> None:
        """Listen on a free port of this machine."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port: int = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"

    async def close(self) -> None:
        """Stop listening."""
        await self._runner.cleanup()

    @contextmanager
    def serving(self, episode: AgentEpisode) -> Iterator[None]:
        """Answer the episode's key; afterwards it is told that the episode has ended."""
        self._episodes[episode.key] = episode
        try:
            yield
        finally:
            del self._episodes[episode.key]
            self._ended.append(episode.key)

    @web.middleware
    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn errors into the API's shape, and count them; none is left to the agent alone."""
        answering = asyncio.ensure_future(handler(request))
        try:
            await asyncio.wait([answering])
        finally:
            answering.cancel()
        failure = answering.exception()
        if failure is None:
            return await answering
        episode = self._episodes.get(_key(request))
        told = _told(request, failure, episode)
        self.refused[told.code] += 1
        if episode is not None:
            episode.refused[told.code] += 1
        shape = anthropic_error if request.path.startswith(ANTHROPIC) else openai_error
        return web.json_response(shape(told), status=told.status)

    def _episode(self, request: web.Request) -> AgentEpisode:
        key = _key(request)
        episode = self._episodes.get(key)
        if episode is None:
            if key in self._ended:
                raise ApiError(410, "episode_ended", "this key's episode has ended")
            raise ApiError(401, "invalid_api_key", "this key is no episode's")
        return episode

    async def _policy(self, api: Api, request: web.Request) -> web.Response:
        episode = self._episode(request)
        body = await _json(request)
        if not isinstance(body, dict):
            raise ApiError(400, "invalid_body", "the body is not a JSON object")
        try:
            asked: Asked = api.read(body)
        except RecursionError as error:
            raise ApiError(400, "invalid_body", "the body is nested too deep") from error
        reply = api.reply(asked, await episode.answer(asked))
        if not body.get("stream"):
            return web.json_response(reply)
        text = "".join(map(_event_text, api.events(asked, reply)))
        return web.Response(text=text, content_type="text/event-stream")

    async def _models(self, request: web.Request) -> web.Response:
        self._episode(request)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "longstride"}
        return web.json_response({"object": "list", "data": [model]})

    async def _task(self, request: web.Request) -> web.Response:
        return web.json_response(self._episode(request).first())

    async def _step(self, request: web.Request) -> web.Response:
        episode = self._episode(request)
        body = await _json(request)
        action = body.get("action") if isinstance(body, dict) else None
        if not isinstance(action, str):
            raise invalid("action: must be a text", "action")
        return web.json_response(await episode.step(action))

    async def _end(self, request: web.Request) -> web.Response:
        episode = self._episode(request)
        body = await _json(request) if request.can_read_body else {}
        error = body.get("error", "") if isinstance(body, dict) else None
        if not isinstance(error, str):
            raise invalid("error: must be a text", "error")
        await episode.end(error)
        return web.json_response({})

    async def _next(self, request: web.Request) -> web.Response:
        take = self.takers.get(request.match_info["key"])
        if take is None:
            raise ApiError(401, "invalid_api_key", "this address is no running agent's")
        episode = await take(
            lambda: not (request.transport is None or request.transport.is_closing())
        )
        return (
            web.Response(status=204) if episode is None else web.json_response(self.told(episode))
        )

    def told(self, episode: AgentEpisode) -> dict[str, object]:
        """Return where an episode is played, and what is to be done in it."""
        where = {"base_url": f"{self.url}/v1", "api_key": episode.key, "env_url": f"{self.url}/env"}
        where["anthropic_url"] = self.url  # its package adds /v1
        return {**where, "episode": episode.lease.episode_id, **episode.first()}


def _key(request: web.Request) -> str:
    if key := request.headers.get("x-api-key", ""):
        return key
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


async def _json(request: web.Request) -> object:
    try:
        async with asyncio.timeout(BODY_S):
            return await request.json()
    except TimeoutError as error:
        text = f"the body is not whole within {BODY_S:g} s"
        raise ApiError(408, "request_timeout", text) from error
    except (json.JSONDecodeError, UnicodeDecodeError, LookupError, RecursionError) as error:
        raise ApiError(400, "invalid_body", f"the body is not JSON: {error}") from error
    except (OSError, web.PayloadAccessError, web.RequestPayloadError) as error:
        raise ApiError(400, "incomplete_body", f"the body is not whole: {error}") from error


def _told(request: web.Request, error: BaseException, episode: AgentEpisode | None) -> ApiError:
    """Return what an agent is told of an error; whoever plays its episode is told of others."""
    if isinstance(error, ApiError):
        return error
    place = f"{request.method} {request.path}"
    if isinstance(error, web.HTTPException):  # no such route, a body that is too large
        code = (error.reason or "error").lower().replace(" ", "_")
        return ApiError(error.status, code, f"{place}: {error.reason}")
    if not isinstance(error, LongstrideError | TimeoutError | PolicyFailed):
        logger.error("request failed unexpectedly request=%s", place, exc_info=error)
        error = PolicyFailed(f"{place}: {type(error).__name__}: {error}")
    if episode is not None:
        episode.fail(error)
    code = "environment_failed" if isinstance(error, EnvError) else "policy_failed"
    return ApiError(503, code, str(error))


def _event_text(event: Event) -> str:
    name, told = event
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(told) if told else '[DONE]'}\n\n"

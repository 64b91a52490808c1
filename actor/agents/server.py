"""Serves the policy with the APIs of OpenAI and Anthropic, for agents that run their own loop.

The API key identifies the episode of a request. `GET /env` returns the task, `POST /env/step
{"action": text}` acts in the episode's environment, and `POST /env/end` ends the episode. A
long-lived agent requests its next episode with `POST /episodes/...`. The server listens on this
machine only.
"""

import asyncio
import json
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

from actor.agents.episode import AgentEpisode
from actor.agents.http import EVENTS, AgentConnection, AgentRequest, Answering, response
from actor.agents.messages_api import MESSAGES_API, anthropic_error
from actor.agents.responses_api import RESPONSES_API
from actor.api.chat_api import CHAT_API, COMPLETION_API
from actor.api.requests import Api, ApiError, PolicyRequest, event_text, invalid, openai_error
from actor.rollout.episode import PolicyFailed
from common.errors import EnvError, LongstrideError
from common.host.loopback import loopback
from common.wire.addresses import bracketed

logger = logging.getLogger(__name__)

NUM_ENDED = 10_000  # Number of ended episodes whose keys are remembered.
CLOSE_S = 1.0
ANTHROPIC = "/v1/messages"
APIS = {
    "/v1/chat/completions": CHAT_API,
    "/v1/completions": COMPLETION_API,
    "/v1/responses": RESPONSES_API,
    ANTHROPIC: MESSAGES_API,
}
EPISODES = "/episodes/"
Handler = Callable[[AgentRequest], Awaitable[bytes]]

# (whether the agent still waits) -> its next episode; None: there is none yet
Take = Callable[[Callable[[], bool]], Awaitable[AgentEpisode | None]]


class AgentServer:
    """Serves all agents of one actor.

    Example:
        await server.start()
        with server.serving(episode):
            ...  # an agent uses server.url and episode.key
    """

    def __init__(self) -> None:
        """Create the server; `start` opens its port."""
        self.url = ""
        self.refused: Counter[str] = Counter()  # error code -> number of requests
        self.takers: dict[str, Take] = {}  # key in the URL of an agent's episodes -> its `Take`
        self._episodes: dict[str, AgentEpisode] = {}
        self._ended: deque[str] = deque(maxlen=NUM_ENDED)
        self._handlers: dict[str, dict[str, Handler]] = {  # path -> method -> handler
            **{path: {"POST": partial(self._sample_answer, api)} for path, api in APIS.items()},
            "/v1/models": {"GET": self._list_models},
            "/env": {"GET": self._send_task},
            "/env/step": {"POST": self._step},
            "/env/end": {"POST": self._end_episode},
        }
        self._answering = Answering(answer=self._answer, failed=self._failed)
        self._listening: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen on a free port of this machine."""
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(
            lambda: AgentConnection(self._answering), loopback(), 0, backlog=1024
        )
        port: int = self._listening.sockets[0].getsockname()[1]
        self.url = f"http://{bracketed(loopback())}:{port}"

    async def close(self) -> None:
        """Stop listening. Pending requests get no answer."""
        if self._listening is not None:
            self._listening.close()
            for each in list(self._answering.connections):
                each.close()
            async with asyncio.timeout(CLOSE_S):
                await self._listening.wait_closed()

    @contextmanager
    def serving(self, episode: AgentEpisode) -> Iterator[None]:
        """Accept the episode's key inside the context. Later requests get a 410."""
        self._episodes[episode.key] = episode
        try:
            yield
        finally:
            del self._episodes[episode.key]
            self._ended.append(episode.key)

    async def _answer(self, request: AgentRequest) -> bytes:
        """Return the response to any request, by its path and method. Raises: ApiError."""
        if request.refusal is not None:
            raise request.refusal
        path = request.path
        if path.startswith(EPISODES) and request.method == "POST":
            return await self._next_episode(request)
        handlers = self._handlers.get(path)
        if handlers is None:
            raise ApiError(404, "not_found", f"{request.method} {path}: Not Found")
        if request.method not in handlers:
            allowed = ", ".join(handlers)
            text = f"{request.method} {path}: Method Not Allowed; use {allowed}"
            raise ApiError(405, "method_not_allowed", text)
        return await handlers[request.method](request)

    def _failed(self, request: AgentRequest, failure: BaseException) -> bytes:
        """Return an error in the API's format, and count it for the episode."""
        episode = self._episodes.get(request.key)
        answered = _error_for(request, failure, episode)
        self.refused[answered.code] += 1
        if episode is not None:
            episode.refused[answered.code] += 1
        shape = anthropic_error if request.path.startswith(ANTHROPIC) else openai_error
        return response(json.dumps(shape(answered)), status=answered.status)

    def _episode(self, request: AgentRequest) -> AgentEpisode:
        """Return the episode that a request's key belongs to. Raises: ApiError."""
        key = request.key
        episode = self._episodes.get(key)
        if episode is None:
            if key in self._ended:
                raise ApiError(410, "episode_ended", "the episode of this API key has ended")
            raise ApiError(401, "invalid_api_key", "this API key belongs to no episode")
        return episode

    async def _sample_answer(self, api: Api, request: AgentRequest) -> bytes:
        """Return an answer of the policy in the format of an API. Raises: ApiError."""
        episode = self._episode(request)
        body = _json(request)
        if not isinstance(body, dict):
            raise ApiError(400, "invalid_body", "the request body is not a JSON object")
        try:
            asked: PolicyRequest = api.read(body)
        except RecursionError as error:
            raise ApiError(400, "invalid_body", "the request body is nested too deeply") from error
        reply = api.reply(asked, await episode.answer(asked))
        if not body.get("stream"):
            return response(json.dumps(reply))
        return response("".join(map(event_text, api.events(asked, reply))), kind=EVENTS)

    async def _list_models(self, request: AgentRequest) -> bytes:
        """List the policy as the only model."""
        self._episode(request)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "longstride"}
        return response(json.dumps({"object": "list", "data": [model]}))

    async def _send_task(self, request: AgentRequest) -> bytes:
        return response(json.dumps(self._episode(request).first()))

    async def _step(self, request: AgentRequest) -> bytes:
        """Execute an action in the environment of an episode."""
        episode = self._episode(request)
        body = _json(request)
        action = body.get("action") if isinstance(body, dict) else None
        if not isinstance(action, str):
            raise invalid("action: must be a text", "action")
        return response(json.dumps(await episode.step(action)))

    async def _end_episode(self, request: AgentRequest) -> bytes:
        """End an episode at the agent's request."""
        episode = self._episode(request)
        body = _json(request) if request.body else {}
        error = body.get("error", "") if isinstance(body, dict) else None
        if not isinstance(error, str):
            raise invalid("error: must be a text", "error")
        await episode.end(error)
        return response("{}")

    async def _next_episode(self, request: AgentRequest) -> bytes:
        """Return the next episode for a long-lived agent; status 204 if there is none."""
        take = self.takers.get(request.path.removeprefix(EPISODES))
        if take is None:
            raise ApiError(401, "invalid_api_key", "this URL belongs to no running agent process")
        episode = await take(lambda: request.is_there)
        return (
            response(status=204)
            if episode is None
            else response(json.dumps(self.describe(episode)))
        )

    def describe(self, episode: AgentEpisode) -> dict[str, object]:
        """Return the addresses and the key of an episode, and its task."""
        where = {"base_url": f"{self.url}/v1", "api_key": episode.key, "env_url": f"{self.url}/env"}
        where["anthropic_url"] = self.url  # Anthropic's package appends /v1.
        return {**where, "episode": episode.lease.episode_id, **episode.first()}


def _json(request: AgentRequest) -> object:
    """Return the parsed body of a request. Raises: ApiError."""
    try:
        return json.loads(request.body)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, "invalid_body", f"the request body is not JSON: {error}") from error


def _error_for(
    request: AgentRequest, error: BaseException, episode: AgentEpisode | None
) -> ApiError:
    """Return the error for the agent. Errors that it did not cause also fail its episode."""
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, LongstrideError | TimeoutError | PolicyFailed):
        place = f"{request.method} {request.path}"
        logger.error("request failed unexpectedly request=%s", place, exc_info=error)
        error = PolicyFailed(f"{place}: {type(error).__name__}: {error}")
    if episode is not None:
        episode.fail(error)
    code = "environment_failed" if isinstance(error, EnvError) else "policy_failed"
    return ApiError(503, code, str(error))

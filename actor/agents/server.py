"""Serves the policy with the APIs of OpenAI and Anthropic, for agents that run their own loop.

The API key identifies the episode of a request. `GET /env` returns the task, `POST /env/step
{"action": text}` acts in the episode's environment, and `POST /env/end` ends the episode. A
long-lived agent requests its next episode with `POST /episodes/...`. The server listens on this
machine only, unless `actor.agents.host` names another address.
"""

import asyncio
import json
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from actor.agents.episode import AgentEpisode, ended_error
from actor.agents.http import AgentRequest, HttpServer
from actor.agents.keys import EpisodeKeys, digest_of, url_name
from actor.agents.listener import listen
from actor.agents.messages_api import MESSAGES_API, anthropic_error
from actor.agents.repeats import Repeats
from actor.agents.responses_api import RESPONSES_API
from actor.agents.strangers import MAX_STRANGERS, Strangers
from actor.agents.streams import EventStream
from actor.api.chat_api import CHAT_API, COMPLETION_API
from actor.api.requests import (
    AnswerHead,
    AnswerPart,
    Api,
    ApiError,
    ContextExceeded,
    Event,
    EventWriter,
    PolicyRequest,
    invalid,
    openai_error,
    whole_stream,
)
from actor.rollout.episode import PolicyFailed
from common.config.actor import AgentServerOptions
from common.errors import EnvError, LongstrideError
from common.wire.addresses import is_loopback

logger = logging.getLogger(__name__)

JSON = "application/json"
MODEL = "policy"  # Name of the policy in lists of models; requests may use any name.
ANTHROPIC = "/v1/messages"
MODELS = "/v1/models"
APIS = {
    "/v1/chat/completions": CHAT_API,
    "/v1/completions": COMPLETION_API,
    "/v1/responses": RESPONSES_API,
    ANTHROPIC: MESSAGES_API,
}
COUNTS = {  # Path -> the API of the counted request, and the object of its answer.
    "/v1/responses/input_tokens": (RESPONSES_API, {"object": "response.input_tokens"}),
    f"{ANTHROPIC}/count_tokens": (MESSAGES_API, {}),
}
EPISODES = "/episodes/"
Handler = Callable[[AgentRequest], Awaitable[Response]]

# (whether the agent still waits) -> its next episode; None: there is none yet
Take = Callable[[Callable[[], bool]], Awaitable[AgentEpisode | None]]


@dataclass(frozen=True, slots=True)
class Taker:
    """A process that requests episodes."""

    take: Take
    repeats: Repeats = field(default_factory=Repeats)


class StreamListener:
    """Writes the answers to a request into its stream as they are sampled."""

    def __init__(self, api: Api, asked: PolicyRequest, stream: EventStream) -> None:
        self.failure: Exception | None = None  # The error of a request without events.
        self._api = api
        self._asked = asked
        self._stream = stream
        self._writer: EventWriter | None = None
        self._events: list[Event] = []  # Those that wait for the first token.

    @property
    def has_begun(self) -> bool:
        """Whether the stream has an event."""
        return self._stream.begun.is_set()

    def open(self, heads: Sequence[AnswerHead]) -> None:
        """Prepare the stream of answers whose prompt is encoded."""
        self._writer = self._api.writer(self._asked, heads)
        self._events = self._writer.begin()

    def add(self, index: int, part: AnswerPart) -> None:
        """Send a part of an answer; the first one begins the stream, also without a text."""
        assert self._writer is not None
        self._send(self._writer.add(index, part) if part else [])

    async def sample(self, episode: AgentEpisode) -> None:
        """Sample the answers of an episode, to their end. Raises: as `AgentEpisode.answers`."""
        try:
            answers = await episode.answers(self._asked, self)
        except ContextExceeded as error:
            excess = self._api.excess(error)
            if not self._api.streams_excess:
                raise excess from error
            self.open([AnswerHead(number=secrets.token_hex(12), num_prompt=error.num_prompt)])
            self._send([])
            raise excess from error
        assert self._writer is not None
        self._send(self._writer.end(answers))
        self._stream.end(whole_stream(self._api, self._asked, answers))

    def fail(self, error: ApiError) -> None:
        """End the stream with an error."""
        if self._writer is not None:
            self._send(self._writer.fail(error))
        self._stream.end()

    def fail_early(self, error: Exception) -> None:
        """Report an error before the first event."""
        self.failure = error
        self._stream.end()

    def _send(self, events: Sequence[Event]) -> None:
        self._stream.write([*self._events, *events])
        self._events = []


class AgentServer:
    """Serves all agents of one actor.

    Example:
        await server.start()
        with server.serving(episode):
            ...  # an agent uses server.url and episode.key
    """

    def __init__(self, options: AgentServerOptions | None = None, *, num_ports: int = 1) -> None:
        """Create the server; `start` opens its port.

        Args:
            num_ports: number of ports from `options.port` on, of which the first free one is used.
        """
        self.url = ""
        self.refused: Counter[str] = Counter()  # error code -> number of requests
        self._options = options or AgentServerOptions()
        self._num_ports = num_ports
        self._takers: dict[bytes, Taker] = {}  # digest of the key in an address of episodes -> it
        self._keys = EpisodeKeys()
        self._streams: dict[EventStream, AgentEpisode] = {}  # Those whose answer is sampled.
        self._handlers: dict[str, dict[str, Handler]] = {  # path -> method -> handler
            **{path: {"POST": partial(self._sample_answer, api)} for path, api in APIS.items()},
            **{path: {"POST": partial(self._count_tokens, *how)} for path, how in COUNTS.items()},
            MODELS: {"GET": self._list_models},
            "/env": {"GET": self._send_task},
            "/env/step": {"POST": self._step},
            "/env/end": {"POST": self._end_episode},
        }
        is_private = is_loopback(self._options.host)
        self.http = HttpServer(
            self._answer,
            self._failed,
            admit=self._admit,
            strangers=Strangers() if is_private else Strangers(most=MAX_STRANGERS),
        )

    async def start(self) -> None:
        """Listen. Raises: ConfigError: the address, the port or the certificate cannot be used."""
        listener = listen(self._options, num_ports=self._num_ports)
        await self.http.start(listener.socket, listener.tls)
        self.url = listener.url

    async def close(self) -> None:
        """Stop listening. Pending requests get no answer."""
        await self.http.close()
        streams = list(self._streams)
        for stream in streams:
            stream.abort()
        await asyncio.gather(*(each.task for each in streams if each.task), return_exceptions=True)

    @contextmanager
    def serving(self, episode: AgentEpisode) -> Iterator[None]:
        """Accept the episode's key inside the context. Later requests get a 401."""
        self._keys.add(episode)
        try:
            yield
        finally:
            self._keys.remove(episode)
            for stream in [each for each, of in self._streams.items() if of is episode]:
                stream.abort()

    @contextmanager
    def taking(self, key: str, take: Take) -> Iterator[None]:
        """Accept requests for episodes inside the context, at the address with this key."""
        self._takers[digest_of(key)] = Taker(take)
        try:
            yield
        finally:
            del self._takers[digest_of(key)]

    def _admit(self, request: AgentRequest) -> None:
        """Check the key of a request before its body is read. Raises: ApiError."""
        path = request.path
        if path.startswith(EPISODES):
            self._taker(request)
        elif self._keys.find(request.key) is None and not self._keys.has_ended(request.key):
            self._keys.access(request)

    async def _answer(self, request: AgentRequest) -> Response:
        """Return the response to any request, by its path and method. Raises: ApiError."""
        path = request.path
        if path.startswith(EPISODES) and request.method == "POST":
            return await self._taker(request).repeats.answer(request, self._next_episode)
        is_model = path.startswith(f"{MODELS}/")
        handlers = {"GET": self._show_model} if is_model else self._handlers.get(path)
        if handlers is None:
            raise ApiError(404, "not_found", f"{request.method} {path}: Not Found")
        if request.method not in handlers:
            allowed = ", ".join(handlers)
            text = f"{request.method} {path}: Method Not Allowed; use {allowed}"
            raise ApiError(405, "method_not_allowed", text)
        if request.method != "POST":
            return await handlers[request.method](request)
        if (last := self._keys.last_answer(request)) is not None:
            return last
        return await self._keys.access(request).repeats.answer(request, handlers["POST"])

    def _failed(self, request: AgentRequest, failure: BaseException) -> Response:
        """Return an error in the API's format, and count it for the episode."""
        episode = self._keys.find(request.key)
        answered = _error_for(request, failure, episode)
        self._count_refusal(answered, episode)
        shape = anthropic_error if _is_anthropic(request) else openai_error
        return json_response(shape(answered), status=answered.status)

    def _count_refusal(self, error: ApiError, episode: AgentEpisode | None) -> None:
        """Count a refused request by its code."""
        self.refused[error.code] += 1
        if episode is not None:
            episode.refused[error.code] += 1

    def _episode(self, request: AgentRequest) -> AgentEpisode:
        """Return the episode that a request's key belongs to. Raises: ApiError."""
        return self._keys.access(request).episode

    def _taker(self, request: AgentRequest) -> Taker:
        """Return the agent process that asks for episodes at this address. Raises: ApiError."""
        taker = self._takers.get(digest_of(request.path.removeprefix(EPISODES)))
        if taker is None:
            raise self._keys.refuse_taker(request)
        return taker

    async def _sample_answer(self, api: Api, request: AgentRequest) -> Response:
        """Return an answer of the policy in the format of an API. Raises: ApiError."""
        episode = self._episode(request)
        asked = _read(api, request)
        if asked.is_streamed:
            return await self._stream_answer(api, asked, request, episode)
        try:
            return json_response(api.reply(asked, await episode.answers(asked)))
        except ContextExceeded as error:
            raise api.excess(error) from error

    async def _stream_answer(
        self, api: Api, asked: PolicyRequest, request: AgentRequest, episode: AgentEpisode
    ) -> EventStream:
        """Return a stream once it has an event. Raises: the error of a request without events."""
        stream = EventStream()
        listener = StreamListener(api, asked, stream)
        stream.task = asyncio.create_task(self._fill(listener, request, episode))
        self._streams[stream] = episode
        stream.task.add_done_callback(lambda _: self._streams.pop(stream))
        try:
            await stream.begun.wait()
        except asyncio.CancelledError:  # The server is closing.
            stream.abort()
            raise
        if listener.failure is not None:
            raise listener.failure
        return stream

    async def _fill(
        self, listener: "StreamListener", request: AgentRequest, episode: AgentEpisode
    ) -> None:
        """Sample the answers to a request into its stream."""
        try:
            await listener.sample(episode)
        except asyncio.CancelledError:
            if listener.has_begun:
                listener.fail(ended_error())
            else:
                listener.fail_early(ended_error())
            raise
        except Exception as error:  # noqa: BLE001 - the stream reports every failure
            if not listener.has_begun:
                listener.fail_early(error)
                return
            failure = _error_for(request, error, episode)
            self._count_refusal(failure, episode)
            listener.fail(failure)

    async def _count_tokens(
        self, api: Api, head: dict[str, Any], request: AgentRequest
    ) -> Response:
        """Return the number of tokens of a prompt, without an answer. Raises: ApiError."""
        episode = self._episode(request)
        num = episode.num_prompt_tokens(_read(api, request))
        return json_response({**head, "input_tokens": num})

    async def _list_models(self, request: AgentRequest) -> Response:
        """List the policy as the only model."""
        self._episode(request)
        model = _model(request)
        if not _is_anthropic(request):
            return json_response({"object": "list", "data": [model]})
        ends = {"first_id": model["id"], "last_id": model["id"]}
        return json_response({"data": [model], "has_more": False, **ends})

    async def _show_model(self, request: AgentRequest) -> Response:
        """Return the policy by its name. Raises: ApiError: it has another one."""
        self._episode(request)
        name = request.path.removeprefix(f"{MODELS}/")
        if name != MODEL:
            text = f"model {name:.80}: the only model is {MODEL}"
            raise ApiError(404, "model_not_found", text, "model")
        return json_response(_model(request))

    async def _send_task(self, request: AgentRequest) -> Response:
        return json_response(self._episode(request).first())

    async def _step(self, request: AgentRequest) -> Response:
        """Execute an action in the environment of an episode."""
        episode = self._episode(request)
        body = _json(request)
        action = body.get("action") if isinstance(body, dict) else None
        if not isinstance(action, str):
            raise invalid("action: must be a text", "action")
        return json_response(await episode.step(action))

    async def _end_episode(self, request: AgentRequest) -> Response:
        """End an episode at the agent's request."""
        episode = self._episode(request)
        body = _json(request) if request.content else {}
        error = body.get("error", "") if isinstance(body, dict) else None
        if not isinstance(error, str):
            raise invalid("error: must be a text", "error")
        await episode.end(error)
        return json_response({})

    async def _next_episode(self, request: AgentRequest) -> Response:
        """Return the next episode for a long-lived agent; status 204 if there is none."""
        episode = await self._taker(request).take(lambda: request.is_there)
        if episode is None:
            return Response(status_code=HTTPStatus.NO_CONTENT)
        return json_response(self.describe(episode))

    def describe(self, episode: AgentEpisode) -> dict[str, object]:
        """Return the addresses and the key of an episode, and its task."""
        number = episode.lease.episode_id
        url = f"{self.url}/episode/{url_name(number)}"
        where = {"base_url": f"{url}/v1", "api_key": episode.key, "env_url": f"{url}/env"}
        where["anthropic_url"] = url  # Anthropic's package appends /v1.
        return {**where, "episode": number, **episode.first()}


def json_response(content: object, *, status: int = 200) -> Response:
    """Return a response with JSON. The escapes of `json` keep characters that UTF-8 lacks."""
    return Response(json.dumps(content), status_code=status, media_type=JSON)


def _json(request: AgentRequest) -> object:
    """Return the parsed body of a request. Raises: ApiError."""
    try:
        return json.loads(request.content)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, "invalid_body", f"the request body is not JSON: {error}") from error


def _read(api: Api, request: AgentRequest) -> PolicyRequest:
    """Return the body of a request as a request to the policy. Raises: ApiError."""
    body = _json(request)
    if not isinstance(body, dict):
        raise ApiError(400, "invalid_body", "the request body is not a JSON object")
    try:
        return api.read(body)
    except RecursionError as error:
        raise ApiError(400, "invalid_body", "the request body is nested too deeply") from error


def _is_anthropic(request: AgentRequest) -> bool:
    """Return whether the client expects answers of Anthropic's API."""
    return request.path.startswith(ANTHROPIC) or "anthropic-version" in request.headers


def _model(request: AgentRequest) -> dict[str, Any]:
    """Return the policy as an entry of the API's list of models."""
    if _is_anthropic(request):
        made = {"display_name": MODEL, "created_at": "1970-01-01T00:00:00Z"}
        return {"type": "model", "id": MODEL, **made}
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": "longstride"}


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

"""The policy behind an OpenAI-compatible endpoint for agents that run their own loop.

The API key says which episode a request is of. Beside the API, `GET /env` tells the task and
`POST /env/step {"action": text}` acts in the episode's environment, and `POST /env/end` ends it. An
agent that plays many asks `POST /episodes/...` for the next one. Served to this machine only.
"""

import json
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from actor.agents.episode import AgentEpisode, Answer
from actor.agents.requests import ApiError, read_asked

MAX_BODY_BYTES = 64 * 1024 * 1024
NUM_ENDED = 10_000  # keys of episodes that ended which are still known as such

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
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completion)
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
    async def _answered(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Turn errors into the API's shape, and count them."""
        try:
            return await handler(request)
        except ApiError as error:
            answer = web.json_response(error.body, status=error.status)
            code = error.code
        except web.HTTPException as error:  # no such route, a body that is too large
            code = (error.reason or "error").lower().replace(" ", "_")
            told = ApiError(error.status, code, f"{request.method} {request.path}: {error.reason}")
            answer = web.json_response(told.body, status=error.status)
        self.refused[code] += 1
        if (episode := self._episodes.get(_key(request))) is not None:
            episode.refused[code] += 1
        return answer

    def _episode(self, request: web.Request) -> AgentEpisode:
        key = _key(request)
        episode = self._episodes.get(key)
        if episode is None:
            if key in self._ended:
                raise ApiError(410, "episode_ended", "this key's episode has ended")
            raise ApiError(401, "invalid_api_key", "this key is no episode's")
        return episode

    async def _chat(self, request: web.Request) -> web.Response:
        episode = self._episode(request)
        asked = read_asked(await _json(request), is_chat=True)
        answer = await episode.answer(asked)
        message = {"role": "assistant", "content": answer.text}
        choice = {"index": 0, "message": message, "finish_reason": _finish(answer)}
        return _reply("chat.completion", "chatcmpl", asked.model, choice, answer)

    async def _completion(self, request: web.Request) -> web.Response:
        episode = self._episode(request)
        asked = read_asked(await _json(request), is_chat=False)
        answer = await episode.answer(asked)
        choice = {"index": 0, "text": answer.text, "finish_reason": _finish(answer)}
        return _reply("text_completion", "cmpl", asked.model, choice, answer)

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
            raise ApiError(400, "invalid_value", "action: must be a text", "action")
        return web.json_response(await episode.step(action))

    async def _end(self, request: web.Request) -> web.Response:
        episode = self._episode(request)
        body = await _json(request) if request.can_read_body else {}
        error = body.get("error", "") if isinstance(body, dict) else None
        if not isinstance(error, str):
            raise ApiError(400, "invalid_value", "error: must be a text", "error")
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
        return {**where, "episode": episode.lease.episode_id, **episode.first()}


def _key(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


async def _json(request: web.Request) -> object:
    try:
        return await request.json()
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, "invalid_body", f"the body is not JSON: {error}") from error


def _finish(answer: Answer) -> str:
    return "stop" if answer.is_stopped else "length"


def _reply(
    kind: str, prefix: str, model: str, choice: dict[str, Any], answer: Answer
) -> web.Response:
    now = time.time()
    usage = {
        "prompt_tokens": answer.num_prompt,
        "completion_tokens": answer.num_sampled,
        "total_tokens": answer.num_prompt + answer.num_sampled,
    }
    head = {"id": f"{prefix}-{now:.6f}", "object": kind, "created": int(now), "model": model}
    return web.json_response({**head, "choices": [{**choice, "logprobs": None}], "usage": usage})

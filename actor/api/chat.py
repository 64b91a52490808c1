"""An actor's chat endpoint: its engine answers users of its machine who can read the run's keys."""

import asyncio
import contextlib
import hmac
import logging
import math
import os
import secrets
import socket
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web
from aiohttp.typedefs import Handler

from actor.api.chat_api import CHAT_API
from actor.api.chat_endpoints import ChatEndpoint, endpoint_path, remove_left
from actor.api.listening import stop_accepting
from actor.api.parts import AnswerComplete, PartialAnswer
from actor.api.prompts import (
    check_tools,
    cut_answer,
    encode_messages,
    log_hidden_thoughts,
    logprobs_of,
    matched,
    read_turn,
    thoughts_of,
)
from actor.api.requests import (
    AnswerHead,
    AnswerPart,
    ApiError,
    ContextExceeded,
    Event,
    PolicyAnswer,
    PolicyRequest,
    event_text,
    invalid,
    openai_error,
    read_limit,
    unsupported,
)
from actor.formats.renderer import Renderer
from actor.rollout.context import Turn
from common.config.actor import ActorSection
from common.config.run_config import RunConfig
from common.errors import ConfigError, EngineError
from common.host.loopback import IPV4, IPV6, family_of, loopback
from common.http import serving as limits
from common.store.run_dir import RunDir
from common.wire.addresses import bracketed
from common.wire.security import write_private

if TYPE_CHECKING:
    from actor.engine.engine import Engine

logger = logging.getLogger(__name__)


async def read_body(request: web.Request) -> dict[str, Any]:
    """Return the JSON object of a request. Raises: ApiError."""
    try:
        body = await request.json()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "invalid_body", f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "invalid_body", "the body is not a JSON object")
    return cast(dict[str, Any], body)


@web.middleware
async def with_api_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors of HTTP, such as an unknown path, in the API's format."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        code = HTTPStatus(error.status).phrase.lower().replace(" ", "_")
        text = f"{request.method} {request.path}: {error.text or error.reason}"
        body = openai_error(ApiError(error.status, code, text))
        allowed = {name: value for name, value in error.headers.items() if name == "Allow"}
        return web.json_response(body, status=error.status, headers=allowed)


def is_of_a_page(headers: Mapping[str, str], host: str | None) -> bool:
    """Return whether a request may come from a website in a browser (DNS rebinding included).

    Args:
        host: the host that the request names.
    """
    return "origin" in headers or host not in (IPV4, IPV6, "localhost")


EVENTS = "text/event-stream"
OTHER_ORIGIN = "requests from pages of other origins need an API key"
SCORE_PATHS = ("/v1/completions", "/tokenize", "/detokenize")
BANNED = -9999.0  # JSON has no -inf; vLLM's server writes the same number.
LARGEST_ID = 2**31
MAX_BODY_BYTES = 64 << 20  # A prompt of token ids is longer than its text.
MOST_TOP = 1024  # Most probable tokens at each position, at most.
MAX_SEED = 2**63 - 1
MAX_TEMPERATURE = 2.0
# Sampling fields that the engine is not given, with their values without effect.
FIXED = {
    "top_p": (None, 1, 1.0),
    "top_k": (None, -1, 0),
    "min_p": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the answers to one request are sampled."""

    temperature: float | None  # None: that of the actor's configuration.
    seed: int | None
    max_tokens: int  # Maximum tokens of an answer.


def read_sampling(body: dict[str, Any], actor: ActorSection) -> Sampling:
    """Return how a request wants its answers sampled. Raises: ApiError: a value is invalid."""
    for name, harmless in FIXED.items():
        if body.get(name) not in harmless:
            raise unsupported(name, body[name], "the policy samples without it")
    limit = read_limit(body, "max_completion_tokens", "max_tokens")
    return Sampling(
        temperature=_temperature(body),
        seed=_seed(body),
        max_tokens=actor.max_turn_tokens if limit is None else limit,
    )


def _temperature(body: dict[str, Any]) -> float | None:
    """Return the requested temperature; None: the configured one. Raises: ApiError."""
    value = body.get("temperature")
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_TEMPERATURE:
        text = f"temperature={value!r:.80}: a number in [0, {MAX_TEMPERATURE:g}]"
        raise invalid(text, "temperature")
    return float(value)


def _seed(body: dict[str, Any]) -> int | None:
    """Return the requested seed; None: no seed. Raises: ApiError."""
    seed = body.get("seed")
    if seed is None:
        return None
    if type(seed) is not int or abs(seed) > MAX_SEED:
        raise invalid(f"seed={seed!r:.80}: a whole number of 63 bits", "seed")
    return seed % (MAX_SEED + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Encodes conversations as episodes are encoded, samples, and decodes the answers."""

    engine: "Engine"
    renderer: Renderer
    actor: ActorSection
    key: str  # Key that a request must carry; "": no key.
    name: Callable[[int], str]  # version -> name of the policy
    numbers: "count[int]"

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer one chat completion. A request that is not obeyed gets a 400 with its field."""
        try:
            self.check_access(request)
            body = await read_body(request)
            asked = CHAT_API.read({**body, **dict.fromkeys(("temperature", "seed"))})
            return await self._response(request, asked, read_sampling(body, self.actor))
        except (ApiError, EngineError) as error:
            return _refusal(error)

    async def models(self, request: web.Request) -> web.Response:
        """List the policy as the only model, or return it by its name."""
        model = {"id": self.name(self.engine.version), "object": "model", "created": 0}
        model["owned_by"] = "longstride"
        asked = request.match_info.get("name")
        try:
            self.check_access(request)
            if asked not in (None, model["id"]):
                text = f"model {asked:.80}: the only model is {model['id']}"
                raise ApiError(404, "model_not_found", text, "model")
        except ApiError as error:
            return _refusal(error)
        if asked is not None:
            return web.json_response(model)
        return web.json_response({"object": "list", "data": [model]})

    async def _response(
        self, request: web.Request, asked: PolicyRequest, sampling: Sampling
    ) -> web.StreamResponse:
        """Return the response to a request. Raises: ApiError, EngineError."""
        asked = matched(asked)
        check_tools(self.renderer, asked)
        log_hidden_thoughts(self.renderer, asked)
        ids = encode_messages(self.renderer, asked.messages, tools=asked.tools)
        sampling = replace(
            sampling, max_tokens=self._max_answer_tokens(len(ids), sampling.max_tokens)
        )
        heads = [
            AnswerHead(number=f"chat:{next(self.numbers)}", num_prompt=len(ids))
            for _ in range(asked.num_answers)
        ]
        if asked.is_streamed:
            return await self._stream(request, asked, sampling, ids, heads)
        sampled = await asyncio.gather(
            *(self._answer(asked, sampling, ids, choice, head) for choice, head in enumerate(heads))
        )
        named = self._named(asked, max(version for _, version in sampled))
        return web.json_response(CHAT_API.reply(named, [answer for answer, _ in sampled]))

    def _named(self, asked: PolicyRequest, version: int) -> PolicyRequest:
        """Return a request whose answer has the name of a version."""
        return replace(asked, body={**asked.body, "model": self.name(version)})

    async def _stream(
        self,
        request: web.Request,
        asked: PolicyRequest,
        sampling: Sampling,
        ids: list[int],
        heads: list[AnswerHead],
    ) -> web.StreamResponse:
        """Send the answers to a request as the engine samples them.

        A client that leaves aborts the engine's requests.

        Raises: EngineError: before the first token. A later one ends the stream with its event.
        """
        named = self._named(asked, self.engine.version)
        writer = CHAT_API.writer(named, heads)
        events: asyncio.Queue[list[Event] | EngineError | None] = asyncio.Queue()

        def send(choice: int, part: AnswerPart) -> None:
            events.put_nowait(writer.add(choice, part))

        async def sample() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    answers = [
                        group.create_task(
                            self._answer(
                                named, sampling, ids, choice, head, on_part=partial(send, choice)
                            )
                        )
                        for choice, head in enumerate(heads)
                    ]
                events.put_nowait(writer.end([each.result()[0] for each in answers]))
            except* EngineError as error:
                events.put_nowait(EngineError(f"{error.exceptions[0]}"))
            finally:
                events.put_nowait(None)

        sampling_task = asyncio.create_task(sample())
        response = web.StreamResponse(headers={"Content-Type": EVENTS, "Cache-Control": "no-cache"})
        try:
            while (batch := await events.get()) is not None:
                if isinstance(batch, EngineError):
                    if not response.prepared:
                        raise batch
                    batch = writer.fail(ApiError(500, "policy_failed", f"{batch}"))
                if not response.prepared:
                    await response.prepare(request)
                    batch = [*writer.begin(), *batch]
                await response.write("".join(map(event_text, batch)).encode())
            await sampling_task  # Any other error of it breaks the stream off.
            await response.write_eof()
        except ConnectionError:
            logger.debug("a client left its stream request=%s", heads[0].number)
        finally:
            sampling_task.cancel()
            await asyncio.gather(sampling_task, return_exceptions=True)
        return response

    def _max_answer_tokens(self, num_prompt: int, max_tokens: int) -> int:
        """Return the limit of an answer: the request's limit, or the rest of the context.

        Raises: ApiError: neither the request's limit nor a turn fits.
        """
        most = self.actor.max_model_len
        needed = min(max_tokens, self.actor.max_turn_tokens)
        if num_prompt + needed > most:
            error = ContextExceeded(num_prompt=num_prompt, num_answer=needed, max_tokens=most)
            raise CHAT_API.excess(error)
        return min(max_tokens, most - num_prompt)

    async def _answer(
        self,
        asked: PolicyRequest,
        sampling: Sampling,
        ids: list[int],
        choice: int,
        head: AnswerHead,
        *,
        on_part: Callable[[AnswerPart], None] | None = None,
    ) -> tuple[PolicyAnswer, int]:
        """Return one answer, and the version that sampled its last token.

        Args:
            on_part: receives the parts of a stream; None: the request has no stream.
        """
        renderer = self.renderer if on_part is None else self.renderer.of_streams
        sent = PartialAnswer(renderer, asked, num_prompt=len(ids))

        def add(new: Turn) -> None:
            part = sent.add(new)
            if on_part is not None and part:
                on_part(part)

        try:
            turn = await self.engine.generate(
                ids,
                request_id=head.number,
                max_tokens=sampling.max_tokens,
                salt=lambda: f"chat v{self.engine.version}",
                seed=None if sampling.seed is None else (sampling.seed + choice) % (MAX_SEED + 1),
                temperature=sampling.temperature,
                on_tokens=add if on_part is not None or asked.stop else None,
            )
        except AnswerComplete:  # A stop text ended the answer.
            turn = sent.taken
        cut = cut_answer(renderer.plain_text, turn.token_ids, asked)
        taken = turn.token_ids[: cut.num_tokens]
        text, calls = read_turn(renderer, taken, asked, cut.stop)
        answer = PolicyAnswer(
            number=head.number,
            text=text,
            calls=calls,
            is_stopped=turn.is_stopped and len(taken) == len(turn.token_ids),
            stop=cut.stop,
            num_prompt=head.num_prompt,
            num_sampled=len(taken),
            thoughts=thoughts_of(renderer, taken, asked),
            logprobs=logprobs_of(renderer, taken, turn.logprobs[: len(taken)], asked),
        )
        return answer, turn.versions[-1]

    async def answer_about_tokens(self, request: web.Request) -> web.Response:
        """Answer a request about given tokens, by the routes of vLLM's server."""
        try:
            self.check_access(request)
            body = await read_body(request.clone(client_max_size=MAX_BODY_BYTES))
            if request.path == "/tokenize":
                reply = self.tokenize(body)
            elif request.path == "/detokenize":
                reply = self.detokenize(body)
            else:
                reply = await self.score(body)
        except (ApiError, EngineError) as error:
            return _refusal(error)
        return web.json_response({**reply, "model": self.name(self.engine.version)})

    async def score(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request for `prompt_logprobs`, without a sampled text.

        Raises: ApiError: a field is wrong. EngineError: the engine failed.
        """
        num_top = body.get("prompt_logprobs")
        if type(num_top) is not int or not 0 <= num_top <= MOST_TOP:
            text = (
                f"prompt_logprobs: must be a number from 0 to {MOST_TOP}; this server only scores"
            )
            raise invalid(f"{text} prompts on this route", "prompt_logprobs")
        if body.get("max_tokens", 1) not in (0, 1):
            raise invalid("max_tokens: must be 0 or 1, for no text is sampled", "max_tokens")
        ids = _read_ids(body.get("prompt"), "prompt", self.engine.vocab_size)
        if len(ids) >= self.actor.max_model_len:
            text = f"{len(ids)} tokens and one more exceed the context of"
            code = "context_length_exceeded"
            raise ApiError(400, code, f"{code}: {text} {self.actor.max_model_len} tokens", "prompt")
        number = f"score:{next(self.numbers)}"
        steps = await self.engine.prompt_logprobs(ids, num_top=num_top, request_id=number)
        choice = {
            "index": 0,
            "text": "",
            "finish_reason": "length",
            "prompt_logprobs": [step and _entry(step) for step in steps],
        }
        usage = {"prompt_tokens": len(ids), "completion_tokens": 0, "total_tokens": len(ids)}
        return {"id": number, "object": "text_completion", "choices": [choice], "usage": usage}

    def tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the token ids of a text, the context and the vocabulary's size.

        Raises: ApiError: a field is wrong.
        """
        text = body.get("prompt")
        if not isinstance(text, str):
            raise invalid("prompt: must be a text", "prompt")
        is_special = body.get("add_special_tokens", True) is True
        ids = self.renderer.tokenizer.encode(text, add_special_tokens=is_special)
        return {
            "tokens": ids,
            "count": len(ids),
            "max_model_len": self.actor.max_model_len,
            "vocab_size": len(self.renderer.tokenizer),
        }

    def detokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the text of token ids; unknown ones are omitted, as vLLM's server does.

        Raises: ApiError: a field is wrong.
        """
        ids = _read_ids(body.get("tokens"), "tokens", LARGEST_ID)
        return {"prompt": self.renderer.tokenizer.decode(ids)}

    def check_access(self, request: web.Request) -> None:
        """Check the key of a request. Raises: ApiError."""
        check_key(self.key, request.headers.get("authorization", ""))
        if not self.key and is_of_a_page(request.headers, request.url.host):
            raise ApiError(403, "forbidden", OTHER_ORIGIN)


def _refusal(error: ApiError | EngineError) -> web.Response:
    """Return an error as the response of the API."""
    refused = error if isinstance(error, ApiError) else ApiError(500, "policy_failed", f"{error}")
    return web.json_response(openai_error(refused), status=refused.status)


def check_key(key: str, *credentials: str) -> None:
    """Check that one of the values of headers holds the key, if there is one. Raises: ApiError."""
    right = key.encode()
    sent = [each.removeprefix("Bearer ").encode(errors="surrogateescape") for each in credentials]
    if key and not any([hmac.compare_digest(each, right) for each in sent]):
        raise ApiError(401, "invalid_api_key", "wrong API key")


def bound(port: int) -> socket.socket:
    """Return a socket bound to a port of this machine; 0: a free port. Raises: ConfigError."""
    host = loopback()
    # asyncio sets TCP_NODELAY only if the protocol is given. Without it, small answers are delayed.
    place = socket.socket(family_of(host), socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind((host, port))
        place.listen()
    except OSError as error:
        place.close()
        raise ConfigError(f"policy.port={port}: {error.strerror}") from error
    return place


@contextlib.asynccontextmanager
async def listening(chat: Chat, place: socket.socket | None = None) -> AsyncGenerator[str]:
    """Serve requests inside the context, by default at a free port; yield the address."""
    app = web.Application(middlewares=[with_api_errors])
    app.router.add_post("/v1/chat/completions", chat.complete)
    for path in SCORE_PATHS:
        app.router.add_post(path, chat.answer_about_tokens)
    app.router.add_get("/v1/models", chat.models)
    app.router.add_get("/v1/models/{name:.+}", chat.models)
    place = place or bound(0)
    runner = web.AppRunner(
        app,
        access_log=None,
        shutdown_timeout=1.0,
        keepalive_timeout=limits.REQUEST_S,
        handler_cancellation=True,  # A client that leaves aborts the engine's requests.
    )
    await runner.setup()
    try:
        await web.SockSite(runner, place).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{bracketed(host)}:{port}/v1"
    finally:
        await stop_accepting([place.fileno()])
        await runner.cleanup()


@contextlib.asynccontextmanager
async def serve_engine(
    cfg: RunConfig, run_dir: RunDir, name: str, engine: "Engine", renderer: Renderer
) -> AsyncGenerator[None]:
    """Serve an actor's engine to users of this machine who can read the run's keys.

    In sync mode nothing is served: additional requests would change the samples of a deterministic
    run.
    """
    if cfg.train.mode == "sync":
        yield
        return
    key = secrets.token_urlsafe(24)
    chat = Chat(
        engine=engine,
        renderer=renderer.without_tools(),
        actor=cfg.actor,
        key=key,
        name=lambda version: f"{cfg.run.name}, version {version}",
        numbers=count(1),
    )
    remove_left(run_dir.root)
    path = endpoint_path(run_dir.root, name)
    async with listening(chat) as url:
        door = ChatEndpoint(url=url, key=key, host=socket.gethostname(), pid=os.getpid())
        write_private(path, door.as_text())
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _read_ids(value: object, field: str, most: int) -> list[int]:
    """Return token ids below a limit. Raises: ApiError."""
    if not isinstance(value, list) or not value or any(type(token) is not int for token in value):
        raise invalid(f"{field}: must be a list of token ids", field)
    wrong = next((token for token in value if not 0 <= token < most), None)
    if wrong is not None:
        raise invalid(f"{field}: token id {wrong} is outside of the vocabulary of {most}", field)
    return value


def _entry(step: dict[int, tuple[float, int]]) -> dict[str, dict[str, float | int]]:
    return {
        str(token): {"logprob": BANNED if math.isinf(logprob) else logprob, "rank": rank}
        for token, (logprob, rank) in step.items()
    }

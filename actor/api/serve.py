"""Serves a policy on this machine: a checkpoint by vLLM's server, or a running actor's engine."""

import asyncio
import contextlib
import hmac
import json
import os
import re
import secrets
import signal
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from aiohttp import web
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send
from transformers import AutoConfig, AutoTokenizer

from actor.api.chat_api import CHAT_API, choices_reply
from actor.api.chat_endpoints import ChatEndpoint, endpoint_path, remove_left
from actor.api.history import check_thoughts, matched
from actor.api.http_requests import is_of_a_page, read_body, with_api_errors
from actor.api.listening import stop_accepting
from actor.api.past import newer_version, with_past_version
from actor.api.prompt_scores import add_score_routes
from actor.api.prompts import check_tools, cut_answer, encode_messages, read_turn, thoughts_of
from actor.api.requests import ApiError, PolicyAnswer, PolicyRequest, event_text, openai_error
from actor.api.sampling import MAX_SEED, Sampling, read_sampling
from actor.api.served_role import ServedRole
from actor.formats.renderer import Renderer
from actor.policy import PolicyConfig
from actor.seats.endpoint import read_key
from common.config.actor import ActorSection
from common.config.learner import FULL, LoraSection
from common.config.run_config import RunConfig
from common.errors import ConfigError, EngineError
from common.host.loopback import family_of, loopback
from common.http import serving as limits
from common.http.serving import EmbeddedServer, Refusals
from common.stall.beacon import beacon_of
from common.store.run_dir import RunDir
from common.wire.addresses import bracketed
from common.wire.security import write_private

if TYPE_CHECKING:
    from actor.engine.engine import Engine

ADAPTERS = "adapter_config.json"
EVENTS = "text/event-stream"
OTHER_ORIGIN = "requests from pages of other origins need an API key"
BODY_S = 300.0  # Seconds for the body of a request with the key.
MAX_BODY_BYTES = 64 << 20  # A prompt of token ids is longer than its text.
MOST_LOGPROBS = 1024  # Most probable tokens at each position, at most.
FITTED = -1  # vLLM lowers `max_model_len` to the largest that the KV cache holds.
START_POLL_S = 0.01
NO_WORD = re.compile(r"[^\w.-]+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Encodes conversations as episodes are encoded, samples, and decodes the answers."""

    engine: "Engine"
    renderer: Renderer
    actor: ActorSection
    key: str  # Key that a request must carry; "": no key.
    name: Callable[[int], str]  # version -> name of the policy
    numbers: "count[int]"

    async def complete(self, request: web.Request) -> web.Response:
        """Answer one chat completion. A request that is not obeyed gets a 400 with its field."""
        try:
            self.check_access(request)
            body = await read_body(request)
            asked = CHAT_API.read({**body, **dict.fromkeys(("n", "temperature", "seed"))})
            reply = await self._reply(asked, read_sampling(body, self.actor))
        except ApiError as error:
            return web.json_response(openai_error(error), status=error.status)
        except EngineError as error:
            return web.json_response(
                openai_error(ApiError(500, "policy_failed", f"{error}")), status=500
            )
        if not body.get("stream"):
            return web.json_response(reply)
        text = "".join(map(event_text, CHAT_API.events(asked, reply)))
        return web.Response(text=text, content_type=EVENTS)

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
            return web.json_response(openai_error(error), status=error.status)
        if asked is not None:
            return web.json_response(model)
        return web.json_response({"object": "list", "data": [model]})

    async def _reply(self, asked: PolicyRequest, how: Sampling) -> dict[str, Any]:
        """Return the response to a request. Raises: ApiError, EngineError."""
        asked = matched(asked)
        check_tools(self.renderer, asked)
        check_thoughts(self.renderer, asked)
        ids = encode_messages(self.renderer, asked.messages, tools=asked.tools)
        how = replace(how, max_tokens=self._max_answer_tokens(len(ids), how.max_tokens))
        choices = range(how.num_choices)
        answers = await asyncio.gather(*(self._answer(asked, how, ids, each) for each in choices))
        return {
            **choices_reply(asked, [answer for answer, _ in answers]),
            "model": self.name(max(version for _, version in answers)),
        }

    def _max_answer_tokens(self, num_prompt: int, max_tokens: int) -> int:
        """Return the limit of an answer: the request's limit, or the rest of the context.

        Raises: ApiError: neither the request's limit nor a turn fits.
        """
        most = self.actor.max_model_len
        needed = min(max_tokens, self.actor.max_turn_tokens)
        if num_prompt + needed > most:
            text = f"{num_prompt} tokens and {needed} of an answer exceed the context of {most}"
            code = "context_length_exceeded"
            raise ApiError(400, code, f"{code}: {text} tokens", "messages")
        return min(max_tokens, most - num_prompt)

    async def _answer(
        self, asked: PolicyRequest, how: Sampling, ids: list[int], choice: int
    ) -> tuple[PolicyAnswer, int]:
        """Return one answer, and the version that sampled its last token."""
        number = f"chat:{next(self.numbers)}"
        turn = await self.engine.generate(
            ids,
            request_id=number,
            max_tokens=how.max_tokens,
            salt=f"chat v{self.engine.version}",
            seed=None if how.seed is None else (how.seed + choice) % (MAX_SEED + 1),
            temperature=how.temperature,
        )
        cut = cut_answer(self.renderer.plain_text, turn.token_ids, asked)
        taken = turn.token_ids[: cut.num_tokens]
        text, calls = read_turn(self.renderer, taken, asked, cut.stop)
        answer = PolicyAnswer(
            number=number,
            text=text,
            calls=calls,
            is_stopped=turn.is_stopped and len(taken) == len(turn.token_ids),
            stop=cut.stop,
            num_prompt=len(ids),
            num_sampled=len(taken),
            thoughts=thoughts_of(self.renderer, taken, asked),
        )
        return answer, turn.versions[-1]

    def check_access(self, request: web.Request) -> None:
        """Check the key of a request. Raises: ApiError."""
        check_key(self.key, request.headers.get("authorization", ""))
        if not self.key and is_of_a_page(request.headers, request.url.host):
            raise ApiError(403, "forbidden", OTHER_ORIGIN)


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
    add_score_routes(app, chat)
    app.router.add_get("/v1/models", chat.models)
    app.router.add_get("/v1/models/{name:.+}", chat.models)
    place = place or bound(0)
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=1.0, keepalive_timeout=limits.REQUEST_S
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


def serve(cfg: PolicyConfig, run_dir: RunDir) -> int:
    """Serve the APIs of OpenAI and Anthropic with the policy at `model.path` until a signal.

    The environment variable named by `policy.api_key_env` holds the key that requests must carry.

    Raises:
        ConfigError: the key is missing, the port is taken, or the model's chat template cannot be
            used.
        EngineError: the engine did not start.
    """
    key = read_key(cfg.policy)
    role = cfg.policy.role
    after_s = cfg.policy.past_every_s
    if after_s:
        cfg = with_past_version(cfg, run_dir)
    start_s = cfg.actor.start_timeout_s
    with contextlib.ExitStack() as stack:
        # The port is bound first, because the engine's start takes long.
        place = stack.enter_context(bound(cfg.policy.port))
        part = None
        if role:
            beacon = stack.enter_context(beacon_of(run_dir, role, start_s=start_s))
            part = ServedRole(run_dir, role, beacon)
        asyncio.run(_serve(cfg, key, place, part, past_of=run_dir if after_s else None))
    return 0


async def _serve(
    cfg: PolicyConfig,
    key: str,
    place: socket.socket,
    part: ServedRole | None,
    *,
    past_of: RunDir | None,
) -> None:
    """Start the engine, and serve it until a signal arrives.

    Args:
        past_of: the run whose past version is served; it ends when another one is due.
    """
    from actor.engine.engine import Engine  # Imported here, because it loads vLLM.
    from actor.engine.openai_app import make_app

    folder = Path(cfg.model.path)
    base, lora = base_of(folder)
    renderer = Renderer(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    engine = await Engine.start(
        replace(cfg.model, path=str(base)),
        with_context(cfg, base),
        end_of_turn_ids=renderer.end_of_turn_ids,
        seed=cfg.run.seed,
        lora=lora,
        is_repeatable=True,
    )
    engine.version = 0
    if lora.rank:
        engine.take_adapter_at(folder)
    name = model_id(cfg)
    app = make_app(engine, renderer, name=name)
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        async with serving(app, place, key=key) as url:
            print(f"policy: {url} model={name}", flush=True)  # noqa: T201 - the command's output
            async with part.published(url) if part else contextlib.nullcontext():
                await _end(engine, ended, past_of, after_s=cfg.policy.past_every_s)
    finally:
        engine.shut_down()


def with_context(cfg: PolicyConfig, weights: Path) -> ActorSection:
    """Return the settings of an engine that serves the whole context of the model.

    Args:
        weights: the folder of the base model, which has its config.json.

    The engine of a role keeps `actor.max_model_len`, for which the run has planned the memory.
    """
    args = {"logprobs_mode": "raw_logprobs", "max_logprobs": MOST_LOGPROBS}
    if cfg.policy.max_model_len or cfg.policy.role:
        most = cfg.policy.max_model_len or cfg.actor.max_model_len
        return replace(cfg.actor, max_model_len=most, engine_args=args | cfg.actor.engine_args)
    config = AutoConfig.from_pretrained(weights, local_files_only=True).get_text_config()
    most = getattr(config, "max_position_embeddings", None) or cfg.actor.max_model_len
    args["max_model_len"] = FITTED
    return replace(cfg.actor, max_model_len=most, engine_args=args | cfg.actor.engine_args)


def model_id(cfg: PolicyConfig) -> str:
    """Return the id of the served model: the run's name and the model's label, as one word."""
    return NO_WORD.sub("-", f"{cfg.run.name}-{cfg.model.label}").strip("-")


class GuardedApp:
    """A server that answers requests only with its key, and none of a website without a key."""

    def __init__(self, app: FastAPI, key: str) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it in the API's form."""
        if scope["type"] == "http":
            request = Request(scope)
            try:
                self._check(request)
            except ApiError as error:
                refusal = JSONResponse(openai_error(error), status_code=error.status)
                await refusal(scope, receive, send)
                return
        num_bytes = 0

        async def receive_within_limit() -> Message:
            """Return the next message; a body of unknown size ends at the limit."""
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            return message if num_bytes <= MAX_BODY_BYTES else {"type": "http.disconnect"}

        await self._app(scope, receive_within_limit, send)

    def _check(self, request: Request) -> None:
        """Check the key and the size of a request. Raises: ApiError."""
        headers = request.headers
        check_key(self._key, headers.get("authorization", ""), headers.get("x-api-key", ""))
        if not self._key and is_of_a_page(headers, request.url.hostname):
            raise ApiError(403, "forbidden", OTHER_ORIGIN)
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            text = f"the body has more than {MAX_BODY_BYTES} bytes"
            raise ApiError(413, "request_entity_too_large", text)


@contextlib.asynccontextmanager
async def serving(app: FastAPI, place: socket.socket, *, key: str) -> AsyncGenerator[str]:
    """Serve requests inside the context; yield the address."""
    config = uvicorn.Config(
        GuardedApp(app, key),
        http=limits.limited_protocol(Counter(), Refusals(), token=key, body_s=BODY_S),
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    server = EmbeddedServer(config)
    app.state.server = server
    task = asyncio.create_task(server.serve(sockets=[place]))
    try:
        while not server.started and not task.done():
            await asyncio.sleep(START_POLL_S)
        host, port = place.getsockname()[:2]
        yield f"http://{bracketed(host)}:{port}/v1"
    finally:
        server.should_exit = True
        await task


async def _end(
    engine: "Engine", ended: asyncio.Event, past_of: RunDir | None, *, after_s: float
) -> None:
    """Wait for a signal, or until another past version is due. The launcher then restarts it.

    Raises: EngineError: the engine died.
    """
    waits: list[asyncio.Task[Any]] = [asyncio.create_task(ended.wait())]
    waits.append(asyncio.create_task(engine.wait_for_death()))
    if past_of is not None:
        waits.append(asyncio.create_task(newer_version(past_of, after_s=after_s)))
    done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for each in waits:
        each.cancel()
    for each in done:
        each.result()


def base_of(folder: Path) -> tuple[Path, LoraSection]:
    """Return the weights to load and the adapters on top; a checkpoint may hold adapters alone.

    Raises: ConfigError: the adapters name no base model on this machine.
    """
    path = folder / ADAPTERS
    if not path.is_file():
        return folder, FULL
    settings = cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8")))
    base = settings.get("base_model_name_or_path")
    if not base or not Path(base).is_dir():
        raise ConfigError(
            f"{path}: its base model {base} is not on this machine; copy the base to this path, or"
            " merge the adapters with `python run.py merge`"
        )
    if settings.get("target_parameters"):
        raise ConfigError(
            f"{path}: its adapters change experts, which the engine (vLLM) cannot take. Merge them"
            " with `run.py merge` and serve the merged policy."
        )
    targets = sorted(settings["target_modules"])
    return Path(base), LoraSection(
        rank=settings["r"], alpha=settings["lora_alpha"], targets=targets
    )

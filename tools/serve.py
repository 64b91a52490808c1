"""The command `serve`: vLLM's server with a checkpoint, or with past versions of a run in turn."""

import asyncio
import contextlib
import json
import random
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send
from transformers import AutoConfig, AutoTokenizer

from actor.api.chat import OTHER_ORIGIN, bound, check_key, is_of_a_page
from actor.api.requests import ApiError, openai_error
from actor.formats.renderer import Renderer
from actor.policy import PolicyConfig
from actor.seats.endpoint import read_key
from common.config.actor import ActorSection
from common.config.learner import FULL, LoraSection
from common.errors import ConfigError
from common.http import serving as limits
from common.http.serving import EmbeddedServer, Refusals
from common.stall.beacon import Beacon, beacon_of
from common.store.run_dir import RunDir
from common.wire.addresses import bracketed
from learner.policy.model_kind import takes_no_adapter_files
from learner.training.shards import is_whole

if TYPE_CHECKING:
    from actor.engine.engine import Engine

ADAPTERS = "adapter_config.json"
BODY_S = 300.0  # Seconds for the body of a request with the key.
MAX_BODY_BYTES = 64 << 20  # A prompt of token ids is longer than its text.
MOST_LOGPROBS = 1024  # Most probable tokens at each position, at most.
FITTED = -1  # vLLM lowers `max_model_len` to the largest that the KV cache holds.
START_POLL_S = 0.01
NO_WORD = re.compile(r"[^\w.-]+", re.ASCII)
PAST_POLL_S = 5.0  # Seconds between two searches for a newer version.
BEAT_S = 0.5  # Seconds between two reports of the event loop.


def serve(cfg: PolicyConfig, run_dir: RunDir) -> int:
    """Serve the APIs of OpenAI and Anthropic with the policy at `model.path` until a signal.

    The environment variable named by `policy.api_key_env` holds the key that requests must carry.

    Raises:
        ConfigError: the key is missing, the port is taken, or the model's chat template cannot be
            used.
        EngineError: the engine did not start.
    """
    key = read_key(cfg.policy)
    if cfg.policy.past_every_s:
        cfg = with_past_version(cfg, run_dir)
    start_s = cfg.actor.start_timeout_s
    with contextlib.ExitStack() as stack:
        # The port is bound first, because the engine's start takes long.
        place = stack.enter_context(bound(cfg.policy.port))
        beacon = None
        if cfg.policy.role:
            beacon = stack.enter_context(beacon_of(run_dir, cfg.policy.role, start_s=start_s))
        asyncio.run(_serve(cfg, run_dir, key, place, beacon))
    return 0


async def _serve(
    cfg: PolicyConfig, run_dir: RunDir, key: str, place: socket.socket, beacon: Beacon | None
) -> None:
    """Start the engine, and serve it until a signal arrives.

    Args:
        run_dir: the run in which the engine is the role `policy.role`, and whose past versions it
            serves with `policy.past_every_s`.
        beacon: the signs of life of that role; None: the engine has no role.
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
            print(f"policy: {url} model={name}")
            async with contextlib.AsyncExitStack() as stack:
                if beacon is not None:
                    role = published(run_dir, cfg.policy.role, beacon, url)
                    await stack.enter_async_context(role)
                await _end(engine, ended, run_dir, after_s=cfg.policy.past_every_s)
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


async def _end(engine: "Engine", ended: asyncio.Event, run_dir: RunDir, *, after_s: float) -> None:
    """Wait for a signal, or until another past version is due. The launcher then restarts it.

    Args:
        after_s: seconds until another one is due; 0: no past version is served.

    Raises: EngineError: the engine died.
    """
    waits: list[asyncio.Task[Any]] = [asyncio.create_task(ended.wait())]
    waits.append(asyncio.create_task(engine.wait_for_death()))
    if after_s:
        waits.append(asyncio.create_task(newer_version(run_dir, after_s=after_s)))
    done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in waits:
        task.cancel()
    for task in done:
        task.result()


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
    changed = "experts" if settings.get("target_parameters") else ""
    if takes_no_adapter_files(Path(base)):
        changed = "rows that vLLM has in another order"
    if changed:
        raise ConfigError(
            f"{path}: its adapters change {changed}, which the engine (vLLM) cannot take. Merge"
            " them with `run.py merge` and serve the merged policy."
        )
    targets = sorted(settings["target_modules"])
    return Path(base), LoraSection(
        rank=settings["r"], alpha=settings["lora_alpha"], targets=targets
    )


def past_versions(run_dir: RunDir) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first.

    Checkpoints with files on other nodes are left out: no engine can load them.
    """
    complete = [path.parent for path in run_dir.checkpoints.glob("step-*/COMPLETE")]
    return sorted(filter(is_whole, complete), key=lambda folder: folder.name)


def with_past_version(cfg: PolicyConfig, run_dir: RunDir) -> PolicyConfig:
    """Return a configuration whose model is a past version of the run, or its start.

    All versions are equally probable. The choice depends on the role and the newest version.
    """
    versions = past_versions(run_dir)
    newest = versions[-1].name if versions else ""
    drawn = random.Random(f"{cfg.policy.role}/{newest}")
    folder = drawn.choice([Path(cfg.model.path), *versions])
    return replace(cfg, model=replace(cfg.model, path=str(folder)))


async def newer_version(
    run_dir: RunDir,
    *,
    after_s: float,
    now: Callable[[], float] = time.monotonic,
    poll_s: float = PAST_POLL_S,
) -> None:
    """Wait until `after_s` seconds have passed and the run has a version that it has not now."""
    newest = past_versions(run_dir)[-1:]
    started = now()
    while now() - started < after_s or past_versions(run_dir)[-1:] == newest:
        await asyncio.sleep(poll_s)


@contextlib.asynccontextmanager
async def published(run_dir: RunDir, role: str, beacon: Beacon, url: str) -> AsyncGenerator[None]:
    """Publish the address of a role inside the context, and report that the event loop is alive."""

    async def report_alive() -> None:
        while True:
            beacon.note("main", "serving")
            await asyncio.sleep(BEAT_S)

    run_dir.publish_address(role, url)
    beating = asyncio.create_task(report_alive())
    try:
        yield
    finally:
        beating.cancel()
        run_dir.forget_address(role)

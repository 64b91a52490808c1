"""Serves chat completions on this machine: from a checkpoint, or from a running actor."""

import asyncio
import contextlib
import hmac
import json
import os
import secrets
import signal
import socket
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web
from transformers import AutoTokenizer

from actor.play.doors import Door, door_path, remove_left
from actor.play.endpoint import read_key
from actor.rollout.render import Renderer
from common.config.compute import FULL, LoraSection
from common.config.run_config import ActorSection, RunConfig
from common.errors import ConfigError, EngineError
from common.host.loopback import IPV4, IPV6, family_of, loopback
from common.store.run_dir import RunDir
from common.wire.addresses import bracketed
from common.wire.security import write_private

if TYPE_CHECKING:
    from actor.engine.engine import Engine

ADAPTERS = "adapter_config.json"
MAX_SEED = 2**63 - 1
MAX_HEAT = 2.0  # Highest temperature of a request.
ROLES = ("user", "assistant")


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
        """Answer one chat completion. A malformed request gets a 400."""
        told = request.headers.get("authorization", "").encode(errors="surrogateescape")
        if self.key and not hmac.compare_digest(told, f"Bearer {self.key}".encode()):
            return _error(401, "wrong API key")
        if not self.key and _is_of_a_page(request):
            return _error(403, "requests from pages of other origins need an API key")
        try:
            body = await request.json()
            ids = self.encoded(body)
            temperature = _temperature(body)
            seed = _seed(body)
        except (ValueError, KeyError, TypeError) as error:
            return _error(400, f"{error}")
        number = f"chat:{next(self.numbers)}"
        most = self.actor.max_turn_tokens
        try:
            turn = await self.engine.generate(
                ids,
                request_id=number,
                max_tokens=most,
                salt=f"chat v{self.engine.version}",
                seed=seed,
                temperature=temperature,
            )
        except EngineError as error:
            return _error(500, f"{error}")
        message = {"role": "assistant", "content": self.renderer.action_text(turn.token_ids)}
        reason = "stop" if turn.is_stopped else "length"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(turn.token_ids)}
        answer = {"id": number, "object": "chat.completion", "choices": [choice], "usage": usage}
        return web.json_response({**answer, "model": self.name(turn.versions[-1])})

    def encoded(self, body: dict[str, Any]) -> list[int]:
        """Return the token ids of a conversation in which user and assistant alternate.

        Raises: ValueError: they do not alternate, or it is too long; KeyError, TypeError: no
        messages.
        """
        messages = body["messages"]
        roles = [str(each["role"]) for each in messages]
        if len(roles) % 2 == 0 or roles != [ROLES[i % 2] for i in range(len(roles))]:
            raise ValueError(
                "messages: roles must alternate between user and assistant, from user to user, not "
                f"{json.dumps(roles)[:200]}"
            )
        ids = self.renderer.conversation([str(each["content"]) for each in messages])
        room = self.actor.max_model_len - self.actor.max_turn_tokens
        if len(ids) > room:
            raise ValueError(f"context_length_exceeded: {len(ids)} tokens, {room} fit")
        return ids


def _temperature(body: dict[str, Any]) -> float | None:
    """Return a request's temperature, None if it has none. Raises: ValueError: it is invalid."""
    told = body.get("temperature")
    if told is None:
        return None
    if isinstance(told, bool) or not isinstance(told, int | float) or not 0 <= told <= MAX_HEAT:
        raise ValueError(
            f"temperature: must be a number in [0, {MAX_HEAT:g}], not {json.dumps(told)[:50]}"
        )
    return float(told)


def _seed(body: dict[str, Any]) -> int | None:
    """Return the seed of a request, None if it has none. Raises: ValueError: it is invalid."""
    seed = body.get("seed")
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, int) or abs(seed) > MAX_SEED:
        raise ValueError(f"seed: must be an integer of 63 bits, not {json.dumps(seed)[:50]}")
    return seed % (MAX_SEED + 1)


def _is_of_a_page(request: web.Request) -> bool:
    """Return whether the request may come from a website in a browser (DNS rebinding included)."""
    return "origin" in request.headers or request.url.host not in (IPV4, IPV6, "localhost")


def _error(status: int, text: str) -> web.Response:
    return web.json_response({"error": {"message": text}}, status=status)


def bound(port: int) -> socket.socket:
    """Return a socket bound to a port of this machine; 0: a free port. Raises: ConfigError."""
    try:
        host = loopback()
        return socket.create_server((host, port), family=family_of(host))
    except OSError as error:
        raise ConfigError(f"policy.port={port}: {error.strerror}") from error


@contextlib.asynccontextmanager
async def listening(chat: Chat, place: socket.socket | None = None) -> AsyncGenerator[str]:
    """Serve requests inside the context, by default at a free port; yield the address."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat.complete)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.SockSite(runner, place or bound(0)).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{bracketed(host)}:{port}/v1"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def door_of(
    cfg: RunConfig, run_dir: RunDir | None, name: str, engine: "Engine", renderer: Renderer
) -> AsyncGenerator[None]:
    """Serve an actor's engine to users of this machine who can read the run's keys.

    In sync mode nothing is served: additional requests would change the samples of a deterministic
    run.
    """
    if run_dir is None or cfg.train.mode == "sync":
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
    path = door_path(run_dir.root, name)
    async with listening(chat) as url:
        door = Door(url=url, key=key, host=socket.gethostname(), pid=os.getpid())
        write_private(path, door.as_text())
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def serve(cfg: RunConfig, run_dir: RunDir) -> int:
    """Serve chat completions with the policy at `model.path` until a signal; return 0.

    The environment variable named by `policy.api_key_env` holds the key that requests must carry.

    Raises:
        ConfigError: the key is missing, the port is taken, or the model's chat template cannot be
            used.
        EngineError: the engine did not start.
    """
    key = read_key(cfg.policy)
    with bound(cfg.policy.port) as place:  # Bound first, because the engine's start takes long.
        asyncio.run(_serve(cfg, key, place))
    return 0


async def _serve(cfg: RunConfig, key: str, place: socket.socket) -> None:
    from actor.engine.engine import Engine  # Imported here, because it loads vLLM.

    folder = Path(cfg.model.path)
    base, lora = base_of(folder)
    renderer = Renderer(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    renderer.check_room(cfg.actor)
    engine = await Engine.start(
        replace(cfg.model, path=str(base)),
        cfg.actor,
        end_of_turn_ids=renderer.end_of_turn_ids,
        seed=cfg.run.seed,
        lora=lora,
        is_repeatable=True,
    )
    engine.version = 0
    if lora.rank:
        engine.take_adapter_at(folder)
    chat = Chat(
        engine=engine,
        renderer=renderer,
        actor=cfg.actor,
        key=key,
        name=lambda _: f"{cfg.run.name}, {folder.name}",
        numbers=count(1),
    )
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        async with listening(chat, place) as url:
            print(f"policy: {url}", flush=True)  # noqa: T201 - the command's output
            await ended.wait()
    finally:
        engine.shut_down()


def base_of(folder: Path) -> tuple[Path, LoraSection]:
    """Return the weights to load and the adapters on top; a checkpoint may hold adapters alone.

    Raises: ConfigError: the adapters name no base model on this machine.
    """
    path = folder / ADAPTERS
    if not path.is_file():
        return folder, FULL
    told = cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8")))
    base = told.get("base_model_name_or_path")
    if not base or not Path(base).is_dir():
        raise ConfigError(f"{path}: the adapters need the model {base}, which is not here")
    targets = sorted(told["target_modules"])
    return Path(base), LoraSection(rank=told["r"], alpha=told["lora_alpha"], targets=targets)

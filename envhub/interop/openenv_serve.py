"""OpenEnv's routes: its clients play the hub's environments under /openenv/<env>."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response, WebSocket
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic_core import from_json
from starlette.websockets import WebSocketDisconnect

from common.errors import EnvError
from common.text import counted, known_hint
from envhub.catalogue.registry import Registry
from envhub.env import SPLITS, EnvSpec, StepResult, Style, UnknownItem
from envhub.errors import CapacityFull, HubDraining, SessionConflict, SessionUnknown, UnknownEnv
from envhub.hosting.sessions import Sessions
from envhub.http.bodies import (
    MAX_NAME_CHARS,
    MAX_SEED,
    BadBody,
    json_bytes,
    json_response,
    parse_body,
    parse_entry,
    repaired,
)
from envhub.http.parts import HubParts

logger = logging.getLogger(__name__)


MAX_LISTED = 1_000  # Maximum tasks of one answer; `num_tasks` counts all.


class SplitRequest(BaseModel):
    """Body of the task routes; unknown fields are ignored."""

    split: str = Field(max_length=MAX_NAME_CHARS)
    index: int | None = None
    start: int | None = None
    stop: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The items of one split, in order."""

    kind: str  # One of SPLITS.
    num: int
    item: Callable[[int], str]


def splits_of(spec: EnvSpec) -> dict[str, Split]:
    """Return an environment's splits by name.

    `train` and `test` hold the items of all its tasks, or of its first subset if it has no tasks.
    Each subset also has the splits `<subset>-train` and `<subset>-test`, and those with validation
    items `<subset>-validation`.
    """
    whole: dict[str, Split] = {}
    subsets: dict[str, Split] = {}
    for kind in SPLITS:
        listed = [item for task in spec.tasks.values() for item in getattr(task, kind, ())]
        unique = [*dict.fromkeys(listed)]
        for name, subset in spec.subsets.items():
            num = subset.size(kind)
            if num:
                prefix = f"{name}-{kind}"
                subsets[prefix] = Split(
                    kind=kind, num=num, item=lambda i, prefix=prefix: f"{prefix}-{i}"
                )
        first = next((each for each in subsets.values() if each.kind == kind), None)
        if unique:
            whole[kind] = Split(kind=kind, num=len(unique), item=unique.__getitem__)
        elif first is not None:
            whole[kind] = first
    return whole | subsets


def add_task_routes(app: FastAPI, registry: Registry) -> None:
    """Mount the routes that list tasks; each path names the environment twice, as in OpenEnv."""
    base = "/openenv/{env}"

    @app.get(f"{base}/list_environments", tags=["openenv"])
    async def list_environments(env: str) -> Response:
        return json_response([registry.spec(env).name])

    @app.get(f"{base}/{{name}}/splits", tags=["openenv"])
    async def list_splits(env: str, name: str) -> Response:
        splits = splits_of(_same(registry, env, name))
        return json_response([{"name": each, "type": splits[each].kind} for each in splits])

    @app.post(f"{base}/{{name}}/tasks", tags=["openenv"])
    async def list_tasks(env: str, name: str, request: Request) -> Response:
        """List the tasks of a split."""
        body, split = await _asked(registry, env, name, request)
        tasks = [_task(body.split, split, i) for i in range(min(split.num, MAX_LISTED))]
        return json_response({"tasks": tasks, "env_name": env})

    @app.post(f"{base}/{{name}}/num_tasks", tags=["openenv"])
    async def num_tasks(env: str, name: str, request: Request) -> Response:
        _, split = await _asked(registry, env, name, request)
        return json_response({"num_tasks": split.num})

    @app.post(f"{base}/{{name}}/task", tags=["openenv"])
    async def get_task(env: str, name: str, request: Request) -> Response:
        """Return one task by its index."""
        body, split = await _asked(registry, env, name, request)
        if body.index is None:
            raise BadBody("index: Field required")
        return json_response({"task": _task(body.split, split, index_in(split, body.index))})

    @app.post(f"{base}/{{name}}/task_range", tags=["openenv"])
    async def get_task_range(env: str, name: str, request: Request) -> Response:
        """List the tasks of a range of indices."""
        body, split = await _asked(registry, env, name, request)
        wanted = range(split.num)[body.start : body.stop][:MAX_LISTED]
        return json_response({"tasks": [_task(body.split, split, i) for i in wanted]})


def _same(registry: Registry, env: str, name: str) -> EnvSpec:
    """Return the environment, which the path names twice. Raises: UnknownEnv."""
    if name.lower() != env.lower():
        raise UnknownEnv(f"no environment {name!r} at /openenv/{env}")
    return registry.spec(env)


async def _asked(
    registry: Registry, env: str, name: str, request: Request
) -> tuple[SplitRequest, Split]:
    """Return a request and its split. Raises: UnknownEnv, UnknownItem, BadBody."""
    spec = _same(registry, env, name)
    body = parse_body(SplitRequest, await request.body())
    return body, split_of(spec, body.split)


def split_of(spec: EnvSpec, name: str) -> Split:
    """Return a split by name. Raises: UnknownItem: no such split."""
    splits = splits_of(spec)
    if name not in splits:
        raise UnknownItem(f"no split {name!r}{known_hint(name, splits)}")
    return splits[name]


def index_in(split: Split, index: int) -> int:
    """Return an existing index, counted from the end if negative. Raises: UnknownItem."""
    if not -split.num <= index < split.num:
        num = counted(split.num, "task")
        raise UnknownItem(f"index {index} is out of range; the split has {num}")
    return index % split.num


def _task(name: str, split: Split, index: int) -> dict[str, Any]:
    """Return a task with its id, index and split."""
    return {"id": split.item(index), "index": index, "split": name}


CLOSE_SILENT = (
    1001  # "Going away": close code of a socket that was silent for the whole idle limit.
)
CLOSE_REFUSED = 1013  # "Try again later".


class TextAction(BaseModel):
    """The agent's text."""

    model_config = ConfigDict(extra="forbid")

    message: str = Field(description="The agent's text, or the bare action")
    metadata: dict[str, JsonValue] = Field(default_factory=dict)


class TextObservation(BaseModel):
    """The environment's answer."""

    done: bool = False
    reward: float | None = None
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    text: str = Field(description="The observation")


class OpenEnvState(BaseModel):
    """The state of an episode."""

    model_config = ConfigDict(title="EpisodeState")  # Title of the published schema.

    episode_id: str | None = None
    step_count: int = 0
    item_id: str = ""


class ResetData(BaseModel):
    """Item of a reset: by id, or by split and index; otherwise the seed chooses one."""

    model_config = ConfigDict(extra="forbid")

    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    episode_id: str | None = Field(default=None, max_length=MAX_NAME_CHARS)
    item_id: str | None = Field(default=None, max_length=MAX_NAME_CHARS)
    split: str = Field(default="train", max_length=MAX_NAME_CHARS)
    index: int | None = None
    style: Style = Style.COMPACT


def mount(hub: HubParts) -> None:
    """Mount /openenv/<env>/... for each environment of the registry.

    The base URL of an OpenEnv client is the hub's URL + "/openenv/<env>".
    """
    base = "/openenv/{env}"
    app = hub.app
    sessions = hub.sessions
    registry = hub.registry

    @app.get(f"{base}/health", tags=["openenv"])
    async def health(env: str) -> Response:
        registry.spec(env)
        return json_response({"status": "degraded" if sessions.is_draining else "healthy"})

    @app.get(f"{base}/metadata", tags=["openenv"])
    async def metadata(env: str) -> Response:
        spec = registry.spec(env)
        described = spec.instruction[Style.COMPACT] or spec.name
        return json_response({"name": spec.name, "description": described})

    @app.get(f"{base}/schema", tags=["openenv"])
    async def schema(env: str) -> Response:
        registry.spec(env)
        models = {"action": TextAction, "observation": TextObservation, "state": OpenEnvState}
        return json_response({name: kind.model_json_schema() for name, kind in models.items()})

    @app.websocket(f"{base}/ws")
    async def play(socket: WebSocket, env: str) -> None:
        """Serve one socket of an environment's client."""
        try:
            spec = registry.spec(env)
        except UnknownEnv as error:
            await socket.send_denial_response(json_response({"detail": str(error)}, status=404))
            return
        await socket.accept()
        await _Player(socket, sessions, spec).serve()

    add_task_routes(app, registry)


class _Refused(Exception):
    """A frame that is answered with an error; the socket stays open unless `ends` is set."""

    def __init__(self, code: str, text: str, *, ends: bool = False, **fields: int) -> None:
        super().__init__(text)
        self.ends = ends
        self.frame = {"type": "error", "data": {"message": text, "code": code, **fields}}


class _Player:
    """One socket with at most one hub session at a time, which ends with the socket.

    A client that is silent for the whole idle limit loses both, as over HTTP. Pings are answered,
    but the hub sends none: a client that is busy generating may miss any number of them.
    """

    def __init__(self, socket: WebSocket, sessions: Sessions, spec: EnvSpec) -> None:
        self._socket = socket
        self._sessions = sessions
        self._spec = spec
        self._session_id: str | None = None
        self._state = OpenEnvState()
        self._is_over = True

    async def serve(self) -> None:
        """Answer frames until the client closes the socket or is silent for too long."""
        try:
            with contextlib.suppress(WebSocketDisconnect):
                await self._answer_all()
        finally:
            if not self._is_over:
                self._sessions.counts["abandoned"] += 1
            await self._end()

    async def _answer_all(self) -> None:
        """Answer frames until the socket closes or the idle limit passes."""
        while True:
            try:
                async with asyncio.timeout(self._sessions.idle_s):
                    received = await self._socket.receive()
            except TimeoutError:
                text = f"no message for {self._sessions.idle_s:g} s, so the idle limit has passed"
                await self._send(_Refused("SESSION_ERROR", text).frame)
                await self._socket.close(CLOSE_SILENT, "idle limit")
                return
            if received["type"] == "websocket.disconnect":
                return
            try:
                reply = await self._reply(received.get("text") or received.get("bytes") or "")
            except _Refused as error:
                await self._send(error.frame)
                if error.ends:
                    await self._socket.close(CLOSE_REFUSED, "no session")
                    return
                continue
            if reply is None:
                await self._end()
                await self._socket.close()
                return
            await self._send(reply)

    async def _send(self, frame: dict[str, Any]) -> None:
        """Send a frame."""
        await self._socket.send_text(json_bytes(frame).decode())

    async def _reply(self, raw: str | bytes) -> dict[str, Any] | None:
        """Return the answer to a frame, None for a close. Raises: _Refused."""
        frame = _parsed(raw)
        kind = frame.get("type") if isinstance(frame, dict) else None
        data = frame.get("data", {}) if isinstance(frame, dict) else {}
        try:
            match kind:
                case "reset":
                    return await self._reset(parse_entry(ResetData, data))
                case "step":
                    return await self._step(parse_entry(TextAction, data).message)
                case "state":
                    return {"type": "state", "data": self._state.model_dump()}
                case "close":
                    return None
        except (BadBody, UnknownItem, ValidationError) as error:
            raise _Refused("VALIDATION_ERROR", str(error)) from error
        raise _Refused("UNKNOWN_TYPE", f"Unknown message type: {str(kind)[:40]}")

    async def _reset(self, wanted: ResetData) -> dict[str, Any]:
        """Begin an episode; a running episode ends."""
        item_id = wanted.item_id or self._choose(wanted)
        await self._end()
        sessions = self._sessions
        name = self._spec.name
        try:
            self._session_id, text = await sessions.create(
                name, item_id, seed=wanted.seed or 0, style=wanted.style
            )
        except CapacityFull as error:
            limit = sessions.placement.capacity(self._spec)
            counts = {"active_sessions": sessions.num_live[name], "max_sessions": limit}
            raise _Refused("CAPACITY_REACHED", str(error), ends=True, **counts) from error
        except HubDraining as error:
            raise _Refused("SESSION_ERROR", str(error), ends=True) from error
        except EnvError as error:
            raise _Refused("EXECUTION_ERROR", str(error)) from error
        self._is_over = False
        self._state = OpenEnvState(episode_id=wanted.episode_id, item_id=item_id)
        metadata = {"item_id": item_id, "instruction": self._spec.instruction[wanted.style]}
        metadata["state"] = sessions.first_state(self._session_id)
        return _observation(text, None, is_done=False, metadata=metadata)

    def _choose(self, wanted: ResetData) -> str:
        """Return the item of a reset."""
        split = split_of(self._spec, wanted.split)
        if wanted.index is not None:
            return split.item(index_in(split, wanted.index))
        seed = random.randrange(split.num) if wanted.seed is None else wanted.seed
        return split.item(seed % split.num)

    async def _step(self, action: str) -> dict[str, Any]:
        """Perform an action. Raises: _Refused: no episode is running, or it failed."""
        if self._session_id is None:
            raise _Refused("EXECUTION_ERROR", "no episode is running; send a reset first")
        try:
            result = await self._sessions.step(self._session_id, action)
        except SessionConflict as error:
            raise _Refused("EXECUTION_ERROR", str(error)) from error
        except (SessionUnknown, EnvError) as error:
            # The session table has already counted the end.
            self._session_id = None
            self._is_over = True
            is_gone = isinstance(error, SessionUnknown)
            code = "SESSION_ERROR" if is_gone else "EXECUTION_ERROR"
            raise _Refused(code, str(error)) from error
        self._state.step_count += 1
        self._is_over = result.done
        return _stepped(result)

    async def _end(self) -> None:
        """End the session, if there is one."""
        session_id = self._session_id
        self._session_id = None
        self._is_over = True
        if session_id is not None:
            with contextlib.suppress(SessionUnknown):
                await self._sessions.delete(session_id)


def _parsed(raw: str | bytes) -> Any:
    """Return the JSON of a frame. Raises: _Refused."""
    try:
        return from_json(raw)
    except ValueError as error:
        try:
            return repaired(raw)
        except ValueError:
            raise _Refused("INVALID_JSON", f"Invalid JSON: {error}") from error


def _stepped(result: StepResult) -> dict[str, Any]:
    """Return the frame for the result of an action."""
    metadata = result.as_dict()
    for name in ("observation", "reward", "done"):
        del metadata[name]
    return _observation(result.observation, result.reward, is_done=result.done, metadata=metadata)


def _observation(
    text: str, reward: float | None, *, is_done: bool, metadata: dict[str, Any]
) -> dict[str, Any]:
    """Return the frame; typed and untyped clients read the metadata at different positions."""
    content = {"observation": {"text": text, "metadata": metadata}, "reward": reward}
    return {"type": "observation", "data": content | {"done": is_done, "metadata": metadata}}

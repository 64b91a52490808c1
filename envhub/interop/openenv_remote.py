"""An OpenEnv server as an environment: `env.url=http://... env.dialect=openenv`."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from common.config.env import RemoteOptions
from common.errors import ConfigError
from common.formats.answers import TOOL_FORM, tools_text
from common.http.blocking import request
from common.http.proxies import ProxyFailed, route_note, without_login
from common.http.sessions import open_session
from envhub.env import (
    EnvFailure,
    EnvSpec,
    Isolation,
    StepResult,
    Style,
    SubsetSpec,
    action_text,
    parse_item,
)
from envhub.interop.remote_episode import RemoteEpisode
from envhub.interop.texts import (
    SUCCESS_KEYS,
    TRUNCATED_KEYS,
    BadAction,
    RewardRule,
    Rewards,
    check_sendable,
    parse_json,
    parse_tool_call,
    reported_truth,
)

ASK_S = 10.0  # Time limit of a request for the server's description.
MAX_FRAME_BYTES = 16 << 20
CLOSE_S = 1.0  # Time limit for a server to close a socket, and again for its close frame.
RETRY_S = 0.25  # Seconds between two attempts to get a session from a full or unreachable server.
NOT_THERE = "NOT_THERE"  # Code of a failure: no server listens, for example during a restart.


class OpenEnvFailure(EnvFailure):
    """The server failed; the text names it. `code` is the server's error code, "" without one."""

    def __init__(self, text: str, *, code: str = "") -> None:
        super().__init__(text)
        self.code = code


class OpenEnvClosed(OpenEnvFailure):
    """The server, or a proxy in between, closed the socket in the middle of an episode."""


def ask_server(url: str, path: str, body: object = None) -> tuple[int, Any]:
    """Return status and JSON of one request (POST if it has a body); None for other content.

    Raises: ConfigError: no answer.
    """
    raw = None if body is None else json.dumps(body).encode()
    shown = f"env.url={without_login(url)}: {path}"
    try:
        answer = request(
            f"{url.rstrip('/')}{path}",
            method="GET" if raw is None else "POST",
            body=raw,
            headers={"Content-Type": "application/json"},
            timeout_s=ASK_S,
            max_bytes=MAX_FRAME_BYTES,
        )
    except (OSError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"{shown}: no answer ({reason})") from error
    if answer.is_by_proxy:
        raise ConfigError(f"{shown}: the answer is {answer.shown}")
    try:
        return answer.status, json.loads(answer.body)
    except ValueError:
        return answer.status, None


class Socket:
    """The socket of one episode.

    A task reads the socket continuously. Thus the server's pings are answered while the policy
    generates for minutes, and a close is detected before the next action is sent. Frames have no
    ids: after a timeout the caller must close the socket.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, url: str) -> None:
        self._socket = socket
        self._shown = without_login(url)
        self._frames: asyncio.Queue[str | None] = asyncio.Queue()  # None marks the end.
        self._why = ""  # Reason of the close.
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, session: aiohttp.ClientSession, url: str) -> "Socket":
        """Return a socket. Raises: OpenEnvFailure: no such server."""
        try:
            timeout = aiohttp.ClientWSTimeout(ws_close=CLOSE_S)  # pyright: ignore[reportCallIssue]
            socket = await session.ws_connect(
                f"{url}/ws", max_msg_size=MAX_FRAME_BYTES, timeout=timeout
            )
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            is_refusal = isinstance(error, aiohttp.ClientResponseError)
            text = f"OpenEnv server {without_login(url)}: no WebSocket: {reason}{route_note(url)}"
            raise OpenEnvFailure(text, code="" if is_refusal else NOT_THERE) from error
        return cls(socket, url)

    async def ask(self, frame: dict[str, Any], what: str, *, timeout_s: float) -> dict[str, Any]:
        """Return the data of the answer to a frame.

        Raises:
            OpenEnvClosed: the socket is closed.
            OpenEnvFailure: an error frame, an invalid answer, or a timeout.
        """
        try:
            async with asyncio.timeout(timeout_s):
                if not self._why:  # After a close, an error frame may still be queued.
                    with contextlib.suppress(ConnectionError):
                        await self._socket.send_str(json.dumps(frame, ensure_ascii=False))
                text = await self._frames.get()
        except TimeoutError as error:
            raise self._failure(f"{what}: no answer within {timeout_s:g} s") from error
        if text is None:
            self._frames.put_nowait(None)
            raise OpenEnvClosed(f"OpenEnv server {self._shown} closed the socket: {self._why}")
        return self._data(text, what)

    def _data(self, text: str, what: str) -> dict[str, Any]:
        """Return the data of an answer. Raises: OpenEnvFailure: it is an error."""
        try:
            answer = json.loads(text)
            data = answer["data"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise self._failure(f"unexpected answer to {what}: {text[:200]!r}") from error
        if not isinstance(data, dict):
            raise self._failure(f"unexpected answer to {what}: {text[:200]!r}")
        if answer.get("type") == "error":
            code = str(data.get("code", ""))
            message = "; ".join([str(data.get("message", "")), *_problems(data)])
            raise self._failure(f"{what} was refused ({code}): {message[:1000]}", code=code)
        return data

    def _failure(self, text: str, *, code: str = "") -> OpenEnvFailure:
        """Return the error of this server."""
        return OpenEnvFailure(f"OpenEnv server {self._shown}: {text}", code=code)

    async def _read(self) -> None:
        """Queue frames until the socket is closed, and record the reason."""
        while True:
            message = await self._socket.receive()
            if message.type is aiohttp.WSMsgType.TEXT:
                self._frames.put_nowait(message.data)
                continue
            if message.type is aiohttp.WSMsgType.CLOSE:
                self._why = f"code {message.data} {message.extra or ''}".rstrip()
            elif message.type is aiohttp.WSMsgType.BINARY:
                self._why = "it sent a binary frame"
            else:
                cause = self._socket.exception()
                self._why = f"{cause!r}" if cause else "the connection was lost"
            self._frames.put_nowait(None)
            return

    async def close(self) -> None:
        """Send a close frame, and wait briefly for the server to free the session's place."""
        if not self._why:
            with contextlib.suppress(ConnectionError):
                await self._socket.send_str('{"type":"close"}')
            await asyncio.wait([self._reader], timeout=CLOSE_S)
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._socket.close()


def _problems(data: dict[str, Any]) -> list[str]:
    """Return the details of a VALIDATION_ERROR."""
    errors = data.get("errors")
    listed = [each for each in errors if isinstance(each, dict)] if isinstance(errors, list) else []
    return [f"{'.'.join(map(str, e.get('loc', ())))}: {e.get('msg', '')}" for e in listed[:5]]


# Schema titles that mean tool calls.
TOOL_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerDescription:
    """The description that a server gives of itself.

    `splits` maps train and test to the server's split names and sizes; without them an item is a
    seed. `text_field` is the action field for the agent's text; "" if the text is the action's
    JSON.
    """

    description: str
    schema: dict[str, Any]
    text_field: str
    has_tools: bool
    splits: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])


def describe_server(options: RemoteOptions) -> ServerDescription:
    """Return a server's description of itself.

    Raises: ConfigError: no answer, not an OpenEnv server, or a configured name is missing there.
    """
    url = options.url.rstrip("/")
    status, schemas = ask_server(url, "/schema")
    schema = schemas.get("action") if isinstance(schemas, dict) else None
    if status != 200 or not isinstance(schema, dict):
        raise ConfigError(
            f"env.url={without_login(url)}: /schema answered {status}, so this is not an OpenEnv"
            " server; correct env.url or env.dialect"
        )
    properties = [name for name in schema.get("properties", {}) if name != "metadata"]
    required = [name for name in schema.get("required", []) if name in properties]
    chosen = options.action_field
    if chosen and chosen not in properties:
        raise ConfigError(
            f"env.action_field={chosen!r}: the server's actions have only {properties}"
        )
    if not chosen and len(required or properties) == 1:
        chosen = (required or properties)[0]
    _, metadata = ask_server(url, "/metadata")
    described = metadata.get("description") if isinstance(metadata, dict) else None
    return ServerDescription(
        description=str(described or ""),
        schema=schema,
        text_field=chosen,
        has_tools=not options.action_field and schema.get("title") in TOOL_ACTIONS,
        splits=_splits(url, options),
    )


def _splits(url: str, options: RemoteOptions) -> dict[str, tuple[str, int]]:
    """Return the server's names and sizes of train and test; {} if it lists no tasks.

    Raises: ConfigError: no answer, no such split, or a listed split without a size.
    """
    status, names = ask_server(url, "/list_environments")
    if status != 200 or not isinstance(names, list) or not names:
        return {}
    base = f"/{names[0]}"
    status, listed = ask_server(url, f"{base}/splits")
    offered = listed if status == 200 and isinstance(listed, list) else []
    splits: dict[str, tuple[str, int]] = {}
    for ours, asked in (("train", options.train_items), ("test", options.test_items)):
        kinds = ("train",) if ours == "train" else ("test", "validation")
        fitting = [each["name"] for each in offered if asked and each.get("name") == asked]
        if asked and not fitting:
            names = [each.get("name") for each in offered]
            raise ConfigError(f"env.{ours}_items={asked!r}: the server's splits are {names}")
        fitting += [each["name"] for each in offered if each.get("name") == ours]
        fitting += [each["name"] for each in offered if each.get("type") in kinds]
        if not fitting:
            continue
        status, reply = ask_server(url, f"{base}/num_tasks", {"split": fitting[0]})
        num = reply.get("num_tasks") if isinstance(reply, dict) else None
        if status != 200 or type(num) is not int:
            raise ConfigError(
                f"env.url={without_login(url)}: {base}/num_tasks answered {status} without a number"
                f" for the split {fitting[0]!r}, which {base}/splits lists"
            )
        splits[ours] = (fitting[0], num)
    return splits


def instruction_of(offer: ServerDescription) -> str:
    """Return the agent's instruction: the environment and the form of its actions."""
    form = 'Answer with one action. What follows "Action:" is sent.'
    if offer.has_tools:
        form = TOOL_FORM
    elif not offer.text_field:
        fields = json.dumps(offer.schema.get("properties", {}), ensure_ascii=False)
        form = f'Answer with one action, as a JSON object after "Action:". Its fields: {fields}'
    return f"{offer.description}\n{form}".strip()


NAME = "openenv"
SUBSET = "all"
TEST_SEED = 1_000_000_000  # First seed of a test item; seeds of training items begin at 0.
NUM_SEEDS = (10_000, 1_000)  # Training and test items of a server that lists no tasks.
KINDS: dict[str, Callable[[str], object]] = {"string": str, "integer": int, "number": float}
REFUSALS = (
    "VALIDATION_ERROR",
    "INVALID_JSON",
)  # Error codes of actions that a server cannot parse.
TRUTHS = {"true": True, "false": False}


class OpenEnvEpisode(RemoteEpisode):
    """One episode on an OpenEnv server; it has its own socket."""

    def __init__(self, server: "OpenEnvServer") -> None:
        super().__init__(server.rule.start_score)
        self._server = server
        self._offer = server.offer
        self._options = server.options
        self._socket: Socket | None = None
        self._tools: list[str] = []
        self._rewards = Rewards(server.rule)

    async def reset(self, item_id: str, seed: int) -> str:
        """Start an item: a task of the server's split, or an episode with the item's seed.

        Raises: UnknownItem, OpenEnvFailure.
        """
        item = parse_item(item_id, {SUBSET: self._server.subset})
        if item.split in self._offer.splits:
            wanted: dict[str, Any] = {"split": self._offer.splits[item.split][0]}
            wanted["index"] = item.index
        else:
            wanted = {"seed": item.index + (TEST_SEED if item.split == "test" else 0)}
        self._socket, data = await self._server.begin(wanted)
        self._first = self._text(data)
        if self._offer.has_tools:
            listed = await self._send_action({"type": "list_tools"}, "the list of tools")
            tools = listed.get("observation", {}).get("tools", [])
            self._tools = [str(tool["name"]) for tool in tools]
            self._first = f"{tools_text(tools)}\n{self._first}"
        self._observation = self._first
        return self._first

    async def step(self, action: str) -> StepResult:
        """Send an action. Raises: OpenEnvFailure: the server failed, or the socket is closed."""
        if self._is_done or self._socket is None:
            raise RuntimeError("step before reset, or after the episode has ended")
        try:
            sent = self._action(action)
            check_sendable(sent)
            data = await self._send_action(sent, "a step")
        except BadAction as error:
            return self._result(str(error), is_valid=False)
        except OpenEnvFailure as error:
            if error.code not in REFUSALS:
                raise
            return self._result(str(error).partition("): ")[2], is_valid=False)
        is_done = data.get("done") is True
        metadata = _metadata(data)
        self._reward = self._rewards.add(data.get("reward"), is_last=is_done)
        self._is_done = is_done
        reported = reported_truth(metadata, SUCCESS_KEYS)
        self._is_success = is_done and (self._reward >= 1.0 if reported is None else reported)
        self._is_truncated = is_done and reported_truth(metadata, TRUNCATED_KEYS) is True
        is_valid = metadata.get("is_valid")
        state = metadata.get("state")
        return self._result(
            self._text(data),
            is_valid=is_valid if isinstance(is_valid, bool) else True,
            state=state if isinstance(state, str) else "",
        )

    async def valid_actions(self) -> list[str]:
        """Return []: the servers do not list actions."""
        return []

    async def close(self) -> None:
        socket = self._socket
        self._socket = None
        if socket is not None:
            await self._server.end(socket)

    async def _send_action(self, action: dict[str, Any], what: str) -> dict[str, Any]:
        """Send an action; return the data of the answer."""
        assert self._socket is not None
        frame = {"type": "step", "data": action}
        timeout_s = self._options.timeout_s
        return await self._socket.ask(frame, what, timeout_s=timeout_s)

    def _action(self, text: str) -> dict[str, Any]:
        """Return the action fields for a text. Raises: BadAction."""
        if self._offer.has_tools:
            name, arguments = parse_tool_call(text, self._tools)
            return {"type": "call_tool", "tool_name": name, "arguments": arguments}
        name = self._offer.text_field
        if not name:
            return parse_json(text)
        kind = self._offer.schema.get("properties", {}).get(name, {}).get("type", "string")
        value = action_text(text)
        try:
            read = TRUTHS[value.lower()] if kind == "boolean" else KINDS.get(kind, str)(value)
        except (ValueError, LookupError) as error:
            raise BadAction(f"The action must be of type {kind}.") from error
        return {name: read}

    def _text(self, data: dict[str, Any]) -> str:
        """Return the text of an observation, as the agent receives it."""
        observation = data.get("observation")
        if not isinstance(observation, dict):
            raise OpenEnvFailure(f"{self._server.shown}: an answer without an observation")
        fields = {k: v for k, v in observation.items() if k not in ("metadata", "done", "reward")}
        name = self._options.observation_field
        if name in fields:
            fields = {name: fields[name]}
        elif name and self._first:  # A reset's observation may have other fields.
            names = ", ".join(fields) or "none"
            raise OpenEnvFailure(
                f"{self._server.shown}: an observation without {name!r}"
                f" (env.observation_field); it has {names}"
            )
        filled = [value for value in fields.values() if value not in (None, "", [], {})]
        if len(filled) == 1 and isinstance(filled[0], str):
            return filled[0]
        return json.dumps(fields.get(name, fields), ensure_ascii=False)


class OpenEnvServer:
    """Data shared by the episodes on one server: its offer, its sizes, one connection pool."""

    def __init__(self, options: RemoteOptions, offer: ServerDescription) -> None:
        self.options = options
        self.offer = offer
        self.url = options.url.rstrip("/")
        self.shown = f"OpenEnv server {without_login(self.url)}"
        self.rule = RewardRule(
            kind="sum" if options.reward == "sum" else "last",
            least=options.min_reward,
            most=options.max_reward,
        )
        sizes = [self._num(split, i) for i, split in enumerate(("train", "test"))]
        turns = options.max_turns
        self.subset = SubsetSpec(num_train=sizes[0], num_test=sizes[1], max_turns=turns)
        self._session: aiohttp.ClientSession | None = None

    def _num(self, split: str, place: int) -> int:
        """Return the number of items of a split: the requested number, limited by the offer."""
        asked = (self.options.num_train, self.options.num_test)[place]
        if split in self.offer.splits:
            num = self.offer.splits[split][1]
            return num if asked < 0 else min(asked, num)
        if self.offer.splits:
            return 0
        return NUM_SEEDS[place] if asked < 0 else asked

    async def begin(self, wanted: dict[str, Any]) -> tuple[Socket, dict[str, Any]]:
        """Return the socket of a new episode, and the data of its first observation.

        A server that has no free session or restarts is retried for at most one answer timeout.

        Raises: OpenEnvFailure.
        """
        if self._session is None:
            self._session = self._open_session()
        full: OpenEnvFailure | None = None
        try:
            async with asyncio.timeout(self.options.timeout_s):
                while True:
                    try:
                        return await self._reset(self._session, wanted)
                    except OpenEnvFailure as error:
                        if error.code not in ("CAPACITY_REACHED", NOT_THERE):
                            raise
                        full = error
                    await asyncio.sleep(RETRY_S)
        except TimeoutError as error:
            raise full or OpenEnvFailure(
                f"{self.shown}: no reset within {self.options.timeout_s:g} s"
            ) from error

    def _open_session(self) -> aiohttp.ClientSession:
        """Return a pool of connections. Raises: OpenEnvFailure: the proxy is unsupported."""
        try:
            return open_session(self.url)
        except ProxyFailed as error:
            raise OpenEnvFailure(f"{self.shown}: {error}") from error

    async def _reset(
        self, session: aiohttp.ClientSession, wanted: dict[str, Any]
    ) -> tuple[Socket, dict[str, Any]]:
        """Open a socket and begin an episode on it; return both."""
        async with contextlib.AsyncExitStack() as undo:
            socket = await Socket.open(session, self.url)
            undo.push_async_callback(socket.close)
            frame = {"type": "reset", "data": wanted}
            data = await socket.ask(frame, f"a reset to {wanted}", timeout_s=self.options.timeout_s)
            undo.pop_all()
        return socket, data

    async def end(self, socket: Socket) -> None:
        await socket.close()

    async def stop(self) -> None:
        if self._session is not None:
            await self._session.close()


def make_spec(remote: RemoteOptions) -> EnvSpec:
    """Return the catalogue entry of an OpenEnv server, named after the dialect.

    Raises: ConfigError: see `describe_server`.
    """
    server = OpenEnvServer(remote, describe_server(remote))

    def make(_: Style) -> OpenEnvEpisode:
        return OpenEnvEpisode(server)

    return EnvSpec(
        name=NAME,
        subsets={SUBSET: server.subset},
        instruction=dict.fromkeys(Style, instruction_of(server.offer)),
        make=make,
        isolation=Isolation.TASK,
        sessions_per_worker=remote.max_sessions,
        step_timeout_s=2 * (remote.timeout_s + CLOSE_S),  # A reset and the list of tools.
        is_repeatable=False,
        start_score=server.rule.start_score,
        stop=server.stop,
        stop_timeout_s=CLOSE_S,
    )


def _metadata(data: dict[str, Any]) -> dict[str, Any]:
    """Return an answer's metadata, from both possible positions."""
    observation = data.get("observation")
    inner = observation.get("metadata") if isinstance(observation, dict) else None
    metadata: dict[str, Any] = {}
    for part in (inner, data.get("metadata")):
        metadata |= part if isinstance(part, dict) else {}
    return metadata

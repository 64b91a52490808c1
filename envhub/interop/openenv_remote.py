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
from common.http.proxies import ProxyFailed, without_login
from common.http.sessions import open_session
from envhub.env import EnvSpec, Isolation, StepResult, Style, SubsetSpec, action_text, parse_item
from envhub.interop.openenv_socket import (
    CLOSE_S,
    NOT_THERE,
    RETRY_S,
    OpenEnvFailure,
    Socket,
    ask_server,
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
    known = [name for name in schema.get("properties", {}) if name != "metadata"]
    required = [name for name in schema.get("required", []) if name in known]
    chosen = options.action_field
    if chosen and chosen not in known:
        raise ConfigError(f"env.action_field={chosen!r}: the server's actions have only {known}")
    if not chosen and len(required or known) == 1:
        chosen = (required or known)[0]
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
    """Return the server's names and sizes of train and test; {} if it lists no tasks."""
    status, names = ask_server(url, "/list_environments")
    if status != 200 or not isinstance(names, list) or not names:
        return {}
    base = f"/{names[0]}"
    status, listed = ask_server(url, f"{base}/splits")
    known = listed if status == 200 and isinstance(listed, list) else []
    found: dict[str, tuple[str, int]] = {}
    for ours, asked in (("train", options.train_items), ("test", options.test_items)):
        kinds = ("train",) if ours == "train" else ("test", "validation")
        fitting = [each["name"] for each in known if asked and each.get("name") == asked]
        if asked and not fitting:
            names = [each.get("name") for each in known]
            raise ConfigError(f"env.{ours}_items={asked!r}: the server's splits are {names}")
        fitting += [each["name"] for each in known if each.get("name") == ours]
        fitting += [each["name"] for each in known if each.get("type") in kinds]
        if not fitting:
            continue
        status, reply = ask_server(url, f"{base}/num_tasks", {"split": fitting[0]})
        if status == 200 and isinstance(reply, dict):
            found[ours] = (fitting[0], int(reply.get("num_tasks", 0)))
    return found


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
            known = ", ".join(fields) or "none"
            raise OpenEnvFailure(
                f"{self._server.shown}: an observation without {name!r}"
                f" (env.observation_field); it has {known}"
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
    found: dict[str, Any] = {}
    for part in (inner, data.get("metadata")):
        found |= part if isinstance(part, dict) else {}
    return found

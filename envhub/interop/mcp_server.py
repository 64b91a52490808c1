"""A server of MCP tools as an environment: `mcp:calculator.yaml`."""

import asyncio
import hashlib
import json
import time
import uuid
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from common.errors import ConfigError
from common.formats.answers import TEXT_ANSWERS, TOOL_FORM, tools_text
from common.http.proxies import route_note, without_login
from common.http.sessions import open_httpx
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
from envhub.interop.texts import (
    SUCCESS_KEYS,
    TRUNCATED_KEYS,
    BadAction,
    RewardRule,
    Rewards,
    check_sendable,
    is_call,
    parse_tool_call,
    reported_truth,
    sample_call,
    shortened,
)
from envhub.interop.yaml_environments import (
    SUBSET,
    optional_package,
    parse_items,
    read_description,
    rule_of,
    run_coroutine,
    split_of,
)

CLOSE_S = 5.0  # Time limit for a server to end.
INVALID_PARAMS = -32602  # JSON-RPC code of arguments that the server refuses.
CONNECTION_CLOSED = -32000
# Code that a restarted server sends for a session from before the restart.
INVALID_REQUEST = -32600
RETRY_S = 0.25  # Seconds between two attempts to reach a server that does not respond.
MODES = {"auto": "auto", "2025-11-25": "legacy", "2026-07-28": "2026-07-28"}
MAX_PAGES = 100  # Maximum pages of a tool list.
Answer = TypeVar("Answer")


class McpFailure(EnvFailure):
    """The server failed; the text names it.

    `is_refusal`: it refused the arguments. `is_away`: no server listens at the address.
    """

    def __init__(self, text: str, *, is_refusal: bool = False, is_away: bool = False) -> None:
        super().__init__(text)
        self.is_refusal = is_refusal
        self.is_away = is_away


@dataclass(kw_only=True)
class McpOptions:
    """Options in the YAML file of an MCP server and its tasks."""

    url: str = ""  # URL of streamable HTTP.
    headers: dict[str, str] = field(default_factory=dict[str, str])
    # Command of a server that communicates over pipes.
    command: list[str] = field(default_factory=list[str])
    # Environment variables of that command.
    env: dict[str, str] = field(default_factory=dict[str, str])
    revision: str = "auto"  # Protocol revision.
    items: str = ""  # A file beside this one, a resource's URI, or tool:NAME.
    num_test: int = -1  # Number of last items for testing, if items name no split; -1: a tenth.
    session: str = ""  # Argument that carries the session.
    begin: str = ""  # Tool that begins an episode and returns the session.
    submit: str = "submit"  # Tool that ends an episode.
    plain_answers: bool = False  # Whether a turn without a call is the answer.
    hidden: list[str] = field(default_factory=list[str])  # Tools that are hidden from the agent.
    min_reward: float = 0.0
    max_reward: float = 1.0
    max_turns: int = 30
    max_chars: int = 8_000  # Maximum characters of one observation.
    max_sessions: int = 32  # Maximum number of live episodes.
    timeout_s: float = 60.0  # Seconds for one answer.
    start_timeout_s: float = 60.0  # Seconds for a connection, and for a command to start.

    @property
    def shown(self) -> str:
        """Name of the server in texts for people."""
        return f"MCP server {without_login(self.url) or ' '.join(self.command)}"


class Link:
    """One connection. The package's client must be entered and left by the same task, `_owner`.

    Example: two episodes wait for answers and the server dies. Both get McpFailure immediately,
    `is_lost` is set, and later episodes open another link.
    """

    def __init__(self, options: McpOptions) -> None:
        self._options = options
        self._client: Any = None
        self._leave = asyncio.Event()
        self._ready = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None
        self.is_lost = False

    @classmethod
    async def open(cls, options: McpOptions, *, until_s: float = 0.0) -> "Link":
        """Return a connection.

        Args:
            until_s: time on the monotonic clock; before it, a server that is not reachable is
                retried.

        Raises: McpFailure: no such server.
        """
        while True:
            link = cls(options)
            link._owner = asyncio.create_task(link._own())
            try:
                ready = link._ready.wait()
                await link._answer(ready, "a connection", timeout_s=options.start_timeout_s)
                return link
            except McpFailure as error:
                await link.close()
                if not error.is_away or time.monotonic() >= until_s:
                    raise
            await asyncio.sleep(RETRY_S)

    async def tools(self) -> list[Any]:
        """Return all tools of the server. Raises: McpFailure."""
        tools: list[Any] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await self._answer(self._client.list_tools(cursor=cursor), "its list of tools")
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return tools
        raise McpFailure(f"{self._options.shown}: the list of tools exceeds {MAX_PAGES} pages")

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Return the result of a tool. Raises: McpFailure."""
        return await self._answer(self._client.call_tool(name, arguments), f"tool {name!r}")

    async def read(self, uri: str) -> str:
        """Return the text of a resource. Raises: McpFailure."""
        result = await self._answer(self._client.read_resource(uri), f"resource {uri!r}")
        return "\n".join(getattr(each, "text", "") for each in result.contents)

    async def close(self) -> None:
        """Close the connection, and wait until a started command has ended."""
        self._leave.set()
        self.is_lost = True
        if self._owner is not None:
            await asyncio.wait([self._owner], timeout=CLOSE_S)
            self._owner.cancel()
            await asyncio.wait([self._owner], timeout=CLOSE_S)

    async def _own(self) -> None:
        """Enter the connection, wait for `close`, and leave it, all in one task."""
        mcp = optional_package("mcp", "mcp")
        options = self._options
        mode = MODES[options.revision]
        async with AsyncExitStack() as stack:
            if options.url:
                http = optional_package("mcp.client.streamable_http", "mcp")
                web: Any = optional_package("httpx2", "mcp")
                # `_answer` enforces the deadline.
                timeouts = web.Timeout(options.timeout_s, read=None)
                client = open_httpx(web, options.url, headers=options.headers, timeout=timeouts)
                await stack.enter_async_context(client)
                target = http.streamable_http_client(options.url, http_client=client)
            else:
                first, *others = options.command
                target = mcp.StdioServerParameters(command=first, args=others, env=options.env)
            entered = mcp.Client(target, mode=mode, cache=None)
            self._client = await stack.enter_async_context(entered)
            # This revision connects without a message.
            if options.url and mode == MODES["2026-07-28"]:
                await self._client.list_tools()
            self._ready.set()
            await self._leave.wait()

    async def _answer(
        self, asked: Awaitable[Answer], what: str, *, timeout_s: float = 0.0
    ) -> Answer:
        """Return an answer in time. Raises: McpFailure: error, timeout, or lost connection."""
        assert self._owner is not None
        shown = self._options.shown
        timeout_s = timeout_s or self._options.timeout_s
        waits = asyncio.ensure_future(asked)
        done, _ = await asyncio.wait(
            [waits, self._owner], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if waits in done and not waits.cancelled():
            error = waits.exception()
            if error is None:
                return waits.result()
        else:
            waits.cancel()
            await asyncio.wait([waits], timeout=CLOSE_S)
            if not done:
                self.is_lost = True  # Other sessions of this link are or will be silent as well.
                raise McpFailure(f"{shown}: {what}: no answer within {timeout_s:g} s")
            is_over = self._owner.done() and not self._owner.cancelled()
            error = self._owner.exception() if is_over else None
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        code = getattr(error, "code", None)
        if code == INVALID_PARAMS:
            raise McpFailure(f"{shown}: {what}: {error}", is_refusal=True) from error
        is_gone = self._owner.done() or error is None
        self.is_lost = self.is_lost or is_gone or code in (CONNECTION_CLOSED, INVALID_REQUEST)
        why = f"{type(error).__name__}: {error}" if error else "the connection was lost"
        web: Any = optional_package("httpx2", "mcp")
        is_away = isinstance(error, web.ConnectError)
        if self._options.url and isinstance(error, (web.HTTPError, type(None))):
            why += route_note(self._options.url)
        raise McpFailure(f"{shown}: {what}: {why:.1000}", is_away=is_away) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """Data shared by the episodes on one server."""

    options: McpOptions
    items: list[dict[str, Any]]
    places: Mapping[str, list[int]]  # Positions of each split's items.
    subset: SubsetSpec
    rule: RewardRule
    tools: Mapping[str, dict[str, Any]]  # The agent's tools, by name.
    # Whether the tool that ends an episode belongs to the server, and its result is the reward.
    grades: bool
    # The single connection of all sessions, if an argument identifies the session.
    shared: list[Link]
    # Only one session at a time opens it.
    connecting: asyncio.Lock = field(default_factory=asyncio.Lock)


class McpEpisode:
    """One episode: tool calls, until one call ends it.

    An error of a tool is an observation. A call that no tool accepts is an invalid action.
    """

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._options = tasks.options
        self._link: Link | None = None
        self._item: dict[str, Any] = {}
        self._session: dict[str, str] = {}
        self._first = self._text = ""
        self._is_done = self._is_truncated = False

    async def reset(self, item_id: str, seed: int) -> str:
        """Begin a session of the item. Raises: UnknownItem, McpFailure."""
        tasks = self._tasks
        options = self._options
        item = parse_item(item_id, {SUBSET: tasks.subset})
        self._item = tasks.items[tasks.places[item.split][item.index]]
        self._link = await self._connect()
        beginning = ""
        if options.session:
            self._session = {options.session: uuid.uuid4().hex}
        if options.begin:
            arguments = self._item.get("arguments", {})
            begun = await self._link.call(options.begin, dict(arguments))
            beginning = self._tool_text(begun)
            if begun.is_error:
                raise McpFailure(f"{options.shown}: {options.begin!r} failed: {beginning:.500}")
            if options.session:
                handle = _field(begun, options.session)
                self._session = {
                    options.session: beginning.strip() if handle is None else str(handle)
                }
                beginning = str(_field(begun, "observation") or "")
        parts = filter(None, [str(self._item["prompt"]), beginning])
        self._first = self._text = "\n".join(parts)
        return self._first

    async def step(self, action: str) -> StepResult:
        """Call one tool. Raises: McpFailure: the server failed, or reported no reward."""
        if self._is_done or self._link is None:
            raise RuntimeError("step before reset, or after the episode has ended")
        try:
            name, arguments = self._parse(action)
            self._check(name, arguments)
        except BadAction as error:
            return self._result(str(error), is_valid=False)
        if name == self._options.submit and not self._tasks.grades:
            return await self._submit(str(arguments["answer"]))
        try:
            result = await self._link.call(name, arguments | self._session)
        except McpFailure as error:
            if not error.is_refusal:
                raise
            return self._result(str(error).partition(": ")[2], is_valid=False)
        if name == self._options.submit and not result.is_error:
            return self._rewarded(result)
        return self._result(self._tool_text(result))

    async def _submit(self, answer: str) -> StepResult:
        """Return the result for an answer: from the item's `check` tool, or by comparison.

        Raises: McpFailure: the tool failed, or refused its arguments.
        """
        check = self._item.get("check")
        if check is not None:
            arguments = {"answer": answer, **check.get("arguments", {}), **self._session}
            assert self._link is not None
            return self._rewarded(await self._link.call(str(check["tool"]), arguments))
        right = self._item["answer"]
        accepted = right if isinstance(right, list) else [right]
        is_right = _plain(answer) in {_plain(str(each)) for each in accepted}
        self._is_done = True
        return self._result(
            "Right." if is_right else "Wrong.", reward=float(is_right), is_success=is_right
        )

    def _rewarded(self, result: Any) -> StepResult:
        """Return the end of an episode; its reward is a number or JSON in the tool's result."""
        text = self._tool_text(result)
        if result.is_error:
            raise McpFailure(f"{self._options.shown}: the grading tool failed: {text:.500}")
        reward = _field(result, "reward")
        if reward is None:
            reward = _field(result, "result")  # The package wraps a plain number in this field.
        if reward is None:
            try:
                reward = float(text)
            except ValueError as error:
                raise McpFailure(
                    f"{self._options.shown}: no reward in {text:.200!r}; return a number, or JSON"
                    ' with "reward"'
                ) from error
        total = Rewards(self._tasks.rule).add(reward, is_last=True)
        content = _content(result)
        reported = reported_truth(content, SUCCESS_KEYS)
        self._is_done = True
        self._is_truncated = reported_truth(content, TRUNCATED_KEYS) is True
        is_success = total >= 1.0 if reported is None else reported
        return self._result(text, reward=total, is_success=is_success)

    async def valid_actions(self) -> list[str]:
        """Return one call of each tool, with example arguments."""
        tools = self._tasks.tools.items()
        return [sample_call(name, tool["input_schema"]) for name, tool in tools]

    async def expert_action(self) -> str | None:
        """Return the correct answer if the item has one."""
        right = self._item.get("answer")
        if self._tasks.grades or right is None:
            return None
        answer = str(right[0] if isinstance(right, list) else right)
        return json.dumps({"tool": self._options.submit, "arguments": {"answer": answer}})

    async def render(self) -> str:
        return self._text

    async def fingerprint(self) -> str:
        """Return the hash of the item, the only part of the state available here."""
        return hashlib.sha256(json.dumps(self._item, sort_keys=True).encode()).hexdigest()

    async def close(self) -> None:
        link = self._link
        self._link = None
        if link is not None and link not in self._tasks.shared:
            await link.close()

    async def _connect(self) -> Link:
        """Return a connection: the episode's own, or a shared one if an argument is the session.

        The connection is retried while a server restarts.
        """
        until_s = time.monotonic() + self._options.start_timeout_s
        if not self._options.session:
            return await Link.open(self._options, until_s=until_s)
        shared = self._tasks.shared
        async with self._tasks.connecting:
            for lost in [link for link in shared if link.is_lost]:
                shared.remove(lost)
                await lost.close()
            if not shared:
                shared.append(await Link.open(self._options, until_s=until_s))
            return shared[-1]

    def _parse(self, action: str) -> tuple[str, dict[str, Any]]:
        """Return the tool that a text calls, and its arguments. Raises: BadAction."""
        text = action_text(action)
        if self._options.plain_answers and text and not is_call(action):
            return self._options.submit, {"answer": text}
        return parse_tool_call(action, list(self._tasks.tools))

    def _check(self, name: str, arguments: dict[str, Any]) -> None:
        """Raise BadAction if the arguments do not match the tool's schema or JSON."""
        check_sendable(arguments)
        schema: Any = optional_package("jsonschema", "mcp")
        checker = schema.Draft202012Validator(self._tasks.tools[name]["input_schema"])
        try:
            wrong = next(checker.iter_errors(arguments), None)
        except (ArithmeticError, RecursionError, ValueError) as error:
            raise BadAction(f"{name}: the arguments cannot be checked: {error}"[:500]) from error
        if wrong is not None:
            where = ".".join(map(str, wrong.path))
            raise BadAction(f"{name}: {f'{where}: ' if where else ''}{wrong.message}"[:500])

    def _tool_text(self, result: Any) -> str:
        """Return a tool's result as valid Unicode text of limited length."""
        parts = [block_text(each) for each in result.content]
        if not parts and result.structured_content is not None:
            parts = [json.dumps(result.structured_content, ensure_ascii=False)]
        return shortened("\n".join(parts), self._options.max_chars)

    def _result(
        self,
        text: str,
        *,
        is_valid: bool = True,
        reward: float | None = None,
        is_success: bool = False,
    ) -> StepResult:
        """Return the result of a step; without a reward, the start score is used."""
        self._text = text
        return StepResult(
            observation=text,
            reward=self._tasks.rule.start_score if reward is None else reward,
            done=self._is_done,
            is_valid=is_valid,
            is_success=is_success,
            is_truncated=self._is_truncated,
        )


def block_text(block: Any) -> str:
    """Return the text of one part of a result, as the agent receives it."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource":
        return str(getattr(block.resource, "text", f"[resource {block.resource.uri}]"))
    return f"[{block.type} {getattr(block, 'uri', getattr(block, 'mime_type', ''))}]"


def _content(result: Any) -> dict[str, Any]:
    """Return a result's JSON object; {} if it has none."""
    content = result.structured_content
    if content is None and len(result.content) == 1 and result.content[0].type == "text":
        try:
            content = json.loads(result.content[0].text)
        except (ValueError, RecursionError):
            return {}
    return content if isinstance(content, dict) else {}


def _field(result: Any, name: str) -> Any:
    """Return a field of a result's JSON; None if it is missing."""
    return _content(result).get(name)


def _plain(text: str) -> str:
    """Return a text in the normalized form in which answers are compared."""
    return " ".join(text.split()).casefold()


ANSWER = {
    "description": "Ends the episode with your answer.",
    "input_schema": {
        "type": "object",
        "properties": {"answer": {"type": "string"}},
        "required": ["answer"],
    },
}


def make_spec(reference: str) -> EnvSpec:
    """Return the entry of the server that a file describes, named after the file.

    Raises: ConfigError: the file is wrong, the server does not answer, or its tools do not match.
    """
    path, options = read_description(reference, McpOptions)
    if bool(options.url) == bool(options.command):
        raise ConfigError(f"{reference}: exactly one of url and command must be set")
    if options.revision not in MODES:
        revisions = ", ".join(MODES)
        raise ConfigError(f"{reference}: revision={options.revision!r}: must be one of {revisions}")
    optional_package("mcp", "mcp")
    limit_s = options.start_timeout_s + options.timeout_s + 2 * CLOSE_S
    try:
        ask = partial(_describe_server, path, options)
        listed, items = run_coroutine(ask, timeout_s=limit_s + options.timeout_s)
    except McpFailure as error:
        raise ConfigError(f"{reference}: {error}") from error
    grades = options.submit in listed
    for number, item in enumerate(items, 1):
        _check_item(f"{reference}: item {number}", item, grades=grades)
    tools = _agents_tools(reference, options, listed, items)
    if not grades:
        tools[options.submit] = ANSWER
    rule = _rule_of(reference, options, has_grader=grades or any("check" in each for each in items))
    places, subset = split_of(items, num_test=options.num_test, max_turns=options.max_turns)
    tasks = Tasks(
        options=options,
        items=items,
        places=places,
        subset=subset,
        rule=rule,
        tools=tools,
        grades=grades,
        shared=[],
    )

    async def stop() -> None:
        for link in tasks.shared:
            await link.close()

    def make(_: Style) -> McpEpisode:
        return McpEpisode(tasks)

    listed_tools = tools_text([{"name": name, **tool} for name, tool in tools.items()])
    form = f"{listed_tools}\n{TOOL_FORM}{TEXT_ANSWERS if options.plain_answers else ''}"
    return EnvSpec(
        name=path.stem,
        subsets={SUBSET: subset},
        instruction=dict.fromkeys(Style, form),
        make=make,
        isolation=Isolation.WORKER,
        sessions_per_worker=options.max_sessions,
        step_timeout_s=limit_s,  # A connection and its first call.
        is_repeatable=False,
        start_score=rule.start_score,
        tools=tuple(_as_function(name, tool) for name, tool in tools.items()),
        stop=stop,
        stop_timeout_s=2 * CLOSE_S,
    )


def _rule_of(reference: str, options: McpOptions, *, has_grader: bool) -> RewardRule:
    """Return the reward scale; without a tool that computes rewards, an answer is 0 or 1.

    Raises: ConfigError: the bounds are not in order.
    """
    rule = rule_of(reference, options.min_reward, options.max_reward)
    return rule if has_grader else RewardRule()


async def _describe_server(
    path: Path, options: McpOptions
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Return the server's tools by name, and the items. Raises: McpFailure, ConfigError."""
    link = await Link.open(options)
    try:
        tools = {
            tool.name: {"description": tool.description, "input_schema": tool.input_schema}
            for tool in await link.tools()
        }
        source, _, tool = options.items.partition("tool:")
        if not source and tool:
            result = await link.call(tool, {})
            text = "\n".join(block_text(each) for each in result.content)
        elif "://" in options.items:
            text = await link.read(options.items)
        else:
            text = _read(path.parent / options.items)
        return tools, parse_items(text, f"{path}: items={options.items}")
    finally:
        await link.close()


def _agents_tools(
    reference: str,
    options: McpOptions,
    listed: Mapping[str, dict[str, Any]],
    items: list[dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Return the tools that the agent may call, without the session argument.

    Raises: ConfigError: the file names a tool that the server lacks.
    """
    checks = {str(item["check"]["tool"]) for item in items if "check" in item}
    asked = options.items.removeprefix("tool:") if options.items.startswith("tool:") else ""
    named = {*options.hidden, *filter(None, [options.begin, asked]), *checks}
    if missing := named - listed.keys():
        raise ConfigError(f"{reference}: the server has no tool {', '.join(sorted(missing))}")
    tools: dict[str, dict[str, Any]] = {}
    for name, tool in listed.items():
        schema = dict(tool["input_schema"])
        fields = schema.get("properties", {})
        schema["properties"] = {k: v for k, v in fields.items() if k != options.session}
        schema["required"] = [k for k in schema.get("required", []) if k != options.session]
        if name not in named:
            tools[name] = {**tool, "input_schema": schema}
    return tools


def _as_function(name: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the format of chat templates."""
    text = str(tool["description"] or "")
    return {"name": name, "description": text, "parameters": tool["input_schema"]}


def _read(path: Path) -> str:
    """Return a file's text. Raises: ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"items: {path}: {error}") from error


def _check_item(where: str, item: Mapping[str, Any], *, grades: bool) -> None:
    """Raise ConfigError if the item has no prompt, or no answer and no check."""
    if "prompt" not in item or (not grades and not {"answer", "check"} & item.keys()):
        raise ConfigError(f"{where} lacks {'prompt' if grades else 'prompt, and answer or check'}")
    check = item.get("check", {"tool": ""})
    if not isinstance(check, dict) or not isinstance(check.get("tool"), str):
        raise ConfigError(f'{where}: check must be {{"tool": ..., "arguments": {{...}}}}')

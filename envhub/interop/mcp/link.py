"""A connection to an MCP server, over a command's pipes or streamable HTTP."""

import asyncio
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from common.http.proxies import route_note, without_login
from common.http.sessions import open_httpx
from envhub.env import EnvFailure
from envhub.interop.yaml_environments import optional_package

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
        found: list[Any] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await self._answer(self._client.list_tools(cursor=cursor), "its list of tools")
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                return found
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

"""Communication with an OpenEnv server: its description, and the socket of one episode."""

import asyncio
import contextlib
import json
from typing import Any

import aiohttp

from common.errors import ConfigError
from common.http.blocking import request
from common.http.proxies import route_note, without_login
from envhub.env import EnvFailure

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

"""Blocking HTTP requests, each with one timeout for the whole exchange."""

import base64
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from common.http.proxies import BY_PROXY, PROXY_LOGIN, Proxy, ProxyFailed, proxy_for

MAX_ANSWER_BYTES = 64 << 20
POLL_S = 0.2  # Seconds between two requests to a server that is not up yet.
TRY_S = 10.0  # Seconds for one of these requests.
READ_BYTES = 1 << 16


class BadAnswer(OSError):
    """The answer violates HTTP, or the connection ended before the end of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    """An answer with any status."""

    status: int
    reason: str  # Text of the status, such as "Not Found".
    body: bytes
    proxy: Proxy | None = None  # Proxy of the request.

    @property
    def is_ok(self) -> bool:
        """Whether the status means success."""
        return 200 <= self.status < 300

    @property
    def shown(self) -> str:
        """Status for an error message, with the proxy if it may have sent the status."""
        text = f"{self.status} {self.reason}".strip()
        return f"{text} ({self.proxy.route})" if self.proxy and self.is_by_proxy else text

    @property
    def is_by_proxy(self) -> bool:
        """Whether the proxy may have sent the status instead of the server."""
        return self.proxy is not None and self.status in BY_PROXY


def request(
    url: str,
    *,
    method: str = "GET",
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float,
    max_bytes: int = MAX_ANSWER_BYTES,
    is_own: bool = False,
) -> HttpResponse:
    """Return the answer to a request. Redirects are not followed.

    Args:
        url: http or https. A user and a password in it become a header.
        timeout_s: seconds for the whole exchange.
        max_bytes: maximum size of the answer's body.
        is_own: whether the server is a part of the run, see `proxy_for`.

    Raises:
        ValueError: the address is invalid, or the answer is longer than `max_bytes`.
        OSError: there was no answer in time, or a broken one; `ProxyFailed` for a request through
            a proxy.
    """
    parts = _split(url)
    proxy = proxy_for(url, is_own=is_own)
    login = _login("Authorization", parts)
    connection, target, extra = _connect(parts, proxy, timeout_s)
    sent = {**login, **extra, **(headers or {})}
    deadline_s = time.monotonic() + timeout_s
    try:
        connection.request(method, target, body, sent)
        answer = _read(connection, deadline_s, max_bytes, proxy)
    except (OSError, HTTPException) as error:
        reason = str(error) or type(error).__name__
        if proxy is not None:
            raise ProxyFailed(f"{reason} ({proxy.route})") from error
        if isinstance(error, OSError):
            raise
        raise BadAnswer(reason) from error
    finally:
        connection.close()
    if answer.status == PROXY_LOGIN and proxy is not None:
        raise ProxyFailed(f"{answer.status} {answer.reason} ({proxy.route})")
    return answer


def json_when_up(url: str, *, token: str, timeout_s: float) -> tuple[HttpResponse, Any]:
    """Return the answer of a part of the run and its parsed body; wait until that part is up.

    A status of 500 or above, and a body that is not JSON, mean that it is not up. An answer with
    another status than success has no parsed body.

    Raises: TimeoutError: no such answer in time; it has the last reason.
    """
    deadline = time.monotonic() + timeout_s
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    while True:
        try_s = min(TRY_S, max(deadline - time.monotonic(), 0.1))
        try:
            answer = request(url, headers=headers, timeout_s=try_s, is_own=True)
            if answer.status < 500:
                return answer, json.loads(answer.body) if answer.is_ok else None
            reason = answer.shown
        except (OSError, ValueError, RecursionError) as error:
            reason = str(error) or type(error).__name__
        if time.monotonic() + POLL_S > deadline:
            raise TimeoutError(reason)
        time.sleep(POLL_S)


def own_connection(url: str, *, timeout_s: float) -> HTTPConnection:
    """Return an unopened connection to a part of the run, for several requests."""
    parts = _split(url)
    return _connection_class(parts)(parts.hostname or "", parts.port, timeout=timeout_s)


def _split(url: str) -> SplitResult:
    """Return the parts of an address. Raises: ValueError: it is no address of http or https."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("not an address such as http://host:8080")
    return parts


def _connection_class(parts: SplitResult) -> type[HTTPConnection]:
    return HTTPSConnection if parts.scheme == "https" else HTTPConnection


def _connect(
    parts: SplitResult, proxy: Proxy | None, timeout_s: float
) -> tuple[HTTPConnection, str, dict[str, str]]:
    """Return a connection, the target of its request line, and headers for a proxy."""
    host = parts.hostname or ""
    path = urlunsplit(("", "", parts.path or "/", parts.query, ""))
    if proxy is None:
        return _connection_class(parts)(host, parts.port, timeout=timeout_s), path, {}
    between = urlsplit(proxy.url)
    login = _login("Proxy-Authorization", between)
    where = (between.hostname or "", between.port or (443 if between.scheme == "https" else 80))
    if parts.scheme == "http":
        target = urlunsplit(("http", parts.netloc.rpartition("@")[2], path, "", ""))
        return _connection_class(between)(*where, timeout=timeout_s), target, login
    if between.scheme == "https":
        raise ProxyFailed(f"an https proxy for an https address is not supported ({proxy.route})")
    connection = HTTPSConnection(*where, timeout=timeout_s)
    connection.set_tunnel(host, parts.port or 443, login)
    return connection, path, {}


def _login(header: str, parts: SplitResult) -> dict[str, str]:
    """Return the header with user and password of an address; {} without a user."""
    if parts.username is None:
        return {}
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
    return {header: f"Basic {base64.b64encode(login).decode()}"}


def _read(
    connection: HTTPConnection, deadline_s: float, max_bytes: int, proxy: Proxy | None
) -> HttpResponse:
    """Read a response up to `max_bytes`. Raises: TimeoutError, ValueError."""
    transport = connection.sock
    transport.settimeout(_left_s(deadline_s))
    response = connection.getresponse()
    content = bytearray()
    while chunk := response.read1(READ_BYTES):
        content += chunk
        if len(content) > max_bytes:
            raise ValueError(f"the answer has more than {max_bytes} bytes")
        transport.settimeout(_left_s(deadline_s))
    if response.length:
        raise BadAnswer(f"the answer is incomplete, {response.length} bytes are missing")
    return HttpResponse(
        status=response.status, reason=response.reason, body=bytes(content), proxy=proxy
    )


def _left_s(deadline_s: float) -> float:
    """Return the seconds up to a deadline. Raises: TimeoutError: it has passed."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s

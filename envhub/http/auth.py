"""Middleware before all routes: the bearer token and the limit on request size."""

import hmac
from urllib.parse import urlsplit

from fastapi import HTTPException, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.formats.action_size import TOGETHER_BYTES
from common.http.serving import REFUSED, Refusals, token_in
from envhub.http.bodies import json_response

OPEN_PATHS = frozenset({"/healthz", "/readyz"})


class AuthMiddleware:
    """ASGI middleware that answers 401 without the token and 413 to bodies over the limit."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        max_body_bytes: int,
        max_action_bytes: int,
        refusals: Refusals,
    ) -> None:
        """Requests that carry actions may have `max_action_bytes`, others `max_body_bytes`."""
        self._app = app
        self._refusals = refusals
        self._token = token.encode() if token is not None else None
        self._max_body_bytes = max_body_bytes
        self._max_action_bytes = max(max_action_bytes, TOGETHER_BYTES + max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and (refusal := self._no_socket(scope)) is not None:
            self._refusals.note(scope["client"], REFUSED[refusal.status_code])
            await refusal(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = self._counted(scope, send)
        headers = dict(scope["headers"])
        if not self._is_allowed(scope["path"], headers):
            await _refusal(401, "a valid bearer token is required")(scope, receive, send)
            return
        path = scope["path"]
        is_large = path.endswith(("/step", "/batch")) or path.startswith("/agentgym/")
        limit = self._max_action_bytes if is_large else self._max_body_bytes
        length = headers.get(b"content-length")
        if length is not None and (not length.isdigit() or int(length[:20]) > limit):
            detail = f"request bodies are limited to {limit} bytes"
            await _refusal(413, detail)(scope, receive, send)
            return
        if length is None and b"transfer-encoding" in headers:
            receive = _limited(receive, limit)
        await self._app(scope, receive, send)

    def _no_socket(self, scope: Scope) -> Response | None:
        """Return the refusal of a WebSocket; None if it is allowed.

        A browser opens a WebSocket for any page and sends the page's origin. Other origins are
        refused.
        """
        headers = dict(scope["headers"])
        if not self._is_allowed(scope["path"], headers):
            return _refusal(401, "a valid bearer token is required")
        origin = headers.get(b"origin")
        host = headers.get(b"host", b"")
        if origin is not None and urlsplit(origin.decode("latin-1")).netloc.encode() != host:
            return _refusal(403, "pages of other origins may not open a WebSocket here")
        return None

    def _counted(self, scope: Scope, send: Send) -> Send:
        """Return a `send` that counts answers which refuse a request."""

        async def counting(message: Message) -> None:
            """Send a message, and count it if it refuses the request."""
            if reason := REFUSED.get(message.get("status", 0)):
                self._refusals.note(scope["client"], reason)
            await send(message)

        return counting

    def _is_allowed(self, path: str, headers: dict[bytes, bytes]) -> bool:
        """Return whether a path is open to all, or the request has the token."""
        if self._token is None or path in OPEN_PATHS:
            return True
        return hmac.compare_digest(token_in(headers.get(b"authorization", b"")), self._token)


def _limited(receive: Receive, max_bytes: int) -> Receive:
    """Return a `receive` that raises 413 once a body of undeclared length grows too large."""
    num_bytes = 0

    async def receive_limited() -> Message:
        """Return the next part of the body; 413 once it is too large."""
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise HTTPException(413, "the request body is too large")
        return message

    return receive_limited


def _refusal(status: int, detail: str) -> Response:
    """Return the response with which a request is refused."""
    response = json_response({"detail": detail}, status=status)
    if status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response

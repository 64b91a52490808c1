"""Access control: local names only on loopback, a token on any other address."""

import hmac
from collections.abc import Awaitable, Callable
from urllib.parse import urlencode

from fastapi import Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from common.wire.addresses import is_loopback

COOKIE = "longstride_dashboard"
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
Next = Callable[[Request], Awaitable[Response]]


class AccessMiddleware:
    """Middleware that accepts or refuses a request and adds security headers to every response.

    Example: http://host:8600/?token=T sets a cookie and redirects to http://host:8600/.
    """

    def __init__(self, *, host: str, token: str, writable: str) -> None:
        """Set the rules; `writable` is the prefix of all paths that accept a POST."""
        self._is_local = is_loopback(host)
        self._token = token
        self._writable = writable

    async def __call__(self, request: Request, call_next: Next) -> Response:
        """Handle one request."""
        response = self._refusal(request) or await call_next(request)
        for name, value in HEADERS.items():
            response.headers[name] = value
        return response

    def _refusal(self, request: Request) -> Response | None:
        """Return the response to a forbidden request; None if the request is allowed."""
        is_read = request.method in ("GET", "HEAD")
        if not is_read and not request.url.path.startswith(self._writable):
            return _error(405, "The dashboard is read-only.")
        name = request.headers.get("host", "").rpartition("]")
        host = name[0] + name[1] if name[1] else name[2].partition(":")[0]
        # Refuse DNS rebinding: the page of another site whose name resolves to this machine.
        if self._is_local and host not in LOCAL_NAMES:
            return _error(403, "Use localhost, 127.0.0.1 or [::1] as the host name of the address.")
        is_page = request.headers.get("sec-fetch-site", "none") in ("same-origin", "none")
        if request.url.path.startswith("/api/") and not is_page:
            return _error(403, "Requests from other sites are refused.")
        origin = request.headers.get("origin", "").partition("://")[2]
        if not is_read and origin != request.headers.get("host"):
            return _error(403, "Actions from other sites are refused.")
        if not self._token:
            return None
        given = request.query_params.get("token", "")
        if given and self._is_right(given):
            rest = [(k, v) for k, v in request.query_params.multi_items() if k != "token"]
            target = request.url.path + (f"?{urlencode(rest)}" if rest else "")
            response = RedirectResponse(target, status_code=303)
            response.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            return response
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_right(request.cookies.get(COOKIE, "")) or self._is_right(bearer):
            return None
        return _error(
            401, "The token is missing or wrong. Open the address that the command printed."
        )

    def _is_right(self, given: str) -> bool:
        """Return whether a token is the right one, in constant time."""
        return hmac.compare_digest(given.encode(), self._token.encode())


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status_code=status)

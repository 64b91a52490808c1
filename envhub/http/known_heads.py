"""A cache of request heads: a request with a known head is answered without parsing it again.

A client with a persistent connection sends the same head with every step of an episode, except for
the length of the body. Parsing and routing cost several times as much as a step of a fast
environment.
"""

import hmac
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus

from envhub.http.auth import token_in
from envhub.http.bodies import json_bytes

MAX_HEADS = 4_096  # Maximum number of cached heads; a full cache is cleared.
MAX_LENGTH = 64 * 1024  # Maximum bytes of a body.
MAX_KNOWN_BYTES = 4_096  # Maximum bytes of a response whose head is cached.
_HEADS = defaultdict[int, dict[int, bytes]](dict)  # Response heads by status and length.
END = b"\r\n\r\n"
# Headers that change the parsing of a request or the handling of the connection.
NOT_PLAIN = {b"connection", b"expect", b"te", b"trailer", b"transfer-encoding", b"upgrade"}

Headers = Sequence[tuple[bytes, bytes]]  # Names are in lower case.
# Maps a body and the leases' clock to a response; None: the application must answer.
Answer = Callable[[bytes, float], bytes | None]


class HeaderCache:
    """The request heads of one hub's fast routes, for one event loop.

    Example: a client's first step with a body of 40 bytes is parsed, authorized and routed by the
    application. Then its head is cached. The next request that has exactly this head and 40 bytes
    of body, and arrives in one piece, is answered from the cache. If one byte of the token or the
    length differs, the application answers.
    """

    def __init__(
        self,
        token: str | None,
        statuses: Mapping[type[Exception], int],
        *,
        now_s: Callable[[], float],
    ) -> None:
        """`token` and `statuses` (error type -> status) are as in the application.

        `now_s` is the clock of leases.
        """
        self.now_s = now_s
        self._statuses = statuses
        self._failures = tuple(statuses)
        self._token = token.encode() if token is not None else None
        self._answers: dict[bytes, Answer] = {}  # Answer functions by path.
        # Answer function and body length by head.
        self._heads: dict[bytes, tuple[Answer, int]] = {}

    def add(self, path: str, answer: Answer) -> None:
        """Register `answer` as the function that responds to POST requests of a path.

        It gets the body and the time, and may raise the error types of `statuses`.
        """
        self._answers[path.encode()] = answer

    def answer(self, request: bytes, now_s: float) -> bytes | None:
        """Return the response to a complete request; None: the application must answer.

        `now_s` is the current time.
        """
        head, _, body = request.partition(END)
        known = self._heads.get(head)
        if known is None:
            return None
        answer, num_bytes = known
        if len(body) != num_bytes:
            return None
        try:
            return answer(body, now_s)
        except self._failures as error:
            status = next(code for kind, code in self._statuses.items() if isinstance(error, kind))
            return response_bytes(json_bytes({"detail": str(error)}), status)

    def learn(self, request: bytes, method: str, url: bytes, headers: Headers) -> None:
        """Cache the head of a request that the application parsed, if the cache may answer it."""
        answer = self._answers.get(url)
        if answer is None or method != "POST":
            return
        named = dict(headers)
        length = named.get(b"content-length", b"")
        if NOT_PLAIN & named.keys() or not length.isdigit() or len(length) > len(str(MAX_LENGTH)):
            return
        given = token_in(named.get(b"authorization", b""))
        if self._token is not None and not hmac.compare_digest(given, self._token):
            return
        (head, _, body), num_bytes = request.partition(END), int(length)
        if not 0 < num_bytes <= MAX_LENGTH or len(body) != num_bytes:
            return  # The request arrived in parts, or together with another one.
        if len(self._heads) >= MAX_HEADS:
            self._heads.clear()
        self._heads[head] = answer, num_bytes


def response_bytes(content: bytes, status: int = 200) -> bytes:
    """Return a complete response with a JSON body."""
    num_bytes = len(content)
    heads = _HEADS[status]
    head = heads.get(num_bytes)
    if head is None:
        line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        line += f"content-type: application/json\r\ncontent-length: {num_bytes}\r\n\r\n"
        head = line.encode()
        if num_bytes <= MAX_KNOWN_BYTES:
            heads[num_bytes] = head
    return head + content

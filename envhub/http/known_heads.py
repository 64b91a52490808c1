"""Requests whose head was let in once: the same bytes again are answered without a second look.

A client that keeps its connection sends the same head with every step of an episode, but for the
length of the body. Parsing it again, and finding its way to the route, costs several times what a
step of a quick environment does.
"""

import hmac
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus

from envhub.http.auth import token_in
from envhub.http.bodies import json_bytes

MAX_HEADS = 4_096  # that are known at a time; they are learned anew after that
MAX_LENGTH = 64 * 1024  # bytes of a body
MAX_KNOWN_BYTES = 4_096  # of a response whose head is kept
_HEADS = defaultdict[int, dict[int, bytes]](dict)  # of responses, by status and length
END = b"\r\n\r\n"
# What changes how a request is read, or what follows its answer.
NOT_PLAIN = {b"connection", b"expect", b"te", b"trailer", b"transfer-encoding", b"upgrade"}

Headers = Sequence[tuple[bytes, bytes]]  # names in lower case
# Of a body, and of what the clock of leases says; None: it has to go the ordinary way.
Answer = Callable[[bytes, float], bytes | None]


class KnownHeads:
    """The heads of one hub that led to routes which answer at once. For its event loop.

    Example: a client's first step of a body of 40 bytes goes the ordinary way: it is parsed, its
    token is looked at, its route is found. Then its head is known. The next request that begins
    with these very bytes, has 40 bytes behind them and comes as a whole is answered at once. One
    byte of another token, another length, and it goes the ordinary way.
    """

    def __init__(
        self,
        token: str | None,
        statuses: Mapping[type[Exception], int],
        *,
        now_s: Callable[[], float],
    ) -> None:
        """`token` and what status tells of which failure, as of the application.

        `now_s` is the clock of leases.
        """
        self.now_s = now_s
        self._statuses = statuses
        self._failures = tuple(statuses)
        self._token = token.encode() if token is not None else None
        self._answers: dict[bytes, Answer] = {}  # by path
        self._heads: dict[bytes, tuple[Answer, int]] = {}  # and the bytes of the body

    def add(self, path: str, answer: Answer) -> None:
        """Let `answer` make the responses to POST requests of a path.

        It gets the body and the time, and may raise the failures that there are statuses for.
        """
        self._answers[path.encode()] = answer

    def answer(self, request: bytes, now_s: float) -> bytes | None:
        """Return the response to a whole request; None: it has to go the ordinary way.

        `now_s` is what the clock says.
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
        """Take what an ordinary request was parsed to, if it may be answered at once next time."""
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
            return  # it did not come as one, or another one came with it
        if len(self._heads) >= MAX_HEADS:
            self._heads.clear()
        self._heads[head] = answer, num_bytes


def response_bytes(content: bytes, status: int = 200) -> bytes:
    """Return a whole response that holds JSON."""
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

"""Batching of hub requests: concurrent calls of many episodes share one HTTP request."""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

from common.errors import EnvError, EnvPaused, EnvTimeout, HubLost
from common.formats.action_size import TOGETHER_BYTES, most_bytes
from common.text import counted

SESSION_PATH = "/v1/sessions/"
MAX_CHARS = 900  # Longest part of a hub's reason in an error.
_SESSION = re.compile(rf"(?<=^{SESSION_PATH})(?!(step|close)$)[^/]+")
FULL = 429
TOO_LARGE = 413
PAUSED = 424
CLOSE_S = 1.0  # Seconds that requests in flight get to finish when their client closes.

Request = Callable[[str, str, object], Awaitable[Any]]  # (method, path, body) -> parsed answer
Entry = dict[str, Any]
PendingEntry = tuple[
    Entry, asyncio.Future[Any]
]  # An entry, and the future that receives its outcome.


class ActionTooLarge(EnvError):
    """The hub rejects an action of this size. The session survives, and no step was performed."""


class BatchRoute(NamedTuple):
    """A hub route that takes a list of entries and answers each entry separately."""

    path: str
    alone: str  # The route for a single entry. Errors of an entry are reported under this path.
    # Maximum number of entries of one request. The hub answers the first requests while later ones
    # are still being sent.
    max_entries: int
    may_repeat: bool = True  # Whether an entry that is sent twice is executed only once.


STEP = BatchRoute("/v1/step/batch", f"{SESSION_PATH}step", 32)
# Fewer entries a request: opening a session takes longer than a step.
OPEN = BatchRoute("/v1/sessions/batch", "/v1/sessions", 8, False)
CLOSE = BatchRoute("/v1/close/batch", f"{SESSION_PATH}close", 32)


class AnswerTooLarge(EnvError):
    """The hub's answer exceeds the client's size limit."""


class Batches:
    """Collects concurrent entries for one route and sends them as one request. For one event loop.

    One step of the engine ends the turns of many episodes. With a quick environment, a separate
    HTTP request for each of them would cost the actor and the hub more than the step itself.

    Example: three sessions act in one iteration of the loop -> one POST /v1/step/batch, three
    answers.
    """

    def __init__(
        self,
        request: Request,
        route: BatchRoute,
        *,
        alone: Callable[[Entry], Awaitable[Any]] | None = None,
        on_unwanted: Callable[[Any], Awaitable[Any]] | None = None,
    ) -> None:
        """Create a batcher that sends its requests with `request`, as `HubClient.request`.

        Args:
            alone: sends an entry that is the only one of its batch; None: it is sent as a list of
                one.
            on_unwanted: awaited with each answer whose caller was cancelled in the meantime.
        """
        self._request = request
        self._route = route
        self._alone = alone
        self._on_unwanted = on_unwanted
        self._waiting: list[PendingEntry] = []
        self._sending: set[asyncio.Task[None]] = set()

    async def ask(self, entry: Entry) -> Any:
        """Return the answer to one entry; None: the hub is full. Raises: EnvError, EnvTimeout."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((entry, answer))
        if len(self._waiting) == 1:
            # Scheduled behind all callers of this iteration of the loop.
            loop.call_soon(self._send_all)
        return await answer

    async def close(self) -> None:
        """Wait up to `CLOSE_S` for requests in flight, then cancel the remaining ones.

        Answers that arrive in time are processed as usual: unwanted sessions are closed.
        """
        if self._sending:
            await asyncio.wait(self._sending, timeout=CLOSE_S)
        for task in list(self._sending):
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)

    def _send_all(self) -> None:
        """Send all waiting entries, in as few requests as the limits allow."""
        waiting = self._waiting
        self._waiting = []
        for batch in self._parts(waiting):
            task = asyncio.create_task(self._send(batch))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    def _parts(self, waiting: list[PendingEntry]) -> Iterator[list[PendingEntry]]:
        """Split the entries into requests within `max_entries` and the hub's limit of bytes."""
        part: list[PendingEntry] = []
        num_bytes = 0
        for request in waiting:
            size = most_bytes(request[0].get("action", ""))
            is_full = len(part) == self._route.max_entries or num_bytes + size > TOGETHER_BYTES
            if part and is_full:
                yield part
                part = []
                num_bytes = 0
            part.append(request)
            num_bytes += size
        if part:
            yield part

    async def _send(self, batch: list[PendingEntry]) -> None:
        """Send one request, and answer each of its entries."""
        entries = [entry for entry, _ in batch]
        try:
            if len(entries) == 1 and self._alone is not None:
                outcomes = [await self._alone(entries[0])]
            else:
                outcomes = await self._ask_for(entries)
        except AnswerTooLarge as error:
            # A single large answer must not fail the other episodes.
            if len(batch) > 1 and self._route.may_repeat:
                half = len(batch) // 2
                await self._send(batch[:half])
                await self._send(batch[half:])
                return
            outcomes = [error] * len(batch)
        except EnvError as error:
            outcomes = [error] * len(batch)
        await self._answer(batch, outcomes)

    async def _answer(self, batch: list[PendingEntry], outcomes: list[Any]) -> None:
        """Resolve the future of each entry; pass unwanted answers to `on_unwanted`."""
        unwanted: list[Any] = []
        for (_, answer), outcome in zip(batch, outcomes, strict=True):
            is_failure = isinstance(outcome, EnvError)
            if answer.done():  # The episode was cancelled.
                unwanted += [] if is_failure or outcome is None else [outcome]
            elif is_failure:
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)
        for reply in unwanted:
            if self._on_unwanted is not None:
                with contextlib.suppress(EnvError):
                    await self._on_unwanted(reply)

    async def _ask_for(self, entries: list[Entry]) -> list[Any]:
        """Return an answer or error for each entry. Raises: EnvError: the whole request failed."""
        path = self._route.path
        replies = await self._request("POST", path, entries)
        if not isinstance(replies, list) or len(replies) != len(entries):
            shown = f"{replies!r:.100}"
            num = counted(len(entries), "entry", "entries")
            raise EnvError(f"POST {path}: the answer to {num} is {shown}")
        return [
            self._outcome(reply, field_of(reply, "status", int, path=path)) for reply in replies
        ]

    def _outcome(self, reply: Any, status: int) -> Any:
        """Return the answer to an entry, or its error; None: the hub is full."""
        if status == FULL:
            return None
        return failure_of("POST", self._route.alone, status, str(reply.get("detail"))) or reply


def field_of(reply: Any, name: str, *kinds: type, path: str) -> Any:
    """Return a field of a hub's answer. Raises: EnvError: it is missing or has another type."""
    value = reply.get(name) if isinstance(reply, dict) else None
    if type(value) not in kinds:
        words = " or ".join(kind.__name__ for kind in kinds)
        raise EnvError(f"{path}: the answer has {name}={value!r:.100}, which is not {words}")
    return value


def route_of(method: str, path: str) -> str:
    """Return a request for messages, without its session, so that equal failures are equal texts.

    Example: ("POST", "/v1/sessions/x1y2/step") -> "POST /v1/sessions/ID/step".
    """
    return f"{method} {_SESSION.sub('ID', path)}"


def failure_of(method: str, path: str, status: int, text: str) -> EnvError | None:
    """Return the error that an HTTP status stands for; None for a success."""
    where = route_of(method, path)
    if status == 504:
        return EnvTimeout(f"{where}: {text:.{MAX_CHARS}}")
    if status == TOO_LARGE and path.startswith((SESSION_PATH, STEP.path)):
        return ActionTooLarge(f"{where}: {text:.{MAX_CHARS}}")
    is_gone = status == 404 and path.startswith((SESSION_PATH, STEP.path))
    if status == PAUSED:
        return EnvPaused(f"{text:.500}")
    kind = HubLost if is_gone or status == 503 else EnvError
    return kind(f"{where}: HTTP {status} {text:.{MAX_CHARS}}") if status >= 400 else None

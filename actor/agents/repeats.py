"""Answers a repeated request once: a client that reconnects gets the answer that it has lost."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.responses import Response

from actor.agents.http import AgentRequest
from actor.agents.streams import EventStream

NUM_KEPT = 32  # Number of completed answers that are kept for each episode.
ENV = "/env/"
STEP = f"{ENV}step"
Handle = Callable[[AgentRequest], Awaitable[Response]]


@dataclass(slots=True, eq=False)
class _Answered:
    """A request and its answer."""

    mark: bytes
    path: str
    request: AgentRequest  # The latest of the equal requests.
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    answer: Response | None = None  # None: in progress, or failed.

    @property
    def is_aborted(self) -> bool:
        """Whether no client waited for the rest of the answer."""
        return isinstance(self.answer, EventStream) and self.answer.is_aborted

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete."""
        is_growing = isinstance(self.answer, EventStream) and not self.answer.is_over
        return self.ended.is_set() and not is_growing


class Repeats:
    """The recent requests of one episode, and their answers.

    A request is a repetition if it equals an earlier one (path, body, `Idempotency-Key`), and the
    answer to that one was lost with its connection, or the client marks a retry. Two equal requests
    without a lost answer are two requests. A stream that was aborted is not repeated.

    Example: an agent asks; its connection breaks while the policy samples. It connects again and
    sends the same request: it waits for the answer in progress. The policy has sampled one turn. It
    then sends the same request once more: it has read the first answer, so the policy samples
    again.
    """

    def __init__(self) -> None:
        self._sent: list[_Answered] = []

    async def answer(self, request: AgentRequest, handle: Handle) -> Response:
        """Return the answer to a request, which is handled once for all its repetitions."""
        mark = _mark(request)
        while (earlier := self._find(mark, request)) is not None:
            earlier.request = request
            await earlier.ended.wait()
            if earlier.answer is not None:
                return earlier.answer
        return await self._first(mark, request, handle)

    def known(self, request: AgentRequest) -> Response | None:
        """Return the answer that a request repeats, None if it is new."""
        earlier = self._find(_mark(request), request)
        return None if earlier is None else earlier.answer

    def close(self) -> None:
        """Keep only the answer that ended the episode."""
        self._sent = [each for each in self._sent if each.path.startswith(ENV)][-1:]

    async def _first(self, mark: bytes, request: AgentRequest, handle: Handle) -> Response:
        path = request.path
        if path == STEP:  # The next step means that the agent does not wait for an earlier one.
            self._sent = [each for each in self._sent if each.path != STEP]
        sent = _Answered(mark, path, request)
        self._sent.append(sent)
        try:
            sent.answer = await handle(request)
            return sent.answer
        finally:
            sent.ended.set()
            if sent.answer is None and sent in self._sent:
                self._sent.remove(sent)  # A failed request may be sent again.
            self._drop_old()

    def _find(self, mark: bytes, request: AgentRequest) -> _Answered | None:
        """Return the request that this one repeats, preferably one with a lost answer."""
        equal = [each for each in self._sent if each.mark == mark and not each.is_aborted]
        lost = next((each for each in equal if each.request.is_lost), None)
        if lost is not None:
            return lost
        is_marked = request.is_retry or request.idempotency_key
        return equal[-1] if equal and is_marked else None

    def _drop_old(self) -> None:
        done = [answered for answered in self._sent if answered.is_over]
        for answered in done[:-NUM_KEPT]:
            self._sent.remove(answered)


def _mark(request: AgentRequest) -> bytes:
    """Return a digest that equal requests share."""
    head = f"{request.method} {request.path} {request.idempotency_key}\n"
    return hashlib.sha256(head.encode() + request.content).digest()

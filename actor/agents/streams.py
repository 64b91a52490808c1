"""A response that is sent as the policy samples, to one client or to several ones."""

import asyncio
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from actor.api.requests import Event, event_text

EVENTS = "text/event-stream"
# Seconds for a client to repeat a request whose connection broke, before its answer is aborted.
RECONNECT_S = 10.0


class EventStream(Response):
    """The events of an answer in progress. Each client receives them from the first one on.

    Consumes: events, from the task that samples the answer. Releases: to all clients, at once.
    Once the last client has left, another one has `RECONNECT_S`; then the task is cancelled.

    Example: the policy samples; a client has read three events when its connection breaks. It sends
    the same request again and receives these three events, then the others. A client that leaves
    and does not return ends the sampling.
    """

    def __init__(self) -> None:
        """Create a stream without events; `run` samples them."""
        super().__init__(media_type=EVENTS, headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self.is_aborted = False
        self.is_over = False  # No further event follows.
        self.begun = asyncio.Event()  # The first event, or the end.
        self.task: asyncio.Task[None] | None = None  # It samples the answer.
        self._texts: list[str] = []
        self._clients: list[asyncio.Event] = []  # Set when a client has something to do.
        self._timer: asyncio.TimerHandle | None = None

    def write(self, events: Sequence[Event]) -> None:
        """Send events. Those after the end are dropped."""
        if events and not self.is_over:
            self._texts += map(event_text, events)
            self._wake()

    def end(self, whole: Sequence[Event] = ()) -> None:
        """End the stream.

        Args:
            whole: shorter events of the same answer, for clients that repeat the request later.
        """
        self.is_over = True
        self._wake()
        if whole:
            self._texts = list(map(event_text, whole))  # Clients keep the list that they send.
        self._stop_timer()

    def abort(self) -> None:
        """Stop sampling. The answer cannot be repeated."""
        self._stop_timer()
        if not self.is_over and self.task is not None:
            self.is_aborted = True
            self.task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events to a client."""
        texts = self._texts
        wake = asyncio.Event()
        self._clients.append(wake)
        self._stop_timer()
        left = asyncio.create_task(_disconnected(receive))
        left.add_done_callback(lambda _: wake.set())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            num_sent = 0
            while not left.done():
                wake.clear()
                is_last = self.is_over
                new, num_sent = texts[num_sent:], len(texts)
                body = "".join(new).encode()
                await send({"type": "http.response.body", "body": body, "more_body": not is_last})
                if is_last:
                    return
                await wake.wait()
        finally:
            left.cancel()
            self._clients.remove(wake)
            if not self._clients and not self.is_over:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(RECONNECT_S, self.abort)

    def _wake(self) -> None:
        self.begun.set()
        for client in self._clients:
            client.set()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def _disconnected(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass

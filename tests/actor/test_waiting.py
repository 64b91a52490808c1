"""Laws of waiting."""

import asyncio
import logging
import time

import pytest

from actor.delivery import wait_with_warnings


class Watch(logging.Handler):
    """Sets the event at the second log record, so that the wait ends."""

    def __init__(self, event: asyncio.Event) -> None:
        super().__init__()
        self.messages: list[str] = []
        self._event = event

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        if len(self.messages) == 2:
            self._event.set()


def test_long_wait_repeats_its_warning() -> None:
    async def law() -> None:
        event = asyncio.Event()
        watch = Watch(event)
        logger = logging.getLogger("actor.delivery")
        logger.addHandler(watch)
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(60.0):
                await wait_with_warnings(
                    event, waiting_for="learner: first weights", warn_every_s=0.01
                )
        finally:
            logger.removeHandler(watch)
        took_s = time.monotonic() - began_s
        start = "still waiting for='learner: first weights' waited_s="
        assert [message.startswith(start) for message in watch.messages] == [True, True]
        waited_s = [float(message.removeprefix(start).split()[0]) for message in watch.messages]
        assert 0.0 <= waited_s[0] <= waited_s[1] <= took_s + 0.1  # Rounded.

    asyncio.run(law())


def test_completed_wait_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def law() -> None:
        event = asyncio.Event()
        event.set()
        await wait_with_warnings(event, waiting_for="learner: first weights", warn_every_s=0.01)

    asyncio.run(law())
    assert caplog.messages == []

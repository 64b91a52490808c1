"""The gate between transfers, which read live weights, and the optimizer, which changes them."""

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

LOOK_S = 0.5  # between looks whether the learner is told to stop


class Gate:
    """Lets transfers read live weights between two steps' updates.

    Consumes: nothing; the trainer closes it before the first update of a step, the publisher opens
    it with the next version.
    Waits for: in `close`, transfers that read, at most `timeout_s`; after that they are told to
    give up, which takes them no longer than a look.

    Example: open() -> version 3 may be read. enter() by a transfer. The next step's forward and
    backward pass run meanwhile; its close() waits. leave() -> close() returns, weights change.
    enter() -> False: what is there now is no version. open() -> version 4 may be read.
    """

    def __init__(self, *, timeout_s: float) -> None:
        """Make one that is closed, with nobody inside."""
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._is_open = False
        self._num_inside = 0
        self._is_wanted_back = False
        self._must_give_up = False
        self._waited_s = 0.0
        self.is_stopping: Callable[[], bool] = lambda: False

    def open(self) -> None:
        """Let transfers in: the weights are a version and stay so until `close`."""
        with self._changed:
            self._is_open = True

    def enter(self) -> bool:
        """Begin to read; False if there is no version to be read now."""
        with self._changed:
            if not self.is_open:
                return False
            self._num_inside += 1
            return True

    def leave(self) -> None:
        """End what `enter` began."""
        with self._changed:
            self._num_inside -= 1
            self._changed.notify_all()

    @property
    def is_open(self) -> bool:
        """Whether there is a version to be read."""
        return self._is_open and not self._is_wanted_back

    @property
    def is_wanted_back(self) -> bool:
        """Whether the trainer waits at the gate."""
        return self._is_wanted_back

    @property
    def must_give_up(self) -> bool:
        """Whether transfers have had their time."""
        return self._must_give_up

    def close(self) -> None:
        """Wait until nobody reads, and keep everybody out. For the trainer's thread."""
        started = time.monotonic()
        with self._changed:
            self._is_wanted_back = True
            while self._num_inside:
                is_late = time.monotonic() - started > self._timeout_s
                if (is_late or self.is_stopping()) and not self._must_give_up:
                    logger.warning("weights are wanted back, giving the transfer up")
                    self._must_give_up = True
                self._changed.wait(LOOK_S)
            self._is_open = self._is_wanted_back = self._must_give_up = False
            self._waited_s += time.monotonic() - started

    def drain_waited_s(self) -> float:
        """Return the seconds that `close` waited since the last call."""
        with self._changed:
            waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s


class Reading:
    """A transfer's hold on a version's weights: live ones change when it lets go."""

    def __init__(
        self,
        gate: Gate,
        *,
        is_live: bool,
        is_held: bool,
        is_optional: bool,
        is_superseded: Callable[[], bool] | None = None,
    ) -> None:
        """Begin; `is_optional` ends at once when the trainer wants the weights back.

        Args:
            is_superseded: says that a newer version is to be brought; None: never.
        """
        self._gate = gate
        self._is_live = is_live
        self._is_held = is_held
        self._is_optional = is_optional
        self.is_superseded = is_superseded or (lambda: False)
        self.is_lost = False

    def begin(self) -> bool:
        """Return whether the weights are still that version, and keep them so."""
        if self._is_live and not self._is_held:
            self._is_held = self._gate.enter()
            self.is_lost = not self._is_held
        return not self.is_lost

    def end(self) -> None:
        """Let go."""
        if self._is_held:
            self._is_held = False
            self._gate.leave()

    @property
    def must_end(self) -> bool:
        """Whether the transfer has had its time."""
        return self._is_held and self._gate.must_give_up

    @property
    def must_not_wait(self) -> bool:
        """Whether nobody may be waited for any longer before the first bucket."""
        is_unwanted = self._is_optional and (self._gate.is_wanted_back or self.is_superseded())
        return self.must_end or is_unwanted

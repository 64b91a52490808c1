"""The base of text environments: steps are possible only during an episode."""

import hashlib
from typing import Any, ClassVar

from envhub.env import StepResult, Style

# Limits of the cache: number of observations, and length of each.
MAX_CACHED = 8_192
MAX_CACHED_CHARS = 400
_CACHED: dict[bool, dict[str, StepResult]] = {True: {}, False: {}}


def plain_result(observation: str, is_valid: bool) -> StepResult:
    """Return a new step result with reward 0 that does not end the episode.

    Observations repeat often: copying a cached result takes a third of the time.
    """
    cached = _CACHED[is_valid]
    result = cached.get(observation)
    if result is None:
        result = StepResult(observation=observation, reward=0.0, done=False, is_valid=is_valid)
        if len(observation) > MAX_CACHED_CHARS:
            return result
        if len(cached) >= MAX_CACHED:
            cached.clear()
        cached[observation] = result
    return result.__copy__()  # pyright: ignore[reportAttributeAccessIssue]


class SavesCounters:
    """`save` and `load` for an environment whose steps change only a few plain attributes.

    The rest of the episode follows from its item, which `reset` has read.
    """

    changing: ClassVar[tuple[str, ...]]  # Names of the attributes that a step changes.

    def save(self) -> dict[str, Any]:
        """Return the changing attributes by name."""
        return {name: getattr(self, name) for name in self.changing}

    def load(self, state: dict[str, Any]) -> None:
        """Set the changing attributes."""
        for name in self.changing:
            setattr(self, name, state[name])


class TextEnv:
    """One episode of a text world.

    A subclass implements the methods with an underscore; this class then provides `Env`. A
    subclass's `reset` calls `_begin`. Its `_step` sets `_done` in the step that ends the episode.
    """

    def __init__(self, style: Style) -> None:
        self._style = style
        self._is_compact = style is Style.COMPACT
        self._done = True  # No episode runs before the first reset.

    def _begin(self) -> None:
        """Begin an episode. A subclass calls it in `reset`."""
        self._done = False

    def step(self, action: str) -> StepResult:
        """Perform one action, given as text.

        Raises: RuntimeError: no episode is running.
        """
        if self._done:
            raise RuntimeError("step before reset, or after the episode has ended")
        result = self._step(action)
        if not result.done:
            result.state = self.state_text()
        return result

    def _step(self, action: str) -> StepResult:
        """Perform one action. A subclass implements it, and sets `_done` at the end."""
        raise NotImplementedError

    def state_text(self) -> str:
        """Return a text that identifies the current state of the item; "" if unsupported."""
        return ""

    def valid_actions(self) -> list[str]:
        """Return actions that are executable now; see `Env.valid_actions`."""
        return [] if self._done else self._valid_actions()

    def _valid_actions(self) -> list[str]:
        """Return the executable actions. A subclass implements it."""
        raise NotImplementedError

    def expert_action(self) -> str | None:
        """Return the expert's next action; None if it has none or the episode has ended."""
        return None if self._done else self._expert_action()

    def _expert_action(self) -> str | None:
        """Return the expert's next action. A subclass implements it."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Return the sha256 of the world's state at reset."""
        return hashlib.sha256(self._state().encode()).hexdigest()

    def _state(self) -> str:
        """Return the world's state at reset as text. A subclass implements it."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the episode's resources. The base class holds only memory."""

"""What the episodes of text worlds share: a step only while an episode lives, nothing after it."""

import hashlib

from envhub.env import StepResult, Style

MAX_SAID, MAX_SAID_CHARS = 8_192, 400  # observations that are kept, and of each of them
_SAID: dict[bool, dict[str, StepResult]] = {True: {}, False: {}}


def said(observation: str, is_valid: bool) -> StepResult:
    """Return a new result of a step that pays nothing and ends nothing.

    The same is said over and over: a copy takes a third of the time.
    """
    known = _SAID[is_valid]
    result = known.get(observation)
    if result is None:
        result = StepResult(observation=observation, reward=0.0, done=False, is_valid=is_valid)
        if len(observation) > MAX_SAID_CHARS:
            return result
        if len(known) >= MAX_SAID:
            known.clear()
        known[observation] = result
    return result.__copy__()  # pyright: ignore[reportAttributeAccessIssue]


class TextEnv:
    """One episode of a text world; it offers `Env` once the methods with an underscore are there.

    A world's `reset` calls `_begin`; its `_step` sets `_done` with the step that ends the episode.
    """

    def __init__(self, style: Style) -> None:
        self._style = style
        self._is_compact = style is Style.COMPACT
        self._done = True  # no episode lives before the first reset

    def _begin(self) -> None:
        self._done = False

    def step(self, action: str) -> StepResult:
        """Perform one action given as text.

        Raises: RuntimeError: no episode lives.
        """
        result = self.perform(action)
        if not result.done:
            result.state = self.state_text()
        return result

    def perform(self, action: str) -> StepResult:
        """Do as `step`, and do not tell the state. Raises: RuntimeError."""
        if self._done:
            raise RuntimeError("step before reset, or after the episode has ended")
        return self._step(action)

    def _step(self, action: str) -> StepResult:
        raise NotImplementedError

    def state_text(self) -> str:
        """Return what tells the present state from others of the item; "": it is not told."""
        return ""

    def valid_actions(self) -> list[str]:
        """Return actions that would be executed now; see `Env.valid_actions`."""
        return [] if self._done else self._valid_actions()

    def _valid_actions(self) -> list[str]:
        raise NotImplementedError

    def expert_action(self) -> str | None:
        """Return what the expert does now; None when it knows no way or the episode has ended."""
        return None if self._done else self._expert_action()

    def _expert_action(self) -> str | None:
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Return sha256 over what the world takes for its state at reset."""
        return hashlib.sha256(self._state().encode()).hexdigest()

    def _state(self) -> str:
        raise NotImplementedError

    def close(self) -> None:
        """Give back what the episode holds: nothing more than its own memory, unless said."""

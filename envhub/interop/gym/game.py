"""One environment of gymnasium or of the older gym interface.

| convention | here |
|---|---|
| action, observation | text, see `envhub.interop.gym.spaces` |
| `terminated` | the episode has ended |
| `truncated`; of four values `info["TimeLimit.truncated"]` | truncated, as at the horizon |
| success | the first of SUCCESS_KEYS in the last `info` |
| `reset(seed, options)`, or `seed(seed)` and `reset()` | uses the item's seed |
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from common.errors import ConfigError
from envhub.env import EnvFailure
from envhub.interop.gym.spaces import (
    NoText,
    check_actions,
    describe,
    kind_of,
    observation_text,
    parse_action,
    write_action,
)
from envhub.interop.texts import SUCCESS_KEYS, ActionResult, reported_truth
from envhub.interop.yaml_environments import optional_package

MAX_SAMPLES = 64  # Maximum size of a discrete space whose numbers are all listed.
NUM_SAMPLES = 8
CUT_KEY = "TimeLimit.truncated"
REMEDY = "register it with a wrapper that takes texts or numbers and returns texts"


class GymnasiumGame:
    """An environment of gymnasium whose actions can be written as texts."""

    def __init__(self, name: str) -> None:
        """Create the environment. Raises: ConfigError: no such environment, or no text actions."""
        gymnasium = optional_package("gymnasium", "envs")
        try:
            self._env: Any = gymnasium.make(name)
        except gymnasium.error.Error as error:
            raise ConfigError(f"gymnasium:{name}: {type(error).__name__}: {error}") from error
        self._name = name
        self._space: Any = self._env.action_space
        _modernise(self._env.unwrapped)
        try:
            kind_of(self._space)
        except NoText as error:
            raise ConfigError(f"gymnasium:{name}: its actions: {error}; {REMEDY}") from error

    @property
    def form(self) -> str:
        """Return the form of an action in words; "" if it is any text."""
        return "" if kind_of(self._space) == "Text" else describe(self._space)

    def samples(self) -> list[str]:
        """Return sample actions: all numbers of a small space, else a few; [] for texts."""
        space = self._space
        kind = kind_of(space)
        if kind == "Text":
            return []
        if kind == "Discrete" and space.n <= MAX_SAMPLES:
            return [str(int(space.start) + number) for number in range(int(space.n))]
        space.seed(0)
        return [write_action(space.sample(), space) for _ in range(NUM_SAMPLES)]

    def check(self) -> None:
        """Raise ConfigError if an action or an observation has no text form."""
        try:
            check_actions(self._space)
        except NoText as error:
            raise ConfigError(f"gymnasium:{self._name}: its actions: {error}; {REMEDY}") from error
        try:
            observation_text(self._env.observation_space.sample())
        except NoText as error:
            text = f"gymnasium:{self._name}: its observations: {error}; {REMEDY}"
            raise ConfigError(text) from error
        except (AttributeError, NotImplementedError, TypeError):
            return  # The environment declares no observation space that can be sampled.

    def begin(self, seed: int) -> str:
        """Return the first observation of the episode of a seed. Raises: EnvFailure."""
        observation, _ = self._env.reset(seed=seed)
        return _text(observation)

    def act(self, text: str) -> ActionResult:
        """Play an action given as text. Raises: BadAction, EnvFailure."""
        action = parse_action(text, self._space)
        observation, reward, terminated, truncated, info = self._env.step(action)
        is_over = _truth(terminated, "terminated")
        return ActionResult(
            text=_text(observation),
            reward=_number(reward, "reward"),
            is_done=is_over or _truth(truncated, "truncated"),
            is_truncated=_truth(truncated, "truncated") and not is_over,
            is_success=reported_truth(info, SUCCESS_KEYS) if isinstance(info, dict) else None,
        )

    def close(self) -> None:
        self._env.close()


def _text(observation: Any) -> str:
    """Return an observation as text. Raises: EnvFailure: it has no text form."""
    try:
        return observation_text(observation)
    except NoText as error:
        raise EnvFailure(f"an observation cannot be written as text: {error}") from error


def _number(value: Any, what: str) -> float:
    """Return a number, also from a numpy scalar or an array of size 1. Raises: EnvFailure."""
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise EnvFailure(f"a step returned the {what} {value!r:.200}, which is not a number")
    return float(array.reshape(-1)[0])


def _truth(value: Any, what: str) -> bool:
    """Return a boolean, also from a number. Raises: EnvFailure: the value is neither."""
    return bool(_number(value, what))


# --- The gym interface before gymnasium -----------------------------------------------------


def _modernise(env: Any) -> None:
    """Adapt an environment of the older interface to gymnasium's wrappers."""
    env.reset = _modern_reset(env, env.reset)
    env.step = _modern_step(env.step)


def _modern_reset(env: Any, reset: Callable[..., Any]) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Return a `reset` that accepts seed and options, and returns observation and info."""
    try:
        takes = inspect.signature(reset).parameters
    except ValueError:  # Compiled code may have no readable signature.
        return reset
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values())

    def modern_reset(*, seed: int | None = None, options: Any = None) -> Any:
        given = {"seed": seed, "options": options}
        known = {key: value for key, value in given.items() if takes_all or key in takes}
        if seed is not None and "seed" not in known and hasattr(env, "seed"):
            env.seed(seed)
        begun = reset(**known)
        is_modern = isinstance(begun, tuple) and len(begun) == 2 and isinstance(begun[1], dict)
        return begun if is_modern else (begun, {})

    return modern_reset


def _modern_step(step: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a `step` with five values; of four values, `info` states the truncation."""

    def modern_step(action: Any) -> tuple[Any, ...]:
        result = step(action)
        if len(result) != 4:
            return result
        observation, reward, is_done, info = result
        is_cut = _truth(is_done, "done") and _truth(info.get(CUT_KEY, False), CUT_KEY)
        return observation, reward, _truth(is_done, "done") and not is_cut, is_cut, info

    return modern_step

"""One environment of gymnasium or of the older gym interface.

| convention | here |
|---|---|
| action, observation | text, see the next table |
| `terminated` | the episode has ended |
| `truncated`; of four values `info["TimeLimit.truncated"]` | truncated, as at the horizon |
| success | the first of SUCCESS_KEYS in the last `info` |
| `reset(seed, options)`, or `seed(seed)` and `reset()` | uses the item's seed |

| space | text of an action |
|---|---|
| Discrete | a whole number: `-1` |
| Text | the text itself, or a JSON string if it begins or ends with a space |
| Box, MultiDiscrete, MultiBinary | JSON numbers in arrays of the space's shape: `[0.5, -1]` |
| Tuple, Sequence | a JSON array with one value for each part |
| Dict | a JSON object with one value for each key |
| OneOf | a JSON array of two: the number of the chosen part and its value |
"""

import inspect
import json
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from common.errors import ConfigError
from common.text import counted
from common.wire.access.bounds import shown
from envhub.env import EnvFailure, action_text
from envhub.interop.texts import SUCCESS_KEYS, ActionResult, BadAction, reported_truth

MAX_DIGITS = 30  # Maximum digits of a whole number, which covers every space.
WHOLE = re.compile(r"([+-]?)0*(\d*)(?:\.0*)?")  # \d matches the decimal digits of every script.
MAX_SAMPLED = 10_000  # Maximum characters of a sampled text.
FENCED = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)
NUM_WRITTEN = 8  # Number of samples that must survive writing and parsing.
ARRAYS = ("Box", "MultiDiscrete", "MultiBinary")


class NoText(ValueError):
    """The space, or a value, has no text form; the message names it."""


def parse_whole(text: str) -> int:
    """Return the number in a text such as `7`, `-1`, `+1`, `007` or `1.0`. Raises: BadAction."""
    match = WHOLE.fullmatch(text.strip().replace("\u2212", "-"))
    if match is None or not any(each.isdecimal() for each in text):
        raise BadAction(f"{shown(text)} is not a whole number.")
    sign, digits = match.groups()
    if len(digits) > MAX_DIGITS:
        raise BadAction(f"{shown(text)} is beyond every number that can be played.")
    return int(f"{sign}{digits or '0'}")


def parse_action(text: str, space: Any) -> Any:
    """Return the action of a space that a text denotes. Raises: BadAction: no such action."""
    kind = kind_of(space)
    if kind == "Text":
        return _checked_action(_spoken(text, space), space)
    if kind == "Discrete":
        try:
            number = parse_whole(text)
        except BadAction as error:
            raise BadAction(f"The action must be {describe(space)}. {error}") from error
        return _checked_action(number, space)
    try:
        value = json.loads(_unfenced(text), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadAction(f"The action is no JSON; it must be {describe(space)}.") from error
    return _checked_action(_built(value, space), space)


def kind_of(space: Any) -> str:
    """Return the name of the space's gymnasium class. Raises: NoText: an unsupported space."""
    names = (
        base.__name__ for base in type(space).__mro__ if base.__module__.startswith("gymnasium")
    )
    kind = next(names, "")
    if kind not in (*ARRAYS, "Discrete", "Text", "Tuple", "Dict", "Sequence", "OneOf"):
        raise NoText(f"a {type(space).__name__} has no text form")
    if kind == "Sequence" and space.stack:
        raise NoText("a Sequence with stack=True has no text form")
    if kind == "Dict" and not all(isinstance(key, str) for key in space.spaces):
        raise NoText("a Dict whose keys are not texts has no text form")
    return kind


def write_action(value: Any, space: Any) -> str:
    """Return the text that `parse_action` parses to this action. Raises: NoText."""
    is_bare = kind_of(space) == "Text" and not value.startswith('"')
    if is_bare and action_text(value) == value:
        return value
    written = json.dumps(plain(value), ensure_ascii=False, sort_keys=True)
    return written.replace("Action:", "\\u0041ction:")  # The action would otherwise begin after it.


def check_actions(space: Any) -> None:
    """Raise NoText if an action of the space, or of a part of it, cannot be written as text."""
    parts = _parts(space)
    if any(kind_of(part) == "Text" and part.max_length > MAX_SAMPLED for part in parts):
        return  # Samples of that length use much memory and prove nothing.
    space.seed(0)
    for _ in range(NUM_WRITTEN):
        action = space.sample()
        try:
            read = parse_action(write_action(action, space), space)
        except BadAction as error:
            raise NoText(
                f"the action {shown(action)} cannot be written as text: {error}"
            ) from error
        if write_action(read, space) != write_action(action, space):
            raise NoText(f"the action {shown(action)} is parsed as {shown(read)}")


def describe(space: Any) -> str:
    """Return the form of an action in words. Raises: NoText."""
    kind = kind_of(space)
    if kind == "Text":
        return f"a text of {space.min_length} to {space.max_length} characters"
    if kind == "Discrete":
        return f"a whole number from {int(space.start)} to {int(space.start) + int(space.n) - 1}"
    if kind in ARRAYS:
        return _describe_array(space)
    if kind == "Dict":
        parts = ", ".join(f'"{key}": {describe(each)}' for key, each in space.spaces.items())
        return f"a JSON object {{{parts}}}"
    if kind == "Sequence":
        return f"a JSON array of any number of values, each {describe(space.feature_space)}"
    if kind == "OneOf":
        parts = "; ".join(f"{n} and {describe(each)}" for n, each in enumerate(space.spaces))
        return f"a JSON array of two: {parts}"
    parts = ", ".join(map(describe, space.spaces))
    return f"a JSON array [{parts}]"


def plain(value: Any) -> Any:
    """Return a numpy or gymnasium value as plain JSON types. Raises: NoText: no JSON form."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, (np.generic, np.ndarray)) and value.dtype.kind in "biufUSO":
        items = value.tolist()
        return items if value.dtype.kind in "biufU" else plain(items)
    if isinstance(value, dict):
        return {str(plain(key)): plain(each) for key, each in value.items()}
    as_dict = getattr(value, "_asdict", None)
    if as_dict is not None:  # Gymnasium's graphs are named tuples.
        return plain(as_dict())
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value), key=repr)
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode(errors="replace")
    kind = type(value)
    # Its text would contain only an address.
    if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__:
        raise NoText(f"a value of type {kind.__name__} has no text form")
    return str(value)


def observation_text(observation: Any) -> str:
    """Return an observation as text: a string unchanged, other values as JSON. Raises: NoText."""
    shown = plain(observation)
    return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)


def _spoken(text: str, space: Any) -> str:
    """Return the value of a JSON string that the space contains, else the text itself."""
    try:
        value = json.loads(text) if text.startswith('"') else text
    except ValueError:
        return text
    return value if space.contains(value) else text


def _unfenced(text: str) -> str:
    """Return the content of a Markdown fence, or the text if it has no fence."""
    match = FENCED.fullmatch(text.strip())
    return match[1] if match else text


def _checked_action(action: Any, space: Any) -> Any:
    """Return an action. Raises: BadAction: the space does not contain it."""
    try:
        is_contained = bool(space.contains(action))
    except OverflowError:  # The number exceeds the space's type.
        is_contained = False
    if not is_contained:
        raise BadAction(f"The action must be {describe(space)}; {shown(plain(action))} is not.")
    return action


def _built(value: Any, space: Any) -> Any:
    """Convert a JSON value to the space's own types. Raises: BadAction."""
    kind = kind_of(space)
    if kind in ARRAYS:
        return _array(value, space)
    if kind == "Discrete":
        return _whole(value)
    if kind == "Text":
        return _checked_action(value, space)
    if kind == "Dict":
        if not isinstance(value, dict) or value.keys() != space.spaces.keys():
            raise BadAction(f"{shown(value)} is not {describe(space)}.")
        return {key: _built(value[key], each) for key, each in space.spaces.items()}
    if not isinstance(value, list):
        raise BadAction(f"{shown(value)} is not {describe(space)}.")
    if kind == "Sequence":
        return tuple(_built(each, space.feature_space) for each in value)
    if kind == "OneOf":
        return _chosen(value, space)
    if len(value) != len(space.spaces):
        raise BadAction(f"{shown(value)} is not {describe(space)}.")
    return tuple(_built(each, part) for each, part in zip(value, space.spaces, strict=True))


def _chosen(value: list[Any], space: Any) -> tuple[int, Any]:
    """Return the number of the chosen part, and its value. Raises: BadAction."""
    number = _whole(value[0]) if len(value) == 2 else -1
    if not 0 <= number < len(space.spaces):
        raise BadAction(f"{shown(value)} is not {describe(space)}.")
    return number, _built(value[1], space.spaces[number])


def _array(value: Any, space: Any) -> np.ndarray:
    """Convert nested lists to an array of the space's shape and type. Raises: BadAction."""
    if space.shape in ((), (1,)) and not isinstance(value, list):
        value = value if space.shape == () else [value]
    is_whole = space.dtype.kind in "iub"
    numbers = [_whole(each) if is_whole else _finite(each) for each in _flat(value, space)]
    try:
        with np.errstate(over="ignore"):  # A value that is infinite in 32 bits is refused below.
            array = np.array(numbers, dtype=space.dtype).reshape(space.shape)
    except (OverflowError, ValueError) as error:  # Example: 300 in 8 bits.
        raise BadAction(f"{shown(value)} is not {describe(space)}.") from error
    if not is_whole and not np.isfinite(array).all():
        raise BadAction(f"{shown(value)} has a number beyond {space.dtype.name}.")
    return array


def _flat(value: Any, space: Any) -> list[Any]:
    """Return the numbers of nested lists that have the space's shape. Raises: BadAction."""
    level = [value]
    for size in space.shape:
        if not all(isinstance(each, list) and len(each) == size for each in level):
            raise BadAction(f"{shown(value)} is not {describe(space)}.")
        level = [number for each in level for number in each]
    return level


def _whole(value: Any) -> int:
    """Return a whole number of JSON. Raises: BadAction: the value is not one."""
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    raise BadAction(f"{shown(value)} is not a whole number.")


def _finite(value: Any) -> float:
    """Return a number of JSON. Raises: BadAction: the value is not a number, or infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadAction(f"{shown(value)} is not a number.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadAction(f"{shown(value)} is not a finite number.")
    return number


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is not a finite number")


def _parts(space: Any) -> list[Any]:
    """Return a space and all its nested parts. Raises: NoText."""
    kind = kind_of(space)
    inner: list[Any] = []
    if kind == "Dict":
        inner = [*space.spaces.values()]
    elif kind in ("Tuple", "OneOf"):
        inner = [*space.spaces]
    elif kind == "Sequence":
        inner = [space.feature_space]
    return [space, *(found for part in inner for found in _parts(part))]


def _describe_array(space: Any) -> str:
    noun = "whole number" if space.dtype.kind in "iub" else "number"
    num = len(space.shape)
    form = f"a JSON array of shape {[*space.shape]} of {noun}s" if num else f"a {noun}"
    if num == 1:
        form = f"a JSON array of {counted(space.shape[0], noun)}"
    low, high = map(plain, _bounds(space))
    return f"{form} from {shown(low)} to {shown(high)}"


def _bounds(space: Any) -> tuple[Any, Any]:
    """Return the lower and upper bounds, as one number each if they are uniform."""
    kind = kind_of(space)
    if kind == "MultiBinary":
        return 0, 1
    low, high = (
        (space.low, space.high) if kind == "Box" else (space.start, space.start + (space.nvec - 1))
    )
    alike = np.size(low) > 0 and bool(np.all(low == low.flat[0]) and np.all(high == high.flat[0]))
    return (low.flat[0], high.flat[0]) if alike else (low, high)


MAX_SAMPLES = 64  # Maximum size of a discrete space whose numbers are all listed.
NUM_SAMPLES = 8
CUT_KEY = "TimeLimit.truncated"
REMEDY = "register it with a wrapper that takes texts or numbers and returns texts"


class GymnasiumGame:
    """An environment of gymnasium whose actions can be written as texts."""

    def __init__(self, name: str) -> None:
        """Create the environment. Raises: ConfigError: no such environment, or no text actions."""
        import gymnasium  # The import takes a while, and other libraries' games need none.

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
        arguments = {"seed": seed, "options": options}
        accepted = {key: value for key, value in arguments.items() if takes_all or key in takes}
        if seed is not None and "seed" not in accepted and hasattr(env, "seed"):
            env.seed(seed)
        begun = reset(**accepted)
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

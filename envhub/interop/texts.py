"""Conversion of an agent's texts to actions and tool calls, and of foreign rewards to [0, 1]."""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from common.formats.action_size import DEFAULT_ACTION_MIB, MIB
from common.formats.answers import CALL_BEGIN
from common.formats.calls import check_depth, read_arguments
from envhub.env import LABEL, EnvFailure, action_text

MAX_NUMBER = int(sys.float_info.max)
MAX_SENT_BYTES = DEFAULT_ACTION_MIB * MIB
SAMPLES = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}, "null": None}


CALL_KEYS = frozenset({"tool", "tool_name", "name", "arguments"})
SUCCESS_KEYS = ("is_success", "success", "episode_success", "is_solved", "solved", "won")
TRUNCATED_KEYS = ("is_truncated", "truncated")


class BadAction(ValueError):
    """The agent's text is not an action; the agent receives the message as its observation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionResult:
    """The result of one action; if `is_success` is None, the full reward means success.

    `is_truncated`: the episode has ended (`is_done`) at a limit, before the task was finished.
    """

    text: str
    reward: float | None
    is_done: bool
    is_valid: bool = True
    is_success: bool | None = None
    is_truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRule:
    """How the rewards of an episode form its return, and the bounds of the return."""

    kind: Literal["last", "sum"] = "last"
    least: float = 0.0
    most: float = 1.0

    @property
    def start_score(self) -> float:
        """Return the score of an episode without rewards: a raw 0, mapped to [0, 1]."""
        return self.normalise(0.0)

    def normalise(self, raw: float) -> float:
        """Map a raw score to [0, 1]: `least` is 0, `most` is 1; other scores are clipped."""
        share = (raw - self.least) / (self.most - self.least)
        return round(min(max(share, 0.0), 1.0), 9)


class Rewards:
    """The rewards of one episode as the single number in [0, 1] that a step reports.

    Example: a range of -1 to 1. Before the first reward a step reports 0.5, not 0.
    """

    def __init__(self, rule: RewardRule) -> None:
        self._rule = rule
        self._total: float | None = None  # None: no reward so far.

    def add(self, reward: object, *, is_last: bool) -> float:
        """Return the return of the episode including this reward; None is no reward.

        Raises: EnvFailure: not a number, out of bounds, or the episode ends without a reward.
        """
        if reward is not None:
            if not isinstance(reward, (int, float)) or not math.isfinite(reward):
                raise EnvFailure(f"a step has the reward {reward!r}, which is not a finite number")
            before = (self._total or 0.0) if self._rule.kind == "sum" else 0.0
            self._total = round(before + float(reward), 12)  # Ten times 0.1 is 1.
        if self._total is None:
            if is_last:
                raise EnvFailure("the episode ended without a reward")
            return self._rule.start_score
        least = self._rule.least
        most = self._rule.most
        # Also checked before the end, since a horizon may cut there.
        is_beyond = self._total > most and self._rule.kind == "sum"
        if is_beyond or (is_last and not least <= self._total <= most):
            law = f"outside of its range from {least:g} to {most:g} (env.*_reward)"
            raise EnvFailure(f"the return of the episode is {self._total:g}, {law}")
        return self._rule.normalise(self._total)


def reported_truth(fields: Mapping[str, Any], keys: Sequence[str]) -> bool | None:
    """Return the truth value of the first key that has one; None if no key has.

    A number is true from 1 on, also a numpy number. Arrays of several values, texts and NaN are
    ignored.
    """
    for key in keys:
        value: Any = fields.get(key)
        if hasattr(value, "item") and getattr(value, "size", 1) == 1:
            value = value.item()
        if isinstance(value, (bool, int, float)) and not math.isnan(value):
            return value >= 1
    return None


def parse_json(text: str) -> dict[str, Any]:
    """Return the JSON object of an agent's text, fenced or not: the whole text, or an action.

    Raises: BadAction.
    """
    refusal = BadAction("The action must be a JSON object.")
    for candidate in _json_texts(text):
        start = candidate.find("{")
        end = candidate.rfind("}")
        try:
            parsed = json.loads(candidate[start : end + 1]) if 0 <= start < end else None
        except (ValueError, RecursionError) as error:
            refusal = BadAction(f"The action is no JSON: {error}")
            continue
        if isinstance(parsed, dict):
            return parsed
    raise refusal


def _json_texts(text: str) -> Iterator[str]:
    """Yield the parts of a text that may be its JSON object.

    The last "Action:" may lie in a string of an object that begins before it. After several calls
    it is none of them alone.
    """
    first = LABEL.search(text)
    for candidate in (text.strip(), text[first.end() :].strip() if first else ""):
        if candidate.startswith("{"):
            yield candidate
    calls = [part for part in LABEL.split(text)[1:] if CALL_BEGIN.match(part.strip())]
    if len(calls) < 2:
        yield action_text(text)


def is_call(text: str) -> bool:
    """Return whether a text calls a tool, or begins a call that cannot be parsed.

    Other texts with braces, such as LaTeX, are answers.
    """
    try:
        return not CALL_KEYS.isdisjoint(parse_json(text))
    except BadAction:
        texts = (*_json_texts(text), action_text(text))  # The last one of several calls, too.
        return any(CALL_BEGIN.search(each) is not None for each in texts)


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call: an object, or its JSON text as in OpenAI's form.

    Raises: BadAction: the arguments are no object.
    """
    try:
        return read_arguments(call.get("arguments", {}))
    except (ValueError, RecursionError) as error:
        raise BadAction(f'"arguments" must be a JSON object: {error}'[:300]) from error


def parse_tool_call(text: str, names: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return the tool that a text calls, and its arguments. Raises: BadAction."""
    call = parse_json(text)
    name = call.get("tool") or call.get("tool_name") or call.get("name")
    if not isinstance(name, str) or name not in names:
        shown = f" {name[:100]!r}" if isinstance(name, str) else ""
        raise BadAction(f"No tool{shown}; there are: {', '.join(names)}.")
    return name, arguments_of(call)


def check_sendable(value: object) -> None:
    """Raise BadAction if other programs cannot read the value: NaN, lone surrogates, depth or size.

    Numbers beyond a float's range are refused as well.
    """
    try:
        check_depth(value)
        _check_numbers(value)
        sent = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadAction(f"This cannot be sent: {error}"[:300]) from error
    if len(sent) > MAX_SENT_BYTES:
        text = f"The action has {len(sent)} bytes; at most {MAX_SENT_BYTES} can be sent."
        raise BadAction(text)


def _check_numbers(value: object) -> None:
    """Raise ValueError for a number beyond a float's range."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _check_numbers(item)
    elif type(value) is int and abs(value) > MAX_NUMBER:
        raise ValueError("a number is too large")


def shortened(text: str, most: int) -> str:
    """Return valid Unicode text; after `most` characters it is cut, with a note of the rest."""
    whole = text.encode(errors="replace").decode()
    over = len(whole) - most
    return whole if over <= 0 else f"{whole[:most]} [{over} more characters]"


def sample_call(name: str, schema: Mapping[str, Any]) -> str:
    """Return a call of a tool with an example of each required argument."""
    fields = schema.get("properties", {})
    arguments: dict[str, Any] = {}
    for argument in schema.get("required", []):
        field = fields.get(argument, {})
        among = [*field.get("enum", []), SAMPLES.get(str(field.get("type")), "text")]
        arguments[argument] = field.get("default", among[0])
    return json.dumps({"tool": name, "arguments": arguments})

"""The saved state of a session, as a text that another session of the same episode loads.

`CHECKSUM JSON`: the checksum finds damage. The JSON has the identity of the episode, the parts of
the last answer that later answers refer to, and the environment's own state.
"""

import json
import zlib
from collections.abc import Mapping
from typing import Any

from envhub.env import StepResult
from envhub.errors import BadState, StateUnsaved

MAX_SAVED_BYTES = 1 << 20  # A larger state is not saved.
FORMAT = 1
ANSWER_PARTS = ("reward", "state", "seat", "seat_rewards")
_CHECKSUM_CHARS = 8


def can_save(env: Any) -> bool:
    """Return whether an environment has the methods `save` and `load`."""
    return hasattr(env, "save") and hasattr(env, "load")


def state_text(state: Any) -> str:
    """Return an environment's state as JSON.

    Raises: StateUnsaved: it is too large, or JSON would change it.
    """
    try:
        text = json.dumps(state, separators=(",", ":"))
        is_plain = json.loads(text) == state
    except (TypeError, ValueError, RecursionError) as error:
        raise StateUnsaved(f"save() returns data that is not JSON: {error}") from error
    if not is_plain:
        raise StateUnsaved(
            "save() returns data that JSON changes: use lists for tuples, str keys, and no NaN"
        )
    if len(text) > MAX_SAVED_BYTES:
        raise StateUnsaved(f"the state has {len(text)} bytes, more than {MAX_SAVED_BYTES}")
    return text


def saved_text(identity: Mapping[str, Any], answer: StepResult | None, state: str) -> str:
    """Return the saved state of a session.

    Args:
        identity: the values that the session and one that loads the state have in common.
        answer: the last answer; None before the first step.
        state: the environment's state as JSON.
    """
    last = None if answer is None else {name: getattr(answer, name) for name in ANSWER_PARTS}
    head = json.dumps({"format": FORMAT, **identity, "answer": last}, separators=(",", ":"))
    body = f'{head[:-1]},"env_state":{state}}}'
    return f"{_checksum(body)} {body}"


def read_saved(identity: Mapping[str, Any], saved: str) -> tuple[Any, StepResult | None]:
    """Return the environment's state, and the last answer with an empty observation.

    Raises: BadState: the text is damaged, or of another episode.
    """
    body = saved[_CHECKSUM_CHARS + 1 :]
    if saved[: _CHECKSUM_CHARS + 1] != f"{_checksum(body)} ":
        raise BadState(f"a saved state of {len(saved)} characters is damaged: its checksum differs")
    try:
        content = json.loads(body)
        for name, value in {"format": FORMAT, **identity}.items():
            if content[name] != value:
                raise BadState(f"the saved state has {name}={content[name]!r:.200}, not {value!r}")
        last = content["answer"]
        if last is None:
            return content["env_state"], None
        answer = StepResult(observation="", done=False, is_valid=True, **last)
        return content["env_state"], answer
    except BadState:
        raise
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise BadState(f"the saved state is malformed: {error!r:.200}") from error


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode(errors='surrogatepass')):08x}"

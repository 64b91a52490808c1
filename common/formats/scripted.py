"""Actions of a scripted policy in a trajectory. They have no tokens of a vocabulary.

Each action is one made-up token. Its id is the index of the action in `action_chars`, which
contains the code points of all actions, each followed by `END`.
"""

from collections.abc import Sequence

import numpy as np

from common.text import valid_text
from common.wire.messages import Trajectory

END = -1
MAX_CODE_POINT = 0x10FFFF


def chars_of(actions: Sequence[str]) -> np.ndarray:
    """Return [chars] int32, the code points of the actions."""
    return np.array([code for text in actions for code in [*map(ord, text), END]], dtype=np.int32)


def actions_of(trajectory: Trajectory) -> list[str]:
    """Return the actions by their ids, [] for a trajectory of an earlier product version."""
    chars = trajectory.action_chars
    ends = np.flatnonzero(chars == END)
    starts = [0, *(ends[:-1] + 1).tolist()]
    parts = [chars[start:end].tolist() for start, end in zip(starts, ends.tolist(), strict=False)]
    return [valid_text("".join(map(chr, part))) for part in parts]


def refusal_of_actions(trajectory: Trajectory) -> str:
    """Return why `action_chars` is invalid, "" if it is valid or empty."""
    chars = trajectory.action_chars
    if chars.dtype != np.int32 or chars.ndim != 1:
        return f"action_chars is {chars.dtype.name} {chars.shape}, not [chars] int32"
    if chars.size and not (chars[-1] == END <= chars.min() and chars.max() <= MAX_CODE_POINT):
        return "action_chars is not a valid text"
    return ""

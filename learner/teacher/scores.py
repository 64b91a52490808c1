"""The teacher's scores of an episode, read from an endpoint's prompt logprobs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.http.model_endpoint import Refused

TEACHER = "teacher"  # Role of the engine.
# Environment variable with the key of the engine. It is in no file.
KEY_VARIABLE = "LONGSTRIDE_TEACHER_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherScores:
    """The teacher's log-probabilities at the sampled tokens of an episode, over all segments."""

    logprobs: np.ndarray | None = field(repr=False, default=None)  # [tokens] float32, form=sampled
    ids: np.ndarray | None = field(repr=False, default=None)  # [tokens, k] int32, form=topk
    top: np.ndarray | None = field(repr=False, default=None)  # [tokens, k] float32, form=topk

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The scores as fields of `Sample`."""
        named = {
            "teacher_logprobs": self.logprobs,
            "teacher_ids": self.ids,
            "teacher_top": self.top,
        }
        return {name: column for name, column in named.items() if column is not None}


def joined_scores(parts: Sequence[TeacherScores]) -> TeacherScores:
    """Return the scores of an episode from those of its segments, which are not empty."""
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("logprobs", "ids", "top")
        if getattr(parts[0], name) is not None
    }
    return TeacherScores(**columns)


def empty_scores(num_top: int) -> TeacherScores:
    """Return the scores of an episode without a sampled token."""
    if num_top == 0:
        return TeacherScores(logprobs=np.zeros(0, dtype=np.float32))
    return TeacherScores(
        ids=np.zeros((0, num_top), dtype=np.int32), top=np.zeros((0, num_top), dtype=np.float32)
    )


def read_scores(
    reply: Mapping[str, Any], token_ids: np.ndarray, positions: np.ndarray, *, num_top: int
) -> TeacherScores:
    """Return the scores in a completion's `prompt_logprobs`.

    Args:
        token_ids: [seq] the prompt.
        positions: [tokens] indices of the sampled tokens in the prompt, all above 0.
        num_top: number of the teacher's most probable tokens; 0: the prompt's own tokens.

    Raises: Refused: the answer has no logprobs, or not those of every sampled token.
    """
    try:
        listed: Any = reply["choices"][0]["prompt_logprobs"]
        if listed is None or len(listed) != len(token_ids):
            raise ValueError(f"{len(listed or ())} prompt_logprobs for {len(token_ids)} tokens")
        entries = [listed[int(at)] for at in positions]
        if num_top:
            return _read_top(entries, num_top)
        chosen = zip(entries, token_ids[positions], strict=True)
        logprobs = [float(entry[str(int(token))]["logprob"]) for entry, token in chosen]
        return TeacherScores(logprobs=_finite(logprobs))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Refused(
            f"its answer has no usable prompt_logprobs ({error!r}). The endpoint must support"
            " prompt_logprobs of /v1/completions, as vLLM's server does"
        ) from error


def _read_top(entries: Sequence[Mapping[str, Any]], num_top: int) -> TeacherScores:
    """Return each entry's tokens of the lowest ranks. The prompt's own token may be one more."""
    rows = [sorted(entry.items(), key=lambda each: each[1]["rank"])[:num_top] for entry in entries]
    sizes = {len(row) for row in rows}
    if len(sizes) != 1:
        raise ValueError(f"positions have {min(sizes)} to {max(sizes)} tokens")
    ids = [[int(token) for token, _ in row] for row in rows]
    top = [[float(value["logprob"]) for _, value in row] for row in rows]
    return TeacherScores(ids=np.array(ids, dtype=np.int32), top=_finite(top))


def _finite(values: Sequence[Any]) -> np.ndarray:
    array = np.array(values, dtype=np.float32)
    if not np.isfinite(array).all():
        raise ValueError("a logprob is NaN or infinite")
    return array

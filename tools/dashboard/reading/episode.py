"""Trajectories for display: their replay, their advantages, and the difference of two."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from common import segments as rows
from common.config.actor import AgentFormat
from common.formats.answers import read_any
from common.wire.messages import PolicyKind, Trajectory
from learner.journal.texts import Texts, texts_for

STD_EPSILON = 1e-6  # The same value as in the learner.
NUM_SHOWN = 24  # Number of tokens shown from the first difference on.


def recorded_of(
    trajectory: Trajectory, texts: Texts, *, style: str, format: AgentFormat = AgentFormat.PLAIN
) -> dict[str, Any]:
    """Return the data to replay an episode (`RecordedEpisode`).

    Args:
        style, format: `envhub.style` and `actor.format` of the run.

    Raises: ConfigError: its actions are unknown.
    """
    t = trajectory
    is_model = t.policy is PolicyKind.MODEL
    texts = texts_for(t, texts)
    is_action = t.loss_mask.copy()
    for start, end, _ in rows.asides_of(t):
        is_action[start:end] = False
    turns = [t.turn_ids == turn for turn in range(t.num_turns)]
    return {
        **{"env": t.env, "item": t.item_id, "style": style},
        "actions": [
            read_any(
                format if is_model else AgentFormat.PLAIN,
                texts.text(t.token_ids[_acted(t, mask & is_action)].tolist()),
            )
            for mask in turns
        ],
        "shown": [
            "".join(texts.texts(t.token_ids[mask & ~t.loss_mask].tolist()))
            for mask in turns
            if is_model  # A scripted policy gets no observations.
        ],
        **{"scores": t.turn_scores.tolist(), "states": t.turn_states.tolist()},
    }


def _acted(t: Trajectory, turn: np.ndarray) -> np.ndarray:
    """Return the indices of a turn's action tokens [num]: its last run of sampled tokens.

    Earlier samples of the turn are no actions: summaries, and the start or end of a branch.
    """
    chosen = np.flatnonzero(turn & t.loss_mask)
    starts = [part.start for part in rows.segments_of(t)]
    is_first = np.diff(chosen, prepend=-2) > 1
    is_first |= np.isin(chosen, starts)
    return chosen[np.flatnonzero(is_first)[-1] :] if chosen.size else chosen


def group_advantages(
    worth: Sequence[float], *, baseline: str, normalize_std: bool
) -> list[float] | None:
    """Return the advantage of each member of a group; None for fewer than two members.

    Args:
        worth: shaped rewards.
        baseline: `algorithm.baseline`: leave_one_out, or the mean of all members.

    The learner computes the same values, before it assigns credit to turns.
    Source: RLOO, arXiv:2402.14740; GRPO, arXiv:2402.03300.
    """
    if len(worth) < 2:
        return None
    values = np.asarray(worth, np.float64)
    centred = values - values.mean()
    if baseline == "leave_one_out":
        centred = centred * len(values) / (len(values) - 1)
    if normalize_std:
        centred = centred / (values.std() + STD_EPSILON)
    return [round(float(value), 6) for value in centred]


def first_difference(one: Trajectory, other: Trajectory, texts: Texts) -> dict[str, Any] | None:
    """Return the first difference between two trajectories; None if they are equal."""
    decoder = texts_for(one, texts)
    texts = texts_for(other, texts)
    num = min(len(one.token_ids), len(other.token_ids))
    differs = np.flatnonzero(one.token_ids[:num] != other.token_ids[:num])
    if not differs.size and len(one.token_ids) == len(other.token_ids):
        return None
    at = int(differs[0]) if differs.size else num
    longer = other if len(other.token_ids) > at else one
    return {
        "token": at,
        "turn": int(longer.turn_ids[at]),
        "first": "".join(decoder.texts(one.token_ids[at : at + NUM_SHOWN].tolist())),
        "this": "".join(texts.texts(other.token_ids[at : at + NUM_SHOWN].tolist())),
    }

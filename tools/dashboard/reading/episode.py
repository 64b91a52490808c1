"""Trajectories for display: their replay, their advantages, and the difference of two."""

import itertools
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
    turns = _tokens_by_turn(t)
    starts = np.array([part.start for part in rows.segments_of(t)])
    return {
        **{"env": t.env, "item": t.item_id, "style": style},
        "actions": [
            read_any(
                format if is_model else AgentFormat.PLAIN,
                texts.text(t.token_ids[_acted(turn[is_action[turn]], starts)].tolist()),
            )
            for turn in turns
        ],
        "shown": [
            "".join(texts.texts(t.token_ids[turn[~t.loss_mask[turn]]].tolist()))
            for turn in turns
            if is_model  # A scripted policy gets no observations.
        ],
        **{"scores": t.turn_scores.tolist(), "states": t.turn_states.tolist()},
    }


def _tokens_by_turn(t: Trajectory) -> list[np.ndarray]:
    """Return the indices of the tokens of each turn, [turn][num]."""
    order = np.argsort(t.turn_ids, kind="stable")
    cuts = np.searchsorted(t.turn_ids[order], np.arange(t.num_turns + 1))
    return [order[start:end] for start, end in itertools.pairwise(cuts.tolist())]


def _acted(chosen: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the indices of a turn's action tokens [num]: its last run of sampled tokens.

    Earlier samples of the turn are no actions: summaries, and the start or end of a branch.

    Args:
        chosen: indices of the turn's sampled tokens in order, [tokens].
        starts: indices of the first tokens of all segments, [segment].
    """
    is_first = np.diff(chosen, prepend=-2) > 1
    is_first |= starts[np.searchsorted(starts, chosen, side="right") - 1] == chosen
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

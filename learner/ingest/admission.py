"""Admission to the journal: validates arriving trajectories and detects duplicates."""

import logging
import math
from dataclasses import dataclass

import numpy as np

from common.formats.scripted import refusal_of_actions
from common.segments import (
    RoutingShape,
    refusal_of_asides,
    refusal_of_experts,
    refusal_of_segments,
    refusal_of_starts,
    segments_of,
)
from common.text import counted
from common.wire.access.lease_mac import is_leased
from common.wire.messages import EndReason, PolicyKind, Trajectory
from learner.ingest.journal_index import JournalIndex

logger = logging.getLogger(__name__)

MAX_ABS_LOGPROB = 200.0  # Nats; a larger absolute value is not a valid logprob.
MAX_LOGPROB = 1e-3  # Nats; the excess over 0 allows for the rounding of probability 1.
_COLUMNS = {
    "token_ids": np.dtype("int32"),
    "loss_mask": np.dtype("bool"),
    "logprobs": np.dtype("float32"),
    "versions": np.dtype("int32"),
    "turn_ids": np.dtype("int32"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionDecision:
    """The decision on an arriving trajectory; by default it is journalled."""

    is_duplicate: bool = False  # True: acknowledged, but not journalled again.
    refusal: str = ""  # Reason for the refusal; "" without one.
    # True if the sender does not hold the lease; the named episode is then unaffected.
    is_forged: bool = False


class Admission:
    """Decides on arriving trajectories and counts the rejected ones. For one thread."""

    def __init__(
        self,
        index: JournalIndex,
        *,
        group_size: int,
        vocab_size: int | None = None,
        max_tokens: int | None = None,
        lease_key: bytes | None = None,
        routing: RoutingShape | None = None,
    ) -> None:
        """Start with all counts at zero.

        Args:
            group_size: most members of a group, as in `refusal`.
            vocab_size: as in `refusal`.
            max_tokens: as in `refusal`.
            lease_key: key with which the scheduler marks leases. None: every sender is trusted.
            routing: as in `refusal`.
        """
        self._routing = routing
        self._lease_key = lease_key
        self._index = index
        self._max_tokens = max_tokens
        self._group_size = group_size
        self._vocab_size = vocab_size
        self._num_refused = 0
        self._num_forged = 0
        self._num_duplicates = 0

    def check(self, trajectory: Trajectory, *, learner_version: int) -> AdmissionDecision:
        """Return the decision on a trajectory; `learner_version` as in `refusal`."""
        if self._lease_key is not None and not is_leased(trajectory, self._lease_key):
            self._num_forged += 1
            reason = (
                f"the lease signature is not valid: the scheduler did not lease"
                f" {trajectory.episode_id} with these fields to {trajectory.actor}"
            )
            return AdmissionDecision(is_forged=True, refusal=reason[:500])
        if trajectory in self._index:
            self._num_duplicates += 1
            return AdmissionDecision(is_duplicate=True)
        reason = refusal(
            trajectory,
            learner_version=learner_version,
            max_group_size=self._group_size,
            vocab_size=self._vocab_size,
            max_tokens=self._max_tokens,
            routing=self._routing,
        )
        if reason:
            self._num_refused += 1
            logger.error(
                "refused episode=%s actor=%s reason=%s",
                trajectory.episode_id,
                trajectory.actor,
                reason,
            )
        return AdmissionDecision(refusal=reason)

    def admit(self, trajectory: Trajectory) -> None:
        """Register a trajectory that will be journalled, so that later copies are duplicates."""
        self._index.add_episode(trajectory)

    def counts(self) -> dict[str, float]:
        """Return the metrics of the whole run so far."""
        return {
            "admission/refused": float(self._num_refused),
            "admission/forged": float(self._num_forged),
            "admission/duplicates": float(self._num_duplicates),
        }


def refusal(
    trajectory: Trajectory,
    *,
    learner_version: int,
    max_group_size: int,
    vocab_size: int | None = None,
    max_tokens: int | None = None,
    routing: RoutingShape | None = None,
) -> str:
    """Return the reason why a trajectory must not be accepted, "" if it may.

    An infrastructure failure may have few or no tokens. It is accepted as a record, and never
    enters the loss.

    Args:
        learner_version: newest existing version; no token can be newer.
        max_group_size: member numbers must be below it (training episodes only).
        vocab_size: rows of the policy's embedding. A journalled token id above them would crash the
            trainer at every replay. None: not known, so not checked.
        max_tokens: most tokens of a segment, which the learner computes at once. None: no limit.
        routing: sizes of recorded experts. None: they are not replayed.
    """
    num_tokens = trajectory.token_ids.size
    for name, dtype in _COLUMNS.items():
        column: np.ndarray = getattr(trajectory, name)
        if column.dtype != dtype:
            return f"{name} has dtype {column.dtype.name}, expected {dtype.name}"
        if column.shape != (num_tokens,):
            return f"{name} has shape {column.shape}, but token_ids has {num_tokens} tokens"
    reason = refusal_of_starts(trajectory) or refusal_of_asides(trajectory)
    reason = reason or refusal_of_actions(trajectory)
    if reason := reason or refusal_of_experts(trajectory, routing):
        return reason
    longest = max(part.stop - part.start for part in segments_of(trajectory))
    if max_tokens is not None and longest > max_tokens:
        return (
            f"a segment has {longest} tokens, more than a microbatch of {max_tokens}"
            " (learner.max_tokens_per_microbatch x learner.sequence_ranks)"
        )
    if not 0.0 <= trajectory.reward <= 1.0:
        return f"reward={trajectory.reward} is not in [0, 1]"
    if trajectory.kind == "train" and not 0 <= trajectory.member < max_group_size:
        return f"member={trajectory.member} is out of range for a group of {max_group_size}"
    if reason := _refusal_of_turns(trajectory):
        return reason
    if trajectory.end_reason.is_infrastructure_failure:
        return ""
    if trajectory.policy is not PolicyKind.MODEL:
        is_eval = trajectory.kind == "eval"
        return "" if is_eval else f"an episode of policy {trajectory.policy} cannot be trained on"
    if trajectory.segment_starts.size and (reason := refusal_of_segments(trajectory)):
        return reason
    if is_plainly_sound(trajectory, learner_version, vocab_size):
        return ""
    return _refusal_of_tokens(trajectory, learner_version, vocab_size)


def _refusal_of_turns(trajectory: Trajectory) -> str:
    """Return why the per-turn columns are inconsistent, "" if they are consistent."""
    if not 0 <= trajectory.num_invalid_actions <= trajectory.num_turns:
        return (
            f"num_invalid_actions={trajectory.num_invalid_actions} is not in"
            f" [0, num_turns={trajectory.num_turns}]"
        )
    entries = counted(trajectory.num_turns, "entry", "entries")
    invalid = trajectory.invalid_turns
    num_invalid = np.count_nonzero(invalid)
    if invalid.shape != (trajectory.num_turns,) or num_invalid != trajectory.num_invalid_actions:
        return (
            f"invalid_turns={invalid.tolist()} must have {entries}, and"
            f" num_invalid_actions={trajectory.num_invalid_actions} of them must be true"
        )
    scores = trajectory.turn_scores
    are_scores = all(0.0 <= score <= 1.0 for score in scores.ravel().tolist())
    if scores.shape != (trajectory.num_turns,) or not are_scores:
        return f"turn_scores={scores.tolist()} must have {entries}, each in [0, 1]"
    if not 0.0 <= trajectory.start_score <= 1.0:
        return f"start_score={trajectory.start_score} is not in [0, 1]"
    for name in ("turn_states", "turn_actions"):
        column: np.ndarray = getattr(trajectory, name)
        if column.dtype != np.int32 or column.shape not in ((0,), (trajectory.num_turns,)):
            return (
                f"{name} has dtype {column.dtype.name} and shape {column.shape}, expected int32"
                f" and no entry or {entries}"
            )
    return ""


def is_plainly_sound(trajectory: Trajectory, learner_version: int, vocab_size: int | None) -> bool:
    """Return True if cheap checks of whole columns find the trajectory valid.

    False: the full validator `_refusal_of_tokens` decides. It selects the sampled tokens of every
    column, which costs more than the rest of an arrival.
    """
    mask = trajectory.loss_mask
    turns = trajectory.turn_ids
    versions = trajectory.versions
    if not np.count_nonzero(mask) or mask[0]:
        return False
    if turns[0] < 0 or turns[-1] >= trajectory.num_turns or (turns[1:] < turns[:-1]).any():
        return False
    # A negative id becomes larger than every valid id.
    as_unsigned = trajectory.token_ids.view(np.uint32)
    if vocab_size is None or as_unsigned.max() >= vocab_size:
        return False
    logprobs = trajectory.logprobs  # A NaN fails both comparisons.
    if not (logprobs.min() >= -MAX_ABS_LOGPROB and logprobs.max() <= MAX_LOGPROB):
        return False
    num_unlike = np.count_nonzero((versions >= 0) != mask)
    return bool(not num_unlike and versions.min() == -1 and versions.max() <= learner_version)


def _refusal_of_tokens(trajectory: Trajectory, learner_version: int, vocab_size: int | None) -> str:
    """Return why the token columns are invalid, "" if they are valid."""
    mask = trajectory.loss_mask
    if not mask.any():
        # An evaluation item whose first page leaves no room for a turn counts as unsolved.
        is_unplayed = trajectory.kind == "eval" and trajectory.end_reason is EndReason.CONTEXT_FULL
        why = f": {trajectory.error}" if trajectory.error else ""
        return "" if is_unplayed else f"the trajectory has no sampled token{why}"
    if mask[0]:
        return "the first token is marked as sampled, but it has no predecessor"
    turns = trajectory.turn_ids[mask]
    if int(turns.min()) < 0 or int(turns.max()) >= trajectory.num_turns:
        return (
            f"sampled tokens have turn ids {turns.min()}..{turns.max()}, but the episode has"
            f" {counted(trajectory.num_turns, 'turn')}"
        )
    if (turns[1:] < turns[:-1]).any():
        return "the turn ids of the sampled tokens decrease"
    if int(trajectory.token_ids.min()) < 0:
        return "token_ids has a negative token id"
    largest = int(trajectory.token_ids.max())
    if vocab_size is not None and largest >= vocab_size:
        return f"token id {largest} is outside the vocabulary of {vocab_size} tokens"
    logprobs = trajectory.logprobs[mask]
    # NaN if any logprob is NaN.
    lowest = float(logprobs.min())
    highest = float(logprobs.max())
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        return "a sampled token has a logprob that is NaN or infinite"
    if lowest < -MAX_ABS_LOGPROB or highest > MAX_LOGPROB:
        return f"a sampled token has a logprob outside [-{MAX_ABS_LOGPROB:g}, 0] nats"
    versions = trajectory.versions[mask]
    if int(versions.min()) < 0 or int(versions.max()) > learner_version:
        return (
            f"sampled tokens have versions {versions.min()}..{versions.max()}, but the learner's"
            f" newest version is {learner_version}"
        )
    if (trajectory.versions[~mask] != -1).any():
        return "a token that was not sampled has a policy version"
    return ""

"""The intake: checks, journals and acknowledges trajectories, and reports to the scheduler.

It has its own thread, so that actors get answers while the model trains.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from common.formats.scripted import refusal_of_actions
from common.segments import (
    RoutingShape,
    refusal_of_asides,
    refusal_of_experts,
    refusal_of_prefixes,
    refusal_of_segments,
    refusal_of_starts,
    row_lengths,
    segments_of,
)
from common.store.disk import POLL_S as ROOM_POLL_S
from common.store.disk import DiskFull, RoomWait
from common.text import counted
from common.wire.access.lease_mac import is_leased
from common.wire.messages import (
    Ack,
    EndReason,
    EpisodeKind,
    Heartbeat,
    LiveConfig,
    PolicyKind,
    Rejected,
    Trajectory,
)
from common.wire.sockets import Received, Router
from learner.ingest.buffer import TrajectoryBuffer
from learner.ingest.journal_index import JournalIndex
from learner.ingest.reports import ReportClient
from learner.journal.journal import JournalPosition, JournalWriter

logger = logging.getLogger(__name__)

POLL_S = 0.02
# Seconds between two batches, so that a stream of trajectories is synced in batches.
GATHER_S = 0.02
MIN_BATCH = 16  # Trajectories; after a batch of this size the next one is received at once.
# Trajectories; a larger batch is split, so that the disk starts with its first part.
MAX_BATCH = 64
CONNECT_S = 60.0
STOP_S = 5.0

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

    def refusal_of_part(self, trajectory: Trajectory, *, learner_version: int) -> str:
        """Return why a part of a running episode must not be accepted, "" if it may."""
        if self._lease_key is not None and not is_leased(trajectory, self._lease_key):
            self._num_forged += 1
            return "the lease signature of a part is not valid"
        if trajectory.kind is not EpisodeKind.TRAIN:
            return f"a part of an episode of kind {trajectory.kind} is not trained"
        return refusal(
            trajectory,
            learner_version=learner_version,
            max_group_size=self._group_size,
            vocab_size=self._vocab_size,
            max_tokens=self._max_tokens,
            routing=self._routing,
        )

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
    reason = refusal_of_starts(trajectory) or refusal_of_prefixes(trajectory)
    reason = reason or refusal_of_asides(trajectory) or refusal_of_actions(trajectory)
    if reason := reason or refusal_of_experts(trajectory, routing):
        return reason
    longest = max(row_lengths(trajectory))
    if max_tokens is not None and longest > max_tokens:
        return (
            f"a segment has {longest} tokens, more than a microbatch of {max_tokens}"
            " (learner.max_tokens_per_microbatch x learner.sequence_ranks)"
        )
    if not 0.0 <= trajectory.reward <= 1.0:
        return f"reward={trajectory.reward} is not in [0, 1]"
    if trajectory.kind == "train" and not 0 <= trajectory.member < max_group_size:
        return f"member={trajectory.member} is out of range for a group of {max_group_size}"
    if reason := _refusal_of_turns(trajectory) or _refusal_of_fork(trajectory, max_group_size):
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


def _refusal_of_fork(trajectory: Trajectory, max_group_size: int) -> str:
    """Return why the shared turns of a fork are invalid, "" if they are valid or absent."""
    num = trajectory.num_shared_turns
    if not num:
        return ""
    if not 0 <= trajectory.trunk < max_group_size or trajectory.trunk == trajectory.member:
        return f"trunk={trajectory.trunk} is no other member of a group of {max_group_size}"
    is_failure = trajectory.end_reason.is_infrastructure_failure
    if num > trajectory.num_turns and not is_failure:
        return f"num_shared_turns={num} exceeds num_turns={trajectory.num_turns}"
    if trajectory.loss_mask[trajectory.turn_ids < num].any():
        return f"a token of the first {num} turns is marked as sampled, but the trunk sampled it"
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
    for part in segments_of(trajectory):  # Rows of conversations at once are not in order.
        of_row = trajectory.turn_ids[part][mask[part]]
        if (of_row[1:] < of_row[:-1]).any():
            return "the turn ids of the sampled tokens decrease within a row"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCommit:
    """Appended trajectories that may not be on disk yet, and the answers that wait for the sync."""

    answers: list[tuple[bytes, Ack]]  # (ROUTER identity, answer to that sender).
    accepted: list[tuple[Trajectory, JournalPosition]]
    end: JournalPosition  # End of the journal after the batch.


class JournalSync(threading.Thread):
    """One sync for all batches submitted during the last sync; batches complete in order.

    consumes:   `submit`, from the thread that appends
    waits for:  a batch, or the disk
    unblocked by: `submit`, `stop`

    Example: submit(a) -> a sync begins. submit(b) and submit(c) are called during it. When it ends,
    take_done() is [a], and one sync for b and c begins. A failed sync ends the thread; then
    take_done() raises.
    """

    def __init__(self, sync: Callable[[], None], *, on_done: Callable[[], None]) -> None:
        """Create the thread without starting it; the thread calls `on_done` after every sync."""
        super().__init__(name="journal-sync", daemon=True)
        self._sync = sync
        self._on_done = on_done
        self._changed = threading.Condition()
        self._waiting: list[PendingCommit] = []
        self._done: list[PendingCommit] = []
        self._is_stopping = False
        self._error: OSError | None = None

    def submit(self, batch: PendingCommit) -> None:
        """Request a sync of all appended records; the batch is the last of them."""
        with self._changed:
            self._waiting.append(batch)
            self._changed.notify()

    def take_done(self) -> list[PendingCommit]:
        """Return the batches that are now on disk. Raises: OSError: a sync failed."""
        with self._changed:
            if self._error is not None:
                raise self._error
            done = self._done
            self._done = []
        return done

    def stop(self, *, timeout_s: float) -> None:
        """Sync the submitted batches and end the thread, within `timeout_s`."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self.join(timeout=timeout_s)

    def run(self) -> None:
        """Sync until stopped."""
        while batches := self._next():
            try:
                self._sync()
            except OSError as error:
                with self._changed:
                    self._error = error
                self._on_done()
                return
            with self._changed:
                self._done += batches
            self._on_done()

    def _next(self) -> list[PendingCommit]:
        """Wait for batches; return none if the thread is stopping and all are done."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_stopping)
            batches = self._waiting
            self._waiting = []
            return batches


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerStatus:
    """State of the main thread for the heartbeats."""

    waiting_for: str = ""  # Role or resource that the main thread waits for; "" while it computes.
    tokens_per_s: float = 0.0  # Tokens per second trained in the last step.
    rss_bytes: int = 0
    cpu_s: float = 0.0  # CPU seconds so far.
    changed_at: float = field(default_factory=time.monotonic)  # Time of the last progress.


class Intake(threading.Thread):
    """The thread between the actors' trajectories and the buffer.

    Consumes: trajectories from the actors, answers from the scheduler.
    Waits for: nothing longer than `POLL_S`. `JournalSync` writes to disk in parallel; only
        trajectories on disk are acknowledged.
    Unblocked by: `stop`. A failure ends it and every wait on the buffer.

    Order per trajectory: refuse or journal -> fsync -> acknowledge -> group -> report to the
    scheduler.
    """

    def __init__(
        self,
        router: Router,
        journal: JournalWriter,
        admission: Admission,
        buffer: TrajectoryBuffer,
        scheduler: ReportClient,
        *,
        heartbeat_s: float,
        on_round: Callable[[], None] = lambda: None,
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start without connections.

        Args:
            on_round: called several times a second, also during a wait for disk space.
            has_room: returns whether training episodes are accepted. Otherwise they wait without an
                acknowledgement, and the windows of the actors fill.
        """
        super().__init__(name="intake", daemon=True)
        self._router = router
        self.port = router.port
        self._journal = journal
        self._admission = admission
        self._buffer = buffer
        self._scheduler = scheduler
        self._heartbeat_s = heartbeat_s
        self._commit = JournalSync(journal.sync, on_done=router.wake)
        self._stop_requested = threading.Event()
        self._last_beat = 0.0
        self._on_round = on_round
        self._has_room = has_room
        self._held: dict[tuple[bytes, str], Received] = {}  # (sender, episode) -> not accepted yet
        self._room = RoomWait(journal.folder)
        self.status = LearnerStatus()  # For the heartbeats; any thread may replace it.

    @property
    def has_no_room(self) -> bool:
        """True if no trajectory is accepted because the disk is full."""
        return bool(self._room.text)

    @property
    def live_config(self) -> LiveConfig | None:
        """The values of the live keys from the scheduler; None: the run has not changed any."""
        return self._scheduler.live_config

    def stop(self) -> None:
        """Flush the reports to the scheduler, end the thread, close its sockets."""
        self._stop_requested.set()
        self.join(timeout=STOP_S)

    def run(self) -> None:
        """Serve until stopped; a failure is stored and raised in the main thread."""
        try:
            self._scheduler.connect(timeout_s=CONNECT_S)
            self._commit.start()
            while not self._stop_requested.is_set():
                self._serve_once()
            self._commit.stop(timeout_s=STOP_S)
            self._finish()
            self._scheduler.leave()
        except Exception as error:
            logger.exception("intake failed")
            self._buffer.fail(error)
        finally:
            self._router.close()
            self._scheduler.close()

    def _serve_once(self) -> None:
        """Process the received messages, finish synced batches, and send a due heartbeat."""
        self._on_round()
        received = self._without_held(self._router.receive_all(timeout_s=POLL_S, limit=MAX_BATCH))
        started = time.monotonic()
        if received:
            self._process(received)
        self._finish()
        self._send_heartbeat_if_due()
        if 0 < len(received) < MIN_BATCH:
            time.sleep(max(0.0, started + GATHER_S - time.monotonic()))

    def _without_held(self, received: list[Received]) -> list[Received]:
        """Return the messages to process now; hold training episodes while there is no room.

        An actor sends an episode again until it is acknowledged; one copy of it is held.
        """
        if self._has_room():
            waiting = list(self._held.values())
            accepted = [*waiting[:MAX_BATCH], *received]
            rest = waiting[MAX_BATCH:]
        else:
            rest = [*self._held.values(), *filter(_is_training, received)]
            accepted = [item for item in received if not _is_training(item)]
        self._held = {(item.sender, item.message.episode_id): item for item in rest}
        return accepted

    def _send_heartbeat_if_due(self) -> None:
        """Exchange messages with the scheduler, and send a heartbeat if one is due."""
        self._scheduler.pump()
        now = time.monotonic()
        if now - self._last_beat > self._heartbeat_s:
            self._last_beat = now
            self._scheduler.beat(self._heartbeat())

    def _process(self, received: list[Received]) -> None:
        """Journal new valid trajectories; `_finish` acknowledges all of them after the sync."""
        answers: list[tuple[bytes, Ack]] = []
        records: list[tuple[Trajectory, list[bytes]]] = []
        for item in received:
            trajectory = item.message
            if not isinstance(trajectory, Trajectory):
                name = type(trajectory).__name__
                self._router.send(
                    item.sender,
                    Rejected(reason=f"the learner accepts trajectories here, not {name}"),
                )
                continue
            if trajectory.end_reason is EndReason.UNFINISHED:
                self._take_part(trajectory, item.sender)
                continue
            verdict = self._decide(trajectory, item.sender)
            if not (verdict.is_duplicate or verdict.refusal):
                records.append((trajectory, item.frames))
            reason = verdict.refusal
            ack = Ack(episode_id=trajectory.episode_id, is_accepted=not reason, reason=reason)
            answers.append((item.sender, ack))
        if not answers:
            return
        positions = self._append(records)
        accepted = [(record[0], at) for record, at in zip(records, positions, strict=True)]
        batch = PendingCommit(answers=answers, accepted=accepted, end=self._journal.position)
        self._commit.submit(batch)

    def _finish(self) -> None:
        """Acknowledge the trajectories that are now on disk, and pass them to the buffer."""
        done = self._commit.take_done()
        for sender, answer in _joined([answered for batch in done for answered in batch.answers]):
            self._router.send(sender, answer)
        if done:
            accepted = [each for batch in done for each in batch.accepted]
            self._buffer.add(accepted, end=done[-1].end)

    def _decide(self, trajectory: Trajectory, sender: bytes) -> AdmissionDecision:
        """Decide on a trajectory; count a rejected one, register one that will be journalled."""
        verdict = self._admission.check(trajectory, learner_version=self._buffer.version + 1)
        if verdict.is_duplicate:
            self._buffer.add_duplicate()
        elif verdict.is_forged:  # The named episode continues; only the sender is counted.
            self._router.note_refused(sender, verdict.refusal)
        elif verdict.refusal:
            self._buffer.add_refused(trajectory, verdict.refusal)
        else:
            self._admission.admit(trajectory)
        return verdict

    def _take_part(self, trajectory: Trajectory, sender: bytes) -> None:
        """Pass the turns so far of a running episode to the buffer. They are not acknowledged.

        A lost part costs nothing but the time until the next one: the episode itself has its turns.
        """
        version = self._buffer.version + 1
        reason = self._admission.refusal_of_part(trajectory, learner_version=version)
        if reason:
            logger.error("refused part of episode=%s reason=%s", trajectory.episode_id, reason)
            self._router.note_refused(sender, reason)
        else:
            self._buffer.add_part(trajectory)

    def _append(self, records: list[tuple[Trajectory, list[bytes]]]) -> list[JournalPosition]:
        """Append to the journal; while the disk is full, wait and keep sending heartbeats.

        Raises: DiskFull: the intake was stopped first; the actors still hold the episodes.
        """
        positions: list[JournalPosition] = []
        while len(positions) < len(records):
            try:
                positions += self._journal.append_some(records[len(positions) :])
            except OSError as error:
                self._room.note_failure(error)
            else:
                self._room.over()
                continue
            if self._stop_requested.is_set():
                raise DiskFull(f"stopped while the disk is full: {self._room.text}")
            self._on_round()
            self._finish()
            self._send_heartbeat_if_due()
            time.sleep(min(ROOM_POLL_S, self._heartbeat_s))
        return positions

    def refused(self) -> dict[str, float]:
        """Return metrics of the messages that all listeners of the run refused. For any thread."""
        counts = self._refused_here() | self._scheduler.refused_elsewhere
        return {f"refused/{who}": float(num) for who, num in counts.items()}

    def _refused_here(self) -> dict[str, int]:
        """Return the refused messages of this listener and of the other listeners."""
        return self._router.num_refused("trajectories") | self._scheduler.others_refused()

    def _heartbeat(self) -> Heartbeat:
        """Return the heartbeat with the current state of the learner."""
        status = self.status
        return Heartbeat(
            refused=self._refused_here(),
            role="learner",
            name=self._scheduler.hello.name,
            version=self._buffer.version,
            running=self._buffer.open_groups,
            waiting_for=self._room.text or status.waiting_for,
            tokens_per_s=status.tokens_per_s,
            rss_bytes=status.rss_bytes,
            cpu_s=status.cpu_s,
            unchanged_s=max(0.0, time.monotonic() - status.changed_at),
        )


def _is_training(item: Received) -> bool:
    message = item.message
    return isinstance(message, Trajectory) and message.kind is EpisodeKind.TRAIN


def _joined(answers: Sequence[tuple[bytes, Ack]]) -> Iterator[tuple[bytes, Ack]]:
    """Yield the answers, with one combined answer per sender for its accepted trajectories.

    Sending is the most expensive part of an answer.
    """
    accepted: dict[bytes, list[str]] = {}
    for sender, ack in answers:
        if ack.is_accepted:
            accepted.setdefault(sender, []).append(ack.episode_id)
        else:
            yield sender, ack
    for sender, (first, *others) in accepted.items():
        yield sender, Ack(episode_id=first, is_accepted=True, reason="", others=others)

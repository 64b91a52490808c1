"""The messages of episodes and their control, and the words that the whole product uses.

episode     one run of an environment, from reset to its end
turn        one action of the model and the observation that answers it
trajectory  an episode as tokens, with what is known of each, in segments (`common.segments`)
group       the episodes of one prompt (same item, same stamp)
step        one optimizer step; version v is the policy after step v, v0 is the start
lag         learner version minus the version that sampled a token
"""

from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np

from common.config.curriculum import HorizonUnit
from common.wire.access.bounds import Count, Id, Names, Rate, Seconds, Version

SCHEMA_VERSION = 3
_none = partial(np.zeros, 0, dtype=np.int32)


class EndReason(StrEnum):
    """Why an episode ended. The first four say something about the policy, the rest do not.

    DONE: the environment ended it. The next three cut it short, and the task would have gone on:
    HORIZON: the run's own limit. TRUNCATED: a limit of the environment. CONTEXT_FULL: no room left.
    """

    DONE = "done"
    HORIZON = "horizon"
    TRUNCATED = "truncated"
    CONTEXT_FULL = "context_full"
    ENV_ERROR = "env_error"
    ENV_TIMEOUT = "env_timeout"
    DEADLINE = "deadline"
    ABORTED = "aborted"
    TOO_LARGE = "too_large"

    @property
    def is_infrastructure_failure(self) -> bool:
        """True if the episode says nothing about the policy and must never reach the loss."""
        return self not in (
            EndReason.DONE,
            EndReason.HORIZON,
            EndReason.TRUNCATED,
            EndReason.CONTEXT_FULL,
        )


class EpisodeKind(StrEnum):
    """What an episode is for."""

    TRAIN = "train"
    EVAL = "eval"


class PolicyKind(StrEnum):
    """Who acts: the model, or one of the scripted baselines."""

    MODEL = "model"
    RANDOM_VALID = "random_valid"
    EXPERT = "expert"


class Outcome(StrEnum):
    """Where an issued episode ended up. Each episode gets exactly one."""

    TRAINED = "trained"
    FILTERED = "filtered"
    STALE = "stale"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeIdentity:
    """Which episode it is, and its stamp, which all members of a group share."""

    episode_id: Id  # unique in a run: "<group_id>/<member>"
    group_id: Id
    member: Count  # 0-based within the group
    attempt: Count  # 0 for the first issue; +1 each time it is issued again
    kind: EpisodeKind
    policy: PolicyKind
    env: Id
    item_id: Id
    seed: int  # sampling seed of this member
    horizon: Count  # of this episode, in its unit
    horizon_stage: Count  # 0-based stage of the curriculum at opening
    opened_at_version: Version
    horizon_unit: HorizonUnit = HorizonUnit.TURNS
    distance: Count = 0  # most turns that the expert needs for items of its stage; 0: not known
    distance_stage: Count = 0  # as horizon_stage
    max_turns: Count = 0  # most turns beside a horizon in another unit; 0: the horizon says it
    lease_mac: Id = ""  # the scheduler's, over all above and the actor: it was leased to that one

    def identity(self) -> dict[str, Any]:
        """Return these fields by name, for what else is said of the episode."""
        return {f.name: getattr(self, f.name) for f in fields(EpisodeIdentity)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease(EpisodeIdentity):
    """Permission, and duty, to play one episode."""

    deadline_s: Seconds  # seconds from receipt until the episode must have ended


# --- control plane: actor <-> scheduler, learner <-> scheduler -------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of a role, and again after every reconnect."""

    role: Id  # "actor" | "learner"
    name: Id  # unique per process: "<role>-<index>" or chosen by the user
    incarnation: Id  # random per process start
    version: Version  # weights that the role holds
    # Where others reach a learner: "learner", "weights"; a host "*" is the scheduler's own machine.
    addresses: dict[str, str] = field(default_factory=dict[str, str])
    directory: Version = -1  # as in Heartbeat
    node: Id = ""  # its machine, as `common.wire.addresses.node_name` says


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """Actor or learner -> scheduler: it leaves. Its leases are issued again at once."""

    role: Id  # "actor" | "learner"
    name: Id
    incarnation: Id  # as in its Hello; an earlier process of that name cannot sign off this one


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The scheduler knows the role."""

    run_epoch: Id  # random per scheduler start: another one means say hello again


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """Pull: an actor asks for work when it has free slots."""

    actor: Id
    num_free_slots: Count
    version: Version  # weights that the actor's engine holds
    absent: Names = field(default_factory=list[str])  # environments that no hub serves it now


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGrant:
    """Answer to LeaseRequest; an empty grant says when to ask again and who is waited for."""

    leases: list[Lease]
    retry_after_s: Seconds  # seconds until the next request
    reason: str  # why fewer than asked; "" if all were granted


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Proof of life with what the role does. Renews the leases it lists."""

    role: Id
    name: Id
    version: Version
    running: list[str]  # actor: episode ids in work or unacknowledged; learner: incomplete groups
    num_slots: Count = 0  # actor: episodes at once that its engine keeps up with
    tokens_per_s: Rate = 0.0  # sampled by an actor, trained by a learner
    waiting_for: str = ""  # "" when busy
    rss_bytes: Count = 0
    directory: Version = -1  # number of the Directory that the sender knows; -1: it wants none
    unchanged_s: Seconds = 0.0  # since an actor's last turn, a learner's main thread's progress
    num_reports: Count = 0  # learner: its numbered messages that went before, on this connection
    refused: dict[str, int] = field(default_factory=dict[str, int])  # by a learner's listeners
    cpu_s: Seconds = 0.0  # of processors, that it and what it started have used


@dataclass(frozen=True, slots=True, kw_only=True)
class LagBound:
    """How old episodes of one kind may be when they are consumed."""

    env: Id
    horizon: Count  # of the episode, in the run's unit
    max_lag_steps: Count  # of its oldest token


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The scheduler's answer to a heartbeat, and to a report that changes what is a batch."""

    run_epoch: Id  # as in Welcome
    revoked: list[str]  # episode ids that an actor should abandon, a learner not wait for
    is_finished: bool  # the run is over: drain and leave
    lag_bounds: list[LagBound] = field(default_factory=list[LagBound])  # to a learner: wider ones
    num_slots: Count = 0  # to a learner: episodes at once of all living actors
    num_heard: Count = 0  # to a learner: its numbered messages since hello that came without a gap
    num_reports: Count = 0  # of the heartbeat that this answers: more than were heard were lost
    num_saved: Count = 0  # of them, those that survive the scheduler's machine: to be forgotten
    closed_below: Count = 0  # training groups with smaller numbers are settled for good, and saved
    learner_version: Version = -1  # to a learner: its own as the scheduler knows it; -1: unknown
    num_batch_groups: Count = 0  # ready groups that make the batch of the step after that version,
    # fewer than `groups.per_step` if it must be short; 0: in sync mode, the round is not over
    silent: list[str] = field(default_factory=list[str])  # to a learner: gone incarnations
    refused: dict[str, int] = field(default_factory=dict[str, int])  # to a learner: as in its
    # Heartbeat, by the scheduler and the hubs


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupArrived:
    """Learner -> scheduler: all members of the group are in the journal."""

    group_id: Id
    is_ready: bool  # False when it carries no signal or was damaged; outcomes say which


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOutcome:
    """What became of one issued episode, and the numbers the scheduler steers by."""

    episode_id: Id
    outcome: Outcome
    cause: str  # "" or a short reason: "zero_variance", "lag", "env_error", ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSeen:
    """Learner -> scheduler: an episode is in the journal and acknowledged."""

    episode_id: Id
    reward: float  # [0, 1]
    is_success: bool
    end_reason: EndReason
    num_turns: Count
    wall_s: Seconds  # seconds that it took


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Learner -> scheduler, in one message so that the ledger balances after each."""

    seen: list[EpisodeSeen] = field(default_factory=list[EpisodeSeen])
    outcomes: list[EpisodeOutcome] = field(default_factory=list[EpisodeOutcome])
    groups: list[GroupArrived] = field(default_factory=list[GroupArrived])
    num_duplicates: Count = 0  # trajectories discarded as duplicates since the last report
    number: Count = 0  # 1 for the first message after hello; 0: not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """Learner -> scheduler: step `version` is trained and published."""

    version: Version
    is_last: bool
    max_ahead_steps: Count  # how far ahead groups may be opened from now on; the config's at most
    signals: dict[str, float]  # of the step, absent: not known. "entropy" in nats, "ess_frac",
    # "busy_s" from a batch to its published weights, "wait_s" before that for the batch
    number: Count = 0  # as in Outcomes


# --- trajectory plane: actor -> learner ------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory(EpisodeIdentity):
    """One finished episode as tokens. Arrays share one length; -1 marks "not sampled"."""

    actor: Id
    end_reason: EndReason
    error: str  # "" unless end_reason is an infrastructure failure
    reward: float  # [0, 1], of the last step
    is_success: bool  # the environment says that the task was solved
    num_turns: Count
    num_invalid_actions: Count
    num_prompt_tokens: Count = 0  # given to the engine, summed over turns; 0: it does not say
    num_cached_tokens: Count = 0  # of them, those found in its prefix cache
    num_cut_observations: Count = 0  # that were too long for the context
    num_repaired_texts: Count = 0  # observations with halves of characters, now U+FFFD
    generate_s: Seconds  # seconds spent waiting for the engine
    env_s: Seconds  # seconds spent waiting for the environment
    wall_s: Seconds
    token_ids: np.ndarray = field(repr=False)  # [seq] int32
    loss_mask: np.ndarray = field(repr=False)  # [seq] bool, True on sampled tokens
    logprobs: np.ndarray = field(repr=False)  # [seq] float32 nats, 0 where not sampled
    versions: np.ndarray = field(repr=False)  # [seq] int32, -1 where not sampled
    turn_ids: np.ndarray = field(repr=False)  # [seq] int32 0-based turn of a token, prompt = 0
    invalid_turns: np.ndarray = field(repr=False)  # [num_turns] bool, True: no executable action
    turn_scores: np.ndarray = field(repr=False)  # [num_turns] float32 in [0, 1], after each turn
    start_score: float = 0.0  # [0, 1], before the first turn: a raw score of 0 in that range
    turn_states: np.ndarray = field(default_factory=_none, repr=False)  # see common.states; or [0]
    turn_actions: np.ndarray = field(default_factory=_none, repr=False)  # as sent to it; or [0]
    segment_starts: np.ndarray = field(default_factory=_none, repr=False)  # [segment] int32; [0]: 1
    asides: np.ndarray = field(default_factory=_none, repr=False)  # [3 * num] int32, see segments
    # [chars] int32 text of a scripted policy's actions, see common.formats.scripted; or [0]
    action_chars: np.ndarray = field(default_factory=_none, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """Learner -> actor: the trajectory is in the journal (or is a duplicate of one that is)."""

    episode_id: Id
    is_accepted: bool
    reason: str  # why it was refused; "" when accepted
    others: list[str] = field(default_factory=list[str])  # of this actor, accepted at once with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Answer to a message that was not understood."""

    reason: str

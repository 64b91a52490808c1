"""Messages of the control plane and the trajectory plane, and the vocabulary of the product.

episode     one run of an environment, from reset to its end
turn        one action of the model and the observation that answers it
trajectory  an episode as tokens with mask, logprobs and versions, in segments (`common.segments`)
group       the episodes of one prompt (same item, same stamp)
step        one optimizer step; version v is the policy after step v, v0 is the start
lag         learner version minus the version that sampled a token
"""

from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np

from common.config.horizon import HorizonUnit
from common.wire.access.bounds import (
    Content,
    Count,
    Entries,
    Id,
    Integer,
    LongText,
    Named,
    Names,
    Number,
    Rate,
    Seconds,
    Text,
    Texts,
    Version,
)

SCHEMA_VERSION = 4  # `schema.json` lists the fields of each version.
_none = partial(np.zeros, 0, dtype=np.int32)
_none_chosen = partial(np.zeros, 0, dtype=np.uint8)
_none_masked = partial(np.zeros, 0, dtype=np.bool_)


class EndReason(StrEnum):
    """Why an episode ended. The first five reasons give valid samples, the rest are failures.

    DONE: the environment ended the episode. The next three reasons truncate an unfinished task.
    HORIZON: the limit of the run. TRUNCATED: a limit of the environment, before the score was
    decided. CONTEXT_FULL: the context of the policy is full. UNFINISHED: the trajectory is a part
    of an episode that has not ended.
    """

    DONE = "done"
    HORIZON = "horizon"
    TRUNCATED = "truncated"
    CONTEXT_FULL = "context_full"
    UNFINISHED = "unfinished"
    ENV_ERROR = "env_error"
    ENV_TIMEOUT = "env_timeout"
    DEADLINE = "deadline"
    ABORTED = "aborted"
    TOO_LARGE = "too_large"

    @property
    def is_infrastructure_failure(self) -> bool:
        """True if the infrastructure ended the episode. It must never reach the loss."""
        return self not in (
            EndReason.DONE,
            EndReason.HORIZON,
            EndReason.TRUNCATED,
            EndReason.CONTEXT_FULL,
            EndReason.UNFINISHED,
        )


class EpisodeKind(StrEnum):
    """The purpose of an episode: training or evaluation."""

    TRAIN = "train"
    EVAL = "eval"


class PolicyKind(StrEnum):
    """The policy that acts: the model, or one of the scripted baselines."""

    MODEL = "model"
    RANDOM_VALID = "random_valid"
    EXPERT = "expert"


USER_FILTER = "groups_filter"  # Cause of an outcome that the user's filter of groups decided.


class Outcome(StrEnum):
    """The final state of an issued episode. Each episode gets exactly one."""

    TRAINED = "trained"
    FILTERED = "filtered"
    STALE = "stale"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeIdentity:
    """The ids of an episode, and the stamp that all members of its group share."""

    episode_id: Id  # Unique in a run: "<group_id>/<member>".
    group_id: Id
    member: Count  # 0-based index within the group.
    attempt: Count  # 0 for the first issue; each reissue adds 1.
    kind: EpisodeKind
    policy: PolicyKind
    env: Id
    item_id: Id
    seed: Integer  # Sampling seed of this member.
    horizon: Count  # Horizon of this episode, in `horizon_unit`.
    horizon_stage: Count  # 0-based stage of the horizon curriculum when the group was opened.
    opened_at_version: Version
    horizon_unit: HorizonUnit = HorizonUnit.TURNS
    distance: Count = 0  # Most expert turns for an item of the current stage; 0: unknown.
    distance_stage: Count = 0  # 0-based stage of the distance curriculum at opening.
    max_turns: Count = 0  # Turn limit if the horizon has another unit; 0: the horizon in turns.
    lease_mac: Id = ""  # The scheduler's MAC over all fields above and the actor's name.

    def identity(self) -> dict[str, Any]:
        """Return these fields by name, as arguments for a message that extends this class."""
        return {f.name: getattr(self, f.name) for f in fields(EpisodeIdentity)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease(EpisodeIdentity):
    """The right and the duty of an actor to play one episode."""

    deadline_s: Seconds  # Seconds from receipt until the episode must have ended.


# --- control plane: actor <-> scheduler, learner <-> scheduler -------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of a role on every new connection to the scheduler."""

    role: Id  # "actor" | "learner"
    name: Id  # Unique per process: "<role>-<index>", or chosen by the user.
    incarnation: Id  # Random per process start.
    version: Version  # Version of the weights that the role has loaded.
    # Listening addresses of a learner, by "learner" and "weights". The host "*" stands for the
    # machine of the scheduler.
    addresses: Named[str] = field(default_factory=dict[str, str])
    directory: Version = -1  # Same as in Heartbeat.
    node: Id = ""  # Name of the machine from `common.wire.addresses.node_name`.
    config: Version = -1  # Same as in Heartbeat.
    commit: Id = ""  # Name of the role's code from `common.repository.code_name`.


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """Actor or learner -> scheduler: the role shuts down. Its leases are reissued at once."""

    role: Id  # "actor" | "learner"
    name: Id
    incarnation: Id  # Same as in Hello. The scheduler ignores an earlier process of this name.


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Scheduler -> actor or learner: the role is registered. Answer to Hello."""

    run_epoch: Id  # Random per scheduler start. After a change the role sends Hello again.


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """Actor -> scheduler: an actor with free slots requests leases."""

    actor: Id
    num_free_slots: Count
    version: Version  # Version that the actor's engine has loaded.
    absent: Names = field(default_factory=list[str])  # Environments that no reachable hub serves.


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGrant:
    """Answer to LeaseRequest. An empty grant has a reason and a delay for the next request."""

    leases: Entries[Lease]
    retry_after_s: Seconds  # Seconds until the next request.
    reason: Text  # Why the grant has fewer leases than requested; "" if it has all of them.


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Sign of life of a role, with its state. The scheduler renews the leases that it lists."""

    role: Id
    name: Id
    version: Version
    # Actor: ids of its running and unacknowledged episodes. Learner: ids of incomplete groups.
    running: Texts
    num_slots: Count = 0  # Actor: number of concurrent episodes that its engine can serve.
    tokens_per_s: Rate = 0.0  # Tokens that an actor samples or a learner trains on, per second.
    waiting_for: Text = ""  # "" when busy
    rss_bytes: Count = 0
    directory: Version = -1  # Number of the sender's current Directory; -1: it needs none.
    # Seconds since an actor's last turn, or since the last progress of a learner's main thread.
    unchanged_s: Seconds = 0.0
    num_reports: Count = 0  # Learner: numbered messages sent before this one on this connection.
    # Messages and connections that the listeners of a learner refused.
    refused: Named[int] = field(default_factory=dict[str, int])
    cpu_s: Seconds = 0.0  # CPU time of the role and all its child processes.
    config: Version = -1  # Number of the sender's current LiveConfig; -1: it needs none.


@dataclass(frozen=True, slots=True, kw_only=True)
class LagBound:
    """Maximum lag of episodes with one environment and horizon when the learner consumes them."""

    env: Id
    horizon: Count  # Horizon of the episode, in the run's unit.
    max_lag_steps: Count  # Maximum lag of the episode's oldest token.


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Answer of the scheduler to a heartbeat, and to a report that changes the size of a batch.

    The fields after `is_finished` are for a learner only.
    """

    run_epoch: Id  # Same as in Welcome.
    revoked: Texts  # Ids of episodes that an actor aborts and a learner no longer expects.
    is_finished: bool  # The run is over: the role drains and exits.
    # Bounds that are wider than the configured one.
    lag_bounds: Entries[LagBound] = field(default_factory=list[LagBound])
    num_slots: Count = 0  # Number of concurrent episodes of all live actors.
    num_heard: Count = 0  # Numbered messages received since Hello without a gap.
    num_reports: Count = 0  # Copied from the heartbeat. If above `num_heard`, messages were lost.
    num_saved: Count = 0  # Number of received messages on disk. The learner may drop its copies.
    closed_below: Count = 0  # Training groups with smaller numbers are final and saved to disk.
    learner_version: Version = -1  # The learner's version in the scheduler's state; -1: unknown.
    # Number of ready groups in the batch of the step after `learner_version`. It is below
    # `groups.per_step` if the batch must be short. 0: in sync mode, the round is not complete.
    num_batch_groups: Count = 0
    silent: Texts = field(default_factory=list[str])  # Incarnations of lost actors.
    # Messages and connections that the scheduler and the hubs refused.
    refused: Named[int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupArrived:
    """Learner -> scheduler: all members of the group are in the journal."""

    group_id: Id
    is_ready: bool  # False if the group has no signal or was damaged; `Outcomes` has the cause.


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOutcome:
    """The final state of one issued episode, with its cause."""

    episode_id: Id
    outcome: Outcome
    cause: Text  # "" or a short reason: "zero_variance", "lag", "env_error", ...
    error: Text = ""  # Why the learner refused the episode.
    num_stale_tokens: Count = 0  # Sampled tokens of a trained episode that were stale.


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSeen:
    """Learner -> scheduler: an episode is in the journal and acknowledged, with its result."""

    episode_id: Id
    reward: Number  # [0, 1]
    is_success: bool
    end_reason: EndReason
    num_turns: Count
    wall_s: Seconds  # Duration of the episode.
    error: Text = ""  # Reason of an infrastructure failure.
    num_sampled_tokens: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Learner -> scheduler: reports in one message, so that the ledger balances after each."""

    seen: Entries[EpisodeSeen] = field(default_factory=list[EpisodeSeen])
    outcomes: Entries[EpisodeOutcome] = field(default_factory=list[EpisodeOutcome])
    groups: Entries[GroupArrived] = field(default_factory=list[GroupArrived])
    num_duplicates: Count = 0  # Trajectories discarded as duplicates since the last report.
    number: Count = 0  # Number of the message since Hello, from 1; 0: the message is not numbered.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """Learner -> scheduler: step `version` is trained and published."""

    version: Version
    is_last: bool
    max_ahead_steps: Count  # New limit for opening groups ahead; at most the configured one.
    # Measurements of the step: "entropy" in nats, "ess_frac", "busy_s" (the time from receiving
    # the batch to publishing the weights), "wait_s" (the wait for the batch). Keys may be absent.
    signals: Named[float]
    number: Count = 0  # Same as in Outcomes.


# --- trajectory plane: actor -> learner ------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory(EpisodeIdentity):
    """One finished episode as tokens. The [seq] arrays have equal length."""

    actor: Id
    end_reason: EndReason
    # Reason of an infrastructure failure, or why the context was full before the first turn.
    error: Text
    reward: Number  # [0, 1], reward of the last step.
    is_success: bool  # The environment reported the task as solved.
    num_turns: Count
    num_invalid_actions: Count
    num_prompt_tokens: Count = 0  # Prompt tokens of the engine, summed over turns; 0: unknown.
    num_cached_tokens: Count = 0  # Prompt tokens found in the engine's prefix cache.
    num_cut_observations: Count = 0  # Observations that were cut to fit into the context.
    num_repaired_texts: Count = 0  # Observations whose unpaired surrogates became U+FFFD.
    generate_s: Seconds  # Seconds spent waiting for the engine.
    env_s: Seconds  # Seconds spent waiting for the environment.
    wall_s: Seconds
    token_ids: np.ndarray = field(repr=False)  # [seq] int32
    loss_mask: np.ndarray = field(repr=False)  # [seq] bool, True on sampled tokens
    logprobs: np.ndarray = field(repr=False)  # [seq] float32 nats, 0 where not sampled
    versions: np.ndarray = field(repr=False)  # [seq] int32, -1 where not sampled
    turn_ids: np.ndarray = field(repr=False)  # [seq] int32 0-based turn of a token, prompt = 0
    invalid_turns: np.ndarray = field(repr=False)  # [num_turns] bool, True: no executable action
    turn_scores: np.ndarray = field(repr=False)  # [num_turns] float32 in [0, 1], after each turn
    start_score: Number = 0.0  # Score before the first turn: a raw score of 0 scaled to [0, 1].
    # [num_turns] int32 hashes of each turn's state and action; [0] if unknown.
    turn_states: np.ndarray = field(default_factory=_none, repr=False)
    turn_actions: np.ndarray = field(default_factory=_none, repr=False)
    # [segment] int32 first token of each segment; [0] if the episode is one segment.
    segment_starts: np.ndarray = field(default_factory=_none, repr=False)
    # [2 * segment] int32: an earlier segment, and how many of its first tokens come before the
    # segment's own in its row; [0] if no segment has such a prefix (`common.segments`).
    segment_prefixes: np.ndarray = field(default_factory=_none, repr=False)
    # [3 * num] int32 answers that the environment did not receive, see `common.segments.asides_of`.
    asides: np.ndarray = field(default_factory=_none, repr=False)
    # Named numbers of the episode that the environment reported, such as parts of the reward.
    metrics: Named[float] = field(default_factory=dict[str, float])
    facts: LongText = ""  # JSON object of the environment for rewards over a group; "" without it.
    # [chars] int32 text of a scripted policy's actions, see `common.formats.scripted`; or [0].
    action_chars: np.ndarray = field(default_factory=_none, repr=False)
    # Turns that a fork took over from the episode of another member, its trunk; 0: it is no fork.
    # Their tokens are context here. A part of an episode is a fork of its own earlier turns.
    num_shared_turns: Count = 0
    trunk: Count = 0  # Member number of the trunk.
    shared_digest: Integer = 0  # Digest of the shared sampled tokens, see `common.segments`.
    # [seq, layer, chosen] uint8 or int16 experts that the engine chose for each token; [0] if it
    # records none. Layers without experts hold zeros.
    expert_ids: np.ndarray = field(default_factory=_none_chosen, repr=False)
    # [seq] bool, True on tokens whose experts are recorded; or [0].
    expert_mask: np.ndarray = field(default_factory=_none_masked, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """Learner -> actor: the trajectory, or an equal one, is in the journal."""

    episode_id: Id
    is_accepted: bool
    reason: Text  # Why the trajectory was refused; "" when accepted.
    # Ids of further episodes of this actor that were accepted together with this one.
    others: Texts = field(default_factory=list[str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Answer to a message that is invalid or not permitted."""

    reason: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRequest:
    """Command of the owner -> scheduler: change live keys."""

    request: Id  # Random per request; a repeated request has the same one.
    # Keys with their present and their new values, as in an override "key=value".
    old: Named[str] = field(default_factory=dict[str, str])
    new: Named[str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChanged:
    """Answer to ConfigRequest, first when it is accepted and again when it is in force."""

    number: Version  # Number of the change in the run; -1: it is accepted, and not in force yet.
    step: Version  # Last step before the change; with `number` -1 the last step so far.


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveConfig:
    """Scheduler -> learner or actor: the values of the live keys. Sent after every change."""

    number: Count  # Number of the last change. A heartbeat carries the sender's current number.
    values: Named[str]  # Keys with their values, as in an override "key=value".


NAME_IN_USE = "another process of the run uses this name"  # A temporary refusal: the node retries.


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """First message of a joining node: a request for a place in the run and its configuration."""

    role: Id  # "actor" | "envhub" | "learner"
    product: Id  # Version of the node's code.
    is_remote: bool = False  # The node is on another machine than the scheduler.
    has_model: bool = False  # The node has a copy of the model and needs no files.
    name: Id = ""  # Unique name under which the node will send its messages.
    public_key: Id = ""  # Public key that the node has created for this name, Z85.
    commit: Id = ""  # Name of the node's code from `common.repository.code_name`.


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFile:
    """A file that a joining node may request."""

    name: Id  # File name without a folder.
    num_bytes: Count
    sha256: Id  # hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolment:
    """Answer to JoinRequest."""

    run_name: Id
    config: LongText  # YAML of the configuration sections that the role needs.
    files: Entries[SharedFile] = field(default_factory=list[SharedFile])
    # Keys with their default. A node ignores those that its code does not have.
    defaults: Names = field(default_factory=list[str])


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRequest:
    """Node -> scheduler: request for one part of a file of the enrolment."""

    name: Id
    offset_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """Answer to FileRequest. The last part ends at the end of the file."""

    name: Id
    offset_bytes: Count
    content: Content = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPlace:
    """Address of an environment hub, and its environments."""

    url: Text
    token: Text = field(repr=False)  # "": the hub requires none.
    envs: Names


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """Scheduler -> actor: addresses of the learner and the hubs. Sent after every change."""

    number: Version  # Number of this content. A heartbeat carries the sender's current number.
    learner: Text  # Address for trajectories; "": no learner is registered.
    weights: Text  # Address of the learner's weight plane; "": no learner is registered.
    hubs: Entries[HubPlace]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubUse:
    """Current resource use of a hub."""

    num_sessions: Count = 0
    max_sessions: Count = 0  # Maximum number of concurrent sessions; 0: unknown.
    rss_bytes: Count = 0  # Resident memory of the hub and its child processes.
    cpu_s: Seconds = 0.0  # CPU time of the hub and its child processes since its start.


OWN_HUB = "envhub"  # Name of the hub that the run starts.


@dataclass(frozen=True, slots=True, kw_only=True)
class HubHello:
    """Hub -> scheduler, with every heartbeat: registers the hub and its address."""

    name: Id
    incarnation: Id  # Random per process start.
    place: HubPlace
    # Refused requests and connections since the start of the process, by "address/reason".
    refused: Named[int] = field(default_factory=dict[str, int], compare=False)
    node: Id = ""  # Name of the machine from `common.wire.addresses.node_name`.
    use: HubUse = field(default=HubUse(), compare=False)
    # Environments that wait for a service, such as a judge, with the reasons.
    paused: Named[str] = field(default_factory=dict[str, str], compare=False)
    # Digest of the files and settings that determine the items, by environment.
    content: Named[str] = field(default_factory=dict[str, str], compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubGoodbye:
    """Hub -> scheduler: the hub shuts down and takes no further sessions."""

    name: Id
    incarnation: Id


@dataclass(frozen=True, slots=True, kw_only=True)
class HubNoted:
    """Answer to HubHello. The scheduler sends it once more when the run is over."""

    is_finished: bool  # The run is over, and a hub that joined it exits.


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksPlace:
    """Rank 0 -> scheduler: its address for the other nodes. The scheduler sends it to them."""

    address: Text  # "": no learner has registered yet.
    incarnation: Id  # Random per start of rank 0.
    is_finished: bool = False  # The run is over, and the node exits.


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksRequest:
    """Node -> scheduler: request for the current place of rank 0."""

    name: Id


class NodeState(StrEnum):
    """State of the ranks of a node."""

    WAITING = "waiting"  # The node has no ranks yet.
    LOADING = "loading"
    LOADED = "loaded"
    FAILED = "failed"  # A rank has ended.
    DISCONNECTED = "disconnected"  # The ranks have lost the connection to another node.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBeat:
    """Node -> rank 0: sign of life of a node, with the state of its ranks."""

    name: Id
    incarnation: Id  # The start of rank 0 that the node serves.
    process: Id  # Random per process of the node.
    node: Id  # Name of the machine from `common.wire.addresses.node_name`.
    host: Id  # The node's address on the interface that reaches rank 0.
    state: NodeState
    error: Text = ""  # Why a rank ended.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeat:
    """Answer to RankBeat: the rendezvous of the ranks."""

    incarnation: Id
    store_port: Integer
    store_public: Id  # Public key of the rendezvous store, Z85.
    store_secret: Id = field(repr=False)  # Secret key that admits a member to the store, Z85.
    group_key: Id = field(repr=False)  # Secret name of the process group in the store.
    checkpoint: Text  # Folder of the checkpoint on rank 0's node; "": the run begins.
    probe: Text  # File of the run directory whose content is `incarnation`.


class RankChannel(StrEnum):
    """Receiver of an order on a node."""

    TRAINING = "training"  # The main thread of each rank.
    WEIGHTS = "weights"  # The thread of each rank that serves weights to the publisher.
    STOP = "stop"  # The node: its ranks end.
    FINISH = "finish"  # The node: its ranks and its process end.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """Rank 0 -> node: an operation of all ranks."""

    channel: RankChannel
    content: Content = b""


class FileOp(StrEnum):
    """An operation on the files of rank 0's node."""

    LIST = "list"
    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFile:
    """A rank of another node -> rank 0: an operation on a file of the weights or a checkpoint."""

    number: Count  # Number of the request on its connection.
    op: FileOp
    path: Text
    offset_bytes: Count = 0
    num_bytes: Count = 0
    content: Content = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFileAnswer:
    """Answer to RankFile."""

    number: Count
    content: Content = field(default=b"", repr=False)
    names: Names = field(default_factory=list[str])  # Paths below a folder, for LIST.
    error: Text = ""

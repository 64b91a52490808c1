"""The small talk of the weight plane: learner <-> actor. Tensors go over torch.distributed."""

from dataclasses import dataclass, field
from enum import StrEnum

from common.wire.access.bounds import Count, Id, Names, Seconds, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Where one tensor lies in the flat transfer buffer."""

    name: str
    shape: list[int]
    dtype: str  # torch name without prefix: "bfloat16"
    offset_bytes: Count
    num_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsJoin:
    """Actor -> learner, with every heartbeat: my engine wants weights, and lives."""

    actor: Id
    incarnation: Id
    devices: Names  # one per worker: a GPU's own name; "" for the CPU
    version: Version  # what the engine holds
    host: Id = ""  # the engine's, on its interface towards the learner
    busy_epoch: Count = 0  # of the offer that it is at; 0: it is free
    quiet_s: Seconds = 0.0  # for which its workers have not answered while they receive


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLeave:
    """Actor -> learner: my engine ends; do not wait for it."""

    actor: Id
    incarnation: Id


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsOffer:
    """Learner -> actor: version `version` starts now; take your places among the receivers.

    Its flat bytes come in buckets, and after the last one a table with the digest of each.
    """

    version: Version
    group_epoch: Count  # a new number means: build a new process group
    rank: Count  # of the engine's first worker; the next worker has the next one
    world_size: Count  # workers of all engines, and the learner
    store_host: str
    store_port: int
    store_public: Id  # of the store's key pair, Z85
    store_secret: Id = field(repr=False)  # by which it lets a member in, Z85
    group_key: Id = field(repr=False)  # the group's secret name in the store
    transport: str  # "gloo", "nccl", "ipc" or "file"
    folder: str  # of the transport "file"
    timeout_s: Seconds
    tensors: list[TensorSpec]
    total_bytes: Count
    bucket_bytes: Count
    canary_token_ids: list[list[int]]  # prompts that both sides score after loading


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsCancel:
    """Learner -> actor: the transfer of this group is given up, do not wait for it."""

    group_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPing:
    """Learner -> actor: I wait for you. It cannot be sent over a connection that is gone."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryCheck:
    """Learner -> actor: score these prompts, too, if you hold this version."""

    version: int
    number: int  # of the request
    token_ids: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsReady:
    """Actor -> learner: my workers receive from now on, beside generation."""

    actor: Id
    incarnation: Id
    version: Version
    group_epoch: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded:
    """Actor -> learner: what became of the offer."""

    actor: Id
    incarnation: Id
    version: Version
    group_epoch: Count
    is_ok: bool
    error: str
    stage_s: Seconds  # in which the bytes arrived, beside generation
    pause_s: Seconds  # in which the engine loaded them and generated nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryScores:
    """Actor -> learner: logprobs of the canary tokens under the weights now loaded."""

    actor: Id
    version: Version
    logprobs: list[list[float]]  # [canary, seq-1] nats of token t given tokens < t
    number: int = 0  # of the `CanaryCheck`; 0: they are those of the version's offer


class StoreOp(StrEnum):
    """What is asked of the rendezvous of a process group."""

    SET = "set"
    WAIT = "wait"  # for all keys; answers with their values
    ADD = "add"
    DELETE = "delete"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRequest:
    """Member of a process group -> learner's rendezvous."""

    number: Count  # of the request, on its connection
    group: Id  # its secret name
    op: StoreOp
    keys: Names
    value: bytes = field(default=b"", repr=False)
    amount: int = 0
    wait_s: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAnswer:
    """Answer to StoreRequest."""

    number: Count
    is_there: bool  # whether all keys were
    values: list[bytes] = field(default_factory=list[bytes], repr=False)
    error: str = ""

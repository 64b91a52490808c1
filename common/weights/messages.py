"""Control messages of the weight plane: learner <-> actor. They carry no tensors."""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from common.wire.access.bounds import (
    Content,
    Count,
    Entries,
    Id,
    Integer,
    Names,
    Seconds,
    Text,
    Version,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Position of one tensor in the flat transfer buffer."""

    name: Text
    shape: Entries[int]
    dtype: Text  # The name in torch without its prefix, such as "bfloat16".
    offset_bytes: Count
    num_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsJoin:
    """Actor -> learner, with every heartbeat: the engine is alive and requests weights."""

    actor: Id
    incarnation: Id
    devices: Names  # One name per worker: the unique name of its GPU, or "" for the CPU.
    version: Version  # The version that the engine has loaded.
    host: Id = ""  # The engine's address on the interface that reaches the learner.
    busy_epoch: Count = 0  # Group epoch of the offer that the engine is loading; 0: it is idle.
    quiet_s: Seconds = 0.0  # Seconds without an answer of the workers during a transfer.
    slept: Count = 0  # Number of the latest `EngineSleep` that the engine has obeyed.
    node: Id = ""  # Engines with the same name here share memory; "": the engine shares none.


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLeave:
    """Actor -> learner: the engine shuts down, and the learner removes it from the group."""

    actor: Id
    incarnation: Id


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsOffer:
    """Learner -> actor: the transfer of `version` starts now, and the engine's workers join it.

    The flat bytes arrive in buckets. A table with the digest of each bucket follows the last one.
    If several workers of a node share a copy, only the first of them joins the transfer. With the
    transport "memory" no worker does: they map a copy that is complete before the offer is sent.
    """

    version: Version
    group_epoch: Count  # A new number means that every member builds a new process group.
    # Rank of the engine's first worker; its other workers have the next ranks. If they share a
    # copy, it is the rank of the copy.
    rank: Count
    world_size: Count  # Number of copies that are sent, plus the learner.
    store_host: Text
    store_port: Integer
    store_public: Id  # Public key of the rendezvous store, Z85.
    store_secret: Id = field(repr=False)  # The secret key that admits a member to the store, Z85.
    group_key: Id = field(repr=False)  # The secret name of the group in the store.
    transport: Text  # "gloo", "nccl", "ipc" or "memory"
    folder: Text = ""  # Empty; code of the release before requires the field.
    timeout_s: Seconds
    tensors: Entries[TensorSpec]
    total_bytes: Count
    bucket_bytes: Count
    canary_token_ids: Entries[list[int]]  # Prompts that learner and engine score after loading.
    # The version to which the bytes are a delta, as in `common.weights.delta`; -1: they are the
    # whole version.
    base: Version = -1
    digest: Id = ""  # Digest of the whole version, of which workers keep a copy; "": they need not.
    # Name of the copy that the workers of a node share; "": each worker receives its own copy. With
    # the transport "memory" it is the place of the learner's copy.
    copy_key: Id = ""
    # Index of the engine's first worker among those; number 0 receives, or is the learner.
    copy_index: Count = 0

    @property
    def shares_copy(self) -> bool:
        """True if the engine's workers share a copy."""
        return bool(self.copy_key)

    @property
    def is_in_memory(self) -> bool:
        """True if the version is in the learner's memory, which the workers map."""
        return self.transport == "memory"

    def of_worker(self, index: int) -> "WeightsOffer":
        """Return the offer to a worker of the engine, of which this is the offer."""
        if self.shares_copy:
            return replace(self, copy_index=self.copy_index + index)
        return replace(self, rank=self.rank + index)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsCancel:
    """Learner -> actor: the transfer of this group is cancelled."""

    group_epoch: Integer


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPing:
    """Learner -> actor: the learner waits for this engine. Sending it fails if the link is gone."""

    version: Integer


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSleep:
    """Learner -> actor: give the GPU's memory back; the next version wakes the engine up."""

    number: Count  # Number of the request.


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryCheck:
    """Learner -> actor: score these additional prompts if the engine has this version loaded."""

    version: Integer
    number: Integer  # Number of the request.
    token_ids: Entries[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsReady:
    """Actor -> learner: the engine's workers are ready to receive. Generation continues."""

    actor: Id
    incarnation: Id
    version: Version
    group_epoch: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded:
    """Actor -> learner: the result of the offer."""

    actor: Id
    incarnation: Id
    version: Version
    group_epoch: Count
    is_ok: bool
    error: Text
    stage_s: Seconds  # Duration of the transfer, during which generation continued.
    pause_s: Seconds  # Duration of loading, during which generation was paused.


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryScores:
    """Actor -> learner: logprobs of the canary tokens under the currently loaded weights."""

    actor: Id
    version: Version
    logprobs: Entries[list[float]]  # [canary, seq-1] nats of token t given tokens < t
    number: Integer = 0  # Number of the answered `CanaryCheck`; 0: the prompts of the offer.


class StoreOp(StrEnum):
    """An operation of the rendezvous store of a process group."""

    SET = "set"
    WAIT = "wait"  # Waits until all keys exist, then returns their values.
    ADD = "add"
    DELETE = "delete"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRequest:
    """Member of a process group -> rendezvous store of the learner."""

    number: Count  # Number of the request on its connection.
    group: Id  # The secret name of the group.
    op: StoreOp
    keys: Names
    value: Content = field(default=b"", repr=False)
    amount: Integer = 0
    wait_s: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAnswer:
    """Answer to StoreRequest."""

    number: Count
    is_there: bool  # True if all keys of the request exist.
    values: Entries[bytes] = field(default_factory=list[bytes], repr=False)
    error: Text = ""

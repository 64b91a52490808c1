"""The small talk of the weight plane: learner <-> actor. Tensors go over torch.distributed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Where one tensor lies in the flat transfer buffer."""

    name: str
    shape: list[int]
    dtype: str  # torch name without prefix: "bfloat16"
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsJoin:
    """Actor -> learner, with every heartbeat: my engine wants weights, and lives."""

    actor: str
    incarnation: str
    devices: list[str]  # one per worker: a GPU's own name; "" for the CPU
    version: int  # what the engine holds
    host: str = ""  # the engine's, on its interface towards the learner
    busy_epoch: int = 0  # of the offer that it is at; 0: it is free
    quiet_s: float = 0.0  # for which its workers have not answered while they receive


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLeave:
    """Actor -> learner: my engine ends; do not wait for it."""

    actor: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsOffer:
    """Learner -> actor: version `version` starts now; take your places among the receivers.

    Its flat bytes come in buckets, and after the last one a table with the digest of each.
    """

    version: int
    group_epoch: int  # a new number means: build a new process group
    rank: int  # of the engine's first worker; the next worker has the next one
    world_size: int  # workers of all engines, and the learner
    store_host: str
    store_port: int
    transport: str  # "gloo", "nccl", "ipc" or "file"
    folder: str  # of the transport "file"
    timeout_s: float
    tensors: list[TensorSpec]
    total_bytes: int
    bucket_bytes: int
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

    actor: str
    incarnation: str
    version: int
    group_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded:
    """Actor -> learner: what became of the offer."""

    actor: str
    incarnation: str
    version: int
    group_epoch: int
    is_ok: bool
    error: str
    stage_s: float  # in which the bytes arrived, beside generation
    pause_s: float  # in which the engine loaded them and generated nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryScores:
    """Actor -> learner: logprobs of the canary tokens under the weights now loaded."""

    actor: str
    version: int
    logprobs: list[list[float]]  # [canary, seq-1] nats of token t given tokens < t
    number: int = 0  # of the `CanaryCheck`; 0: they are those of the version's offer

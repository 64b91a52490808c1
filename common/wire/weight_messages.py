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
    """Actor -> learner: my engine wants weights from now on."""

    actor: str
    incarnation: str
    device: str  # a GPU's own name; "" for the CPU
    version: int  # what the engine holds
    host: str = ""  # the engine's, on its interface towards the learner


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLeave:
    """Actor -> learner: my engine ends; do not wait for it."""

    actor: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsOffer:
    """Learner -> actor: version `version` starts now; take your place in the process group."""

    version: int
    group_epoch: int  # a new number means: build a new process group
    rank: int
    world_size: int
    store_host: str
    store_port: int
    backend: str  # "gloo" | "nccl"
    timeout_s: float
    tensors: list[TensorSpec]
    total_bytes: int
    checksum: str  # hex, of the bytes that the learner sends
    canary_token_ids: list[list[int]]  # prompts that both sides score after loading


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsReady:
    """Actor -> learner: generation is paused and my rank is about to enter the broadcast."""

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
    pause_s: float  # in which the engine generated nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryScores:
    """Actor -> learner: logprobs of the canary tokens under the weights now loaded."""

    actor: str
    version: int
    logprobs: list[list[float]]  # [canary, seq-1] nats of token t given tokens < t

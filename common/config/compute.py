"""Options of how the trainer computes: optimizer, arithmetic, memory, adapters, a critic."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from common.config.knobs import WORD, Contradiction, knob


class OptimizerKind(StrEnum):
    """adamw: on everything. muon: Muon on the hidden matrices, AdamW on the rest."""

    ADAMW = "adamw"
    MUON = "muon"


class Moments(StrEnum):
    """In what AdamW keeps its two moments of the gradient.

    8bit: blocks of 256 numbers with a scale each, 2.03 bytes a weight where fp32 takes 8; a weight
    that has no whole blocks on each rank keeps fp32. By torchao; arXiv:2110.02861.
    """

    FP32 = "fp32"
    INT8 = "8bit"


class Offload(StrEnum):
    """What a GPU's weights, gradients and moments are kept in.

    optimizer: the host's pinned memory (FSDP2's CPUOffloadPolicy). Fp32 weights, gradients and
    moments stay there and are updated there; the GPU is given one block at a time, in what it
    computes with. The critic and the reference likewise.
    """

    NONE = "none"
    OPTIMIZER = "optimizer"


class Precision(StrEnum):
    """In what the passes are computed, over fp32 master weights.

    auto: on a CPU the faster one, timed at a run's start (some 0.1 s) and kept; if both are within
    20 %, on CUDA, with several ranks, and with train.mode=sync (which repeats itself bit for bit):
    bf16 if the device has units for it, else fp32.
    """

    AUTO = "auto"
    BF16 = "bf16"
    FP32 = "fp32"


class Layout(StrEnum):
    """How the sequences of a microbatch lie in memory; the gradient is the same.

    padded: one below the other, as wide as the longest. packed: one after the other in a row, so
    that nothing is computed for padding. auto: packed if the model's attention allows it (every
    layer sees all tokens before) and, timed on a CPU at a run's start, it is not slower.
    """

    AUTO = "auto"
    PADDED = "padded"
    PACKED = "packed"


class Attention(StrEnum):
    """The kernels of attention.

    fused: flash attention on CUDA (over packed sequences in bf16), else torch's scaled dot
    products. products: plain matrix products, which keep the probabilities of every pair. auto:
    fused on CUDA; on a CPU the faster one, timed as `precision` is, and products if in doubt.
    """

    AUTO = "auto"
    FUSED = "fused"
    PRODUCTS = "products"


class WeightsTransport(StrEnum):
    """How versions travel to the engines.

    auto: CUDA IPC to an engine that shares the learner's GPU, NCCL between GPUs, else gloo. file: a
    folder of the run directory, which learner and actors must share; where nothing else passes.
    """

    AUTO = "auto"
    NCCL = "nccl"
    IPC = "ipc"
    GLOO = "gloo"
    FILE = "file"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSection:
    """Training of low-rank adapters beside frozen weights instead of the weights themselves.

    There is no dropout: the policy that trains must be the function that sampled.
    """

    rank: int = knob(0, "of the adapters; 0: all weights are trained", ge=0, le=512)
    alpha: float = knob(32.0, "adapters count alpha / rank times", gt=0, le=1e4)
    targets: list[str] = knob(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "linear layers that get adapters, by the last part of their names; never the head",
        form=WORD,
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if self.rank and not self.targets:
            yield "targets", "[]", "rank > 0 needs a layer to put adapters to"


FULL = LoraSection()  # no adapters: all weights are trained


class CriticKind(StrEnum):
    """head: a value head on the policy's trunk. model: a network of its own."""

    HEAD = "head"
    MODEL = "model"


class CriticTargets(StrEnum):
    """gae: returns of the data's policy. vtrace: corrected to the current one (1802.01561)."""

    GAE = "gae"
    VTRACE = "vtrace"


class Timestep(StrEnum):
    """What one step of advantage estimation is; observation tokens are never one."""

    TURN = "turn"
    TOKEN = "token"


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSection:
    """The value function of `algorithm.advantage=ppo`."""

    kind: CriticKind = knob(CriticKind.HEAD, "where it sits")
    path: str = knob("", 'kind=model: checkpoint to start from; "": model.path')
    lr: float = knob(1e-5, "learning rate of the head, or of the model", gt=0, le=10)
    coef: float = knob(0.5, "kind=head: weight of the value loss", ge=0, le=1000)
    clip: float = knob(0.2, "how far a value may move from that before the step; 0: freely", ge=0)
    warmup_steps: int = knob(0, "first steps in which only the critic learns", ge=0)
    gae_lambda: float = knob(1.0, "of generalised advantage estimation", ge=0, le=1)
    timestep: Timestep = knob(Timestep.TURN, "what one step of the estimation is")
    targets: CriticTargets = knob(CriticTargets.GAE, "what it learns")
    vtrace_rho: float = knob(1.0, "cap of the weight of a temporal difference", gt=0)
    vtrace_c: float = knob(1.0, "cap of the weight that is passed back", gt=0)
    whiten: bool = knob(True, "advantages of the batch to mean 0 and standard deviation 1")

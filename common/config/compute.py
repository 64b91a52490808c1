"""The model, and options of the trainer's computation: optimizer, precision, memory, adapters."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from common.config.knobs import DATE, PATH, WORD, Contradiction, knob, seconds

DTYPES = ("bfloat16", "float16", "float32")
# Arguments of `apply_chat_template` that are no variables of a template.
RESERVED_VARIABLES = {
    "conversation",
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_dict",
    "return_tensors",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "strftime_now",
    "date_string",
}


EXPERTS = "experts"  # Target of adapters on the weights of all experts.


class OptimizerKind(StrEnum):
    """Optimizer of the policy.

    adamw: AdamW for all weights. muon: Muon for the hidden matrices, AdamW for the rest.
    """

    ADAMW = "adamw"
    MUON = "muon"


class Moments(StrEnum):
    """Number format of AdamW's two moments of the gradient.

    fp32: 8 bytes for each weight. 8bit: each block of 256 numbers has one scale, which takes 2.03
    bytes for each weight. Weights without whole blocks on each rank keep fp32 moments. The
    implementation is torchao's; arXiv:2110.02861.
    """

    FP32 = "fp32"
    INT8 = "8bit"


class Offload(StrEnum):
    """Location of a GPU learner's weights, gradients and moments.

    none: they stay on the GPU. optimizer: they are stored in pinned host memory in fp32, and the
    optimizer step runs on the CPU (FSDP2's CPUOffloadPolicy). The GPU receives one block at a
    time, in the precision of the computation. The critic and the reference are offloaded, too.
    """

    NONE = "none"
    OPTIMIZER = "optimizer"


class ShardPlace(StrEnum):
    """Disk of the checkpoint files of further nodes that share no path with rank 0's node.

    first_node: they are sent to rank 0's node, where each checkpoint is whole. own_node: each node
    writes the files of its ranks to learner.shard_folder. `python run.py gather` makes such a
    checkpoint whole; before that only a learner with all these nodes can read it.
    """

    FIRST_NODE = "first_node"
    OWN_NODE = "own_node"


class Precision(StrEnum):
    """Precision of the forward and backward passes; the master weights are fp32.

    auto: bf16 if the device has bf16 units, else fp32. On a CPU it is also fp32 for adapters, and
    for a checkpoint of bf16 numbers if rounding would hide an update of the learning rate from more
    than half of its weights. The choice is made before the start and is never timed. --dry-run, the
    log, and report.html show it with its reason. bf16 rounds the weights for each pass; an update
    below half a unit of bf16 is hidden until it has added up, see train/vanished_update_frac.
    """

    AUTO = "auto"
    BF16 = "bf16"
    FP32 = "fp32"


class Layout(StrEnum):
    """Memory layout of a microbatch's sequences.

    padded: one row for each sequence, as wide as the longest. packed: all sequences in one row,
    without computation for padding. auto: packed if every layer of the model attends to all
    earlier tokens or to a sliding window of them, else padded. On a CPU both are timed at the run's
    start, and padded is used if it is faster.
    """

    AUTO = "auto"
    PADDED = "padded"
    PACKED = "packed"


class Attention(StrEnum):
    """Attention kernels.

    fused: flash attention on CUDA (for packed sequences in bf16), else torch's scaled dot product
    attention. Padded sequences of families with capped scores, sinks or an attention of their own
    use the network's own formula instead. products: plain matrix products, which store the
    probabilities of all token pairs.
    auto: fused on CUDA. On a CPU with one rank and train.mode=async, the faster one of a timing at
    the run's start (about 0.1 s); products if the difference is below 20 %.
    """

    AUTO = "auto"
    FUSED = "fused"
    PRODUCTS = "products"


class WeightsTransport(StrEnum):
    """Transport of weight versions to the engines.

    auto: ipc to an engine on the learner's GPU, nccl between GPUs, else memory on the learner's
    machine and gloo to others. nccl: NCCL. ipc: CUDA IPC, on one GPU. memory: host memory of the
    learner, which engines of its machine, its user and its container map. gloo: TCP. file: a
    folder of the run directory that learner and actors share, for networks that block the other
    transports.
    """

    AUTO = "auto"
    NCCL = "nccl"
    IPC = "ipc"
    MEMORY = "memory"
    GLOO = "gloo"
    FILE = "file"


class PublishMode(StrEnum):
    """Form in which versions are sent to the engines.

    full: all weights. delta: only the numbers whose bits changed since the version that an engine
    holds, and all weights to other engines or if most have changed. Learner and engine workers
    then keep a copy of a version. auto: delta for 16-bit weights, else full, and full with
    adapters and with engines that sleep.
    """

    FULL = "full"
    DELTA = "delta"
    AUTO = "auto"

    def keeps_versions(self, dtype: str, *, has_adapters: bool, is_sleeping: bool) -> bool:
        """Return whether engines of this dtype receive changes, so that copies are kept."""
        is_sparse = dtype != "float32" and not has_adapters and not is_sleeping
        return self is PublishMode.DELTA or (self is PublishMode.AUTO and is_sparse)


class EnforceEager(StrEnum):
    """Execution of the engine's model.

    true: one kernel after the other, ready at once. false: compiled, with CUDA graphs on a GPU.
    The first start with a model compiles for a minute or more. vLLM keeps the result in the user's
    cache folder. auto: false on CUDA, true on a CPU.
    """

    AUTO = "auto"
    TRUE = "true"
    FALSE = "false"


# vLLM's arguments that the project sets itself, with the key that sets each. Without a key, the
# value is fixed.
OWN_ENGINE_ARGS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "seed": "run.seed",
    "max_model_len": "actor.max_model_len",
    "max_num_seqs": "actor.max_concurrent",
    "tensor_parallel_size": "actor.tensor_parallel_size",
    "pipeline_parallel_size": "actor.tensor_parallel_size",
    "data_parallel_size": "actor.num_actors",
    "gpu_memory_utilization": "actor.gpu_memory_frac",
    "num_gpu_blocks_override": "actor.kv_cache_blocks",
    "enforce_eager": "actor.enforce_eager",
    "enable_sleep_mode": "actor.sleep",
    "enable_prefix_caching": "actor.prefixes_at_update",
    "enable_lora": "learner.lora.rank",
    "max_lora_rank": "learner.lora.rank",
    "lora_target_modules": "learner.lora.targets",
    "max_loras": "",
    "additional_config": "",
    "config_format": "",
    "disable_log_stats": "",
    "distributed_executor_backend": "",
    "load_format": "",
    "logprobs_mode": "",
    "scheduler_cls": "",
    "skip_tokenizer_init": "",
    "weight_transfer_config": "",
    "worker_cls": "",
    "worker_extension_cls": "",
}


def contradictions_of_engine_args(given: dict[str, Any]) -> Iterator[Contradiction]:
    """Yield the arguments of `actor.engine_args` that the project sets itself."""
    for name in sorted(given.keys() & OWN_ENGINE_ARGS.keys()):
        key = OWN_ENGINE_ARGS[name]
        law = f"the project sets this argument of vLLM; use {key} instead"
        if not key:
            law = "the project fixes this argument of vLLM; remove it"
        yield f"engine_args.{name}", given[name], law


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSection:
    """Low-rank adapters (LoRA), which are trained instead of the frozen weights.

    There is no dropout, because the trained policy must be the sampling policy.
    """

    rank: int = knob(0, "Sets the rank of the LoRA adapters. 0 trains all weights.", ge=0, le=512)
    alpha: float = knob(
        32.0, "Multiplies the output of an adapter by this value divided by the rank.", gt=0, le=1e4
    )
    targets: list[str] = knob(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "Lists the linear layers that get adapters, by the last part of their names. The head "
        "never gets one. `experts` stands for the weights of all experts.",
        form=WORD,
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if self.rank and not self.targets:
            yield "targets", "[]", "must name at least one layer if learner.lora.rank > 0"

    @property
    def is_merged(self) -> bool:
        """Whether engines receive merged weights: their kernels take no adapters of experts."""
        return self.rank > 0 and EXPERTS in self.targets

    @property
    def in_engine(self) -> "LoraSection":
        """The adapters that engines take; FULL if they receive whole weights."""
        return FULL if self.is_merged else self


FULL = LoraSection()  # No adapters: all weights are trained.


class CriticKind(StrEnum):
    """Network of the critic.

    head: a value head on the policy's trunk. model: a separate network.
    """

    HEAD = "head"
    MODEL = "model"


class CriticTargets(StrEnum):
    """Training targets of the critic.

    gae: returns of the sampling policy. vtrace: returns corrected to the current policy (V-trace,
    arXiv:1802.01561).
    """

    GAE = "gae"
    VTRACE = "vtrace"


class Timestep(StrEnum):
    """Length of one step in advantage estimation; observation tokens never count as steps."""

    TURN = "turn"
    TOKEN = "token"


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSection:
    """The value function of `algorithm.advantage=ppo`."""

    kind: CriticKind = knob(CriticKind.HEAD, "Selects the network of the critic.")
    path: str = knob(
        "", "Names the checkpoint from which a critic of kind=model starts. Empty means model.path."
    )
    lr: float = knob(
        1e-5, "Sets the constant learning rate of the critic's own weights.", gt=0, le=10
    )
    coef: float = knob(
        0.5, "With kind=head, sets the weight of the value loss in the total loss.", ge=0, le=1000
    )
    clip: float = knob(
        0.2,
        "Clips the change of a value within a step in the critic's loss. 0 clips nothing.",
        ge=0,
    )
    warmup_steps: int = knob(0, "Trains only the critic in this many first steps of the run.", ge=0)
    gae_lambda: float = knob(
        1.0, "Sets lambda of generalised advantage estimation and of V-trace.", ge=0, le=1
    )
    timestep: Timestep = knob(
        Timestep.TURN, "Selects the time step of advantage estimation: a turn, or a sampled token."
    )
    targets: CriticTargets = knob(CriticTargets.GAE, "Selects the training targets of the critic.")
    vtrace_rho: float = knob(
        1.0, "With targets=vtrace, caps the weight of a temporal difference.", gt=0
    )
    vtrace_c: float = knob(
        1.0, "With targets=vtrace, caps the weight that is passed back to earlier steps.", gt=0
    )
    whiten: bool = knob(
        True, "Scales the advantages of a batch to mean 0 and standard deviation 1."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankKeys:
    """The ranks of the learner: processes on one or several nodes, which share batches."""

    num_nodes: int = knob(
        1,
        "Spreads the ranks over this many nodes. launcher=ray starts the other nodes. Else they"
        " join with `learner --join`.",
        ge=1,
        le=1024,
    )
    ranks_per_node: int = knob(
        0,
        "Sets the number of ranks on each node. 0 means learner.num_ranks / learner.num_nodes.",
        ge=0,
        le=64,
    )
    shard_nodes: int = knob(
        0,
        "Shards each copy of the weights over the ranks of this many nodes. 0 means all nodes, with"
        " one copy in total.",
        ge=0,
        le=1024,
    )
    num_ranks: int = knob(
        1,
        "Starts this many processes that share batches and weights, each with a CUDA device of its"
        " own.",
        ge=1,
        le=4096,
    )
    sequence_ranks: int = knob(
        1,
        "Divides each packed row over this many ranks of a node. Each computes a slice of its"
        " tokens, and within attention a share of the heads.",
        ge=1,
        le=8,
    )
    num_gpus: int = knob(
        0,
        "Sets the number of GPUs of the learner over all ranks. 0 means one for each rank.",
        ge=0,
        le=4096,
    )
    rank_timeout_s: float = seconds(
        600.0, "Limits the seconds in which ranks must answer each other.", gt=0
    )
    join_timeout_s: float = seconds(
        900.0, "Limits the seconds in which all nodes of the learner must join it.", gt=0
    )
    checkpoint_shards: ShardPlace = knob(
        ShardPlace.FIRST_NODE,
        "Selects the disk that holds the checkpoint files of further nodes without a shared path.",
    )
    shard_folder: str = knob(
        "",
        "With checkpoint_shards=own_node, names the folder of a further node for its files. Give it"
        " to `learner --join`. Empty means longstride/shards in the user's cache folder.",
        form=PATH,
        also="",
    )

    @property
    def local_ranks(self) -> int:
        """The number of ranks on each node."""
        return self.num_ranks // self.num_nodes

    @property
    def shard_ranks(self) -> int:
        """The number of ranks that share one copy of the weights."""
        return self.local_ranks * (self.shard_nodes or self.num_nodes)

    def rank_contradictions(self) -> Iterator[Contradiction]:
        """Yield the contradictions between these keys."""
        if self.num_gpus not in (0, self.num_ranks):
            law = f"must be 0 or learner.num_ranks={self.num_ranks}: each rank has one GPU"
            yield "num_gpus", self.num_gpus, law
        if self.num_ranks % self.num_nodes:
            law = f"must be a multiple of learner.num_nodes={self.num_nodes}"
            yield "num_ranks", self.num_ranks, law
        if self.ranks_per_node not in (0, self.local_ranks):
            law = f"must be 0 or learner.num_ranks / learner.num_nodes = {self.local_ranks}"
            yield "ranks_per_node", self.ranks_per_node, law
        if self.shard_nodes and self.num_nodes % self.shard_nodes:
            law = f"must be 0 or a divisor of learner.num_nodes={self.num_nodes}"
            yield "shard_nodes", self.shard_nodes, law
        if self.local_ranks % self.sequence_ranks:
            law = f"must be a divisor of {self.local_ranks}, the number of ranks on each node"
            yield "sequence_ranks", self.sequence_ranks, law


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """The policy: a directory with a transformers checkpoint."""

    path: str = knob(
        MISSING,
        "Selects the checkpoint: a directory with config.json, weights and tokenizer, or a model's "
        "name, org/name or org/name@revision. A name is resolved to a commit once, at the start.",
        form=PATH,
    )
    source: str = knob(
        "", "Names the model and its commit if model.path was given as a name. The start sets it."
    )
    commits: dict[str, str] = knob(
        {}, "Maps each name of a model to the commit that the run uses. The start sets it."
    )
    architecture: str = knob(
        "",
        "Selects a config.json, by directory or org/name, for the memory plan without model.path.",
        form=PATH,
        also="",
    )
    dtype: str = knob(
        "bfloat16", "Sets the data type of the engine and of published weights.", one_of=DTYPES
    )
    date: str = knob(
        "",
        "Sets the date in prompts, as YYYY-MM-DD. Empty means the date of the first start.",
        form=DATE,
        also="",
    )
    chat_template: str = knob(
        "",
        "Selects a file with a chat template. Empty uses the tokenizer's own.",
        form=PATH,
        also="",
    )
    chat_template_kwargs: dict[str, Any] = knob(
        {}, "Sets variables of the chat template, such as enable_thinking: false."
    )

    def contradictions(self) -> Iterator[Contradiction]:
        for name in sorted(RESERVED_VARIABLES & self.chat_template_kwargs.keys()):
            law = "is set by the product; remove it"
            yield f"chat_template_kwargs.{name}", self.chat_template_kwargs[name], law

    @property
    def label(self) -> str:
        """Short name of the model: its repository, or the name of its folder."""
        return self.source.partition("@")[0] or Path(self.path).name

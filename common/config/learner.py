"""The section `learner`: the trainer, its ranks, adapters, critic, controller and publishing."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from common.config.knobs import DEVICE, HOST, PATH, WORD, Contradiction, knob, seconds

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


class Activations(StrEnum):
    """Treatment of the activations that the backward pass reads.

    keep: they are stored. recompute: a layer stores its input, and the backward pass computes the
    rest again, which takes a third more time. offload: as recompute, and the inputs wait in pinned
    host memory; their copies overlap with the computation. auto: keep if the memory plan has room,
    else recompute, else offload; sft, dpo and evolve have no such plan and keep. A budget,
    learner.activation_gib, lets the last layers store theirs as far as it suffices. The gradient is
    the same, except for rounding in the chunks of learner.mlp_chunk_tokens.
    """

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    AUTO = "auto"


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

    auto: bf16 if the device has bf16 units, else fp32. Adapters have the precision of the engines,
    model.dtype; two precisions would drift apart and are refused. On a CPU it is also fp32 for a
    checkpoint of bf16 numbers if rounding would hide an update of the learning rate from more than
    half of its weights, and for adapters without engines. The choice is made before the start and
    is never timed. --dry-run, the log, and report.html show it with its reason. bf16 rounds the
    weights for each pass; an update below half a unit of bf16 is hidden until it has added up, see
    train/vanished_update_frac. fp16 has units of an eighth of those of bf16, and no numbers above
    65,504. Its losses are scaled, see train/loss_scale. It is for GPUs; set model.dtype=float16,
    too.
    """

    AUTO = "auto"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class Rounding(StrEnum):
    """Rounding of the weights of a pass in bf16, which engines receive, from the fp32 masters.

    nearest: to the nearest bf16 number. An update below half a unit is hidden until it has added
    up. stochastic: up or down at random, so that the mean is the master. The random numbers follow
    from the weight's name, its index and the number of updates. Recomputed steps, resumed runs and
    several ranks therefore have the same numbers. It takes 4 more bytes for each trained weight.
    auto: stochastic on a CPU that trains all weights of a checkpoint of bf16 numbers in bf16, if
    nearest would hide an update of the learning rate from more than half of them; else nearest.
    """

    AUTO = "auto"
    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


class Layout(StrEnum):
    """Memory layout of a microbatch's sequences.

    padded: one row for each sequence, as wide as the longest. packed: all sequences in one row,
    without computation for padding. auto: packed if the scores of packed sequences are right. On a
    CPU both are timed at the run's start, and padded is used if it is faster. On a GPU, auto pads
    models with layers that would compute a row's sequences one after another: recurrent layers
    without the packages of their kernels, and attention with a formula of its own.
    """

    AUTO = "auto"
    PADDED = "padded"
    PACKED = "packed"


class Attention(StrEnum):
    """Attention kernels.

    fused: flash attention on CUDA (for packed sequences in bf16), else torch's scaled dot product
    attention. Padded sequences of families with capped scores, sinks, a bias by position or an
    attention of their own use the network's own formula instead. products: plain matrix products,
    which store the probabilities of all token pairs.
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
    learner, which engines of its machine, its user and its container map. gloo: TCP.
    """

    AUTO = "auto"
    NCCL = "nccl"
    IPC = "ipc"
    MEMORY = "memory"
    GLOO = "gloo"


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


class PartialEpisodes(StrEnum):
    """Training of episodes of which only some turns are within max_lag_steps.

    off: an episode is trained as a whole, or is stale as a whole. turns: staleness is decided for
    each turn. The fresh turns of an episode are trained, and its stale turns are context. With
    algorithm.advantage=ppo the turns of an unfinished episode are trained, too, at the last step
    that accepts them. The critic values the rest of the episode.
    """

    OFF = "off"
    TURNS = "turns"


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
        "Starts this many processes that share batches and weights. On GPUs, each has its own one.",
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
    expert_ranks: int = knob(
        1,
        "Divides the experts of a mixture over this many ranks, to which tokens are sent. 1 gathers"
        " the weights of all experts for each pass.",
        ge=1,
        le=4096,
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
        if self.num_ranks % self.expert_ranks:
            law = f"must be a divisor of learner.num_ranks={self.num_ranks}"
            yield "expert_ranks", self.expert_ranks, law


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSection:
    """Reactions to data that is too far from the policy. Each is bounded, logged and optional.

    ESS is the minimum of three values: the effective sample size of pi / mu as a share of the
    tokens, the mean m of pi / mu, and 1 / m. It is 1 on-policy. The sample size alone would stay 1
    if all ratios shrank equally.
    """

    scale_lr: bool = knob(
        True, "Scales the learning rate down while the effective sample size is below ess_target."
    )
    tighten_gate: bool = knob(
        True,
        "Halves scheduler.max_ahead_steps at an effective sample size below ess_gate or a share of "
        "clipped tokens above clip_gate. Sets it to 0 after a skipped batch, and raises it again "
        "after recover_steps.",
    )
    skip_step: bool = knob(
        True,
        "Skips a batch whose effective sample size is below ess_skip. The next batch must then be "
        "fresh.",
    )
    ess_target: float = knob(
        0.9,
        "Sets the effective sample size, as a share of the tokens, below which the learning rate "
        "is scaled down.",
        ge=0,
        le=1,
    )
    ess_gate: float = knob(
        0.7,
        "Sets the effective sample size, as a share of the tokens, below which max_ahead_steps is "
        "halved.",
        ge=0,
        le=1,
    )
    clip_gate: float = knob(
        0.1,
        "Sets the share of clipped tokens above which max_ahead_steps is halved. 1 turns this off.",
        ge=0,
        le=1,
    )
    ess_skip: float = knob(
        0.5,
        "Sets the effective sample size, as a share of the tokens, below which a batch is skipped.",
        ge=0,
        le=1,
    )
    min_lr_scale: float = knob(
        0.1, "Limits how far the controller scales the learning rate down.", gt=0, le=1
    )
    recover_steps: int = knob(
        20,
        "Raises max_ahead_steps by one after this many steps in a row with an effective sample "
        "size of at least ess_target and at most clip_gate clipped tokens.",
        ge=1,
    )
    max_skips: int = knob(
        3, "Limits the skipped batches in a row. The next batch is trained on in any case.", ge=0
    )
    masked_warn_frac: float = knob(
        0.05, "Logs a warning above this share of masked tokens.", ge=0, le=1
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if not self.ess_skip <= self.ess_gate <= self.ess_target:
            law = "must be >= ess_gate, and ess_gate must be >= ess_skip"
            yield "ess_target", self.ess_target, law


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSection(RankKeys):
    """The learner's optimizer, computation, checkpoints and publishing of weights."""

    host: str = knob("127.0.0.1", "Sets the address at which the learner listens.", form=HOST)
    port: int = knob(
        0, "Sets the port that receives trajectories. 0 chooses a free one.", ge=0, le=65535
    )
    advertise: str = knob(
        "",
        "Sets the host name by which other nodes reach the learner. Empty detects it.",
        form=HOST,
        also="",
    )
    device: str = knob(
        "auto", "Selects the device of the learner. `auto` uses CUDA if there is any.", form=DEVICE
    )
    profile_steps: list[int] = knob(
        [],
        "Writes a torch profile of these steps, [first, last], to profile/ in the run directory.",
        ge=1,
    )
    memory_snapshot: bool = knob(
        False,
        "Writes a snapshot of CUDA's memory with its allocations during learner.profile_steps.",
    )
    optimizer: OptimizerKind = knob(OptimizerKind.ADAMW, "Selects the optimizer of the policy.")
    moments: Moments = knob(
        Moments.FP32,
        "Selects the number format of AdamW's two moments of the gradient, also for the critic.",
    )
    offload: Offload = knob(
        Offload.NONE,
        "Selects whether a GPU learner keeps weights, gradients and moments in host memory. Steps "
        "then take longer.",
    )
    lr: float = knob(1e-6, "Sets the learning rate of AdamW.", gt=0, le=10)
    muon_lr: float = knob(
        3e-3,
        "With optimizer=muon, sets the learning rate of the hidden matrices. All other weights use"
        " learner.lr.",
        gt=0,
        le=10,
    )
    beta1: float = knob(0.9, "Sets AdamW's decay of the first moment.", ge=0, lt=1)
    beta2: float = knob(0.95, "Sets AdamW's decay of the second moment.", ge=0, lt=1)
    weight_decay: float = knob(
        0.01,
        "Decays the policy's matrices, and all weights of a critic, per update by this factor "
        "times their learning rate. Norms and biases of the policy do not decay.",
        ge=0,
        le=100,
    )
    warmup_steps: int = knob(
        10, "Raises the learning rate to its value over this many first steps.", ge=0
    )
    decay_start_frac: float = knob(
        1.0,
        "Begins the linear decay of the learning rate at this share of train.num_steps. 1 turns it"
        " off.",
        ge=0,
        le=1,
    )
    min_lr_frac: float = knob(
        0.1, "Decays the learning rate to this share of its value.", ge=0, le=1
    )
    max_grad_norm: float = knob(1.0, "Scales a gradient down to this norm if it is larger.", gt=0)
    ppo_epochs: int = knob(1, "Passes over each batch this many times.", ge=1, le=1000)
    num_minibatches: int = knob(
        1, "Makes this many updates in each pass over a batch.", ge=1, le=10**5
    )
    max_tokens_per_microbatch: int = knob(
        8192, "Limits the tokens of a forward and backward pass of one rank.", ge=1
    )
    logprob_chunk_tokens: int = knob(
        1024, "Computes the vocabulary projection for this many tokens at a time.", ge=1
    )
    precision: Precision = knob(
        Precision.AUTO,
        "Selects the precision of the forward and backward passes. The master weights are fp32.",
    )
    rounding: Rounding = knob(
        Rounding.AUTO,
        "Selects how the trained weights are rounded for passes in bf16 and for their engines. See "
        "docs/PRECISION.md.",
    )
    layout: Layout = knob(
        Layout.AUTO,
        "Selects a microbatch's memory layout. The gradient does not depend on it, except for "
        "rounding and the term of algorithm.router_aux_coef.",
    )
    attention: Attention = knob(Attention.AUTO, "Selects the attention kernels of the learner.")
    shared_prefix: bool = knob(
        True,
        "With the packed layout, computes the tokens that several rows of a microbatch begin with "
        "once, as a prefix tree. The gradient does not depend on it, except for rounding and the "
        "term of algorithm.router_aux_coef.",
    )
    compile: bool = knob(
        False,
        "Compiles norms and gated layers into kernels at the first start. It is off on CUDA too: "
        "no measurement has shown a gain there yet.",
    )
    activations: Activations = knob(
        Activations.AUTO,
        "Selects whether layers store their activations for the backward pass, compute them again, "
        "or also move their inputs to host memory.",
    )
    activation_gib: float = knob(
        0.0,
        "Sets the memory of a microbatch's activations in GiB, from which follows the number of "
        "layers that store theirs. 0 means none with activations=recompute and offload. With auto, "
        "the start sets it to the room of the memory plan.",
        ge=0,
        le=1e6,
    )
    mlp_chunk_tokens: int = knob(
        2048,
        "Computes the feed-forward part of a layer that recomputes its activations for this many "
        "tokens of a row at a time. 0 computes whole rows.",
        ge=0,
    )
    num_threads: int = knob(
        0,
        "Sets the CPU threads of each rank. 0 times numbers up to that of the spare cores at the "
        "run's start. With train.mode=sync or several ranks, 0 means 1.",
        ge=0,
        le=1024,
    )
    max_lag_steps: int = knob(
        4,
        "Limits the lag of a trajectory's oldest token. Older trajectories are stale. "
        "scheduler.max_stretch may widen the limit for long episodes.",
        ge=0,
    )
    partial_episodes: PartialEpisodes = knob(
        PartialEpisodes.OFF,
        "Selects whether the fresh turns of an episode are trained if others are stale. See "
        "docs/CONTEXT.md.",
    )
    hold_back_steps: int = knob(
        0,
        "Publishes weights this many steps late, for studies of staleness.",
        ge=0,
        must="be at most max_lag_steps",
    )
    batch_timeout_s: float = seconds(
        1800.0,
        "Logs an error if no batch is complete and no episode has arrived for these seconds. The "
        "learner then waits on. With run.on_stall=stop it ends, unless it waits for disk space or "
        "a teacher.",
        gt=0,
    )
    publish_timeout_s: float = seconds(
        120.0, "Limits the seconds in which a version must be published.", gt=0
    )
    publish_bucket_mb: int = knob(
        256, "Gathers and sends this many MB of weights at a time.", ge=1, le=65536
    )
    publish_parts: int = knob(
        1,
        "Divides the engines into this many parts, which receive a version one after another.",
        ge=1,
        le=10**4,
    )
    publish: PublishMode = knob(PublishMode.FULL, "Selects the form of the versions that are sent.")
    weights_transport: WeightsTransport = knob(
        WeightsTransport.AUTO, "Selects the transport of weight versions to the engines."
    )
    max_canary_delta: float = knob(
        0.05,
        "Scales the limit of the canary prompts' mean |delta logprob|. The limit is 4 times the "
        "engine's first differences, but at least 0.4 times and at most 4 times this value. Before "
        "the first one is measured, it is twice this value.",
        gt=0,
        le=1000,
    )
    max_canary_alarms: int = knob(3, "Ends the run after this many canary alarms in a row.", ge=1)
    checkpoint_every_steps: int = knob(25, "Writes a checkpoint every this many steps.", ge=1)
    checkpoint_every_s: float = seconds(
        900.0, "Writes a checkpoint at least every this many seconds.", gt=0
    )
    max_redo_s: float = seconds(
        10.0,
        "Writes a checkpoint early, if it is cheap, once a restart would repeat this many seconds.",
        gt=0,
    )
    keep_checkpoints: int = knob(3, "Keeps this many of the newest regular checkpoints.", ge=1)
    max_bad_steps: int = knob(
        3, "Ends the run after this many steps in a row with non-finite losses or gradients.", ge=1
    )
    lora: LoraSection = field(default_factory=LoraSection)
    critic: CriticSection = field(default_factory=CriticSection)
    controller: ControllerSection = field(default_factory=ControllerSection)

    @property
    def row_tokens(self) -> int:
        """The token limit of a microbatch, over all ranks that compute it together."""
        return self.max_tokens_per_microbatch * self.sequence_ranks

    def contradictions(self) -> Iterator[Contradiction]:
        steps = self.profile_steps
        if steps and (len(steps) != 2 or steps[0] > steps[1]):
            yield "profile_steps", steps, "must be [first, last] steps, or [] for none"
        if self.partial_episodes is PartialEpisodes.TURNS and not self.max_lag_steps:
            law = "must be at least 1 with learner.partial_episodes=turns: a part needs a step"
            yield "max_lag_steps", 0, law
        if self.memory_snapshot and not steps:
            law = "needs learner.profile_steps=[first, last], the steps of the snapshot"
            yield "memory_snapshot", True, law
        if self.memory_snapshot and self.device == "cpu":
            yield "memory_snapshot", True, "needs a learner on CUDA, not learner.device=cpu"
        if self.num_gpus and self.device == "cpu":
            yield "num_gpus", self.num_gpus, "must be 0 with learner.device=cpu, which uses no GPU"
        yield from self.rank_contradictions()
        if self.sequence_ranks > 1 and self.layout is Layout.PADDED:
            law = "must be packed or auto with sequence_ranks > 1, which divides packed rows"
            yield "layout", "padded", law
        if self.offload is Offload.OPTIMIZER and self.device == "cpu":
            law = "must be none with learner.device=cpu, which uses host memory only"
            yield "offload", "optimizer", law
        if self.expert_ranks > 1 and self.offload is Offload.OPTIMIZER:
            law = "must be 1 with learner.offload=optimizer, which gathers weights from host memory"
            yield "expert_ranks", self.expert_ranks, law
        if self.offload is Offload.OPTIMIZER and self.optimizer is OptimizerKind.MUON:
            law = "needs learner.optimizer=adamw: muon would multiply its matrices on the CPU"
            yield "offload", "optimizer", law
        if self.offload is Offload.OPTIMIZER and self.moments is Moments.INT8:
            law = "must be fp32 with learner.offload=optimizer: a CPU updates 8-bit moments 600"
            yield "moments", "8bit", f"{law} times slower"
        if self.activation_gib and self.activations is Activations.KEEP:
            law = "must be 0 with learner.activations=keep, which stores all activations"
            yield "activation_gib", self.activation_gib, law
        is_gathered = self.num_ranks > 1 and self.expert_ranks == 1
        if self.lora.is_merged and (is_gathered or self.offload is Offload.OPTIMIZER):
            law = "must not name experts with offload=optimizer, or with num_ranks > 1 without"
            yield "lora.targets", ",".join(self.lora.targets), f"{law} expert_ranks > 1"
        is_stochastic = self.rounding is Rounding.STOCHASTIC
        if is_stochastic and self.precision is Precision.FP32:
            law = "must be nearest with learner.precision=fp32, whose passes round no weights"
            yield "rounding", "stochastic", law
        if is_stochastic and self.precision is Precision.FP16:
            law = "must be nearest with learner.precision=fp16: it rounds to bf16 numbers"
            yield "rounding", "stochastic", law
        if is_stochastic and self.lora.is_merged:
            law = "must be nearest with learner.lora.targets=experts: the pass rounds sums of base"
            yield "rounding", "stochastic", f"{law} and adapters"
        if self.lora.rank and self.optimizer is OptimizerKind.MUON:
            law = "must be adamw with learner.lora.rank > 0: muon is for whole weight matrices"
            yield "optimizer", "muon", law
        if self.moments is Moments.INT8 and self.optimizer is OptimizerKind.MUON:
            law = "must be fp32 with learner.optimizer=muon, which keeps one moment in fp32"
            yield "moments", "8bit", law

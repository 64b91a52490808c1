"""The configuration: every default lives here; YAML files and overrides only change them.

No I/O, no environment variables, no device code. Loading is in `common/config/load.py`.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from omegaconf import MISSING

from common.config.curriculum import (
    HorizonSection,
    MixtureSection,
    TaskSection,
    check_curriculum,
)
from common.config.envs import EnvsSection, RemoteOptions
from common.config.evaluation import EvalSection, PolicySection
from common.config.learning import AlgorithmSection, LearnerSection
from common.config.offline import DpoSection, EvolveSection
from common.config.simulator import TwinSection
from common.errors import ConfigError


def _require(condition: bool, key: str, value: object, law: str) -> None:
    if not condition:
        raise ConfigError(f"{key}={value!r}: {law}")


class TrainMode(StrEnum):
    """async: actors and learner overlap. sync: generate a batch, train, publish, repeat."""

    ASYNC = "async"
    SYNC = "sync"


class Resume(StrEnum):
    """auto: continue if the run directory holds a checkpoint. never: refuse a used directory."""

    AUTO = "auto"
    NEVER = "never"


class WandbMode(StrEnum):
    """auto: online if the user is logged in, else offline."""

    AUTO = "auto"
    ONLINE = "online"
    OFFLINE = "offline"
    DISABLED = "disabled"


@dataclass(slots=True, kw_only=True)
class RunSection:
    """Where the run lives and what makes it repeatable."""

    name: str = "quickstart"  # directory below `dir`
    dir: str = "runs"
    seed: int = 0
    resume: Resume = Resume.AUTO
    stop_timeout_s: float = 0.0  # for the learner to save at a stop; 0: follow what was measured

    def __post_init__(self) -> None:
        _require(self.stop_timeout_s >= 0, "run.stop_timeout_s", self.stop_timeout_s, ">= 0")


@dataclass(slots=True, kw_only=True)
class TrainSection:
    """How long, and how the roles interleave."""

    mode: TrainMode = TrainMode.ASYNC
    num_steps: int = 100  # optimizer steps, so versions published after v0

    def __post_init__(self) -> None:
        _require(self.num_steps >= 0, "train.num_steps", self.num_steps, "must be >= 0")


@dataclass(slots=True, kw_only=True)
class ModelSection:
    """The policy: a transformers checkpoint directory, loaded by path."""

    path: str = MISSING
    dtype: str = "bfloat16"  # of the engine and of what is published

    def __post_init__(self) -> None:
        allowed = ("bfloat16", "float16", "float32")
        _require(self.dtype in allowed, "model.dtype", self.dtype, f"one of {allowed}")


@dataclass(slots=True, kw_only=True)
class GroupsSection:
    """How episodes are grouped for a step."""

    size: int = 8  # episodes of one prompt
    per_step: int = 16  # groups with signal in one optimizer step
    min_size: int = 4  # survivors below which a damaged group is given up
    max_oversample: float = 3.0  # open at most this many times per_step groups for one step
    straggler_factor: float = 0.0  # re-issue beyond this x the p95 of episode seconds; 0: never
    straggler_min_s: float = 30.0  # but not before

    def __post_init__(self) -> None:
        _require(self.size >= 2, "groups.size", self.size, "must be >= 2")
        _require(self.per_step >= 1, "groups.per_step", self.per_step, "must be >= 1")
        law = "must be between 2 and groups.size"
        _require(2 <= self.min_size <= self.size, "groups.min_size", self.min_size, law)
        _require(self.max_oversample >= 1, "groups.max_oversample", self.max_oversample, ">= 1")
        factor = self.straggler_factor
        law = "0 (off) or >= 1"
        _require(factor == 0 or factor >= 1, "groups.straggler_factor", factor, law)
        _require(self.straggler_min_s > 0, "groups.straggler_min_s", self.straggler_min_s, "> 0")


@dataclass(slots=True, kw_only=True)
class SchedulerSection:
    """The centre's control plane."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: a free one, written to the run directory
    max_ahead_steps: int = 1  # batches of groups that may be open beyond the current one
    heartbeat_s: float = 1.0
    dead_after_s: float = 20.0  # silence after which an actor's leases are issued again
    max_attempts: int = 3  # issues of one episode before it counts as failed
    max_failed_frac: float = 0.2  # of the last 200 episodes; more ends the run
    gate_margin: float = 1.5  # x group seconds / step seconds is opened ahead; 0: max_ahead_steps
    max_stretch: float = 2.0  # x learner.max_lag_steps, for horizons whose episodes outlast it
    size_leases: bool = True  # an actor holds no more than it finishes before it is stale

    def __post_init__(self) -> None:
        margin = self.gate_margin
        law = "0 (off) or >= 1"
        _require(margin == 0 or margin >= 1, "scheduler.gate_margin", margin, law)
        _require(self.max_stretch >= 1, "scheduler.max_stretch", self.max_stretch, "must be >= 1")
        ahead = self.max_ahead_steps
        _require(ahead >= 0, "scheduler.max_ahead_steps", ahead, "must be >= 0")


@dataclass(slots=True, kw_only=True)
class ActorSection:
    """Generation and interaction."""

    num_actors: int = 1  # started by the launcher; more may join at any time
    name: str = ""  # of an actor started alone; "": made from host and pid
    max_concurrent: int = 64  # episodes at once in one actor
    adapt_concurrency: bool = True  # fewer while its engine cannot keep up; never in sync mode
    min_concurrent: int = 1  # but so many always
    max_model_len: int = 512  # tokens; an episode that would exceed it ends as context_full
    max_turn_tokens: int = 16  # sampled tokens per turn
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    kv_cache_gib: int = 1  # CPU engine only
    kv_cache_blocks: int = 0  # of the engine's own size; 0: as many as the memory holds
    gpu_memory_frac: float = 0.85
    tensor_parallel_size: int = 1
    enforce_eager: bool = True
    turn_timeout_s: float = 300.0
    episode_timeout_s: float = 1800.0
    env_timeout_s: float = 60.0
    start_timeout_s: float = 300.0
    delivery_window: int = 256  # unacknowledged trajectories before episodes wait

    def __post_init__(self) -> None:
        truncation = "truncated sampling biases the importance ratio; training needs"
        _require(self.top_p == 1.0, "actor.top_p", self.top_p, f"{truncation} 1.0")
        _require(self.top_k == -1, "actor.top_k", self.top_k, f"{truncation} -1")
        _require(self.temperature > 0, "actor.temperature", self.temperature, "must be > 0")
        _require(self.num_actors >= 0, "actor.num_actors", self.num_actors, "must be >= 0")
        _require(self.max_concurrent > 0, "actor.max_concurrent", self.max_concurrent, "> 0")
        law = "must be between 1 and actor.max_concurrent"
        is_bounded = 1 <= self.min_concurrent <= self.max_concurrent
        _require(is_bounded, "actor.min_concurrent", self.min_concurrent, law)
        _require(self.kv_cache_blocks >= 0, "actor.kv_cache_blocks", self.kv_cache_blocks, ">= 0")


@dataclass(slots=True, kw_only=True)
class EnvhubSection:
    """The environment service."""

    envs: list[str] = field(default_factory=list[str])  # to serve; []: those of the tasks
    host: str = "127.0.0.1"
    port: int = 0  # 0: a free one
    url: str = ""  # use this hub instead of starting one
    token: str = ""  # of a hub started alone; "": none is asked for. A run has a key of its own
    style: str = "compact"  # compact | agentgym: how observations are worded
    session_lease_s: float = 600.0
    capacity: int = 4096  # sessions per environment
    step_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        _require(self.style in ("compact", "agentgym"), "envhub.style", self.style, "no such style")


@dataclass(slots=True, kw_only=True)
class SftSection:
    """Supervised warm start from demonstrations."""

    output: str = "configs/policies/tiny"
    demonstrations: str = ""  # AgentTraj-format JSON lines; "": made from the environments' experts
    num_demonstrations: int = 6000
    expert_subsets: list[str] = field(default_factory=list[str])  # [] : all of the tasks
    min_reward: float = 0.0  # episodes worth less are left out
    max_episodes: int = 0  # the newest ones of what is left; 0: all
    random_frac: float = 0.3  # share of episodes of uniform valid play over the whole mixture
    num_epochs: int = 3
    batch_tokens: int = 4096
    lr: float = 1e-3  # with learner.optimizer=muon: of embeddings, head and norms
    muon_lr: float = 0.02  # learner.optimizer=muon: of the hidden matrices
    hidden_size: int = 128  # of a policy made from nothing
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 512
    vocab_size: int = 640
    from_scratch: bool = True  # make tokenizer and weights; False: start from model.path


@dataclass(slots=True, kw_only=True)
class LogSection:
    """What is shown and where metrics go."""

    wandb: WandbMode = WandbMode.AUTO
    wandb_project: str = "longstride"
    level: str = "INFO"
    live: bool = True  # the terminal display, when there is a terminal


@dataclass(slots=True, kw_only=True)
class RunConfig:
    """A whole run. `OmegaConf.structured(RunConfig)` is the schema that all else is merged into."""

    run: RunSection = field(default_factory=RunSection)
    train: TrainSection = field(default_factory=TrainSection)
    model: ModelSection = field(default_factory=ModelSection)
    tasks: list[TaskSection] = field(default_factory=list[TaskSection])
    mixture: MixtureSection = field(default_factory=MixtureSection)
    horizon: HorizonSection = field(default_factory=HorizonSection)
    groups: GroupsSection = field(default_factory=GroupsSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    scheduler: SchedulerSection = field(default_factory=SchedulerSection)
    learner: LearnerSection = field(default_factory=LearnerSection)
    actor: ActorSection = field(default_factory=ActorSection)
    envhub: EnvhubSection = field(default_factory=EnvhubSection)
    env: RemoteOptions = field(default_factory=RemoteOptions)
    envs: EnvsSection = field(default_factory=EnvsSection)
    eval: EvalSection = field(default_factory=EvalSection)
    policy: PolicySection = field(default_factory=PolicySection)
    sft: SftSection = field(default_factory=SftSection)
    dpo: DpoSection = field(default_factory=DpoSection)
    evolve: EvolveSection = field(default_factory=EvolveSection)
    twin: TwinSection = field(default_factory=TwinSection)
    log: LogSection = field(default_factory=LogSection)

    def __post_init__(self) -> None:
        check_curriculum(self.horizon, self.tasks)


def published_version(cfg: RunConfig, version: int) -> int:
    """Return the version that engines are to hold once the learner has made `version` steps.

    Example (learner.hold_back_steps=4, 100 steps): 0 until step 4, 1 after step 5, 95 after step
    99, and 100 after the last, which is what is evaluated.
    """
    if version >= cfg.train.num_steps:
        return version
    return max(0, version - cfg.learner.hold_back_steps)

"""The configuration schema with all defaults. YAML files and overrides only change these.

It has no I/O, no environment variables and no device code. `common/config/load.py` loads it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from omegaconf import MISSING

from common.config.curriculum import (
    MAX_STAGE,
    CurriculumSection,
    HorizonSection,
    MixtureSection,
    TaskSection,
    contradictions_of_tasks,
)
from common.config.envs import EnvsSection, RemoteOptions
from common.config.evaluation import AgentOptions, EvalSection, PolicySection, StudySection
from common.config.knobs import (
    DATE,
    ENV_NAME,
    FILE_NAME,
    HOST,
    LABEL,
    PATH,
    PEER_NAME,
    RAY,
    URL,
    WORD,
    Contradiction,
    check,
    knob,
    seconds,
)
from common.config.learning import AlgorithmSection, LearnerSection
from common.config.offline import DpoSection, EvolveSection, SftSection, SimulatorSection
from common.errors import ConfigError
from common.formats.action_size import DEFAULT_ACTION_MIB, MOST_ACTION_MIB, needed_mib

DTYPES = ("bfloat16", "float16", "float32")
LARGEST_BLOCK_TOKENS = 128  # Largest block of a KV cache; engines may use smaller ones.
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class TrainMode(StrEnum):
    """async: actors and learner overlap. sync: generate a batch, train, publish, repeat."""

    ASYNC = "async"
    SYNC = "sync"


class Resume(StrEnum):
    """auto: continue if the run directory holds a checkpoint. never: refuse a used directory."""

    AUTO = "auto"
    NEVER = "never"


class Launcher(StrEnum):
    """local: subprocesses on this machine. ray: Ray places the roles on the nodes of a cluster."""

    LOCAL = "local"
    RAY = "ray"


class OnStall(StrEnum):
    """Action after a report about a hanging role, or about a run without progress."""

    WARN = "warn"
    RESTART = "restart"
    STOP = "stop"


class WandbMode(StrEnum):
    """auto: online if the user is logged in, else offline."""

    AUTO = "auto"
    ONLINE = "online"
    OFFLINE = "offline"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """The run's location and its seed, and its behaviour at a restart, a stop and a stall."""

    name: str = knob("quickstart", "directory below run.dir", form=FILE_NAME)
    dir: str = knob("runs", "directory of all runs", form=PATH)
    seed: int = knob(0, "of everything that is drawn", ge=0, lt=2**32)
    resume: Resume = knob(Resume.AUTO, "what happens if the run's directory is in use")
    stop_timeout_s: float = seconds(0.0, "seconds to save at a stop; 0: as measured", ge=0)
    stall_s: float = seconds(
        120.0, "seconds without progress, and 3x the longest so far, that are a stall", ge=5
    )
    on_stall: OnStall = knob(
        OnStall.RESTART, "beside a report with stacks: go on, restart who hangs, or stop the run"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSection:
    """Length of the training, and whether the roles overlap."""

    mode: TrainMode = knob(TrainMode.ASYNC, "whether actors and learner overlap")
    num_steps: int = knob(100, "optimizer steps, so versions published after v0", ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """The policy: a directory with a transformers checkpoint."""

    path: str = knob(MISSING, "directory with config.json, weights and tokenizer", form=PATH)
    architecture: str = knob(
        "", "directory of their config.json, for the plan without model.path", form=PATH, also=""
    )
    dtype: str = knob("bfloat16", "of the engine and of what is published", one_of=DTYPES)
    date: str = knob(
        "", 'Date that prompts name, as YYYY-MM-DD; "": that of the first start', form=DATE, also=""
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSection:
    """The target machine of a preset, for the memory plan of a dry run without a GPU."""

    num_nodes: int = knob(1, "learner on the first, engines where GPUs are left", ge=1, le=1000)
    num_gpus: int = knob(0, "of each node; 0: any machine will do", ge=0, le=1000)
    gpu_memory_gib: float = knob(80.0, "GiB of each GPU", gt=0, le=10_000)
    host_memory_gib: float = knob(1000.0, "GiB of each node", gt=0, le=10**6)

    @property
    def text(self) -> str:
        """The machine as text."""
        nodes = f"{self.num_nodes} node" + "s" * (self.num_nodes > 1)
        gpus = f"{self.num_gpus} GPU" + "s" * (self.num_gpus > 1)
        return f"{nodes} with {gpus} of {self.gpu_memory_gib:g} GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsSection:
    """Groups of episodes for a step."""

    size: int = knob(8, "episodes of one prompt; 1: see algorithm.advantage", ge=1, le=4096)
    per_step: int = knob(16, "groups with signal in one optimizer step", ge=1, le=10**5)
    min_size: int = knob(
        4,
        "survivors below which a damaged group is given up",
        ge=1,
        le=4096,
        must="be at most size",
    )
    max_oversample: float = knob(3.0, "x per_step groups may be opened for a step", ge=1, le=1000)
    straggler_factor: float = knob(
        0.0, "re-issue beyond this x the p95 of episode seconds; 0: never", also=0, ge=1, le=1000
    )
    straggler_min_s: float = seconds(30.0, "seconds before which none is", gt=0)


SILENT_BEATS = 5  # Consecutive missed heartbeats.


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSection:
    """The scheduler: addresses, heartbeats, leases and the gate."""

    host: str = knob("127.0.0.1", "address to listen on", form=HOST)
    port: int = knob(0, "0: a free one, written to the run directory", ge=0, le=65535)
    advertise: str = knob("", 'host by which others reach it; "": found out', form=HOST, also="")
    max_ahead_steps: int = knob(1, "batches that may be open beyond this one", ge=0, le=1000)
    heartbeat_s: float = seconds(1.0, "seconds between two signs of life", ge=0.01, le=3600)
    dead_after_s: float = seconds(
        20.0, "seconds of silence until its leases are issued again", gt=0, must="be > heartbeat_s"
    )
    max_attempts: int = knob(3, "issues of one episode before it counts as failed", ge=1, le=1000)
    max_failed_frac: float = knob(0.2, "of the last 200 episodes; more ends the run", ge=0, le=1)
    gate_margin: float = knob(
        1.5, "x group s / step s is opened ahead; 0: max_ahead_steps", also=0, ge=1, le=1000
    )
    max_stretch: float = knob(2.0, "x max_lag_steps, where episodes outlast it", ge=1, le=1000)
    size_leases: bool = knob(True, "an actor holds no more than it finishes before it is stale")

    @property
    def silent_after_s(self) -> float:
        """Seconds without a heartbeat after which broadcasts skip an actor's engine."""
        return SILENT_BEATS * self.heartbeat_s


class GpuPlacement(StrEnum):
    """auto: separate from the learner if there are enough GPUs, else colocated with it."""

    AUTO = "auto"
    APART = "apart"
    COLOCATED = "colocated"


class AtUpdate(StrEnum):
    """Handling of keys and values from older weights when an engine loads new weights."""

    KEEP = "keep"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSection(AgentOptions):
    """The actors: episodes, sampling, the engine and its timeouts."""

    num_actors: int = knob(1, "started by the launcher; more may join at any time", ge=0, le=10_000)
    num_spares: int = knob(
        0, "engines started beside them, which play once an actor is gone", ge=0, le=1000
    )
    name: str = knob(
        "", 'of an actor started alone; "": made from host and pid', form=PEER_NAME, also=""
    )
    max_concurrent: int = knob(64, "episodes at once in one actor", ge=1, le=10**5)
    adapt_concurrency: bool = knob(True, "fewer while its engine cannot keep up; not in sync mode")
    min_concurrent: int = knob(
        1, "but so many always", ge=1, le=10**5, must="be at most max_concurrent"
    )
    max_model_len: int = knob(512, "tokens; of a longer episode see context", ge=16, le=MAX_STAGE)
    max_turn_tokens: int = knob(16, "sampled tokens per turn", ge=1, must="be < max_model_len")
    temperature: float = knob(1.0, "of sampling; the learner divides by it, too", ge=0.01, le=2)
    top_p: float = knob(1.0, "1: all tokens; else the importance ratio is biased", ge=1, le=1)
    top_k: int = knob(-1, "-1: all tokens; else the importance ratio is biased", ge=-1, le=-1)
    kv_cache_gib: int = knob(1, "GiB, of the CPU engine only", ge=1, le=10_000)
    kv_cache_blocks: int = knob(0, "of 32 tokens on a CPU; 0: as many as the memory holds", ge=0)
    gpu_memory_frac: float = knob(0.85, "of the device's memory, for the engine", gt=0, le=1)
    kv_at_update: AtUpdate = knob(
        AtUpdate.KEEP,
        "a turn in work at new weights keeps its KV cache, or drops and recomputes it",
    )
    prefixes_at_update: AtUpdate = knob(
        AtUpdate.DROP,
        "later turns of an episode go on from what older weights computed, or recompute it",
    )
    tensor_parallel_size: int = knob(1, "devices of one engine", ge=1, le=64)
    num_gpus: int = knob(
        0, "of all engines, each of tensor_parallel_size, which 0 means", ge=0, le=10_000
    )
    placement: GpuPlacement = knob(GpuPlacement.AUTO, "of engines, on GPUs the learner has or not")
    enforce_eager: bool = knob(True, "no compiled graphs: slower, but up at once")
    turn_timeout_s: float = seconds(300.0, "seconds for one turn's tokens", gt=0)
    episode_timeout_s: float = seconds(
        1800.0, "seconds for a whole episode", gt=0, must="be >= turn_timeout_s"
    )
    env_timeout_s: float = seconds(60.0, "seconds for one answer of the hub", gt=0)
    start_timeout_s: float = seconds(300.0, "seconds for the engine to come up", gt=0)
    delivery_window: int = knob(256, "unacknowledged trajectories until episodes wait", ge=1)

    @property
    def num_engines(self) -> int:
        """Number of engines that the launcher starts."""
        return self.num_actors + self.num_spares

    def contradictions(self) -> Iterator[Contradiction]:
        wanted = self.num_engines * self.tensor_parallel_size
        if self.num_gpus not in (0, wanted):
            width = f"actor.tensor_parallel_size={self.tensor_parallel_size}"
            spares = f" + actor.num_spares={self.num_spares}" if self.num_spares else ""
            engines = f"actor.num_actors={self.num_actors}{spares}"
            law = f"{engines} x {width} = {wanted}; give that, or 0"
            yield "num_gpus", self.num_gpus, law
        blocks_for = self.kv_cache_blocks * LARGEST_BLOCK_TOKENS
        if 0 < blocks_for < (longest := self.max_model_len):
            law = f"no room for one episode of actor.max_model_len={longest} tokens"
            yield "kv_cache_blocks", self.kv_cache_blocks, law
        if self.prefixes_at_update is AtUpdate.KEEP and self.kv_at_update is AtUpdate.DROP:
            law = "must be drop where kv_at_update=drop, which empties the whole cache"
            yield "prefixes_at_update", self.prefixes_at_update.value, law


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvhubSection:
    """The environment hub."""

    envs: list[str] = knob([], "names to serve; []: those of the tasks", form=ENV_NAME)
    host: str = knob("127.0.0.1", "address to listen on", form=HOST)
    port: int = knob(0, "0: a free one", ge=0, le=65535)
    url: str = knob("", 'use this hub; "": start one', form=URL, also="")
    is_started: bool = knob(True, "one beside the run, without a url; false: hubs join it")
    advertise: str = knob("", 'host by which others reach it; "": found out', form=HOST, also="")
    token: str = knob("", 'of the hub at url, or of a hub alone; "": the run\'s own, or none')
    style: str = knob("compact", "how observations are worded", one_of=("compact", "agentgym"))
    session_lease_s: float = seconds(600.0, "seconds until a silent session is closed", ge=1)
    capacity: int = knob(4096, "sessions per environment", ge=1, le=10**6)
    max_sessions: int = knob(16_384, "sessions that one token may hold", ge=1, le=10**6)
    step_timeout_s: float = seconds(30.0, "seconds for one step of an environment", gt=0)
    max_action_mib: int = knob(
        DEFAULT_ACTION_MIB,
        "MiB of one action; a larger one is an invalid action, whose reason the policy reads",
        ge=1,
        le=MOST_ACTION_MIB,
    )
    inline_step_s: float = seconds(0.2, "seconds for a step here; slower ones go to workers", gt=0)
    agentgym_lease_s: float = seconds(
        0.0, "the same on AgentGym's routes, whose clients may never close; 0: the same", ge=0
    )
    agentgym_queue_s: float = seconds(
        120.0, "seconds that a create or reset there waits for a free session", ge=0
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if self.agentgym_lease_s > self.session_lease_s:
            law = f"must be <= envhub.session_lease_s={self.session_lease_s:g}"
            yield "agentgym_lease_s", self.agentgym_lease_s, law


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSection:
    """Log levels, the terminal display, and the destination of metrics."""

    wandb: WandbMode = knob(WandbMode.AUTO, "where metrics go beside metrics.jsonl")
    wandb_project: str = knob("longstride", "project of Weights & Biases", form=WORD)
    level: str = knob("INFO", "least level that is logged", one_of=LOG_LEVELS)
    max_mb: int = knob(100, "MB of a role's log until it begins anew; one older is kept", ge=1)
    live: bool = knob(True, "the terminal display, when there is a terminal")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSection:
    """Retention of trajectories on disk. Files for a restart are never changed."""

    segment_mb: int = knob(256, "MB of a file, the unit of what follows", ge=1, le=4096)
    compress: bool = knob(True, "files that no restart reads any more, in idle time")
    keep_gb: float = knob(100.0, "GB; the oldest files go first; 0: all are kept", ge=0, le=1e6)
    keep_days: float = knob(0.0, "days, by a file's last episode; 0: for ever", ge=0, le=1e5)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySection:
    """Placement of roles by Ray. Scheduler and learner always run on the run directory's node."""

    address: str = knob(
        "", 'of a cluster; "": that of RAY_ADDRESS, else one is started here', form=RAY, also=""
    )
    actor_labels: list[str] = knob([], "that a node of an engine must have", form=LABEL)
    envhub_labels: list[str] = knob([], "that the node of the hub must have", form=LABEL)
    learner_cpus: float = knob(1.0, "CPUs that the learner takes of its node", gt=0, le=10_000)
    actor_cpus: float = knob(1.0, "CPUs that an actor takes of a node", gt=0, le=10_000)
    envhub_cpus: float = knob(1.0, "CPUs that the hub takes of a node", gt=0, le=10_000)
    place_timeout_s: float = seconds(
        300.0, "seconds for room for learner and hub, or a run of a study; actors wait on", gt=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A whole run. `OmegaConf.structured(RunConfig)` is the schema for all merged values."""

    launcher: Launcher = knob(Launcher.LOCAL, "of `train`: what starts the roles")
    dashboard: bool = knob(False, "of `train`: a page over the run, beside it, on this machine")
    run: RunSection = field(default_factory=RunSection)
    train: TrainSection = field(default_factory=TrainSection)
    model: ModelSection = field(default_factory=ModelSection)
    machine: MachineSection = field(default_factory=MachineSection)
    tasks: list[TaskSection] = knob([], "the training mixture")
    mixture: MixtureSection = field(default_factory=MixtureSection)
    horizon: HorizonSection = field(default_factory=HorizonSection)
    curriculum: CurriculumSection = field(default_factory=CurriculumSection)
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
    simulator: SimulatorSection = field(default_factory=SimulatorSection)
    study: StudySection = field(default_factory=StudySection)
    log: LogSection = field(default_factory=LogSection)
    journal: JournalSection = field(default_factory=JournalSection)
    ray: RaySection = field(default_factory=RaySection)

    def __post_init__(self) -> None:
        check(self)

    def contradictions(self) -> Iterator[Contradiction]:
        yield from contradictions_of_tasks(self.horizon, self.curriculum, self.tasks)
        yield from self.horizon.contradictions_of_unit(self.actor)
        yield from self.actor.contradictions_of_rows(self.algorithm, self.envhub, self.policy)
        yield from self._contradictions_of_actions()
        if self.groups.min_size == 1 and self.algorithm.advantage.is_group_relative:
            law = f"algorithm.advantage={self.algorithm.advantage.value} compares the members of a"
            yield "groups.min_size", 1, f"{law} group; give 2 or more, or advantage=running or ppo"

    def _contradictions_of_actions(self) -> Iterator[Contradiction]:
        """Yield a limit on actions that is smaller than the text of one turn."""
        turn_tokens, needed = self.actor.max_turn_tokens, needed_mib(self.actor.max_turn_tokens)
        if self.envhub.url or needed <= self.envhub.max_action_mib:
            return
        law = f"actor.max_turn_tokens={turn_tokens} can sample {needed} MiB"
        if needed <= MOST_ACTION_MIB:
            yield "envhub.max_action_mib", self.envhub.max_action_mib, f"{law}; give that"
        else:
            text = f"can sample {needed} MiB; an action has at most {MOST_ACTION_MIB} MiB"
            yield "actor.max_turn_tokens", turn_tokens, text


def check_training(cfg: RunConfig) -> None:
    """Check that an episode fits in a microbatch, and that sessions outlast turns.

    Raises: ConfigError: the message has the key and the value.
    """
    budget, longest = cfg.learner.max_tokens_per_microbatch, cfg.actor.max_model_len
    if budget < longest:
        law = f"must be >= actor.max_model_len={longest}, the tokens of the longest episode"
        raise ConfigError(f"learner.max_tokens_per_microbatch={budget}: {law}")
    lease_s, turn_s = cfg.envhub.session_lease_s, cfg.actor.turn_timeout_s
    if not cfg.envhub.url and lease_s < turn_s:
        law = f"must be >= actor.turn_timeout_s={turn_s:g}, for which a session may be silent"
        raise ConfigError(f"envhub.session_lease_s={lease_s:g}: {law}")


def published_version(cfg: RunConfig, version: int) -> int:
    """Return the version for the engines after `version` steps of the learner.

    Example (learner.hold_back_steps=4, 100 steps): 0 until step 4, 1 after step 5, 100 at the end.
    """
    if version >= cfg.train.num_steps:
        return version
    return max(0, version - cfg.learner.hold_back_steps)

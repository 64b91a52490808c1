"""The configuration schema with all defaults. YAML files and overrides only change these.

It has no I/O, no environment variables and no device code. `common/config/load.py` loads it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from common.config.compute import (
    EnforceEager,
    ModelSection,
    PublishMode,
    contradictions_of_engine_args,
)
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
    FILE_NAME,
    HOST,
    PATH,
    PEER_NAME,
    Contradiction,
    check,
    knob,
    seconds,
)
from common.config.learning import AlgorithmSection, LearnerSection
from common.config.offline import DpoSection, EvolveSection, SftSection, SimulatorSection
from common.config.services import EnvhubSection, JournalSection, LogSection, RaySection
from common.formats.action_size import MOST_ACTION_MIB, needed_mib
from common.text import counted

LARGEST_BLOCK_TOKENS = 128  # Largest block of a KV cache; engines may use smaller ones.


class TrainMode(StrEnum):
    """Whether actors and learner work at the same time.

    async: the actors play while the learner trains. sync: the actors play a batch, then the
    learner trains on it and publishes its weights.
    """

    ASYNC = "async"
    SYNC = "sync"


class Resume(StrEnum):
    """Reaction to a used run directory.

    auto: continue if the run directory holds a checkpoint. never: refuse a used directory.
    """

    AUTO = "auto"
    NEVER = "never"


class Launcher(StrEnum):
    """Launcher of the roles.

    local: subprocesses on this machine. ray: Ray places the roles on the nodes of a cluster.
    """

    LOCAL = "local"
    RAY = "ray"


class OnStall(StrEnum):
    """Action after a report about a stalled role or run.

    warn: logs the report. restart: restarts the stalled roles; at the fourth report without
    progress in between, the run is stopped. stop: stops the run.
    """

    WARN = "warn"
    RESTART = "restart"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """The run's location and its seed, and its behaviour at a restart, a stop and a stall."""

    name: str = knob("quickstart", "Names the run's directory below run.dir.", form=FILE_NAME)
    dir: str = knob("runs", "Names the directory of all runs.", form=PATH)
    seed: int = knob(0, "Sets the seed of all random draws.", ge=0, lt=2**32)
    resume: Resume = knob(Resume.AUTO, "Selects what happens if the run's directory is in use.")
    stop_timeout_s: float = seconds(
        0.0, "Limits the seconds to save at a stop. 0 derives them from earlier steps.", ge=0
    )
    stall_s: float = seconds(
        120.0,
        "Sets the seconds without progress after which a role has stalled. They are at least 3 "
        "times its longest earlier pause.",
        ge=5,
    )
    on_stall: OnStall = knob(
        OnStall.RESTART,
        "Selects the reaction to a stalled role or run, in addition to the report with stacks.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSection:
    """Length of the training, and whether the roles overlap."""

    mode: TrainMode = knob(TrainMode.ASYNC, "Selects whether actors and learner overlap.")
    num_steps: int = knob(
        100, "Sets the number of optimizer steps, each of which makes a version.", ge=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSection:
    """The target machine of a preset, for the memory plan of a dry run without a GPU."""

    num_nodes: int = knob(1, "Sets the number of nodes. The first has the learner.", ge=1, le=1000)
    num_gpus: int = knob(
        0, "Sets the number of GPUs of each node. 0 plans for any machine.", ge=0, le=1000
    )
    gpu_memory_gib: float = knob(80.0, "Sets the memory of each GPU, in GiB.", gt=0, le=10_000)
    host_memory_gib: float = knob(
        1000.0, "Sets the host memory of each node, in GiB.", gt=0, le=10**6
    )

    @property
    def text(self) -> str:
        """The machine as text."""
        nodes = counted(self.num_nodes, "node")
        gpus = counted(self.num_gpus, "GPU")
        return f"{nodes} with {gpus} of {self.gpu_memory_gib:g} GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsSection:
    """Groups of episodes for a step."""

    size: int = knob(
        8,
        "Sets the number of episodes of one item. 1 needs algorithm.advantage=running, "
        "reinforce_pp or ppo.",
        ge=1,
        le=4096,
    )
    per_step: int = knob(
        16, "Sets the number of groups with signal in one optimizer step.", ge=1, le=10**5
    )
    min_size: int = knob(
        4,
        "Discards a group of which failures leave fewer episodes than this. A smaller size is the"
        " default instead.",
        ge=1,
        le=4096,
        must="be at most size",
    )
    max_oversample: float = knob(
        3.0, "Limits the groups drawn for one step to this multiple of per_step.", ge=1, le=1000
    )
    straggler_factor: float = knob(
        0.0,
        "Issues an episode again that takes this multiple of the 95th percentile of the durations"
        " in its environment. 0 turns it off.",
        also=0,
        ge=1,
        le=1000,
    )
    straggler_min_s: float = seconds(
        30.0, "Issues no episode again as a straggler before this many seconds.", gt=0
    )


SILENT_BEATS = 5  # Consecutive missed heartbeats.


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSection:
    """The scheduler: addresses, heartbeats, leases and the gate."""

    host: str = knob("127.0.0.1", "Sets the address at which the scheduler listens.", form=HOST)
    port: int = knob(
        0,
        "Sets the port of the scheduler. 0 chooses a free one and writes it to the run directory.",
        ge=0,
        le=65535,
    )
    advertise: str = knob(
        "",
        "Sets the host name by which other nodes reach the scheduler. Empty detects it.",
        form=HOST,
        also="",
    )
    max_ahead_steps: int = knob(
        1, "Limits the batches that may be open beyond the current one.", ge=0, le=1000
    )
    heartbeat_s: float = seconds(1.0, "Sets the seconds between two heartbeats.", ge=0.01, le=3600)
    dead_after_s: float = seconds(
        20.0,
        "Issues an actor's leases again if it sends nothing for this many seconds.",
        gt=0,
        must="be > heartbeat_s",
    )
    max_attempts: int = knob(
        3, "Counts an episode as failed after it was issued this many times.", ge=1, le=1000
    )
    max_failed_frac: float = knob(
        0.2,
        "Ends the run if a larger share of the last 200 episodes failed. 50 episodes are needed, or"
        " 16 if all failed. Episodes that one outage ends count as one.",
        ge=0,
        le=1,
    )
    gate_margin: float = knob(
        1.5,
        "Limits the batches open ahead to this factor times the duration of a group divided by that"
        " of a step. 0 applies max_ahead_steps alone.",
        also=0,
        ge=1,
        le=1000,
    )
    max_stretch: float = knob(
        2.0,
        "Raises learner.max_lag_steps by up to this factor for environments with long episodes.",
        ge=1,
        le=1000,
    )
    size_leases: bool = knob(
        True, "Grants an actor only as many leases as it finishes before they are stale."
    )

    @property
    def silent_after_s(self) -> float:
        """Seconds without a heartbeat after which broadcasts skip an actor's engine."""
        return SILENT_BEATS * self.heartbeat_s


class GpuPlacement(StrEnum):
    """Placement of the engines on GPUs.

    apart: on GPUs of their own. colocated: on the learner's GPUs. auto: apart if there are enough
    GPUs, else colocated.
    """

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

    num_actors: int = knob(
        1, "Starts this many actors. More may join at any time.", ge=0, le=10_000
    )
    num_spares: int = knob(
        0, "Starts this many spare actors. A spare plays while an actor is absent.", ge=0, le=1000
    )
    engines_per_process: int = knob(
        1, "Sets the number of engines of one actor process. See docs/SCALE.md.", ge=1, le=256
    )
    name: str = knob(
        "",
        "Names an actor that is started alone. Empty derives the name from host and process id.",
        form=PEER_NAME,
        also="",
    )
    max_concurrent: int = knob(64, "Limits the concurrent episodes of one engine.", ge=1, le=10**5)
    adapt_concurrency: bool = knob(
        True, "Lowers the concurrency while the engine cannot keep up. Sync mode ignores it."
    )
    min_concurrent: int = knob(
        1,
        "Sets the number of episodes below which the concurrency never falls.",
        ge=1,
        le=10**5,
        must="be at most max_concurrent",
    )
    max_model_len: int = knob(
        512,
        "Limits the tokens of the context. actor.context selects what happens to longer episodes.",
        ge=16,
        le=MAX_STAGE,
    )
    max_turn_tokens: int = knob(
        16, "Limits the sampled tokens of a turn.", ge=1, must="be < max_model_len"
    )
    temperature: float = knob(
        1.0, "Sets the sampling temperature. The learner divides logits by it, too.", ge=0.01, le=2
    )
    top_p: float = knob(
        1.0,
        "Samples from all tokens (1). Another value would bias the importance ratio.",
        ge=1,
        le=1,
    )
    top_k: int = knob(
        -1,
        "Samples from all tokens (-1). Another value would bias the importance ratio.",
        ge=-1,
        le=-1,
    )
    kv_cache_gib: int = knob(
        1, "Sets the size of the KV cache of a CPU engine, in GiB.", ge=1, le=10_000
    )
    kv_cache_blocks: int = knob(
        0,
        "Sets the blocks of the KV cache, 32 tokens each on a CPU. 0 uses the available memory.",
        ge=0,
    )
    gpu_memory_frac: float = knob(
        0.85, "Sets the share of the GPU's memory that the engine uses.", gt=0, le=1
    )
    kv_at_update: AtUpdate = knob(
        AtUpdate.KEEP,
        "Selects whether a running turn keeps its KV cache at new weights or recomputes it.",
    )
    prefixes_at_update: AtUpdate = knob(
        AtUpdate.DROP,
        "Selects whether later turns reuse KV cache of older weights or recompute it.",
    )
    tensor_parallel_size: int = knob(1, "Sets the number of devices of one engine.", ge=1, le=64)
    num_gpus: int = knob(
        0,
        "Sets the number of GPUs of all engines. 0 means tensor_parallel_size for each engine.",
        ge=0,
        le=10_000,
    )
    placement: GpuPlacement = knob(
        GpuPlacement.AUTO, "Selects whether engines share GPUs with the learner."
    )
    sleep: int = knob(
        0,
        "Gives the engine's GPU memory to the learner during its step, with placement=colocated "
        "and train.mode=sync. 1 keeps the weights in host memory, 2 keeps nothing. 0 turns it off.",
        ge=0,
        le=2,
    )
    enforce_eager: EnforceEager = knob(
        EnforceEager.AUTO, "Runs the engine without compilation and CUDA graphs."
    )
    engine_args: dict[str, Any] = knob(
        {}, "Passes arguments to vLLM, by the names of its AsyncEngineArgs. See docs/ENGINE.md."
    )
    turn_timeout_s: float = seconds(
        300.0, "Limits the seconds in which the tokens of a turn must be sampled.", gt=0
    )
    episode_timeout_s: float = seconds(
        1800.0,
        "Limits the seconds in which an episode must end.",
        gt=0,
        must="be >= turn_timeout_s",
    )
    env_timeout_s: float = seconds(
        60.0, "Limits the seconds in which the hub must answer a request.", gt=0
    )
    start_timeout_s: float = seconds(
        300.0, "Limits the seconds in which the engine must start.", gt=0
    )
    delivery_window: int = knob(
        256, "Limits the unacknowledged trajectories. Beyond it the actor waits.", ge=1
    )

    @property
    def num_processes(self) -> int:
        """Number of actor processes that the launcher starts."""
        return self.num_actors + self.num_spares

    @property
    def num_engines(self) -> int:
        """Number of engines that the launcher starts."""
        return self.num_processes * self.engines_per_process

    def contradictions(self) -> Iterator[Contradiction]:
        wanted = self.num_engines * self.tensor_parallel_size
        if self.num_gpus not in (0, wanted):
            width = f"actor.tensor_parallel_size={self.tensor_parallel_size}"
            spares = f" + actor.num_spares={self.num_spares}" if self.num_spares else ""
            engines = f"actor.num_actors={self.num_actors}{spares}"
            if self.engines_per_process > 1:
                width = f"actor.engines_per_process={self.engines_per_process} x {width}"
            law = f"must be 0 or ({engines}) x {width} = {wanted}"
            yield "num_gpus", self.num_gpus, law
        blocks_for = self.kv_cache_blocks * LARGEST_BLOCK_TOKENS
        if 0 < blocks_for < (longest := self.max_model_len):
            law = f"too few blocks for one episode of actor.max_model_len={longest} tokens"
            yield "kv_cache_blocks", self.kv_cache_blocks, law
        if self.prefixes_at_update is AtUpdate.KEEP and self.kv_at_update is AtUpdate.DROP:
            law = "must be drop with actor.kv_at_update=drop, which empties the whole cache"
            yield "prefixes_at_update", self.prefixes_at_update.value, law
        yield from contradictions_of_engine_args(self.engine_args)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A whole run. `OmegaConf.structured(RunConfig)` is the schema for all merged values."""

    launcher: Launcher = knob(Launcher.LOCAL, "Selects the launcher of the command `train`.")
    dashboard: bool = knob(False, "Serves the dashboard during `train` on this machine.")
    run: RunSection = field(default_factory=RunSection)
    train: TrainSection = field(default_factory=TrainSection)
    model: ModelSection = field(default_factory=ModelSection)
    machine: MachineSection = field(default_factory=MachineSection)
    tasks: list[TaskSection] = knob([], "Lists the tasks of the training mixture.")
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
        yield from self._contradictions_of_sleep()
        if self.groups.min_size == 1 and self.algorithm.advantage.is_group_relative:
            law = f"must be at least 2 with algorithm.advantage={self.algorithm.advantage.value},"
            yield "groups.min_size", 1, f"{law} which compares the members of a group"

    def _contradictions_of_sleep(self) -> Iterator[Contradiction]:
        """Yield settings under which an engine cannot give its memory to the learner's step."""
        level = self.actor.sleep
        if not level:
            return
        if self.train.mode is not TrainMode.SYNC:
            yield "actor.sleep", level, "needs train.mode=sync: other engines sample during a step"
        if self.actor.placement is not GpuPlacement.COLOCATED:
            yield "actor.sleep", level, "needs actor.placement=colocated: it frees a shared GPU"
        if self.learner.hold_back_steps:
            law = "needs learner.hold_back_steps=0: the engine wakes up with the step's version"
            yield "actor.sleep", level, law
        if self.learner.publish is PublishMode.DELTA:
            yield "learner.publish", "delta", "needs actor.sleep=0: sleep frees the engines' copies"
        if level > 1 and self.learner.lora.rank:
            law = "drops the base weights, which are never sent. Use 1 with learner.lora.rank > 0"
            yield "actor.sleep", level, law

    def _contradictions_of_actions(self) -> Iterator[Contradiction]:
        """Yield a limit on actions that is smaller than the text of one turn."""
        turn_tokens = self.actor.max_turn_tokens
        needed = needed_mib(self.actor.max_turn_tokens)
        if self.envhub.url or needed <= self.envhub.max_action_mib:
            return
        law = f"actor.max_turn_tokens={turn_tokens} can sample {needed} MiB"
        if needed <= MOST_ACTION_MIB:
            text = f"must be at least {needed}: {law}"
            yield "envhub.max_action_mib", self.envhub.max_action_mib, text
        else:
            text = f"can sample {needed} MiB, but an action has at most {MOST_ACTION_MIB} MiB"
            yield "actor.max_turn_tokens", turn_tokens, text


def published_version(cfg: RunConfig, version: int) -> int:
    """Return the version for the engines after `version` steps of the learner.

    Example (learner.hold_back_steps=4, 100 steps): 0 until step 4, 1 after step 5, 100 at the end.
    """
    if version >= cfg.train.num_steps:
        return version
    return max(0, version - cfg.learner.hold_back_steps)

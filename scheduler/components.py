"""Builds the components of the scheduler core from the configuration."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from common.config.run_config import RunConfig, published_version
from common.config.train import TrainMode
from common.ids import actor_name, engine_names
from scheduler.curriculum.catalogue import HubCatalogue
from scheduler.curriculum.curriculum import Curriculum
from scheduler.curriculum.mixture import Mixture
from scheduler.curriculum.sampling import eval_items
from scheduler.curriculum.success import SuccessAverages
from scheduler.curriculum.user_functions import ItemFunction
from scheduler.dispatch.gate import GateState, StalenessThrottle
from scheduler.dispatch.limits import DispatchLimits
from scheduler.dispatch.pace import Pace
from scheduler.dispatch.signal import SignalWatch
from scheduler.episodes.lifecycle import EpisodeLifecycle
from scheduler.episodes.table import GroupState
from scheduler.evaluation import EvalStream, Phase, PhaseGroups
from scheduler.members.members import Members
from scheduler.state import FIXED, VOLATILE

NEVER = -1e9


@dataclass(slots=True)
class RunState:
    """Progress of the run: its versions and its phase."""

    version: int = 0  # Newest version that any learner has reported.
    # Version of the current learner, which may be older than `version` after a restart. -1: no
    # learner has connected yet.
    learner_version: int = -1
    phase: Phase = Phase.EVAL_BEFORE
    is_trained: bool = False  # True if no training step is left.
    num_continued: int = 0  # Number of times that training was continued after its end.
    last_tick: float = field(default=NEVER, metadata=VOLATILE)  # Time of the core's clock.


@dataclass(slots=True, kw_only=True)
class Components:
    """All state of the scheduler core, one owner for each part, and its constant rules."""

    run: RunState
    lifecycle: EpisodeLifecycle
    members: Members
    pace: Pace = field(default_factory=Pace)
    signal: SignalWatch = field(default_factory=SignalWatch)
    limits: DispatchLimits
    curriculum: Curriculum
    success: SuccessAverages = field(default_factory=SuccessAverages)
    stream: EvalStream
    gate: StalenessThrottle = field(metadata=FIXED)
    phases: PhaseGroups = field(metadata=FIXED)
    # Version of the learner -> version that engines must hold.
    needed_version: Callable[[int], int] = field(metadata=FIXED)
    # Seconds from a lease to the end of its episode.
    episode_timeout_s: float = field(metadata=FIXED)
    seed: int = field(metadata=FIXED)  # Seed of the run.
    envs: frozenset[str] = field(metadata=FIXED)  # Environments of the tasks.

    def notice(self, now: float) -> str:
        """Return why training makes no progress although all roles work; "" if it does."""
        is_training = self.run.phase is Phase.TRAIN
        return self.signal.notice(now, self.success.mean) if is_training else ""

    def gate_state(self) -> GateState:
        """Return the current input of the gate.

        Open groups of an environment that no actor can play do not count, up to the groups of a
        step. Otherwise they would stop the other environments.
        """
        num_held = min(self._num_held(), self.gate.max_groups_of_step)
        return GateState(
            version=self.run.version,
            num_open=self.lifecycle.table.num_open - num_held,
            num_ready=self.lifecycle.table.num_ready,
            num_filtered=self.lifecycle.num_filtered,
            max_ahead_steps=self.limits.max_ahead_steps,
            needed_ahead_steps=self.limits.needed_ahead_steps,
        )

    def _num_held(self) -> int:
        """Return the number of open groups that wait for their environment, while others play."""
        absent = self.members.absent_envs()
        if not absent or self.gate.is_sync or absent >= self.envs:
            return 0
        groups = self.lifecycle.table.groups.values()
        return sum(
            group.is_train and group.state is GroupState.OPEN and group.episodes[0].env in absent
            for group in groups
        )


def build_components(cfg: RunConfig, catalogue: HubCatalogue) -> Components:
    """Return the components of a new run."""
    lease_s = cfg.actor.episode_timeout_s + cfg.scheduler.dead_after_s
    silent_after_s = cfg.scheduler.silent_after_s
    stream_items = eval_items(cfg.tasks, catalogue, cfg.eval.stream_items, split=cfg.eval.split)
    phase_items = eval_items(cfg.tasks, catalogue, cfg.eval.num_items, split=cfg.eval.split)
    seed = cfg.run.seed
    group_size = cfg.groups.size
    several = cfg.actor.engines_per_process
    actors = [actor_name(i) for i in range(cfg.actor.num_processes)]
    engines = [name for actor in actors for name in engine_names(actor, several)]
    mixture = Mixture(
        cfg.mixture,
        cfg.tasks,
        catalogue,
        seed=seed,
        group_size=group_size,
        user=ItemFunction(cfg.curriculum, seed) if cfg.curriculum.is_of_user else None,
    )
    curriculum = Curriculum(cfg.horizon, mixture, cfg.tasks, catalogue, cfg.curriculum)
    limits = DispatchLimits(
        scheduler=cfg.scheduler,
        max_lag_steps=cfg.learner.max_lag_steps,
        group_size=group_size,
        is_sync=cfg.train.mode is TrainMode.SYNC,
    )
    return Components(
        run=RunState(is_trained=cfg.train.num_steps == 0),
        lifecycle=EpisodeLifecycle(cfg.groups, cfg.scheduler, lease_s),
        members=Members(
            cfg.scheduler.dead_after_s,
            silent_after_s,
            engines=frozenset(engines) if cfg.actor.num_spares else frozenset(),
            num_playing=cfg.actor.num_actors * several,
        ),
        limits=limits,
        curriculum=curriculum,
        stream=EvalStream(cfg.eval, stream_items, catalogue),
        gate=StalenessThrottle(cfg.groups, cfg.scheduler, cfg.train),
        phases=PhaseGroups(cfg.eval, phase_items, catalogue),
        needed_version=partial(published_version, cfg),
        episode_timeout_s=cfg.actor.episode_timeout_s,
        seed=seed,
        envs=frozenset(task.env for task in cfg.tasks),
    )


def configure(parts: Components, cfg: RunConfig) -> None:
    """Use the values of all live keys in a configuration. The state of the run remains."""
    parts.gate = StalenessThrottle(cfg.groups, cfg.scheduler, cfg.train)
    parts.needed_version = partial(published_version, cfg)
    parts.stream.cfg = cfg.eval
    parts.limits.max_lag_steps = cfg.learner.max_lag_steps
    parts.limits.update(parts.pace, max_ahead_steps=parts.limits.max_ahead_steps)
    parts.curriculum.configure(cfg.horizon, cfg.curriculum)

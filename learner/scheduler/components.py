"""The parts of the scheduler's core, made from the configuration."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from common.config.run_config import RunConfig, TrainMode, published_version
from common.launch.roles import actor_name
from learner.scheduler.curriculum.catalogue import Catalogue
from learner.scheduler.curriculum.curriculum import Curriculum
from learner.scheduler.curriculum.mixture import Mixture
from learner.scheduler.curriculum.sampling import eval_items
from learner.scheduler.curriculum.success import SuccessAverages
from learner.scheduler.dispatch.gate import Gate, GateState
from learner.scheduler.dispatch.limits import Limits
from learner.scheduler.dispatch.pace import Pace
from learner.scheduler.dispatch.signal import SignalWatch
from learner.scheduler.episodes.lifecycle import EpisodeLifecycle
from learner.scheduler.evaluation.eval_stream import EvalStream
from learner.scheduler.evaluation.phases import Phase, PhaseGroups
from learner.scheduler.members.members import Members
from learner.scheduler.state import FIXED, VOLATILE

NEVER = -1e9


@dataclass(slots=True)
class RunState:
    """Where the run stands."""

    version: int = 0  # newest that a learner has reported
    learner_version: int = -1  # of the present learner, which may be behind; -1: none has come
    phase: Phase = Phase.EVAL_BEFORE
    is_trained: bool = False  # there is no further step
    last_tick: float = field(default=NEVER, metadata=VOLATILE)  # core's clock


@dataclass(slots=True, kw_only=True)
class Components:
    """All that the scheduler must remember, each part with its one owner, and its fixed rules."""

    run: RunState
    lifecycle: EpisodeLifecycle
    members: Members
    pace: Pace = field(default_factory=Pace)
    signal: SignalWatch = field(default_factory=SignalWatch)
    limits: Limits
    curriculum: Curriculum
    success: SuccessAverages = field(default_factory=SuccessAverages)
    stream: EvalStream
    gate: Gate = field(metadata=FIXED)
    phases: PhaseGroups = field(metadata=FIXED)
    needed_version: Callable[[int], int] = field(metadata=FIXED)  # of engines, by the learner's
    episode_timeout_s: float = field(metadata=FIXED)  # from a lease until its episode has ended
    seed: int = field(metadata=FIXED)  # of the run

    def notice(self, now: float) -> str:
        """Return why training stands still though everybody works; "" if it does not."""
        is_training = self.run.phase is Phase.TRAIN
        return self.signal.notice(now, self.success.mean) if is_training else ""

    def gate_state(self) -> GateState:
        """Return what the gate sees now."""
        return GateState(
            version=self.run.version,
            num_open=self.lifecycle.table.num_open,
            num_ready=self.lifecycle.table.num_ready,
            num_filtered=self.lifecycle.num_filtered,
            max_ahead_steps=self.limits.max_ahead_steps,
            needed_ahead_steps=self.limits.needed_ahead_steps,
        )


def build_components(cfg: RunConfig, catalogue: Catalogue) -> Components:
    """Return the parts of a run that begins."""
    lease_s = cfg.actor.episode_timeout_s + cfg.scheduler.dead_after_s
    silent_after_s = cfg.scheduler.silent_after_s
    stream_items = eval_items(cfg.tasks, catalogue, cfg.eval.stream_items)
    phase_items = eval_items(cfg.tasks, catalogue, cfg.eval.num_items)
    seed, group_size = cfg.run.seed, cfg.groups.size
    engines = [actor_name(i) for i in range(cfg.actor.num_engines)]
    mixture = Mixture(cfg.mixture, cfg.tasks, catalogue, seed=seed, group_size=group_size)
    curriculum = Curriculum(cfg.horizon, mixture, cfg.tasks, catalogue, cfg.curriculum)
    limits = Limits(
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
            num_playing=cfg.actor.num_actors,
        ),
        limits=limits,
        curriculum=curriculum,
        stream=EvalStream(cfg.eval, stream_items, catalogue),
        gate=Gate(cfg.groups, cfg.scheduler, cfg.train),
        phases=PhaseGroups(cfg.eval, phase_items, catalogue),
        needed_version=partial(published_version, cfg),
        episode_timeout_s=cfg.actor.episode_timeout_s,
        seed=seed,
    )

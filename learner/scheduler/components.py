"""The parts of the scheduler's core, made from the configuration, saved and restored as one."""

from dataclasses import dataclass, field, fields
from typing import Any

from common.config.run_config import RunConfig, TrainMode
from learner.scheduler.curriculum.catalogue import Catalogue
from learner.scheduler.curriculum.curriculum import Curriculum
from learner.scheduler.curriculum.sampling import eval_items
from learner.scheduler.curriculum.success import SuccessAverages
from learner.scheduler.dispatch.limits import Limits
from learner.scheduler.dispatch.pace import Pace
from learner.scheduler.episodes.lifecycle import EpisodeLifecycle
from learner.scheduler.evaluation.eval_stream import EvalStream
from learner.scheduler.evaluation.phases import Phase
from learner.scheduler.members.members import Members
from learner.scheduler.state import VOLATILE, restore, save

NEVER = -1e9
SILENT_BEATS = 5  # heartbeats missed in a row after which nobody waits for an actor's engine


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
    """All that the scheduler must remember, each part with its one owner."""

    run: RunState
    lifecycle: EpisodeLifecycle
    members: Members
    pace: Pace = field(default_factory=Pace)
    limits: Limits
    curriculum: Curriculum
    success: SuccessAverages = field(default_factory=SuccessAverages)
    stream: EvalStream

    def snapshot(self, *, with_volatile: bool) -> dict[str, Any]:
        """Return all parts as JSON."""
        names = [f.name for f in fields(self)]
        return {name: save(getattr(self, name), with_volatile=with_volatile) for name in names}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `snapshot` returned."""
        for f in fields(self):
            restore(getattr(self, f.name), state[f.name])


def build_components(cfg: RunConfig, catalogue: Catalogue) -> Components:
    """Return the parts of a run that begins."""
    lease_s = cfg.actor.episode_timeout_s + cfg.scheduler.dead_after_s
    silent_after_s = SILENT_BEATS * cfg.scheduler.heartbeat_s
    stream_items = eval_items(cfg.tasks, catalogue, cfg.eval.stream_items)
    curriculum = Curriculum(
        cfg.horizon,
        cfg.mixture,
        cfg.tasks,
        catalogue,
        seed=cfg.run.seed,
        group_size=cfg.groups.size,
    )
    limits = Limits(
        scheduler=cfg.scheduler,
        max_lag_steps=cfg.learner.max_lag_steps,
        group_size=cfg.groups.size,
        is_sync=cfg.train.mode is TrainMode.SYNC,
    )
    return Components(
        run=RunState(is_trained=cfg.train.num_steps == 0),
        lifecycle=EpisodeLifecycle(cfg.groups, cfg.scheduler, lease_s),
        members=Members(cfg.scheduler.dead_after_s, silent_after_s),
        limits=limits,
        curriculum=curriculum,
        stream=EvalStream(cfg.eval, stream_items, catalogue),
    )

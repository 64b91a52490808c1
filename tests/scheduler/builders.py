"""Small builders for the tests of the scheduler: a configuration, a hub's catalogue, messages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.config.eval import EvalSection
from common.config.groups import GroupsSection
from common.config.horizon import HorizonKind, HorizonSection
from common.config.run_config import RunConfig
from common.config.scheduler import SchedulerSection
from common.config.tasks import TaskSection
from common.config.train import TrainMode, TrainSection
from common.wire.messages import (
    EndReason,
    EpisodeKind,
    EpisodeOutcome,
    EpisodeSeen,
    GroupArrived,
    Heartbeat,
    Hello,
    Lease,
    LeaseGrant,
    LeaseRequest,
    Outcome,
    Outcomes,
    Progress,
    StepDone,
)
from scheduler.components import build_components
from scheduler.core import SchedulerCore
from scheduler.curriculum.catalogue import HubCatalogue, SubsetEntry
from scheduler.episodes.table import EpisodePhase, EpisodeRecord

CATALOGUE = HubCatalogue(
    envs={
        "maze": {
            "easy": SubsetEntry(num_train=100, num_test=6, max_turns=8),
            "hard": SubsetEntry(num_train=100, num_test=6, max_turns=30),
        }
    }
)


def make_config(
    *,
    mode: TrainMode = TrainMode.ASYNC,
    num_steps: int = 10,
    size: int = 4,
    per_step: int = 2,
    max_ahead_steps: int = 1,
    max_oversample: float = 3.0,
    max_attempts: int = 3,
    max_failed_frac: float = 1.0,
    evaluation: EvalSection | None = None,
) -> RunConfig:
    """A run of two subsets without evaluation, 10 s of silence meaning death."""
    return RunConfig(
        train=TrainSection(mode=mode, num_steps=num_steps),
        tasks=[TaskSection(env="maze", subset="easy"), TaskSection(env="maze", subset="hard")],
        horizon=HorizonSection(kind=HorizonKind.STEPWISE, stages=[5, 10, 20], every_steps=2),
        groups=GroupsSection(
            size=size, per_step=per_step, min_size=2, max_oversample=max_oversample
        ),
        scheduler=SchedulerSection(
            dead_after_s=10.0,
            max_ahead_steps=max_ahead_steps,
            max_attempts=max_attempts,
            max_failed_frac=max_failed_frac,
        ),
        eval=evaluation or EvalSection(before=False, after=False),
    )


@dataclass
class Clock:
    """A clock that the test advances."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Table:
    """A core with a clock, and the roles around it as one-line calls."""

    cfg: RunConfig = field(default_factory=make_config)
    clock: Clock = field(default_factory=Clock)
    core: SchedulerCore = field(init=False)

    def __post_init__(self) -> None:
        self.core = SchedulerCore(build_components(self.cfg, CATALOGUE), clock=self.clock)

    def hello(self, name: str, incarnation: str = "i0", version: int = 0) -> Any:
        return self.core.handle(name, hello_of(name, incarnation, version))

    def ask(self, actor: str, num: int, version: int = 0) -> LeaseGrant:
        return self.core.handle(actor, request_of(actor, num, version=version))

    def beat(self, name: str, running: list[str], version: int = 0) -> Progress:
        return self.core.handle(name, beat_of(name, running, version=version))

    def report(self, **what: Any) -> Progress | None:
        """Send `Outcomes(**what)` from the learner."""
        return self.core.handle("learner", Outcomes(**what))

    def arrive(self, leases: list[Lease], *, end_reason: EndReason = EndReason.DONE) -> None:
        self.report(seen=[seen_of(lease, end_reason=end_reason) for lease in leases])

    def finish_group(self, group_id: str, outcome: Outcome) -> None:
        """The group is ready; every member without outcome gets this one."""
        is_ready = outcome is Outcome.TRAINED
        members = self.core.lifecycle.table.groups[group_id].episodes
        self.report(
            groups=[GroupArrived(group_id=group_id, is_ready=is_ready)],
            outcomes=[outcome_of(e.episode_id, outcome) for e in members if e.settled is None],
        )

    def step(self, version: int, *, is_last: bool = False) -> Progress:
        return self.core.handle("learner", done_of(version, is_last=is_last))

    def counts(self) -> dict[str, Any]:
        return self.core.lifecycle.ledger_report()


def joined(*names: str, cfg: RunConfig | None = None) -> Table:
    """A table with roles that have sent their hello; by default one actor."""
    table = Table(cfg) if cfg else Table()
    for name in names or ("actor-0",):
        table.hello(name)
    return table


def hello_of(name: str, incarnation: str = "i0", version: int = 0) -> Hello:
    role = name.partition("-")[0]
    return Hello(role=role, name=name, incarnation=incarnation, version=version)


def beat_of(name: str, running: list[str], *, version: int = 0) -> Heartbeat:
    role = name.partition("-")[0]
    return Heartbeat(role=role, name=name, version=version, running=running)


def request_of(actor: str, num: int, *, version: int = 0) -> LeaseRequest:
    return LeaseRequest(actor=actor, num_free_slots=num, version=version)


def done_of(version: int, *, is_last: bool = False, ahead: int = 9, **signals: float) -> StepDone:
    return StepDone(version=version, is_last=is_last, max_ahead_steps=ahead, signals=signals)


def catalogue_of(**num_train: int) -> HubCatalogue:
    """An environment "maze" with subsets of so many items."""
    subsets = {
        name: SubsetEntry(num_train=num, num_test=5, max_turns=10)
        for name, num in num_train.items()
    }
    return HubCatalogue(envs={"maze": subsets})


def tasks_of(**weights: float) -> list[TaskSection]:
    """Tasks for `catalogue_of`."""
    return [TaskSection(env="maze", subset=name, weight=w) for name, w in weights.items()]


def ids_in(core: SchedulerCore, *states: EpisodePhase) -> set[str]:
    """Episodes of the table in one of these states."""
    return {e.episode_id for _, e in core.lifecycle.table.episodes() if e.state in states}


def seen_of(lease: Lease, *, end_reason: EndReason = EndReason.DONE) -> EpisodeSeen:
    return EpisodeSeen(
        episode_id=lease.episode_id,
        reward=1.0,
        is_success=True,
        end_reason=end_reason,
        num_turns=3,
        wall_s=1.0,
    )


def outcome_of(episode_id: str, outcome: Outcome, cause: str = "") -> EpisodeOutcome:
    return EpisodeOutcome(episode_id=episode_id, outcome=outcome, cause=cause)


def ids(episodes: Sequence[Lease | EpisodeRecord]) -> list[str]:
    return [episode.episode_id for episode in episodes]


def train_ids(leases: list[Lease]) -> set[str]:
    return {lease.group_id for lease in leases if lease.kind is EpisodeKind.TRAIN}

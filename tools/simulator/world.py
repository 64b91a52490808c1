"""One simulation on virtual time: the scheduler's core, the groups of the learner, and counters."""

from bisect import bisect_right
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial
from random import Random
from typing import Any

from common.config.train import TrainMode
from common.errors import LongstrideError
from common.ids import split_episode_id
from common.wire.messages import (
    EpisodeKind,
    EpisodeOutcome,
    EpisodeSeen,
    GroupArrived,
    Heartbeat,
    Hello,
    Outcome,
    Outcomes,
    Progress,
    StepDone,
    Trajectory,
)
from learner.ingest.buffer import Group, GroupAssembly, seen_of
from scheduler.components import build_components
from scheduler.core import SchedulerCore
from tools.simulator.config import SimulatorConfig
from tools.simulator.fleet import Arrival, EventQueue, Fleet
from tools.simulator.workload import Workload, catalogue_of, for_simulation, synthetic_trajectory

WARM_UP_FRAC = 0.1  # Fraction of the steps that rates leave out.
LEARNER = "learner-0"
MANY_ACTORS = 16  # With more actors, heartbeats are as rare as `dead_after_s` allows.
MAX_HOURS = 24.0 * 365  # Limit for a run that makes no progress.


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The prediction of one simulation. Rates leave the first steps out."""

    mode: str
    num_actors: int
    simulated_h: float
    num_steps: int
    num_episodes: int  # Number of delivered episodes.
    steps_per_h: float
    episodes_per_s: float
    trained_per_h: float  # Episodes per hour.
    lag_mean: float  # Mean over sampled tokens.
    lag_counts: dict[int, int]  # Lag of an episode's oldest turn at consumption, with counts.
    learner_wait_frac: float  # Fraction of the time.
    actor_idle_frac: float  # Fraction of the time without any episode.
    filtered_frac: float  # Fraction of the settled episodes, like the next two.
    stale_frac: float
    failed_frac: float
    num_reissued: int
    num_deaths: int
    short_batch_frac: float  # Fraction of the steps.
    stopped_by: str  # Error that would have ended a real run, or "".

    def to_json(self) -> dict[str, Any]:
        counts = {str(lag): num for lag, num in sorted(self.lag_counts.items())}
        return {**asdict(self), "lag_counts": counts}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """The counters of one simulated step."""

    ended_s: float
    wait_s: float
    num_arrived: int  # Episodes since the start.
    num_trained: int  # Episodes of this step.
    lag_sum: float  # Sum over the sampled tokens of this step.
    num_sampled_tokens: int


@dataclass(slots=True)
class SimulationStatistics:
    """The counters of a whole simulation."""

    published_s: list[float] = field(default_factory=list)  # Publication time of version i + 1.
    steps: list[SimulatedStep] = field(default_factory=list)
    lags: Counter[int] = field(default_factory=Counter)
    num_arrived: int = 0
    num_short: int = 0  # Number of incomplete batches.

    def mean_version(self, version: int, started_s: float, ended_s: float) -> float:
        """Return the time-averaged version over an episode that started with `version`."""
        last = bisect_right(self.published_s, ended_s)
        if last <= version or ended_s <= started_s:
            return float(version)
        passed = sum(ended_s - each for each in self.published_s[version:last])
        return version + passed / (ended_s - started_s)

    def add_step(self, step: SimulatedStep) -> None:
        self.published_s.append(step.ended_s)
        self.steps.append(step)

    def rates(self) -> dict[str, float]:
        """Return the means over the steps after the warm-up; all 0 with fewer than two."""
        first = max(0, int(WARM_UP_FRAC * len(self.steps)))
        if len(self.steps) - first < 2:
            names = ("steps_per_h", "episodes_per_s", "trained_per_h", "lag_mean")
            return dict.fromkeys((*names, "learner_wait_frac"), 0.0)
        before = self.steps[first]
        later = self.steps[first + 1 :]
        seconds = later[-1].ended_s - before.ended_s
        num_sampled = sum(step.num_sampled_tokens for step in later)
        return {
            "steps_per_h": 3600.0 * len(later) / seconds,
            "episodes_per_s": (later[-1].num_arrived - before.num_arrived) / seconds,
            "trained_per_h": 3600.0 * sum(step.num_trained for step in later) / seconds,
            "lag_mean": sum(step.lag_sum for step in later) / max(num_sampled, 1),
            "learner_wait_frac": sum(step.wait_s for step in later) / seconds,
        }


class SimulatedRun:
    """A run on virtual time. It does not simulate evaluation before and after, nor checkpoints.

    Example: an episode ends, reaches the learner `delivery_s` later and completes its group. The
    waiting learner then trains for the time that the workload gives. Afterwards the version
    increases, the scheduler receives the step, and the refused actors repeat their requests.
    """

    def __init__(self, cfg: SimulatorConfig, workload: Workload, *, max_steps: int = 0) -> None:
        """Build everything. `max_steps`: stop there as in a longer run; 0: as configured."""
        self._cfg = for_simulation(cfg, is_endless=max_steps > 0)
        self._max_steps = max_steps or self._cfg.train.num_steps
        self._workload = workload
        self._events = EventQueue()
        self._rng = Random(cfg.run.seed)
        self._is_sync = cfg.train.mode is TrainMode.SYNC
        components = build_components(self._cfg, catalogue_of(self._cfg))
        self._core = SchedulerCore(components, clock=self._events)
        hello = Hello(role="learner", name=LEARNER, incarnation="life-1", version=0)
        self._core.handle(LEARNER, hello)
        self._table = GroupAssembly(
            cfg.groups, cfg.algorithm, has_signal=_has_signal, is_lockstep=self._is_sync
        )
        self._fleet = Fleet(
            self._cfg,
            self._core,
            workload,
            self._events,
            rng=self._rng,
            deliver=self._deliver,
            note_waiting=self._note_waiting,
        )
        self._tally = SimulationStatistics()
        self._arrivals: list[Arrival] = []
        self._journal: dict[str, Arrival] = {}  # Accepted episodes that are not consumed yet.
        self._known: set[str] = set()
        self._lag_bounds: dict[tuple[str, int], int] = {}
        self._is_training = False
        self._waits_since_s = 0.0
        self._stopped_by = ""
        many = len(self._fleet.actors) > MANY_ACTORS
        scheduler = cfg.scheduler
        self._heartbeat_s = scheduler.dead_after_s / 4 if many else scheduler.heartbeat_s
        self._report_step(signals={})
        self._events.at(self._heartbeat_s, self._exchange_heartbeats)

    def run(self) -> Prediction:
        """Simulate until the limit of hours, steps or episodes is reached."""
        simulator = self._cfg.simulator
        end_s = 3600.0 * (simulator.hours or MAX_HOURS)
        try:
            self._events.run_until(end_s, is_over=self._is_over)
        except LongstrideError as error:
            self._stopped_by = str(error)
        return self._prediction()

    def _is_over(self) -> bool:
        is_full = self._tally.num_arrived >= self._cfg.simulator.max_episodes
        return is_full or self._core.version >= self._max_steps

    # --- the learner's intake -----------------------------------------------------------------

    def _note_waiting(self, actor: str) -> None:
        """Report that an actor waits for work."""
        self._core.members.refuse(actor, self._events(), has_some=False)

    def _deliver(self, arrival: Arrival) -> None:
        """Deliver an episode to the learner after the time of a transfer."""
        if not self._arrivals:
            self._events.at(self._cfg.simulator.delivery_s, self._receive_arrivals)
        self._arrivals.append(arrival)

    def _receive_arrivals(self) -> None:
        """Add the delivered episodes to their groups, and report them to the scheduler."""
        arrivals = self._arrivals
        self._arrivals = []
        arrived: list[EpisodeSeen] = []
        outcomes: list[EpisodeOutcome] = []
        groups: list[GroupArrived] = []
        num_known = 0
        for arrival in arrivals:
            lease = arrival.lease
            if lease.episode_id in self._known:
                num_known += 1
                continue
            trajectory = _trajectory(arrival)
            arrived.append(seen_of(trajectory))
            is_train = lease.kind is EpisodeKind.TRAIN
            if not is_train and arrival.end_reason.is_infrastructure_failure:
                continue
            self._known.add(lease.episode_id)
            self._tally.num_arrived += 1
            if is_train:
                self._journal[lease.episode_id] = arrival
                settled, arrived_groups = self._table.add(trajectory)
                outcomes += settled
                groups += arrived_groups
        self._report(
            Outcomes(seen=arrived, outcomes=outcomes, groups=groups, num_duplicates=num_known)
        )
        self._maybe_train()
        if any(not group.is_ready for group in groups):
            self._fleet.wake()

    def _report(self, report: Outcomes) -> None:
        """Report outcomes to the scheduler, and forget the settled episodes."""
        for group in report.groups:
            self._fleet.forget(group.group_id)
        for outcome in report.outcomes:
            self._journal.pop(outcome.episode_id, None)
        self._report_to_core(report)

    def _report_to_core(self, message: Outcomes | StepDone | Heartbeat) -> Progress | None:
        """Send the scheduler a message, and apply its decision on the next batch."""
        progress: Progress | None = self._core.handle(LEARNER, message)
        if progress is not None:
            self._table.decide(progress.learner_version, progress.num_batch_groups)
        return progress

    # --- the learner's steps ------------------------------------------------------------------

    def _maybe_train(self) -> None:
        """Begin a step if enough groups are ready and none is in progress."""
        while not self._is_training and self._table.is_batch_ready(self._core.version):
            groups, stale = self._table.take(
                self._core.version,
                max_lag_steps=self._cfg.learner.max_lag_steps,
                in_order=self._is_sync,
                lag_bounds=self._lag_bounds,
            )
            if stale:
                self._report(Outcomes(outcomes=stale))
                self._fleet.wake()
            if groups:
                self._train(groups)

    def _train(self, groups: list[Group]) -> None:
        """Begin a step on these groups, and schedule its end."""
        self._is_training = True
        wait_s = self._events.now_s - self._waits_since_s
        version = self._core.version
        ids = [member.episode_id for group in groups for member in group.members]
        self._tally.num_short += len(groups) < self._cfg.groups.per_step
        arrivals = [self._journal[episode_id] for episode_id in ids]
        lag_sum = 0.0
        num_sampled = 0
        for arrival in arrivals:
            self._tally.lags[version - arrival.version] += 1
            mean = self._tally.mean_version(arrival.version, arrival.started_s, arrival.ended_s)
            lag_sum += arrival.play.num_sampled_tokens * (version - mean)
            num_sampled += arrival.play.num_sampled_tokens
        num_tokens = sum(arrival.play.num_tokens for arrival in arrivals)
        busy_s = self._workload.step_s(self._rng, num_tokens, version=version)
        self._events.at(busy_s, self._publish, ids, wait_s, busy_s, lag_sum, num_sampled)

    def _publish(
        self, ids: list[str], wait_s: float, busy_s: float, lag_sum: float, num_sampled: int
    ) -> None:
        """End a step: its version is published."""
        self._is_training = False
        self._waits_since_s = self._events.now_s
        step = SimulatedStep(
            ended_s=self._events.now_s,
            wait_s=wait_s,
            num_arrived=self._tally.num_arrived,
            num_trained=len(ids),
            lag_sum=lag_sum,
            num_sampled_tokens=num_sampled,
        )
        self._tally.add_step(step)
        self._fleet.version += 1
        trained = partial(EpisodeOutcome, outcome=Outcome.TRAINED, cause="")
        self._report(Outcomes(outcomes=[trained(episode_id=each) for each in ids]))
        self._report_step(signals={"busy_s": busy_s, "wait_s": wait_s})
        self._fleet.wake()
        self._maybe_train()

    def _report_step(self, *, signals: dict[str, float]) -> None:
        """Report a step to the scheduler."""
        cfg = self._cfg
        version = self._fleet.version
        self._report_to_core(
            StepDone(
                version=version,
                is_last=version >= cfg.train.num_steps,
                max_ahead_steps=cfg.scheduler.max_ahead_steps,
                signals=signals,
            )
        )

    # --- heartbeats -------------------------------------------------------------------------

    def _exchange_heartbeats(self) -> None:
        """Process the heartbeats of all live actors at once, and detect the dead ones."""
        now = self._events()
        members = self._core.members
        for name in self._fleet.beat_and_list():
            members.touch(members.by_name[name], now)
        self._core.tick()
        version = self._core.version
        running = self._table.open_ids
        progress = self._report_to_core(
            Heartbeat(role="learner", name=LEARNER, version=version, running=running)
        )
        assert progress is not None, "a heartbeat is always answered"
        bounds = progress.lag_bounds
        self._lag_bounds = {(each.env, each.horizon): each.max_lag_steps for each in bounds}
        for episode_id in progress.revoked:
            outcomes, groups = self._table.give_up(*split_episode_id(episode_id))
            if outcomes or groups:
                self._report(Outcomes(outcomes=outcomes, groups=groups))
        self._maybe_train()
        self._fleet.wake()
        self._events.at(self._heartbeat_s, self._exchange_heartbeats)

    def _prediction(self) -> Prediction:
        """Return the figures of the simulation so far."""
        tally = self._tally
        fleet = self._fleet
        account = self._core.lifecycle.ledger_report()
        settled = max(1, sum(account[outcome.value] for outcome in Outcome))
        now_s = max(self._events.now_s, 1e-9)
        return Prediction(
            mode=self._cfg.train.mode.value,
            num_actors=len(fleet.actors),
            simulated_h=now_s / 3600.0,
            num_steps=len(tally.steps),
            num_episodes=tally.num_arrived,
            lag_counts=dict(tally.lags),
            actor_idle_frac=max(0.0, 1.0 - fleet.busy_s() / (now_s * len(fleet.actors))),
            filtered_frac=account[Outcome.FILTERED.value] / settled,
            stale_frac=account[Outcome.STALE.value] / settled,
            failed_frac=account[Outcome.FAILED.value] / settled,
            num_reissued=account["reissued"],
            num_deaths=fleet.num_deaths,
            short_batch_frac=tally.num_short / max(1, len(tally.steps)),
            stopped_by=self._stopped_by,
            **tally.rates(),
        )


def _has_signal(members: list[Trajectory]) -> bool:
    """Return whether the rewards of a group differ."""
    return len({member.reward for member in members}) > 1


def _trajectory(arrival: Arrival) -> Trajectory:
    """Return the fields that group assembly and scheduler need. The arrays hold one token."""
    return synthetic_trajectory(
        [0],
        [1],
        version=arrival.version,
        end_reason=arrival.end_reason,
        reward=arrival.play.worth,
        is_success=arrival.play.is_success,
        num_turns=arrival.play.num_turns,
        wall_s=arrival.ended_s - arrival.started_s,
        **arrival.lease.identity(),
    )

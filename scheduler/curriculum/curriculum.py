"""The curriculum: chooses the item, the distance and the horizon of each training group."""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from common.config.curriculum import CurriculumSection, DistanceGatedSection
from common.config.horizon import (
    GatedSection,
    HorizonKind,
    HorizonPolicy,
    HorizonSection,
    HorizonUnit,
)
from common.config.tasks import TaskSection
from common.ids import distance_of
from common.wire.messages import EndReason, EpisodeKind, EpisodeSeen, PolicyKind
from scheduler.curriculum.catalogue import HubCatalogue
from scheduler.curriculum.mixture import Mixture
from scheduler.curriculum.sampling import Item, member_seed
from scheduler.curriculum.success import UNKNOWN, StepSeen
from scheduler.curriculum.user_functions import HorizonFunction
from scheduler.episodes.table import EpisodeRecord, GroupRecord
from scheduler.state import CONFIGURED, FIXED


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizonStamp:
    """Horizon and stage that a group gets when it opens."""

    horizon: int  # Most turns of an episode.
    stage: int  # 0-based index of the last stage reached.


def horizon_at(policy: HorizonPolicy, version: int) -> HorizonStamp:
    """Return the horizon while step `version + 1` is trained.

    fixed: always the last stage.
    stepwise: optimizer steps 1..D use the first stage, D+1..2D the second, and so on. The last
        stage has no end.
    linear: first + (last - first) * version / over_steps, rounded down; after `over_steps` the
        last stage.

    Raises:
        ValueError: a horizon that depends on results is no function of the version.

    Source: ScalingInter-RL, arXiv 2509.08755. There every step is on-policy. Here the version at
    which a group opens decides, so an episode may end after its stage did.
    """
    stages = policy.stages
    last = len(stages) - 1
    match policy.kind:
        case HorizonKind.FIXED:
            return HorizonStamp(horizon=stages[last], stage=last)
        case HorizonKind.STEPWISE:
            stage = min(version // policy.every_steps, last)
            return HorizonStamp(horizon=stages[stage], stage=stage)
        case HorizonKind.LINEAR:
            done = min(version, policy.over_steps)
            horizon = stages[0] + (stages[last] - stages[0]) * done // policy.over_steps
            reached = sum(turns <= horizon for turns in stages)
            return HorizonStamp(horizon=horizon, stage=reached - 1)
        case _:
            raise ValueError(
                "a gated horizon depends on the results of the run, not on the version alone"
            )


logger = logging.getLogger(__name__)

MAX_MOVES = 100  # Number of decisions that are kept.


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStatistics:
    """The measurements that a decision is based on. UNKNOWN where there are too few steps."""

    truncated_frac: float
    # Gain of success over the window: the slope of its fitted line times its span.
    gain: float | None
    entropy_ratio: float  # Mean entropy of the last steps over that of the window before.
    ess_frac: float
    success: float  # Mean success over the window.


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One change of stage with the measurements that caused it."""

    version: int
    from_stage: int
    to_stage: int
    cause: str  # "truncated_and_flat" | "solved" | "entropy" | "ess"
    truncated_frac: float
    gain: float | None
    entropy_ratio: float
    ess_frac: float
    success: float = UNKNOWN


@dataclass(slots=True)
class GatedHorizon:
    """Decides after every step whether to change the stage.

    Example (window_steps 40, min_steps 40): stage 0 begins at version 0. At version 40 the horizon
    has cut 35% of the episodes of the last 40 steps, and success rose by 0.01: stage 1 begins. At
    version 50 the entropy of the last five steps is a quarter of its earlier value: stage 0 begins
    again, until version 90 at least. A gated distance follows the same rules, but grows when
    success is high enough.
    """

    policy: HorizonPolicy = field(metadata=FIXED)
    env: str = field(metadata=FIXED)
    unit: str = field(default="turns", metadata=FIXED)
    steps: deque[StepSeen] = field(init=False)  # The most recent steps.
    since: int = 0  # Version at which the stage began.
    stage: int = 0
    moves: deque[Move] = field(default_factory=partial(deque[Move], maxlen=MAX_MOVES))
    num_episodes: int = 0  # Episodes of the current stage since the last step.
    num_solved: int = 0
    num_truncated: int = 0

    def __post_init__(self) -> None:
        size = self.policy.gated.window_steps + self.policy.gated.backoff_steps
        self.steps = deque(maxlen=size)

    @property
    def stamp(self) -> HorizonStamp:
        """Horizon and stage for a group that opens now."""
        return HorizonStamp(horizon=self.policy.stages[self.stage], stage=self.stage)

    def configure(self, policy: HorizonPolicy, version: int) -> None:
        """Use another schedule of the same kind; a stage whose value changes begins anew."""
        before = self.stamp
        self.policy = policy
        self.after_restore()
        if self.stamp != before:
            self.since = version
            self.num_episodes = self.num_solved = self.num_truncated = 0

    def counts(self, stage: int, version: int) -> bool:
        """Return whether episodes of a group count, given its stage and its version."""
        # `since` excludes groups of an earlier visit to the same stage.
        return stage == self.stage and version >= self.since

    def see(self, *, is_success: bool, is_truncated: bool) -> None:
        """Count an episode of the current stage."""
        self.num_episodes += 1
        self.num_solved += is_success
        self.num_truncated += is_truncated

    def end_step(self, version: int, *, entropy: float, ess_frac: float) -> None:
        """Process one step with the episodes counted since the last one."""
        seen = StepSeen(
            version=version,
            num_episodes=self.num_episodes,
            num_solved=self.num_solved,
            num_truncated=self.num_truncated,
            entropy=entropy,
            ess_frac=ess_frac,
        )
        self.num_episodes = self.num_solved = self.num_truncated = 0
        self.step(seen)

    def step(self, seen: StepSeen) -> None:
        """Process one step, and move by at most one stage."""
        self.steps.append(seen)
        measured = self.measure()
        is_far = isinstance(self.policy.gated, DistanceGatedSection)
        cause = self._backs_off(measured)
        to_stage = self.stage - 1
        if not cause and self._advances(measured, seen.version):
            cause = "solved" if is_far else "truncated_and_flat"
            to_stage = self.stage + 1
        if not cause:
            return
        move = Move(
            version=seen.version,
            cause=cause,
            from_stage=self.stage,
            to_stage=to_stage,
            **asdict(measured),
        )
        logger.warning(
            "%s moved env=%s version=%d stage=%d to=%d %s=%d cause=%s truncated=%.3f"
            " success=%.3f gain=%s entropy_ratio=%.3f ess=%.3f after_steps=%d",
            "distance" if is_far else "horizon",
            self.env,
            seen.version,
            self.stage,
            to_stage,
            self.unit,
            self.policy.stages[to_stage],
            cause,
            move.truncated_frac,
            move.success,
            _signal_text(move.gain),
            move.entropy_ratio,
            move.ess_frac,
            seen.version - self.since,
        )
        self.moves.append(move)
        self.stage = to_stage
        self.since = seen.version

    def measure(self) -> WindowStatistics:
        """Return the measurements over the last steps."""
        window = self._own(self.policy.gated.window_steps)
        num = sum(step.num_episodes for step in window)
        cut = sum(step.num_truncated for step in window)
        solved = sum(step.num_solved for step in window)
        recent = self._own(self.policy.gated.backoff_steps)
        earlier = list(self.steps)[: len(self.steps) - len(recent)]
        before = earlier[-self.policy.gated.window_steps :]
        entropy = _mean_entropy(recent)
        entropy_before = _mean_entropy(before)
        is_known = entropy != UNKNOWN and entropy_before > 0 and len(before) >= len(recent)
        ess = [step.ess_frac for step in recent if step.ess_frac != UNKNOWN]
        return WindowStatistics(
            truncated_frac=cut / num if num else UNKNOWN,
            gain=success_gain(window),
            entropy_ratio=entropy / entropy_before if is_known else UNKNOWN,
            ess_frac=sum(ess) / len(ess) if ess else UNKNOWN,
            success=solved / num if num else UNKNOWN,
        )

    def _own(self, num_steps: int) -> list[StepSeen]:
        """Return the last `num_steps` steps of the current stage, none if there are fewer."""
        steps = [step for step in self.steps if step.version > self.since]
        return steps[-num_steps:] if len(steps) >= num_steps else []

    def _backs_off(self, measured: WindowStatistics) -> str:
        """Return the reason to go back one stage, "" if there is none."""
        if self.stage == 0:
            return ""
        if 0 <= measured.entropy_ratio < self.policy.gated.entropy_frac:
            return "entropy"
        return "ess" if 0 <= measured.ess_frac < self.policy.gated.ess_frac else ""

    def _advances(self, measured: WindowStatistics, version: int) -> bool:
        """Return whether the schedule moves to the next stage."""
        if self.stage == len(self.policy.stages) - 1:
            return False
        gate = self.policy.gated
        if version - self.since < gate.min_steps or measured.gain is None:
            return False
        if isinstance(gate, DistanceGatedSection):
            return measured.success >= gate.min_success
        assert isinstance(gate, GatedSection)
        is_cut = measured.truncated_frac >= gate.min_truncated_frac
        return is_cut and abs(measured.gain) <= gate.max_gain

    def report(self) -> dict[str, Any]:
        """Return the current measurements and the decisions so far."""
        return {
            "since_version": self.since,
            **asdict(self.measure()),
            "moves": [asdict(move) for move in self.moves],
        }

    def after_restore(self) -> None:
        """Move to the last stage if the configuration no longer has the restored one."""
        self.stage = min(self.stage, len(self.policy.stages) - 1)


@dataclass(slots=True)
class UserHorizon(GatedHorizon):
    """A horizon that a function of the user chooses after each step.

    Every episode counts, since an episode may have had an earlier horizon.
    """

    function: HorizonFunction | None = None
    horizon: int = 0

    def __post_init__(self) -> None:
        GatedHorizon.__post_init__(self)  # `super()` fails in a dataclass with slots.
        self._choose(0)

    @property
    def stamp(self) -> HorizonStamp:
        """Horizon and last stage reached for a group that opens now."""
        reached = sum(stage <= self.horizon for stage in self.policy.stages)
        return HorizonStamp(horizon=self.horizon, stage=max(0, reached - 1))

    def counts(self, stage: int, version: int) -> bool:
        """Return True: every episode counts."""
        return True

    def step(self, seen: StepSeen) -> None:
        """Process one step, and let the function choose."""
        self.steps.append(seen)
        before = self.horizon
        self._choose(seen.version)
        if self.horizon != before:
            self.since = seen.version
            text = "horizon moved env=%s version=%d from=%d to=%d by=%s"
            logger.info(text, self.env, seen.version, before, self.horizon, self.policy.kind)

    def _choose(self, version: int) -> None:
        """Call the function. Raises: ConfigError: its result is refused."""
        assert self.function is not None
        self.horizon = self.function.choose(
            self.env, self.policy, version=version, horizon=self.horizon, steps=list(self.steps)
        )

    def after_restore(self) -> None:
        """Keep the horizon within the stages of the configuration."""
        stages = self.policy.stages
        self.horizon = min(max(self.horizon, stages[0]), stages[-1])


def success_gain(steps: Sequence[StepSeen]) -> float | None:
    """Return the gain of success over the steps: slope of the fitted line times their span.

    The line is the least-squares fit of success over versions. Each step is weighted by its number
    of episodes. None if fewer than two steps have any.
    """
    seen = [step for step in steps if step.num_episodes]
    num = sum(step.num_episodes for step in seen)
    if len(seen) < 2:
        return None
    mean_x = sum(step.version * step.num_episodes for step in seen) / num
    mean_y = sum(step.num_solved for step in seen) / num
    spread = sum(step.num_episodes * (step.version - mean_x) ** 2 for step in seen)
    joint = sum(
        (step.version - mean_x) * (step.num_solved - mean_y * step.num_episodes) for step in seen
    )
    return joint / spread * (steps[-1].version - steps[0].version)


def _mean_entropy(steps: Sequence[StepSeen]) -> float:
    """Return the mean entropy of the steps that report one."""
    entropies = [step.entropy for step in steps if step.entropy != UNKNOWN]
    return sum(entropies) / len(entropies) if entropies else UNKNOWN


def _signal_text(value: float | None) -> str:
    return "?" if value is None else f"{value:+.3f}"


MAX_DRAWS = 64  # Most draws of an item until its environment is not shunned.
FAR = 1 << 40  # Larger than any group number.


@dataclass(init=False, slots=True)
class Curriculum:
    """Chooses items and horizons for new groups. Open groups keep their stamp.

    The stamp of a group is its horizon with its stage, and its distance with its stage.

    Example: a group opens at version 99 of a stepwise horizon [10, 20] with 100 steps a stage. Its
    stamp is horizon 10. At version 100 new groups get horizon 20. The first group continues with 10
    turns, and a gated horizon does not count its episodes for the new stage. Distances work in the
    same way: an open group keeps its item.
    """

    mixture: Mixture
    # Gated horizons by the name of their policy.
    gated: dict[str, GatedHorizon] = field(metadata=CONFIGURED)
    # Gated distances by environment.
    gated_distance: dict[str, GatedHorizon] = field(metadata=CONFIGURED)
    version: int = 0  # Last trained step that was processed.
    _opening: int = field(metadata=FIXED)  # Version at which the next group is opened.
    _horizon: HorizonSection = field(metadata=FIXED)
    _policies: dict[str, HorizonPolicy] = field(metadata=FIXED)
    _distances: dict[str, HorizonPolicy] = field(metadata=FIXED)
    _catalogue: HubCatalogue = field(metadata=FIXED)

    def __init__(
        self,
        horizon: HorizonSection,
        mixture: Mixture,
        tasks: list[TaskSection],
        catalogue: HubCatalogue,
        section: CurriculumSection | None = None,
    ) -> None:
        """Start at the first item and the first stage."""
        self.mixture = mixture
        self.version = 0
        self._horizon = horizon
        self._catalogue = catalogue
        names = sorted({horizon.name_of(task.env, task.subset) for task in tasks})
        section = section or CurriculumSection()
        self._policies = {name: section.effective(horizon.policy(name)) for name in names}
        far = {task.env for task in tasks if task.distance and section.has_distance}
        self._distances = {env: section.distance.policy for env in sorted(far)}
        self.gated = _gated_schedules(self._policies, horizon.unit, horizon)
        self.gated_distance = _gated_schedules(self._distances, HorizonUnit.TURNS, horizon)

    def configure(self, horizon: HorizonSection, section: CurriculumSection) -> None:
        """Use other stages and durations of the horizons. Open groups keep their stamps.

        A gated horizon keeps its stage, if there is still such a stage. If the stage has another
        horizon now, the stage begins anew, and the success of the items is forgotten.
        """
        before = {name: self._stamp(name, self.version) for name in self._policies}
        self._horizon = horizon
        self._policies = {name: section.effective(horizon.policy(name)) for name in self._policies}
        for name, gated in self.gated.items():
            gated.configure(self._policies[name], self.version)
        for name, stamp in before.items():
            if self._stamp(name, self.version) != stamp:
                self._forget_items(name)

    def _forget_items(self, name: str) -> None:
        """Forget the success of the items of a schedule, see `HorizonSection.name_of`."""
        tasks = [each.task for each in self.mixture.tasks.values()]
        subsets = {
            f"{task.env}/{task.subset}"
            for task in tasks
            if self._horizon.name_of(task.env, task.subset) == name
        }
        self.mixture.forget_items(subsets)

    def make_group(
        self, number: int, *, version: int, now: float, shunned: Sequence[str] = ()
    ) -> GroupRecord:
        """Return training group `number`, opened at this version.

        Each number must be requested once, in order. An item of a `shunned` environment is drawn
        again, with numbers that no group will have.
        """

        def bound_of(env: str) -> int:
            return self._distance(env, version).horizon

        item = self.mixture.item(number, bound_of, version=version, shunned=shunned)
        for again in range(1, MAX_DRAWS):
            if item.env not in shunned or self.mixture.user is not None:
                break
            item = self.mixture.item(number + again * FAR, bound_of)
        stamp = self.stamp(item.env, version, subset=item.subset)
        max_turns = self._catalogue.entry(item.env, item.subset).max_turns
        is_in_turns = self._horizon.unit is HorizonUnit.TURNS
        far = distance_of(item.subset)
        group_id = f"g{number:07d}"
        episodes = [
            item.episode(
                group_id,
                member,
                seed=member_seed(self.mixture.seed, number, member),
                horizon=min(stamp.horizon, max_turns) if is_in_turns else stamp.horizon,
                unit=self._horizon.unit,
                max_turns=0 if is_in_turns else max_turns,
            )
            for member in range(self.mixture.group_size)
        ]
        return GroupRecord(
            group_id=group_id,
            number=number,
            kind=EpisodeKind.TRAIN,
            policy=PolicyKind.MODEL,
            horizon_stage=stamp.stage,
            distance=far[2] if far else 0,
            distance_stage=self._distance(item.env, version).stage if far else 0,
            opened_at_version=version,
            episodes=episodes,
            opened_at=now,
        )

    def stamp(self, env: str, version: int, *, subset: str = "") -> HorizonStamp:
        """Return the horizon stamp of a group that opens at this version."""
        return self._stamp(self._horizon.name_of(env, subset), version)

    def _stamp(self, name: str, version: int) -> HorizonStamp:
        """Return the stamp of a schedule at this version."""
        gated = self.gated.get(name)
        return gated.stamp if gated else horizon_at(self._policies[name], version)

    def _distance(self, env: str, version: int) -> HorizonStamp:
        """Return the bound on the distance of an environment's goals, 0 if there is none."""
        if env not in self._distances:
            return HorizonStamp(horizon=0, stage=0)
        gated = self.gated_distance.get(env)
        return gated.stamp if gated else horizon_at(self._distances[env], version)

    def see(self, seen: EpisodeSeen, group: GroupRecord, episode: EpisodeRecord) -> None:
        """Count a training episode whose result depends on the policy; call it once for each."""
        item = Item(env=episode.env, subset=episode.subset, item_id=episode.item_id)
        self.mixture.see(seen, item)
        max_turns = self._catalogue.entry(episode.env, episode.subset).max_turns
        num = seen.num_turns if episode.max_turns else episode.horizon
        # A longer horizon would not help an episode that the environment itself cut.
        is_truncated = seen.end_reason is EndReason.HORIZON and num < max_turns
        name = self._horizon.name_of(episode.env, episode.subset)
        gates = [(self.gated.get(name), group.horizon_stage)]
        if group.distance:
            gates.append((self.gated_distance.get(episode.env), group.distance_stage))
        for gated, stage in gates:
            if gated and gated.counts(stage, group.opened_at_version):
                gated.see(is_success=seen.is_success, is_truncated=is_truncated)

    def step(self, version: int, signals: dict[str, float]) -> None:
        """Record that step `version` is trained; a step that was recorded before is ignored."""
        if version <= self.version:
            return
        before = {name: self._stamp(name, self.version).stage for name in self._policies}
        self.version = version
        entropy = signals.get("entropy", UNKNOWN)
        ess_frac = signals.get("ess_frac", UNKNOWN)
        for gated in (*self.gated.values(), *self.gated_distance.values()):
            gated.end_step(version, entropy=entropy, ess_frac=ess_frac)
        for name, stage in before.items():
            if self._stamp(name, version).stage != stage:
                self._forget_items(name)

    def report(self, version: int) -> dict[str, Any]:
        """Return the horizons and distances in force, the decisions so far, the mixture."""
        return {
            "unit": self._horizon.unit.value,
            "horizons": {
                name: _report_of(
                    "horizon", policy, self._stamp(name, version), self.gated.get(name)
                )
                for name, policy in self._policies.items()
            },
            "distances": {
                env: _report_of(
                    "distance", policy, self._distance(env, version), self.gated_distance.get(env)
                )
                for env, policy in self._distances.items()
            },
            "mixture": self.mixture.report(),
        }


def _gated_schedules(
    policies: dict[str, HorizonPolicy], unit: HorizonUnit, horizon: HorizonSection
) -> dict[str, GatedHorizon]:
    """Return the schedules that depend on results, by their names."""
    gated: dict[str, GatedHorizon] = {}
    for name, policy in policies.items():
        if policy.is_of_user:
            function = HorizonFunction(policy.kind, horizon)
            gated[name] = UserHorizon(policy, name, unit.value, function=function)
        elif policy.kind is HorizonKind.GATED:
            gated[name] = GatedHorizon(policy, name, unit.value)
    return gated


def _report_of(
    what: str, policy: HorizonPolicy, stamp: HorizonStamp, gated: GatedHorizon | None
) -> dict[str, Any]:
    """Return the stage and, if it is gated, the measurements of a schedule."""
    report = {"kind": str(policy.kind), what: stamp.horizon, "stage": stamp.stage}
    return report | (gated.report() if gated else {})

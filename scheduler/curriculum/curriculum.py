"""The curriculum: chooses the item, the distance and the horizon of each training group."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.config.curriculum import CurriculumSection
from common.config.horizon import HorizonKind, HorizonPolicy, HorizonSection, HorizonUnit
from common.config.tasks import TaskSection
from common.ids import distance_of
from common.wire.messages import EndReason, EpisodeKind, EpisodeSeen, PolicyKind
from scheduler.curriculum.catalogue import HubCatalogue
from scheduler.curriculum.gated import UNKNOWN, GatedHorizon
from scheduler.curriculum.horizon import HorizonStamp, horizon_at
from scheduler.curriculum.mixture import Mixture
from scheduler.curriculum.sampling import Item, member_seed
from scheduler.episodes.table import EpisodeRecord, GroupRecord
from scheduler.state import CONFIGURED, FIXED

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
        self._policies = {name: section.held(horizon.policy(name)) for name in names}
        far = {task.env for task in tasks if task.distance and section.has_distance}
        self._distances = {env: section.distance.policy for env in sorted(far)}
        self.gated = _gated_schedules(self._policies, horizon.unit)
        self.gated_distance = _gated_schedules(self._distances, HorizonUnit.TURNS)

    def configure(self, horizon: HorizonSection, section: CurriculumSection) -> None:
        """Use other stages and durations of the horizons. Open groups keep their stamps.

        A gated horizon keeps its stage, if there is still such a stage. If the stage has another
        horizon now, the stage begins anew, and the success of the items is forgotten.
        """
        before = {name: self._stamp(name, self.version) for name in self._policies}
        self._horizon = horizon
        self._policies = {name: section.held(horizon.policy(name)) for name in self._policies}
        for name, gated in self.gated.items():
            gated.configure(self._policies[name], self.version)
        for name, stamp in before.items():
            if self._stamp(name, self.version) != stamp:
                self.mixture.forget_items(name)

    def make_group(
        self, number: int, *, version: int, now: float, shunned: Sequence[str] = ()
    ) -> GroupRecord:
        """Return training group `number`, opened at this version.

        Each number must be requested once, in order. An item of a `shunned` environment is drawn
        again, with numbers that no group will have.
        """

        def bound_of(env: str) -> int:
            return self._distance(env, version).horizon

        item = self.mixture.item(number, bound_of)
        for again in range(1, MAX_DRAWS):
            if item.env not in shunned:
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
        for gated, stage in gates:  # `since` excludes groups of an earlier visit to the same stage.
            if gated and stage == gated.stage and group.opened_at_version >= gated.since:
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
                self.mixture.forget_items(name)

    def report(self, version: int) -> dict[str, Any]:
        """Return the horizons and distances in force, the decisions so far, the mixture."""
        return {
            "unit": self._horizon.unit.value,
            "horizons": {
                name: _report_of("horizon", each, self._stamp(name, version), self.gated.get(name))
                for name, each in self._policies.items()
            },
            "distances": {
                env: _report_of(
                    "distance", each, self._distance(env, version), self.gated_distance.get(env)
                )
                for env, each in self._distances.items()
            },
            "mixture": self.mixture.report(),
        }


def _gated_schedules(
    policies: dict[str, HorizonPolicy], unit: HorizonUnit
) -> dict[str, GatedHorizon]:
    """Return the gated schedules by their names."""
    gated = {name: each for name, each in policies.items() if each.kind is HorizonKind.GATED}
    return {name: GatedHorizon(each, name, unit.value) for name, each in gated.items()}


def _report_of(
    what: str, policy: HorizonPolicy, stamp: HorizonStamp, gated: GatedHorizon | None
) -> dict[str, Any]:
    """Return the stage and, if it is gated, the measurements of a schedule."""
    report = {"kind": policy.kind.value, what: stamp.horizon, "stage": stamp.stage}
    return report | (gated.report() if gated else {})

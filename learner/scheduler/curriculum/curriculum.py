"""The curriculum: which item comes next, and how long its episodes may be."""

from dataclasses import dataclass, field
from typing import Any

from common.config.curriculum import HorizonKind, HorizonPolicy, HorizonSection, TaskSection
from common.wire.messages import EndReason, EpisodeKind, EpisodeSeen, PolicyKind
from learner.scheduler.curriculum.catalogue import Catalogue
from learner.scheduler.curriculum.gated import UNKNOWN, GatedHorizon
from learner.scheduler.curriculum.horizon import HorizonStamp, horizon_at
from learner.scheduler.curriculum.mixture import Mixture
from learner.scheduler.curriculum.sampling import Item, member_seed
from learner.scheduler.episodes.table import EpisodeRecord, GroupRecord
from learner.scheduler.state import CONFIGURED, FIXED


@dataclass(init=False, slots=True)
class Curriculum:
    """Items and horizons of the groups to come. What is open keeps the stamp it has.

    Example: a group opened at version 99 of a stepwise horizon [10, 20] with 100 steps a stage is
    stamped 10. At version 100 new groups are stamped 20; the first one plays on with 10 turns,
    and its episodes do not count towards what a gated horizon measures of its present stage.
    """

    mixture: Mixture
    gated: dict[str, GatedHorizon] = field(metadata=CONFIGURED)  # by the name of its policy
    version: int = 0  # of the last step that was taken in
    _horizon: HorizonSection = field(metadata=FIXED)
    _policies: dict[str, HorizonPolicy] = field(metadata=FIXED)
    _catalogue: Catalogue = field(metadata=FIXED)

    def __init__(
        self,
        horizon: HorizonSection,
        mixture: Mixture,
        tasks: list[TaskSection],
        catalogue: Catalogue,
    ) -> None:
        """Start at the first item and the first stage."""
        self.mixture = mixture
        self.version = 0
        self._horizon, self._catalogue = horizon, catalogue
        names = sorted({horizon.name_of(task.env, task.subset) for task in tasks})
        self._policies = {name: horizon.policy(name) for name in names}
        self.gated = {
            name: GatedHorizon(policy, name)
            for name, policy in self._policies.items()
            if policy.kind is HorizonKind.GATED
        }

    def make_group(self, number: int, *, version: int, now: float) -> GroupRecord:
        """Return training group `number`, opened at this version; asked for in order, once each."""
        item = self.mixture.item(number)
        stamp = self.stamp(item.env, version, subset=item.subset)
        max_turns = self._catalogue.entry(item.env, item.subset).max_turns
        group_id = f"g{number:07d}"
        episodes = [
            item.episode(
                group_id,
                member,
                seed=member_seed(self.mixture.seed, number, member),
                horizon=min(stamp.horizon, max_turns),
            )
            for member in range(self.mixture.group_size)
        ]
        return GroupRecord(
            group_id=group_id,
            number=number,
            kind=EpisodeKind.TRAIN,
            policy=PolicyKind.MODEL,
            horizon_stage=stamp.stage,
            opened_at_version=version,
            episodes=episodes,
            opened_at=now,
        )

    def stamp(self, env: str, version: int, *, subset: str = "") -> HorizonStamp:
        """Return what a group of this environment and subset is stamped with at this version."""
        return self._stamp(self._horizon.name_of(env, subset), version)

    def _stamp(self, name: str, version: int) -> HorizonStamp:
        gated = self.gated.get(name)
        return gated.stamp if gated else horizon_at(self._policies[name], version)

    def see(self, seen: EpisodeSeen, group: GroupRecord, episode: EpisodeRecord) -> None:
        """Count a training episode that says something about the policy; once each."""
        item = Item(env=episode.env, subset=episode.subset, item_id=episode.item_id)
        self.mixture.see(seen, item)
        gated = self.gated.get(self._horizon.name_of(episode.env, episode.subset))
        if gated is None or group.horizon_stage != gated.stage:
            return
        if group.opened_at_version < gated.since:  # an earlier visit to the stage
            return
        max_turns = self._catalogue.entry(episode.env, episode.subset).max_turns
        is_truncated = seen.end_reason is EndReason.HORIZON and episode.horizon < max_turns
        gated.see(is_success=seen.is_success, is_truncated=is_truncated)

    def step(self, version: int, signals: dict[str, float]) -> None:
        """Take in that step `version` is trained; a step that is known is ignored."""
        if version <= self.version:
            return
        before = {name: self._stamp(name, self.version).stage for name in self._policies}
        self.version = version
        entropy, ess_frac = signals.get("entropy", UNKNOWN), signals.get("ess_frac", UNKNOWN)
        for gated in self.gated.values():
            gated.end_step(version, entropy=entropy, ess_frac=ess_frac)
        for name, stage in before.items():
            if self._stamp(name, version).stage != stage:
                self.mixture.forget_items(name)

    def report(self, version: int) -> dict[str, Any]:
        """Return every environment's and subset's horizon, the decisions so far, the mixture."""
        return {
            "horizons": {name: self._report_of(name, version) for name in self._policies},
            "mixture": self.mixture.report(),
        }

    def _report_of(self, name: str, version: int) -> dict[str, Any]:
        stamp = self._stamp(name, version)
        gated = self.gated.get(name)
        return {
            "kind": self._policies[name].kind.value,
            "horizon": stamp.horizon,
            "stage": stamp.stage,
            **(gated.report() if gated else {}),
        }

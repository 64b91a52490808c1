"""The curriculum: which item comes next, and how long its episodes may be."""

from typing import Any

from common.config.curriculum import HorizonKind
from common.config.run_config import RunConfig
from common.wire.messages import EndReason, EpisodeSeen
from learner.scheduler.curriculum.catalogue import Catalogue
from learner.scheduler.curriculum.gated import UNKNOWN, GatedHorizon, StepSeen
from learner.scheduler.curriculum.horizon import HorizonStamp, horizon_at
from learner.scheduler.curriculum.mixture import Mixture
from learner.scheduler.curriculum.sampling import Item
from learner.scheduler.episodes.table import Episode, Group


class Curriculum:
    """Items and horizons of the groups to come. What is open keeps the stamp it has.

    Example: a group opened at version 99 of a stepwise horizon [10, 20] with 100 steps a stage is
    stamped 10. At version 100 new groups are stamped 20; the first one plays on with 10 turns,
    and its episodes do not count towards what a gated horizon measures of its present stage.
    """

    def __init__(self, cfg: RunConfig, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._name_of = cfg.horizon.name_of
        names = sorted({self._name_of(task.env, task.subset) for task in cfg.tasks})
        self._policies = {name: cfg.horizon.policy(name) for name in names}
        self._gated = {
            name: GatedHorizon(policy, name)
            for name, policy in self._policies.items()
            if policy.kind is HorizonKind.GATED
        }
        self._tallies = {name: [0, 0, 0] for name in self._gated}  # episodes, solved, truncated
        self._version = 0  # of the last step that was taken in
        self.mixture = Mixture(
            cfg.mixture, cfg.tasks, catalogue, seed=cfg.run.seed, group_size=cfg.groups.size
        )

    def item(self, number: int) -> Item:
        """Return the item of group `number`; each number is asked for once, in order."""
        return self.mixture.item(number)

    def stamp(self, env: str, version: int, *, subset: str = "") -> HorizonStamp:
        """Return what a group of this environment and subset is stamped with at this version."""
        return self._stamp(self._name_of(env, subset), version)

    def _stamp(self, name: str, version: int) -> HorizonStamp:
        gated = self._gated.get(name)
        return gated.stamp if gated else horizon_at(self._policies[name], version)

    def see(self, seen: EpisodeSeen, group: Group, episode: Episode) -> None:
        """Count a training episode that says something about the policy; once each."""
        self.mixture.see(seen, episode.item_id)
        name = self._name_of(episode.env, episode.subset)
        gated = self._gated.get(name)
        if gated is None or not gated.is_present(group.horizon_stage, group.opened_at_version):
            return
        max_turns = self._catalogue.entry(episode.env, episode.subset).max_turns
        is_cut = seen.end_reason is EndReason.HORIZON and episode.horizon < max_turns
        tally = self._tallies[name]
        tally[0] += 1
        tally[1] += seen.is_success
        tally[2] += is_cut

    def step(self, version: int, signals: dict[str, float]) -> None:
        """Take in that step `version` is trained; a step that is known is ignored."""
        if version <= self._version:
            return
        before = {name: self._stamp(name, self._version).stage for name in self._policies}
        self._version = version
        for name, gated in self._gated.items():
            num, num_solved, num_truncated = self._tallies[name]
            self._tallies[name] = [0, 0, 0]
            gated.step(
                StepSeen(
                    version=version,
                    num_episodes=num,
                    num_solved=num_solved,
                    num_truncated=num_truncated,
                    entropy=signals.get("entropy", UNKNOWN),
                    ess_frac=signals.get("ess_frac", UNKNOWN),
                )
            )
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
        gated = self._gated.get(name)
        return {
            "kind": self._policies[name].kind.value,
            "horizon": stamp.horizon,
            "stage": stamp.stage,
            **(gated.report() if gated else {}),
        }

    def snapshot(self) -> dict[str, Any]:
        """Return the exact state as JSON."""
        return {
            "version": self._version,
            "tallies": {name: list(tally) for name, tally in self._tallies.items()},
            "gated": {name: gated.snapshot() for name, gated in self._gated.items()},
            "mixture": self.mixture.snapshot(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the state of `snapshot`; a new environment starts at its first stage."""
        self._version = state["version"]
        for name, gated in self._gated.items():
            self._tallies[name] = list(state["tallies"].get(name, [0, 0, 0]))
            if name in state["gated"]:
                gated.restore(state["gated"][name])
        self.mixture.restore(state["mixture"])

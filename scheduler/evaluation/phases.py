"""The phases of a run, and the held-out groups of the evaluations before and after training."""

from dataclasses import dataclass
from enum import StrEnum

from common.config.eval import EvalSection
from common.wire.messages import EpisodeKind, PolicyKind
from scheduler.curriculum.catalogue import HubCatalogue
from scheduler.curriculum.sampling import Item, hash_words
from scheduler.episodes.table import GroupRecord, GroupTable


class Phase(StrEnum):
    """Phases in their order; the configuration may switch off some of them."""

    EVAL_BEFORE = "eval_before"
    TRAIN = "train"
    EVAL_AFTER = "eval_after"
    DONE = "done"

    @property
    def is_eval(self) -> bool:
        """True if only evaluation episodes are granted."""
        return self in (Phase.EVAL_BEFORE, Phase.EVAL_AFTER)


NEXT_PHASE = {
    Phase.EVAL_BEFORE: Phase.TRAIN,
    Phase.TRAIN: Phase.EVAL_AFTER,
    Phase.EVAL_AFTER: Phase.DONE,
}


@dataclass(frozen=True, slots=True)
class PhaseGroups:
    """The evaluations before and after training: one group for each policy that plays."""

    cfg: EvalSection
    items: list[Item]  # Held-out items.
    catalogue: HubCatalogue

    def make(self, phase: Phase, *, number: int, version: int) -> list[GroupRecord]:
        """Return the groups to open when a phase begins; none outside the evaluations.

        Args:
            number: how often training was continued after its end, so that ids are not reused.
        """
        ids = self.ids(phase, number)
        return [
            heldout_group(ids[policy], policy, self.items, self.catalogue, version=version)
            for policy in self._policies(phase)
        ]

    def ids(self, phase: Phase, number: int) -> dict[PolicyKind, str]:
        """Return the ids of the groups of a phase, by policy; `number` as in `make`."""
        name = phase.value.replace("_", "-")
        if phase is Phase.EVAL_AFTER and number:
            name = f"{name}-{number + 1}"
        return {policy: f"{name}-{policy.value}" for policy in self._policies(phase)}

    def are_open(self, phase: Phase, table: GroupTable, *, number: int) -> bool:
        """True while a group of this phase is being played."""
        return any(group_id in table.groups for group_id in self.ids(phase, number).values())

    def progress(self, phase: Phase, table: GroupTable, *, number: int) -> dict[str, int]:
        """Return how many episodes of a phase are done, and how many there are."""
        ids = self.ids(phase, number).values()
        groups = [table.groups.get(group_id) for group_id in ids]
        num_left = sum(len(g.episodes) - g.num_settled for g in groups if g is not None)
        num_total = len(ids) * len(self.items)
        return {"num_done": num_total - num_left, "num_total": num_total}

    def _policies(self, phase: Phase) -> list[PolicyKind]:
        """Return the policies that play the held-out items in a phase."""
        if not self.items:
            return []
        if phase is Phase.EVAL_BEFORE and self.cfg.before:
            baselines = [PolicyKind.RANDOM_VALID, PolicyKind.EXPERT] if self.cfg.baselines else []
            return [PolicyKind.MODEL, *baselines]
        return [PolicyKind.MODEL] if phase is Phase.EVAL_AFTER and self.cfg.after else []


def heldout_group(
    group_id: str, policy: PolicyKind, items: list[Item], catalogue: HubCatalogue, *, version: int
) -> GroupRecord:
    """Return all held-out items as one group, at the full horizon of each subset.

    The sampling seeds depend only on the item's place. So evaluations before and after training,
    and of runs with different training seeds, differ only in the policy.
    """
    episodes = [
        item.episode(
            group_id,
            i,
            seed=hash_words("eval", i) >> 33,
            horizon=catalogue.entry(item.env, item.subset).max_turns,
        )
        for i, item in enumerate(items)
    ]
    return GroupRecord(
        group_id=group_id,
        number=-1,
        kind=EpisodeKind.EVAL,
        policy=policy,
        horizon_stage=0,
        opened_at_version=version,
        episodes=episodes,
    )

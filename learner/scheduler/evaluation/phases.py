"""The phases of a run, and the groups of held-out episodes of the phases before and after."""

from enum import StrEnum

from common.config.evaluation import EvalSection
from common.wire.messages import EpisodeKind, PolicyKind
from learner.scheduler.curriculum.catalogue import Catalogue
from learner.scheduler.curriculum.sampling import Item, hash_words
from learner.scheduler.episodes.table import Episode, Group, episode_id_of


class Phase(StrEnum):
    """In this order; what the configuration switches off is skipped."""

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


def eval_policies(cfg: EvalSection, phase: Phase) -> list[PolicyKind]:
    """Return who plays the held-out items in a phase; nobody outside the evaluations."""
    if phase is Phase.EVAL_BEFORE and cfg.before:
        baselines = [PolicyKind.RANDOM_VALID, PolicyKind.EXPERT] if cfg.baselines else []
        return [PolicyKind.MODEL, *baselines]
    if phase is Phase.EVAL_AFTER and cfg.after:
        return [PolicyKind.MODEL]
    return []


def eval_group_id(phase: Phase, policy: PolicyKind) -> str:
    """Return like "eval-before-model"."""
    return f"{phase.value.replace('_', '-')}-{policy.value}"


def eval_group(
    phase: Phase, policy: PolicyKind, items: list[Item], catalogue: Catalogue, *, version: int
) -> Group:
    """Return all held-out items as one group, as `heldout_group` does."""
    group_id = eval_group_id(phase, policy)
    return heldout_group(group_id, policy, items, catalogue, version=version)


def heldout_group(
    group_id: str, policy: PolicyKind, items: list[Item], catalogue: Catalogue, *, version: int
) -> Group:
    """Return all held-out items as one group, at the full horizon of each subset.

    The sampling seeds depend on the item's place only, so before and after, and runs of different
    training seeds, differ in the policy alone.
    """
    episodes = [
        Episode(
            episode_id=episode_id_of(group_id, i),
            member=i,
            env=item.env,
            subset=item.subset,
            item_id=item.item_id,
            seed=hash_words("eval", i) >> 33,
            horizon=catalogue.entry(item.env, item.subset).max_turns,
        )
        for i, item in enumerate(items)
    ]
    return Group(
        group_id=group_id,
        number=-1,
        kind=EpisodeKind.EVAL,
        policy=policy,
        horizon_stage=0,
        opened_at_version=version,
        episodes=episodes,
    )

"""The phases of a run, and its evaluations on held-out items: before, after and during training.

During training actors play held-out items every few steps beside training episodes. Such an
evaluation belongs to the version of the step that opened it. Its episodes are granted before new
training episodes, and only to engines that hold at least that version. Training does not wait for
an evaluation, so weights change while it is played. A later episode may start on a newer version,
and a long one may end on a newer one. Each evaluation records the versions at which its episodes
started, and the version at which its last episode arrived. The journal has the version of every
token.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from common.config.eval import EvalSection
from common.wire.messages import EpisodeKind, PolicyKind
from scheduler.curriculum.catalogue import HubCatalogue
from scheduler.curriculum.sampling import Item, hash_words
from scheduler.curriculum.success import SuccessAverages
from scheduler.episodes.ledger import EVALUATED
from scheduler.episodes.table import GroupRecord, GroupTable
from scheduler.state import FIXED

logger = logging.getLogger(__name__)

# Number of evaluations kept; above it, every second one of the older half is dropped.
MAX_EVALS = 1_000


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


@dataclass(slots=True, kw_only=True)
class StreamEval:
    """One evaluation, opened at `step`, and its results so far."""

    step: int  # Optimizer step that opened the evaluation; equal to its version.
    group_id: str
    first_started_at: int | None = None  # Oldest engine version at the start of an episode.
    last_started_at: int | None = None  # Newest engine version at the start of an episode.
    # Version when the last episode arrived; None: the evaluation is not finished.
    ended_at: int | None = None
    num: int = 0  # Episodes whose result depends on the policy.
    num_failed: int = 0  # Episodes that failed by infrastructure.
    success: float | None = None  # Mean over `num` episodes; None without any.
    reward: float | None = None


@dataclass(slots=True)
class EvalStream:
    """The evaluations during training: at most one is open at a time.

    Example (every 10 steps): step 10 opens eval-step-10-model. At step 20 it is not finished, so no
    evaluation is opened and `num_skipped` is incremented. Step 30 opens the next one.
    """

    cfg: EvalSection = field(metadata=FIXED)
    items: list[Item] = field(metadata=FIXED)  # Held-out items.
    catalogue: HubCatalogue = field(metadata=FIXED)
    # Only the last one may be open.
    evals: list[StreamEval] = field(default_factory=list[StreamEval])
    num_skipped: int = 0
    last_step: int = 0  # Last step for which `due` decided.

    @property
    def is_open(self) -> bool:
        """True while an evaluation is being played."""
        return bool(self.evals) and self.evals[-1].ended_at is None

    def due(self, step: int, *, is_last: bool) -> GroupRecord | None:
        """Return the group to open after `step`; None if there is none.

        A step that is trained again after a restart of the learner is not evaluated again.

        Args:
            is_last: training is over; with `eval.after` the last version is evaluated in that
                phase.
        """
        every = self.cfg.every_steps
        if every == 0 or not self.items or step <= self.last_step:
            return None
        self.last_step = step
        if step % every != 0 or (is_last and self.cfg.after):
            return None
        if self.is_open:
            self.num_skipped += 1
            logger.warning(
                "skipped evaluation step=%d unfinished=%s", step, self.evals[-1].group_id
            )
            return None
        group_id = f"eval-step-{step}-{PolicyKind.MODEL.value}"
        self.evals.append(StreamEval(step=step, group_id=group_id))
        return heldout_group(group_id, PolicyKind.MODEL, self.items, self.catalogue, version=step)

    def granted(self, group: GroupRecord, *, version: int) -> None:
        """Record the version at which an episode of the open evaluation starts."""
        if not self.is_open or group.group_id != self.evals[-1].group_id:
            return
        entry = self.evals[-1]
        first = entry.first_started_at
        last = entry.last_started_at
        entry.first_started_at = version if first is None else min(first, version)
        entry.last_started_at = version if last is None else max(last, version)

    def collect(self, table: GroupTable, averages: SuccessAverages, *, version: int) -> None:
        """Close the open evaluation once all its episodes have their outcome."""
        if not self.is_open or (entry := self.evals[-1]).group_id in table.groups:
            return
        outcomes = [settled.outcome for settled in table.closed.get(entry.group_id, [])]
        seen: Mapping[str, float] = averages.eval_report().get(entry.group_id, {})
        entry.ended_at = version
        entry.num = int(seen.get("num", 0))
        entry.num_failed = sum(outcome != EVALUATED for outcome in outcomes)
        entry.success, entry.reward = seen.get("success"), seen.get("reward")
        logger.info(
            "evaluated step=%d success=%s episodes=%d failed=%d started_at=%s..%s ended_at=%d",
            entry.step,
            entry.success,
            entry.num,
            entry.num_failed,
            entry.first_started_at,
            entry.last_started_at,
            version,
        )
        if len(self.evals) > MAX_EVALS:
            older = slice(0, MAX_EVALS // 2, 2)
            averages.evaluation.forget(each.group_id for each in self.evals[older])
            del self.evals[older]

    def report(self) -> dict[str, Any]:
        """Return all evaluations, for status.json and eval.jsonl."""
        return {"evals": [asdict(each) for each in self.evals], "num_skipped": self.num_skipped}


def eval_lines(report: Mapping[str, Any]) -> str:
    """Return the text of eval.jsonl: a line for each evaluation that has ended."""
    ended = [evaluation for evaluation in report["evals"] if evaluation["ended_at"] is not None]
    names = {"success": "eval/success", "reward": "eval/reward"}
    return "".join(
        json.dumps({names.get(key, key): value for key, value in evaluation.items()}) + "\n"
        for evaluation in ended
    )

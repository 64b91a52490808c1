"""Evaluation while training goes on: every so many steps held-out items are played beside it.

An evaluation belongs to the version of the step that opened it. Its episodes are granted before
new training episodes, and only to engines that hold at least that version. Nobody waits for it:
weights go on changing, so a later episode starts on, and a long one goes on with, a newer version.
What each evaluation saw is kept with it: the versions that its episodes started at, and the
version when its last one was in. Every token's own version is in the journal.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from common.config.run_config import RunConfig
from common.wire.messages import PolicyKind
from learner.scheduler.curriculum.averages import SuccessAverages
from learner.scheduler.curriculum.catalogue import Catalogue
from learner.scheduler.curriculum.sampling import eval_items
from learner.scheduler.episodes.ledger import EVALUATED
from learner.scheduler.episodes.table import Group, GroupTable
from learner.scheduler.evaluation.phases import heldout_group

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class StreamEval:
    """One evaluation: opened at `step`, and what has become of it so far."""

    step: int  # and version: that of the optimizer step that opened it
    group_id: str
    first_started_at: int | None = None  # versions of the engines when episodes started
    last_started_at: int | None = None
    ended_at: int | None = None  # version when all its episodes were in; None: still played
    num: int = 0  # episodes that say something about the policy
    num_failed: int = 0  # by infrastructure
    success: float | None = None  # mean over `num`; None without any
    reward: float | None = None


class EvalStream:
    """Which evaluations there are beside training: at most one at a time.

    Example (every 10 steps): step 10 opens eval-step-10-model. It is still played when step 20 is
    done, so none is opened there and `num_skipped` says so; step 30 opens the next one.
    """

    def __init__(self, cfg: RunConfig, catalogue: Catalogue) -> None:
        self._cfg = cfg
        self._catalogue = catalogue
        self._items = eval_items(cfg.tasks, catalogue, cfg.eval.stream_items)
        self._last_step = 0  # that was looked at
        self.evals: list[StreamEval] = []  # in the order of opening; the last may be open
        self.num_skipped = 0

    @property
    def is_open(self) -> bool:
        """True while an evaluation is being played."""
        return bool(self.evals) and self.evals[-1].ended_at is None

    def due(self, step: int, *, is_last: bool) -> Group | None:
        """Return the group to open now that `step` is done; None if there is nothing to open.

        A step that is trained again after a restart of the learner is not evaluated again.

        Args:
            is_last: training is over; with `eval.after` the last version is evaluated there.
        """
        every = self._cfg.eval.every_steps
        if every == 0 or not self._items or step <= self._last_step:
            return None
        self._last_step = step
        if step % every != 0 or (is_last and self._cfg.eval.after):
            return None
        if self.is_open:
            self.num_skipped += 1
            logger.warning("evaluation skipped step=%d open=%s", step, self.evals[-1].group_id)
            return None
        group_id = f"eval-step-{step}-{PolicyKind.MODEL.value}"
        self.evals.append(StreamEval(step=step, group_id=group_id))
        return heldout_group(group_id, PolicyKind.MODEL, self._items, self._catalogue, version=step)

    def granted(self, group: Group, *, version: int) -> None:
        """Note at which version an episode starts, if it is of the open evaluation."""
        if not self.is_open or group.group_id != self.evals[-1].group_id:
            return
        entry = self.evals[-1]
        first, last = entry.first_started_at, entry.last_started_at
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

    def report(self) -> dict[str, Any]:
        """Return all evaluations, for status.json and eval.jsonl."""
        return {"evals": [asdict(each) for each in self.evals], "num_skipped": self.num_skipped}

    def snapshot(self) -> dict[str, Any]:
        """Return the exact state as JSON."""
        return {**self.report(), "last_step": self._last_step}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over the state of `snapshot`."""
        self.evals = [StreamEval(**each) for each in state["evals"]]
        self.num_skipped = state["num_skipped"]
        self._last_step = state["last_step"]


def eval_lines(report: Mapping[str, Any]) -> str:
    """Return the text of eval.jsonl: a line for each evaluation that has ended."""
    ended = [each for each in report["evals"] if each["ended_at"] is not None]
    names = {"success": "eval/success", "reward": "eval/reward"}
    return "".join(
        json.dumps({names.get(key, key): value for key, value in each.items()}) + "\n"
        for each in ended
    )

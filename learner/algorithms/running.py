"""A running mean of each item as its baseline, for groups of one episode.

    R - running mean of the item

This version tracks plain decayed means. The estimate of a rare item is shrunk towards the mean of
its task.

Source: SPO (one rollout per prompt, a tabular tracker of each prompt's value), arXiv:2509.13232;
a moving average per task and seat, SPIRAL (role-conditioned advantages), arXiv:2506.24119.
"""
# torch's type stubs lack numpy's element types:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from common.config.algorithm import AlgorithmSection, CreditLevel
from common.config.learner import LearnerSection
from common.formats.seats import role_of
from common.wire.messages import Trajectory
from learner.algorithms.interface import Estimator, GroupAdvantages, tensor_of
from learner.algorithms.rewards import credit_formula, turn_credit, turn_penalty_formula

if TYPE_CHECKING:
    from torch import Tensor

MAX_ITEMS = 100_000  # Largest number of stored items; other items use the mean of their task.

Tally = tuple[float, float]  # Decayed number of credits, and their decayed sum.


@dataclass(slots=True)
class RunningBaseline:
    """Decayed means of credits by item and by task. Deterministic in the order of the batches.

    Example (memory .5, prior 1): the first two episodes of a task have rewards 1 and 0, and each is
    the baseline of the other. An unseen item of the task then has the expected reward .5. An item
    whose only episode had reward 1 has (1 + 1 * .5) / (1 + 1) = .75.
    """

    # Least recently seen item first.
    items: dict[str, Tally] = field(default_factory=dict[str, Tally])
    tasks: dict[str, Tally] = field(default_factory=dict[str, Tally])

    def advantages(
        self,
        credits: Sequence[float],
        items: Sequence[str],
        tasks: Sequence[str],
        *,
        memory: float,
        prior: float,
    ) -> np.ndarray:
        """Return credits minus their earlier expectations, [entry] float32; update the means.

        An entry is an episode, or one turn of it. The expectation for a new task is the mean of its
        other entries in the batch; a single entry gets advantage 0. So a baseline never includes
        the credit from which it is subtracted.

        Args:
            credits: [entry].
            items: [entry] names of the items, unique across tasks.
            tasks: [entry]. A task has one entry per episode.
            memory: decay of an older credit, [0, 1]: per later credit of the item, and per later
                batch of the task.
            prior: weight of the task's mean, in credits of an item; > 0.
        """
        numbers = Counter(tasks)
        totals = dict.fromkeys(tasks, 0.0)
        for credit, task in zip(credits, tasks, strict=True):
            totals[task] += credit
        expected: list[float] = []
        for credit, item, task in zip(credits, items, tasks, strict=True):
            number, total = self.tasks.get(task, (0.0, 0.0))
            if number > 0.0:
                own_number, own_total = self.items.get(item, (0.0, 0.0))
                expected.append((own_total + prior * total / number) / (own_number + prior))
            elif numbers[task] > 1:
                expected.append((totals[task] - credit) / (numbers[task] - 1))
            else:
                expected.append(credit)
        for credit, item in zip(credits, items, strict=True):
            self._remember(self.items, item, 1, credit, memory)
        for task, number in numbers.items():
            self._remember(self.tasks, task, number, totals[task], memory)
        while len(self.items) > MAX_ITEMS:
            del self.items[next(iter(self.items))]
        return np.array(credits, dtype=np.float32) - np.array(expected, dtype=np.float32)

    @staticmethod
    def _remember(
        table: dict[str, Tally], key: str, num_new: int, new_total: float, memory: float
    ) -> None:
        """Add credits to a decayed mean, and mark its key as the newest."""
        number, total = table.pop(key, (0.0, 0.0))
        table[key] = (memory * number + num_new, memory * total + new_total)

    def state_dict(self) -> dict[str, dict[str, Tally]]:
        """Return the state that a resumed run needs for equal expectations, for JSON."""
        return {"items": dict(self.items), "tasks": dict(self.tasks)}

    def load_state_dict(self, state: dict[str, dict[str, Tally]]) -> None:
        self.items = {key: (number, total) for key, (number, total) in state["items"].items()}
        self.tasks = {key: (number, total) for key, (number, total) in state["tasks"].items()}


def running_advantages(
    rewards: Tensor, members: Sequence[Trajectory], cfg: AlgorithmSection, baseline: RunningBaseline
) -> GroupAdvantages:
    """Return the advantages of a batch against running means of their items, which it updates.

    A mean belongs to one seat and one opponent: they decide an outcome, and the policy does not
    choose them. The return or the penalty of a turn is compared with those of turns of the same
    number.
    """
    advantages = rewards.new_zeros(rewards.shape)
    credit = turn_credit(members, cfg)
    is_of_turns = cfg.reward_level is CreditLevel.TURN
    if not is_of_turns and members:
        outcomes = [outcome[None] for outcome in rewards.numpy()]
        less = _less_running_mean(outcomes, members, cfg, baseline, "")
        advantages = tensor_of(np.concatenate(less))
    if credit is None:
        return advantages, None
    kind = "turn" if is_of_turns else "penalty of turn"
    return advantages, _less_running_mean(credit, members, cfg, baseline, kind)


def _less_running_mean(
    credit: list[np.ndarray],
    members: Sequence[Trajectory],
    cfg: AlgorithmSection,
    baseline: RunningBaseline,
    kind: str,
) -> list[np.ndarray]:
    """Return credit minus its running means, which this call updates.

    Args:
        credit: for each member [entry] float32.
        kind: names the entries, which are numbered turns; "": one entry for the episode.
    """
    items: list[str] = []
    tasks: list[str] = []
    for entries, member in zip(credit, members, strict=True):
        role = role_of(member.metrics)
        for number in range(len(entries)):
            where = (f" in seat {role}" if role else "") + (f" {kind} {number}" if kind else "")
            items.append(f"{member.env}/{member.item_id}{where}")
            tasks.append(f"{member.env}/{member.item_id.rpartition('-')[0]}{where}")
    less = baseline.advantages(
        [float(entry) for entries in credit for entry in entries],
        items,
        tasks,
        memory=cfg.running_memory,
        prior=cfg.running_prior,
    )
    return np.split(less, np.cumsum([len(entries) for entries in credit])[:-1]) if credit else []


def formula(cfg: AlgorithmSection, learner: LearnerSection) -> str:
    means = f"memory={cfg.running_memory:g}, prior={cfg.running_prior:g}"
    entry = "item, turn" if cfg.reward_level is CreditLevel.TURN else "item"
    text = f"({credit_formula(cfg)} - running_mean({entry}; {means}))"
    return text + turn_penalty_formula(cfg, less=f"running_mean(item, turn; {means})")


RUNNING = Estimator(formula=formula, keys=("running_memory", "running_prior"), of_group=None)

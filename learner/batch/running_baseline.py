"""Running mean credit of items: a baseline for groups of one episode.

Source: SPO (one rollout per prompt, a tabular tracker of each prompt's value), arXiv:2509.13232;
a moving average per task and seat, SPIRAL (role-conditioned advantages), arXiv:2506.24119. This
version tracks plain decayed means. The estimate of a rare item is shrunk towards the mean of its
task. `learner.batch.credit` decides which credits share a mean.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

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

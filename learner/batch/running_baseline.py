"""Running mean rewards of items: a baseline for groups of one episode.

Source: SPO (one rollout per prompt, a tabular tracker of each prompt's value), arXiv:2509.13232;
the moving average per task, SPIRAL, arXiv:2506.24119. This version tracks plain decayed means. The
estimate of a rare item is shrunk towards the mean of its task.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

MAX_ITEMS = 100_000  # Largest number of stored items; other items use the mean of their task.

Tally = tuple[float, float]  # Decayed number of rewards, and their decayed sum.


@dataclass(slots=True)
class RunningBaseline:
    """Decayed means of rewards by item and by task. Deterministic in the order of the batches.

    Example (memory .5, prior 1): the first two episodes of a task have rewards 1 and 0, and each is
    the baseline of the other. An unseen item of the task then has the expected reward .5. An item
    whose only episode had reward 1 has (1 + 1 * .5) / (1 + 1) = .75.
    """

    # Least recently seen item first.
    items: dict[str, Tally] = field(default_factory=dict[str, Tally])
    tasks: dict[str, Tally] = field(default_factory=dict[str, Tally])

    def advantages(
        self,
        rewards: Sequence[float],
        items: Sequence[str],
        tasks: Sequence[str],
        *,
        memory: float,
        prior: float,
    ) -> np.ndarray:
        """Return rewards minus their earlier expectations, [episode] float32; update the means.

        The expectation for a new task is the mean of its other episodes in the batch; a single
        episode gets advantage 0. So a baseline never includes the reward from which it is
        subtracted.

        Args:
            rewards: [episode].
            items: [episode] names of the items, unique across tasks.
            tasks: [episode].
            memory: decay of an older reward, [0, 1]: per later reward of the item, and per later
                batch of the task.
            prior: weight of the task's mean, in rewards of an item; > 0.
        """
        expected = [
            self._expected(index, rewards, items[index], tasks, prior)
            for index in range(len(rewards))
        ]
        for reward, item in zip(rewards, items, strict=True):
            self._remember(self.items, item, [reward], memory)
        for task in dict.fromkeys(tasks):
            own = [reward for reward, each in zip(rewards, tasks, strict=True) if each == task]
            self._remember(self.tasks, task, own, memory)
        while len(self.items) > MAX_ITEMS:
            del self.items[next(iter(self.items))]
        return np.array(rewards, dtype=np.float32) - np.array(expected, dtype=np.float32)

    def _expected(
        self, index: int, rewards: Sequence[float], item: str, tasks: Sequence[str], prior: float
    ) -> float:
        """Return the expected reward of an episode, from its item's and its task's mean."""
        number, total = self.tasks.get(tasks[index], (0.0, 0.0))
        if number == 0.0:
            pairs = enumerate(zip(rewards, tasks, strict=True))
            others = [r for at, (r, task) in pairs if at != index and task == tasks[index]]
            return sum(others) / len(others) if others else rewards[index]
        own_number, own_total = self.items.get(item, (0.0, 0.0))
        return (own_total + prior * total / number) / (own_number + prior)

    @staticmethod
    def _remember(
        table: dict[str, Tally], key: str, rewards: Sequence[float], memory: float
    ) -> None:
        """Add rewards to a decayed mean, and mark its key as the newest."""
        number, total = table.pop(key, (0.0, 0.0))
        table[key] = (memory * number + len(rewards), memory * total + sum(rewards))

    def state_dict(self) -> dict[str, dict[str, Tally]]:
        """Return the state that a resumed run needs for equal expectations, for JSON."""
        return {"items": dict(self.items), "tasks": dict(self.tasks)}

    def load_state_dict(self, state: dict[str, dict[str, Tally]]) -> None:
        self.items = {key: (number, total) for key, (number, total) in state["items"].items()}
        self.tasks = {key: (number, total) for key, (number, total) in state["tasks"].items()}

"""What an item's episodes were worth so far: a baseline for groups of one episode.

Source: SPO (one rollout per prompt, a tabular tracker of each prompt's value), arXiv:2509.13232;
the moving average per task, SPIRAL, arXiv:2506.24119. We track plain decayed means and let an item
that was seen seldom lean on the mean of its task.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

MAX_ITEMS = 100_000  # that are remembered; of others the task's mean is known

Tally = tuple[float, float]  # decayed number of rewards, and their decayed sum


@dataclass(slots=True)
class RunningBaseline:
    """Decayed means of rewards, by item and by task. Deterministic: what was seen, in order.

    Example (memory .5, prior 1): the first two episodes of a task are worth 1 and 0: each is
    compared with the other. Then an unseen item of the task is expected to be worth .5; one whose
    only episode was worth 1, (1 + 1 * .5) / (1 + 1) = .75.
    """

    items: dict[str, Tally] = field(default_factory=dict[str, Tally])  # least recently seen first
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
        """Return rewards less what was expected before this batch, [episode] float32; remember it.

        A task that was never seen is expected to be worth the mean of its other episodes in the
        batch; one alone gets 0. So a baseline never holds the reward that it is taken from.

        Args:
            rewards: [episode].
            items: [episode] names of the items, unlike between tasks.
            tasks: [episode].
            memory: what an older reward still counts of one, for each later one of the item, and
                for each later batch of the task; [0, 1].
            prior: how many rewards of an item its task's mean is worth; > 0.
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
        number, total = table.pop(key, (0.0, 0.0))
        table[key] = (memory * number + len(rewards), memory * total + sum(rewards))

    def state_dict(self) -> dict[str, dict[str, Tally]]:
        """Return what a resumed run needs to expect alike, for JSON."""
        return {"items": dict(self.items), "tasks": dict(self.tasks)}

    def load_state_dict(self, state: dict[str, dict[str, Tally]]) -> None:
        self.items = {key: (number, total) for key, (number, total) in state["items"].items()}
        self.tasks = {key: (number, total) for key, (number, total) in state["tasks"].items()}

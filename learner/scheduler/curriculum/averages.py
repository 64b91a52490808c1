"""How well the policy does: moving averages of training, plain means of evaluation."""

from typing import Any

from common.wire.messages import EpisodeSeen

_WEIGHT = 0.02  # of a new episode, once there are 50


class SuccessAverages:
    """Success per subset while training, success and reward per evaluation group."""

    def __init__(self) -> None:
        self._train: dict[str, list[float]] = {}  # "env/subset" -> [episodes, moving average]
        self._eval: dict[str, list[float]] = {}  # group -> [episodes, successes, sum of rewards]

    def add_train(self, seen: EpisodeSeen) -> None:
        """Count a training episode that says something about the policy."""
        entry = self._train.setdefault(f"{seen.env}/{seen.subset}", [0, 0.0])
        entry[0] += 1
        entry[1] += max(_WEIGHT, 1 / entry[0]) * (seen.is_success - entry[1])

    def add_eval(self, group_id: str, seen: EpisodeSeen) -> None:
        """Count an evaluation episode."""
        entry = self._eval.setdefault(group_id, [0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += seen.is_success
        entry[2] += seen.reward

    def train_report(self) -> dict[str, float]:
        """Return subset -> moving average of success; "env/subset" if there are several envs."""
        has_one_env = len({name.partition("/")[0] for name in self._train}) == 1
        return {
            name.partition("/")[2] if has_one_env else name: round(mean, 4)
            for name, (_, mean) in sorted(self._train.items())
        }

    def eval_report(self) -> dict[str, dict[str, float]]:
        """Return evaluation group -> episodes, success, reward."""
        return {
            group_id: {"num": num, "success": successes / num, "reward": rewards / num}
            for group_id, (num, successes, rewards) in self._eval.items()
        }

    def snapshot(self) -> dict[str, Any]:
        """Return the exact state as JSON."""
        return {
            "train": {key: list(value) for key, value in self._train.items()},
            "eval": {key: list(value) for key, value in self._eval.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the state of `snapshot`."""
        self._train = {key: list(value) for key, value in state["train"].items()}
        self._eval = {key: list(value) for key, value in state["eval"].items()}

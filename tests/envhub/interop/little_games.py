"""Small gymnasium environments: `gymnasium:tests.envhub.interop.little_games:NAME-v0`."""

import string
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete, Text


class Walk(gymnasium.Env[str, Any]):
    """A walk on a line from 0 to -1; an action outside the space is a KeyError."""

    observation_space = Text(200, charset=string.printable)

    def __init__(self, start: int = -1, dtype: Any = np.int64) -> None:
        self.action_space: Any = Discrete(3, start=start, dtype=dtype)
        self.at = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = 0
        return "You stand at 0 and want to be at -1.", {}

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action not in self.action_space:
            raise KeyError(action)
        self.at += int(action)
        is_there = self.at == -1
        return (
            f"You stand at {self.at}.",
            float(is_there),
            is_there,
            False,
            {"is_success": is_there},
        )


class Judged(Walk):
    """Pays 0 for action 0, 1 for 1 and -1 for 2; only 0 leaves it open."""

    def __init__(self) -> None:
        super().__init__(start=0)

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        reward = {0: 0.0, 1: 1.0, 2: -1.0}[int(action)]
        return f"That is worth {reward:g}.", reward, bool(action), False, {}


gymnasium.register("Walk-v0", entry_point=Walk)
gymnasium.register("Judged-v0", entry_point=Judged)

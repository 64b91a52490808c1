"""Small gymnasium environments: `gymnasium:tests.envhub.interop.little_games:NAME-v0`."""

import string
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiDiscrete, Text

TEXTS = Text(200, charset=string.printable)
Step = tuple[Any, Any, Any, Any, dict[str, Any]]


class Walk(gymnasium.Env[Any, Any]):
    """A walk on a line from 0 to -1; an action outside the space is a KeyError."""

    observation_space = TEXTS

    def __init__(self, start: int = -1) -> None:
        self.action_space: Any = Discrete(3, start=start)
        self.at = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = 0
        return "You stand at 0 and want to be at -1.", {}

    def step(self, action: Any) -> Step:
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


class Endless(Walk):
    """Pays 1 a step and never ends by itself."""

    def step(self, action: Any) -> Step:
        return "Nothing changes.", 1.0, False, False, {}


class Judged(Walk):
    """Pays 0 for action 0, 1 for 1 and -1 for 2; only 0 leaves it open."""

    def __init__(self) -> None:
        super().__init__(start=0)

    def step(self, action: Any) -> Step:
        reward = {0: 0.0, 1: 1.0, 2: -1.0}[int(action)]
        return f"That is worth {reward:g}.", reward, bool(action), False, {}


class Numpy(Walk):
    """Answers with arrays and scalars of numpy; action 1 is a success, -1 is not."""

    observation_space: Any = Dict(at=Box(-9, 9, (2,), np.int64), left=Discrete(9))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return {"at": np.array([self.at, 0]), "left": np.int64(3)}, {}

    def step(self, action: Any) -> Step:
        self.at += int(action)
        seen = {"at": np.array([self.at, 0]), "left": np.int64(2)}
        told = {"success": np.array([self.at == 1])}
        return seen, np.array([0.5], np.float32), np.bool_(self.at != 0), np.bool_(False), told


class Push(Walk):
    """Push to [0.5, -0.5]; pays how near the push was."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = Box(-1, 1, (2,))

    def step(self, action: Any) -> Step:
        off = float(np.abs(action - np.array([0.5, -0.5])).max())
        return f"Off by {off:g}.", 1.0 - off / 2, True, False, {}


class Lights(Walk):
    """Two switches of three positions; the right ones are 2 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = MultiDiscrete([3, 3])

    def step(self, action: Any) -> Step:
        is_right = action.tolist() == [2, 1]
        return "on" if is_right else "off", float(is_right), is_right, False, {}


class Wired(Walk):
    """Has actions that no text can be."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = Graph(Discrete(2), None)


class Old(Walk):
    """Answers as the gym before gymnasium did: `seed`, a bare observation, four values."""

    def seed(self, seed: int) -> None:
        self.drawn = int(np.random.default_rng(seed).integers(100))

    def reset(self) -> Any:  # type: ignore[override]
        self.at = 0
        return f"Drawn: {self.drawn}."

    def step(self, action: Any) -> Any:
        told = {"TimeLimit.truncated": True} if int(action) == 0 else {}
        return "Over.", 0.25, True, told


LIMITS = {"Endless": 3}  # steps
UNCHECKED = ("Numpy", "Old")  # Gymnasium's own checker warns about these.
for made in (Walk, Endless, Judged, Numpy, Push, Lights, Wired, Old):
    name = made.__name__
    gymnasium.register(
        f"{name}-v0",
        entry_point=f"{__name__}:{name}",
        max_episode_steps=LIMITS.get(name),
        disable_env_checker=name in UNCHECKED,
    )

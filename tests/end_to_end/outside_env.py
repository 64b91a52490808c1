"""An environment from outside the package, which therefore lives in worker processes.

Its observations name the process; the text of an action is only counted.
"""

import os

from envhub.env import EnvSpec, Isolation, StepResult, Style, SubsetSpec, parse_item

SUBSETS = {"any": SubsetSpec(num_train=1000, num_test=1000, max_turns=100_000)}
SESSIONS_PER_WORKER = 4
MAX_WORKERS = 3


class OutsideEnv:
    """Reports its process id and number of steps; ends on `end`."""

    def __init__(self, style: Style) -> None:
        self._num_steps = 0

    def reset(self, item_id: str, seed: int) -> str:
        parse_item(item_id, SUBSETS)
        return f"pid {os.getpid()}"

    def step(self, action: str) -> StepResult:
        self._num_steps += 1
        is_end = action == "end"
        return StepResult(
            observation=f"step {self._num_steps} of {os.getpid()}: {action[:20]}",
            reward=float(is_end),
            done=is_end,
            is_valid=True,
        )

    def valid_actions(self) -> list[str]:
        return ["go", "end"]

    def expert_action(self) -> str | None:
        return "end"

    def render(self) -> str:
        return f"{self._num_steps} steps"

    def fingerprint(self) -> str:
        return "same"

    def close(self) -> None:
        pass


def make_spec() -> EnvSpec:
    return EnvSpec(
        name="outside",
        subsets=SUBSETS,
        instruction={Style.COMPACT: ""},
        make=OutsideEnv,
        isolation=Isolation.WORKER,
        sessions_per_worker=SESSIONS_PER_WORKER,
        max_workers=MAX_WORKERS,
    )

"""Environments without saved states: one repeats equal actions, another claims to."""

import itertools
from dataclasses import replace
from typing import Any

from envhub.env import EnvSpec, Isolation, StepResult, Style, SubsetSpec

SUBSETS = {"any": SubsetSpec(num_train=10, num_test=10, max_turns=100)}
numbers = itertools.count()


class Stubborn:
    """Observes all actions so far."""

    def __init__(self, style: Style) -> None:
        self.actions: list[str] = []

    def reset(self, item_id: str, seed: int) -> str:
        return "begin"

    def step(self, action: str) -> StepResult:
        self.actions.append(action)
        text = " ".join(self.actions)
        return StepResult(observation=text, reward=0.0, done=False, is_valid=True)

    def close(self) -> None: ...


class Changing(Stubborn):
    """Observes the number of the step in this process."""

    def step(self, action: str) -> StepResult:
        result = super().step(action)
        result.observation = str(next(numbers))
        return result


def make_spec() -> EnvSpec:
    """Return the environment that repeats equal actions."""
    texts = dict.fromkeys(Style, "")
    make: Any = Stubborn  # It has the methods that this test calls.
    return EnvSpec(
        name="stubborn", subsets=SUBSETS, instruction=texts, make=make, isolation=Isolation.INLINE
    )


def make_changing() -> EnvSpec:
    """Return the environment that claims to."""
    return replace(make_spec(), name="changing", make=Changing)


def make_wild() -> EnvSpec:
    """Return the environment that repeats nothing."""
    return replace(make_spec(), name="wild", make=Changing, is_repeatable=False)

"""Sort: name the smallest number that is left. A complete environment in one file.

Check it: python run.py check-env docs/examples/sort.py:make_spec
"""

import itertools
import random

from envhub.env import EnvSpec, Reward, StepResult, Style, SubsetSpec, action_text, parse_item

SUBSETS = {"four": SubsetSpec(num_train=4000, num_test=400, max_turns=8)}
# All puzzles differ.
PUZZLES = random.Random(0).sample([*itertools.permutations(range(10), 4)], 4400)


class Sort:
    """One episode. Observations have the same words in every `style`."""

    def __init__(self, style: Style) -> None:
        self.left: list[int] = []

    def reset(self, item_id: str, seed: int) -> str:
        item = parse_item(item_id, SUBSETS)  # Raises UnknownItem.
        self.left = list(PUZZLES[item.index + (4000 if item.split == "test" else 0)])
        return self.render()

    def step(self, action: str) -> StepResult:
        word = action_text(action)  # Any text: never run it, never use it as a path.
        is_valid = word in self.valid_actions()
        if word == self.expert_action():
            self.left.remove(int(word))
        done = not self.left
        return StepResult(
            observation=self.render(),
            reward=float(done),  # Reward of this step. Reward.SUM would add up all steps.
            done=done,
            is_valid=is_valid,
            is_success=done,  # Success does not depend on the reward.
        )

    def save(self) -> list[int]:
        return self.left  # Optional: what `load` needs after a `reset` of the same item.

    def load(self, state: list[int]) -> None:
        self.left = state

    def valid_actions(self) -> list[str]:
        return [str(number) for number in self.left]

    def expert_action(self) -> str | None:
        return str(min(self.left)) if self.left else None

    def render(self) -> str:
        return f"left: {' '.join(self.valid_actions())}" if self.left else "sorted"

    def fingerprint(self) -> str:
        return self.render()

    def close(self) -> None:
        """Release the resources of the episode. This environment has none."""


def make_spec() -> EnvSpec:
    """Return the catalogue entry. The hub and each of its worker processes call this."""
    texts = dict.fromkeys(Style, "Name the smallest number that is left, until none is.")
    return EnvSpec(name="sort", subsets=SUBSETS, instruction=texts, make=Sort, reward=Reward.LAST)

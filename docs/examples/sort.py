"""Sort: name the smallest number that is left. A whole environment in one file.

python run.py check-env docs/examples/sort.py:make_spec
"""

import itertools
import random

from envhub.env import EnvSpec, Reward, StepResult, Style, SubsetSpec, action_text, parse_item

SUBSETS = {"four": SubsetSpec(num_train=4000, num_test=400, max_turns=8)}
PUZZLES = random.Random(0).sample([*itertools.permutations(range(10), 4)], 4400)  # no two alike


class Sort:
    """One episode. Observations are worded the same in every `style`."""

    def __init__(self, style: Style) -> None:
        self.left: list[int] = []

    def reset(self, item_id: str, seed: int) -> str:
        item = parse_item(item_id, SUBSETS)  # raises UnknownItem, with the nearest that there is
        self.left = list(PUZZLES[item.index + (4000 if item.split == "test" else 0)])
        return self.render()

    def step(self, action: str) -> StepResult:
        word = action_text(action)  # anybody's text: never evaluate it, never put it in a path
        is_valid = word in self.valid_actions()
        if word == self.expert_action():
            self.left.remove(int(word))
        done = not self.left
        return StepResult(
            observation=self.render(),
            reward=float(done),  # of this step; with Reward.SUM below, all steps' are added up
            done=done,
            is_valid=is_valid,
            is_success=done,  # whatever it paid
        )

    def valid_actions(self) -> list[str]:
        return [str(number) for number in self.left]

    def expert_action(self) -> str | None:
        return str(min(self.left)) if self.left else None

    def render(self) -> str:
        return f"left: {' '.join(self.valid_actions())}" if self.left else "sorted"

    def fingerprint(self) -> str:
        return self.render()

    def close(self) -> None:
        """Nothing is held."""


def make_spec() -> EnvSpec:
    """Return the catalogue entry; called in the hub and in each of its worker processes."""
    texts = dict.fromkeys(Style, "Name the smallest number that is left, until none is.")
    return EnvSpec(name="sort", subsets=SUBSETS, instruction=texts, make=Sort, reward=Reward.LAST)

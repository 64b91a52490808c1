"""Guess a number: a whole environment outside the package, in one file.

python run.py envhub env=docs/examples/guess.py:make_spec port=8080
"""

import re

from envhub.env import EnvSpec, StepResult, Style, SubsetSpec, action_text, parse_item

SUBSETS = {"hundred": SubsetSpec(num_train=80, num_test=20, max_turns=8)}


class Guess:
    """One episode; the item alone fixes the number."""

    def __init__(self, style: Style) -> None:
        self.low, self.high = 1, 100  # what is still possible, for the expert

    def reset(self, item_id: str, seed: int) -> str:
        item = parse_item(item_id, SUBSETS)  # raises UnknownItem: a 404 that names the nearest
        self.number = 37 * (item.index + 80 * (item.split == "test")) % 100 + 1
        return "guess a number from 1 to 100"

    def step(self, action: str) -> StepResult:
        text = action_text(action)  # untrusted: never evaluate it, never put it in a path
        if not re.fullmatch("[0-9]{1,3}", text):
            return self._answer("invalid action", is_valid=False)
        guess = int(text)
        if guess == self.number:
            return self._answer("correct", done=True)
        if guess < self.number:
            self.low = max(self.low, guess + 1)
            return self._answer("higher")
        self.high = min(self.high, guess - 1)
        return self._answer("lower")

    def _answer(self, text: str, *, done: bool = False, is_valid: bool = True) -> StepResult:
        return StepResult(observation=text, reward=float(done), done=done, is_valid=is_valid)

    def valid_actions(self) -> list[str]:
        return [str(number) for number in range(1, 101)]

    def expert_action(self) -> str | None:
        return str((self.low + self.high) // 2)

    def render(self) -> str:
        return f"{self.number}, known to be in {self.low}..{self.high}"

    def fingerprint(self) -> str:
        return str(self.number)

    def close(self) -> None:
        """Nothing is held."""


def make_spec() -> EnvSpec:
    """Returns the catalogue entry; called in the hub and in each worker process."""
    instruction = {Style.COMPACT: "", Style.AGENTGYM: "Guess a number. Answer with digits only."}
    return EnvSpec(name="guess", subsets=SUBSETS, instruction=instruction, make=Guess)

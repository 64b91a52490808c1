"""Recall: a sign gives the direction for its crossing and the next two or three crossings.

The environment measures how much history a policy needs. A sign stands at every third crossing
(`Halls`: every fourth) and nowhere else. The last three turns always contain the valid sign, the
last two usually do. The first message contains it only for the first three crossings.
"""

import random
from typing import NamedTuple

from common.config.envs import EnvsSection
from envhub.env import EnvSpec, StepResult, SubsetSpec, action_text, parse_item
from envhub.envs.text_env import SavesCounters, TextEnv
from envhub.tables import one_instruction

WAYS = {"left": "turn left", "right": "turn right", "ahead": "move forward"}
NO_VIEW = "nothing"
SEEN = ("stone", "dust", "moss", "brick", "rust", "sand", "mud", "ash")
INSTRUCTED = """\
You walk through crossings. A message "goal left", "goal right" or "goal ahead" is a sign. It \
gives the direction for this crossing and for the next crossings until another sign. Remember it: \
crossings without a sign show nothing of it. Each of your turns is one action: turn left, turn \
right or move forward (ahead).
Answer with one action and nothing else."""
SUBSETS = {
    "Signs": SubsetSpec(num_train=100_000, num_test=3_200, max_turns=24),
    "Halls": SubsetSpec(num_train=100_000, num_test=3_200, max_turns=36),
}


class _Walk(NamedTuple):
    """Parameters of a subset."""

    num_crossings: int
    per_sign: int  # Number of crossings for which a sign is valid.
    num_words: int = 0  # Words of the view at every second crossing; 0: no views.


WALKS = {"Signs": _Walk(12, 3), "Halls": _Walk(24, 4, num_words=32)}


class RecallEnv(SavesCounters, TextEnv):
    """One episode, solved after the last crossing; each crossing pays an equal share of the reward.

    Only the sign's direction leads to the next crossing. Any other direction leads back to the same
    crossing and costs a turn. A sign is shown again then, a hall's view is not.
    """

    changing = ("_at", "_num_turns")

    def reset(self, item_id: str, seed: int = 0) -> str:
        """Start an item. `seed` is unused: the item determines all signs."""
        item = parse_item(item_id, SUBSETS)
        rng = random.Random(f"{item.split}/{item.index}")
        self._walk = WALKS[item.subset]
        self._max_turns = SUBSETS[item.subset].max_turns
        size, per_sign, num_words = self._walk
        self._signs = [rng.choice(list(WAYS)) for _ in range(size // per_sign)]
        self._halls = [" ".join(rng.choices(SEEN, k=num_words)) for _ in range(size // 2)]
        self._at = self._num_turns = 0
        self._begin()
        return self._observation()

    def _step(self, action: str) -> StepResult:
        """Take a direction, and describe the next crossing."""
        self._num_turns += 1
        name = " ".join(action_text(action).lower().split())
        is_valid = name in self._valid_actions()
        leads_on = name == self._expert_action()
        self._at += leads_on
        is_won = self._at == self._walk.num_crossings
        self._done = is_won or self._num_turns == self._max_turns
        observation = "success" if is_won else self._observation(is_new=leads_on)
        if not is_valid:
            observation = f"invalid action, {observation}"
        return StepResult(
            observation=observation,
            reward=self._at / self._walk.num_crossings,
            done=self._done,
            is_valid=is_valid,
            is_success=is_won,
        )

    def state_text(self) -> str:
        """Return a text that identifies the current state of the item."""
        return f"crossing {self._at} after {self._num_turns}"

    def _observation(self, *, is_new: bool = True) -> str:
        """Return the sign of a crossing, or its view."""
        number, since_sign = divmod(self._at, self._walk.per_sign)
        if not since_sign:
            return f"goal {self._signs[number]}"
        return (is_new and self._at % 2 and self._halls[self._at // 2]) or NO_VIEW

    def _valid_actions(self) -> list[str]:
        return list(WAYS.values())

    def _expert_action(self) -> str | None:
        return WAYS[self._signs[self._at // self._walk.per_sign]]

    def render(self) -> str:
        """Return all signs, with the valid one marked."""
        now = self._at // self._walk.per_sign
        return " ".join(f"[{s}]" if i == now else s for i, s in enumerate(self._signs))

    def _state(self) -> str:
        return repr(self._signs)


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return the catalogue entry of Recall."""
    return EnvSpec(
        name="recall", subsets=SUBSETS, make=RecallEnv, instruction=one_instruction(INSTRUCTED)
    )

"""Scripted policies, played through the same episodes as the model: the baselines of a report."""

import random
from dataclasses import replace

from actor.rollout.episode import EnvSession, Render, Turn
from common.formats.scripted import chars_of
from common.wire.messages import PolicyKind, Trajectory


class ScriptedRender:
    """Passes action texts through the episode as invented token ids, one for each text."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def add(self, text: str) -> list[int]:
        self._texts.append(text)
        return [len(self._texts) - 1]

    def first_prompt(self, text: str, *, before: tuple[str, str] | None = None) -> list[int]:
        return []

    def after_action(
        self, observation: str, *, is_stopped: bool, end: int | None = None
    ) -> list[int]:
        return []

    def after_turn(self, text: str, *, is_stopped: bool, end: int | None = None) -> list[int]:
        return []

    def action_text(self, token_ids: list[int]) -> str:
        return self._texts[token_ids[0]]

    @property
    def actions(self) -> list[str]:
        """The actions so far. The index of an action is its token id."""
        return self._texts


def with_actions(trajectory: Trajectory, render: Render) -> Trajectory:
    """Return the trajectory with the texts of its actions if a scripted policy played it."""
    if not isinstance(render, ScriptedRender):
        return trajectory
    return replace(trajectory, action_chars=chars_of(render.actions))


class ScriptedPolicy:
    """Chooses actions by rule from the hub's hint.

    random_valid: uniform over the valid actions. expert: the environment's own expert; where the
    expert has no action, uniform over the valid actions.
    """

    def __init__(
        self, kind: PolicyKind, *, seed: str, render: ScriptedRender, slip_frac: float = 0
    ) -> None:
        """Begin an episode.

        Args:
            slip_frac: share of turns with a random action that was valid earlier in the episode.
                Only a policy that has left the expert's path visits states in which it can recover
                (arXiv:1703.09327).
        """
        self._kind = kind
        self._random = random.Random(seed)
        self._render = render
        self._slip_frac = slip_frac
        self._so_far: dict[str, None] = {}  # Valid actions of all turns so far, in order.
        self.has_slipped = False  # Whether the latest turn was such a random action.

    async def act(self, _: list[int], session: EnvSession) -> Turn:
        """Return the next action. Raises: EnvError."""
        hint = await session.hint()
        action = hint.expert_action if self._kind is PolicyKind.EXPERT else None
        if action is None:
            action = self._random.choice(hint.valid_actions) if hint.valid_actions else "wait"
        if self._slip_frac:
            self._so_far |= dict.fromkeys(hint.valid_actions)
            meant = action
            slips = self._random.random() < self._slip_frac
            action = self._random.choice([*self._so_far]) if slips and self._so_far else meant
            self.has_slipped = action != meant
        return Turn(self._render.add(action), logprobs=[0.0], versions=[-1])

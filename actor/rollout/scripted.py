"""Scripted policies, played through the same episodes as the model: the baselines of a report."""

import random
from dataclasses import replace

from actor.rollout.episode import Render, Session, Turn
from common.formats.scripted import chars_of
from common.wire.messages import PolicyKind, Trajectory


class ScriptedRender:
    """Passes action texts through the episode as "token ids" of one made-up token each."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def add(self, text: str) -> list[int]:
        self._texts.append(text)
        return [len(self._texts) - 1]

    def first_prompt(self, text: str, *, before: tuple[str, str] | None = None) -> list[int]:
        return []

    def after_action(self, observation: str, *, is_stopped: bool) -> list[int]:
        return []

    def after_turn(self, text: str, *, is_stopped: bool) -> list[int]:
        return []

    def action_text(self, token_ids: list[int]) -> str:
        return self._texts[token_ids[0]]

    @property
    def actions(self) -> list[str]:
        """The actions so far, each at the index that is its token id."""
        return self._texts


def with_actions(trajectory: Trajectory, render: Render) -> Trajectory:
    """Return an episode with the texts of its actions, if a scripted policy played it."""
    if not isinstance(render, ScriptedRender):
        return trajectory
    return replace(trajectory, action_chars=chars_of(render.actions))


class ScriptedPolicy:
    """Chooses by rule from what the hub's hint allows.

    random_valid: uniform over the valid actions. expert: the environment's own expert; where it
    knows no way, uniform over the valid actions.
    """

    def __init__(
        self, kind: PolicyKind, *, seed: str, render: ScriptedRender, slip_frac: float = 0
    ) -> None:
        """Begin an episode. `slip_frac` of the turns: an action that was valid earlier in it, since
        the way back is seen only by who has left it (arXiv:1703.09327)."""
        self._kind = kind
        self._random = random.Random(seed)
        self._render = render
        self._slip_frac = slip_frac
        self._so_far: dict[str, None] = {}  # valid actions, in their order
        self.has_slipped = False  # in the latest turn

    async def act(self, _: list[int], session: Session) -> Turn:
        """Return the next action. Raises: EnvError."""
        hint = await session.hint()
        action = hint.expert_action if self._kind is PolicyKind.EXPERT else None
        if action is None:
            action = self._random.choice(hint.valid_actions) if hint.valid_actions else "wait"
        if self._slip_frac:
            self._so_far |= dict.fromkeys(hint.valid_actions)
            meant, slips = action, self._random.random() < self._slip_frac
            action = self._random.choice([*self._so_far]) if slips and self._so_far else meant
            self.has_slipped = action != meant
        return Turn(self._render.add(action), logprobs=[0.0], versions=[-1])

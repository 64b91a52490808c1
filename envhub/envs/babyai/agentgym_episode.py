"""BabyAI with the exact rules of AgentGym's server."""

from dataclasses import replace

from common.config.envs import BabyaiOptions
from envhub.env import ItemId, StepResult, Style, action_text
from envhub.envs.babyai import actions as act
from envhub.envs.babyai import levels, text
from envhub.envs.babyai import scene as sc
from envhub.envs.babyai.actions import ActionEffect, GridAction
from envhub.envs.babyai.agentgym_actions import image, offer
from envhub.envs.babyai.episode import BabyAiEnv, read_scene

MIN_REWARD = 0.5  # Only a higher reward ends the episode.
PRIMITIVES = {sc.LEFT: "turn left", sc.RIGHT: "turn right", sc.FORWARD: "move forward"}


class AgentGymBabyAiEnv(BabyAiEnv):
    """One BabyAI episode with AgentGym's rules.

    Actions, their numbers and paths are AgentGym's. A macro stops when a primitive changes nothing
    in sight. Only the reward of its last primitive counts, so an earlier success is lost. The
    reward is minigrid's and falls with the steps. It is repeated after an invalid action, and it
    ends the episode only above 0.5. KeyInBox has no solution. Two rules differ: the reward is never
    below 0 except on AgentGym's own routes, and `pick up` is accepted.
    """

    def __init__(self, style: Style, *, options: BabyaiOptions) -> None:
        rules = {"shaped_reward": True, "agentgym_goals": True, "agentgym_layouts": True}
        super().__init__(style, options=replace(options, **rules))
        # Rewards of the last performed action: returned, and minigrid's.
        self._reward = self._score = 0.0
        self._has_ended = False  # Whether minigrid ended the episode with that action.

    def _start(self, item: ItemId) -> None:
        """Begin an item, with minigrid's first view."""
        self._reward = self._score = 0.0
        self._has_ended = False
        super()._start(item)
        held = self._level.carrying
        if (
            held is not None and held.init_pos is not None
        ):  # minigrid's first view is from before the agent picks up the object.
            column, row = held.init_pos
            self._level.grid.set(column, row, held)
            self._scene = read_scene(self._level)
            self._update_view()
            self._level.grid.set(column, row, None)

    def _locate(self, item: ItemId) -> tuple[str, int]:
        """Return the level and the seed of an item, with the level that AgentGym uses."""
        level, seed = levels.locate(item)
        return levels.AS_IN_AGENTGYM.get(level, level), seed

    def _update_view(self) -> None:
        super()._update_view()
        self._offer = offer(self._scene, self._objects, self._view)

    def _step(self, action: str) -> StepResult:
        """Perform an offered action, and describe the result."""
        name = act.normalize(action_text(action))
        chosen = self._offer.actions.get(name)
        is_asked = "check" in name
        if chosen is None or not chosen.primitives or is_asked:
            return StepResult(
                observation=self._refusal(name),
                reward=self._reward,
                done=False,
                is_valid=chosen is not None or is_asked,
                score=self._score,
            )
        self._run(chosen)
        self._done = self._has_ended and self._reward > MIN_REWARD
        return StepResult(
            observation=self._observation(),
            reward=self._reward,
            done=self._done,
            is_valid=True,
            is_success=self._done,  # The episode ends with success only.
            score=self._score,
        )

    def _run(self, action: GridAction) -> None:
        """Run an action's primitives until one of them changes nothing."""
        has_reward = False
        for primitive in action.primitives:
            before = image(self._scene)
            _, reward, self._has_ended, _, _ = self._level.step(primitive)
            has_reward = float(reward) > 0
            self._scene = read_scene(self._level)
            if image(self._scene) == before:
                break
        self._score = self._minigrid_reward() if has_reward else 0.0
        self._reward = max(0.0, self._score)
        self._update_view()

    def _observation(self) -> str:
        """Return the text of the view with the offered actions."""
        if self._is_compact:
            return super()._observation()
        offered = list(self._offer.actions.values())
        return text.agentgym_view(
            self._scene, self._objects, self._view, offered, is_over=self._has_ended
        )

    def _refusal(self, name: str) -> str:
        """Return the observation after an action that changes nothing."""
        offered = list(self._offer.actions.values())
        if "check" in name:
            answer = text.asked(offered)
        elif name and name not in self._offer.actions:
            answer = self._offer.refusals.get(name, text.UNKNOWN)
        else:
            answer = text.NO_CHANGE
        if self._is_compact:
            return f"{text.INVALID}, {self._observation()}"
        return f"{answer}\n{text.available(offered)}"

    def _valid_actions(self) -> list[str]:
        return [*self._offer.actions]

    def _expert_action(self) -> str | None:
        """Return the scripted expert's action in AgentGym's wording, one part at a time."""
        name = super()._expert_action()
        return None if name is None else self._worded(self._by_name[name])

    def _worded(self, wanted: GridAction) -> str | None:
        """Return the offered action with the same effect, or its first part; None without one."""
        # A combined action would get no reward for opening the door.
        if wanted.kind is ActionEffect.TOGGLE_THROUGH:
            walk = wanted.primitives[:-2]
            part = ActionEffect.MOVE if walk else ActionEffect.TOGGLE
            wanted = replace(wanted, kind=part, primitives=walk or (sc.TOGGLE,))
        ends = act.poses(self._scene, wanted)[-1]
        for name, action in self._offer.actions.items():
            if action.kind is not wanted.kind or not action.primitives:
                continue
            is_same_place = act.poses(self._scene, action)[-1] == ends
            is_same_thing = wanted.kind is ActionEffect.MOVE or action.position == wanted.position
            if is_same_place and is_same_thing:
                return name
        return PRIMITIVES.get(wanted.primitives[0])

"""BabyAI levels in text form, with high-level actions."""

import hashlib
import struct
import zlib
from base64 import b64encode

from minigrid.envs.babyai.unlock import KeyInBox

from common.config.envs import BabyaiOptions
from envhub.env import ItemId, StepResult, Style, action_text, parse_item
from envhub.envs.babyai import actions as act
from envhub.envs.babyai import levels, text
from envhub.envs.babyai import scene as sc
from envhub.envs.babyai.actions import ActionEffect, GridAction
from envhub.envs.babyai.expert import Expert
from envhub.envs.babyai.scene import GridScene
from envhub.envs.babyai.targets import closes_doors
from envhub.envs.text_env import TextEnv

# minigrid's step count lowers the reward and truncates episodes. Here the caller limits the turns.
ENDLESS_STEPS = 1_000_000_000
SUBSETS = levels.subsets()


class BabyAiEnv(TextEnv):
    """One BabyAI episode.

    It differs from AgentGym's server on purpose:
    - The reward is 1.0, whatever the step count. The episode ends at the primitive that completes
      the mission, and nothing else ends it.
    - The mission keeps its `then` and `after you`; `agentgym_goals` hides them.
    - An unsolvable layout is drawn again; `agentgym_layouts` keeps it.
    - An object has the same number in actions and in the description.
    - Only actions that change the state are valid.
    - `toggle` closes an open door if a mission of several parts contains opening a door. In
      KeyInBox it opens a box. These missions can need it.
    """

    def __init__(self, style: Style, *, options: BabyaiOptions | None = None) -> None:
        super().__init__(style)
        self._options = options or BabyaiOptions()
        self._level_name = ""

    def reset(self, item_id: str, seed: int = 0) -> str:
        """Start an item. `seed` is unused: the item determines the whole level."""
        item = parse_item(item_id, SUBSETS)
        self._start(item)
        return self._first_observation()

    def _start(self, item: ItemId) -> None:
        """Draw the level of an item, and read its first view."""
        level_name, seed = self._locate(item)
        if level_name != self._level_name:
            self._level = levels.make_level(
                level_name, keeps_unsolvable=self._options.agentgym_layouts
            )
            # Our view replaces the level's own, which would be drawn at every primitive.
            self._level.gen_obs = dict
            self._level_name = level_name
        self._level.reset(seed=seed)
        self._max_steps = self._level.max_steps
        self._level.max_steps = ENDLESS_STEPS
        self._fingerprint = _fingerprint(self._level)
        self._expert = Expert(self._level)
        self._begin()
        self._scene = read_scene(self._level)
        self._update_view()

    def _locate(self, item: ItemId) -> tuple[str, int]:
        return levels.locate(item)

    def _step(self, action: str) -> StepResult:
        """Perform an action, and describe the result."""
        name = act.normalize(action_text(action))
        chosen = self._by_name.get(name)
        if chosen is None:
            return StepResult(
                observation=self._refusal(name),
                reward=0.0,
                done=False,
                is_valid=name == text.CHECK and self._style is Style.AGENTGYM,
            )
        is_won = self._perform(chosen)
        return StepResult(
            observation=self._observation(),
            reward=self._success_reward() if is_won else 0.0,
            done=self._done,
            is_valid=True,
            is_success=is_won,
        )

    def _perform(self, action: GridAction) -> bool:
        """Run the primitives until the mission ends or one has no effect.

        Return whether the mission was completed.
        """
        is_won = False
        for primitive in action.primitives:
            before = self._pose()
            _, reward, has_ended, _, _ = self._level.step(primitive)
            # minigrid's debugging levels also end on a wrong object. Here the episode continues.
            if has_ended and float(reward) > 0:
                is_won = self._done = True
                break
            if primitive <= sc.FORWARD and before == self._pose():
                break
        if action.kind is ActionEffect.MOVE:
            self._scene.at, self._scene.heading = _pose(self._level, self._scene.stride)
        else:
            self._scene = read_scene(self._level)
        self._update_view()
        return is_won

    def state_text(self) -> str:
        """Return a hash of the map, pose, carried object and completed mission parts."""
        parts = vars(self._level.instrs)  # pyright: ignore[reportAttributeAccessIssue]
        done = [parts.get(name) for name in ("a_done", "b_done")]
        scene = self._scene
        digest = hashlib.blake2b(bytes(scene.codes), digest_size=16)
        digest.update(
            repr(
                (sorted(scene.things.items()), scene.at, scene.heading, scene.carrying, done)
            ).encode()
        )
        return digest.hexdigest()

    def _success_reward(self) -> float:
        """Return 1, or minigrid's reward with `shaped_reward`; never below 0."""
        if not self._options.shaped_reward:
            return 1.0
        return max(0.0, self._minigrid_reward())

    def _minigrid_reward(self) -> float:
        """Return minigrid's reward for a success now; below 0 beyond 1.1 times its step limit."""
        # The order of operations gives minigrid's rounding.
        return 1.0 - 0.9 * (self._level.step_count / self._max_steps)

    def _pose(self) -> tuple[int, int]:
        return _pose(self._level, self._scene.stride)

    def _update_view(self) -> None:
        """Read the view and the actions of the current scene."""
        self._objects, self._view = sc.see(self._scene)
        self._actions = act.list_actions(self._scene, self._objects)
        self._by_name = {action.name: action for action in self._actions}

    def _first_observation(self) -> str:
        """Return the mission and the first view."""
        if self._is_compact:
            return f"goal: {self._level.mission}\n{self._observation()}"
        return f"Your goal: {self._goal()}\n{self._observation()}"

    def _goal(self) -> str:
        """Return the mission. AgentGym's optional wording hides the order of its parts."""
        if not self._options.agentgym_goals:
            return self._level.mission
        return self._level.mission.replace("then", "and").replace("after you", "and")

    def _observation(self) -> str:
        """Return the text of the current view."""
        if self._is_compact:
            return text.compact_view(self._scene, self._objects, self._view)
        return text.agentgym_view(
            self._scene, self._objects, self._view, self._actions, is_over=self._done
        )

    def _refusal(self, name: str) -> str:
        """Return the observation after an action that is unavailable."""
        if self._is_compact:
            return f"{text.INVALID}, {self._observation()}"
        answer = text.refusal(self._scene, self._objects, self._actions, name)
        return f"{answer}\n{text.available(self._actions)}"

    def _valid_actions(self) -> list[str]:
        return [action.name for action in self._actions]

    def _expert_action(self) -> str | None:
        """Return the scripted expert's action. The expert has the whole map and the instruction."""
        return self._expert.choose(self._scene, self._by_name)

    def render(self) -> str:
        """Return the mission and the whole map, two characters per cell."""
        return f"{self._level.mission}\n{self._level.pprint_grid()}"

    def detail(self, what: str) -> str | None:
        """Return the `picture` of the whole map as a data URL; None for anything else."""
        if what != "picture":
            return None
        pixels = self._level.get_frame(highlight=False, tile_size=32)  # [height, width, 3] uint8
        return f"data:image/png;base64,{b64encode(as_png(pixels)).decode()}"

    def fingerprint(self) -> str:
        """Return the hash of the complete initial state."""
        return self._fingerprint


def as_png(pixels) -> bytes:
    """Return an image [height, width, 3], uint8, as a PNG file, without an image library."""
    height, width, _ = pixels.shape
    # Each row has the filter type 0: none.
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(kind: bytes, content: bytes) -> bytes:
        head = struct.pack(">I", len(content)) + kind
        return head + content + struct.pack(">I", zlib.crc32(kind + content))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", size), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _fingerprint(level) -> str:
    """Return a hash of the complete state of a level."""
    carried = level.carrying.encode() if level.carrying else ()
    pose = tuple(int(v) for v in (*level.agent_pos, level.agent_dir, *carried))
    digest = hashlib.sha256(level.grid.encode().tobytes())
    digest.update(f"{pose} {level.mission}".encode())
    return digest.hexdigest()


def _pose(level, stride: int) -> tuple[int, int]:
    x, y = level.agent_pos
    return (int(y) + sc.PAD) * stride + int(x) + sc.PAD, int(level.agent_dir)


def read_scene(level) -> GridScene:
    """Return a snapshot of a minigrid level."""
    grid = level.grid
    stride = grid.width + 2 * sc.PAD
    codes = [sc.WALL] * (stride * (grid.height + 2 * sc.PAD))
    things: dict[int, tuple[str, str]] = {}
    for i, thing in enumerate(grid.grid):
        position = (i // grid.width + sc.PAD) * stride + i % grid.width + sc.PAD
        if thing is None or thing.type == "floor":
            codes[position] = sc.FREE
        elif thing.type != "wall":
            codes[position] = _code(thing)
            things[position] = (thing.color, thing.type)
    at, heading = _pose(level, stride)
    held = level.carrying
    carrying = (held.color, held.type) if held else None
    return GridScene(
        codes,
        things,
        stride,
        at,
        heading,
        carrying,
        closes_doors=closes_doors(level),
        opens_boxes=isinstance(level, KeyInBox),
    )


def _code(thing) -> int:
    """Return the code of an object in a snapshot."""
    if thing.type == "door":
        return sc.OPEN if thing.is_open else sc.LOCKED if thing.is_locked else sc.CLOSED
    return {"goal": sc.GOAL, "lava": sc.LAVA}.get(thing.type, sc.THING)

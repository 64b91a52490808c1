"""Rooms: carry a key through a sequence of rooms. The rule is fixed; the number of rooms varies.

The environment isolates the effect of length: instruction, observations and decisions are the same
with two rooms and with thirty-two. Source: arXiv 2605.02572, which varies only the length. `Trek`
has up to 500 rooms: 1,000 turns. `March` adds a long view of each room: 100,000 tokens.
"""

import hashlib
import random
from typing import NamedTuple

from common.config.envs import EnvsSection
from envhub.env import EnvSpec, StepResult, SubsetSpec, action_text, parse_item
from envhub.envs.text_env import SavesCounters, TextEnv
from envhub.tables import one_instruction

NUM_BANDS = 4  # Number of ranges of lengths, with equally many items in each.
NUM_DOORS = 3
TRIES_PER_ROOM = 2  # The episode ends unsolved after this many turns per room.
COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
GOAL = "goal: open the door of your key"
VERB = "go to"
INSTRUCTED = """\
You carry a key through rooms. Each message lists the closed doors of the room and the colour of \
your key. The door of your key's colour opens, takes the key and leads to the next room with \
another key. Each of your turns is one action: go to COLOUR closed door 1.
Answer with one action and nothing else."""
SEEN = ("stone", "dust", "moss", "brick", "rust", "sand", "mud", "ash")
# Two words for each value of a byte: one digest describes a room, which is fast.
PAIRS = tuple(f"{a} {b}" for a in SEEN for b in SEEN) * 4


class _Path(NamedTuple):
    """Parameters of a subset."""

    max_rooms: int
    num_words: int = 0  # Words of the view of each room, without information; an even number.


PATHS = {"Carry": _Path(32), "Trek": _Path(500), "March": _Path(500, num_words=72)}
SUBSETS = {
    name: SubsetSpec(num_train=100_000, num_test=3_200, max_turns=TRIES_PER_ROOM * path.max_rooms)
    for name, path in PATHS.items()
}


def num_rooms(index: int, *, max_rooms: int = PATHS["Carry"].max_rooms) -> int:
    """Return the number of rooms of an item: in `Carry` in turn 1 to 4, 5 to 8, 9 to 16, 17 to 32.

    Each band ends at twice the number of the band before it, the last one at `max_rooms`.
    """
    place, band = divmod(index, NUM_BANDS)
    most = max_rooms >> (NUM_BANDS - 1 - band)
    return most - place % (most - most // 2 if band else most)


class RoomsEnv(SavesCounters, TextEnv):
    """One episode with `num_rooms` rooms. The reward is 1 after the last room.

    Every room has three closed doors, one in the key's colour. This door leads to the next room,
    takes the key and gives another. The other doors stay closed and cost a turn. There are two
    turns per room.
    """

    changing = ("_at", "_num_turns")

    def reset(self, item_id: str, seed: int = 0) -> str:
        """Start an item. `seed` is unused: the item determines all rooms."""
        item = parse_item(item_id, SUBSETS)
        path = PATHS[item.subset]
        self._seed = f"{item.split}/{item.index}"
        self._num_words = path.num_words
        rng = random.Random(self._seed)
        size = num_rooms(item.index, max_rooms=path.max_rooms)
        self._rooms = [tuple(rng.sample(COLOURS, NUM_DOORS)) for _ in range(size)]
        self._keys = [rng.choice(doors) for doors in self._rooms]
        self._at = self._num_turns = 0
        self._begin()
        return f"{GOAL}\n{self._observation()}"

    def _step(self, action: str) -> StepResult:
        """Use the key on a door, and describe the next room."""
        self._num_turns += 1
        name = " ".join(action_text(action).lower().split())
        is_valid = name in self._valid_actions()
        is_through = name == self._expert_action()
        self._at += is_through
        is_won = self._at == len(self._rooms)
        self._done = is_won or self._num_turns == TRIES_PER_ROOM * len(self._rooms)
        observation = "success" if is_won else self._observation()
        if not is_valid:
            observation = f"invalid action, {observation}"
        return StepResult(
            observation=observation, reward=float(is_won), done=self._done, is_valid=is_valid
        )

    def state_text(self) -> str:
        """Return a text that identifies the current state of the item."""
        return f"room {self._at} after {self._num_turns}"

    def _observation(self) -> str:
        """Return the doors of the room, and the carried key."""
        doors = ", ".join(f"{colour} closed door 1" for colour in self._rooms[self._at])
        shown = f"{doors}, carrying {self._keys[self._at]} key"
        if not self._num_words:
            return shown
        place = f"{self._seed}/{self._at}".encode()
        digest = hashlib.blake2b(place, digest_size=self._num_words // 2).digest()
        return f"{' '.join([PAIRS[byte] for byte in digest])}\n{shown}"

    def _valid_actions(self) -> list[str]:
        return [f"{VERB} {colour} closed door 1" for colour in self._rooms[self._at]]

    def _expert_action(self) -> str | None:
        return f"{VERB} {self._keys[self._at]} closed door 1"

    def render(self) -> str:
        """Return all rooms with their keys, with the current room marked."""
        marks = ["@" if i == self._at else " " for i in range(len(self._rooms))]
        rooms = zip(marks, self._rooms, self._keys, strict=True)
        return "\n".join(f"{mark} {' '.join(doors)}: {key}" for mark, doors, key in rooms)

    def _state(self) -> str:
        return repr((self._rooms, self._keys))


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return the catalogue entry of Rooms."""
    return EnvSpec(
        name="rooms", subsets=SUBSETS, make=RoomsEnv, instruction=one_instruction(INSTRUCTED)
    )

"""The BabyAI levels we offer, their turn limits and AgentGym's numbering of them."""

import gymnasium
import minigrid  # noqa: F401 - registers the BabyAI levels
import minigrid.envs.babyai.core.roomgrid_level as roomgrid_level
from minigrid.envs.babyai.core.roomgrid_level import RoomGridLevel

from envhub.env import SubsetSpec

NUM_TRAIN = 1_000_000
NUM_TEST = 1_000
FIRST_TEST_SEED = 10_000_000

# Turn limits of the levels that were measured; grids checked against minigrid 3.2.
MAX_TURNS = {
    # one room
    "PickupLoc": 6,
    "PickupDist": 6,
    "GoToLocal": 6,
    "GoToRedBall": 6,
    # one large room
    "OneRoomS12": 10,
    # three by three rooms, the target in view of the first
    "ActionObjDoor": 8,
    "OpenDoor": 8,
    "GoToDoor": 8,
    "GoToObjDoor": 8,
    # several rooms, to be searched
    "Open": 16,
    "GoToObjMazeS4": 16,
    "FindObjS5": 16,
    "Pickup": 16,
}
MAX_TURNS_OTHERS = 20

# AgentGym's level of a data index is this list at `index % 40`, its seed is `index // 40`.
AGENTGYM_LEVELS = (
    *("GoToRedBallGrey", "GoToRedBall", "GoToRedBallNoDists", "GoToObjS6", "GoToLocalS8N7"),
    *("GoToObjMazeS7", "GoToImpUnlock", "GoToSeqS5R2", "GoToRedBlueBall", "GoToDoor"),
    *("GoToObjDoor", "Open", "OpenRedDoor", "OpenDoorLoc", "OpenRedBlueDoorsDebug"),
    *("OpenDoorsOrderN4Debug", "Pickup", "UnblockPickup", "PickupLoc", "PickupDistDebug"),
    *("PickupAbove", "PutNextLocalS6N4", "PutNextS7N4Carrying", "Unlock", "UnlockLocalDist"),
    *("KeyInBox", "UnlockPickupDist", "BlockedUnlockPickup", "UnlockToUnlock", "ActionObjDoor"),
    *("FindObjS7", "KeyCorridorS6R3", "OneRoomS20", "MoveTwoAcrossS8N9", "SynthS5R2"),
    *("SynthLoc", "SynthSeq", "MiniBossLevel", "BossLevel", "BossLevelNoUnlock"),
)

# minigrid reports every rejected layout with print(); a server has no use for that.
roomgrid_level.print = lambda *args, **kwargs: None  # type: ignore[attr-defined]


def subsets() -> dict[str, SubsetSpec]:
    """Returns every level by name: the measured ones first, then AgentGym's others."""
    names = dict.fromkeys((*MAX_TURNS, *AGENTGYM_LEVELS))
    return {
        name: SubsetSpec(
            num_train=NUM_TRAIN,
            num_test=NUM_TEST,
            max_turns=MAX_TURNS.get(name, MAX_TURNS_OTHERS),
        )
        for name in names
    }


def env_seed(split: str, index: int) -> int:
    """Returns the minigrid seed of an item; train and test seeds never meet."""
    return index if split == "train" else FIRST_TEST_SEED + index


def make_level(name: str) -> RoomGridLevel:
    """Returns a fresh bare minigrid level; some levels are registered only as version 1."""
    prefix = f"BabyAI-{name}-v"
    versions = [v for v in (1, 0) if f"{prefix}{v}" in gymnasium.registry]
    level = gymnasium.make(f"{prefix}{versions[0]}", disable_env_checker=True).unwrapped
    assert isinstance(level, RoomGridLevel)
    return level

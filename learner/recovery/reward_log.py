"""The log of rewards over a group, so that a restart and a recomputation use the same rewards.

A function of the user gives them, often by chance or for money. It is called once for each group.
The log is synced before the group is reported.
"""

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ConfigError, LongstrideError
from common.ids import training_number
from common.store.disk import AppendFile, with_room
from common.store.run_dir import cut_head
from common.wire.messages import Trajectory
from learner.recovery.step_log import read_steps, whole_bytes

PRUNE_FROM_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReward:
    """The rewards of the finished members of one group, or why there are none."""

    group_id: str
    rewards: dict[int, float] = field(default_factory=dict[int, float])  # By member, in [0, 1].
    # A score s of the environment becomes scale * s + shift, so that all scores have one scale.
    scale: float = 1.0
    shift: float = 0.0
    # Returned numbers by function, in the order of `rewards`. None: it does not apply.
    values: dict[str, list[float | None]] = field(default_factory=dict[str, list[float | None]])
    error: str = ""  # Why a function failed; "": it has not.

    def applied(self, trajectory: Trajectory) -> Trajectory:
        """Return an episode with its reward of the group. Earlier scores get the same scale.

        Raises: LongstrideError: the episode was no member when the functions were called.
        """
        if trajectory.member not in self.rewards:
            raise LongstrideError(
                f"group {self.group_id} has no reward of member {trajectory.member} in"
                " journal/group_rewards.jsonl; restore the file from a backup"
            )
        scores = trajectory.turn_scores * np.float32(self.scale) + np.float32(self.shift)
        reward = self.rewards[trajectory.member]
        if len(scores):
            scores[-1] = reward
        start = self.scale * trajectory.start_score + self.shift
        return replace(
            trajectory,
            reward=reward,
            turn_scores=scores.clip(0.0, 1.0),
            start_score=min(max(start, 0.0), 1.0),
        )


class RewardLog:
    """The rewards so far, in memory and as JSON lines. Opening it removes a torn last line.

    One thread appends, another one prunes.
    """

    def __init__(self, path: Path, *, prune_from_bytes: int = PRUNE_FROM_BYTES) -> None:
        """Open the log for appending. Raises: ConfigError: it is damaged; names the line."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._file = AppendFile(path)
        self._prune_from_bytes = self._prune_bytes = prune_from_bytes
        self._file.truncate(whole_bytes(path))
        self.rewards = read_group_rewards(path)

    def append(self, reward: GroupReward, *, check: Callable[[], object] = lambda: None) -> None:
        """Write the rewards of a group; return once they are on disk.

        Args:
            check: called during a wait for room on the disk; ends it by raising.
        """
        line = _line(reward)

        def write() -> None:
            with self._lock:
                self._file.append_synced([line])
                self.rewards[reward.group_id] = reward

        with_room(write, self._file.path, check=check)

    def prune(self, steps: Path, *, closed_below: int) -> None:
        """Remove the groups that no step of the step log has and that are closed.

        Args:
            closed_below: training groups with smaller numbers are settled for good.

        Raises: OSError: the log could not be rewritten; it is unchanged.
        """
        with self._lock:
            if self._file.size >= self._prune_bytes:
                self._prune(steps, closed_below)

    def _prune(self, steps: Path, closed_below: int) -> None:
        needed = {ids[0].partition("/")[0] for step in read_steps(steps) for ids in step.groups}
        remaining = {
            name: reward
            for name, reward in self.rewards.items()
            if name in needed or (training_number(f"{name}/0") or 0) >= closed_below
        }
        path = self._file.path
        cut_head(path, self._file.size, head=b"".join(map(_line, remaining.values())))
        self._file.close()
        self._file = AppendFile(path)
        self.rewards = remaining
        self._prune_bytes = max(self._prune_from_bytes, int(self._file.size * 1.25))

    def close(self) -> None:
        self._file.close()


def rewarded(trajectory: Trajectory, rewards: Mapping[str, GroupReward]) -> Trajectory:
    """Return an episode with the logged reward of its group; unchanged if the group has none."""
    reward = rewards.get(trajectory.group_id)
    return trajectory if reward is None else reward.applied(trajectory)


def read_group_rewards(path: Path) -> dict[str, GroupReward]:
    """Return the logged rewards by group; {} without a file. A torn last line is left out.

    Raises: ConfigError: a line is damaged; names it.
    """
    rewards: dict[str, GroupReward] = {}
    if not path.exists():
        return rewards
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break
            try:
                reward = _parse(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ConfigError(
                    f"{path}: line {number} is damaged ({error!r}); restore it from a backup; only"
                    " this file has the rewards of the groups that the run has trained on"
                ) from error
            rewards[reward.group_id] = reward
    return rewards


def _line(reward: GroupReward) -> bytes:
    plain: dict[str, Any] = {"group": reward.group_id}
    if reward.error:
        plain["error"] = reward.error
    else:
        plain |= {
            "rewards": reward.rewards,
            "scale": reward.scale,
            "shift": reward.shift,
            "values": reward.values,
        }
    return json.dumps(plain, separators=(",", ":")).encode() + b"\n"


def _parse(plain: dict[str, Any]) -> GroupReward:
    """Return the rewards of a line. Raises: ValueError, TypeError, KeyError: it is malformed."""
    if "error" in plain:
        return GroupReward(group_id=str(plain["group"]), error=str(plain["error"]))
    rewards = {int(member): float(value) for member, value in plain["rewards"].items()}
    if not all(0.0 <= value <= 1.0 for value in rewards.values()):
        raise ValueError("a reward is not in [0, 1]")
    return GroupReward(
        group_id=str(plain["group"]),
        rewards=rewards,
        scale=float(plain["scale"]),
        shift=float(plain["shift"]),
        values=plain["values"],
    )

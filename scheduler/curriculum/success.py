"""Success rates by key, and the learning potential that follows from them."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from common.wire.messages import EpisodeSeen
from scheduler.state import FIXED

UNKNOWN = -1.0  # Value of a signal that the learner did not send.
Known = OrderedDict[str, list[float]]


def worth(success: float, *, floor: float) -> float:
    """Return the learning potential 4 p (1 - p), at least `floor`; it is 1 at success p = 0.5.

    The variance of a 0/1 reward is p (1 - p). If all members of a group have the same reward, the
    group has no signal for a group-relative advantage.
    """
    return max(floor, 4 * success * (1 - success))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """Signals of one training step, and its episodes of one environment at the current stage."""

    version: int
    num_episodes: int
    num_solved: int
    num_truncated: int  # Episodes cut by the horizon that the environment would have let continue.
    entropy: float  # Nats per sampled token, over the whole batch; UNKNOWN.
    ess_frac: float  # Effective sample size over the whole batch, as a share; UNKNOWN.


@dataclass(slots=True, kw_only=True)
class SuccessPool:
    """Means of success and reward by key. The keys updated least recently are dropped."""

    # Each new episode has at least the weight 1 / `memory_episodes`. 0: a plain mean.
    memory_episodes: int = field(metadata=FIXED)
    max_keys: int = field(default=1 << 30, metadata=FIXED)  # Number of keys that are kept.
    known: Known = field(default_factory=Known)  # Key -> [episodes, success, reward].

    def add(self, key: str, seen: EpisodeSeen) -> None:
        """Count one episode."""
        entry = self.known.setdefault(key, [0, 0.0, 0.0])
        entry[0] += 1
        weight = 1 / min(entry[0], self.memory_episodes or entry[0])
        entry[1] += weight * (seen.is_success - entry[1])
        entry[2] += weight * (seen.reward - entry[2])
        self.known.move_to_end(key)
        if len(self.known) > self.max_keys:
            self.known.popitem(last=False)

    def success(self, key: str, *, min_episodes: int = 1) -> float | None:
        """Return the mean success; None if there were fewer than `min_episodes` episodes."""
        num, mean, _ = self.known.get(key, (0, 0.0, 0.0))
        return mean if num >= min_episodes else None

    def forget(self, keys: Iterable[str]) -> None:
        """Drop these keys."""
        for key in keys:
            self.known.pop(key, None)


@dataclass(slots=True)
class SuccessAverages:
    """Success of the policy: moving means of training, plain means of each evaluation."""

    # Keys are "env/subset" for training, and the group id for evaluations.
    train: SuccessPool = field(default_factory=partial(SuccessPool, memory_episodes=50))
    evaluation: SuccessPool = field(default_factory=partial(SuccessPool, memory_episodes=0))

    @property
    def mean(self) -> float | None:
        """Moving mean of training success over all subsets; None before the first episode."""
        rates = [success for _, success, _ in self.train.known.values()]
        return sum(rates) / len(rates) if rates else None

    def train_report(self) -> dict[str, float]:
        """Return subset -> moving mean of success; with several environments "env/subset"."""
        entries = sorted(self.train.known.items())
        has_one_env = len({name.partition("/")[0] for name, _ in entries}) == 1
        return {
            name.partition("/")[2] if has_one_env else name: round(success, 4)
            for name, (_, success, _) in entries
        }

    def eval_report(self) -> dict[str, dict[str, float]]:
        """Return evaluation group -> episodes, success, reward."""
        return {
            group_id: {"num": int(num), "success": round(success, 9), "reward": round(reward, 9)}
            for group_id, (num, success, reward) in self.evaluation.known.items()
        }

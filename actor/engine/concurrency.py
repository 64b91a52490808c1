"""How many episodes at once: more while the engine keeps up, fewer when it does not."""

import logging
from dataclasses import dataclass, replace

logger = logging.getLogger(__name__)

MIN_STEPS = 5  # of the engine, before a look says anything
MAX_KV_FRAC = 0.9  # of the KV cache in use, beyond which no episode is added
DECREASE = 0.75  # times as many after a cut
INCREASE_FRAC = 1 / 32  # of the ceiling that is added at a look, one episode at least


@dataclass(slots=True, kw_only=True)
class EngineLoad:
    """What an engine had to do between two looks at it, summed up step by step."""

    num_steps: int = 0  # of the engine
    num_queued: int = 0  # requests that found no place, in the step that had fewest of them
    kv_frac: float = 0.0  # of the KV cache that running requests used, at most
    num_preemptions: int = 0  # requests that lost their place in the KV cache to others

    def add(
        self, *, num_running: int, num_waiting: int, kv_frac: float, num_preemptions: int
    ) -> None:
        """Note one step; requests wait for the next one if it had no place for them.

        Steps in which nothing runs are those of an engine that stands still for new weights.
        """
        self.num_preemptions += num_preemptions
        if num_running == 0:
            return
        self.num_queued = min(num_waiting, self.num_queued) if self.num_steps else num_waiting
        self.num_steps += 1
        self.kv_frac = max(self.kv_frac, kv_frac)

    def drain(self) -> "EngineLoad":
        """Return the load since the last call, and begin anew."""
        load = replace(self)
        self.__init__()
        return load


class Concurrency:
    """The number of episodes at once, by additive increase and multiplicative decrease.

    It is cut when the engine preempts, or has a queue that never empties: prompts that come in a
    burst wait for a few steps, those that the engine has no room for wait all the time. It begins
    at the ceiling. After a cut it waits until no more episodes than that are left,
    because what is running goes on, and says nothing about the new limit.

    Example (ceiling 32): the engine preempts -> 24, no more leases until 24 episodes are left. It
    still preempts -> 18. It does not, and all 18 are used -> 19, 20, ... until 90 % of the cache
    is in use, or it preempts again.
    """

    def __init__(self, *, least: int, most: int) -> None:
        self._least = least
        self._most = most
        self._increase = max(1, round(INCREASE_FRAC * most))
        self.limit = most

    def look(self, load: EngineLoad, *, num_episodes: int) -> int:
        """Return the new limit.

        Args:
            load: of the engine since the last look.
            num_episodes: played at present, also those whose turn it is not to ask the engine.
        """
        if num_episodes > self.limit:
            return self.limit  # an earlier cut has not come into effect
        before = self.limit
        # Only then is the load that of so many episodes:
        is_used = num_episodes >= self.limit - self._increase
        is_queueing = load.num_steps >= MIN_STEPS and load.num_queued > 0
        if load.num_preemptions > 0 or is_queueing:
            self.limit = max(self._least, int(DECREASE * self.limit))
        elif is_used and load.num_steps >= MIN_STEPS and load.kv_frac <= MAX_KV_FRAC:
            self.limit = min(self._most, self.limit + self._increase)
        if self.limit != before:
            logger.info(
                "concurrency=%d before=%d queued=%d kv_frac=%.2f preemptions=%d",
                *(self.limit, before, load.num_queued, load.kv_frac, load.num_preemptions),
            )
        return self.limit

"""Limit of concurrent episodes: it rises while the engine keeps up and falls when it does not."""

import logging
from dataclasses import dataclass, replace

logger = logging.getLogger(__name__)

MIN_STEPS = 5  # Engine steps that a load needs before it can change the limit.
MAX_KV_FRAC = 0.9  # Share of the KV cache in use above which the limit does not rise.
DECREASE = 0.75  # Factor of a decrease.
INCREASE_FRAC = 1 / 32  # Increase as a share of the ceiling; at least one episode.


@dataclass(slots=True, kw_only=True)
class EngineLoad:
    """The engine's load, accumulated step by step since the last `drain`."""

    num_steps: int = 0  # Steps of the engine.
    num_queued: int = 0  # Fewest requests in the queue at any step.
    kv_frac: float = 0.0  # Largest share of the KV cache in use at any step.
    num_preemptions: int = 0  # Requests that were evicted from the KV cache by other requests.

    def add(
        self, *, num_running: int, num_waiting: int, kv_frac: float, num_preemptions: int
    ) -> None:
        """Add one step. Waiting requests had no place in it.

        Steps without running requests are not counted: the engine is paused for new weights.
        """
        self.num_preemptions += num_preemptions
        if num_running == 0:
            return
        self.num_queued = min(num_waiting, self.num_queued) if self.num_steps else num_waiting
        self.num_steps += 1
        self.kv_frac = max(self.kv_frac, kv_frac)

    def drain(self) -> "EngineLoad":
        """Return the load since the last call and reset it."""
        load = replace(self)
        self.__init__()
        return load


class Concurrency:
    """The limit of concurrent episodes: additive increase, multiplicative decrease.

    The limit starts at the ceiling. It is cut when the engine preempts or its queue never empties.
    A burst of prompts waits only a few steps, but prompts beyond the engine's capacity wait all the
    time. After a cut the limit stays until no more episodes than that are running: the old episodes
    continue, and their load is no evidence about the new limit.

    Example (ceiling 32): the engine preempts -> 24; no leases until 24 episodes are left. It
    preempts again -> 18. It does not, and all 18 are used -> 19, 20, ... until 90 % of the cache is
    in use, or it preempts again.
    """

    def __init__(self, *, least: int, most: int) -> None:
        self._least = least
        self._most = most
        self._increase = max(1, round(INCREASE_FRAC * most))
        self.limit = most

    def set_bounds(self, *, least: int, most: int) -> None:
        """Use other bounds. A limit at the former ceiling moves to the new one."""
        is_highest = self.limit >= self._most
        self._least = least
        self._most = most
        self._increase = max(1, round(INCREASE_FRAC * most))
        self.limit = most if is_highest else min(max(self.limit, least), most)

    def adjust(self, load: EngineLoad, *, num_episodes: int) -> int:
        """Return the new limit.

        Args:
            load: the engine's load since the last call.
            num_episodes: running episodes, including those that wait for their environment.
        """
        if num_episodes > self.limit:
            return self.limit  # The number of episodes has not yet fallen to the last cut.
        before = self.limit
        # The load is evidence about the limit only if about that many episodes run.
        is_used = num_episodes >= self.limit - self._increase
        is_queueing = load.num_steps >= MIN_STEPS and load.num_queued > 0
        if load.num_preemptions > 0 or is_queueing:
            self.limit = max(self._least, int(DECREASE * self.limit))
        elif is_used and load.num_steps >= MIN_STEPS and load.kv_frac <= MAX_KV_FRAC:
            self.limit = min(self._most, self.limit + self._increase)
        if self.limit != before:
            logger.info(
                "changed concurrency limit=%d before=%d queued=%d kv_frac=%.2f preemptions=%d",
                self.limit,
                before,
                load.num_queued,
                load.kv_frac,
                load.num_preemptions,
            )
        return self.limit

"""The JVMs of a process: those of the episodes, and one that computes solutions."""

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from common.config.envs import SciworldOptions
from envhub.envs.sciworld.catalogue import Variation

if TYPE_CHECKING:
    from envhub.envs.sciworld.simulator import Simulator


def _start(memory_mib: int, timeout_s: float) -> "Simulator":
    """Return a new JVM with the simulator."""
    # The catalogue must load without the packages scienceworld and py4j.
    from envhub.envs.sciworld.simulator import Simulator

    return Simulator(memory_mib=memory_mib, timeout_s=timeout_s)


class Simulators:
    """A pool of the episodes' JVMs.

    Example: an episode takes a JVM at its first reset and returns it on close. The next episode
    loads its own task into it. A failed JVM is not returned to the pool; the next `take` starts a
    new one.
    """

    def __init__(self, options: SciworldOptions) -> None:
        self._options = options
        self._idle: list[Simulator] = []
        self._lock = threading.Lock()

    def take(self) -> "Simulator":
        """Return a JVM for exclusive use.

        Raises: EnvFailure: a new one was needed and did not start.
        """
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _start(self._options.jvm_memory_mib, self._options.call_timeout_s)

    def give(self, simulator: "Simulator") -> None:
        """Return a JVM to the pool after its episode."""
        if simulator.is_alive:
            with self._lock:
                self._idle.append(simulator)

    def close(self) -> None:
        """Stop the idle JVMs."""
        with self._lock:
            idle = self._idle
            self._idle = []
        for simulator in idle:
            simulator.close()


class GoldPaths:
    """Solutions by variation, computed in a separate JVM, which needs far more memory.

    That JVM starts with the first request and runs until `rest`.
    """

    MAX_KEPT = 1000

    def __init__(self, options: SciworldOptions) -> None:
        self._options = options
        self._kept: OrderedDict[Variation, tuple[str, ...]] = OrderedDict()
        self._solver: Simulator | None = None
        self._lock = threading.Lock()

    def find(self, variation: Variation) -> tuple[str, ...]:
        """Return the actions that solve a variation; takes half a second on average.

        Raises: EnvFailure: the JVM failed.
        """
        with self._lock:
            if variation not in self._kept:
                self._kept[variation] = self._solve(variation)
                if len(self._kept) > self.MAX_KEPT:
                    self._kept.popitem(last=False)
            return self._kept[variation]

    def _solve(self, variation: Variation) -> tuple[str, ...]:
        """Return the gold path of a variation, from the JVM for solutions."""
        if self._solver is None or not self._solver.is_alive:
            self._solver = _start(self._options.gold_memory_mib, self._options.call_timeout_s)
        self._solver.load(variation, self._options.simplifications, with_gold=True)
        return self._solver.gold_path()

    def rest(self) -> None:
        """Stop the JVM to free its memory; found solutions are kept."""
        with self._lock:
            if self._solver is not None:
                self._solver.close()
                self._solver = None


class Machines:
    """The resources shared by all episodes of a process; no JVM runs before the first reset."""

    def __init__(self, options: SciworldOptions) -> None:
        self.simplifications = options.simplifications
        self.simulators = Simulators(options)
        self.gold = GoldPaths(options)

    async def stop(self) -> None:
        """Stop the JVMs that no episode uses."""
        self.simulators.close()
        self.gold.rest()

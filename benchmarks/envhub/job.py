"""A measurement of a server by a separate client process, and its result."""

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

from benchmarks.envhub.client import ServiceTarget
from common.repository import ROOT

MODULE = "benchmarks.envhub.load"
JOB_TIMEOUT_S = 300.0
ACTIONS = {
    "textcraft": ("get 1 oak log", "inventory", "get 2 cobblestone", "craft 1 stick using 1 egg"),
    "babyai": ("turn left", "move forward", "turn right", "move forward"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One measurement of one client process.

    Its kind is step (single steps), open (creation and reset) or raw (steps on AgentGym's routes
    without an HTTP library). `open` counts whole rounds, independent of `duration_s`.
    """

    target: ServiceTarget
    kind: str
    is_reference: bool = False  # The target has the reference server's routes.
    env: str = "textcraft"
    num_clients: int = 128  # Connections with one active request each.
    warmup_s: float = 0.4  # Time before the measurement.
    duration_s: float = 1.5  # Time of the measurement.
    base: str = ""  # For `raw`: the path before /create, /reset and /step.
    # For `raw`: the key of the item in a reset request; "": a create request starts an episode.
    reset_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The result of a job: number of operations, duration, and the latency of each request."""

    num_done: int
    duration_s: float
    latencies_ms: list[float]

    @property
    def per_s(self) -> float:
        return self.num_done / self.duration_s

    def percentile_ms(self, frac: float) -> float:
        """Return the latency that `frac` of the requests did not exceed."""
        ordered = sorted(self.latencies_ms)
        return ordered[min(len(ordered) - 1, int(frac * len(ordered)))]


def measure(job: Job) -> Measured:
    """Return the measurements of a separate client process. Raises: RuntimeError: it failed."""
    done = subprocess.run(
        [sys.executable, "-m", MODULE],
        cwd=ROOT,
        input=json.dumps(asdict(job)).encode(),
        capture_output=True,
        timeout=JOB_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"client failed: {done.stderr.decode(errors='replace')[-1500:]}")
    return Measured(**json.loads(done.stdout))


class Recorder:
    """Latencies of the requests that end within the measured time."""

    def __init__(self, job: Job) -> None:
        self._duration_s = job.duration_s
        self._begin_s = time.perf_counter() + job.warmup_s
        self._end_s = self._begin_s + job.duration_s
        self.latencies_ms: list[float] = []

    def add(self, sent_s: float) -> bool:
        """Count a request that is answered now; return whether to continue."""
        answered_s = time.perf_counter()
        if self._begin_s <= answered_s < self._end_s:
            self.latencies_ms.append((answered_s - sent_s) * 1e3)
        return answered_s < self._end_s

    def measured(self) -> Measured:
        """Return the requests of the measured time."""
        num = len(self.latencies_ms)
        return Measured(num_done=num, duration_s=self._duration_s, latencies_ms=self.latencies_ms)

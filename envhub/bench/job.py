"""A measurement that a client process of its own makes, and what comes of it."""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass

from common.repository import ROOT
from envhub.bench.client import Target

JOB_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One measurement of one client process.

    Attributes:
        kind: step (single steps), open (creation and reset), batch and batch_open (the same by the
            batch routes, hub only).
        is_reference: the target speaks the reference server's routes.
        num_clients: connections with one request under way each; in `batch`, sessions of a call.
        warmup_s: seconds before counting begins.
        duration_s: seconds that count; `open` counts whole rounds instead and ignores both.
    """

    target: Target
    kind: str
    is_reference: bool
    env: str
    num_clients: int
    warmup_s: float = 0.4
    duration_s: float = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a job counted: operations, over what time, and how long each request took."""

    num_done: int
    duration_s: float
    latencies_ms: list[float]

    @property
    def per_s(self) -> float:
        """Operations per second."""
        return self.num_done / self.duration_s

    def percentile_ms(self, frac: float) -> float:
        """Return the latency that `frac` of the requests did not exceed."""
        ordered = sorted(self.latencies_ms)
        return ordered[min(len(ordered) - 1, int(frac * len(ordered)))]


def measure(job: Job) -> Measured:
    """Return what a client process of its own measured.

    Raises:
        RuntimeError: it failed; holds its last words.
    """
    done = subprocess.run(
        [sys.executable, "-m", "envhub.bench.load"],
        cwd=ROOT,
        input=json.dumps(asdict(job)).encode(),
        capture_output=True,
        timeout=JOB_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"client failed: {done.stderr.decode(errors='replace')[-1500:]}")
    return Measured(**json.loads(done.stdout))

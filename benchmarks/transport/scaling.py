"""The scaling of scheduler, hub and intake from one actor to many, with simulated engines."""

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

from benchmarks.table import BenchTable
from benchmarks.transport.ends import ARRIVED
from common.config.load import load_config
from common.launch.process import ChildProcess
from common.repository import ROOT
from common.store.run_dir import RunDir
from common.store.run_start import save_config
from common.wire.security import create_keys

ACTOR = "benchmarks.actor.simulated"
ENDS = "benchmarks.transport.ends"
NUM_ACTORS = 8
NUM_SLOTS = 8
HORIZON = 4  # Turns of every episode.
WARM_UP_S = 12.0
MEASURED_S = 36.0
START_S = 120.0
STOP_S = 15.0
MIN_SPEEDUP = 7.2
OVERRIDES = (
    "train.num_steps=1000000",
    "eval.before=false",
    "eval.after=false",
    "horizon.kind=fixed",
    f"horizon.stages=[{HORIZON}]",
    "algorithm.filter_zero_variance=false",
    "scheduler.max_ahead_steps=7",
    "scheduler.gate_margin=0",
    "log.level=WARNING",
)


def add_scaling(table: BenchTable) -> None:
    """Measure one actor, then eight, each run from its start."""
    rates: list[float] = []
    for num_actors in (1, NUM_ACTORS):
        with tempfile.TemporaryDirectory(prefix="longstride-scaling-") as folder:
            rates.append(
                episodes_per_s(Path(folder), num_actors, warm_up_s=WARM_UP_S, measured_s=MEASURED_S)
            )
    one, many = rates
    name = f"episodes of {NUM_ACTORS} actors whose engines are clocks"
    against = "one such actor"
    least = MIN_SPEEDUP
    table.compare(name, many, one, "per s", against=against, at_least=least)


def episodes_per_s(folder: Path, num_actors: int, *, warm_up_s: float, measured_s: float) -> float:
    """Return the episodes per second that such actors add to a run's journal."""
    where = (f"run.dir={folder}", "run.name=r")
    cfg = load_config("quickstart", (*where, *OVERRIDES), root=ROOT)
    run_dir = RunDir(root=folder / "r")
    create_keys(run_dir.keys)
    save_config(cfg, run_dir.config)
    run = [sys.executable, "run.py"]
    module = [sys.executable, "-m"]
    commands = {
        "envhub": [*run, "envhub", *where],
        "scheduler": [*run, "scheduler", *where],
        "intake": [*module, ENDS, "intake", str(run_dir.root)],
    }
    for i in range(num_actors):
        commands[f"actor-{i}"] = [*module, ACTOR, str(run_dir.root), str(i), str(NUM_SLOTS)]
    arrived = run_dir.root / ARRIVED
    with contextlib.ExitStack() as children:
        started = [children.enter_context(_child(run_dir, *each)) for each in commands.items()]
        started[-1].wait_until(lambda: _num_arrived(arrived) > 0, timeout_s=START_S)
        time.sleep(warm_up_s)
        before, begun = _num_arrived(arrived), time.monotonic()
        time.sleep(measured_s)
        rate = (_num_arrived(arrived) - before) / (time.monotonic() - begun)
        (run_dir.root / "stop").touch()
    return rate


def _num_arrived(path: Path) -> int:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else 0


@contextlib.contextmanager
def _child(run_dir: RunDir, name: str, argv: list[str]) -> Generator[ChildProcess]:
    child = ChildProcess(name, argv, log_path=run_dir.root / f"{name}.txt", cwd=ROOT)
    try:
        yield child
    finally:
        child.stop(timeout_s=STOP_S)

"""The scaling of scheduler, hub and intake from one actor to many, with simulated engines."""

import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.runs.real_run import child
from benchmarks.table import BenchTable
from benchmarks.transport.ends import ARRIVED
from common.config.load import load_config
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
    table.compare(name, many, one, "per s", against="one such actor", at_least=MIN_SPEEDUP)


def episodes_per_s(folder: Path, num_actors: int, *, warm_up_s: float, measured_s: float) -> float:
    """Return the episodes per second that such actors add to a run's journal."""
    where = (f"run.dir={folder}", "run.name=r")
    cfg = load_config("quickstart", (*where, *OVERRIDES), root=ROOT)
    run_dir = RunDir(root=folder / "r")
    create_keys(run_dir.keys)
    save_config(cfg, run_dir.config)
    root = run_dir.root
    commands = {
        "envhub": ["run.py", "envhub", *where],
        "scheduler": ["run.py", "scheduler", *where],
        "intake": ["-m", ENDS, "intake", str(root)],
    }
    for i in range(num_actors):
        commands[f"actor-{i}"] = ["-m", ACTOR, str(root), str(i), str(NUM_SLOTS)]
    arrived = root / ARRIVED
    with ExitStack() as children:
        started = [
            children.enter_context(child(name, argv, log=root / f"{name}.txt"))
            for name, argv in commands.items()
        ]
        started[-1].wait_until(lambda: _num_arrived(arrived) > 0, timeout_s=START_S)
        time.sleep(warm_up_s)
        before = _num_arrived(arrived)
        begun = time.monotonic()
        time.sleep(measured_s)
        rate = (_num_arrived(arrived) - before) / (time.monotonic() - begun)
        (root / "stop").touch()
    return rate


def _num_arrived(path: Path) -> int:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else 0

"""The suite `scheduler`: its capacity on one core, with thousands of connected actors."""

import contextlib
import http.server
import json
import tempfile
import threading
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from benchmarks.chaos.watch import read_json
from benchmarks.runs.real_run import child
from benchmarks.scheduler.peers import ANSWER_S, LEARNER, BenchLearner, SimulatedPeers, hello
from benchmarks.table import BenchTable
from common.config.load import load_config
from common.config.run_config import RunConfig
from common.repository import ROOT
from common.store.run_dir import RunDir
from common.store.run_start import save_config
from common.wire.messages import Heartbeat, Lease, LeaseRequest
from common.wire.security import create_keys, load_keys
from learner.scheduler.components import build_components
from learner.scheduler.core import SchedulerCore
from learner.scheduler.curriculum.catalogue import HubCatalogue
from learner.simulator.settings import catalogue_of

START_S = 120.0
NUM_PEERS = 2_000
# Duration of an episode. Each peer plays one at a time, which gives 500 episodes a second.
EPISODE_S = 4.0
WARM_UP_S = 8.0
MEASURED_S = 15.0
MIN_LEASES_PER_S = 5_000.0
MAX_CPU_FRAC = 0.35  # Fraction of a core.
NUM_CORE_ACTORS = 1_000
NUM_CORE_STEPS = 6
PER_STEP = 64
FLOOR = "benchmarks.scheduler.floor"
LEGEND = (
    "Core: leases that are granted, listed in a heartbeat, arrive and are trained on, per second\n"
    "of processor time, without sockets. Peers: a scheduler process as in a run, with encryption\n"
    "and its log; every peer is a socket of its own with a heartbeat a second. Beside it what the\n"
    "same messages cost a process that only answers them."
)


def run_suite(table: BenchTable) -> None:
    """Measure for about a minute."""
    table.title(LEGEND)
    table.attempt("the core", lambda: add_core(table))
    with tempfile.TemporaryDirectory(prefix="longstride-scheduler-") as folder:
        cfg = bench_config(Path(folder))
        table.attempt("peers", lambda: add_peers(table, cfg))


def bench_config(folder: Path) -> RunConfig:
    """Return a run that never ends, with room for an episode of every peer."""
    overrides = (
        f"run.dir={folder}",
        "run.name=r",
        "train.num_steps=1000000",
        "eval.before=false",
        "eval.after=false",
        "groups.size=8",
        f"groups.per_step={PER_STEP}",
        "scheduler.max_ahead_steps=7",
        "scheduler.gate_margin=0",
        "log.level=WARNING",
    )
    return load_config("quickstart", overrides, root=ROOT)


def add_core(table: BenchTable) -> None:
    """Measure the state machine alone."""
    leases_per_s = measure_core(num_actors=NUM_CORE_ACTORS, num_steps=NUM_CORE_STEPS)
    name = f"leases served by the core, {NUM_CORE_ACTORS} actors"
    table.at_least(name, leases_per_s, "per s", MIN_LEASES_PER_S)


def measure_core(*, num_actors: int, num_steps: int) -> float:
    """Return the leases per second of processor time, from request to the end of their step."""
    cfg = bench_config(Path("runs"))
    core = SchedulerCore(build_components(cfg, catalogue_of(cfg)), clock=time.monotonic)
    learner = BenchLearner(group_size=cfg.groups.size, per_step=cfg.groups.per_step)
    actors = [f"actor-{i}" for i in range(num_actors)]
    for name in (LEARNER, *actors):
        core.handle(name, hello(name))
    started = time.process_time()
    while learner.version < num_steps:
        for actor in actors:
            for lease in _play(core, actor, learner.version):
                learner.arrive(lease, wall_s=EPISODE_S)
            for message in learner.messages():
                core.handle(LEARNER, message)
    return learner.num_arrived / (time.process_time() - started)


def _play(core: SchedulerCore, actor: str, version: int) -> list[Lease]:
    """Request a lease, and list it once in a heartbeat."""
    request = LeaseRequest(actor=actor, num_free_slots=1, version=version)
    leases: list[Lease] = core.handle(actor, request).leases
    running = [lease.episode_id for lease in leases]
    core.handle(actor, Heartbeat(role="actor", name=actor, version=version, running=running))
    return leases


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The load of a scheduler process during the measurement."""

    num_connected: int  # Live actors by the scheduler's own status.
    episodes_per_s: float
    cpu_s_per_episode: float  # With the heartbeats of that time.
    cpu_frac: float  # Fraction of a core.
    answer_p99_s: float


def add_peers(table: BenchTable, cfg: RunConfig) -> None:
    """Measure a scheduler process with many connected actors, and the sockets alone."""
    play = PeerLoad(num_peers=NUM_PEERS, warm_up_s=WARM_UP_S, measured_s=MEASURED_S)
    floor = measure_floor(cfg, play)
    served = measure_peers(cfg, play)
    rate = NUM_PEERS / EPISODE_S
    name = "actors connected, each by a socket of its own"
    p99_ms = served.answer_p99_s * 1e3
    note = f"p99 of an answer {p99_ms:.0f} ms, looked for after {ANSWER_S * 1e3:.0f}"
    table.at_least(name, served.num_connected, "", NUM_PEERS, note)
    name = f"processor of the scheduler at {rate:.0f} episodes/s"
    note = f"measured {served.cpu_frac:.2f} at {served.episodes_per_s:.0f} episodes/s"
    cpu_frac = served.cpu_s_per_episode * rate
    table.at_most(name, cpu_frac, "of a core", MAX_CPU_FRAC, note)
    against = "encrypted sockets alone, same messages"
    table.compare(name, cpu_frac, floor.cpu_s_per_episode * rate, "of a core", against=against)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLoad:
    """Number of peers and duration."""

    num_peers: int
    warm_up_s: float
    measured_s: float  # After the warm-up.


def measure_floor(cfg: RunConfig, play: PeerLoad) -> Served:
    """Return the cost of the same messages for a process that only answers."""
    run_dir = RunDir(root=Path(cfg.run.dir) / "floor")
    create_keys(run_dir.keys)
    port_file = run_dir.root / "port"
    argv = ["-m", FLOOR, str(run_dir.keys), str(port_file)]
    with child("floor", argv, log=run_dir.root / "floor.txt") as process:
        process.wait_until(port_file.exists, timeout_s=START_S)
        address = port_file.read_text(encoding="utf-8")
        return _let_play(cfg, play, run_dir, process.pid, address)


def measure_peers(cfg: RunConfig, play: PeerLoad) -> Served:
    """Start a scheduler and its peers, and measure once all of them play."""
    run_dir = RunDir(root=Path(cfg.run.dir) / cfg.run.name)
    create_keys(run_dir.keys)
    with serve_catalogue(catalogue_of(cfg)) as url:
        cfg = replace(cfg, envhub=replace(cfg.envhub, url=url))
        save_config(cfg, run_dir.config)
        argv = ["run.py", "scheduler", f"run.dir={cfg.run.dir}", f"run.name={cfg.run.name}"]
        with child("scheduler", argv, log=run_dir.root / "scheduler.txt") as process:
            address = run_dir.wait_for_address("scheduler", timeout_s=START_S)
            return _let_play(cfg, play, run_dir, process.pid, address)


def _let_play(cfg: RunConfig, play: PeerLoad, run_dir: RunDir, pid: int, address: str) -> Served:
    """Connect the peers to a server and measure it."""
    learner = BenchLearner(group_size=cfg.groups.size, per_step=cfg.groups.per_step)
    peers = SimulatedPeers(
        load_keys(run_dir.keys),
        address=address,
        num_peers=play.num_peers,
        episode_s=EPISODE_S,
        learner=learner,
    )
    try:
        peers.join()
        peers.run(play.warm_up_s)
        return _measure(psutil.Process(pid), peers, learner, run_dir, play.measured_s)
    finally:
        peers.close()


def _measure(
    process: psutil.Process,
    peers: SimulatedPeers,
    learner: BenchLearner,
    run_dir: RunDir,
    seconds: float,
) -> Served:
    peers.answer_s.clear()
    num_before = learner.num_arrived
    cpu_before = sum(process.cpu_times()[:2])
    started = time.monotonic()
    peers.run(seconds)
    took_s = time.monotonic() - started
    num = learner.num_arrived - num_before
    cpu_s = sum(process.cpu_times()[:2]) - cpu_before
    actors = read_json(run_dir.status).get("actors", [])  # The baseline has no status file.
    ordered = sorted(peers.answer_s)
    return Served(
        num_connected=sum(not each["is_dead"] for each in actors),
        episodes_per_s=num / took_s,
        cpu_s_per_episode=cpu_s / max(1, num),
        cpu_frac=cpu_s / took_s,
        answer_p99_s=ordered[int(0.99 * (len(ordered) - 1))],
    )


@contextlib.contextmanager
def serve_catalogue(catalogue: HubCatalogue) -> Generator[str]:
    """Yield the address of a hub that serves only a catalogue."""
    body = {
        env: {"subsets": {name: asdict(entry) for name, entry in subsets.items()}}
        for env, subsets in catalogue.envs.items()
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            """Write no log."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

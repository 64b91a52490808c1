"""The suite `engines`: 64 clocks at 2,000 tokens/s each, one scheduler and one learner's intake."""

import json
import shutil
import struct
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.real_run import check_end, child
from benchmarks.suite import Suite
from common.config.load import load_config
from common.errors import LongstrideError
from common.host.child_process import ChildProcess
from common.host.process_settings import ONE_THREAD
from common.ids import actor_name, engine_names
from common.repository import ROOT
from common.store.run_dir import RunDir
from common.store.run_start import save_config
from common.wire.security import create_keys

COUNTER = "tokens"  # File with one number, 8 bytes: the tokens that all clocks have sampled.
NUM_ENGINES = 64
ENGINES_PER_PROCESS = 16
TOKENS_PER_S = 2_000.0  # Speed of each engine.
SLOTS = 16  # Concurrent episodes of each engine.
NUM_TURNS = 20  # Turns of an episode, 2,000 sampled tokens on average.
POLICY = "tiny-textcraft"
EPISODE_TOKENS = 2_000
MAX_TOKENS = 8_192  # Length of a context.
# The clocks run slower by this factor, so that few cores suffice. All figures are per second of
# the clocks.
SLOWDOWN = 4.0
WINDOW_S = 60.0
START_S = 600.0
POLL_S = 0.2
MAX_SCHEDULER = 0.35
MAX_INTAKE = 0.5
MAX_ACTOR = 0.9
LEGEND = (
    f"{NUM_ENGINES} engines that are clocks at {TOKENS_PER_S:,.0f} tokens/s each, behind vLLM's\n"
    "sockets; actor processes, hub, scheduler and intake are real. Shares are seconds of CPU\n"
    "time per second of the clocks, so they do not depend on other work of the machine."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLoads:
    """The processor time of each role for one second of the clocks."""

    scheduler: float
    intake: float
    hub: float
    actors: list[float]
    pace: float  # Sampled tokens over those of clocks that never wait.


def run_suite(suite: Suite) -> None:
    """Measure in five minutes."""
    suite.title(LEGEND)
    with suite.check("engines") as folder:
        loads = measure(folder, num_engines=NUM_ENGINES, per_process=ENGINES_PER_PROCESS)
        busiest = max(loads.actors)
        suite.at_most("scheduler", loads.scheduler, "of a core", MAX_SCHEDULER)
        suite.at_most("learner's intake", loads.intake, "of a core", MAX_INTAKE)
        note = f"the busiest of {len(loads.actors)}, {ENGINES_PER_PROCESS} engines in each"
        suite.at_most("actor process", busiest, "of a core", MAX_ACTOR, note)
        most = MAX_ACTOR / busiest * ENGINES_PER_PROCESS
        suite.figure("engines of one actor process", most, "", f"at {MAX_ACTOR:g} of a core")
        suite.figure("environments", loads.hub, "of a core", "the hub and its workers")
        suite.figure("pace of the clocks", loads.pace, "", "1: no clock ever waits for a request")


def measure(
    folder: Path, *, num_engines: int, per_process: int, window_s: float = WINDOW_S
) -> RoleLoads:
    """Start all roles, wait until every slot has played an episode, and measure a window."""
    run_dir = prepare_run(folder, per_process=per_process)
    clocks_dir = folder / "c"
    clocks_dir.mkdir()
    (clocks_dir / COUNTER).write_bytes(struct.pack("q", 0))
    names = [actor_name(i) for i in range(-(-num_engines // per_process))]
    engines = [engine for name in names for engine in engine_names(name, per_process)]
    with ExitStack() as children:

        def start(name: str, *argv: str) -> ChildProcess:
            """Start one role as a process."""
            log = folder / f"{name}.txt"
            return children.enter_context(child(name, [*argv], log=log, env=ONE_THREAD))

        where = (f"run.dir={folder}", f"run.name={run_dir.root.name}")
        hub = start("envhub", "run.py", "envhub", *where)
        scheduler = start("scheduler", "run.py", "scheduler", *where)
        scheduler.wait_until((run_dir.addresses / "scheduler").exists, timeout_s=START_S)
        intake = start("intake", "-m", "benchmarks.transport", "intake", str(run_dir.root))
        token_s = SLOWDOWN * SLOTS / TOKENS_PER_S
        arguments = (str(clocks_dir), str(token_s), str(num_words(folder / "policy")), *engines)
        clocks = start("clocks", "-m", "benchmarks.engines.clocks", *arguments)
        actors = [
            start(name, "-m", "benchmarks.engines.actor", str(run_dir.root), name, str(clocks_dir))
            for name in names
        ]
        roles = [hub, scheduler, intake, clocks, *actors]
        _await_tokens(clocks_dir, len(engines) * SLOTS * EPISODE_TOKENS, roles)
        measured = [scheduler, intake, hub, *actors]
        before = [_cpu_s(role) for role in measured]
        num_before = read_tokens(clocks_dir)
        started = time.monotonic()
        _watch(roles, window_s)
        took_s = time.monotonic() - started
        num_tokens = read_tokens(clocks_dir) - num_before
        used = [_cpu_s(role) - s for role, s in zip(measured, before, strict=True)]
    clock_s = num_tokens / (len(engines) * TOKENS_PER_S)
    shares = [cpu_s / clock_s for cpu_s in used]
    pace = clock_s * SLOWDOWN / took_s
    return RoleLoads(
        scheduler=shares[0], intake=shares[1], hub=shares[2], actors=shares[3:], pace=pace
    )


def prepare_run(folder: Path, *, per_process: int) -> RunDir:
    """Write the configuration, keys and model's folder of a run that neither ends nor trains."""
    model = folder / "policy"
    shutil.copytree(ROOT / "configs" / "policies" / POLICY, model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = MAX_TOKENS
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    overrides = (
        f"run.dir={folder}",
        "run.name=r",
        f"model.path={model}",
        "train.num_steps=1000000",
        "tasks=[{env: textcraft, subset: depth4}]",
        "eval.before=false",
        "eval.after=false",
        "algorithm.filter_zero_variance=false",
        "horizon.kind=fixed",
        f"horizon.stages=[{NUM_TURNS}]",
        "groups.per_step=32",
        "scheduler.gate_margin=0",
        "scheduler.max_ahead_steps=15",
        f"scheduler.heartbeat_s={SLOWDOWN}",
        f"scheduler.dead_after_s={20 * SLOWDOWN}",
        f"actor.engines_per_process={per_process}",
        f"actor.max_concurrent={SLOTS}",
        "actor.adapt_concurrency=false",
        f"actor.max_model_len={MAX_TOKENS}",
        "actor.max_turn_tokens=200",
        f"learner.max_tokens_per_microbatch={MAX_TOKENS}",
    )
    cfg = load_config("quickstart", overrides)
    run_dir = RunDir(root=folder / "r")
    create_keys(run_dir.keys)
    save_config(cfg, run_dir.config)
    return run_dir


def num_words(model: Path) -> int:
    """Return the number of words that a model's tokenizer can decode."""
    tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    return len(tokenizer["model"]["vocab"])


def read_tokens(folder: Path) -> int:
    """Return the number of tokens that all clocks have sampled."""
    return struct.unpack("q", (folder / COUNTER).read_bytes())[0]


def _await_tokens(clocks_dir: Path, num_tokens: int, roles: list[ChildProcess]) -> None:
    """Wait until the clocks have sampled so many tokens. Raises: LongstrideError: a role failed."""
    deadline = time.monotonic() + START_S
    while read_tokens(clocks_dir) < num_tokens:
        if time.monotonic() > deadline:
            logs = ", ".join(str(role.log_path) for role in roles)
            raise LongstrideError(f"the engines have not played {num_tokens} tokens, see {logs}")
        _watch(roles, POLL_S)


def _watch(roles: list[ChildProcess], seconds: float) -> None:
    """Wait, while all roles run. Raises: LongstrideError: a role ended with an error."""
    end_at = time.monotonic() + seconds
    while (left_s := end_at - time.monotonic()) > 0:
        for role in roles:
            check_end(role)
        time.sleep(min(POLL_S, left_s))


def _cpu_s(role: ChildProcess) -> float:
    """Return the processor seconds of a role and of its child processes."""
    process = psutil.Process(role.pid)
    processes = [process, *process.children(recursive=True)]
    return sum(sum(member.cpu_times()[:2]) for member in processes)

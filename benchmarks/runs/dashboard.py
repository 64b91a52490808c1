"""The suite `dashboard`: its response times with a large journal, and its cost during a run."""

import json
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import psutil

from benchmarks.runs.real_run import TRAINING_ALONE, check_end, child, running
from benchmarks.table import BenchTable
from common.dashboard.web.app import STATIC
from common.errors import LongstrideError
from common.http.blocking import request
from common.launch.process import ChildProcess
from common.repository import ROOT
from common.store.journal import JournalWriter
from common.store.metrics import tail_metrics
from common.store.run_dir import RunDir
from common.wire.messages import EndReason
from learner.simulator.synthetic import synthetic_trajectory

NUM_EPISODES = 100_000
NUM_TOKENS = 60
MOST_TOKENS = 50_000
# Tries of each request. The fastest counts, because other programs also use the processor.
NUM_TRIES = 5
START_S = 60.0
PAGE = ("", *(f"static/{each.relative_to(STATIC)}" for each in sorted(STATIC.rglob("*.[chjs]*s"))))
LOOK = ("api/runs", "api/run/{run}", "api/run/{run}/metrics")
FILTERS: tuple[dict[str, str], ...] = (
    {},
    {"env": "env3", "min_reward": "0.5", "text": "item-12", "sort": "best"},
    {"text": "9", "sort": "surprising", "success": "1", "max_turns": "3"},
    {"group": "g0000077"},
)
MAX_FIRST_S = 1.5
MAX_LIST_S = 0.3
MAX_OPEN_S = 0.15
MAX_RSS_MB = 300.0
MAX_PAGE_KB = 300.0
MAX_FRAC = 0.01
# The page is open between these steps; the engines start before them.
FIRST_STEP = 4
LAST_STEP = 40
RUN_S = 900.0
EVERY_S = 5.0  # Interval of an open page's updates, as in its script.
SAID = "dashboard: "


def run_suite(table: BenchTable) -> None:
    """Measure the server over 100,000 episodes, then during a quickstart, in five minutes."""
    with tempfile.TemporaryDirectory(prefix="longstride-page-") as folder:
        table.title(f"{NUM_EPISODES:,} episodes of {NUM_TOKENS} tokens, one of {MOST_TOKENS:,}")
        table.attempt("a large journal", lambda: add_answers(table, Path(folder)))
        table.title(f"quickstart, steps {FIRST_STEP} to {LAST_STEP}, the Run view open")
        table.attempt("beside a run", lambda: add_presence(table, Path(folder)))


def add_answers(table: BenchTable, folder: Path, *, num: int = NUM_EPISODES) -> None:
    """Write the response times of a server over `num` episodes, and its memory."""
    write_run(folder / "large", num)
    argv = ["run.py", "dashboard", "large", f"run.dir={folder}", "port=0"]
    log = folder / "server.log"
    env = {"XDG_CACHE_HOME": str(folder / "cache")}
    with child("dashboard", argv, log=log, env=env) as server:
        server.wait_until(
            lambda: log.read_text(encoding="utf-8").startswith("http"), timeout_s=START_S
        )
        url = log.read_text(encoding="utf-8").split()[0]
        first_s, num_bytes = load(url, "large")
        name = "first load, nothing of the journal read before"
        table.at_most(name, first_s, "s", MAX_FIRST_S)
        table.at_most("page without data, as it is sent", num_bytes / 1e3, "kB", MAX_PAGE_KB)
        read_s = _wait_until_read(url)
        table.figure("until all of the journal is read", first_s + read_s, "s")
        loads = [load(url, "large")[0] for _ in range(NUM_TRIES)]
        table.at_most("first load", min(loads), "s", MAX_FIRST_S)
        slowest = max(_fastest(f"{url}api/run/large/episodes?{urlencode(f)}") for f in FILTERS)
        table.at_most("list and filter, the slowest of four", slowest, "s", MAX_LIST_S)
        for what, episode in (("short", "g0000077/3"), ("long", f"g{num // 8:07d}/0")):
            seconds = _fastest(f"{url}api/run/large/episode?id={episode}")
            table.at_most(f"open a {what} episode", seconds, "s", MAX_OPEN_S)
        rss_mb = psutil.Process(server.pid).memory_info().rss / 1e6
        table.at_most("server's memory", rss_mb, "MB", MAX_RSS_MB)


def write_run(root: Path, num: int) -> None:
    """Write a journal of `num` short episodes in groups of eight, and a long one."""
    run_dir = RunDir(root=root)
    root.mkdir(parents=True)
    model = ROOT / "configs" / "policies" / "tiny"
    run_dir.config.write_text(
        json.dumps({"run": {"name": root.name}, "model": {"path": str(model)}}), encoding="utf-8"
    )
    writer = JournalWriter(run_dir.journal)
    mask = np.arange(NUM_TOKENS) >= NUM_TOKENS // 2
    for i in range(num + 1):
        length = MOST_TOKENS if i == num else NUM_TOKENS
        own = np.resize(mask, length)
        episode = synthetic_trajectory(
            5 + (np.arange(length) + i) % 90,
            own,
            group_id=f"g{i // 8:07d}",
            member=i % 8,
            version=i // 1000,
            env=f"env{i % 7}",
            item_id=f"a-train-item-{i % 997}",
            reward=(i % 100) / 100,
            is_success=i % 100 > 60,
            end_reason=EndReason.DONE if i % 100 > 60 else EndReason.HORIZON,
            logprobs=np.where(own, -0.01 * (i % 50), 0.0).astype(np.float32),
        )
        writer.append(episode)
    writer.close()


def load(url: str, run: str) -> tuple[float, int]:
    """Send all requests of an opening page; return seconds, and bytes without data."""
    started = time.monotonic()
    num_bytes = sum(_size(url + path) for path in PAGE)
    for path in LOOK:
        _size(url + path.format(run=run))
    return time.monotonic() - started, num_bytes


def _wait_until_read(url: str) -> float:
    started = time.monotonic()
    while time.monotonic() < started + START_S:
        answer = request(f"{url}api/runs", timeout_s=START_S, is_own=True)
        if json.loads(answer.body)[0]["indexed"] >= 1.0:
            return time.monotonic() - started
        _size(f"{url}api/run/large")  # The server indexes only runs that are requested.
        time.sleep(0.1)
    raise LongstrideError(f"the journal is not read within {START_S:g}s")


def _fastest(url: str) -> float:
    seconds: list[float] = []
    for _ in range(NUM_TRIES):
        started = time.monotonic()
        _size(url)
        seconds.append(time.monotonic() - started)
    return min(seconds)


def _size(url: str) -> int:
    """Return the number of compressed bytes of an answer, as a browser requests them."""
    headers = {"Accept-Encoding": "gzip"}
    answer = request(url, headers=headers, timeout_s=START_S, is_own=True)
    if not answer.is_ok:
        raise LongstrideError(f"{url} answered {answer.shown}")
    return len(answer.body)


def add_presence(table: BenchTable, folder: Path) -> None:
    """Write the processor seconds of a dashboard with an open page over those of the run."""
    settings = (*TRAINING_ALONE, f"train.num_steps={LAST_STEP + 4}", "dashboard=true")
    with running("seen", settings, folder=folder) as run:
        ours, roles, num_looks = look_on(run, RunDir(root=folder / "seen"))
        check_end(run)
    note = f"{ours:.2f} of {roles:.0f} CPU-s, {num_looks} looks"
    table.at_most("dashboard over the roles of the run", ours / roles, "", MAX_FRAC, note)


def look_on(run: ChildProcess, run_dir: RunDir) -> tuple[float, float, int]:
    """Send the requests of an open page; return CPU-s (dashboard's, roles') and their number.

    Raises: LongstrideError: the run ended before its last step, or was not in time.
    """
    began = time.monotonic()
    num = 0
    before: tuple[float, float] | None = None
    while time.monotonic() < began + RUN_S and run.poll() is None:
        lines = run.log_tail(max_lines=1000)
        said = next((line.removeprefix(SAID) for line in lines if line.startswith(SAID)), "")
        last = tail_metrics(run_dir.metrics, num_steps=1)
        step = int(last[0].get("step") or 0) if last else 0
        if said and step >= FIRST_STEP:
            before = before or used_by(run.pid)
            for path in LOOK:
                _size(said + path.format(run=run.name))
            num += 1
        if before and step >= LAST_STEP:
            after = used_by(run.pid)
            return after[0] - before[0], after[1] - before[1], num
        time.sleep(EVERY_S)
    raise LongstrideError(f"run {run.name} did not reach step {LAST_STEP}, see {run.log_path}")


def used_by(launcher: int) -> tuple[float, float]:
    """Return the processor seconds of the dashboard below a launcher, and of all others."""
    ours = 0.0
    roles = 0.0
    for process in [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            used_s = sum(process.cpu_times()[:2])
            if "dashboard" in process.cmdline():
                ours += used_s
            else:
                roles += used_s
    return ours, roles

"""Laws of the suite of faults: it hits whom it names, and counts what that cost."""

import io
import itertools
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.chaos.clock import make_clock
from benchmarks.chaos.faults import (
    ALL_FAULTS,
    Fault,
    FaultType,
    FaultyRun,
    NotPossible,
    deal,
    reset_connections,
)
from benchmarks.chaos.suite import (
    ADAPTERS,
    DELTA,
    SHORT,
    USUAL,
    CampaignLog,
    CampaignSize,
    InjectedFault,
    add_end,
    quantile,
)
from benchmarks.chaos.watch import StepObserver
from benchmarks.real_run import Role, roles_below
from benchmarks.suite import Suite
from common.store.run_dir import RunDir

NOBODY = 1 << 30  # no process has this number


@contextmanager
def python(code: str, env: dict[str, str] | None = None) -> Generator[subprocess.Popen[str]]:
    """Run a line of Python until the end of the block."""
    argv, pipe = [sys.executable, "-c", code], subprocess.PIPE
    environ = {**os.environ, **(env or {})}
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, encoding="utf-8", env=environ) as child:
        try:
            yield child
        finally:
            child.kill()


def read_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def test_every_fault_comes_once_per_round() -> None:
    first, second = (list(itertools.islice(deal(ALL_FAULTS, seed=s), 40)) for s in (0, 1))
    deck = len(ALL_FAULTS)
    assert set(first[:deck]) == set(ALL_FAULTS)
    assert Counter(first).most_common(1)[0][1] == 2
    assert first == list(itertools.islice(deal(ALL_FAULTS, seed=0), 40))
    assert first != second


def test_every_role_is_killed_and_stopped() -> None:
    for kind in (FaultType.KILL, FaultType.STOP):
        assert {fault.role for fault in ALL_FAULTS if fault.kind is kind} == set(Role)


def test_fault_cost_excludes_undisturbed_step_time() -> None:
    killed = InjectedFault(
        fault=Fault(FaultType.KILL, Role.LEARNER), began_s=4.5, ended_s=4.5, step_s=6.5
    )
    campaign = CampaignLog(injected=[killed], step_times=[0.0, 2.0, 4.0, 11.0, 13.0, 15.0])
    assert campaign.quiet_step_s == 2.0
    assert campaign.lost_s == 15.0 - 5 * 2.0  # the steps that it began to make are lost, too


def test_campaign_without_a_fault_fails(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    parts = dict.fromkeys(("trained", "filtered", "stale", "failed", "in_flight", "lost"), 0)
    run_dir.ledger.write_text(json.dumps({"issued": 0, "reissued": 0, **parts}), encoding="utf-8")
    run_dir.steps.parent.mkdir()
    run_dir.steps.write_text('{"version": 1, "groups": []}\n', encoding="utf-8")
    run_dir.metrics.touch()
    run_dir.logs.mkdir()
    (run_dir.logs / "learner.log").touch()
    suite = Suite(out=io.StringIO())
    fault = InjectedFault(fault=ALL_FAULTS[0], began_s=0.0, ended_s=1.0)
    add_end(suite, run_dir, num_steps=1, campaign=CampaignLog(injected=[fault]))
    assert suite.failed == []
    add_end(suite, run_dir, num_steps=1, campaign=CampaignLog())
    assert suite.failed == ["faults"]


def test_quantiles_are_of_values_that_were_measured() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile(list(map(float, range(100))), 0.95) == 94.0


def test_steps_rewritten_by_learner_count_once(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    watch = StepObserver(run_dir)
    assert watch.poll_steps() == 0

    def write(*steps: int, part: str = "") -> int:
        lines = "".join(json.dumps({"step": step}) + "\n" for step in steps)
        run_dir.metrics.write_text(lines + part, encoding="utf-8")
        return watch.poll_steps()

    assert write(1, 2, 3, part='{"step"') == 3
    assert write(1, 2) == 3  # the learner died, and began behind its checkpoint
    assert write(1, 2, 3, 4) == 4


def test_actor_is_back_after_a_report_since_the_fault(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    watch = StepObserver(run_dir)
    actor = {"is_dead": False, "last_seen_s": 1.0, "tokens_per_s": 9.0}

    def is_back(*actors: dict[str, Any], after_s: float) -> bool:
        run_dir.status.write_text(json.dumps({"actors": actors}), encoding="utf-8")
        since = run_dir.status.stat().st_mtime - after_s
        return watch.is_back(Role.ACTOR, since=since, num_steps=0)

    assert is_back(actor, after_s=2.0)
    assert not is_back(actor, after_s=0.5)  # Its report precedes the fault.
    assert not is_back(actor | {"tokens_per_s": 0.0}, after_s=2.0)
    assert not is_back(actor, actor | {"last_seen_s": 3.0}, after_s=2.0)  # one of two
    assert is_back(actor, actor | {"last_seen_s": 9.0, "is_dead": True}, after_s=2.0)
    assert not is_back(actor | {"is_dead": True}, after_s=2.0)


def test_reset_reaches_both_ends_of_one_connection_only() -> None:
    code = (
        "import socket, sys; port = int(sys.stdin.readline());"
        "s = socket.create_connection(('127.0.0.1', port)); print('connected', flush=True);\n"
        "try:\n  s.recv(1)\n"
        "except OSError as error:\n  print(type(error).__name__, flush=True)"
    )
    with socket.socket() as listener, python(code) as child:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        print(port, file=child.stdin, flush=True)
        ours, _ = listener.accept()
        with ours, socket.create_connection(("127.0.0.1", port)) as other:
            assert read_line(child) == "connected"
            try:
                num_reset = reset_connections(psutil.Process(child.pid))
            except OSError as error:
                pytest.skip(f"not allowed here: {error}")
            assert num_reset == 1
            with pytest.raises(ConnectionResetError):
                ours.recv(1)
            accepted, _ = listener.accept()
            with accepted:
                other.sendall(b"x")
                assert accepted.recv(1) == b"x"


def test_clock_jump_affects_the_run_but_not_its_waits(tmp_path: Path) -> None:
    clock = make_clock(tmp_path)
    if clock is None:
        pytest.skip("no C compiler here")
    code = (
        "import sys, threading, time\n"
        "for line in sys.stdin:\n"
        "  began = time.monotonic(); threading.Event().wait(0.05); time.sleep(0.01)\n"
        "  print(time.time(), time.monotonic() - began, flush=True)"
    )
    with python(code, clock.environment) as child:

        def ahead_s() -> float:
            print("now", file=child.stdin, flush=True)
            wall_s, waited_s = map(float, read_line(child).split())
            assert 0.04 < waited_s < 10.0
            return wall_s - time.time()

        assert abs(ahead_s()) < 10
        for seconds in (3_600, -7_200):
            clock.set_ahead(seconds)
            assert abs(ahead_s() - seconds) < 10


def test_missing_process_cannot_be_hit(tmp_path: Path) -> None:
    assert roles_below(NOBODY) == {}
    scene = FaultyRun(supervisor_pid=NOBODY, run_dir=RunDir(root=tmp_path), disk=None)
    with pytest.raises(NotPossible, match="no learner runs"):
        scene.strike(Fault(FaultType.KILL, Role.LEARNER))
    with pytest.raises(NotPossible, match="not an administrator"):
        scene.strike(Fault(FaultType.DISK_FULL))
    with pytest.raises(NotPossible, match="no C compiler"):
        scene.strike(Fault(FaultType.CLOCK))


def test_temporary_faults_end_with_their_time(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text("import time; print(1, flush=True); time.sleep(600)", encoding="utf-8")
    argv = [sys.executable, str(script), "learner"]
    limits: list[int] = []

    def limit() -> int:
        return resource.prlimit(child.pid, resource.RLIMIT_AS)[0]

    class Limited(FaultyRun):
        def elapse(self) -> None:
            limits.append(limit())

    class Stopped(FaultyRun):
        def elapse(self) -> None:
            assert os.waitid(os.P_PID, child.pid, os.WSTOPPED) is not None

    with subprocess.Popen(argv, stdout=subprocess.PIPE, encoding="utf-8") as child:
        read_line(child)
        pid = os.getpid()
        run_dir = RunDir(root=tmp_path)
        try:
            before = limit()
            Limited(supervisor_pid=pid, run_dir=run_dir, disk=None).strike(
                Fault(FaultType.NO_MEMORY, Role.LEARNER)
            )
            assert limits[0] != before == limit()
            Stopped(supervisor_pid=pid, run_dir=run_dir, disk=None).strike(
                Fault(FaultType.STOP, Role.LEARNER)
            )
            assert os.waitid(os.P_PID, child.pid, os.WCONTINUED) is not None
        finally:
            child.kill()


RANKS = """
import multiprocessing
import time

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=time.sleep, args=(600,), daemon=True)
    child.start()
    print(child.pid, flush=True)
    child.join()
"""


def test_rank_is_found_below_its_learner(tmp_path: Path) -> None:
    """The process that tracks resources for multiprocessing is no rank."""
    script = tmp_path / "run.py"
    script.write_text(RANKS, encoding="utf-8")
    argv = [sys.executable, str(script), "learner"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, encoding="utf-8") as child:
        rank = int(read_line(child))
        try:
            roles = roles_below(os.getpid())
            assert [each.pid for each in roles[Role.LEARNER]] == [child.pid]
            assert [each.pid for each in roles[Role.RANK]] == [rank]
        finally:
            psutil.Process(rank).kill()
            child.kill()


@pytest.mark.parametrize("size", [SHORT, USUAL, DELTA, ADAPTERS])
def test_no_size_gives_a_setting_twice(size: CampaignSize) -> None:
    """A run refuses a key that is given twice, after the suite has waited for it."""
    keys = [setting.partition("=")[0] for setting in (*size.settings, "train.num_steps=1")]
    assert len(keys) == len(set(keys))

"""Laws of finding what hangs though it lives: reported with stacks, and acted upon."""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common.config.run import OnStall, RunSection
from common.repository import ROOT
from common.stall.beacon import beacon_of, boot_id
from common.stall.report import culprits, read_activity
from common.store.run_dir import RunDir
from tools.launch.base import EXIT_FAILED, EXIT_FINISHED, LaunchState, RoleSpec, StallVerdict
from tools.launch.launcher import RoleSupervisor
from tools.launch.local import start_here
from tools.launch.stall_watch import StallWatch

WAITING = {  # a filtered-out step: the scheduler draws no more, the learner has too few
    "learner": "actors: a batch",
    "actor-0": "scheduler: leases",
    "scheduler": "",
    "envhub": "",
}
STATUS = {
    "phase": "train",
    "version": 7,
    "gate": "gate: 4 groups are ahead of the learner",
    "groups": {"open": 0, "ready": 4, "filtered": 9, "opened": 40},
    "ledger": {"trained": 70, "filtered": 36, "stale": 0, "eval": {"evaluated": 0}},
    "actors": [{"name": "actor-0", "waiting_for": "scheduler: leases", "unchanged_s": 1e6}],
    "learner": {"name": "learner-1", "waiting_for": "actors: a batch"},
}
EPISODE_S = 400.0  # Deadline of an episode.
ROLE = '''
import os, signal, sys, time
from pathlib import Path
import subprocess
from common.stall.beacon import beacon_of
from common.store.run_dir import RunDir

HELPER = """
import time
from common.stall.stacks import tell_stacks
def helper_hangs():
    time.sleep(600)
tell_stacks()
print("ready", flush=True)
helper_hangs()
"""

def hang_here():
    if sys.argv[2] == "hangs":
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGSTOP)

is_first = not Path(sys.argv[3]).exists()
Path(sys.argv[3]).touch()
with beacon_of(RunDir(root=Path(sys.argv[1])), "learner", start_s=600.0) as beacon:
    if is_first and sys.argv[2] == "hangs":  # Its start is no part of the hang.
        helper = subprocess.Popen([sys.executable, "-c", HELPER], stdout=subprocess.PIPE)
        helper.stdout.readline()
    beacon.note("main", "step 1")
    while not (Path(sys.argv[1]) / "alive" / "learner.json").exists():
        time.sleep(0.01)
    if is_first:
        hang_here()
'''


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hangs", "is stopped"])
def test_hung_role_is_reported_and_restarted(tmp_path: Path, how: str) -> None:
    run_dir = RunDir(root=tmp_path)
    argv = (sys.executable, "-c", ROLE, str(tmp_path), how, str(tmp_path / "started"))
    spec = RoleSpec(
        name="learner",
        argv=argv,
        log_path=tmp_path / "learner.log",
        env={"PYTHONPATH": str(ROOT)},
        ends_run=True,
    )
    deadline = time.monotonic() + 120.0

    def on_poll(_: LaunchState) -> None:
        assert time.monotonic() < deadline, "nobody noticed"

    with start_here() as starter:
        launcher = RoleSupervisor(
            starter,
            stop_timeout_s=lambda: 1.0,
            finish_grace_s=0.1,
            first_backoff_s=0.02,
            watch=StallWatch(run_dir, RunSection(stall_s=2.0), turn_s=1.0),
        )
        assert launcher.run([spec], on_poll=on_poll).exit_code == EXIT_FINISHED
    (report,) = run_dir.stalls.iterdir()
    text = report.read_text(encoding="utf-8")
    assert "learner hangs" in text
    if how == "hangs":
        assert "learner (main): step 1, since" in text
        assert "in hang_here" in text
        assert "in helper_hangs" in text
    else:
        assert "is stopped" in text


LEAVING = """
import sys, time
from pathlib import Path
from common.stall.beacon import beacon_of
from common.store.run_dir import RunDir

with beacon_of(RunDir(root=Path(sys.argv[1])), "learner", start_s=600.0) as beacon:
    beacon.note("main", "step 1")
print("left", flush=True)
time.sleep(600)  # what libraries do at the end of a process
"""


@pytest.mark.slow
def test_exiting_role_hangs_only_beyond_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "learner.log"
    argv = (sys.executable, "-c", LEAVING, str(tmp_path))
    spec = RoleSpec(name="learner", argv=argv, log_path=log, env={"PYTHONPATH": str(ROOT)})
    with start_here() as starter:
        process = starter.start(spec)
        try:
            deadline = time.monotonic() + 120.0
            while "left" not in (log.read_text(encoding="utf-8") if log.exists() else ""):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            began, now = time.time(), [time.monotonic()]
            monkeypatch.setattr(time, "time", lambda: began + 1_000.0)
            monkeypatch.setattr(time, "monotonic", lambda: now[0])
            watch = StallWatch(RunDir(root=tmp_path), RunSection(stall_s=60.0), turn_s=300.0)

            def restarted_within(seconds: float) -> list[str]:
                ends = now[0] + seconds
                while now[0] < ends:
                    now[0] += 2.0
                    if (verdict := watch.poll({"learner": process})) is not None:
                        return verdict.restart
                return []

            assert restarted_within(50.0) == []
            assert restarted_within(20.0) == ["learner"]
            monkeypatch.undo()
        finally:
            process.clear_away()


@pytest.mark.parametrize(
    ("waiting", "ends"),
    [
        (WAITING, ["learner", "actor-0", "scheduler"]),
        (WAITING | {"actor-0": "envhub: http://x does not answer"}, ["envhub"]),
        (WAITING | {"actor-0": ""}, ["actor-0"]),
        (WAITING | {"actor-0": "agents: their next request"}, ["actor-0"]),
        (WAITING | {"learner": "", "scheduler": "learner: gate"}, ["learner"]),
        (WAITING | {"learner": "disk: a checkpoint"}, ["learner"]),
    ],
)
def test_culprit_is_end_or_cycle_of_waits(waiting: dict[str, str], ends: list[str]) -> None:
    if waiting["actor-0"] == "scheduler: leases" and ends != ["learner"]:
        waiting = waiting | {"scheduler": "learner: gate: 4 groups are ahead of the learner"}
    assert culprits(waiting, {}) == ends


def test_actor_of_any_name_is_a_culprit() -> None:
    members = [{"name": "actor-0", "waiting_for": "scheduler: leases"}, {"name": "extra"}]
    waiting = WAITING | {"extra": "", "scheduler": "learner: gate: 4 groups"}
    assert culprits(waiting, {"actors": members}) == ["extra"]


@dataclass
class StoodProcess:
    """A process that was started long ago."""

    started_at: float | None = 0.0
    waits_for: str = ""

    def poll(self) -> int | None:
        return None

    def terminate(self) -> None: ...

    def clear_away(self) -> None: ...

    def log_tail(self, *, max_lines: int) -> list[str]:
        return []


class Standing:
    """A run whose roles live and wait for each other, on a clock of its own."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, **policy: Any) -> None:
        self.run_dir = RunDir(root=root)
        self.run_dir.alive.mkdir()
        self.now = 1_000.0
        self.status: dict[str, Any] = dict(STATUS)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.waiting = dict(WAITING)
        self.work = dict.fromkeys(WAITING, "serving")
        self.since: float | None = None  # None: all work has begun just now.
        run = RunSection(**policy)
        self.watch = StallWatch(self.run_dir, run, turn_s=300.0, episode_s=EPISODE_S)

    def verdict_within(self, seconds: float) -> StallVerdict | None:
        """Return the first verdict within these seconds."""
        processes = {name: StoodProcess() for name in WAITING}
        ends = self.now + seconds
        while self.now < ends:
            self.now += 2.0
            for name, waits_for in self.waiting.items():
                since = self.now if self.since is None else self.since
                line = {"what": self.work[name], "waits_for": waits_for, "since": since}
                told = {"pid": 1, "began_at": 1.0, "written_at": self.now, "boot_id": boot_id()}
                path = self.run_dir.alive / f"{name}.json"
                path.write_text(json.dumps(told | {"lines": {"main": line}}), encoding="utf-8")
            self.run_dir.status.write_text(json.dumps(self.status), encoding="utf-8")
            if (verdict := self.watch.poll(processes)) is not None:
                return verdict
        return None


def test_results_count_from_the_launchers_start(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    watch = StallWatch(run_dir, RunSection(), turn_s=1.0)
    assert not watch.has_worked("actor-0")  # There is no scheduler yet.

    def is_after(status: dict[str, Any], role: str) -> bool:
        run_dir.status.write_text(json.dumps(status), encoding="utf-8")
        return watch.has_worked(role)

    assert not is_after(STATUS, "learner")  # A resumed run has old results.
    assert not is_after(STATUS | {"phase": "eval", "groups": {"opened": 9, "ready": 4}}, "actor-0")
    played = STATUS | {"ledger": {"trained": 70, "filtered": 37, "eval": {"evaluated": 0}}}
    assert is_after(played, "actor-0")
    assert not is_after(played, "learner")
    assert is_after(STATUS | {"version": 8}, "learner")
    assert is_after(STATUS | {"version": 8}, "actor-0")


def test_stalled_run_is_reported_and_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Standing(tmp_path, monkeypatch, stall_s=60.0)
    assert run.verdict_within(55.0) is None
    verdict = run.verdict_within(10.0)
    assert verdict is not None
    assert verdict.restart == ["learner", "actor-0", "scheduler"]
    (report,) = run.run_dir.stalls.iterdir()
    text = report.read_text(encoding="utf-8")
    assert "finished no episode and no step" in text
    assert "learner (main): waits for actors: a batch, since" in text
    assert "actor-0 (main): waits for scheduler: leases" in text
    assert "groups 0 open, 4 ready, 9 filtered" in text
    assert run.verdict_within(55.0) is None, "the restart has its time, too"
    run.status |= {"version": 8}
    assert run.verdict_within(55.0) is None, "it goes on"


def test_unrecoverable_stall_ends_the_run_by_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Standing(tmp_path, monkeypatch, stall_s=20.0)
    verdicts = [run.verdict_within(60.0) for _ in range(4)]
    assert [each and each.is_stop for each in verdicts] == [False, False, False, True]
    assert [each and len(each.restart) for each in verdicts] == [3, 4, 4, 0]
    (tmp_path / "b").mkdir()
    warned = Standing(tmp_path / "b", monkeypatch, stall_s=20.0, on_stall=OnStall.WARN)
    verdict = warned.verdict_within(60.0)
    assert verdict is not None
    assert (verdict.restart, verdict.is_stop) == ([], False)
    (tmp_path / "c").mkdir()
    stopped = Standing(tmp_path / "c", monkeypatch, stall_s=20.0, on_stall=OnStall.STOP)
    verdict = stopped.verdict_within(60.0)
    assert verdict is not None
    assert verdict.is_stop


def test_long_turns_are_no_stall_until_overdue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Standing(tmp_path, monkeypatch, stall_s=20.0)
    run.status["actors"] = [{"name": "actor-0", "waiting_for": "", "unchanged_s": 3.0}]
    assert run.verdict_within(400.0) is None, "turn follows turn"
    run.status["actors"] = [{"name": "actor-0", "waiting_for": "", "unchanged_s": 250.0}]
    assert run.verdict_within(100.0) is None, "a turn has 300 s"


def test_silent_agent_is_no_stall_before_its_episodes_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Standing(tmp_path, monkeypatch, stall_s=20.0)
    run.waiting["actor-0"] = "agents: their next request"
    actor = {"name": "actor-0", "waiting_for": run.waiting["actor-0"], "unchanged_s": EPISODE_S}
    run.status["actors"] = [actor]
    assert run.verdict_within(EPISODE_S + 50.0) is None, "the deadline changes the actor's state"
    actor["unchanged_s"] = EPISODE_S + 22.0
    verdict = run.verdict_within(60.0)
    assert verdict is not None
    assert verdict.restart == ["actor-0"], "the hub has no part in it"


def test_run_that_waits_for_a_service_is_no_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Standing(tmp_path, monkeypatch, stall_s=20.0)
    hub = {"name": "envhub", "paused": {"dataset": "judge style does not answer"}}
    run.status["hubs"] = [hub]
    assert run.verdict_within(400.0) is None
    hub["paused"] = {}
    assert run.verdict_within(15.0) is None
    verdict = run.verdict_within(60.0)
    assert verdict is not None
    assert "finished no episode" in verdict.report


def test_run_that_waits_for_its_teacher_is_no_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Standing(tmp_path, monkeypatch, stall_s=20.0)
    run.status["learner"] = {"waiting_for": "teacher: algorithm.teacher.url=u is down"}
    assert run.verdict_within(100.0) is None
    run.status["learner"] = {"waiting_for": "actors: a batch"}
    assert run.verdict_within(15.0) is None
    assert run.verdict_within(60.0) is not None


def test_long_step_is_no_stall_while_microbatches_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Standing(tmp_path, monkeypatch, stall_s=20.0)
    run.work["learner"], run.waiting["learner"] = "step 1", ""
    assert run.verdict_within(100.0) is None
    run.since = run.now
    assert run.verdict_within(15.0) is None
    verdict = run.verdict_within(20.0)
    assert verdict is not None
    assert "learner hangs: main has been in 'step 1'" in verdict.report


def test_renewed_work_has_begun_just_now(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    with beacon_of(run_dir, "learner", start_s=600.0) as beacon:
        beacon.note("main", "step 1")
        begun_at = time.monotonic()
        beacon.renew("main")
        beacon.renew("intake")  # It has no work.
        line = None
        while line is None or line.since < begun_at:
            activity = read_activity(run_dir, "learner")
            line = activity.lines.get("main") if activity else None
        assert line.what == "step 1"
        assert activity is not None
        assert [*activity.lines] == ["main"]


class Steady:
    """A run that makes progress, whatever dies."""

    num_asked = 0

    def poll(self, processes: object) -> None: ...

    def progress(self, role: str) -> object:
        self.num_asked += 1
        return self.num_asked

    def has_worked(self, role: str) -> bool:
        return True

    def is_over(self) -> bool:
        return False


@pytest.mark.parametrize("has_progress", [True, False])
def test_repeated_deaths_end_run_only_without_progress(tmp_path: Path, has_progress: bool) -> None:
    argv = (sys.executable, "-S", "-c", "raise SystemExit(3)")
    spec = RoleSpec(name="actor-9", argv=argv, log_path=tmp_path / "log", max_restarts=2)
    deaths: list[str] = []

    def on_poll(_: LaunchState) -> None:
        if len(deaths) < 6:
            deaths[:] = [*deaths, "polled"]
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    with start_here() as starter:
        launcher = RoleSupervisor(
            starter,
            stop_timeout_s=lambda: 1.0,
            first_backoff_s=0.01,
            on_poll_every_s=0.25,
            watch=Steady() if has_progress else None,
        )
        ending = launcher.run([spec], on_poll=on_poll)
    assert ending.exit_code == (128 + signal.SIGTERM if has_progress else EXIT_FAILED)

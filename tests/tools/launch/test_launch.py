"""Laws of the local launcher, with real processes of a few lines."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from common.config.load import load_config
from common.config.run import RunSection
from common.log import kept_in
from common.store.run_dir import RunDir
from tests.bounds import at_most
from tests.processes import is_gone
from tools.launch.base import Ending, LaunchState, RoleSpec, StallDetector
from tools.launch.launcher import RoleSupervisor
from tools.launch.local import start_here
from tools.launch.roles import make_role_specs
from tools.launch.train import reachable_at, stop_timeout_s

STAY = "import signal; signal.pause()"
TERM_NOTED = """
import signal, sys, time
def end(*_):
    with open(sys.argv[1], 'a') as f: f.write(sys.argv[2] + '\\n')
    time.sleep(0.05)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
open(sys.argv[1] + '.' + sys.argv[2], 'w').close()
while True: signal.pause()
"""
SAVES_LATE = """
import signal, sys, time
def save(*_):
    time.sleep(float(sys.argv[2]))
    open(sys.argv[1], 'w').close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open(sys.argv[1] + '.ready', 'w').close()
while True: signal.pause()
"""
ENDS_WITH = """
import os, sys, time
while not os.path.exists(sys.argv[1]): time.sleep(0.01)  # whoever launches it has a deadline
time.sleep(0.1)  # and looks at the others meanwhile
"""
GRANDCHILD = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = 'import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()'
same = subprocess.Popen([sys.executable, '-S', '-c', code])
own = subprocess.Popen([sys.executable, '-S', '-c', code], start_new_session=True)
with open(sys.argv[1] + '.part', 'w') as f: f.write(f'{os.getpid()} {same.pid} {own.pid}')
os.rename(sys.argv[1] + '.part', sys.argv[1])
while True: signal.pause()
"""


def role(tmp_path: Path, name: str, code: str, *args: object, **policy: object) -> RoleSpec:
    return RoleSpec(
        name=name,
        argv=(sys.executable, "-S", "-c", code, *map(str, args)),
        log_path=tmp_path / "logs" / f"{name}.log",
        **policy,  # type: ignore[arg-type]
    )


def launch(
    specs: list[RoleSpec],
    on_poll: Callable[[], None] = lambda: None,
    *,
    stop_timeout_s: float = 5,
    quick_stop_s: float = 5,
    states: list[LaunchState] | None = None,
    watch: StallDetector | None = None,
) -> Ending:
    deadline = time.monotonic() + 60.0

    def on_poll_in_time(state: LaunchState) -> None:
        assert time.monotonic() < deadline, "the run did not end"
        if states is not None:
            states.append(state)
        on_poll()

    with start_here() as starter:
        launcher = RoleSupervisor(
            starter,
            stop_timeout_s=lambda: stop_timeout_s,
            quick_stop_s=min(stop_timeout_s, quick_stop_s),
            finish_grace_s=0.3,
            first_backoff_s=0.02,
            on_poll_every_s=0.02,
            watch=watch,
        )
        return launcher.run(specs, on_poll=on_poll_in_time)


def interrupt_when(
    condition: Callable[[], bool], number: int = signal.SIGTERM
) -> Callable[[], None]:
    """Return an on_poll that signals this very process once, when the condition holds."""
    sent: list[int] = []

    def on_poll() -> None:
        if not sent and condition():
            sent.append(number)
            os.kill(os.getpid(), number)

    return on_poll


def wait_for(condition: Callable[[], bool], *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_run_finishes_when_the_learner_exits_0(tmp_path: Path) -> None:
    learner = role(tmp_path, "learner", "print('done')", ends_run=True)
    ending = launch([role(tmp_path, "hub", STAY, stop_rank=2), learner])
    assert ending.exit_code == 0
    assert (tmp_path / "logs" / "learner.log").read_text(encoding="utf-8") == "done\n"


def test_killed_role_is_restarted(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    code = "import os, signal, sys; open(sys.argv[1], 'a').write(f'{os.getpid()} '); signal.pause()"
    killed: list[int] = []

    def on_poll() -> None:
        pids = (
            [int(pid) for pid in starts.read_text(encoding="utf-8").split()]
            if starts.exists()
            else []
        )
        if len(pids) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        elif pids and pids[-1] not in killed:
            killed.append(pids[-1])
            os.kill(pids[-1], signal.SIGKILL)

    actor, kept = role(tmp_path, "actor-0", code, starts), tmp_path / "logs" / "launcher.log"
    with kept_in(kept, "tools.launch"):
        ending = launch([actor], on_poll)
    assert ending.exit_code == 143
    assert len(killed) == 2
    assert (
        kept.read_text(encoding="utf-8").count(
            "role ended role=actor-0 exit=killed by SIGKILL restart="
        )
        == 2
    )


def test_cleanly_exited_role_restarts_only_after_grace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    starts = tmp_path / "starts"
    code = "import sys; open(sys.argv[1], 'a').write('x')"
    actor = role(tmp_path, "actor-0", code, starts, quiet_exit_grace_s=60.0)
    has_left = tmp_path / "left"
    learner = role(tmp_path, "learner", ENDS_WITH, has_left, ends_run=True)

    def on_poll() -> None:
        if "role exited normally role=actor-0" in caplog.messages:
            has_left.touch()

    with caplog.at_level("INFO", "tools.launch"):
        assert launch([actor, learner], on_poll).exit_code == 0
    assert starts.read_text(encoding="utf-8") == "x"
    assert "role exited normally role=actor-0" in caplog.messages  # and no word of beginning again


class Told:
    """A watch of a run that never stalls, and is over or not."""

    def __init__(self, *, is_over: bool) -> None:
        self._is_over = is_over

    def poll(self, processes: object) -> None: ...
    def progress(self, role: str) -> object: ...

    def has_worked(self, role: str) -> bool:
        return True

    def is_over(self) -> bool:
        return self._is_over


@pytest.mark.parametrize("is_over", [True, False])
def test_exited_role_of_finished_run_stays_away(
    is_over: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    starts, may_end, polls = tmp_path / "starts", tmp_path / "end", list[int]()
    code = "import sys; open(sys.argv[1], 'a').write('x')"
    scheduler = role(tmp_path, "scheduler", code, starts, max_restarts=99)
    learner = role(tmp_path, "learner", ENDS_WITH, may_end, ends_run=True)

    def on_poll() -> None:
        polls.extend([1] * ("role exited normally role=scheduler" in caplog.messages))
        has_returned = starts.exists() and len(starts.read_text(encoding="utf-8")) > 1
        if len(polls) > 20 if is_over else has_returned:  # its backoff is over since long
            may_end.touch()

    with caplog.at_level("INFO", "tools.launch"):
        assert launch([learner, scheduler], on_poll, watch=Told(is_over=is_over)).exit_code == 0
    assert (starts.read_text(encoding="utf-8") == "x") is is_over


@pytest.mark.parametrize("lingers_s", [0.0, 0.5], ids=["before it", "after it"])
def test_exited_role_returns_when_the_learner_restarts(tmp_path: Path, lingers_s: float) -> None:
    starts, lives = tmp_path / "starts", tmp_path / "lives"
    exits = f"""
import sys, time
with open(sys.argv[1], 'a') as starts: starts.write('x')
time.sleep({lingers_s})
"""
    scheduler = role(tmp_path, "scheduler", exits, starts)
    code = """
import os, sys, time
with open(sys.argv[2], 'a') as lives: lives.write('x')
wanted = len(open(sys.argv[2]).read())
while not os.path.exists(sys.argv[1]) or len(open(sys.argv[1]).read()) < wanted: time.sleep(.01)
sys.exit(2 - wanted)
"""
    learner = role(tmp_path, "learner", code, starts, lives, ends_run=True, max_restarts=2)
    assert launch([learner, scheduler], watch=Told(is_over=True)).exit_code == 0
    assert lives.read_text(encoding="utf-8") == "xx"
    assert len(starts.read_text(encoding="utf-8")) >= 2


def test_role_beyond_its_restarts_fails_the_run(tmp_path: Path) -> None:
    code = "print('early'); raise RuntimeError('no such device')"
    ending = launch([role(tmp_path, "learner", code, ends_run=True, max_restarts=2)])
    assert ending.exit_code == 1
    assert "learner failed after 2 restarts: exit code 1" in ending.reason
    assert "RuntimeError: no such device" in ending.reason
    assert str(tmp_path / "logs" / "learner.log") in ending.reason
    assert (tmp_path / "logs" / "learner.log").read_text(encoding="utf-8").count("early") == 3


def test_configuration_error_of_a_role_prevents_retry(tmp_path: Path) -> None:
    code = "print('error: actor.name=a: is taken'); raise SystemExit(2)"
    ending = launch([role(tmp_path, "hub", STAY), role(tmp_path, "actor-0", code)])
    assert ending.exit_code == 2
    assert ending.reason == "actor-0: actor.name=a: is taken"
    assert (tmp_path / "logs" / "actor-0.log").read_text(encoding="utf-8").count("error") == 1


FAILS_TO_START = """
import sys
starts = sys.argv[1]
open(starts, 'a').write('x')
num = len(open(starts).read())
print(f'error: EngineError: no room for {num} GiB.' if len(sys.argv) < 3 else f'error: {"a" * num}')
print('a library ends')
raise SystemExit(70)
"""


def test_two_identical_failed_starts_end_the_run(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    actor = role(tmp_path, "actor-0", FAILS_TO_START, starts)
    ending = launch([role(tmp_path, "hub", STAY), actor])
    assert starts.read_text(encoding="utf-8") == "xx"
    assert ending.exit_code == 1
    assert ending.reason == (
        "actor-0 cannot start: EngineError: no room for 2 GiB. Two starts failed with this error. "
        f"Log: {actor.log_path}"
    )


def test_different_start_failures_count_as_restarts(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    actor = role(tmp_path, "actor-0", FAILS_TO_START, starts, "differently", max_restarts=3)
    ending = launch([actor])
    assert starts.read_text(encoding="utf-8") == "xxxx"
    assert "actor-0 failed after 3 restarts: exit code 70" in ending.reason


def test_previously_working_role_restarts_after_failed_starts(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    code = "import sys\nif not open(sys.argv[1], 'a+').tell(): open(sys.argv[1], 'a').write('w');"
    code += f"raise SystemExit(1)\n{FAILS_TO_START}"
    ending = launch([role(tmp_path, "actor-0", code, starts, max_restarts=3)])
    assert starts.read_text(encoding="utf-8") == "wxxx"
    assert "actor-0 failed after 3 restarts: exit code 70" in ending.reason


def test_configuration_error_is_found_before_later_output(tmp_path: Path) -> None:
    code = "print('error: model.path=a: is gone'); print('leaked a thing'); raise SystemExit(2)"
    ending = launch([role(tmp_path, "learner", code)])
    assert (ending.exit_code, ending.reason) == (2, "learner: model.path=a: is gone")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_stops_the_roles_in_order(number: int, code: int, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    names = ["envhub", "scheduler", "learner", "actor-0"]
    ranks = {"envhub": 2, "scheduler": 1}
    specs = [role(tmp_path, n, TERM_NOTED, notes, n, stop_rank=ranks.get(n, 0)) for n in names]
    are_ready = lambda: all((tmp_path / f"notes.{name}").exists() for name in names)  # noqa: E731
    assert launch(specs, interrupt_when(are_ready, number)).exit_code == code
    told = notes.read_text(encoding="utf-8").split()
    assert (set(told[:2]), told[2:]) == ({"learner", "actor-0"}, ["scheduler", "envhub"])


def test_stop_kills_processes_that_ignore_it(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    specs = [role(tmp_path, "actor-0", GRANDCHILD, pids)]
    asked: list[float] = []

    def are_there() -> bool:
        if pids.exists():
            asked.append(time.monotonic())
        return bool(asked)

    launch(specs, interrupt_when(are_there), stop_timeout_s=0.5)
    assert time.monotonic() - asked[0] < at_most(3.0)
    for pid in pids.read_text(encoding="utf-8").split():
        wait_for(lambda pid=pid: is_gone(int(pid)), timeout_s=60.0)


@pytest.mark.slow
def test_slow_learner_checkpoint_survives_the_stop(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    run_dir = RunDir(root=tmp_path)
    run_dir.metrics.write_text(
        '{"step": 1, "train/step_s": 1.5, "train/checkpoint_s": 1.0}\n', encoding="utf-8"
    )
    timeout_s = stop_timeout_s(run_dir, wanted_s=0.0)
    assert timeout_s == 3 * 2.5 + 5
    learner = role(tmp_path, "learner", SAVES_LATE, saved, 7.0, saves_at_stop=True)
    is_ready = (tmp_path / "saved.ready").exists
    states: list[LaunchState] = []
    ending = launch(
        [learner],
        interrupt_when(is_ready),
        states=states,
        stop_timeout_s=timeout_s,
        quick_stop_s=0.5,
    )
    assert ending.exit_code == 143
    assert saved.exists()
    assert states[-1].stop_deadline is not None  # what the display shows meanwhile


def test_role_without_checkpoint_gets_the_short_stop(tmp_path: Path) -> None:
    pids, saved = tmp_path / "pids", tmp_path / "saved"
    actor = role(tmp_path, "actor-0", GRANDCHILD, pids)
    learner = role(tmp_path, "learner", SAVES_LATE, saved, 0.6, saves_at_stop=True)
    is_ready = lambda: pids.exists() and (tmp_path / "saved.ready").exists()  # noqa: E731
    began = time.monotonic()
    launch([actor, learner], interrupt_when(is_ready), stop_timeout_s=60, quick_stop_s=0.2)
    assert saved.exists()
    assert time.monotonic() - began < 50.0


def test_second_signal_skips_the_learner_checkpoint(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    learner = role(tmp_path, "learner", SAVES_LATE, saved, 60.0, saves_at_stop=True)
    states: list[LaunchState] = []

    def on_poll() -> None:
        if (tmp_path / "saved.ready").exists() or states[-1].stop_deadline is not None:
            os.kill(os.getpid(), signal.SIGINT)

    assert launch([learner], on_poll, stop_timeout_s=60, states=states).exit_code == 130
    assert not saved.exists()


def test_stop_deadline_follows_measurements_and_config(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    assert stop_timeout_s(run_dir, wanted_s=0.0) == 3 * (10 + 10) + 5  # nothing is known yet
    lines = ('{"step": 1, "train/step_s": 40, "train/checkpoint_s": 20}', '{"train/step_s": 30}')
    run_dir.metrics.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    assert stop_timeout_s(run_dir, wanted_s=0.0) == 3 * (40 + 20) + 5
    assert stop_timeout_s(run_dir, wanted_s=2.5) == 2.5
    run_dir.metrics.write_text(
        '{"step": 1, "train/step_s": 0.1, "train/checkpoint_s": 0.1}\n', encoding="utf-8"
    )
    assert stop_timeout_s(run_dir, wanted_s=0.0) == 10.0


def test_children_die_with_a_killed_role(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    orphans: list[int] = []

    def on_poll() -> None:
        if pids.exists() and not orphans:
            first, *rest = map(int, pids.read_text(encoding="utf-8").split())
            orphans.extend(rest)
            os.kill(first, signal.SIGKILL)
        elif orphans and all(is_gone(pid) for pid in orphans):
            os.kill(os.getpid(), signal.SIGTERM)

    actor = role(tmp_path, "actor-0", GRANDCHILD, pids, quiet_exit_grace_s=60.0)
    assert launch([actor], on_poll, stop_timeout_s=0.5).exit_code == 143
    assert len(orphans) == 2


def test_roles_die_with_a_killed_launcher(tmp_path: Path, repository: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from tools.launch.base import RoleSpec\n"
        "from tools.launch.launcher import RoleSupervisor\n"
        "from tools.launch.local import start_here\n"
        "pids, stay = sys.argv[1], sys.argv[2]\n"
        "argv = (sys.executable, '-S', '-c', stay, pids)\n"
        "spec = RoleSpec(name='a', argv=argv, log_path=Path(pids + '.log'))\n"
        "with start_here() as starter:\n"
        "    supervisor = RoleSupervisor(starter, stop_timeout_s=lambda: 5.0)\n"
        "    supervisor.run([spec], on_poll=lambda _: None)\n"
    )
    stay = (
        "import os, signal, sys; open(sys.argv[1] + '.part', 'w').write(str(os.getpid()));"
        "os.rename(sys.argv[1] + '.part', sys.argv[1]); signal.pause()"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code, str(pids), stay], cwd=repository)
    wait_for(pids.exists, timeout_s=20.0)
    pid = int(pids.read_text(encoding="utf-8"))
    assert not is_gone(pid)
    launcher.kill()
    launcher.wait()
    wait_for(lambda: is_gone(pid), timeout_s=10.0)


def test_run_consists_of_hub_scheduler_learner_actors(tmp_path: Path) -> None:
    make = partial(make_role_specs, RunSection(), RunDir(root=tmp_path), num_actors=2)
    specs = make(has_hub=True)
    names = ["envhub", "scheduler", "learner", "actor-0", "actor-1"]
    assert [spec.name for spec in specs] == names
    assert [spec.name for spec in specs if spec.ends_run] == ["learner"]
    assert specs[-1].argv[-1] == "actor.name=actor-1"
    assert all(spec.env["OMP_NUM_THREADS"] == "1" for spec in specs)
    assert [spec.name for spec in make(has_hub=False)] == names[1:]


def test_further_learner_nodes_stop_after_the_learner(repository: Path, tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    specs = make_role_specs(RunSection(), run_dir, num_actors=1, has_hub=False, num_rank_nodes=2)
    names = ["scheduler", "learner", "ranks-1", "ranks-2", "actor-0"]
    assert [spec.name for spec in specs] == names  # Actors get the resources that are left.
    assert [spec.stop_rank for spec in specs] == [1, 0, 1, 1, 0]
    assert specs[2].argv[1:3] == (str(repository / "run.py"), "learner")


def test_roles_listen_on_reachable_addresses_unless_configured() -> None:
    cfg = load_config("smoke", ["learner.host=10.1.0.7"])
    told = reachable_at(cfg, "10.0.0.1")
    hosts = (told.scheduler.host, told.learner.host, told.envhub.host)
    assert hosts == ("10.0.0.1", "10.1.0.7", "10.0.0.1")
    assert reachable_at(cfg, "127.0.0.1") == cfg  # all roles are on this machine


@pytest.mark.slow
def test_only_repeated_restarts_back_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "starts"
    code = (
        f"import time; open({str(path)!r}, 'a').write(f'{{time.monotonic()}} ')\n"
        "raise SystemExit(3)"
    )
    with start_here() as starter:
        launcher = RoleSupervisor(starter, stop_timeout_s=lambda: 1.0, first_backoff_s=2.0)
        spec = role(tmp_path, "learner", code, ends_run=True, max_restarts=2)
        assert launcher.run([spec], on_poll=lambda _: None).exit_code == 1
    assert re.findall(r"in_s=(\S+)", caplog.text) == ["0.2", "2.0"]
    first, second, third = map(float, path.read_text(encoding="utf-8").split())
    assert second - first >= 0.2
    assert third - second >= 2.0

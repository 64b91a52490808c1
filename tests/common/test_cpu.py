"""Laws of the processor seconds that a run counts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from common.cpu import CpuWatch, busy_s, cpu_metrics, cpu_seconds, family_cpu_s
from common.host.cgroups import cores_here
from common.stall.beacon import boot_id
from common.store.run_dir import RunDir

BURN = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"


def test_descendant_cpu_is_counted_per_role(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    run_dir.ledger.write_text('{"trained": 2}', encoding="utf-8")
    assert cpu_metrics(run_dir) == {}
    argv = [sys.executable, "-c", BURN, "run.py actor"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        CpuWatch(run_dir).sample()
        first = cpu_seconds(run_dir)
        assert 0.25 <= first["actor"] < 1.0  # the system counts in ticks
        assert first["launcher"] > 0.0
        CpuWatch(run_dir).sample()  # The launcher after a restart.
        assert cpu_seconds(run_dir)["actor"] >= 2 * first["actor"] - 0.05
        child.communicate(b"\n")
    found = cpu_metrics(run_dir)
    assert found["cpu/cores"] >= 1
    total = sum(cpu_seconds(run_dir).values())
    assert abs(found["cpu/per_trained_episode_s"] - total / 2) < 1e-6


def test_cpu_use_of_other_programs_is_separate(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    watch = CpuWatch(run_dir)
    watch.sample()
    watch._next = 0.0
    code = f"import os; os.setsid(); os.fork() and os._exit(0); {BURN}".replace(
        "; import", "\nimport"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()  # From the detached child.
        before = cpu_metrics(run_dir)["cpu/others_s"]
        watch.sample()
        assert cpu_metrics(run_dir)["cpu/others_s"] - before >= 0.2
        parent.communicate(b"\n")
    assert family_cpu_s() > 0.0


UNNAMED = "from setproctitle import setproctitle\nprint(flush=True); input()\nsetproctitle(' ')\n"


def test_exiting_process_keeps_its_role(tmp_path: Path) -> None:
    watch = CpuWatch(RunDir(root=tmp_path))
    argv = [sys.executable, "-c", UNNAMED + BURN, "run.py learner"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        watch.measure()
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        assert "learner" not in " ".join(psutil.Process(child.pid).cmdline())
        watch.measure()
        child.communicate(b"\n")
    assert watch.used()["learner"] >= 0.25


@pytest.mark.slow
def test_short_lived_children_count_for_their_role(tmp_path: Path) -> None:
    """Agents start and end between two samples; their parent's counters include them."""
    quick = "import time\nwhile time.process_time() < 0.3: pass"
    code = f"""
import subprocess, sys
for _ in range(2):
    subprocess.run([sys.executable, "-c", {quick!r}])
    print(flush=True); input()
"""
    watch = CpuWatch(RunDir(root=tmp_path))
    argv = [sys.executable, "-c", code, "run.py actor"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as role:
        assert role.stdin is not None
        assert role.stdout is not None
        role.stdout.readline()
        watch.measure()
        first = watch.used()["actor"]
        role.stdin.write(b"\n")
        role.stdin.flush()
        role.stdout.readline()
        watch.measure()
        watch.measure()  # nothing is counted twice
        second = watch.used()["actor"]
        role.communicate(b"\n")
    assert 0.25 <= first < 1.0
    assert 0.25 <= second - first < 1.0
    before = watch.used()
    watch.measure()  # The parent counts the ended role.
    after = watch.used()
    assert after["actor"] == before["actor"]
    assert after["launcher"] - before["launcher"] < 0.25


def test_container_quota_bounds_cores_and_busy_time(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/pod/app\n", encoding="utf-8")
    mount = f"30 23 0:1 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    (tmp_path / "mountinfo").write_text(mount, encoding="utf-8")
    folder = tmp_path / "pod" / "app"
    folder.mkdir(parents=True)
    (folder / "cpu.max").write_text("max 100000\n", encoding="utf-8")
    assert cores_here(tmp_path) == len(os.sched_getaffinity(0))
    (tmp_path / "cpu.max").write_text("50000 100000\n", encoding="utf-8")
    (tmp_path / "cpu.stat").write_text("usage_usec 7250000\nuser_usec 1\n", encoding="utf-8")
    assert cores_here(tmp_path) == 0.5
    assert busy_s(tmp_path) == 7.25


def test_remote_roles_are_counted_once_by_reports(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    run_dir.alive.mkdir()
    told = {"boot_id": boot_id(), "began_at": 0.0, "written_at": 0.0}
    own = {"name": "actor-0", "role": "actor", "incarnation": "a", "cpu_s": 900.0}
    (run_dir.alive / "actor-0.json").write_text(
        json.dumps({**told, "pid": os.getpid()}), encoding="utf-8"
    )
    joined = {"name": "two", "role": "actor", "incarnation": "b", "cpu_s": 40.0}
    hub = {"name": "h", "role": "envhub", "incarnation": "c", "cpu_s": 5.0}

    def look(watch: CpuWatch, *actors: dict[str, object]) -> dict[str, float]:
        run_dir.status.write_text(json.dumps({"actors": actors, "hubs": [hub]}), encoding="utf-8")
        watch._next = 0.0
        watch.sample()
        return cpu_metrics(run_dir)

    before = CpuWatch(run_dir)
    look(before, own, joined)
    again = {**joined, "incarnation": "d", "cpu_s": 2.0}  # another process of that name
    found = look(before, own, again)
    assert (found["cpu/actor_s"], found["cpu/actor_elsewhere_s"]) == (42.0, 42.0)
    assert (found["cpu/envhub_s"], found["cpu/envhub_elsewhere_s"]) == (5.0, 5.0)
    after = CpuWatch(run_dir)  # The launcher after a restart.
    found = look(after, own, {**again, "cpu_s": 3.0})
    assert (found["cpu/actor_s"], found["cpu/envhub_s"]) == (43.0, 5.0)


def test_stale_status_of_earlier_launcher_is_ignored(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    actor = {"name": "actor-0", "role": "actor", "incarnation": "a", "cpu_s": 900.0}
    run_dir.status.write_text(json.dumps({"actors": [actor]}), encoding="utf-8")
    os.utime(run_dir.status, (1.0, 1.0))
    CpuWatch(run_dir).sample()
    assert "cpu/actor_s" not in cpu_metrics(run_dir)

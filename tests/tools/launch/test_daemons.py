"""Laws of the examples for systemd, Slurm and Kubernetes, and of the probes that they ask."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config.load import load_config
from common.host.lock import hold_run
from common.repository import ROOT
from common.store.run_dir import RunDir, write_json
from envhub.http.routes import OPEN_PATHS
from envhub.main import DRAIN_S
from tests.venvs import python_with
from tools.checks.environments import spell_out
from tools.cli.command_line import ParsedCommand, parse
from tools.dashboard.run_state import HUNG_S, why_not_live, why_not_ready
from tools.dashboard.run_view import view_run
from tools.dashboard.terminal import probe
from tools.launch.train import touch_alive_file

DAEMONS = ROOT / "docs" / "daemons"
UNITS = sorted([*DAEMONS.glob("*.service"), *DAEMONS.glob("*.timer")])
CFG = load_config("smoke", [])


def containers() -> dict[str, dict[str, Any]]:
    """Return the pods' specifications by the name of their container."""
    documents = yaml.safe_load_all((DAEMONS / "kubernetes.yaml").read_text(encoding="utf-8"))
    pods = [each["spec"]["template"]["spec"] for each in documents if "template" in each["spec"]]
    return {pod["containers"][0]["name"]: pod for pod in pods}


def asked(words: list[str]) -> ParsedCommand:
    """Return what a command line asks for, if this version understands all of it."""
    assert words[0].endswith(".venv/bin/python")
    assert words[1] == "run.py"
    request = parse(words[2:])
    load_config(request.config or "smoke", spell_out(request.overrides))
    return request


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd")
def test_units_are_valid(tmp_path: Path) -> None:
    for path in UNITS:
        name = path.name.replace("@", "@smoke")
        (tmp_path / name).write_text(
            path.read_text(encoding="utf-8").replace("/opt/longstride", str(ROOT)), encoding="utf-8"
        )
    units = [str(path) for path in sorted(tmp_path.iterdir())]
    command = ["systemd-analyze", "verify", "--man=no", *units]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=240, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_unit_commands_match_this_version() -> None:
    lines = [
        line
        for path in UNITS
        for line in path.read_text(encoding="utf-8").replace("%i", "smoke").split("\n")
    ]
    commands = [shlex.split(line.partition("=")[2]) for line in lines if "ExecStart=" in line]
    shell = [shlex.split(words[2].partition(" || ")[0]) for words in commands if "-c" in words]
    requests = [asked(words) for words in [*commands, *shell] if "-c" not in words]
    assert [each.command for each in requests] == ["envhub", "train", "status"]
    assert requests[2].probe == "live"


def test_container_commands_and_probes_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUB_TOKEN", "secret")
    pods = containers()
    hub, train = (pods[name]["containers"][0] for name in ("hub", "train"))
    actor = pods["actor"]["containers"][0]
    for container in (hub, train, actor):
        assert asked(container["command"] + container["args"]).command == container["command"][-1]
    paths = {
        hub[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")
    }
    assert paths <= OPEN_PATHS, "a probe has no token"
    assert f"port={hub['ports'][0]['containerPort']}" in hub["args"]
    assert pods["hub"]["terminationGracePeriodSeconds"] > 2 * DRAIN_S
    for name, kind in (("liveness", "live"), ("readiness", "ready")):
        request = asked(train[f"{name}Probe"]["exec"]["command"])
        assert (request.command, request.probe) == ("status", kind)
        assert request.overrides[0] in train["args"]


def test_actors_of_the_cluster_join_at_the_address_of_the_run() -> None:
    documents = yaml.safe_load_all((DAEMONS / "kubernetes.yaml").read_text(encoding="utf-8"))
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    service = by_name["Service", "longstride-train"]["spec"]
    job = by_name["Job", "longstride-train"]["spec"]["template"]
    assert service["selector"].items() <= job["metadata"]["labels"].items()
    pods = containers()
    args = pods["train"]["containers"][0]["args"]
    join = pods["actor"]["containers"][0]["args"]
    host, _, port = join[join.index("--join") + 1].partition(":")
    assert {f"scheduler.advertise={host}", f"scheduler.port={port}"} <= set(args)
    assert f"learner.advertise={host}" in args
    assert host == "longstride-train"
    assert [each["port"] for each in service["ports"]] == [int(port)]


@pytest.mark.slow
@pytest.mark.long
def test_cluster_files_keep_the_schema_of_kubernetes() -> None:
    python = python_with("kubernetes-validate")
    command = [python, "-m", "kubernetes_validate", "--strict", str(DAEMONS / "kubernetes.yaml")]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=240)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


TRAIN = """import os, signal, sys
if "actor" in sys.argv:
    os.execvp("sleep", ["sleep", "60"])
open("log", "a").write(" ".join(sys.argv[1:]) + chr(10))
if "end" in sys.argv[-1]:
    sys.exit(int(sys.argv[-1].partition("=")[2]))
def stop(*_):
    open("log", "a").write("saved" + chr(10))
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
os.makedirs("runs/smoke/keys", exist_ok=True)
open("runs/smoke/keys/join.key", "w").write("key")
while True:
    signal.pause()
"""


def batch_job(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    """Start the batch script where `srun` and `scontrol` only note that they were called."""
    tools = folder / "tools"
    tools.mkdir()
    (folder / "run.py").write_text(TRAIN, encoding="utf-8")
    called = 'echo "${0##*/}" "$1" "$2" >> log\n'
    (tools / "scontrol").write_text(f"#!/bin/bash\n{called}", encoding="utf-8")
    skip = 'while [ "$1" != bash ]; do shift; done\nexec "$@"\n'
    (tools / "srun").write_text(f"#!/bin/bash\n{called}{skip}", encoding="utf-8")
    for path in tools.iterdir():
        path.chmod(0o755)
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": sys.executable}
    env |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    command = ["bash", str(DAEMONS / "longstride.sbatch"), "smoke", *overrides]
    return subprocess.Popen(command, cwd=folder, env=env, encoding="utf-8", start_new_session=True)


def end(job: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def wait_for(path: Path, words: str) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or words not in path.read_text(encoding="utf-8"):
        assert time.monotonic() < deadline, words
        time.sleep(0.02)


def test_terminated_batch_job_saves_and_requeues_itself(tmp_path: Path) -> None:
    job, log = batch_job(tmp_path, "learner.lr=1e-4"), tmp_path / "log"
    try:
        wait_for(tmp_path / "runs" / "smoke" / "keys" / "join.key", "key")
        wait_for(log, "srun --relative=1")
        os.kill(job.pid, signal.SIGTERM)  # as `--signal=B:TERM@600` does, to the script alone
        assert job.wait(timeout=60) == 143
    finally:
        end(job)
    lines = log.read_text(encoding="utf-8").splitlines()
    told = next(line for line in lines if line.startswith("train"))
    assert asked([".venv/bin/python", "run.py", *told.split()]).overrides[-1] == "learner.lr=1e-4"
    assert lines[-2:] == ["saved", "scontrol requeue 7"]


@pytest.mark.parametrize("code", [0, 1, 2])
def test_finished_batch_job_is_not_requeued(code: int, tmp_path: Path) -> None:
    job = batch_job(tmp_path, f"end={code}")
    try:
        assert job.wait(timeout=60) == code
    finally:
        end(job)
    assert "requeue" not in (tmp_path / "log").read_text(encoding="utf-8")


def test_run_is_live_while_its_launcher_polls(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path / "a")
    run_dir.root.mkdir()
    assert why_not_live(run_dir) == "no launcher process supervises the run"
    with hold_run(run_dir.root, name="a"):
        assert why_not_live(run_dir) == "", "it has just begun"
        write_json(run_dir.launch, {"began_at": time.time(), "started_at": {}})
        assert why_not_live(run_dir) == ""
        long_ago = time.time() - HUNG_S - 5
        os.utime(run_dir.launch, (long_ago, long_ago))
        assert why_not_live(run_dir).startswith("the launcher hangs: it last wrote launch.json 6")
        touch_alive_file(run_dir.launch)
        assert probe(CFG, run_dir, "live") == 0
    assert probe(CFG, run_dir, "live") == 1
    write_json(run_dir.finished, {"version": 1, "result": ""})
    assert (why_not_live(run_dir), probe(CFG, run_dir, "ready")) == ("", 0)


def test_run_is_ready_once_all_roles_report(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path / "a")
    run_dir.root.mkdir()

    def reason() -> str:
        return why_not_ready(run_dir, view_run(run_dir, CFG.train, CFG.horizon))

    with hold_run(run_dir.root, name="a"):
        assert reason() == "the scheduler does not write status.json"
        began = time.time() - 10
        launch = {"began_at": began, "started_at": {"learner": began}, "waiting": {}}
        write_json(run_dir.launch, launch | {"stop_deadline": None})
        write_json(run_dir.status, {"actors": []})
        assert reason() == "roles are starting: learner"
        write_json(run_dir.status, {"actors": [], "learner": {"last_seen_s": 0.0}})
        assert reason() == "no actor has joined the run"
        actor = {"name": "actor-0", "last_seen_s": 0.0}
        write_json(run_dir.status, {"actors": [actor], "learner": {"last_seen_s": 0.0}})
        assert reason() == ""
        write_json(run_dir.launch, launch | {"stop_deadline": time.time() + 5})
        assert reason() == "the run is stopping"

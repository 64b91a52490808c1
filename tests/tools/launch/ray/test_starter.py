"""Laws of roles that Ray places, on a cluster of several nodes that this machine plays."""

import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.config.load import load_config
from common.config.run import OnStall, RunSection
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.store.run_dir import RunDir
from common.wire.security import create_keys, write_rank_keys
from tests.tools.launch.ray.clusters import Nodes, running_cluster, wait_for
from tests.tools.launch.test_launch import GRANDCHILD, STAY, TERM_NOTED, interrupt_when, is_gone
from tools.launch.base import Ending, LaunchState, RoleSpec
from tools.launch.launcher import RoleSupervisor
from tools.launch.local import start_here
from tools.launch.ray.cluster import live_nodes, open_cluster, placement_lines, start_on_ray
from tools.launch.ray.placement import place
from tools.launch.stall_watch import StallWatch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]

TELL = (
    "import os, signal; print(os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ.get('MARK'),"
    " flush=True); signal.pause()"
)


@pytest.fixture(scope="module")
def nodes() -> Generator[Nodes]:
    """A node without GPUs, to which the launcher is attached, and one with four."""
    with (
        tempfile.TemporaryDirectory(prefix="ray-") as folder,
        running_cluster(Path(folder), num_cpus=3) as cluster,
    ):
        cluster.add(num_cpus=8, num_gpus=4, labels={"kind": "gpu"})
        yield cluster


# The program of another checkout, from which hub and actors start on each node.
RUN_PY = """
import runpy, sys
start = next(i for i, word in enumerate(sys.argv) if word.startswith("script="))
sys.argv = [sys.argv[start].removeprefix("script="), *sys.argv[start + 1 :]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def role(tmp_path: Path, name: str, code: str, *args: object, **policy: object) -> RoleSpec:
    """Return a role whose program is `code`. On another node it gets the arguments of a join."""
    run_dir = RunDir(root=tmp_path)
    run_dir.publish_address("scheduler", "tcp://127.0.0.1:1")
    create_keys(run_dir.keys)
    write_rank_keys(run_dir.keys, run_name=tmp_path.name, num_nodes=3)
    checkout = tmp_path / "checkout"
    checkout.mkdir(exist_ok=True)
    run_py, script = checkout / "run.py", checkout / f"{name}.py"
    run_py.write_text(RUN_PY, encoding="utf-8")
    script.write_text(code, encoding="utf-8")
    run_dir.code.write_text(str(checkout), encoding="utf-8")
    role = "learner" if name.startswith("ranks") else name.partition("-")[0]
    return RoleSpec(
        name=name,
        argv=(sys.executable, str(run_py), role, f"script={script}", *map(str, args)),
        log_path=tmp_path / "logs" / f"{name}.log",
        **policy,  # type: ignore[arg-type]
    )


def launch(
    nodes: Nodes,
    tmp_path: Path,
    specs: list[RoleSpec],
    on_poll: Callable[[], None] = lambda: None,
    *overrides: str,
    states: list[LaunchState] | None = None,
    run: RunSection | None = None,
) -> Ending:
    num_actors = sum(spec.name.startswith("actor") for spec in specs)
    own = [
        "launcher=ray",
        f"ray.address={nodes.address}",
        f"actor.num_actors={num_actors}",
        "ray.learner_cpus=0.5",
    ]
    cfg = load_config("smoke", [*own, *overrides])
    deadline = time.monotonic() + 300.0

    def on_poll_in_time(state: LaunchState) -> None:
        assert time.monotonic() < deadline, "the run did not end"
        if states is not None:
            states.append(state)
        on_poll()

    with start_on_ray(cfg, RunDir(root=tmp_path)) as starter:
        launcher = RoleSupervisor(
            starter,
            stop_timeout_s=lambda: 5.0,
            finish_grace_s=0.3,
            first_backoff_s=0.02,
            on_poll_every_s=0.05,
            watch=StallWatch(RunDir(root=tmp_path), run, turn_s=60.0) if run else None,
        )
        return launcher.run(specs, on_poll=on_poll_in_time)


def log_of(tmp_path: Path, name: str) -> str:
    return (tmp_path / "logs" / f"{name}.log").read_text(encoding="utf-8")


def test_roles_see_only_their_own_gpus(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARK", "of the launcher")
    names = ["envhub", "scheduler", "learner", "actor-0", "actor-1", "actor-2"]
    specs = [role(tmp_path, name, TELL) for name in names]
    logs = [tmp_path / "logs" / f"{name}.log" for name in names]
    told = lambda: all(log.exists() and "\n" in log.read_text(encoding="utf-8") for log in logs[:5])  # noqa: E731
    states: list[LaunchState] = []
    overrides = ("actor.tensor_parallel_size=2", "ray.actor_labels=[kind=gpu]")
    ending = launch(nodes, tmp_path, specs, interrupt_when(told), *overrides, states=states)
    assert ending.exit_code == 143
    # Those beside the run directory have the launcher's environment, and no GPU.
    assert [log_of(tmp_path, n) for n in ("scheduler", "learner")] == [" of the launcher\n"] * 2
    visible = {log_of(tmp_path, name).split()[0] for name in ("actor-0", "actor-1")}
    assert visible == {"0,1", "2,3"}
    assert log_of(tmp_path, "envhub") == " of the launcher\n"  # on the node without GPUs
    # The third engine finds no free GPUs: it waits, and the run continues without it.
    needed = "a node with 1 CPU, 2 GPU and kind=gpu"
    assert states[-1].waiting == {} or states[-1].waiting == {"actor-2": needed}
    assert any(state.waiting.get("actor-2") == needed for state in states)
    assert all("actor-2" not in state.started_at for state in states)
    assert log_of(tmp_path, "actor-2") == ""


def test_failing_role_ends_the_run(nodes: Nodes, tmp_path: Path) -> None:
    fail = "import sys; print('early'); raise RuntimeError('no such device')"
    learner = role(tmp_path, "learner", fail, ends_run=True, max_restarts=2)
    ending = launch(nodes, tmp_path, [role(tmp_path, "envhub", STAY), learner])
    assert ending.exit_code == 1
    assert "learner failed after 2 restarts: exit code 1" in ending.reason
    assert "RuntimeError: no such device" in ending.reason
    assert log_of(tmp_path, "learner").count("early\n") == 3


@pytest.mark.long
def test_killed_role_restarts(nodes: Nodes, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    stay = "import os, signal, sys; open(sys.argv[1], 'a').write(f'{os.getpid()} '); signal.pause()"
    hub = role(tmp_path, "envhub", stay, starts)
    killed: list[int] = []

    def on_poll() -> None:
        pids = (
            [int(pid) for pid in starts.read_text(encoding="utf-8").split()]
            if starts.exists()
            else []
        )
        if len(pids) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        elif pids and pids[-1] not in killed:
            killed.append(pids[-1])
            os.kill(pids[-1], signal.SIGKILL)

    assert launch(nodes, tmp_path, [hub], on_poll).exit_code == 143
    assert len(killed) == 1


@pytest.mark.long
def test_exit_code_of_a_role_decides_how_the_run_ends(nodes: Nodes, tmp_path: Path) -> None:
    ends = role(tmp_path, "learner", "print('done')", ends_run=True)
    assert launch(nodes, tmp_path, [role(tmp_path, "envhub", STAY), ends]).exit_code == 0
    wrong = role(tmp_path, "actor-0", "print('error: actor.name=a: is taken'); raise SystemExit(2)")
    ending = launch(nodes, tmp_path, [wrong, role(tmp_path, "envhub", STAY)])
    assert (ending.exit_code, ending.reason) == (2, "actor-0: actor.name=a: is taken")
    vain = role(tmp_path, "actor-0", "print('error: no such kernel'); raise SystemExit(70)")
    ending = launch(nodes, tmp_path, [vain, role(tmp_path, "envhub", STAY)])
    assert ending.reason.startswith("actor-0 cannot start: no such kernel. Two starts failed")


def test_signal_stops_roles_in_order_without_remains(nodes: Nodes, tmp_path: Path) -> None:
    notes, pids = tmp_path / "notes", tmp_path / "pids"
    names = ["envhub", "scheduler", "learner"]
    ranks = {"envhub": 2, "scheduler": 1}
    specs = [role(tmp_path, n, TERM_NOTED, notes, n, stop_rank=ranks.get(n, 0)) for n in names]
    specs.append(role(tmp_path, "actor-0", GRANDCHILD, pids))  # ignores signals, has children
    wanted = [pids, *(tmp_path / f"notes.{name}" for name in names)]
    ready = lambda: all(path.exists() for path in wanted)  # noqa: E731
    assert launch(nodes, tmp_path, specs, interrupt_when(ready, signal.SIGINT)).exit_code == 130
    assert notes.read_text(encoding="utf-8").split() == ["learner", "scheduler", "envhub"]
    assert all(is_gone(int(pid)) for pid in pids.read_text(encoding="utf-8").split())


@pytest.fixture
def short() -> Iterator[str]:
    """A folder with a short name: paths of sockets have at most 107 characters."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder


# Ray's agents end by themselves, but some look for their raylet only after a minute.
AGENT = re.compile(r"Agent|agent/main\.py|dashboard/agent\.py")


def is_agent(process: psutil.Process) -> bool:
    try:
        return AGENT.search(" ".join(process.cmdline())) is not None
    except psutil.Error:  # It has ended.
        return False


def test_killed_launcher_ends_its_roles_and_cluster(
    tmp_path: Path, repository: Path, short: str
) -> None:
    pids = tmp_path / "pids"
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from common.config.load import load_config\n"
        "from tools.launch.base import RoleSpec\n"
        "from tools.launch.launcher import RoleSupervisor\n"
        "from tools.launch.ray.cluster import start_on_ray\n"
        "from common.store.run_dir import RunDir\n"
        "folder, stay = Path(sys.argv[1]), sys.argv[2]\n"
        "argv = (sys.executable, '-S', '-c', stay, str(folder / 'pids'))\n"
        "spec = RoleSpec(name='learner', argv=argv, log_path=folder / 'log')\n"
        "cfg = load_config('smoke', ['launcher=ray'])\n"
        "with start_on_ray(cfg, RunDir(root=folder)) as starter:\n"
        "    supervisor = RoleSupervisor(starter, stop_timeout_s=lambda: 5.0)\n"
        "    supervisor.run([spec], on_poll=lambda _: None)\n"
    )
    stay = (
        "import os, signal, sys; open(sys.argv[1] + '.part', 'w').write(str(os.getpid()));"
        "os.rename(sys.argv[1] + '.part', sys.argv[1]); signal.pause()"
    )
    environment = {**os.environ, "RAY_ADDRESS": "", "TMPDIR": short}
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), stay], cwd=repository, env=environment
    )
    try:
        wait_for(pids.exists)
    except AssertionError:
        launcher.terminate()
        launcher.wait()
        raise
    family = psutil.Process(launcher.pid).children(recursive=True)
    listening = subprocess.run(["ss", "-Hltnp"], capture_output=True, encoding="utf-8").stdout
    addresses = {
        line.split()[3].rpartition(":")[0]
        for line in listening.splitlines()
        if any(f"pid={each.pid}," in line for each in family)
    }
    agents = [each for each in family if is_agent(each)]
    launcher.kill()
    launcher.wait()
    wait_for(lambda: is_gone(int(pids.read_text(encoding="utf-8"))))
    wait_for(lambda: all(is_gone(each.pid) for each in family if each not in agents))
    for agent in agents:
        with suppress(psutil.NoSuchProcess):
            agent.kill()
    assert addresses <= {"127.0.0.1", "[::ffff:127.0.0.1]", "[::1]"}


@pytest.mark.long
def test_role_of_killed_node_restarts_on_another(
    nodes: Nodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    doomed = nodes.add(num_cpus=1, labels={"kind": "spot"})
    beside: list[object] = []
    pids: list[int] = []
    states: list[LaunchState] = []
    log = tmp_path / "logs" / "actor-0.log"

    def on_poll() -> None:
        told = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        if not pids and any(line.isdigit() for line in told):
            pids.append(int(told[0]))
            nodes.kill(doomed)
        elif pids and not beside and states[-1].waiting and is_gone(pids[0]):
            beside.append(nodes.add(num_cpus=1, labels={"kind": "spot"}))
        elif sum(line.isdigit() for line in told) == 2:
            os.kill(
                os.getpid(), signal.SIGINT
            )  # a node that is added here takes SIGTERM for itself

    stay = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    specs = [role(tmp_path, "learner", STAY), role(tmp_path, "actor-0", stay)]
    caplog.set_level(logging.INFO)
    overrides = ("ray.actor_labels=[kind=spot]", "envhub.url=http://127.0.0.1:1")
    try:
        ending = launch(nodes, tmp_path, specs, on_poll, *overrides, states=states)
    finally:
        for each in beside:
            nodes.kill(each)
    assert ending.exit_code == 130
    assert "lost role=actor-0" in caplog.text
    assert "role ended role=actor-0 exit=killed by SIGKILL restart=1/20" in caplog.text
    assert caplog.text.count("started role=learner") == 1


def test_silent_or_small_cluster_is_refused_immediately(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    began = time.monotonic()
    for address, words in (
        ("", "learner needs a node with 1 CPU, 8 GPU"),  # nothing is started for that
        ("127.0.0.1:9", "no cluster answers"),
        (nodes.address, "learner needs a node with 1 CPU, 8 GPU on the node of the run directory"),
    ):
        wanted = ["learner.device=cuda", "learner.num_ranks=8", "launcher=ray"]
        cfg = load_config("smoke", [*wanted, f"ray.address={address}"])
        with pytest.raises(ConfigError, match=words), start_on_ray(cfg, RunDir(root=tmp_path)):
            pass
    assert time.monotonic() - began < 30.0  # 3 s on an idle machine
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    with pytest.raises(ConfigError, match="not as a Ray client"):
        placement_lines(load_config("smoke", ["launcher=ray"]))
    fitting = ["launcher=ray", f"ray.address={nodes.address}", "ray.learner_cpus=0.5"]
    lines = placement_lines(load_config("smoke", fitting))
    assert any("8 CPU, 4 GPU, kind=gpu" in line for line in lines)


@pytest.fixture
def rank_nodes(nodes: Nodes) -> Generator[list[Any]]:
    """Two nodes for ranks of the learner."""
    added = [nodes.add(num_cpus=1, labels={"kind": "ranks"}) for _ in range(2)]
    try:
        yield added
    finally:
        for node in added:
            nodes.kill(node)


def three_nodes(nodes: Nodes) -> RunConfig:
    """Return the config of a learner on the run's node and on two nodes for ranks."""
    own = ["launcher=ray", f"ray.address={nodes.address}", "ray.learner_cpus=0.5"]
    learner = ["learner.num_nodes=3", "ray.learner_labels=[kind=ranks]"]
    return load_config("smoke", [*own, *learner])


@pytest.mark.long
def test_each_learner_node_is_another_node_of_ray(
    nodes: Nodes, rank_nodes: list[Any], tmp_path: Path
) -> None:
    cfg = three_nodes(nodes)
    with start_on_ray(cfg, RunDir(root=tmp_path)) as starter:
        roles: list[Any] = [
            starter.start(role(tmp_path, name, STAY)) for name in ("learner", "ranks-1", "ranks-2")
        ]
        wait_for(lambda: all(each.poll() is None and each.started_at for each in roles))
        places = [each.place.node_id for each in roles[1:]]
        for each in roles:
            each.clear_away()
    assert sorted(places) == sorted(node.node_id for node in rank_nodes)
    nodes.kill(rank_nodes.pop())
    kinds = lambda: [node.labels.get("kind") for node in live_nodes()]  # noqa: E731
    with open_cluster(cfg.ray, num_cpus=0):
        wait_for(lambda: kinds().count("ranks") == 1)
    few = "2 times a node of its own with 0.5 CPU and kind=ranks, and 1 of 2 are missing"
    with pytest.raises(ConfigError, match=few), start_on_ray(cfg, RunDir(root=tmp_path)):
        pass


@pytest.mark.long
def test_occupied_learner_node_ends_the_start_in_time(
    nodes: Nodes, rank_nodes: list[Any], tmp_path: Path
) -> None:
    cfg = three_nodes(nodes)
    with open_cluster(cfg.ray, num_cpus=0) as found:
        from ray.util.placement_group import placement_group

        from tools.launch.ray.starter import RayStarter

        taken = placement_group([{"CPU": 1}], bundle_label_selector=[{"kind": "ranks"}])
        assert taken.wait(60)
        placement = place(cfg, found)
        run_dir = RunDir(root=tmp_path)
        late = r"no room within ray.place_timeout_s=0.1: learner .* 1 of 2 are missing .*: 0 CPU"
        with start_here() as local:
            starter = RayStarter(
                run_dir, placement, home=found[0], local=local, place_timeout_s=0.1
            )
            with pytest.raises(ConfigError, match=late):
                starter.reserve_learner(free_nodes=lambda: live_nodes(is_free=True))


HANGS = """
import os, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, os.getcwd())
from common.stall.beacon import beacon_of
from common.store.run_dir import RunDir

HELPER = '''
import os, sys, time
sys.path.insert(0, os.getcwd())
from common.stall.stacks import tell_stacks
def helper_hangs():
    time.sleep(600)
tell_stacks()
print("ready", flush=True)
helper_hangs()
'''

def hang_here():
    time.sleep(600)

is_home = sys.argv[1] == "learner"
with beacon_of(RunDir(root=Path(sys.argv[2])) if is_home else None, sys.argv[1], start_s=1.0) as it:
    it.note("main", "step 1")
    if not is_home:
        helper = subprocess.Popen([sys.executable, "-S", "-c", HELPER], stdout=subprocess.PIPE)
        helper.stdout.readline()
        print("plays", flush=True)
    hang_here()
"""


@pytest.mark.long
def test_stall_report_includes_stacks_from_other_nodes(nodes: Nodes, tmp_path: Path) -> None:
    names = ["learner", "actor-0"]
    specs = [role(tmp_path, name, HANGS, name, tmp_path, "run.py") for name in names]
    stalls = RunDir(root=tmp_path).stalls
    policy = RunSection(stall_s=4.0, on_stall=OnStall.WARN)
    own = ("ray.actor_labels=[kind=gpu]",)

    def found() -> list[str]:
        return (
            [path.read_text(encoding="utf-8") for path in stalls.glob("*.txt")]
            if stalls.exists()
            else []
        )

    def is_told() -> bool:
        return any("in helper_hangs" in text for text in found())

    assert launch(nodes, tmp_path, specs, interrupt_when(is_told), *own, run=policy).exit_code
    report = next(text for text in found() if "in helper_hangs" in text)
    assert "learner hangs: main has been in 'step 1'" in report
    for name in ("learner", "actor-0, in its log"):
        assert "in hang_here" in report.partition(f"--- stacks of {name}\n")[2], report
    assert "probable cause: learner" in report

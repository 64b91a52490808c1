"""Laws of a run on several machines without a shared disk: namespaces, real processes, engines."""

import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from common.store.members import node_lines
from learner.journal.journal import read_journal
from tests.configs import edited
from tests.end_to_end.nodes import Network, Node, why_not
from tests.end_to_end.runs import Run, balances
from tests.scheduler.builders import make_config
from tests.scheduler.members.scheduler_rig import running
from tools.dashboard.reading.run_source import RunSource
from tools.dashboard.web.views import fleet

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1500)]

ENGINE_S = 600.0  # for an engine to start and play, on a busy machine
HEAL_S = 120.0
SILENT_S = 6.0  # Longer than the limit that removes an engine.
GENERATING_S = 2.0  # from the start of the engine, with a processor for each that wants one
OVERRIDES = (
    "actor.num_actors=0",
    "scheduler.host=0.0.0.0",
    "learner.host=0.0.0.0",
    "envhub.host=0.0.0.0",
    'envhub.envs=["benchmarks.envhub.slow:make_spec"]',
    "tasks=[{env: slow, subset: wait}]",
    'envs.plugins={median_s: "0.2", sigma: "0.2", num_turns: "3", tail_frac: "0"}',
    "eval.before=false",
    "eval.after=false",
    "train.num_steps=100000",
    "scheduler.max_ahead_steps=3",
    "scheduler.dead_after_s=10",
    "learner.max_lag_steps=8",
    "learner.checkpoint_every_steps=1000",
    "actor.max_turn_tokens=4",
    "actor.max_concurrent=8",
    "learner.lr=1e-7",
    "learner.muon_lr=1e-7",
    "learner.batch_timeout_s=600",
    "actor.start_timeout_s=600",
)


def port_of(run: Run) -> str:
    """Of the scheduler."""
    return (run.root / "addresses" / "scheduler").read_text(encoding="utf-8").rpartition(":")[2]


def join(run: Run, node: Node, network: Network, name: str) -> None:
    """Start an actor that has nothing but an address and a key file."""
    key = node.take(run.root / "keys" / "join.key")
    where = ("--join", f"{network.host}:{port_of(run)}", "--key", str(key))
    node.start("actor", *where, f"actor.name={name}")


def finished_of(run: Run, name: str) -> int:
    """Episodes of an actor, as the scheduler counts them."""
    status = run.root / "status.json"
    actors = json.loads(status.read_text(encoding="utf-8"))["actors"] if status.exists() else []
    return next((each["num_finished"] for each in actors if each["name"] == name), 0)


def wait_for_more(run: Run, name: str, num: int, *, timeout_s: float) -> float:
    """Wait until an actor has played `num` more episodes; return how many of them a second."""
    before, started = finished_of(run, name), time.monotonic()
    run.wait_until(lambda: finished_of(run, name) >= before + num, timeout_s=timeout_s)
    return num / (time.monotonic() - started)


def is_dead(run: Run, name: str) -> bool:
    """Whether the scheduler counts an actor as dead."""
    actors = json.loads((run.root / "status.json").read_text(encoding="utf-8"))["actors"]
    return not any(each["name"] == name and not each["is_dead"] for each in actors)


def said_at(node: Node, words: str) -> datetime:
    """Return the time of the first line in a node's log."""
    line = next(line for line in node.log.read_text(encoding="utf-8").splitlines() if words in line)
    found = re.match(r"[\d-]+ [\d:,]+", line)
    assert found is not None
    return datetime.strptime(found[0], "%Y-%m-%d %H:%M:%S,%f")


def generating_after_s(node: Node) -> float:
    """Return the seconds from an engine that can sample to the first episodes."""
    return (said_at(node, "first leases") - said_at(node, "engine ready")).total_seconds()


def shared_by() -> float:
    """Return how many share a processor, others on the machine among them; 1 at least."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def test_node_failures_leave_a_balanced_run(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path / "run"
    folder.mkdir()
    with (
        Run(folder, *OVERRIDES) as run,
        Network(os.getpid() % 200) as network,
        network.node(1, tmp_path / "first", hidden=folder) as first,
        network.node(2, tmp_path / "second", hidden=folder) as second,
    ):
        run.wait_until((run.root / "addresses" / "scheduler").exists)
        join(run, first, network, "first")
        wait_for_more(run, "first", 16, timeout_s=ENGINE_S)
        shares = [shared_by()]
        first.cut()
        time.sleep(SILENT_S)  # The cut itself takes this long.
        first.heal()
        wait_for_more(run, "first", 16, timeout_s=HEAL_S)
        join(run, second, network, "second")
        wait_for_more(run, "second", 16, timeout_s=ENGINE_S)
        shares.append(shared_by())
        together = wait_for_more(run, "second", 24, timeout_s=HEAL_S)
        first.kill()
        run.wait_until(lambda: is_dead(run, "first"), timeout_s=HEAL_S)
        alone = wait_for_more(run, "second", 24, timeout_s=HEAL_S)
        run.process.send_signal(signal.SIGTERM)
        run.wait(timeout_s=60.0)
        # One of the two: other work on the machine holds either up.
        took = [
            generating_after_s(node) / share
            for node, share in zip((first, second), shares, strict=True)
        ]
        assert min(took) < GENERATING_S
        assert alone > 0.5 * together, "a dead node slows the others down"
        assert not list((tmp_path / "second").rglob("*.safetensors"))
        check_books(run)


def test_cut_off_remote_hub_leaves_the_directory(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    cfg = make_config(num_steps=1, per_step=1)
    task = edited(cfg.tasks[0], {"env": "textcraft", "subset": "depth1"})
    changes = {"tasks": [task], "scheduler.heartbeat_s": 0.2, "scheduler.dead_after_s": 2.0}
    cfg = edited(cfg, changes | {"scheduler.host": "0.0.0.0"})
    with (
        running(tmp_path / "run", cfg) as run,
        Network(os.getpid() % 200) as network,
        network.node(1, tmp_path / "node", hidden=tmp_path / "run") as node,
    ):
        port = run.run_dir.wait_for_address("scheduler", timeout_s=HEAL_S).rpartition(":")[2]
        key = node.take(run.run_dir.keys / "join.key")
        node.start("envhub", "--join", f"{network.host}:{port}", "--key", str(key))
        wait_for(run.run_dir.status.exists, what="a run with a hub")
        (hub,) = run.ask_directory().hubs
        assert hub.url.startswith(f"http://{node.host}:")
        node.cut()
        wait_for(lambda: run.ask_directory().hubs == [], what="a directory without it")
        node.heal()
        wait_for(lambda: run.ask_directory().hubs == [hub], what="the hub again")


def test_status_and_metrics_include_remote_roles(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path / "run"
    folder.mkdir()
    with (
        Run(folder, *OVERRIDES) as run,
        Network(os.getpid() % 200) as network,
        network.node(1, tmp_path / "node", hidden=folder) as node,
    ):
        run.wait_until((run.root / "addresses" / "scheduler").exists)
        join(run, node, network, "first")
        where = f"{network.host}:{port_of(run)}"
        node.start("envhub", "--join", where, "--key", str(node.folder / "the.key"))
        wait_for_more(run, "first", 16, timeout_s=ENGINE_S)
        run.wait_until(lambda: "cpu/actor_elsewhere_s" in last_metrics(run), timeout_s=HEAL_S)
        rows = {each["name"]: each for each in fleet(RunSource(run.root, name="r"))["roles"]}
        joined = next(each for name, each in rows.items() if name.startswith("envhub-"))
        assert joined["url"].startswith(f"http://{node.host}:")
        assert joined["envs"] == rows["envhub"]["envs"] == ["slow"]
        for each in (rows["first"], joined):
            assert each["node"].endswith(f" ({node.host})")
            assert each["cpu_s"] > 1.0
            assert each["rss_bytes"] > 20 << 20
        assert rows["envhub"]["node"] == rows["scheduler"]["node"] != joined["node"]
        assert joined["max_sessions"] >= joined["num_sessions"] >= 0
        metrics, status = last_metrics(run), run.read("status.json")
        run.process.send_signal(signal.SIGTERM)
        run.wait(timeout_s=60.0)
        assert metrics["cpu/actor_s"] == metrics["cpu/actor_elsewhere_s"] > 1.0
        assert metrics["cpu/envhub_s"] > metrics["cpu/envhub_elsewhere_s"] > 0.0
        told = "\n".join(node_lines(status))
        assert f"({node.host}): first, {joined['name']}; " in told
        assert f"hub {joined['name']}: serves slow at http://{node.host}:" in told


def last_metrics(run: Run) -> dict[str, float]:
    """The newest line of metrics, {} before the first."""
    return (run.metrics() or [{}])[-1]


def wait_for(is_so: Callable[[], bool], *, what: str) -> None:
    deadline = time.monotonic() + HEAL_S
    while not is_so():
        assert time.monotonic() < deadline, f"not within {HEAL_S:g}s: {what}"
        time.sleep(0.1)


def check_books(run: Run) -> None:
    """Both nodes were trained on, every episode is accounted for, and none was trained twice."""
    ledger = run.read("ledger.json")
    assert balances(ledger)
    steps = (run.root / "journal" / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    trained = Counter(
        episode for line in steps for group in json.loads(line)["groups"] for episode in group
    )
    assert max(trained.values()) == 1
    players = {t.episode_id: t.actor for _, t in read_journal(run.root / "journal")}
    assert {players[episode] for episode in trained} == {"first", "second"}

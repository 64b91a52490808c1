"""A run on several Ray nodes that this machine plays: one is added, another one killed."""

import json
import re
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.runs import Run, balances
from tests.tools.launch.ray.clusters import running_cluster, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1_000),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]

ENGINE_S = 600.0  # an engine's start on a busy machine


def joined_from(address: str) -> list[int]:
    """Return the processes of roles that joined a scheduler from other nodes."""
    found: list[int] = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if address in process.cmdline() and "--join" in process.cmdline():
                found.append(process.pid)
    return found


def engines_of(pids: list[int]) -> list[psutil.Process]:
    """Return the processes of vLLM below these."""
    below = [child for pid in pids for child in psutil.Process(pid).children(recursive=True)]
    return [child for child in below if "EngineCore" in " ".join(child.cmdline())]


def actors_of(run: Run) -> dict[str, float]:
    """Return the tokens per second of each actor in the scheduler's status."""
    with suppress(FileNotFoundError, json.JSONDecodeError):
        return {a["name"]: a["tokens_per_s"] or 0 for a in run.read("status.json")["actors"]}
    return {}


@pytest.mark.long
def test_run_survives_added_and_killed_nodes(tmp_path: Path) -> None:
    engine = {"num_cpus": 1, "labels": {"kind": "engine"}}
    with (
        tempfile.TemporaryDirectory(prefix="ray-") as folder,
        running_cluster(Path(folder), num_cpus=1) as nodes,  # room for the learner
    ):
        first = nodes.add(**engine)
        nodes.add(num_cpus=1, labels={"kind": "cpu"})
        overrides = (
            "launcher=ray",
            f"ray.address={nodes.address}",
            "ray.actor_labels=[kind=engine]",
            "ray.envhub_labels=[kind=cpu]",
            "actor.num_actors=2",
            "train.num_steps=100000",
            "eval.before=false",
            "learner.batch_timeout_s=600",
            "learner.checkpoint_every_steps=1000",
        )
        with Run(tmp_path, *overrides) as run:
            run.wait_until(lambda: len(run.metrics()) >= 1, timeout_s=ENGINE_S)
            assert run.read("launch.json")["waiting"].keys() == {"actor-1"}
            nodes.add(**engine)
            run.wait_until(lambda: actors_of(run).get("actor-1", 0) > 0, timeout_s=ENGINE_S)
            address = (
                (run.root / "addresses" / "scheduler")
                .read_text(encoding="utf-8")
                .removeprefix("tcp://")
            )
            assert len(joined_from(address)) == 3  # hub and actors, without the run's directory
            run.wait_until(lambda: len(engines_of(joined_from(address))) >= 2, timeout_s=ENGINE_S)
            engines = engines_of(joined_from(address))
            nodes.kill(first)
            run.wait_until(lambda: "lost role=actor-0" in run.output)
            run.wait_until(lambda: "actor-0" in run.read("launch.json")["waiting"])
            lost_at = len(run.metrics())
            run.wait_until(lambda: len(run.metrics()) >= lost_at + 3)
            run.process.send_signal(signal.SIGTERM)
            assert run.wait() == 143, run.output
            assert run.left_over() == []
        wait_for(lambda: joined_from(address) == [])
        wait_for(lambda: not any(engine.is_running() for engine in engines))
    assert "1 of 2 actors fit on the nodes; the others start when a node joins" in run.output
    for name, said in (("actor-1", "engine ready"), ("envhub", "Application startup complete")):
        assert said in (run.root / "logs" / f"{name}.log").read_text(
            encoding="utf-8"
        )  # came from its node
    ledger = run.read("ledger.json")
    assert balances(ledger)
    logged = (run.root / "journal" / "steps.jsonl").read_text(encoding="utf-8")
    steps = [json.loads(text) for text in logged.splitlines()]
    trained = [name for step in steps for group in step["groups"] for name in group]
    assert len(set(trained)) == len(trained)  # nothing twice
    assert 0 <= len(trained) - ledger["trained"] <= 8  # of the step that was reported at the stop


@pytest.mark.long
@pytest.mark.timeout(2_000)
def test_lost_learner_node_is_placed_on_another_node(tmp_path: Path) -> None:
    """The learner has two nodes with two ranks each; the second one is lost, and one is added."""
    ranks = {"num_cpus": 1, "labels": {"kind": "ranks"}}
    with (
        tempfile.TemporaryDirectory(prefix="ray-") as folder,
        running_cluster(Path(folder), num_cpus=3) as nodes,
    ):
        first = nodes.add(**ranks)
        overrides = (
            "launcher=ray",
            f"ray.address={nodes.address}",
            "ray.learner_labels=[kind=ranks]",
            "learner.num_nodes=2",
            "learner.ranks_per_node=2",
            "learner.batch_timeout_s=600",
            "scheduler.dead_after_s=10",
            "train.num_steps=4",
            "eval.before=false",
            "eval.after=false",
        )
        with Run(tmp_path, *overrides) as run:
            run.wait_until(lambda: len(run.metrics()) >= 2, timeout_s=ENGINE_S)
            address = (run.root / "addresses" / "scheduler").read_text(encoding="utf-8")
            assert len(joined_from(address.removeprefix("tcp://"))) == 1
            nodes.kill(first)
            run.wait_until(lambda: "ranks-1" in run.read("launch.json")["waiting"])
            nodes.add(**ranks)
            assert run.wait() == 0, run.output
            assert run.left_over() == []
        wait_for(lambda: joined_from(address.removeprefix("tcp://")) == [])
    assert "lost role=ranks-1" in run.output
    learner = (run.root / "logs" / "learner.log").read_text(encoding="utf-8")
    assert re.search(r"learner node 1 \(.*, ranks 2 to 3\) is lost: ", learner)
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4]
    node = (run.root / "logs" / "ranks-1.log").read_text(encoding="utf-8")
    assert node.count("started ranks=[2, 3]") == 2
    assert balances(run.read("ledger.json"))

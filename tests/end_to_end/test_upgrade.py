"""Laws of an upgrade of hubs and actors to another commit, with a second checkout of the code."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from common.wire.messages import SCHEMA_VERSION
from common.wire.versions import version_of
from tests.end_to_end.runs import REPOSITORY, Run, balances

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]

PARTS = (
    *("actor", "common", "configs", "envhub", "learner", "scheduler", "tools"),
    *("pyproject.toml", "run.py"),
)
NEWER = SCHEMA_VERSION + 1
TRAINED = """
import json, sys
from pathlib import Path
from learner.journal.journal import read_journal
root = Path(sys.argv[1])
lines = (root / "outcomes.jsonl").read_text(encoding="utf-8").splitlines()
outcomes = {episode: outcome for episode, outcome, *_ in map(json.loads, lines)}
found = (each for _, each in read_journal(root / "journal"))
print(json.dumps([e.actor for e in found if outcomes.get(e.episode_id) == "trained"]))
"""
OVERRIDES = (
    "train.num_steps=100000",
    "eval.before=false",
    "eval.after=false",
    "learner.max_lag_steps=8",
    "actor.start_timeout_s=600",
    "learner.batch_timeout_s=600",
)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text, f"{path}: {old}"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkout whose messages have one more schema version and three more fields."""
    root = tmp_path_factory.mktemp("newer") / "checkout"
    root.mkdir()
    for name in PARTS:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, root / name)
    wire = root / "common" / "wire"
    messages = wire / "messages.py"
    edit(messages, f"SCHEMA_VERSION = {SCHEMA_VERSION}", f"SCHEMA_VERSION = {NEWER}")
    mark = '    novel: Id = "set by newer code"\n'
    trajectory = "    metrics: Named[float] = field(default_factory=dict[str, float])\n"
    edit(messages, trajectory, trajectory + mark)
    edit(messages, "    cpu_s: Seconds = 0.0", f"{mark}    cpu_s: Seconds = 0.0")
    edit(
        messages,
        "    num_slots: Count = 0  # Number of concurrent",
        f"{mark}    num_slots: Count = 0  #",
    )
    listed = json.loads((wire / "schema.json").read_text(encoding="utf-8"))
    listed[str(NEWER)] = dict.fromkeys(("Trajectory", "Heartbeat", "Progress"), "novel")
    (wire / "schema.json").write_text(json.dumps(listed), encoding="utf-8")
    return root


def pid_of(run: Run, role: str) -> int:
    found = json.loads((run.root / "alive" / f"{role}.json").read_text(encoding="utf-8"))
    return int(found["pid"])


def restart(run: Run, role: str) -> None:
    """Stop a role, and wait until the launcher has started it again and it works."""
    before = pid_of(run, role)
    os.kill(before, signal.SIGTERM)
    run.wait_until(lambda: pid_of(run, role) != before)


def num_steps(run: Run) -> int:
    return len(run.metrics())


def finished_of(run: Run, name: str) -> int:
    """Return how many episodes the scheduler has counted for an actor."""
    path = run.root / "status.json"
    actors = json.loads(path.read_text(encoding="utf-8"))["actors"] if path.exists() else []
    return next((each["num_finished"] for each in actors if each["name"] == name), 0)


def finish(run: Run, checkout: Path) -> None:
    """End the run some steps from now; no episode may be lost."""
    step = run.metrics()[-1]["step"] + 8
    where = (f"run.dir={run.root.parent}", f"run.name={run.root.name}")
    argv = [sys.executable, "run.py", "set", *where, f"train.num_steps={step}"]
    done = subprocess.run(argv, cwd=checkout, capture_output=True, encoding="utf-8", timeout=600)
    assert done.returncode == 0, done
    assert run.wait() == 0, run.output[-3_000:]
    ledger = run.read("ledger.json")
    assert balances(ledger), ledger
    assert (ledger["lost"], ledger["in_flight"]) == (0, 0), ledger


def trained_actors(run: Run, checkout: Path) -> Counter[str]:
    """Return the number of trained episodes by actor, read with the code of the run."""
    argv = [sys.executable, "-c", TRAINED, str(run.root)]
    done = subprocess.run(argv, cwd=checkout, capture_output=True, encoding="utf-8", timeout=600)
    assert done.returncode == 0, done
    return Counter(json.loads(done.stdout))


def test_hub_and_actor_move_to_newer_code_while_the_learner_trains(
    tmp_path: Path, newer: Path
) -> None:
    with Run(tmp_path, *OVERRIDES) as run:
        run.wait_until(lambda: num_steps(run) >= 1)
        learner = pid_of(run, "learner")
        (run.root / "code").write_text(f"{newer}\n", encoding="utf-8")
        restart(run, "envhub")
        restart(run, "actor-0")
        log = run.root / "logs" / "actor-0.log"
        text = f"learner uses schema version={SCHEMA_VERSION} own={NEWER}"
        run.wait_until(lambda: text in log.read_text(encoding="utf-8", errors="replace"))
        before = num_steps(run)
        run.wait_until(lambda: num_steps(run) >= before + 4)
        assert pid_of(run, "learner") == learner
        finish(run, REPOSITORY)


def test_actor_of_older_code_joins_a_newer_run(tmp_path: Path, newer: Path) -> None:
    with Run(tmp_path, *OVERRIDES, checkout=newer) as run:
        run.wait_until(lambda: (run.root / "addresses" / "scheduler").exists())
        address = (run.root / "addresses" / "scheduler").read_text(encoding="utf-8")
        where = ("--join", address.removeprefix("tcp://"), "--key", str(run.root / "keys/join.key"))
        argv = [sys.executable, "run.py", "actor", *where, "actor.name=older"]
        with (tmp_path / "older.txt").open("wb") as output:
            older = subprocess.Popen(argv, cwd=REPOSITORY, stdout=output, stderr=output)
        try:
            run.wait_until(lambda: finished_of(run, "older") >= 16)
            finish(run, newer)
        finally:
            older.terminate()
            older.wait(60)
        assert trained_actors(run, newer)["older"] > 0
        heads = re.findall(rb"\x93[\x00-\x7f]\xaaTrajectory", journal_bytes(run))
        assert {version_of([head]) for head in heads} == {SCHEMA_VERSION, NEWER}


def journal_bytes(run: Run) -> bytes:
    """Return the uncompressed segments of the journal."""
    return b"".join(path.read_bytes() for path in (run.root / "journal").glob("*.log"))

"""The scheduler process over real sockets."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.repository import ROOT
from common.store.run_dir import RunDir
from common.store.run_start import save_config
from common.wire.codec import decode, encode
from common.wire.messages import (
    Goodbye,
    GroupArrived,
    LeaseGrant,
    Outcome,
    Outcomes,
    Progress,
    Welcome,
)
from common.wire.security import RunKeys, create_keys
from common.wire.sockets import connect_dealer
from scheduler.main import serve
from tests.bounds import at_most
from tests.configs import edited
from tests.full_disk import no_room_beyond
from tests.scheduler.builders import (
    CATALOGUE,
    beat_of,
    done_of,
    hello_of,
    make_config,
    outcome_of,
    request_of,
    seen_of,
)
from tests.scheduler.catalogue_server import serve_catalogue

TIMEOUT_S = 60.0
START_S = 60.0  # The start of a process.


class Role:
    """A DEALER that asks and waits for the answer."""

    scheduler: threading.Thread

    def __init__(self, context: zmq.Context, run_dir: RunDir, keys: RunKeys) -> None:
        address = run_dir.wait_for_address("scheduler", timeout_s=START_S)
        self._socket = connect_dealer(context, keys, address=address, timeout_s=TIMEOUT_S)

    def tell(self, message: Any) -> None:
        self._socket.send_multipart(encode(message))

    def ask(self, message: Any) -> Any:
        self.tell(message)
        return self.answer()

    def answer(self) -> Any:
        return decode(self._socket.recv_multipart())

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture
def hub_url() -> Iterator[str]:
    with serve_catalogue(CATALOGUE) as url:
        yield url


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(root=tmp_path)


@contextlib.contextmanager
def _serving(cfg: RunConfig, run_dir: RunDir) -> Iterator[Role]:
    """A scheduler in a thread and a role connected to it."""
    keys = create_keys(run_dir.keys)
    stop = threading.Event()
    run_dir.forget_address("scheduler")
    thread = threading.Thread(target=serve, args=(cfg, run_dir, stop))
    thread.start()
    context = zmq.Context()
    try:
        role = Role(context, run_dir, keys)
        role.scheduler = thread
        yield role
        role.close()
    finally:
        stop.set()
        thread.join(timeout=TIMEOUT_S)
        context.term()
    assert not thread.is_alive()


def _config(hub_url: str) -> RunConfig:
    return edited(make_config(num_steps=1, per_step=1), {"envhub.url": hub_url})


def test_run_completes_over_real_sockets(hub_url: str, run_dir: RunDir) -> None:
    with _serving(_config(hub_url), run_dir) as role:
        assert isinstance(role.ask(hello_of("actor-0")), Welcome)
        leases = role.ask(request_of("actor-0", 4)).leases
        assert [lease.group_id for lease in leases] == ["g0000000"] * 4
        role.tell(
            Outcomes(
                seen=[seen_of(lease) for lease in leases],
                outcomes=[outcome_of(lease.episode_id, Outcome.TRAINED) for lease in leases],
                groups=[GroupArrived(group_id="g0000000", is_ready=True)],
                num_duplicates=2,
            )
        )
        assert role.ask(done_of(1, is_last=True)).learner_version == 1
        progress = role.ask(beat_of("actor-0", []))
        assert isinstance(progress, Progress)
        assert progress.is_finished
    ledger = json.loads(run_dir.ledger.read_text(encoding="utf-8"))
    names = ("issued", "trained", "in_flight", "lost", "duplicates_discarded")
    assert [ledger[name] for name in names] == [4, 4, 0, 0, 2]
    booked = [
        json.loads(line) for line in run_dir.outcomes.read_text(encoding="utf-8").splitlines()
    ]
    assert Counter(outcome for _, outcome, *_ in booked)["trained"] == ledger["trained"] == 4
    status = json.loads(run_dir.status.read_text(encoding="utf-8"))
    assert (status["phase"], status["version"]) == ("done", 1)


def test_late_scheduler_answers_a_learner_killed_at_the_end(hub_url: str, run_dir: RunDir) -> None:
    cfg = _config(hub_url)
    with _serving(cfg, run_dir) as role:
        role.ask(hello_of("actor-0"))
        leases = role.ask(request_of("actor-0", 4)).leases
        role.tell(
            Outcomes(
                seen=[seen_of(lease) for lease in leases],
                outcomes=[outcome_of(lease.episode_id, Outcome.TRAINED) for lease in leases],
                groups=[GroupArrived(group_id="g0000000", is_ready=True)],
            )
        )
        role.ask(done_of(1, is_last=True))
        role.ask(hello_of("learner-1"))
        for who, name in (("learner", "learner-1"), ("actor", "actor-0")):
            role.tell(Goodbye(role=who, name=name, incarnation="i0"))
        role.scheduler.join(TIMEOUT_S)
        assert not role.scheduler.is_alive()
    with _serving(cfg, run_dir) as role:
        welcome = role.ask(hello_of("learner-2"))
        assert isinstance(welcome, Welcome), "everybody had left, and still it answers"
        assert role.ask(beat_of("learner-2", [])).is_finished
        role.tell(Goodbye(role="learner", name="learner-2", incarnation="i0"))
        role.scheduler.join(TIMEOUT_S)
        assert not role.scheduler.is_alive()


def test_restarted_scheduler_keeps_leases_and_address(hub_url: str, run_dir: RunDir) -> None:
    cfg = _config(hub_url)
    with _serving(cfg, run_dir) as role:
        first = role.ask(hello_of("actor-0"))
        leases = role.ask(request_of("actor-0", 3)).leases
        address = (run_dir.addresses / "scheduler").read_text(encoding="utf-8")
    with _serving(cfg, run_dir) as role:
        assert (run_dir.addresses / "scheduler").read_text(encoding="utf-8") == address
        running = [lease.episode_id for lease in leases]
        progress = role.ask(beat_of("actor-0", running))
        assert progress.revoked == []
        assert progress.run_epoch != first.run_epoch
        rest = role.ask(request_of("actor-0", 9)).leases
        assert rest[0].episode_id == "g0000000/3"
        assert not {lease.episode_id for lease in rest} & set(running)


def test_second_scheduler_of_a_live_run_is_refused(hub_url: str, run_dir: RunDir) -> None:
    cfg = _config(hub_url)
    with _serving(cfg, run_dir) as role:
        address = (run_dir.addresses / "scheduler").read_text(encoding="utf-8")
        with pytest.raises(
            ConfigError, match=rf"this run already has a scheduler \(process {os.getpid()}"
        ):
            serve(cfg, run_dir, threading.Event())
        assert (run_dir.addresses / "scheduler").read_text(encoding="utf-8") == address
        assert isinstance(role.ask(hello_of("actor-0")), Welcome)


def test_unknown_task_stops_the_scheduler(hub_url: str, run_dir: RunDir) -> None:
    cfg = _config(hub_url)
    cfg = edited(cfg, {"tasks": [edited(cfg.tasks[0], {"subset": "esay"}), *cfg.tasks[1:]]})
    create_keys(run_dir.keys)
    with pytest.raises(ConfigError, match="nearest is 'easy'"):
        serve(cfg, run_dir, threading.Event())


ROLE_SCRIPT = """
import sys
from pathlib import Path
from common.config.load import load_config
from common.store.run_dir import RunDir
from scheduler.main import run

run(load_config(sys.argv[1], []), RunDir(root=Path(sys.argv[2])))
"""


def _start(cfg: RunConfig, run_dir: RunDir) -> subprocess.Popen:
    save_config(cfg, run_dir.config)
    create_keys(run_dir.keys)
    run_dir.forget_address("scheduler")
    argv = [sys.executable, "-c", ROLE_SCRIPT, str(run_dir.config), str(run_dir.root)]
    root = ROOT
    return subprocess.Popen(argv, cwd=root, env={**os.environ, "PYTHONPATH": str(root)})


@pytest.mark.slow
@pytest.mark.timed
def test_killed_scheduler_keeps_leases_and_terminates_in_two_seconds(
    hub_url: str, run_dir: RunDir
) -> None:
    cfg = _config(hub_url)
    cfg = edited(cfg, {"model.path": "unused"})
    context = zmq.Context()
    process = _start(cfg, run_dir)
    try:
        role = Role(context, run_dir, create_keys(run_dir.keys))
        role.ask(hello_of("actor-0"))
        running = [lease.episode_id for lease in role.ask(request_of("actor-0", 3)).leases]
        process.kill()
        process.wait(TIMEOUT_S)
        role.close()
        process = _start(cfg, run_dir)
        role = Role(context, run_dir, create_keys(run_dir.keys))
        assert role.ask(beat_of("actor-0", running)).revoked == []
        grant = role.ask(request_of("actor-0", 1))
        assert isinstance(grant, LeaseGrant)
        assert [lease.episode_id for lease in grant.leases] == ["g0000000/3"]
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
        assert time.monotonic() - started < at_most(2.0)
        role.close()
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(TIMEOUT_S)
        context.term()
    assert json.loads(run_dir.ledger.read_text(encoding="utf-8"))["in_flight"] == 4


def test_full_disk_pauses_grants_not_heartbeats(
    hub_url: str, run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    with _serving(_config(hub_url), run_dir) as role:
        role.ask(hello_of("actor-0"))
        (lease,) = role.ask(request_of("actor-0", 1)).leases
        known = role.ask(beat_of("actor-0", [lease.episode_id]))
        with no_room_beyond(64):
            role.tell(beat_of("actor-0", [lease.episode_id]))  # it cannot be logged
            deadline = time.monotonic() + TIMEOUT_S
            while "the writer waits and loses nothing" not in caplog.text:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert role.ask(beat_of("actor-0", [lease.episode_id])) == known
            grant = role.ask(request_of("actor-0", 1))
            assert (grant.leases, grant.reason) == ([], "disk full")
            role.tell(hello_of("actor-1"))
            assert role.ask(beat_of("actor-0", [lease.episode_id])) == known
        answers = [role.answer(), role.answer()]
        assert {type(answer) for answer in answers} == {Progress, Welcome}
        assert len(role.ask(request_of("actor-0", 1)).leases) == 1
    ledger = json.loads(run_dir.ledger.read_text(encoding="utf-8"))
    assert ledger["issued"] == ledger["in_flight"] > 0

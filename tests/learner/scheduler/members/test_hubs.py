"""Laws of a run whose hubs join: a real scheduler, real hub registrations, real sockets."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from common.config.run_config import RunConfig
from common.errors import ConfigError, EnvError
from common.store.run_dir import RunDir
from common.wire.codec import decode, encode
from common.wire.join_messages import Directory, HubHello, HubPlace
from common.wire.messages import Outcomes, Rejected, Welcome
from common.wire.security import RunKeys, create_keys, read_join_key
from common.wire.sockets import connect_dealer
from envhub.registration import Registration
from learner.scheduler.bench.suite import serve_catalogue
from learner.scheduler.curriculum.catalogue import Catalogue
from learner.scheduler.main import serve
from tests.configs import edited
from tests.learner.scheduler.builders import CATALOGUE, done_of, hello_of, make_config

WAIT_S = 5.0


class Run:
    """A scheduler in a thread, in a run whose hubs join."""

    def __init__(self, root: Path, cfg: RunConfig) -> None:
        self.run_dir = RunDir(root=root)
        self.keys: RunKeys = create_keys(self.run_dir.keys)
        self.cfg = edited(cfg, {"envhub.is_started": False})
        self.error: Exception | None = None
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            serve(self.cfg, self.run_dir, self._stop)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def hub(self, name: str, url: str, envs: list[str]) -> Registration:
        """A hub's own registration, as its process starts it; stopped with the run."""
        place = HubPlace(url=url, token="t", envs=envs)
        hello = HubHello(name=name, incarnation=name, place=place)
        hub = Registration(self.run_dir, self.keys, hello, every_s=0.05, silence_s=None)
        hub.start()
        return hub

    def ask_directory(self, name: str = "actor-0", *, known: int = 0) -> Directory:
        """What the scheduler tells an actor that says hello until it is told."""
        socket = self.connect(self.keys)
        try:
            assert isinstance(ask(socket, replace(hello_of(name), directory=known)), Welcome)
            return decode(socket.recv_multipart())
        finally:
            socket.close(linger=0)

    def connect(self, keys: RunKeys) -> Any:
        address = self.run_dir.wait_for_address("scheduler", timeout_s=WAIT_S)
        return connect_dealer(self._context, keys, address=address, timeout_s=WAIT_S)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        self._context.term()
        assert not self._thread.is_alive()

    def wait_failed(self) -> Exception | None:
        self._thread.join(WAIT_S)
        return self.error


def ask(socket: Any, message: Any) -> Any:
    socket.send_multipart(encode(message))
    return decode(socket.recv_multipart())


@contextlib.contextmanager
def running(root: Path, cfg: RunConfig) -> Iterator[Run]:
    run = Run(root, cfg)
    try:
        yield run
    finally:
        run.stop()


def of(*envs: str) -> Catalogue:
    return Catalogue(envs={env: CATALOGUE.envs["maze"] for env in envs})


def test_a_node_cannot_pose_as_the_learner_by_its_key(tmp_path: Path) -> None:
    with serve_catalogue(of("maze")) as url, running(tmp_path, make_config()) as run:
        hub = run.hub("a", url, ["maze"])
        by_role = run.connect(run.keys)
        key = read_join_key(tmp_path / "keys" / "join.key", role="actor")
        by_node = run.connect(key.as_keys())
        moved = {"learner": "tcp://10.6.6.6:1", "weights": "tcp://10.6.6.6:2"}
        learner = replace(hello_of("learner-0"), role="learner", addresses=moved)
        for message in (
            learner,
            Outcomes(number=1),
            done_of(1),
            replace(learner, role="scheduler"),
        ):
            answer = ask(by_node, message)
            assert isinstance(answer, Rejected)
            assert "does not allow this" in answer.reason
        assert isinstance(ask(by_node, replace(hello_of("actor-0"), addresses=moved)), Welcome)
        assert run.ask_directory().learner == ""
        assert isinstance(ask(by_role, learner), Welcome)
        assert run.ask_directory().learner == "tcp://10.6.6.6:1"
        for each in (by_role, by_node):
            each.close(linger=0)
        hub.stop(timeout_s=WAIT_S)


def test_a_run_begins_when_its_hubs_together_serve_every_task_and_goes_on_without_one(
    tmp_path: Path,
) -> None:
    cfg = make_config(num_steps=1, per_step=1)
    cfg = edited(cfg, {"tasks": [cfg.tasks[0], edited(cfg.tasks[1], {"env": "chess"})]})
    with (
        serve_catalogue(of("maze")) as a,
        serve_catalogue(of("chess")) as b,
        running(tmp_path, cfg) as run,
    ):
        hubs = [run.hub("a", a, ["maze"])]
        time.sleep(0.2)  # in which nothing may begin
        assert not (tmp_path / "scheduler.json").exists()
        hubs.append(run.hub("b", b, ["chess"]))
        told = run.ask_directory()
        assert {place.url: place.envs for place in told.hubs} == {a: ["maze"], b: ["chess"]}
        hubs[1].stop(timeout_s=WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while len(told.hubs) > 1 and time.monotonic() < deadline:
            told = run.ask_directory()
        assert [place.url for place in told.hubs] == [a]
        hubs[0].stop(timeout_s=WAIT_S)


def test_a_hub_that_never_comes_is_an_error_that_names_the_tasks(tmp_path: Path) -> None:
    cfg = edited(make_config(num_steps=1, per_step=1), {"actor.start_timeout_s": 0.2})
    with running(tmp_path, cfg) as run:
        error = run.wait_failed()
    assert isinstance(error, EnvError)
    assert "no hub for" in str(error)


def test_a_second_scheduler_on_an_address_is_refused_and_names_it(tmp_path: Path) -> None:
    cfg = make_config(num_steps=1, per_step=1)
    with running(tmp_path / "a", cfg) as run:
        address = run.run_dir.wait_for_address("scheduler", timeout_s=WAIT_S)
        port = int(address.rpartition(":")[2])
        create_keys(tmp_path / "b" / "keys")
        with pytest.raises(ConfigError, match=f"cannot bind 127.0.0.1:{port}: Address already"):
            serve(
                edited(cfg, {"scheduler.port": port}),
                RunDir(root=tmp_path / "b"),
                threading.Event(),
            )
        assert not (tmp_path / "b" / "addresses").exists()

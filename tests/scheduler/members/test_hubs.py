"""Laws of a run with joining hubs: a real scheduler, real registrations, real sockets."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import ConfigError, EnvError
from common.store.run_dir import RunDir
from common.wire.messages import HubHello, HubPlace, Outcomes, Rejected, Welcome
from common.wire.security import create_keys, own_keys, read_join_key
from scheduler.curriculum.catalogue import HubCatalogue
from scheduler.main import serve
from scheduler.members.hubs import greet_known
from scheduler.members.registry import AddressRegistry
from tests.configs import edited
from tests.scheduler.builders import CATALOGUE, done_of, hello_of, make_config
from tests.scheduler.catalogue_server import serve_catalogue
from tests.scheduler.members.scheduler_rig import WAIT_S, ask, running


def of(*envs: str) -> HubCatalogue:
    return HubCatalogue(envs={env: CATALOGUE.envs["maze"] for env in envs})


def test_node_key_cannot_impersonate_the_learner(tmp_path: Path) -> None:
    with serve_catalogue(of("maze")) as url, running(tmp_path, make_config()) as run:
        hub = run.hub("a", url, ["maze"])
        by_role = run.connect(run.keys)
        key = read_join_key(tmp_path / "keys" / "join.key", role="actor")
        by_join = run.connect(key.as_keys())
        assert isinstance(ask(by_join, hello_of("actor-0")), Rejected)
        by_node = run.connect(own_keys(tmp_path / "keys", role="actor", name="actor-0"))
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
            assert "the key of actor-0" in answer.reason
        assert isinstance(ask(by_node, hello_of("actor-1")), Rejected)
        assert isinstance(ask(by_node, replace(hello_of("actor-0"), addresses=moved)), Welcome)
        assert run.ask_directory().learner == ""
        assert isinstance(ask(by_role, learner), Welcome)
        assert run.ask_directory().learner == "tcp://10.6.6.6:1"
        for each in (by_role, by_node, by_join):
            each.close(linger=0)
        hub.stop(timeout_s=WAIT_S)


def test_run_awaits_hubs_for_every_task(tmp_path: Path) -> None:
    cfg = make_config(num_steps=1, per_step=1)
    cfg = edited(cfg, {"tasks": [cfg.tasks[0], edited(cfg.tasks[1], {"env": "chess"})]})
    with (
        serve_catalogue(of("maze")) as a,
        serve_catalogue(of("chess")) as b,
        running(tmp_path, cfg) as run,
    ):
        hubs = [run.hub("a", a, ["maze"])]
        time.sleep(0.2)  # The run must not begin here.
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


def test_hub_with_other_items_ends_with_the_reason(tmp_path: Path) -> None:
    cfg = make_config(num_steps=1, per_step=1)
    with serve_catalogue(of("maze")) as url, running(tmp_path, cfg) as run:
        first = run.hub("a", url, ["maze"], items="1")
        assert run.ask_directory().hubs
        second = run.hub("b", url, ["maze"], items="2")
        second.join(WAIT_S)
        assert not second.is_alive()
        assert str(second.error).startswith(
            "the scheduler refused this hub: its items of maze are not those of the run"
        )
        assert first.is_alive()
        first.stop(timeout_s=WAIT_S)


def test_restarted_scheduler_restores_its_hub_if_it_answers() -> None:
    with serve_catalogue(of("maze")) as url:
        first, second = AddressRegistry(dead_after_s=9.0), AddressRegistry(dead_after_s=9.0)
        for name, where, token in (
            ("here", url, "t"),
            ("gone", "http://127.0.0.1:9", "t"),
            ("joined", url, "of its own"),
        ):
            place = HubPlace(url=where, token=token, envs=["maze"])
            first.hear_hub(HubHello(name=name, incarnation="1", place=place), b"x", 0.0)
        saved = json.loads(json.dumps(first.saved_hubs("t")))
        assert "token" not in json.dumps(saved)
        began = time.monotonic()
        greet_known(second, saved, token="t")
        assert time.monotonic() - began < 2.0
        known = [(place.url, place.token) for place in second.directory.hubs]
        assert known == [(url, "t")]
        number = second.directory.number
        place = HubPlace(url=url, token="t", envs=["maze"])
        second.hear_hub(HubHello(name="here", incarnation="1", place=place), b"x", 0.0)
        assert second.directory.number == number  # No new directory is sent.


def test_missing_hub_raises_error_with_tasks(tmp_path: Path) -> None:
    cfg = edited(make_config(num_steps=1, per_step=1), {"actor.start_timeout_s": 0.2})
    with running(tmp_path, cfg) as run:
        error = run.wait_failed()
    assert isinstance(error, EnvError)
    assert "but the hubs serve only" in str(error)


def test_second_scheduler_on_an_address_is_refused_by_name(tmp_path: Path) -> None:
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

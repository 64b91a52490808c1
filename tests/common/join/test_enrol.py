"""Laws of joining: a real scheduler's answers over real sockets, and what may be wrong."""

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.config.envhub import EnvhubSection
from common.config.learner import LearnerSection
from common.config.load import load_received
from common.config.model import ModelSection
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.join.enrol import enrol, parse_address
from common.join.files import PART_BYTES
from common.repository import product_version
from common.wire.access.identities import revoke
from common.wire.messages import (
    NAME_IN_USE,
    Enrolment,
    FilePart,
    FileRequest,
    JoinRequest,
    Rejected,
)
from common.wire.security import (
    JoinKey,
    create_keys,
    read_join_key,
    write_join_key,
    write_rank_keys,
)
from common.wire.sockets import Router
from common.wire.versions import PREVIOUS_VERSION
from scheduler.members.enrolment import Enrolments
from tests.common.wire.other_code import OtherCode

WAIT_S = 20.0
REQUEST = JoinRequest(role="actor", product=product_version(), name="actor-1", public_key="k" * 40)
OUTSIDE = "environments/mine.py:make_spec"
TOKENIZER = b'{"v": "' + b"x" * (2 * PART_BYTES) + b'"}'


class Scheduler(threading.Thread):
    """Answers nodes as the scheduler's loop does; `alter` may spoil an answer on its way."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text('{"a": 1}', encoding="utf-8")
        (model / "tokenizer.json").write_bytes(TOKENIZER)
        self.cfg = RunConfig(
            model=ModelSection(path=str(model)),
            envhub=EnvhubSection(token="secret", url="http://10.0.0.1:1", envs=[OUTSIDE]),
            learner=LearnerSection(host="127.0.0.1"),
        )
        self.keys = create_keys(folder / "keys")
        self.key_path = write_join_key(folder / "keys", self.keys, run_name="a")
        self.key = read_join_key(self.key_path, role="actor")
        self.router = Router(self.keys, host="127.0.0.1", port=0)
        self.address = f"tcp://127.0.0.1:{self.router.port}"
        self.alter: Callable[[Any], Any] = lambda answer: answer
        self.num_parts = 0
        self._stop_requested = threading.Event()

    def run(self) -> None:
        enrolments = Enrolments(self.cfg, Path(self.keys.folder))
        while not self._stop_requested.is_set():
            for received in self.router.receive_all(timeout_s=0.5):
                answer = enrolments.answer(received.message)
                self.num_parts += isinstance(answer, FilePart)
                self.router.send(received.sender, self.alter(answer))

    def stop(self) -> None:
        self._stop_requested.set()
        self.router.wake()
        self.join()
        self.router.close()


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scheduler]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    scheduler = Scheduler(tmp_path)
    scheduler.start()
    yield scheduler
    scheduler.stop()


def cached(tmp_path: Path) -> list[str]:
    return [str(each.relative_to(tmp_path / "cache")) for each in tmp_path.glob("cache/**/*.json")]


def test_node_receives_files_and_role_config(scheduler: Scheduler) -> None:
    joined = enrol(scheduler.address, scheduler.key, REQUEST, timeout_s=WAIT_S)
    folder = Path(joined.model_path)
    assert (folder / "tokenizer.json").read_bytes() == TOKENIZER
    assert sorted(each.name for each in folder.iterdir()) == ["config.json", "tokenizer.json"]
    cfg = load_received(joined.config, ["model.path=x", "actor.name=n"])
    assert cfg.actor == replace(scheduler.cfg.actor, name="n")
    assert cfg.run == scheduler.cfg.run
    assert "secret" not in joined.config
    num_parts = scheduler.num_parts
    assert num_parts == 4
    assert joined.key.name == REQUEST.name
    assert joined.key.client_secret != scheduler.key.client_secret
    again = enrol(scheduler.address, scheduler.key, REQUEST, timeout_s=WAIT_S)
    assert replace(again, key=joined.key) == joined
    assert scheduler.num_parts == num_parts, "what is here already travels again"


def test_joining_hub_receives_tasks_and_outside_environments(scheduler: Scheduler) -> None:
    request = replace(REQUEST, role="envhub", name="h")
    joined = enrol(scheduler.address, scheduler.key, request, timeout_s=WAIT_S)
    cfg = load_received(joined.config, ["model.path=x"])
    assert cfg.envhub.envs == sorted({OUTSIDE, *(task.env for task in scheduler.cfg.tasks)})


def test_learner_node_joins_with_its_own_key_only(scheduler: Scheduler) -> None:
    folder = Path(scheduler.keys.folder)
    first, second = write_rank_keys(folder, run_name="a", num_nodes=3)
    key = read_join_key(first, role="learner")
    request = replace(REQUEST, role="learner")
    joined = enrol(scheduler.address, key, request, timeout_s=WAIT_S)
    assert (joined.key.name, joined.model_path, scheduler.num_parts) == ("ranks-1", "", 0)
    cfg = load_received(joined.config, [])
    assert (cfg.learner, cfg.algorithm) == (scheduler.cfg.learner, scheduler.cfg.algorithm)
    assert cfg.model.path == joined.base
    with pytest.raises(ConfigError, match="not for learner"):
        read_join_key(scheduler.key_path, role="learner")
    text = second.read_text(encoding="utf-8")
    assert write_rank_keys(folder, run_name="a", num_nodes=3) == [first, second]
    assert second.read_text(encoding="utf-8") == text  # A restart of the run keeps the keys.
    assert {path.stat().st_mode & 0o777 for path in (first, second)} == {0o600}


def test_node_with_its_own_model_receives_none(scheduler: Scheduler) -> None:
    request = replace(REQUEST, has_model=True)
    joined = enrol(scheduler.address, scheduler.key, request, timeout_s=WAIT_S)
    assert (joined.model_path, scheduler.num_parts) == ("", 0)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (replace(REQUEST, role="scheduler"), "cannot join; these roles can: actor, envhub"),
        (replace(REQUEST, role="learner"), "joins with keys/ranks-N.key"),
        (replace(REQUEST, role="learner", name="ranks-1"), "joins with keys/ranks-N.key"),
        (replace(REQUEST, name="ranks-1"), "the name is not allowed"),
        (replace(REQUEST, is_remote=True), r"start it with learner\.host=0"),
    ],
)
def test_refused_join_names_its_reason(
    scheduler: Scheduler, request_: JoinRequest, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        enrol(scheduler.address, scheduler.key, request_, timeout_s=WAIT_S)


def test_protocol_version_mismatch_is_refused_with_remedy(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.join.enrol.encode", lambda *_: [b"\x93\x63\xa5Other\x80"])
    with pytest.raises(ConfigError, match=r"schema version 99.*install the same version"):
        enrol(scheduler.address, scheduler.key, REQUEST, timeout_s=WAIT_S)


def test_node_of_another_release_joins(scheduler: Scheduler) -> None:
    request = replace(REQUEST, product="0.0.1", has_model=True)
    joined = enrol(scheduler.address, scheduler.key, request, timeout_s=WAIT_S)
    assert joined.key.name == REQUEST.name
    assert {"run.seed", "actor.sleep"} < joined.defaults
    assert "model.path" not in joined.defaults


def test_node_of_newer_code_joins_an_older_scheduler(tmp_path: Path) -> None:
    keys = create_keys(tmp_path)
    answer = Enrolment(run_name="a", config="run: {name: a}")
    older = OtherCode(keys, PREVIOUS_VERSION, answer=answer)
    try:
        key = read_join_key(write_join_key(tmp_path, keys, run_name="a"), role="actor")
        joined = enrol(older.address, key, REQUEST, timeout_s=WAIT_S)
        assert joined.config == answer.config
        assert joined.defaults == frozenset()
    finally:
        older.stop()


def test_key_of_another_run_is_refused_immediately(scheduler: Scheduler, tmp_path: Path) -> None:
    other = create_keys(tmp_path / "other")
    stranger = replace(
        scheduler.key, client_public=other.node_public, client_secret=other.node_secret
    )
    with pytest.raises(ConfigError, match="the key belongs to another run; copy"):
        enrol(scheduler.address, stranger, REQUEST, timeout_s=WAIT_S)
    elsewhere = read_join_key(write_join_key(tmp_path / "other", other, run_name="b"), role="actor")
    with pytest.raises(ConfigError, match="or the key belongs to another run"):
        enrol(scheduler.address, elsewhere, REQUEST, timeout_s=1.0)


def test_unreachable_join_address_is_named(scheduler: Scheduler, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"--join {address}: no connection within"):
            enrol(parse_address(address), scheduler.key, REQUEST, timeout_s=0.5)
    assert cached(tmp_path) == []


@pytest.mark.parametrize("text", ["", "host", "host:", ":5", "host:0", "host:70000", "host:x"])
def test_malformed_join_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expects HOST:PORT"):
        parse_address(text)


def test_damaged_file_is_refused_and_removed(scheduler: Scheduler, tmp_path: Path) -> None:
    def spoil(answer: Any) -> Any:
        is_part = isinstance(answer, FilePart) and answer.offset_bytes > 0
        return replace(answer, content=b"y" * len(answer.content)) if is_part else answer

    scheduler.alter = spoil
    with pytest.raises(ConfigError, match=r"tokenizer\.json: damaged in transfer"):
        enrol(scheduler.address, scheduler.key, REQUEST, timeout_s=WAIT_S)
    assert cached(tmp_path) == []


def test_folder_that_another_node_completes_meanwhile_stays(scheduler: Scheduler) -> None:
    folder = Path(enrol(scheduler.address, scheduler.key, REQUEST, timeout_s=WAIT_S).model_path)
    of_another = folder.rename(folder.with_name("of-another"))
    inode = of_another.stat().st_ino

    def complete(answer: Any) -> Any:
        if isinstance(answer, FilePart) and of_another.exists():
            of_another.rename(folder)
        return answer

    scheduler.alter = complete
    enrol(scheduler.address, scheduler.key, REQUEST, timeout_s=WAIT_S)
    assert folder.stat().st_ino == inode
    (folder / "config.json").write_text("damaged", encoding="utf-8")
    enrol(scheduler.address, scheduler.key, REQUEST, timeout_s=WAIT_S)
    assert (folder / "config.json").read_text(encoding="utf-8") == '{"a": 1}'


def test_only_listed_files_are_served(scheduler: Scheduler, tmp_path: Path) -> None:
    (Path(scheduler.cfg.model.path) / "model.safetensors").write_bytes(b"weights")
    enrolments = Enrolments(scheduler.cfg, tmp_path / "keys")
    enrolments.answer(REQUEST)
    for name in ("../keys/server_secret", "model.safetensors", "/etc/passwd"):
        answer = enrolments.answer(FileRequest(name=name, offset_bytes=0))
        assert "no file" in answer.reason
    assert "no file" in enrolments.answer(FileRequest(name="config.json", offset_bytes=-1)).reason


def test_live_name_is_reserved_for_its_holder(scheduler: Scheduler, tmp_path: Path) -> None:
    enrolments = Enrolments(scheduler.cfg, tmp_path / "keys")
    other = replace(REQUEST, public_key="o" * 40, has_model=True)
    mine = replace(REQUEST, has_model=True)
    assert isinstance(enrolments.answer(mine), Enrolment)

    def is_alive(name: str) -> bool:
        return name == REQUEST.name

    assert enrolments.answer(other, is_alive).reason.startswith(NAME_IN_USE)
    assert isinstance(enrolments.answer(mine, is_alive), Enrolment)
    assert isinstance(enrolments.answer(other), Enrolment)
    revoke(tmp_path / "keys", REQUEST.name)
    assert "revoked" in enrolments.answer(mine).reason
    for name in ("learner-1", "run", "", "n" * 300):
        assert isinstance(enrolments.answer(replace(mine, name=name)), Rejected)


def test_join_key_holds_no_run_secrets(scheduler: Scheduler) -> None:
    text = scheduler.key_path.read_text(encoding="utf-8")
    keys = scheduler.keys
    assert not any(
        each in text for each in (keys.server_secret, keys.client_secret, keys.hub_token)
    )
    assert scheduler.key_path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="joining node cannot listen"):
        Router(scheduler.key.as_keys(), host="127.0.0.1", port=0).close()


def key_text(**changes: Any) -> str:
    key = JoinKey(
        format=1,
        run="a",
        roles=["actor"],
        server_public="x" * 40,
        client_public="x" * 40,
        client_secret="x" * 40,
    )
    fields = {name: getattr(key, name) for name in JoinKey.__slots__}
    return json.dumps({**fields, **changes})


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (None, 0o600, "No such file.*copy runs/NAME/keys"),
        (key_text(), 0o644, "other users may read it; run chmod 600"),
        ("no json", 0o600, "not a key file of this version"),
        ("[1]", 0o600, "not a key file of this version"),
        (key_text(format=2), 0o600, "not a key file of this version"),
        (key_text(client_secret="short"), 0o600, "not a key file of this version"),
        (key_text(run=None), 0o600, "not a key file of this version"),
        (key_text(roles=["envhub"]), 0o600, "this key is for envhub, not for actor"),
    ],
)
def test_bad_key_file_is_refused_with_remedy(
    tmp_path: Path, text: str | None, mode: int, words: str
) -> None:
    path = tmp_path / "join.key"
    if text is not None:
        path.write_text(text, encoding="utf-8")
        os.chmod(path, mode)
    with pytest.raises(ConfigError, match=words):
        read_join_key(path, role="actor")

"""Laws of rank 0's connection to the learner's other nodes, with real sockets."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zmq
from safetensors.torch import save_file

from common.config.learner import LearnerSection
from common.config.model import ModelSection
from common.config.run_config import RunConfig
from common.config.scheduler import SchedulerSection
from common.errors import LongstrideError
from common.store.run_dir import RunDir
from common.wire.codec import decode, encode
from common.wire.messages import NodeState, RankBeat, RankChannel, RankOrder, RankSeat
from common.wire.security import JoinKey, create_keys, read_join_key, write_rank_keys
from common.wire.sockets import connect_dealer
from learner.policy.weight_files import RemoteWeightFiles
from learner.training.rank_processes import FilePlace, RankFiles
from learner.training.rank_workers import NodeServer

WAIT_S = 60.0


def config(folder: Path, *, dead_after_s: float = 300.0, **learner: float) -> RunConfig:
    """Return the configuration of a learner on three nodes."""
    section = replace(LearnerSection(num_nodes=3, num_ranks=6), **learner)
    scheduler = SchedulerSection(heartbeat_s=0.1, dead_after_s=dead_after_s)
    return RunConfig(model=ModelSection(path=str(folder)), learner=section, scheduler=scheduler)


@contextmanager
def server_of(cfg: RunConfig, folder: Path) -> Iterator[tuple[NodeServer, RunDir, list[JoinKey]]]:
    """Yield a server of nodes, its run directory, and the keys of the further nodes."""
    run_dir = RunDir(root=folder / "run")
    create_keys(run_dir.keys)
    run_dir.checkpoints.mkdir(parents=True)
    paths = write_rank_keys(run_dir.keys, run_name="a", num_nodes=cfg.learner.num_nodes)
    server = NodeServer(cfg, run_dir, None, end_process=lambda: None)
    try:
        yield server, run_dir, [read_join_key(path, role="learner") for path in paths]
    finally:
        server.close(RankChannel.STOP)


class FakeNode:
    """A node that sends beats when the test asks for them."""

    def __init__(self, server: NodeServer, key: JoinKey) -> None:
        self._key = key
        self._context = zmq.Context()
        address = f"tcp://127.0.0.1:{server.port}"
        self._socket = connect_dealer(self._context, key.as_keys(), address=address, timeout_s=60.0)
        self._incarnation = server.incarnation

    def beat(self, state: NodeState, error: str = "") -> RankSeat:
        """Send one beat; return the answer."""
        beat = RankBeat(
            name=self._key.name,
            incarnation=self._incarnation,
            process="p",
            node="host",
            host="127.0.0.1",
            state=state,
            error=error,
        )
        self._socket.send_multipart(encode(beat))
        answer = self.receive()
        assert isinstance(answer, RankSeat)
        return answer

    def receive(self) -> object:
        return decode(self._socket.recv_multipart())

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@contextmanager
def node_of(server: NodeServer, key: JoinKey) -> Iterator[FakeNode]:
    node = FakeNode(server, key)
    try:
        yield node
    finally:
        node.close()


def error_of(server: NodeServer) -> str:
    """Return the error that ends the learner."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            server.check()
        except LongstrideError as error:
            return str(error)
        time.sleep(0.01)
    raise TimeoutError("the server found no loss")


def test_missing_nodes_are_named_at_the_deadline(tmp_path: Path) -> None:
    cfg = config(tmp_path, join_timeout_s=0.5)
    text = r"learner.num_nodes=3: node 2 did not join .*=0.5. Start .* keys/ranks-2.key"
    with server_of(cfg, tmp_path) as (server, _, keys), node_of(server, keys[0]) as node:
        node.beat(NodeState.LOADED)
        with pytest.raises(LongstrideError, match=text):
            server.wait_loaded(lambda: None)


def test_order_reaches_all_nodes_and_their_loss_is_named(tmp_path: Path) -> None:
    with (
        server_of(config(tmp_path), tmp_path) as (server, _, keys),
        node_of(server, keys[0]) as first,
        node_of(server, keys[1]) as second,
    ):
        assert first.beat(NodeState.LOADED) == second.beat(NodeState.LOADED)
        server.wait_loaded(lambda: None)
        server.send(RankChannel.TRAINING, b"step")
        assert first.receive() == RankOrder(channel=RankChannel.TRAINING, content=b"step")
        assert second.receive() == RankOrder(channel=RankChannel.TRAINING, content=b"step")
        # The first node only lost its connection to the second one.
        first.beat(NodeState.DISCONNECTED)
        second.beat(NodeState.FAILED, "learner rank 5 ended with exit code -9")
        text = "learner node 2 (host, ranks 4 to 5): learner rank 5 ended with exit code -9"
        assert error_of(server) == text == server.explain()


def test_silent_node_is_lost(tmp_path: Path) -> None:
    with (
        server_of(config(tmp_path, dead_after_s=0.3), tmp_path) as (server, _, keys),
        node_of(server, keys[1]) as node,
    ):
        node.beat(NodeState.LOADED)
        assert error_of(server).startswith("learner node 2 (host, ranks 4 to 5) is lost: it sent")


def test_rank_reads_its_rows_over_the_network(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    tensors = {"a": torch.arange(12.0).view(6, 2), "b": torch.tensor(3.0, dtype=torch.bfloat16)}
    save_file(tensors, model / "x.safetensors")
    (model / "config.json").write_text("{}", encoding="utf-8")
    mirror = tmp_path / "mirror"
    with server_of(config(model), tmp_path) as (server, run_dir, keys):
        place = FilePlace(
            address=f"tcp://127.0.0.1:{server.port}",
            keys=keys[0].as_keys(),
            mirrored={str(mirror): str(model)},
        )
        service = RankFiles(place)
        try:
            service.mirror(str(model), mirror)
            assert [each.name for each in mirror.iterdir()] == ["config.json"]
            files = RemoteWeightFiles(service, place.mirrored)
            (path,) = files.weights_in(mirror)
            with files.open_weights(path) as reader:
                assert sorted(reader.keys()) == ["a", "b"]
                assert torch.equal(reader.get_tensor("a"), tensors["a"])
                assert torch.equal(reader.get_tensor("b"), tensors["b"])
                assert torch.equal(reader.get_slice("a")[slice(4, 9)], tensors["a"][4:])
                assert reader.get_slice("a")[slice(6, 9)].shape == (0, 2)
            file = run_dir.checkpoints.resolve() / "shard.bin"
            files.write(file, [memoryview(b"ab"), memoryview(b""), memoryview(b"cde")])
            assert file.read_bytes() == b"abcde"
            for forbidden in (tmp_path / "run" / "keys" / "server_secret", model / "../other"):
                with pytest.raises(LongstrideError, match="not allowed outside"):
                    service.read(str(forbidden), 0, 10)
            with pytest.raises(LongstrideError, match="write is not allowed outside"):
                service.write(str(model / "x.safetensors"), 0, b"x")
        finally:
            service.close()


class HostileFiles(RankFiles):
    """A file service that lists a file outside of the folder."""

    def names(self, folder: str) -> list[str]:
        return ["../evil.json"]


def test_file_service_cannot_name_a_file_outside_the_folder(tmp_path: Path) -> None:
    keys = create_keys(tmp_path / "keys")
    place = FilePlace(address="tcp://127.0.0.1:1", keys=keys, mirrored={})
    service = HostileFiles(place)
    try:
        with pytest.raises(
            LongstrideError, match=r"'\.\./evil\.json' is not a path in this folder"
        ):
            service.mirror("/model", tmp_path / "mirror")
    finally:
        service.close()

"""The rank processes of one node, and the process group in which all ranks meet."""

import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import zmq
from torch.distributed import FileStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.config.learner import Layout, ShardPlace
from common.config.run_config import RunConfig
from common.errors import LongstrideError, RankLost, WeightSyncError, WireError
from common.host.loopback import loopback
from common.join.files import SUFFIXES
from common.log import configure_logging
from common.quick_exit import leave
from common.stall.stacks import tell_stacks
from common.text import is_path_inside
from common.weights.rendezvous import (
    GroupStore,
    StoreConnection,
    StorePlace,
    interface_of,
    prove_members,
)
from common.weights.transport import lower_priority
from common.wire.addresses import is_loopback
from common.wire.codec import decode, encode
from common.wire.messages import FileOp, RankFile, RankFileAnswer
from common.wire.security import RunKeys
from common.wire.sockets import connect_dealer
from learner.policy.model import pick_device
from learner.policy.timing import with_settled
from learner.policy.weight_files import LOCAL, RemoteWeightFiles
from learner.training.build import load_start, make_trainer
from learner.training.ranks import RankOperation, Ranks
from learner.training.shard_home import ShardHome
from learner.weights.source import LiveWeights

ANSWER_S = 60.0  # Timeout of an answer. The disk of rank 0's node may be busy.
LOOK_S = 0.25
PART_BYTES = 4_000_000
MARKER = "COMPLETE"  # A small file of a checkpoint without a suffix.
MAX_SMALL_BYTES = 256 << 20  # Largest file that a node copies; weights are read by parts.


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlace:
    """The address of a file service, and the keys of its client."""

    address: str  # tcp://
    keys: RunKeys
    mirrored: dict[str, str]  # Folder of this node -> folder on rank 0's node.


class RankFiles:
    """Reads and writes files of rank 0's node. Thread-safe: it sends one request at a time."""

    def __init__(self, place: FilePlace, *, answer_s: float = ANSWER_S) -> None:
        """Connect. The first request detects a missing service."""
        self._address = place.address
        self._answer_s = answer_s
        self._context = zmq.Context()
        self._socket = connect_dealer(self._context, place.keys, address=place.address)
        self._lock = threading.Lock()
        self._number = 0

    def names(self, folder: str) -> list[str]:
        """Return the relative paths of the files below a folder."""
        return self._ask(FileOp.LIST, folder).names

    def read(self, path: str, offset: int, num_bytes: int) -> bytes:
        """Return the bytes at `offset`, at most `PART_BYTES`; fewer at the end of the file."""
        return self._ask(FileOp.READ, path, offset_bytes=offset, num_bytes=num_bytes).content

    def write(self, path: str, offset: int, content: bytes) -> None:
        """Write bytes at `offset`; offset 0 begins a new file."""
        self._ask(FileOp.WRITE, path, offset_bytes=offset, content=content)

    def mirror(self, remote: str, folder: Path) -> None:
        """Copy the small files below a remote folder, which holds a model or a checkpoint."""
        for name in self.names(remote):
            if not name.endswith(SUFFIXES) and Path(name).name != MARKER:
                continue
            if not is_path_inside(name):
                raise LongstrideError(f"{remote}: {name!r} is not a path in this folder")
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as out:
                while part := self.read(f"{remote}/{name}", out.tell(), PART_BYTES):
                    out.write(part)
                    if out.tell() > MAX_SMALL_BYTES:
                        raise LongstrideError(
                            f"{remote}/{name}: larger than the {MAX_SMALL_BYTES} bytes of a file"
                            " that a node of the learner may copy"
                        )

    def _ask(
        self,
        op: FileOp,
        path: str,
        *,
        offset_bytes: int = 0,
        num_bytes: int = 0,
        content: bytes = b"",
    ) -> RankFileAnswer:
        """Return the answer. Raises: LongstrideError: no answer in time, or an error there."""
        with self._lock:
            self._number += 1
            request = RankFile(
                number=self._number,
                op=op,
                path=path,
                offset_bytes=offset_bytes,
                num_bytes=num_bytes,
                content=content,
            )
            try:
                answer = self._exchange(request)
            except (zmq.ZMQError, WireError) as error:
                raise LongstrideError(
                    f"{path}: rank 0's node at {self._address} does not answer: {error}"
                ) from error
        if answer.error:
            raise LongstrideError(f"{path} on rank 0's node: {answer.error}")
        return answer

    def _exchange(self, request: RankFile) -> RankFileAnswer:
        """Return the answer to one request. Raises: WireError: none in time, or another message."""
        self._socket.send_multipart(encode(request))
        deadline = time.monotonic() + self._answer_s
        while time.monotonic() < deadline:
            if not self._socket.poll(int(LOOK_S * 1_000)):
                continue
            message = decode(self._socket.recv_multipart())
            if not isinstance(message, RankFileAnswer):
                raise WireError(f"unexpected answer: {message!r}"[:300])
            if message.number == request.number:
                return message
        raise WireError(f"no answer within {self._answer_s:g} s")

    def close(self) -> None:
        """Close the connection."""
        self._socket.close(linger=0)
        self._context.term()


logger = logging.getLogger(__name__)

READY = b"ready"
LOAD_S = 900.0  # Time limit for all ranks to load their models, in seconds.
LOST_CODE = 3  # Exit code of a rank that has lost the connection to another rank.
STOP_S = 5.0  # Time limit for a process to exit by itself, in seconds.


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The rendezvous of all ranks, as one node reaches it."""

    folder: str = ""  # Folder of the rendezvous if all ranks run on this host.
    place: StorePlace | None = None  # Store of the rendezvous if the ranks run on several nodes.
    group: str = ""  # Secret name of the group in that store.
    host: str = ""  # Address of this node for the other nodes; "": the ranks receive it later.
    files: FilePlace | None = None  # Access to the files of rank 0's node; None: not needed.
    home: ShardHome | None = None  # Folder of a further node for its files of checkpoints.

    def store(self, num_ranks: int, *, timeout_s: float) -> Store:
        """Return the store of the process group."""
        if self.place is None:
            return FileStore(str(Path(self.folder) / "store"), num_ranks)
        line = StoreConnection(self.place, answer_s=timeout_s)
        return GroupStore(line, self.group, timeout_s=timeout_s)

    def choose_interfaces(self) -> None:
        """Set the network interface of gloo and NCCL. With several nodes the user's choice wins."""
        if self.place is None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface_of(loopback())
            return
        name = interface_of(loopback() if is_loopback(self.host) else self.host)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        if not is_loopback(self.host):
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


class RankWorker(NamedTuple):
    """A rank process and its pipes."""

    rank: int
    process: BaseProcess
    pipe: Connection
    publish_pipe: Connection  # Carries the publisher's requests for parts of the weights.


class RankProcesses:
    """The rank processes that this process has started."""

    def __init__(
        self, cfg: RunConfig, ranks: Iterable[int], checkpoint: Path | None, meeting: Meeting
    ) -> None:
        """Start a process for each rank. They load `checkpoint` or `model.path`."""
        self.workers: list[RankWorker] = []
        self._loaded: set[int] = set()
        context = multiprocessing.get_context("spawn")
        for rank in ranks:
            ours, theirs = context.Pipe()
            asked, asking = context.Pipe(duplex=False)
            process = context.Process(
                target=_serve_rank,
                args=(cfg, rank, checkpoint, meeting, theirs, asked),
                name=f"learner-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            asked.close()
            self.workers.append(RankWorker(rank, process, ours, asking))

    @property
    def pids(self) -> list[int | None]:
        """The process ids of the ranks."""
        return [worker.process.pid for worker in self.workers]

    def wait_loaded(self) -> None:
        """Wait until all ranks have loaded. Raises: LongstrideError: a rank ended or timed out."""
        deadline = time.monotonic() + LOAD_S
        for worker in self.workers:
            remaining_s = max(0.0, deadline - time.monotonic())
            ready = wait([worker.pipe, worker.process.sentinel], remaining_s)
            if not ready:
                raise LongstrideError(
                    f"learner rank {worker.rank} did not load its model within {LOAD_S:g} s"
                )
            if worker.pipe in ready:
                self._await_loaded(worker)
            else:  # An ending process has no exit code before it has ended.
                worker.process.join(STOP_S)
            self.check()

    def have_loaded(self) -> bool:
        """Return whether all ranks have loaded, without waiting. Raises: as `check`."""
        self.check()
        for worker in self.workers:
            if worker.rank not in self._loaded and worker.pipe.poll():
                self._await_loaded(worker)
        return len(self._loaded) == len(self.workers)

    def _await_loaded(self, worker: RankWorker) -> None:
        try:
            worker.pipe.recv_bytes()
        except EOFError as error:
            worker.process.join(STOP_S)
            self.check()
            raise LongstrideError(
                f"learner rank {worker.rank} closed its pipe during its start"
            ) from error
        self._loaded.add(worker.rank)

    def tell(self, message: bytes) -> None:
        """Send a message to the main thread of each rank. Raises: LongstrideError: one ended."""
        for worker in self.workers:
            self._send(worker, worker.pipe, message)

    def ask(self, request: bytes) -> None:
        """Request a part of the weights from each rank. Raises: LongstrideError: one ended."""
        for worker in self.workers:
            self._send(worker, worker.publish_pipe, request)

    def _send(self, worker: RankWorker, pipe: Connection, message: bytes) -> None:
        try:
            pipe.send_bytes(message)
        except OSError as error:
            raise LongstrideError(f"learner rank {worker.rank} has ended: {error}") from error

    @property
    def are_disconnected(self) -> bool:
        """Whether each rank that has ended had lost the connection to another rank."""
        codes = {worker.process.exitcode for worker in self.workers} - {None}
        return codes == {LOST_CODE}

    def check(self) -> None:
        """Check that all ranks are alive. Raises: LongstrideError: names the rank that ended."""
        if text := self.lost_text():
            raise LongstrideError(text)

    def lost_text(self) -> str:
        """Return which rank has ended, "" if all are alive.

        A rank with a cause of its own comes before a rank that lost the connection to it.
        """
        ended = [each for each in self.workers if each.process.exitcode is not None]
        ended.sort(key=lambda each: each.process.exitcode == LOST_CODE)
        if not ended:
            return ""
        rank = ended[0].rank
        return (
            f"learner rank {rank} ended with exit code {ended[0].process.exitcode}. The lines of"
            f" learner-{rank} in this log have the cause."
        )

    def stop(self, *, timeout_s: float = STOP_S) -> None:
        """End all ranks: close their pipes, and kill each process that does not exit in time."""
        deadline = time.monotonic() + timeout_s
        for worker in self.workers:
            worker.pipe.close()
            worker.publish_pipe.close()
        for worker in self.workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.exitcode is None:
                logger.warning("killing rank=%d pid=%s", worker.rank, worker.process.pid)
                worker.process.kill()
                worker.process.join(STOP_S)
        self.workers.clear()


def meet(cfg: RunConfig, rank: int, meeting: Meeting, device: torch.device) -> Ranks:
    """Return the group of all ranks. Raises: LongstrideError: a rank is missing."""
    num_ranks = cfg.learner.num_ranks
    timeout_s = cfg.learner.rank_timeout_s
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    try:
        meeting.choose_interfaces()
        store = meeting.store(num_ranks, timeout_s=timeout_s)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        _prove(dist.group.WORLD, store, "all", timeout_s=timeout_s)
        shape = (num_ranks // cfg.learner.shard_ranks, cfg.learner.shard_ranks)
        dims = slice(shape[0] == 1, None)  # A single copy has a mesh of one dimension.
        mesh = init_device_mesh(device.type, shape[dims], mesh_dim_names=("copy", "shard")[dims])
        for number, part in enumerate(mesh.get_all_groups()):
            _prove(part, store, f"mesh-{number}", timeout_s=timeout_s)
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)  # This rank is a member of the group.
        _prove(group, store, "publish", timeout_s=timeout_s)
        rows = None
        if cfg.learner.sequence_ranks > 1:
            limit = timedelta(seconds=timeout_s)
            rows, _ = dist.new_subgroups(cfg.learner.sequence_ranks, timeout=limit)
            assert isinstance(rows, dist.ProcessGroup)  # This rank is a member of the group.
            _prove(rows, store, "rows", timeout_s=timeout_s)
        experts = expert_mesh(num_ranks, cfg.learner.expert_ranks, device.type)
        for number, part in enumerate([] if experts is None else experts.get_all_groups()):
            _prove(part, store, f"experts-{number}", timeout_s=timeout_s)
        files = LOCAL
        if meeting.files is not None:
            files = RemoteWeightFiles(RankFiles(meeting.files), meeting.files.mirrored)
        ranks = Ranks(
            mesh,
            publish_group=group,
            sequence_group=rows,
            expert_mesh=experts,
            files=files,
            local_ranks=cfg.learner.local_ranks,
            home=meeting.home,
            writes_home=cfg.learner.checkpoint_shards is ShardPlace.OWN_NODE,
        )
        _prove(ranks.saving, store, "saving", timeout_s=timeout_s)
    except (RuntimeError, WeightSyncError) as error:
        raise LongstrideError(
            f"learner rank {rank} of {num_ranks} could not join the process group: {error}"
        ) from error
    ranks.store = store  # torch references only the C++ part of the store.
    return ranks


def expert_mesh(num_ranks: int, expert_ranks: int, device_type: str) -> DeviceMesh | None:
    """Return the mesh [expert] or [copy, expert] of all ranks; None: the experts are not divided.

    Its groups are its own, so tokens do not wait for the weights that other groups gather.
    """
    if expert_ranks == 1:
        return None
    if expert_ranks == num_ranks:
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)  # This rank is a member of the group.
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=("expert",))
    shape = (num_ranks // expert_ranks, expert_ranks)
    return init_device_mesh(device_type, shape, mesh_dim_names=("copy", "expert"))


def _prove(group: dist.ProcessGroup | None, store: Store, name: str, *, timeout_s: float) -> None:
    """Prove the membership of all ranks over the connections of a group, before its first use.

    Raises: WeightSyncError: a process outside the group occupies a rank.
    """
    assert isinstance(group, dist.ProcessGroup)  # This rank is a member of the group.
    ranks = "-".join(map(str, dist.get_process_group_ranks(group)))
    gloo = group._get_backend(torch.device("cpu"))
    prove_members(gloo, store, f"proof/{name}/{ranks}", timeout=timedelta(seconds=timeout_s))


def _serve_rank(
    cfg: RunConfig,
    rank: int,
    checkpoint: Path | None,
    meeting: Meeting,
    pipe: Connection,
    publish_pipe: Connection,
) -> None:
    """Run one rank: load, join the group, repeat rank 0's updates until its pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # The process that started this rank handles the signal. Rank 0 saves before it exits.
        signal.signal(number, signal.SIG_IGN)
    configure_logging(f"learner-{rank}", cfg.log.level)
    tell_stacks()
    device = pick_device(cfg.learner.device)
    if device.type == "cuda":
        local = rank % cfg.learner.local_ranks
        device = torch.device("cuda", (device.index or 0) + local)
    try:
        model, _ = load_start(cfg, checkpoint, device)
        pipe.send_bytes(READY)
        may_pad = cfg.learner.layout is Layout.AUTO
        # Rank 0 may take longer to load than the group's timeout.
        settled, host = json.loads(pipe.recv_bytes())
        cfg = replace(cfg, learner=with_settled(cfg.learner, settled))
        if device.type == "cpu":
            torch.set_num_threads(max(1, cfg.learner.num_threads))
        ranks = meet(cfg, rank, replace(meeting, host=meeting.host or host), device)
        trainer, _ = make_trainer(cfg, model, checkpoint, may_pad=may_pad, ranks=ranks)
        serving = (trainer.live_weights(), publish_pipe)
        threading.Thread(target=_serve_weights, args=serving, daemon=True).start()
        while True:
            kind, version, must_train, must_skip, num_bytes = json.loads(pipe.recv_bytes())
            with ranks.in_touch("the broadcast of an order"):
                payload = ranks.receive(num_bytes) if num_bytes else b""
            trainer.carry_out(RankOperation(kind, version, must_train, must_skip, payload))
    except (EOFError, BrokenPipeError):  # The process that started this rank has ended.
        leave(0)
    except RankLost:
        logger.error("this rank ended", exc_info=True)
        leave(LOST_CODE)
    finally:  # Only another error leads here.
        logger.error("this rank ended with an error", exc_info=True)
        leave(1)


def _serve_weights(weights: LiveWeights, pipe: Connection) -> None:
    """Send rank 0 this rank's shard of each requested part, in parallel with training."""
    lower_priority()
    try:
        while True:
            weights.serve(pipe.recv_bytes())
    except (EOFError, BrokenPipeError):  # The process that started this rank has ended.
        return
    except RankLost:
        logger.error("this rank stopped serving weights", exc_info=True)
        leave(LOST_CODE)
    except LongstrideError:
        logger.error("this rank stopped serving weights", exc_info=True)
        leave(1)

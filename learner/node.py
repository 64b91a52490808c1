"""A further node of the learner: it starts ranks, and passes the orders of rank 0 to them."""

import hashlib
import logging
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

from common.config.learner import ShardPlace
from common.config.run_config import RunConfig
from common.errors import LongstrideError, PeerMissing
from common.host.process_settings import cache_home
from common.join.enrol import Joined
from common.weights.rendezvous import StorePlace
from common.wire.addresses import host_of, local_address_towards, node_name, reachable
from common.wire.codec import decode, encode
from common.wire.messages import (
    NodeState,
    RankBeat,
    RankChannel,
    RankOrder,
    RankSeat,
    RanksPlace,
    RanksRequest,
)
from common.wire.sockets import connect_dealer
from learner.training.rank_processes import FilePlace, Meeting, RankFiles, RankProcesses
from learner.training.shard_home import ShardHome

BEAT_S = 1.0  # Seconds between two beats.
WEIGHTS = "*.safetensors"


class RankService:
    """The ranks of this node for one start of rank 0, and the connection to it."""

    def __init__(
        self, cfg: RunConfig, joined: Joined, number: int, address: str, incarnation: str
    ) -> None:
        """Connect to rank 0 at `address`. The ranks start with its first answer."""
        self._cfg = cfg
        self._joined = joined
        self._keys = joined.key.as_keys()
        self._number = number
        self._address = address
        self._incarnation = incarnation
        self._silence_s = cfg.scheduler.dead_after_s
        self._context = zmq.Context()
        self._socket: Any = connect_dealer(self._context, self._keys, address=address)
        self._processes: RankProcesses | None = None
        self._state = NodeState.WAITING
        self._error = ""
        self._heard_at = time.monotonic()
        self._beat_at = 0.0
        self._folder = Path(tempfile.mkdtemp(prefix="longstride-ranks-"))
        self.is_finished = False  # The run is over.
        self.is_ended = False  # This start of rank 0 is over.

    def work(self, process: str) -> None:
        """Wait up to `POLL_S` for messages of rank 0; handle them, and check the ranks."""
        is_heard = bool(self._socket.poll(int(POLL_S * 1_000)))
        while self._socket.poll(0):
            self._process_message(decode(self._socket.recv_multipart()))
        now = time.monotonic()
        if is_heard:
            self._heard_at = now
        elif now - self._heard_at > self._silence_s:
            logger.error("rank 0 at %s sent nothing for %.0f s", self._address, self._silence_s)
            self.is_ended = True
        if self._update_state() or now >= self._beat_at:
            self._beat_at = now + BEAT_S
            self._send_heartbeat(process)

    def _process_message(self, message: object) -> None:
        """Process one message of rank 0."""
        match message:
            case RankSeat():
                if self._processes is None and self._state is NodeState.WAITING:
                    self._start(message)
            case RankOrder(channel=RankChannel.FINISH):
                self.is_finished = True
            case RankOrder(channel=RankChannel.STOP):
                self.is_ended = True
            case RankOrder():
                self._forward_order(message)
            case _:
                logger.error("rank 0 sent an unexpected message: %.200r", message)
                self.is_ended = True

    def _forward_order(self, order: RankOrder) -> None:
        """Send an order to the ranks. `_update_state` reports a rank that has ended."""
        if self._processes is None or self._state is not NodeState.LOADED:
            return
        is_training = order.channel is RankChannel.TRAINING
        send = self._processes.tell if is_training else self._processes.ask
        try:
            send(order.content)
        except LongstrideError as error:
            logger.error("%s", error)

    def _start(self, seat: RankSeat) -> None:
        """Start the ranks of this node."""
        self._state = NodeState.LOADING
        learner = self._cfg.learner
        first = self._number * learner.local_ranks
        ranks = range(first, first + learner.local_ranks)
        try:
            cfg, checkpoint, meeting = self._prepared(seat)
        except LongstrideError as error:
            self._state = NodeState.FAILED
            self._error = str(error)
            return
        self._processes = RankProcesses(cfg, ranks, checkpoint, meeting)
        logger.info("started ranks=%s pids=%s", [*ranks], self._processes.pids)

    def _prepared(self, seat: RankSeat) -> tuple[RunConfig, Path | None, Meeting]:
        """Return the configuration, the checkpoint and the rendezvous of this node's ranks.

        If the run directory is on a shared disk, the ranks use its files directly. If not, they use
        copies of the small files, and read the weights from rank 0's node.

        Raises:
            LongstrideError: rank 0's node does not send a file, or `learner.shard_folder` cannot be
                written.
        """
        rank_0 = host_of(self._address)
        place = StorePlace(rank_0, seat.store_port, seat.store_public, seat.store_secret)
        host = local_address_towards(rank_0)
        home = self._shard_home(host)
        meeting = Meeting(place=place, group=seat.group_key, host=host, home=home)
        is_shared = _content(Path(seat.probe)) == seat.incarnation
        mirrored: dict[str, str] = {}
        files = FilePlace(address=self._address, keys=self._keys, mirrored=mirrored)
        service = RankFiles(files)
        try:

            def local(remote: str) -> str:
                """Return a model's folder on this node; copy its small files first if necessary."""
                if not remote or (is_shared and any(Path(remote).glob(WEIGHTS))):
                    return remote
                folder = self._folder / str(len(mirrored))
                service.mirror(remote, folder)
                mirrored[str(folder)] = remote
                return str(folder)

            checkpoint = local(seat.checkpoint)
            cfg = self._with_folders(local)
        finally:
            service.close()
        if mirrored or not is_shared:
            meeting = replace(meeting, files=files)
            if cfg.learner.checkpoint_shards is ShardPlace.OWN_NODE:
                home.check()
        return cfg, Path(checkpoint) if checkpoint else None, meeting

    def _shard_home(self, host: str) -> ShardHome:
        """Return this node's folder for the checkpoint files of this run."""
        key = self._joined.key
        run = f"{key.run}-{hashlib.sha256(key.server_public.encode()).hexdigest()[:8]}"
        parent = self._cfg.learner.shard_folder or cache_home() / "longstride" / "shards"
        return ShardHome(
            node=self._number,
            host=socket.gethostname(),
            address=host,
            folder=Path(parent).absolute() / run,
            start=self._incarnation,
        )

    def _with_folders(self, local: Callable[[str], str]) -> RunConfig:
        """Return the configuration with this node's folders in place of those of rank 0's node."""
        cfg = self._cfg
        algorithm = cfg.algorithm
        critic = cfg.learner.critic
        path = cfg.model.path
        model = replace(cfg.model, path=local(path) if path == self._joined.base else path)
        reference = algorithm.reference_path
        # The path of the policy itself stays equal to `model.path`.
        reference = model.path if reference == path else local(reference)
        learner = replace(cfg.learner, critic=replace(critic, path=local(critic.path)))
        algorithm = replace(algorithm, reference_path=reference)
        return replace(cfg, model=model, learner=learner, algorithm=algorithm)

    def _update_state(self) -> bool:
        """Update the state of the ranks; return whether it has changed."""
        before = self._state
        if self._processes is not None and before in (NodeState.LOADING, NodeState.LOADED):
            try:
                if self._processes.have_loaded():
                    self._state = NodeState.LOADED
            except LongstrideError as error:
                is_cut = self._processes.are_disconnected
                self._state = NodeState.DISCONNECTED if is_cut else NodeState.FAILED
                self._error = str(error)
                logger.error("%s", error)
        return self._state is not before

    def _send_heartbeat(self, process: str) -> None:
        """Send rank 0 the state of this node's ranks."""
        beat = RankBeat(
            name=self._joined.key.name,
            incarnation=self._incarnation,
            process=process,
            node=node_name(self._joined.address),
            host=local_address_towards(host_of(self._address)),
            state=self._state,
            error=self._error,
        )
        try:
            self._socket.send_multipart(encode(beat), zmq.NOBLOCK)
        except zmq.Again:
            logger.warning("queue to rank 0 is full")

    def close(self) -> None:
        """End the ranks, close the connection, and remove the copied files."""
        if self._processes is not None:
            self._processes.stop()
        self._socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)


def _content(path: Path) -> str:
    """Return the text of a file, "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


logger = logging.getLogger(__name__)

ASK_S = 1.0  # Seconds between two requests to the scheduler.
POLL_S = 0.25  # Maximum seconds of one poll.
LOG_S = 30.0  # Seconds between two log lines of a wait for rank 0.


def run_joined(cfg: RunConfig, joined: Joined) -> None:
    """Serve the learner of a run with the ranks of this node, until the run is over.

    Raises: PeerMissing: no learner has registered within `learner.join_timeout_s`.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    node = LearnerNode(cfg, joined, stop)
    try:
        node.run()
    finally:
        node.close()


class LearnerNode:
    """The node process. Its ranks are its child processes. It needs no run directory.

    Example: the scheduler sends the place of rank 0. The node sends beats there and receives the
    rendezvous. It copies the small files of the models, starts its ranks and reports that they have
    loaded. Then it passes on orders. Rank 0 restarts -> the scheduler has another place, or rank 0
    is silent. The node ends its ranks, and starts new ones for the new rank 0.
    """

    def __init__(self, cfg: RunConfig, joined: Joined, stop: threading.Event) -> None:
        """Connect to the scheduler; `stop` ends the node."""
        self._cfg = cfg
        self._joined = joined
        self._stop = stop
        self._number = int(joined.key.name.rpartition("-")[2])
        self._process = secrets.token_hex(6)
        self._keys = joined.key.as_keys()
        self._context = zmq.Context()
        self._scheduler = connect_dealer(self._context, self._keys, address=joined.address)
        self._place = RanksPlace(address="", incarnation="")  # Newest place of rank 0.
        self._ask_at = 0.0
        self._service: RankService | None = None
        self._is_over = False

    def run(self) -> None:
        """Serve one start of rank 0 after another. Raises: PeerMissing: none comes in time."""
        limit_s = self._cfg.learner.join_timeout_s
        served = ""
        idle_since = time.monotonic()
        log_at = idle_since + LOG_S
        while not (self._stop.is_set() or self._is_over):
            self._ask()
            if self._place.address and self._place.incarnation != served:
                served = self._place.incarnation
                self._serve(self._place)
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > limit_s:
                raise PeerMissing(
                    f"node {self._number} of the learner: no learner of the run has registered at"
                    f" {self._joined.address} within learner.join_timeout_s={limit_s:g}"
                )
            elif time.monotonic() > log_at:
                log_at = time.monotonic() + LOG_S
                logger.info("waiting for the learner's rank 0 scheduler=%s", self._joined.address)
            self._scheduler.poll(int(POLL_S * 1_000))

    def _ask(self) -> None:
        """Receive the scheduler's answers, and request the place of rank 0 again if it is due."""
        while self._scheduler.poll(0):
            message = decode(self._scheduler.recv_multipart())
            if isinstance(message, RanksPlace):
                self._place = message
                self._is_over = self._is_over or message.is_finished
        if time.monotonic() >= self._ask_at:
            self._ask_at = time.monotonic() + ASK_S
            try:
                request = RanksRequest(name=self._joined.key.name)
                self._scheduler.send_multipart(encode(request), zmq.NOBLOCK)
            except zmq.Again:
                logger.warning("queue to the scheduler is full")

    def _serve(self, place: RanksPlace) -> None:
        """Serve one start of rank 0 until it ends, or until this node loses it."""
        address = reachable("learner", place.address, scheduler=self._joined.address)
        logger.info("serving rank 0 address=%s node=%d", address, self._number)
        service = RankService(self._cfg, self._joined, self._number, address, place.incarnation)
        try:
            while not (self._stop.is_set() or service.is_finished or service.is_ended):
                service.work(self._process)
                self._ask()
                if self._place.incarnation not in ("", place.incarnation):
                    logger.warning("rank 0 has restarted")
                    return
            self._is_over = self._is_over or service.is_finished
        finally:
            service.close()

    def close(self) -> None:
        """Close the connection to the scheduler."""
        self._scheduler.close(linger=0)
        self._context.term()

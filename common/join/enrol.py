"""Client of a joining node: requests a place, the configuration and the model's files."""

import logging
import shutil
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
import zmq
from zmq.utils.monitor import parse_monitor_message

from common.errors import ConfigError, WireError
from common.host.process_settings import cache_home
from common.join.files import check_bounds, is_intact, manifest_digest
from common.wire.addresses import bracketed
from common.wire.codec import decode, encode
from common.wire.messages import (
    NAME_IN_USE,
    SCHEMA_VERSION,
    Enrolment,
    FilePart,
    FileRequest,
    JoinRequest,
    Rejected,
    SharedFile,
)
from common.wire.security import JoinKey
from common.wire.sockets import connect_dealer
from common.wire.versions import accepted_version

logger = logging.getLogger(__name__)

ANSWER_S = 30.0  # Timeout of each answer. The scheduler may still be starting.
POLL_S = 0.25
AGAIN_S = 1.0  # Seconds between two requests for a name that is in use.
SAME_VERSION = "install the same version on both machines"


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Everything that an accepted node received from the scheduler."""

    address: str  # Address of the scheduler, tcp://.
    key: JoinKey  # Key of this node, with the name under which it sends messages.
    config: str  # YAML
    model_path: str  # Folder with the model's configuration and tokenizer; "": none was sent.
    # Keys of `config` that have the default of the run's code.
    defaults: frozenset[str] = frozenset()

    @property
    def base(self) -> str:
        """Folder of the model on the scheduler's machine."""
        return yaml.safe_load(self.config)["model"]["path"]

    @property
    def source(self) -> str:
        """Name and commit of the run's model; "" if the run was given a folder."""
        return yaml.safe_load(self.config)["model"].get("source", "")

    @property
    def quantised(self) -> str:
        """Path of the run's quantised model on the scheduler's machine; "" for another model."""
        return yaml.safe_load(self.config)["model"].get("quantised", "")

    @property
    def sends_adapters(self) -> bool:
        """Whether the run sends adapters only, without the weights that they are added to."""
        return yaml.safe_load(self.config)["learner"]["lora"]["rank"] > 0


def parse_address(text: str) -> str:
    """Return the tcp:// address of "HOST:PORT". Raises: ConfigError: the text is invalid."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise ConfigError(f"--join {text}: expects HOST:PORT of the scheduler, as in its log")
    return f"tcp://{bracketed(host.strip('[]'))}:{port}"


def enrol(
    address: str, key: JoinKey, request: JoinRequest, *, timeout_s: float = ANSWER_S
) -> Joined:
    """Request to join; return the scheduler's data. Its files are saved in the cache folder.

    Raises:
        ConfigError: no scheduler answers in time, the key belongs to another run, the versions
            differ, or the scheduler refuses. No files remain then.
    """
    context = zmq.Context()
    try:
        with closing(_SchedulerConnection(context, address, key, timeout_s)) as connection:
            own_key = key
            if not key.name:
                public, secret = (half.decode() for half in zmq.curve_keypair())
                own_key = replace(
                    key, client_public=public, client_secret=secret, name=request.name
                )
            request = replace(request, name=own_key.name, public_key=own_key.client_public)
            enrolment = connection.ask(request, Enrolment)
            check_bounds(enrolment.files)
            folder = _download_files(connection, enrolment.files) if enrolment.files else None
            logger.info("joined run=%s files=%d", enrolment.run_name, len(enrolment.files))
    finally:
        context.destroy(linger=0)
    return Joined(
        address=address,
        key=own_key,
        config=enrolment.config,
        model_path=str(folder or ""),
        defaults=frozenset(enrolment.defaults),
    )


class _SchedulerConnection:
    """A connection for requests to a scheduler that may be unreachable or reject the key."""

    def __init__(self, context: zmq.Context[Any], address: str, key: JoinKey, timeout_s: float):
        self._where = address.removeprefix("tcp://")
        self._timeout_s = timeout_s
        self._was_connected = False
        self._version = SCHEMA_VERSION  # Schema version that the scheduler understands.
        keys = key.as_keys()
        self._socket = connect_dealer(context, keys, address=address)
        self._monitor = self._socket.get_monitor_socket()

    def ask(self, question: Any, kind: type) -> Any:
        """Return the answer of type `kind`. Raises: ConfigError: no such answer; has a remedy."""
        deadline = time.monotonic() + self._timeout_s
        last = ""
        self._send(question)
        while time.monotonic() < deadline:
            self._watch()
            if not self._socket.poll(int(POLL_S * 1_000)):
                continue
            try:
                frames = self._socket.recv_multipart()
                answer = decode(frames)
                version = accepted_version(answer, frames, current=self._version)
            except WireError as error:
                remedy = f"refused: {error}; {SAME_VERSION}"
                raise ConfigError(f"--join {self._where}: {remedy}") from error
            if version != self._version:
                self._version = version
                self._send(question)
                continue
            if isinstance(answer, Rejected) and answer.reason.startswith(NAME_IN_USE):
                last = answer.reason  # An earlier process of this node may not be timed out yet.
                time.sleep(AGAIN_S)
                self._send(question)
                continue
            if isinstance(answer, Rejected):
                raise ConfigError(f"--join {self._where}: refused: {answer.reason}")
            if isinstance(answer, kind):
                return answer
        if last:
            raise ConfigError(f"--join {self._where}: refused: {last}; use another name")
        if self._was_connected:
            raise ConfigError(
                f"--join {self._where}: no answer within {self._timeout_s:g} s. Either no scheduler"
                " listens there, or the key belongs to another run. Copy keys/join.key of this run"
            )
        raise ConfigError(
            f"--join {self._where}: no connection within {self._timeout_s:g} s. Check that the run"
            " is running with scheduler.host=0.0.0.0, and that the port is open"
        )

    def _send(self, question: Any) -> None:
        self._socket.send_multipart(encode(question, self._version))

    def _watch(self) -> None:
        """Record a connection in `_was_connected`. Raises: ConfigError: the key was refused."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            self._was_connected |= event == zmq.EVENT_CONNECTED
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise ConfigError(
                    f"--join {self._where}: the key belongs to another run; copy keys/join.key of"
                    " this run"
                )

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


def _download_files(connection: _SchedulerConnection, files: list[SharedFile]) -> Path:
    """Return the folder of the downloaded files. An earlier node's intact files are used."""
    parent = cache_home() / "longstride" / "joined"
    folder = parent / manifest_digest(files)
    if all(is_intact(folder / file.name, file) for file in files):
        return folder
    try:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = Path(tempfile.mkdtemp(dir=parent, prefix=".taking-"))
    except OSError as error:
        remedy = "set XDG_CACHE_HOME to a writable folder"
        raise ConfigError(f"{parent}: {error.strerror}; {remedy}") from error
    try:
        for file in files:
            _download_file(connection, file, temporary / file.name)
        try:
            temporary.rename(folder)
        except OSError:  # Another node of this machine has created the folder, and may read it.
            if not all(is_intact(folder / file.name, file) for file in files):
                shutil.rmtree(folder, ignore_errors=True)
                temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _download_file(connection: _SchedulerConnection, file: SharedFile, path: Path) -> None:
    """Download one file in parts. Raises: ConfigError: the result is not the announced file."""
    with path.open("wb") as out:
        while out.tell() < file.num_bytes:
            part = connection.ask(FileRequest(name=file.name, offset_bytes=out.tell()), FilePart)
            left = file.num_bytes - out.tell()
            is_next = part.name == file.name and part.offset_bytes == out.tell()
            if not is_next or not 0 < len(part.content) <= left:
                raise ConfigError(f"{file.name}: the scheduler sent a part that was not requested")
            out.write(part.content)
    if not is_intact(path, file):
        raise ConfigError(
            f"{file.name}: damaged in transfer, or changed during the transfer; join again"
        )
